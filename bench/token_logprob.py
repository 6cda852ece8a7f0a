"""What log-probs without logits cost: memory, operations, time, precision.

  python bench/token_logprob.py [--topology=v5p:2x2x1] [--tokens=16384]
      [--dim=4096] [--vocab=151936]

Compiles forward and backward of ``token_logprob`` for one chip of a TPU that
need not be there, beside the definition (all logits at once), a scan over rows,
and a pass that makes the gradient in the forward pass; then measures on the CPU
how far the unembedding's gradient is from float64, through the same code at a
smaller shape. Prints one JSON line. Nothing here has run on a TPU: bytes are
the compiler's, operations are counted in what it made with loops multiplied
out, and seconds are its cycles, the kernel's from operations and bytes at peak.
"""

import argparse
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from darl_jax.kernels.token_logprob import block_sizes, ops, ref, scan
from darl_jax.planner import chips, hlo_cost, topology

_TEMPERATURE = 0.7
_CHUNK = 1024
# Of the measurement of precision.
_ROWS, _DIM, _VOCAB = 2048, 128, 8192


def blocked(hidden, unembedding, targets):
  """The public function's way at any size."""
  return ops.blocked(
    hidden,
    unembedding,
    targets,
    None,
    _TEMPERATURE,
    None,
    block_sizes.SCAN_BLOCK,
  )[0]


def definition(hidden, unembedding, targets):
  return ref.token_logprob(
    hidden, unembedding, targets, temperature=_TEMPERATURE
  )[0]


def by_rows(hidden, unembedding, targets):
  """A scan over chunks of rows that recomputes the logits of each."""
  chunks = (
    hidden.reshape(-1, _CHUNK, hidden.shape[1]),
    targets.reshape(-1, _CHUNK),
  )

  def step(_, chunk):
    return None, jax.checkpoint(definition)(chunk[0], unembedding, chunk[1])

  return jax.lax.scan(step, None, chunks)[1].reshape(-1)


def gradient_of(logprob):
  """Log-probs' weighted sum and its gradients."""

  def loss(hidden, unembedding, targets, weights):
    return jnp.sum(weights * logprob(hidden, unembedding, targets))

  return jax.value_and_grad(loss, argnums=(0, 1))


