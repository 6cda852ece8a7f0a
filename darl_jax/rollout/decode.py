"""Jitted prefill and decode: prompts and parameters in, sampled tokens out."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.models import kv_cache
from darl_jax.models.transformer import Policy
from darl_jax.sharding import rules
from darl_jax.types import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampledTokens:
  """Tokens of one dispatch.

  Attributes:
    tokens: int32 [B, C]; the pad id in rows that had ended before.
    logprobs: float32 [B, C], nats, of the tempered distribution.
    entropy: float32 [B, C], nats, of the tempered distribution.
  """

  tokens: jax.Array
  logprobs: jax.Array
  entropy: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """What decoding carries from one token to the next.

  Attributes:
    cache: Of every token but the last one sampled.
    last: int32 [B], the last token sampled.
    ended: bool [B], the row has sampled a stop token.
    keys: uint32 [B, key words], data of a PRNG key per request: a row's tokens
      do not depend on what else is in the batch. Data, because a sharded array
      of typed keys takes a second entry in the program's cache (jax 0.10.2),
      which would read as a second compilation.
    count: int32 [], tokens sampled so far.
  """

  cache: kv_cache.KVCache
  last: jax.Array
  ended: jax.Array
  keys: jax.Array
  count: jax.Array


def _shardings(mesh: Mesh) -> tuple[DecodeState, NamedSharding]:
  """Of a dispatch's outputs: state and sampled tokens.

  Left to the compiler, prefill and decode may return states cut differently,
  and decode would compile once for each.
  """
  table = rules.ROLLOUT_RULES
  rows, replicated = rules.rows_sharding(mesh, table), rules.replicated(mesh)
  slots = NamedSharding(
    mesh, PartitionSpec(None, table["rows"], table["kv_heads"], None, None)
  )
  cache = kv_cache.KVCache(
    keys=slots, values=slots, first=rows, length=replicated
  )
  state = DecodeState(
    cache=cache, last=rows, ended=rows, keys=rows, count=replicated
  )
  return state, rows


def request_keys(root: jax.Array, request_ids: jax.Array) -> jax.Array:
  """A key's data per request [B, ...], from ids [B, 2] of group and sample."""

  def key(ids: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(root, ids[0]), ids[1])
    return jax.random.key_data(key)

  return jax.vmap(key)(request_ids)


