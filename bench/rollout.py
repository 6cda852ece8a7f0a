"""How fast the sampling engine generates on one device of this machine.

  python bench/rollout.py --model=DIR|FILE.gguf|PRESET --json \\
      [--workload=uniform|ragged|shared_prefix] [--rounds=3] \\
      [--peer=NAME:PYTHON ...]

Prints one JSON line, of warm rounds: useful tokens per second (the median), the
share of the slots' tokens that were useful, compiles, peak bytes, and the share
of the matrix rate: the time that the model's matrix products alone take at the
decode's shapes, over the time that a decoded token takes.

With ``--peer=tunix:PYTHON`` or ``--peer=transformers:PYTHON``, where PYTHON is
the interpreter of an environment of theirs (``bench/peers/README.md``), the
same work is measured with them, in turn with ours, and ratios are given: above
1, ours is faster. Both sides get the same prompts as token ids, sample in
float32 at temperature 1 and stop at no token. Peers load Hugging Face folders,
so that anything else is exported for them first.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import pathlib
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from peers import client

from darl_jax.config import ConfigError, ModelConfig, RolloutConfig
from darl_jax.models import hf, presets, published
from darl_jax.models.transformer import Policy
from darl_jax.rollout.engine import Engine, EngineStats
from darl_jax.rollout.placement import Placement
from darl_jax.sharding import meshes
from darl_jax.types import Params, Prompt

_PRESETS = sorted(
  name
  for name, member in inspect.getmembers(presets, inspect.isfunction)
  if not name.startswith("_")
)
# Where a preset leaves it to the tokenizer.
_VOCAB_SIZE = 4096
# Rounding apart, both sides must compute the same log-probs.
_LOGPROB_ERROR = 1e-2
_MATRIX_CALLS = 3


@dataclasses.dataclass(frozen=True)
class Workload:
  """What is asked.

  Attributes:
    prompts: Distinct ones.
    samples: Of each.
    prompt_tokens: Of each prompt.
    slots: Of the engine.
    lengths: Tokens of each prompt's responses.
  """

  prompts: int
  samples: int
  prompt_tokens: int
  slots: int
  lengths: tuple[int, ...]

  @property
  def tokens(self) -> int:
    """Useful ones: those that were asked for."""
    return self.samples * sum(self.lengths)

  def token_ids(self, vocab_size: int) -> list[list[int]]:
    """The prompts."""
    rng = np.random.default_rng(1)
    shape = (self.prompts, self.prompt_tokens)
    return rng.integers(10, vocab_size, size=shape).tolist()

  def batches(self, vocab_size: int, rows: int) -> list[dict]:
    """As ``peers/protocol.py`` has them: each as long as its longest."""
    prompts = np.repeat(self.token_ids(vocab_size), self.samples, axis=0)
    lengths = np.repeat(self.lengths, self.samples)
    return [
      dict(
        prompts=prompts[start : start + rows].tolist(),
        tokens=int(lengths[start : start + rows].max()),
      )
      for start in range(0, len(prompts), rows)
    ]


def _uniform() -> Workload:
  return Workload(64, 1, 45, 64, (64,) * 64)


def _ragged() -> Workload:
  """Geometric lengths."""
  lengths = np.random.default_rng(0).geometric(1 / 48, size=256)
  return Workload(256, 1, 45, 64, tuple(np.minimum(lengths, 256).tolist()))


def _shared_prefix() -> Workload:
  return Workload(8, 16, 512, 128, (32,) * 8)


_WORKLOADS = dict(
  uniform=_uniform, ragged=_ragged, shared_prefix=_shared_prefix
)


class Model:
  """A preset with fresh parameters, or a published model, in float32."""

  def __init__(self, name: str):
    """Reads the shape.

    Raises:
      ConfigError: There is no such model, or it is not supported.
    """
    fields = dict(compute_dtype="float32", remat="none")
    if name in _PRESETS:
      self.path = None
      fields = getattr(presets, name)() | fields
      fields["vocab_size"] = fields["vocab_size"] or _VOCAB_SIZE
    else:
      self.path = published.locate(name)
      fields = presets.FRESH | fields | published.read_config(self.path)
    self.config = ModelConfig(**fields)
    if self.path is not None:
      published.check(self.path, self.config)
    self.policy = Policy(self.config, vocab_size=self.config.vocab_size)
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    self.mesh = Mesh(devices, meshes.ROLLOUT_AXES)
    self.placement = Placement(self.policy, mesh=self.mesh, dtype=jnp.float32)

  def params(self) -> Params:
    """Stacked, on the mesh."""
    shardings = self.placement.shardings
    if self.path is None:
      init = jax.jit(self.policy.init, out_shardings=shardings)
      return init(jax.random.key(0))
    return published.load(self.path, self.config, shardings=shardings)

  def folder(self, parent: str) -> str:
    """A Hugging Face folder of it, made below ``parent`` if there is none."""
    if self.path is not None and self.path.is_dir():
      return str(self.path)
    made = pathlib.Path(parent) / "model"
    hf.save(self.params(), self.config, made, generation={})
    return str(made)


@dataclasses.dataclass(frozen=True)
class Round:
  """One round of ours.

  Attributes:
    rate: Useful tokens per second.
    stats: The engine's, of this round.
    token_s: Seconds that a token of all slots takes to decode; None if every
      chunk came with a prefill.
    prefill_share: Of the round's seconds, what decoding does not explain.
  """

  rate: float
  stats: EngineStats
  token_s: float | None
  prefill_share: float | None


class Ours:
  """The engine with a model and a workload, warm."""

  def __init__(self, model: Model, work: Workload, config: RolloutConfig):
    """Loads, compiles, and runs the workload once."""
    self._work, self._chunk_tokens = work, config.chunk_tokens
    self._policy = model.policy
    self.snapshot = model.placement.adopt(model.params(), version=0)
    self._engine = Engine(
      model.policy,
      config,
      mesh=model.mesh,
      max_prompt_tokens=work.prompt_tokens,
      stop_ids=(),
      pad_id=0,
      seed=0,
    )
    self._prompts = [
      Prompt(str(index), np.array(tokens, np.int32), {})
      for index, tokens in enumerate(work.token_ids(model.config.vocab_size))
    ]
    self.round()
    self.compiles = self._engine.compiles()
    self.peak_bytes = _peak_bytes()

  @property
  def recompiles(self) -> int:
    """Since the first round."""
    now = self._engine.compiles()
    return sum(now.values()) - sum(self.compiles.values())

  def round(self) -> Round:
    """Answers all prompts, of which nothing is cached."""
    engine, before = self._engine, self._engine.stats
    # As new weights would: the prefix cache is of no use to other parameters.
    snapshot = dataclasses.replace(
      self.snapshot, params=dict(self.snapshot.params)
    )
    decode_s = []
    start = time.perf_counter()
    for index, prompt in enumerate(self._prompts):
      engine.submit(prompt, index, max_tokens=self._work.lengths[index])
    while engine.pending:
      prefilled, began = engine.stats.prefill_tokens, time.perf_counter()
      engine.step(snapshot)
      if engine.stats.prefill_tokens == prefilled:
        decode_s.append(time.perf_counter() - began)
    seconds = time.perf_counter() - start
    stats = engine.stats.since(before)
    if stats.tokens != self._work.tokens:
      sys.exit(f"{stats.tokens} of {self._work.tokens} tokens were generated")
    chunk_s = statistics.median(decode_s) if decode_s else None
    return Round(
      rate=stats.tokens / seconds,
      stats=stats,
      token_s=chunk_s and chunk_s / self._chunk_tokens,
      prefill_share=chunk_s and max(0.0, 1 - stats.chunks * chunk_s / seconds),
    )

  def logprobs(self) -> tuple[list[int], list[float]]:
    """A prompt, and the log-probs of its tokens but the first."""

    @jax.jit
    def logprobs(params: Params, tokens: jax.Array) -> jax.Array:
      positions = jnp.arange(tokens.shape[1])[None]
      segments = jnp.ones_like(tokens)
      hidden = self._policy.hidden(params, tokens, positions, segments)
      logits = hidden[0, :-1] @ self._policy.unembedding(params).T
      each = jax.nn.log_softmax(logits)
      return jnp.take_along_axis(each, tokens[0, 1:, None], axis=1)[:, 0]

    tokens = self._prompts[0].tokens
    each = logprobs(self.snapshot.params, tokens[None])
    return tokens.tolist(), each.tolist()


def _peak_bytes() -> int:
  """Of the device; of the process where they share their memory."""
  stats = jax.devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"]
  status = pathlib.Path("/proc/self/status")
  if status.exists():
    # Not ru_maxrss: that of the process which started this one counts in it.
    lines = status.read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
  unit = 1 if platform.system() == "Darwin" else 1024
  return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def matrix_products(
  model: Model, params: Params, *, rows: int, tokens: int
) -> Callable[[], float]:
  """The model's matrix products alone, each at the decode's shapes.

  Args:
    model: Without experts.
    params: On the mesh, as the engine takes them.
    rows: That decode together.
    tokens: Of a call.

  Returns:
    A function that measures the seconds of one token of all rows.
  """

  apart = isinstance(params["layers"], tuple)

  def times(x: jax.Array, kernel: jax.Array) -> jax.Array:
    if not apart:
      return x @ kernel.reshape(x.shape[1], -1)
    # Outputs first, and the factors in the order that is faster then.
    inputs = jax.lax.optimization_barrier(x.T)
    matrix = kernel.reshape(-1, x.shape[1])
    return jax.lax.optimization_barrier(matrix @ inputs).T

  def layer(x: jax.Array, params: Params) -> jax.Array:
    # Each product is read by the next one, or the compiler would drop it.
    attention, feed = params["attention"], params["feed_forward"]
    query, key, value = (
      times(x, attention[name]) for name in ("query", "key", "value")
    )
    groups = query.shape[1] // key.shape[1]
    heads = query + jnp.tile(key + value, (1, groups))
    x = times(heads, attention["output"])
    x = times(times(x, feed["gate"]) + times(x, feed["up"]), feed["down"])
    return _unit(x)

  def token(index: int, x: jax.Array, params: Params) -> jax.Array:
    layers = params["layers"]
    if apart:
      for each in layers:
        x = layer(x, each)
    else:
      x, _ = jax.lax.scan(lambda x, each: (layer(x, each), None), x, layers)
    logits = model.policy.logits(params, x, vocab_first=apart)
    # At an index that is not known beforehand: all columns are computed.
    column = jax.lax.dynamic_slice_in_dim(logits, index, 1, axis=1 - apart)
    return _unit(x + column.reshape(-1, 1))

  @jax.jit
  def products(x: jax.Array, params: Params) -> jax.Array:
    return jax.lax.fori_loop(
      0, tokens, lambda index, x: token(index, x, params), x
    )

  x = jax.random.normal(jax.random.key(0), (rows, model.config.embed_dim))
  products(x, params).block_until_ready()

  def token_s() -> float:
    seconds = []
    for _ in range(_MATRIX_CALLS):
      start = time.perf_counter()
      products(x, params).block_until_ready()
      seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / tokens

  return token_s


def _unit(x: jax.Array) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True))


class Peer(client.Client):
  """Another sampler, in a process of its own environment; see ``peers/``."""

  def __init__(self, name: str, python: str, *, rows: int, timeout_s: float):
    """Starts the process, which waits.

    Args:
      name: Of its script.
      python: Its interpreter.
      rows: That it generates together.
      timeout_s: Of each answer.
    """
    super().__init__(name, python, task="rollout", timeout_s=timeout_s)
    self.logprob_error = 0.0
    self._rows = rows

  def prepare(self, folder: str, work: Workload, vocab_size: int) -> None:
    """Loads a model, compiles, and runs the workload once."""
    self._tokens = work.tokens
    batches = work.batches(vocab_size, self._rows)
    self._lengths = [[b["tokens"]] * len(b["prompts"]) for b in batches]
    self.load(model=folder, batches=batches)

  def check(self, tokens: list[int], logprobs: list[float]) -> None:
    """Exits if the log-probs of a prompt's tokens are not theirs."""
    theirs = self.ask("logprobs", tokens=tokens)["logprobs"]
    self.logprob_error = float(np.max(np.abs(np.subtract(theirs, logprobs))))
    if not self.logprob_error <= _LOGPROB_ERROR:
      sys.exit(
        f"{self.name} computes another model: its log-probs of a prompt's "
        f"tokens differ from ours by up to {self.logprob_error:.3g}"
      )

  def rate(self, seed: int) -> float:
    """Useful tokens per second of a round."""
    answer = self.ask("round", seed=seed)
    if answer["lengths"] != self._lengths:
      sys.exit(f"{self.name} stopped early: {answer['lengths']} tokens")
    return self._tokens / answer["seconds"]


