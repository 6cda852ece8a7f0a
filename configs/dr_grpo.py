"""Dr. GRPO (arXiv:2503.20783), asynchronous: rewards centred, not scaled."""

from ml_collections import config_dict

from configs import async_grpo


def get_config() -> config_dict.ConfigDict:
  config = async_grpo.get_config()
  config.objective.advantage = "group_centered"
  return config
