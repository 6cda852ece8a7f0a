"""Decoupled PPO with a log-linear proximal policy (arXiv:2605.12070).

It costs no forward pass. Tokens whose behavior weight is far from 1 either way
are left out.
"""

from ml_collections import config_dict

from configs import decoupled_ppo


def get_config() -> config_dict.ConfigDict:
  config = decoupled_ppo.get_config()
  config.objective.proximal = "loglinear"
  config.objective.behavior_weight_mode = "band"
  return config
