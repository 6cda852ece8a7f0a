"""RL on word problems from any published model of a supported family.

    python launch/main.py --config=configs/finetune.py:MODEL

MODEL is a folder, an id on the hub or a .gguf file, and gives the shape and the
tokenizer. The other values are where to start from; see what they need on a
slice with launch/plan.py, which takes the same argument.
"""

from ml_collections import config_dict

from configs import darl
from darl_jax.config import ConfigError
from darl_jax.models import published


def get_config(model: str = "") -> config_dict.ConfigDict:
  """The config of a run that starts from ``model``.

  Raises:
    ConfigError: No model is named, it is not there, or it uses what is not
      implemented.
  """
  if not model:
    raise ConfigError(
      [
        "no model is named. Try --config=configs/finetune.py:MODEL, with a "
        "published model's folder, its id on the hub, or a .gguf file."
      ]
    )
  config = darl.get_config()
  config.model.update(published.read_config(published.locate(model)))
  config.model.update(
    dict(checkpoint=model, compute_dtype="bfloat16", remat="layer")
  )
  # A prompt and its response, of the same length at most.
  longest = min(1024, config.model.context_tokens)
  config.num_steps = 500
  config.prompts.update(
    dict(dataset="gsm_symbolic", params="{}", max_tokens=longest // 2)
  )
  config.warm_start.steps = 0
  config.rollout.update(
    dict(
      prompts_per_batch=32,
      max_response_tokens=longest // 2,
      chunk_tokens=32,
      dtype="bfloat16",
    )
  )
  config.replay.update(
    dict(
      snapshot_bytes=64 * 2**30,
      trajectory_bytes=2**30,
      timeout_s=3600.0,
    )
  )
  config.learner.update(
    dict(
      learning_rate=1e-6,
      final_learning_rate=1e-7,
      microbatches=8,
      rows=256,
      row_tokens=longest,
      score_rows=32,
    )
  )
  config.evaluate.update(dict(every=50, num_prompts=256))
  # Sampler and learner both round to bfloat16, each in its own order.
  config.watch.max_parity_p95 = 0.1
  return config
