"""Random pages for the tests, and attention over them in float64."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from darl_jax.kernels.paged_attention.ref import Bounds, Scales

PAGE = 16
WIDTH = 6

# Head tokens, head pages and own tokens of an entry, of pages of ``PAGE``.
CASES = {
  "empty": (0, 0, 0),
  "empty behind a head": (0, 2, 0),
  "one token": (1, 1, 0),
  "one own token": (0, 0, 1),
  "aligned": (2 * PAGE, 2, 2 * PAGE),
  "hole": (PAGE + 3, 2, PAGE + 5),
  "hole of pages": (5, 3, 7),
  "all of a hole's block": (3, 4, 2 * PAGE),
  "full": (WIDTH * PAGE, WIDTH, 0),
  "full of its own": (0, 0, WIDTH * PAGE),
}


class Inputs(NamedTuple):
  """Arguments of ``ref.paged_attention``, as numpy arrays."""

  query: np.ndarray
  keys: np.ndarray
  values: np.ndarray
  table: np.ndarray
  bounds: Bounds
  scales: Scales | None

  def arrays(self) -> "Inputs":
    return jax.tree.map(jnp.asarray, self)


def make(
  cases=tuple(CASES),
  *,
  rows_per_entry=1,
  heads=(8, 2),
  head_dim=128,
  page_tokens=PAGE,
  dtype="float32",
  garbage=np.nan,
  scale=1.0,
  seed=0,
) -> Inputs:
  """An entry for each case; every slot that is not valid holds garbage."""
  rng = np.random.default_rng(seed)
  num_heads, kv_heads = heads
  entries = len(cases)
  bounds = Bounds(*np.array([CASES[case] for case in cases], "i4").T)
  factor = page_tokens // PAGE
  bounds = bounds._replace(
    head_tokens=bounds.head_tokens * factor,
    own_tokens=bounds.own_tokens * factor,
  )
  num_pages = entries * WIDTH + 3
  table = 1 + rng.permutation(num_pages - 1)[: entries * WIDTH]
  table = table.reshape(entries, WIDTH).astype("i4")
  shape = (num_pages, kv_heads, page_tokens, head_dim)
  keys, values = rng.normal(size=(2, *shape)) * scale
  valid = np.zeros((num_pages, page_tokens), bool)
  valid[table] = mask(bounds, page_tokens).reshape(entries, WIDTH, page_tokens)
  valid = np.broadcast_to(valid[:, None], shape[:-1])
  scales = None
  if dtype == "int8":
    scales = Scales(
      *(np.abs(x).max(-1).astype("f4") / 127 for x in (keys, values))
    )
    keys, values = (
      np.round(x / s[..., None])
      for x, s in zip((keys, values), scales, strict=True)
    )
    scales = Scales(*(np.where(valid, s, garbage) for s in scales))
    garbage = -127
  query = rng.normal(size=(entries * rows_per_entry, num_heads, head_dim))
  keys, values = (
    np.where(valid[..., None], x, garbage).astype(jnp.dtype(dtype))
    for x in (keys, values)
  )
  return Inputs(
    query.astype(jnp.dtype("float32" if dtype == "int8" else dtype)),
    keys,
    values,
    np.where(_used(bounds, page_tokens), table, 0),
    bounds,
    scales,
  )


def mask(bounds: Bounds, page_tokens: int) -> np.ndarray:
  """bool [Q, slots], slot by slot."""
  result = np.zeros((len(bounds.head_tokens), WIDTH * page_tokens), bool)
  for entry, (head, pages, own) in enumerate(zip(*bounds, strict=True)):
    result[entry, :head] = True
    result[entry, pages * page_tokens : pages * page_tokens + own] = True
  return result


def _used(bounds: Bounds, page_tokens: int) -> np.ndarray:
  """bool [Q, n], pages with a valid slot; others are page 0 of the table."""
  slots = mask(bounds, page_tokens)
  return slots.reshape(len(slots), WIDTH, page_tokens).any(-1)


def exact(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
  """Row by row and head by head, in float64."""
  query, keys, values, table, bounds, scales = inputs
  batch, num_heads, head_dim = query.shape
  kv_heads, page_tokens = keys.shape[1:3]
  valid = mask(bounds, page_tokens)
  out = np.zeros(query.shape)
  lse = np.full((batch, num_heads), -np.inf)
  for row, head in np.ndindex(batch, num_heads):
    entry = row // (batch // len(table))
    kv_head = head // (num_heads // kv_heads)

    def context(pool, entry=entry, kv_head=kv_head):
      found = [pool[page, kv_head] for page in table[entry]]
      return np.concatenate(found)[valid[entry]].astype(np.float64)

    if not valid[entry].any():
      continue
    k, v = context(keys), context(values)
    if scales is not None:
      k = k * context(scales.keys)[:, None]
      v = v * context(scales.values)[:, None]
    scores = k @ query[row, head].astype(np.float64) / np.sqrt(head_dim)
    lse[row, head] = np.log(np.sum(np.exp(scores - scores.max())))
    lse[row, head] += scores.max()
    out[row, head] = np.exp(scores - lse[row, head]) @ v
  return out, lse
