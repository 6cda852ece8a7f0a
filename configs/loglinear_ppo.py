"""Decoupled PPO whose proximal policy is log-linear (method 6), asynchronous.

It costs no forward pass; tokens far from it on either side are left out.
"""

from ml_collections import config_dict

from configs import decoupled_ppo


def get_config() -> config_dict.ConfigDict:
  config = decoupled_ppo.get_config()
  config.objective.proximal = "loglinear"
  config.objective.token_filter = "two_sided"
  config.objective.filter_bound = 2.0
  return config
