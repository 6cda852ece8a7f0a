"""Asynchronous GRPO: stale samples, one use each, no selection among them.

Ratios are clipped around the policy that sampled each token, all alike.
"""

from ml_collections import config_dict

from configs import darl


def get_config() -> config_dict.ConfigDict:
  config = darl.get_config()
  config.replay.max_uses = 1
  config.replay.selection_mode = "random"
  config.replay.max_metric = float("inf")
  config.objective.behavior_weighting = "pooled"
  return config
