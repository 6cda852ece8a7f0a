"""Asynchronous GRPO held near the policy that the run began with.

The estimator and its weight are those of arXiv:2402.03300. It costs a second
set of parameters and a forward pass.
"""

from ml_collections import config_dict

from configs import async_grpo


def get_config() -> config_dict.ConfigDict:
  config = async_grpo.get_config()
  config.objective.kl_coefficient = 0.04
  config.objective.kl_target = "reference"
  config.objective.kl_estimator = "k3"
  return config