def measure(
  model: Model,
  work: Workload,
  config: RolloutConfig,
  peers: Sequence[Peer],
  num_rounds: int,
) -> dict:
  """All numbers; ours, the products' and the peers' rounds are in turn."""
  ours = Ours(model, work, config)
  products = None
  if not model.config.num_experts:
    products = matrix_products(
      model,
      ours.snapshot.params,
      rows=config.slots,
      tokens=config.chunk_tokens,
    )
  if peers:
    _load(peers, model, work, ours)
  rounds, shares = [], []
  rates = {peer.name: [] for peer in peers}
  for number in range(num_rounds):
    # Neither side always goes first.
    late = bool(number % 2)
    for peer in peers if late else ():
      rates[peer.name].append(peer.rate(seed=1000 * number))
    rounds.append(ours.round())
    if products and rounds[-1].token_s:
      shares.append(products() / rounds[-1].token_s)
    for peer in () if late else peers:
      rates[peer.name].append(peer.rate(seed=1000 * number))
  return _report(ours, rounds, shares) | {
    "peers": {
      peer.name: _comparison(peer, rates[peer.name], rounds) for peer in peers
    }
  }


def _load(
  peers: Sequence[Peer], model: Model, work: Workload, ours: Ours
) -> None:
  """Gives the peers the model, and checks that it is the same."""
  tokens, logprobs = ours.logprobs()
  with tempfile.TemporaryDirectory() as parent:
    folder = model.folder(parent)
    for peer in peers:
      peer.prepare(folder, work, model.config.vocab_size)
      peer.check(tokens, logprobs)


