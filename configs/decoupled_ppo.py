"""Decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298), asynchronous.

The clip is centred on the policy at the start of the step; the behavior policy
enters through a detached, truncated weight.
"""

from ml_collections import config_dict

from configs import async_grpo


def get_config() -> config_dict.ConfigDict:
  config = async_grpo.get_config()
  config.objective.trust_region = "decoupled"
  config.objective.max_behavior_weight = 2.0
  config.objective.behavior_weight_mode = "truncate"
  # The clip acts between optimizer steps: with one, pi is prox throughout.
  config.learner.minibatches = 2
  return config
