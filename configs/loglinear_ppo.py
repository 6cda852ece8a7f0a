"""Decoupled PPO with a log-linear proximal policy (arXiv:2605.12070).

It costs no forward pass. Tokens of too great a behavior weight are left out.
"""

from ml_collections import config_dict

from configs import decoupled_ppo


def get_config() -> config_dict.ConfigDict:
  config = decoupled_ppo.get_config()
  config.objective.proximal = "loglinear"
  config.objective.behavior_weight_mode = "mask"
  return config
