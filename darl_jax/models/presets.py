"""Named shapes of the decoder, as the ``model`` part of a config."""

from typing import Any


def nano() -> dict[str, Any]:
  """About 0.1 M parameters: learns to add on two CPU cores in minutes."""
  return dict(
    num_layers=2,
    embed_dim=64,
    mlp_dim=192,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    tie_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
    compute_dtype="float32",
    remat=False,
  )
