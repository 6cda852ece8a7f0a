"""M2PO (arXiv:2510.01161), asynchronous: a bound on the second moment.

The tokens that drifted most are masked until the rest is within the bound, and
the others have no clip.
"""

from ml_collections import config_dict

from configs import async_grpo


def get_config() -> config_dict.ConfigDict:
  config = async_grpo.get_config()
  config.objective.loss = "m2po"
  config.objective.m2po_max_second_moment = 0.04
  config.objective.clip_low = 1.0
  config.objective.clip_high = float("inf")
  config.objective.dual_clip = float("inf")
  return config