class Decoder:
  """The two programs of the sampler, each compiled once.

  ``temperature`` 0 is greedy; log-probs and entropy are then of the
  distribution at temperature 1.
  """

  def __init__(
    self,
    policy: Policy,
    *,
    samples_per_prompt: int,
    max_response_tokens: int,
    chunk_tokens: int,
    temperature: float,
    stop_ids: tuple[int, ...],
    pad_id: int,
    dtype: jnp.dtype,
    mesh: Mesh,
  ):
    self._policy = policy
    self._samples = samples_per_prompt
    self._temperature = temperature
    self._stop_ids = stop_ids
    self._pad_id = pad_id
    self._dtype = dtype
    # The first token comes with the prefill, the rest in whole chunks.
    self.num_chunks = -(-(max_response_tokens - 1) // chunk_tokens)
    self._response_slots = self.num_chunks * chunk_tokens
    self._chunk_tokens = chunk_tokens
    self._partition = rules.partition(mesh, rules.ROLLOUT_RULES)
    self._shardings = _shardings(mesh)
    self.prefill = jax.jit(self._prefill, out_shardings=self._shardings)
    self.decode = jax.jit(
      self._decode, donate_argnames="state", out_shardings=self._shardings
    )

  def compiles(self) -> dict[str, int]:
    """How often each program was compiled."""
    return {
      "prefill": self.prefill._cache_size(),
      "decode": self.decode._cache_size(),
    }

  def programs(
    self, params: Params, *, num_prompts: int, prompt_tokens: int
  ) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """By name, a function that traces the program for these shapes.

    Args:
      params: Shapes of the parameters, with their shardings.
      num_prompts: Q.
      prompt_tokens: P.
    """
    state_shardings, rows = self._shardings
    replicated = state_shardings.count

    def abstract(shape, dtype, sharding) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    inputs = (
      params,
      abstract((num_prompts, prompt_tokens), jnp.int32, rows),
      abstract((num_prompts,), jnp.int32, rows),
      abstract((num_prompts * self._samples, 2), jnp.int32, rows),
      abstract((), jax.eval_shape(jax.random.key, 0).dtype, replicated),
    )

    def decode() -> jax.stages.Lowered:
      state, _ = jax.eval_shape(self._prefill, *inputs)
      state = jax.tree.map(
        lambda leaf, sharding: abstract(leaf.shape, leaf.dtype, sharding),
        state,
        state_shardings,
      )
      return self.decode.lower(params, state)

    return {"prefill": lambda: self.prefill.lower(*inputs), "decode": decode}

  def _prefill(
    self,
    params: Params,
    tokens: jax.Array,
    first: jax.Array,
    request_ids: jax.Array,
    root: jax.Array,
  ) -> tuple[DecodeState, SampledTokens]:
    """Reads each prompt once and samples the first token of its G responses.

    Args:
      params: On the rollout mesh.
      tokens: int32 [Q, P], left-padded prompts.
      first: int32 [Q], slot of each prompt's first token.
      request_ids: int32 [Q * G, 2], group and sample.
      root: The run's sampling key.
    """
    hidden, cache = self._policy.prefill(
      params, tokens, first, dtype=self._dtype, partition=self._partition
    )
    last_hidden = jnp.repeat(hidden[:, -1], self._samples, axis=0)
    cache = kv_cache.grow(
      cache, slots=self._response_slots, times=self._samples
    )
    ended = jnp.zeros(last_hidden.shape[0], bool)
    keys = request_keys(root, request_ids)
    count = jnp.zeros((), jnp.int32)
    sampled = self._sample(params, last_hidden, ended, keys, count)
    state = self._advance(cache, sampled, ended, keys, count)
    return state, jax.tree.map(lambda x: x[:, None], sampled)

  def _decode(
    self, params: Params, state: DecodeState
  ) -> tuple[DecodeState, SampledTokens]:
    """Samples one chunk of tokens, [B, chunk_tokens]."""

    tail = kv_cache.append(state.cache, slots=self._chunk_tokens)

    def step(carry, _):
      state, keys, values, length = carry
      hidden, longer = self._policy.extend(
        params,
        state.last[:, None],
        kv_cache.Tail(tail.cache, keys, values, length),
        partition=self._partition,
      )
      sampled = self._sample(
        params, hidden[:, 0], state.ended, state.keys, state.count
      )
      state = self._advance(None, sampled, state.ended, state.keys, state.count)
      return (state, longer.keys, longer.values, longer.length), sampled

    # The cache itself stays out of the loop, which only reads it.
    without = dataclasses.replace(state, cache=None)
    (state, *longer), sampled = jax.lax.scan(
      step,
      (without, tail.keys, tail.values, tail.length),
      length=self._chunk_tokens,
    )
    cache = kv_cache.Tail(tail.cache, *longer).merged()
    state = dataclasses.replace(state, cache=cache)
    return state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), sampled)

  def _advance(self, cache, sampled, ended, keys, count) -> DecodeState:
    stops = jnp.asarray(self._stop_ids, jnp.int32)
    stopped = jnp.any(sampled.tokens[:, None] == stops[None, :], axis=1)
    return DecodeState(
      cache=cache,
      last=sampled.tokens,
      ended=ended | stopped,
      keys=keys,
      count=count + 1,
    )

  def _sample(self, params, hidden, ended, keys, count) -> SampledTokens:
    """One token per row from final hidden states [B, D]."""
    unembedding = self._policy.unembedding(params).astype(hidden.dtype)
    logits = jnp.einsum(
      "bd,vd->bv", hidden, unembedding, preferred_element_type=jnp.float32
    )
    if self._temperature == 0:
      tokens = jnp.argmax(logits, axis=-1)
    else:
      logits = logits / self._temperature
      typed = jax.random.wrap_key_data(keys)
      token_keys = jax.vmap(jax.random.fold_in, (0, None))(typed, count)
      tokens = jax.vmap(jax.random.categorical)(token_keys, logits)
    tokens = jnp.where(ended, self._pad_id, tokens).astype(jnp.int32)
    logits = jax.nn.log_softmax(logits, axis=-1)
    logprobs = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    entropy = -jnp.sum(jnp.exp(logits) * logits, axis=-1)
    return SampledTokens(tokens, logprobs, entropy)
