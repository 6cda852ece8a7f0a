"""D-ARL on word problems with a Qwen3-1.7B shape, on 16 chips of TPU v5e.

Half of the slice trains and half samples: responses of up to 8,192 tokens.
See what it needs: python launch/plan.py --config=configs/qwen3_1p7b_v5e.py
--topology=v5e:4x4
"""

from ml_collections import config_dict

from configs import qwen3_8b_v5p
from darl_jax.models import presets


def get_config() -> config_dict.ConfigDict:
  config = qwen3_8b_v5p.get_config()
  config.model.update(presets.qwen3_1p7b())
  config.rollout.update(dict(prompts_per_batch=8, max_response_tokens=8192))
  config.replay.snapshot_bytes = 32 * 2**30
  config.learner.update(
    dict(
      learning_rate=2e-6,
      final_learning_rate=2e-7,
      microbatches=4,
      rows=32,
      row_tokens=9216,  # A prompt and a response; 9 tiles of attention.
      score_rows=8,
    )
  )
  config.mesh.train.update(dict(data=1, fsdp=8, tensor=1))
  config.mesh.rollout.update(dict(data=8, tensor=1))
  return config
