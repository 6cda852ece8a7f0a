"""VCPO (arXiv:2602.17616): a step as large as its samples are worth.

Asynchronous GRPO whose optimizer steps shrink as the effective sample size of
their trajectories does. What share is worth a whole step is a choice of ours.
"""

from ml_collections import config_dict

from configs import async_grpo


def get_config() -> config_dict.ConfigDict:
  config = async_grpo.get_config()
  config.objective.step_ess_target = 0.5
  return config
