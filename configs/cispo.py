"""CISPO (arXiv:2506.13585), asynchronous: ratios clipped as detached weights.

No token loses its gradient. Only the upper bound is used, as published; its
value is not, and is ours.
"""

from ml_collections import config_dict

from configs import async_grpo


def get_config() -> config_dict.ConfigDict:
  config = async_grpo.get_config()
  config.objective.loss = "cispo"
  config.objective.clip_low = 1.0
  config.objective.clip_high = 1.0
  return config