def _report(
  ours: Ours, rounds: Sequence[Round], shares: Sequence[float]
) -> dict:
  prefill = [r.prefill_share for r in rounds if r.prefill_share is not None]
  return dict(
    **_rates([r.rate for r in rounds]),
    slot_occupancy=round(rounds[-1].stats.slot_occupancy, 4),
    compiles=ours.compiles,
    recompiles=ours.recompiles,
    peak_bytes=ours.peak_bytes,
    share_of_peak=_median(shares),
    shares=[round(share, 3) for share in shares],
    prefill_share=_median(prefill),
  )


def _comparison(
  peer: Peer, rates: Sequence[float], rounds: Sequence[Round]
) -> dict:
  ratios = [r.rate / rate for r, rate in zip(rounds, rates, strict=True)]
  return dict(
    library=peer.library,
    **_rates(rates),
    speedup=_median(ratios),
    speedups=[round(ratio, 3) for ratio in ratios],
    logprob_error=peer.logprob_error,
  )


def _rates(rates: Sequence[float]) -> dict:
  return dict(
    tokens_per_second=round(statistics.median(rates), 1),
    rates=[round(rate, 1) for rate in rates],
  )


def _median(values: Sequence[float]) -> float | None:
  return round(statistics.median(values), 3) if values else None


