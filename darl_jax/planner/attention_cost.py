"""The cost of splash attention, whose kernels carry no estimate of their own.

JAX's kernels (jax/experimental/pallas/ops/tpu/splash_attention) write the sizes
of their blocks into the compiled module, and the rest follows from the shapes
of their operands. The mask is causal here, as ``models/attention.py`` asks:
blocks above the diagonal are skipped, whole blocks on it are computed. What
segments mask inside a block is computed too, so it does not make it cheaper.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

# By the phase in the kernel's name: matrix products for each pair of query and
# key, the block of queries and of keys that the grid steps by, and how many
# arrays like the queries and like the keys it reads or writes.
#   fwd: q k, p v                         | reads q k v, writes o
#   dq: q k, do v, ds k                   | reads q k v do, writes dq
#   dkv: q k, do v, p do, ds q            | reads q k v do, writes dk dv
_FUSED_PRODUCTS = 5  # dkv with use_fused_bwd_kernel: and ds k.
_PHASES = {
  "fwd": (2, "block_q", "block_kv"),
  "dq": (3, "block_q_dq", "block_kv_dq"),
  "dkv": (4, "block_q_dkv", "block_kv_dkv"),
}


@dataclasses.dataclass(frozen=True)
class AttentionCost:
  """Of one execution: FLOPs of the matrix products, bytes to and from HBM."""

  flops: float
  bytes: float


def splash_attention(
  name: str,
  metadata: str,
  operands: Sequence[tuple[str, tuple[int, ...], float]],
) -> AttentionCost | None:
  """The cost of a kernel by its name, or None where it is another kernel.

  Args:
    name: As given to ``pallas_call``.
    metadata: The call's text in the module, which holds the block sizes.
    operands: Element type, shape and bytes of each operand; the first three of
      a floating type are queries [..., T, H], keys [..., S, H] and values.
  """
  phase = re.match(r"splash_m[hq]a_(fwd|dq|dkv)", name)
  floating = [entry for entry in operands if entry[0] in ("f32", "bf16", "f16")]
  if not phase or len(floating) < 3:
    return None
  products, query_block, key_block = _PHASES[phase[1]]
  if phase[1] == "dkv" and re.search(r"use_fused_bwd_kernel\W+true", metadata):
    products = _FUSED_PRODUCTS
  (_, query, query_bytes), (_, key, key_bytes), _ = floating[:3]
  length, keys, head_dim = query[-2], key[-2], query[-1]
  rows = _block(metadata, query_block, length)
  columns = _block(metadata, key_block, keys)
  down, across = -(-length // rows), -(-keys // columns)
  # Blocks of the grid that reach under the diagonal.
  computed = sum(
    min(-(-(row + 1) * rows // columns), across) for row in range(down)
  )
  pairs = computed * rows * columns
  heads = math.prod(query[:-2])
  flops = 2.0 * products * heads * pairs * head_dim
  share = computed / (down * across)
  # Queries of a group share keys, which are read again for each of them.
  group = heads / math.prod(key[:-2])
  if phase[1] == "dkv":
    # Outer loop over keys: queries and do are read for each block of keys.
    moved = share * across * 2 * query_bytes + 4 * key_bytes * group
  else:
    outer = 2 if phase[1] == "fwd" else 3
    moved = outer * query_bytes + share * down * 2 * key_bytes * group
  return AttentionCost(flops, moved)


def _block(metadata: str, name: str, default: int) -> int:
  found = re.search(rf'{name}\\?":\s*(\d+)', metadata)
  return int(found[1]) if found else default