def fused(hidden, unembedding, targets, weights):
  """Log-probs consumed where they are made: no logit is computed twice.

  Stands for a loss whose derivative by a token's log-prob depends on that
  log-prob alone, as the clipped objective's does; here weights * exp(logp).
  """

  def step(d_unembedding, chunk):
    hidden, targets, weights = chunk
    table = unembedding.astype(hidden.dtype)
    dot = jax.lax.dot_general
    z = dot(
      hidden,
      table,
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    z /= _TEMPERATURE
    z -= jnp.max(z, axis=1, keepdims=True)
    probs = jnp.exp(z)
    probs /= jnp.sum(probs, axis=1, keepdims=True)
    entry = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    is_target = entry == targets[:, None]
    chosen = jnp.sum(jnp.where(is_target, probs, 0.0), axis=1)
    scale = weights * chosen / _TEMPERATURE
    dz = (scale[:, None] * (is_target - probs)).astype(hidden.dtype)
    d_hidden = dot(
      dz,
      table,
      (((1,), (0,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    d_unembedding += dot(
      dz,
      hidden,
      (((0,), (0,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    return d_unembedding, (
      jnp.sum(weights * chosen),
      d_hidden.astype(hidden.dtype),
    )

  chunks = jax.tree.map(
    lambda x: x.reshape(-1, _CHUNK, *x.shape[1:]), (hidden, targets, weights)
  )
  zeros = jnp.zeros(unembedding.shape, jnp.float32)
  d_unembedding, (losses, d_hidden) = jax.lax.scan(step, zeros, chunks)
  return (
    jnp.sum(losses),
    d_hidden.reshape(hidden.shape),
    d_unembedding.astype(unembedding.dtype),
  )


def kernel_forward(hidden, unembedding, targets, weights):
  del weights
  return blocked(hidden, unembedding, targets)


def scan_forward(hidden, unembedding, targets, weights):
  del weights
  return scan.statistics(
    hidden,
    unembedding,
    targets,
    None,
    temperature=_TEMPERATURE,
    block=block_sizes.SCAN_BLOCK,
  )[:4]  # The likeliest token is only needed for the gradient.


def compiled_cost(f, shape, dtype, *, device, chip) -> dict[str, float | str]:
  """Bytes, operations and seconds of a program on one chip."""
  tokens, dim, vocab = shape
  sharding = SingleDeviceSharding(device)

  def like(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  lowered = jax.jit(f).lower(
    like((tokens, dim), jnp.bfloat16),
    like((vocab, dim), dtype),
    like((tokens,), jnp.int32),
    like((tokens,), jnp.float32),
  )
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:  # Out of memory.
    return {"does_not_compile": str(error).splitlines()[0]}
  cost = hlo_cost.analyze(compiled.as_text())
  result = {
    "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    "flops": cost.flops,
    "flops_over_2ndv": cost.flops / (2 * tokens * dim * vocab),
    "hbm_bytes": cost.bytes,
    "unknown_loops": len(cost.unknown_loops),
  }
  kernel = max(
    cost.kernel_flops / chip.flops_per_s,
    cost.kernel_bytes / chip.hbm_bytes_per_s,
  )
  if chip.clock_hz:
    result["seconds"] = (
      cost.cycles / chip.clock_hz
      + cost.unestimated_bytes / chip.hbm_bytes_per_s
      + kernel
    )
    result["seconds_at_peak_in_kernel"] = kernel
  return result


def gradient_errors(scale: float) -> dict[str, float]:
  """Relative errors, in the norm, of the unembedding's gradient.

  Args:
    scale: Of the logits; the larger, the more peaked the distribution. Targets
      are drawn from it, and weights are normal, as advantages are.
  """
  rng = np.random.default_rng(0)
  rows = (scale * rng.normal(size=(_ROWS, _DIM))).astype(ml_dtypes.bfloat16)
  table = rng.normal(size=(_VOCAB, _DIM)) / np.sqrt(_DIM)
  table = table.astype(ml_dtypes.bfloat16)
  exact_rows, exact_table = rows.astype(np.float64), table.astype(np.float64)
  logits = exact_rows @ exact_table.T / _TEMPERATURE
  probs = np.exp(logits - logits.max(1, keepdims=True))
  probs /= probs.sum(1, keepdims=True)
  cumulative = probs.cumsum(1)
  draws = rng.random((_ROWS, 1)) * cumulative[:, -1:]
  targets = (cumulative < draws).sum(1).astype(np.int32)
  weights = rng.normal(size=_ROWS).astype(np.float32)
  one_hot = np.arange(_VOCAB) == targets[:, None]
  dz = weights[:, None] * (one_hot - probs) / _TEMPERATURE
  expected = dz.T @ exact_rows

  def error(got) -> float:
    difference = np.asarray(got, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))

  rounded = dz.astype(ml_dtypes.bfloat16).astype(np.float64)
  entropy = -np.sum(probs * np.log(np.maximum(probs, 1e-300)), axis=1)
  result = {
    "logit_scale": scale / _TEMPERATURE,
    "mean_entropy": float(entropy.mean()),
    "of_rounding_the_result": error(expected.astype(ml_dtypes.bfloat16)),
    "of_rounding_dz": error(rounded.T @ exact_rows),
  }
  for name, dtype in (("bfloat16", jnp.bfloat16), ("float32", jnp.float32)):
    for way, logprob in (("blocked", blocked), ("definition", definition)):
      gradient = jax.jit(gradient_of(logprob))(
        jnp.asarray(rows), jnp.asarray(table, dtype), targets, weights
      )[1][1]
      result[f"{way}_{name}"] = error(gradient)
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--topology", default="v5p:2x2x1")
  parser.add_argument("--tokens", type=int, default=16_384)
  parser.add_argument("--dim", type=int, default=4096)
  parser.add_argument("--vocab", type=int, default=151_936)
  flags = parser.parse_args()
  if flags.tokens % _CHUNK:
    parser.error(f"--tokens must be a multiple of {_CHUNK}")
  jax.config.update("jax_platforms", "cpu")
  device = topology.devices(flags.topology)[0]
  chip = chips.of_device(device.device_kind)
  shape = flags.tokens, flags.dim, flags.vocab
  programs = {
    "blocked": gradient_of(blocked),
    "definition": gradient_of(definition),
    "by_rows": gradient_of(by_rows),
    "fused": fused,
    "forward_kernel": kernel_forward,
    "forward_scan": scan_forward,
  }
  result = {"topology": flags.topology, "shape": shape}
  for name, dtype in (("bfloat16", jnp.bfloat16), ("float32", jnp.float32)):
    costs = {
      program: compiled_cost(f, shape, dtype, device=device, chip=chip)
      for program, f in programs.items()
    }
    whole = costs["definition"]
    for program in ("blocked", "by_rows", "fused"):
      for key in ("temporary_bytes", "flops", "seconds"):
        if key in costs[program] and key in whole:
          costs[program][f"{key}_ratio"] = costs[program][key] / whole[key]
    result[f"unembedding_{name}"] = costs
  result["gradient_errors"] = [
    gradient_errors(scale) for scale in (0.3, 2.0, 4.0, 8.0)
  ]
  print(json.dumps(result))


if __name__ == "__main__":
  main()