def _parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "--model",
    required=True,
    help=f"A folder, a .gguf file, or a preset: {', '.join(_PRESETS)}.",
  )
  parser.add_argument("--workload", default="uniform", choices=_WORKLOADS)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--chunk-tokens", type=int, default=16)
  parser.add_argument("--prefill-tokens", type=int, default=384)
  parser.add_argument(
    "--json", action="store_true", help="On one line; else indented."
  )
  client.add_flags(parser, task="rollout")
  parser.add_argument(
    "--peer-rows",
    type=int,
    default=64,
    help="A peer's batch, which runs until its longest response ends.",
  )
  return parser.parse_args()


def main() -> None:
  arguments = _parse()
  work = _WORKLOADS[arguments.workload]()
  config = RolloutConfig(
    prompts_per_batch=work.prompts,
    samples_per_prompt=work.samples,
    max_response_tokens=max(work.lengths),
    chunk_tokens=arguments.chunk_tokens,
    slots=work.slots,
    cache_tokens=0,
    prefill_tokens=arguments.prefill_tokens,
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
  with contextlib.ExitStack() as stack:
    peers = [
      stack.enter_context(
        Peer(*peer, rows=arguments.peer_rows, timeout_s=arguments.timeout_s)
      )
      for peer in arguments.peer
    ]
    # After the peers have started, whose environment it would change.
    meshes.prepare_cpu(1)
    try:
      model = Model(arguments.model)
    except ConfigError as error:
      sys.exit(f"ConfigError: {error}")
    result = measure(model, work, config, peers, arguments.rounds)
  described = dict(model=arguments.model, workload=arguments.workload)
  print(json.dumps(described | result, indent=None if arguments.json else 2))


if __name__ == "__main__":
  main()
