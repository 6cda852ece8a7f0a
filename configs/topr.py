"""TOPR (arXiv:2503.14286), asynchronous: wrong answers taper off.

A wrong answer counts by its ratio, at most 1; a right one counts in full.
"""

from ml_collections import config_dict

from configs import async_grpo


def get_config() -> config_dict.ConfigDict:
  config = async_grpo.get_config()
  config.objective.loss = "topr"
  return config
