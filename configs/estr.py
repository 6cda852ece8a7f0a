"""ESTR (arXiv:2607.22186), asynchronous: entropy-scaled trust regions.

A token may drift as far as the sampler's entropy there allows, and the clip of
GRPO follows. The threshold is not published, and is ours.
"""

from ml_collections import config_dict

from configs import async_grpo


def get_config() -> config_dict.ConfigDict:
  config = async_grpo.get_config()
  config.objective.loss = "estr"
  config.objective.estr_threshold = 0.1
  config.objective.dual_clip = float("inf")
  return config
