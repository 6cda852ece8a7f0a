"""RLOO (arXiv:2402.14740), asynchronous: a group's others are the baseline."""

from ml_collections import config_dict

from configs import async_grpo


def get_config() -> config_dict.ConfigDict:
  config = async_grpo.get_config()
  config.objective.advantage = "rloo"
  return config
