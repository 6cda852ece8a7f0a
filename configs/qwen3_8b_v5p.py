"""D-ARL on word problems with a Qwen3-8B shape, on 64 chips of TPU v5p.

Half of the slice trains and half samples: responses of up to 16,384 tokens.
See what it needs: python launch/plan.py --config=configs/qwen3_8b_v5p.py
--topology=v5p:4x4x4
"""

from ml_collections import config_dict

from configs import darl
from darl_jax.models import presets


def get_config() -> config_dict.ConfigDict:
  config = darl.get_config()
  config.prompts.update(
    dict(dataset="gsm_symbolic", params="{}", max_tokens=1024, vocab_size=8192)
  )
  config.model.update(presets.qwen3_8b())
  config.model.remat = "attention"
  config.warm_start.steps = 0
  config.rollout.update(
    dict(
      prompts_per_batch=64,
      samples_per_prompt=8,
      max_response_tokens=16_384,
      chunk_tokens=64,
      dtype="bfloat16",
    )
  )
  config.rewards.workers = 8
  config.replay.update(
    dict(
      min_batch=32,
      snapshot_bytes=96 * 2**30,
      trajectory_bytes=8 * 2**30,
      timeout_s=3600.0,
    )
  )
  config.learner.update(
    dict(
      learning_rate=1e-6,
      final_learning_rate=1e-7,
      batch_size=256,
      microbatches=2,
      rows=64,
      row_tokens=17_408,  # A prompt and a response; 17 tiles of attention.
      score_rows=32,
    )
  )
  config.mesh.train.update(dict(data=1, fsdp=32, tensor=1))
  config.mesh.rollout.update(dict(data=8, tensor=4))
  config.evaluate.update(dict(every=50, num_prompts=512))
  return config
