"""D-ARL on word problems with a Qwen3-32B shape, on 128 chips of TPU v6e.

Half of the slice trains and half samples: responses of up to 8,192 tokens.
See what it needs: python launch/plan.py --config=configs/qwen3_32b_v6e.py
--topology=v6e:8x16
"""

from ml_collections import config_dict

from configs import qwen3_8b_v5p
from darl_jax.models import presets


def get_config() -> config_dict.ConfigDict:
  config = qwen3_8b_v5p.get_config()
  config.model.update(presets.qwen3_32b())
  config.rollout.update(dict(prompts_per_batch=32, max_response_tokens=8192))
  config.replay.snapshot_bytes = 400 * 2**30
  config.learner.update(
    dict(
      learning_rate=5e-7,
      final_learning_rate=5e-8,
      microbatches=1,
      rows=64,
      row_tokens=9216,  # A prompt and a response; 9 tiles of attention.
      score_rows=64,
    )
  )
  config.mesh.train.update(dict(data=1, fsdp=64, tensor=1))
  config.mesh.rollout.update(dict(data=8, tensor=8))
  return config
