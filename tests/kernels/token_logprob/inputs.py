"""Inputs of the tests of token_logprob, and the definition in float64."""

import jax.numpy as jnp
import numpy as np

FLOAT32 = (jnp.float32, jnp.float32)
BFLOAT16 = (jnp.bfloat16, jnp.bfloat16)
MIXED = (jnp.bfloat16, jnp.float32)  # float32 masters of a bfloat16 model.


def make(
  shape, *, dim=12, vocab=17, seed=0, dtypes=FLOAT32, scale=1.0, integer=False
):
  """hidden, unembedding and targets; integers make the logits exact."""
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(*shape, dim)) * scale
  unembedding = rng.normal(size=(vocab, dim)) / np.sqrt(dim)
  if integer:
    hidden, unembedding = np.round(hidden), np.round(3 * unembedding)
  targets = rng.integers(vocab, size=shape)
  return (
    jnp.asarray(hidden, dtypes[0]),
    jnp.asarray(unembedding, dtypes[1]),
    jnp.asarray(targets, jnp.int32),
  )


def make_support(targets, vocab, *, seed=0, share=0.3):
  """bool [..., V] with each target, and three odd rows where there are rows.

  The first row's support is empty, the second's lacks its target, the third's
  is its target alone.
  """
  targets = np.asarray(targets)
  rng = np.random.default_rng(seed)
  support = rng.random((*targets.shape, vocab)) < share
  np.put_along_axis(support, targets[..., None], True, axis=-1)
  flat, flat_targets = support.reshape(-1, vocab), targets.reshape(-1)
  if len(flat) > 2:
    flat[0] = False
    flat[1, flat_targets[1]] = False
    flat[2] = np.arange(vocab) == flat_targets[2]
  return support


def pack(support):
  return jnp.asarray(np.packbits(support, axis=-1, bitorder="little"))


def float64(
  hidden, unembedding, targets, *, temperature=1.0, support=None, weights=None
):
  """(logprobs, entropy), or with weights [...] also the gradients.

  The unembedding is rounded to hidden's dtype first. Rows of an empty support
  give 0, targets outside give -1e4, neither has a gradient.
  """
  rounded = np.asarray(unembedding.astype(hidden.dtype), np.float64)
  rows = np.asarray(hidden, np.float64)
  logits = rows @ rounded.T / temperature
  targets = np.asarray(targets)
  if support is None:
    support = np.ones(logits.shape, bool)
  empty = ~support.any(-1)
  logits = np.where(support | empty[..., None], logits, -np.inf)
  logits -= logits.max(-1, keepdims=True)
  probs = np.exp(logits)
  total = probs.sum(-1, keepdims=True)
  probs /= total
  chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
  inside = np.take_along_axis(support, targets[..., None], -1)[..., 0]
  logprobs = np.where(inside, chosen - np.log(total[..., 0]), -1e4)
  plogp = probs * np.where(probs > 0, logits - np.log(total), 0.0)
  entropy = -plogp.sum(-1)
  logprobs, entropy = (np.where(empty, 0.0, x) for x in (logprobs, entropy))
  if weights is None:
    return logprobs, entropy
  score = np.arange(logits.shape[-1]) == targets[..., None]
  score = (score - probs) * np.where(inside, weights, 0.0)[..., None]
  score /= temperature
  d_unembedding = np.einsum(
    "nv,nd->vd", *(x.reshape(-1, x.shape[-1]) for x in (score, rows))
  )
  return logprobs, entropy, score @ rounded, d_unembedding


def relative_error(got, expected):
  """In the norm."""
  got, expected = (np.asarray(x, np.float64) for x in (got, expected))
  return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)
