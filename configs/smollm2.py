"""SmolLM2-135M-Instruct on sums of one and two digits, on two CPU cores.

Fetch the model first: python launch/fetch_smollm2.py. docs/published_models.md
has the learning curve.
"""

import json

from ml_collections import config_dict

from configs import sync_grpo
from darl_jax.models import presets

# Where launch/fetch_smollm2.py puts it, seen from the repository's root.
_MODEL = "runs/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def get_config() -> config_dict.ConfigDict:
  config = sync_grpo.get_config()
  config.num_steps = 50
  config.prompts.update(
    dict(
      dataset="basic_arithmetic",
      params=json.dumps(
        dict(
          min_terms=2,
          max_terms=2,
          min_digits=1,
          max_digits=2,
          operators=["+"],
          allow_parentheses=False,
        )
      ),
      # Few, or the 121 different sums of one digit were lost among the others.
      num_items=400,
      heldout_fraction=0.35,
      max_tokens=32,
      system="Give the answer.",
    )
  )
  config.model.update(presets.smollm2_135m())
  config.model.update(
    dict(checkpoint=_MODEL, compute_dtype="float32", remat="none")
  )
  # A few answers teach it to say the number alone. Asked for that it explains,
  # and hardly a sample would earn anything.
  config.warm_start.update(
    dict(steps=6, target_accuracy=1.0, batch_size=16, learning_rate=1e-5)
  )
  config.rollout.update(
    dict(
      prompts_per_batch=8,
      samples_per_prompt=8,
      max_response_tokens=7,
      chunk_tokens=3,
    )
  )
  config.replay.update(
    dict(
      min_batch=16,
      snapshot_bytes=4 * 2**30,
      timeout_s=600.0,
    )
  )
  config.learner.update(
    dict(
      learning_rate=2e-5,
      schedule="constant",
      warmup_steps=2,
      final_learning_rate=2e-5,
      batch_size=64,
      rows=8,
      row_tokens=264,  # Eight trajectories.
      score_rows=8,
    )
  )
  config.evaluate.update(dict(every=5, num_prompts=110, temperature=1.0))
  return config
