"""GSPO (arXiv:2507.18071), asynchronous: ratios and a clip of whole answers.

An answer's ratio is the geometric mean of its tokens', and answers count alike.
"""

from ml_collections import config_dict

from configs import async_grpo


def get_config() -> config_dict.ConfigDict:
  config = async_grpo.get_config()
  config.objective.loss = "gspo"
  config.objective.gspo_clip_low = 3e-4
  config.objective.gspo_clip_high = 4e-4
  config.objective.dual_clip = float("inf")
  return config
