"""Named shapes of the decoder, as the ``model`` part of a config.

The published ones are from the ``config.json`` of each model on its hub page.
They compute in bfloat16, recompute all of a layer in the backward pass and
start from fresh parameters; a config may change what is not a shape.
"""

from typing import Any

# What a family without the feature writes in its fields.
UNSCALED = dict(
  rope_scaling_factor=1.0,
  rope_low_frequency_factor=1.0,
  rope_high_frequency_factor=4.0,
  rope_original_context=8192,
)
DENSE = dict(
  num_experts=0,
  experts_per_token=0,
  expert_mlp_dim=0,
  normalize_expert_weights=True,
)
# Where the parameters start, and which are trained: no part of a model's shape.
FRESH = dict(checkpoint="", lora_rank=0, lora_alpha=32.0, lora_targets="*")


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
    **UNSCALED,
    context_tokens=4096,
    norm_eps=1e-6,
    tie_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
    **DENSE,
    compute_dtype="float32",
    remat="none",
    vocab_size=0,
    **FRESH,
  )


def smollm2_135m() -> dict[str, Any]:
  """SmolLM2-135M: 134.5 M parameters, tied embeddings."""
  return dict(
    num_layers=30,
    embed_dim=576,
    mlp_dim=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100_000.0,
    **UNSCALED,
    context_tokens=8192,
    norm_eps=1e-5,
    tie_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    **DENSE,
    compute_dtype="bfloat16",
    remat="layer",
    vocab_size=49_152,
    **FRESH,
  )


def qwen3_1p7b() -> dict[str, Any]:
  """Qwen3-1.7B: 1.72 B parameters, tied embeddings."""
  return _qwen3(
    num_layers=28,
    embed_dim=2048,
    mlp_dim=6144,
    num_heads=16,
    tie_embeddings=True,
  )


def qwen3_4b() -> dict[str, Any]:
  """Qwen3-4B: 4.02 B parameters, tied embeddings."""
  return _qwen3(
    num_layers=36,
    embed_dim=2560,
    mlp_dim=9728,
    num_heads=32,
    tie_embeddings=True,
  )


def qwen3_8b() -> dict[str, Any]:
  """Qwen3-8B: 8.19 B parameters."""
  return _qwen3(
    num_layers=36,
    embed_dim=4096,
    mlp_dim=12_288,
    num_heads=32,
    tie_embeddings=False,
  )


def qwen3_14b() -> dict[str, Any]:
  """Qwen3-14B: 14.77 B parameters."""
  return _qwen3(
    num_layers=40,
    embed_dim=5120,
    mlp_dim=17_408,
    num_heads=40,
    tie_embeddings=False,
  )


def qwen3_32b() -> dict[str, Any]:
  """Qwen3-32B: 32.76 B parameters."""
  return _qwen3(
    num_layers=64,
    embed_dim=5120,
    mlp_dim=25_600,
    num_heads=64,
    tie_embeddings=False,
  )


def llama3_1_8b() -> dict[str, Any]:
  """Llama-3.1-8B: 8.03 B parameters."""
  return dict(
    num_layers=32,
    embed_dim=4096,
    mlp_dim=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
    **UNSCALED | dict(rope_scaling_factor=8.0),
    context_tokens=131_072,
    norm_eps=1e-5,
    tie_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    **DENSE,
    compute_dtype="bfloat16",
    remat="layer",
    vocab_size=128_256,
    **FRESH,
  )


def _qwen3(**shape: Any) -> dict[str, Any]:
  """What the dense models of the family have in common."""
  return dict(
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1_000_000.0,
    **UNSCALED,
    context_tokens=40_960,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    **DENSE,
    compute_dtype="bfloat16",
    remat="layer",
    vocab_size=151_936,
    **FRESH,
    **shape,
  )
