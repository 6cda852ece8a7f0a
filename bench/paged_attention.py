"""What decoding from pages in place saves: memory and traffic of a dispatch.

  python bench/paged_attention.py [--topology=v5p:2x2x1] [--rows=40]
      [--heads=8] [--kv_heads=2] [--layers=36] [--page_tokens=64]
      [--max_tokens=17408] [--context=8192] [--dtype=bfloat16|float32]

Compiles the attention of one dispatch, a page's worth of tokens through all
layers, for one chip of a TPU that need not be there, in three ways: the kernel,
pages gathered once for all tokens of the dispatch, and pages gathered for each
token and layer. Sizes are a device's share; the defaults are those of
configs/qwen3_8b_v5p.py. Prints one JSON line. Nothing here has run on a TPU:
temporaries are the compiler's, bytes are counted in what it made with loops
multiplied out, seconds are bytes at the chip's peak rate. For the kernel, bytes
are also given at the context's length, where the others always read as many
pages as the table is wide.
"""

import argparse
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.kernels.paged_attention import ops, ref
from darl_jax.kernels.partition import Partition
from darl_jax.planner import chips, hlo_cost, topology

_HEAD_DIM = 128


def through_layers(attention, query, layers: int, tokens: int):
  """Each token's queries depend on the last, as those of a model do."""

  def token(query, _):
    def layer(query, index):
      out, _ = attention(query, index)
      return out.astype(query.dtype), None

    return jax.lax.scan(layer, query, jnp.arange(layers))

  return jax.lax.scan(token, query, None, length=tokens)[0]


def in_place(query, keys, values, table, lengths, *, partition):
  """Through the kernel."""
  attention = functools.partial(
    _paged,
    keys=keys,
    values=values,
    table=table,
    lengths=lengths,
    partition=partition,
  )
  return through_layers(attention, query, keys.shape[0], keys.shape[4])


def _paged(query, layer, *, keys, values, table, lengths, partition):
  none = jnp.zeros_like(lengths)
  return ops.paged_attention(
    query,
    keys,
    values,
    table,
    head_tokens=lengths,
    head_pages=none,
    own_tokens=none,
    layer=layer,
    partition=partition,
  )


def gathered_once(query, keys, values, table, lengths, *, partition):
  """All pages of the table one behind the other, before the first token."""
  del partition
  layers, _, _, kv_heads, page_tokens, head_dim = keys.shape
  rows, width = table.shape

  def gather(pages):
    found = jnp.moveaxis(pages[:, 0, table], 3, 2)
    return found.reshape(layers, rows, kv_heads, width * page_tokens, head_dim)

  keys, values = gather(keys), gather(values)
  mask = jnp.arange(width * page_tokens)[None] < lengths[:, None]
  return through_layers(
    lambda query, layer: ref.attend(query, keys[layer], values[layer], mask),
    query,
    layers,
    page_tokens,
  )


def gathered_each_time(query, keys, values, table, lengths, *, partition):
  """The definition: what the kernel's function is elsewhere."""
  del partition
  layers, _, pages = keys.shape[:3]
  none = jnp.zeros_like(lengths)
  pools = [x.reshape(-1, *x.shape[3:]) for x in (keys, values)]
  return through_layers(
    lambda query, layer: ref.paged_attention(
      query,
      *pools,
      table + layer * pages,
      ref.Bounds(lengths, none, none),
      None,
    ),
    query,
    layers,
    keys.shape[4],
  )


def compiled_cost(program, flags, *, device, chip) -> dict[str, float | str]:
  """Bytes of a dispatch, and its seconds at the chip's peak rate."""
  mesh = Mesh(np.array([device]).reshape(1, 1), ("data", "tensor"))
  whole = NamedSharding(mesh, PartitionSpec())
  width = -(-flags.max_tokens // flags.page_tokens)
  # A page that nobody reads, and each row's.
  pages = 1 + flags.rows * width
  dtype = jnp.dtype(flags.dtype)
  pool = (
    flags.layers,
    1,
    pages,
    flags.kv_heads,
    flags.page_tokens,
    _HEAD_DIM,
  )
  like = functools.partial(jax.ShapeDtypeStruct, sharding=whole)
  lowered = jax.jit(
    functools.partial(
      program, partition=Partition(mesh, ("data",), "tensor", None)
    )
  ).lower(
    like((flags.rows, flags.heads, _HEAD_DIM), dtype),
    like(pool, dtype),
    like(pool, dtype),
    like((flags.rows, width), jnp.int32),
    like((flags.rows,), jnp.int32),
  )
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:  # Out of memory.
    return {"does_not_compile": str(error).splitlines()[0]}
  memory = compiled.memory_analysis()
  cost = hlo_cost.analyze(compiled.as_text())
  result = {
    "argument_bytes": memory.argument_size_in_bytes,
    "temporary_bytes": memory.temp_size_in_bytes,
    "hbm_bytes": cost.bytes,
    "seconds": cost.bytes / chip.hbm_bytes_per_s,
    "unknown_loops": len(cost.unknown_loops),
  }
  if cost.kernel_bytes:
    used = -(-flags.context // flags.page_tokens) / width
    at_context = cost.bytes - (1 - used) * cost.kernel_bytes
    result["hbm_bytes_at_context"] = at_context
    result["seconds_at_context"] = at_context / chip.hbm_bytes_per_s
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--topology", default="v5p:2x2x1")
  parser.add_argument("--rows", type=int, default=40)
  parser.add_argument("--heads", type=int, default=8)
  parser.add_argument("--kv_heads", type=int, default=2)
  parser.add_argument("--layers", type=int, default=36)
  parser.add_argument("--page_tokens", type=int, default=64)
  parser.add_argument("--max_tokens", type=int, default=17_408)
  parser.add_argument("--context", type=int, default=8192)
  parser.add_argument(
    "--dtype", default="bfloat16", choices=("bfloat16", "float32")
  )
  flags = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  device = topology.devices(flags.topology)[0]
  chip = chips.of_device(device.device_kind)
  programs = {
    "kernel": in_place,
    "gathered_once": gathered_once,
    "gathered_each_time": gathered_each_time,
  }
  result = vars(flags) | {
    name: compiled_cost(program, flags, device=device, chip=chip)
    for name, program in programs.items()
  }
  print(json.dumps(result))


if __name__ == "__main__":
  main()
