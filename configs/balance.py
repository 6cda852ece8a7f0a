"""Decoupled PPO that weighs by the balance heuristic over the ring's snapshots.

Each trajectory counts as a sample of the mixture of all of them (Veach and
Guibas, 1995), whichever it was.
"""

from ml_collections import config_dict

from configs import decoupled_ppo


def get_config() -> config_dict.ConfigDict:
  config = decoupled_ppo.get_config()
  config.objective.behavior_weighting = "balance"
  # One snapshot samples a whole trajectory, which has its probability then.
  config.rollout.weight_update = "drain"
  return config
