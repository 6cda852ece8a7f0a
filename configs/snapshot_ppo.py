"""Decoupled PPO around the snapshot that sampled (arXiv:2605.12070).

The ring keeps it, and the learner scores under it: all that is left of the
behavior weight is how sampler and learner differ. Where they differ much, the
token is left out.
"""

from ml_collections import config_dict

from configs import decoupled_ppo


def get_config() -> config_dict.ConfigDict:
  config = decoupled_ppo.get_config()
  config.objective.proximal = "snapshot"
  config.objective.behavior_weight_mode = "band"
  return config
