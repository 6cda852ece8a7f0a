"""Decoupled PPO around an average of the policies so far (arXiv:2605.12070).

It costs a second set of parameters and a forward pass, and starts anew when
too few tokens pass the mask of the behavior weight and the clip.
"""

from ml_collections import config_dict

from configs import decoupled_ppo


def get_config() -> config_dict.ConfigDict:
  config = decoupled_ppo.get_config()
  config.objective.proximal = "ewma"
  config.objective.ewma_window = config.replay.max_staleness
  config.objective.behavior_weight_mode = "band"
  return config
