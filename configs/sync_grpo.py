"""Synchronous GRPO: each batch is sampled by the policy that it trains.

One thread, deterministic: the baseline, and the debugger.
"""

from ml_collections import config_dict

from configs import darl


def get_config() -> config_dict.ConfigDict:
  config = darl.get_config()
  config.replay.max_staleness = 0
  config.replay.num_snapshots = 1
  config.replay.max_uses = 1
  config.replay.selection_mode = "random"
  config.replay.max_metric = float("inf")
  config.rollout.prompts_per_batch = 32  # No more than one batch trains on.
  config.objective.behavior_weighting = "pooled"
  return config
