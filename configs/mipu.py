"""MIPU (arXiv:2606.29526): steps that make the sampler worse are undone.

Its first step is decoupled PPO around the policy at the start of the step; the
second judges what would be published. The tolerance is not published, and the
estimator is ours: docs/method.md.
"""

from ml_collections import config_dict

from configs import decoupled_ppo


def get_config() -> config_dict.ConfigDict:
  config = decoupled_ppo.get_config()
  config.rollback.num_prompts = 8
  config.rollback.tolerance = 0.01
  config.rollback.final_tolerance = 0.001
  return config
