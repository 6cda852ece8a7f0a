"""D-ARL on one-digit sums: the default run, small enough for two CPU cores.

Every default of the project is set here. The other configs start from this one
and change a few visible lines.
"""

import json

from ml_collections import config_dict

from darl_jax.models import presets


def get_config() -> config_dict.ConfigDict:
  config = config_dict.ConfigDict()
  config.seed = 0
  config.num_steps = 1200

  config.prompts = config_dict.ConfigDict(
    dict(
      dataset="chain_sum",
      params=json.dumps(
        dict(min_terms=3, max_terms=3, min_digits=1, max_digits=1)
      ),
      num_items=20_000,
      heldout_fraction=0.15,
      max_tokens=8,
      instruction="{question}",
      tokenizer="",
      system="",
      vocab_size=320,
    )
  )
  config.model = config_dict.ConfigDict(presets.nano())
  config.warm_start = config_dict.ConfigDict(
    dict(steps=300, target_accuracy=0.16, batch_size=256, learning_rate=2e-3)
  )
  config.rollout = config_dict.ConfigDict(
    dict(
      prompts_per_batch=40,
      samples_per_prompt=8,
      max_response_tokens=4,
      chunk_tokens=4,
      slots=0,
      cache_tokens=0,
      prefill_tokens=256,
      extra_samples=0,
      weight_update="swap",
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      min_p=0.0,
      stop_strings=(),
      dtype="float32",
      cache_dtype="",
    )
  )
  config.rewards = config_dict.ConfigDict(
    dict(
      workers=1,
      time_limit_s=5.0,
      memory_limit_mb=4096,
      partial_credit=0.0,
      overlong_penalty=0.0,
      overlong_buffer_tokens=0,
      require_isolation=False,
    )
  )
  config.replay = config_dict.ConfigDict(
    dict(
      num_snapshots=4,
      max_staleness=3,
      max_uses=1,
      drop_overlong=False,
      metric="variance",
      selection_mode="reject_worst",
      keep_fraction=0.5,
      # No share is rejected where all match: the worst of a matching pool are
      # wrong answers, and without them the entropy collapses. The bound, in
      # nats^2, rejects what really drifted: about 5 % here.
      reject_fraction=0.0,
      max_metric=0.1,
      max_candidates=0,
      min_batch=64,
      snapshot_bytes=256 * 2**20,
      trajectory_bytes=256 * 2**20,
      timeout_s=60.0,
    )
  )
  config.objective = config_dict.ConfigDict(
    dict(
      loss="clipped",
      advantage="group",
      reward_tolerance=1e-6,
      behavior_weighting="ess_token",
      weight_cap=2.0,
      kappa=1.0,
      trust_region="behavior",
      proximal="recompute",
      proximal_lag=1,
      ewma_window=3,
      ewma_min_passed_fraction=0.9,
      clip_low=0.2,
      clip_high=0.28,
      clip_age_decay=1.0,
      gspo_clip_low=3e-4,
      gspo_clip_high=4e-4,
      m2po_max_second_moment=0.04,
      estr_threshold=0.1,
      estr_epsilon=0.01,
      step_ess_target=0.0,
      dual_clip=3.0,
      denominator="all",
      max_behavior_weight=2.0,
      behavior_weight_mode="truncate",
      kl_coefficient=0.0,
      kl_target="behavior",
      kl_estimator="k3",
      max_versions=8,
    )
  )
  config.learner = config_dict.ConfigDict(
    dict(
      learning_rate=5e-4,
      schedule="linear",
      warmup_steps=10,
      final_learning_rate=5e-5,
      b1=0.9,
      b2=0.95,
      eps=1e-8,
      weight_decay=0.0,
      max_grad_norm=1.0,
      batch_size=256,
      minibatches=1,
      microbatches=1,
      rows=64,
      row_tokens=48,
      score_rows=32,
    )
  )
  config.rollback = config_dict.ConfigDict(
    dict(num_prompts=0, tolerance=0.01, final_tolerance=0.01, max_ratio=2.0)
  )
  config.mesh = config_dict.ConfigDict(
    dict(
      train=dict(data=1, fsdp=1, tensor=1),
      rollout=dict(data=1, tensor=1),
    )
  )
  config.evaluate = config_dict.ConfigDict(
    dict(every=200, num_prompts=512, temperature=0.0, samples_per_prompt=1)
  )
  config.watch = config_dict.ConfigDict(
    dict(
      window=20,
      patience=3,
      repeat_every=200,
      stop_on=("non_finite",),
      stop_after=10,
      min_ess_fraction=0.5,
      max_parity_p95=0.01,
      max_length_ratio=1.25,
      max_advantage_bias=5.0,
      min_entropy=0.02,
      min_entropy_fraction=0.05,
      reward_margin=0.01,
      max_lost_fraction=0.95,
      max_grad_norm_ratio=20.0,
    )
  )
  config.checkpoint = config_dict.ConfigDict(
    dict(directory="", every=100, keep_last=2, keep_best=1)
  )
  return config
