"""Compares: python launch/parity.py --model=DIR [--expected=FILE.npz].

The model is a published one: a folder, an id on the hub or a GGUF file. It
is asked for sums, and each sampled token's log-prob in the sampler (prefill and
decode) is compared with the learner's (a forward pass over packed rows), in
float32 and in bfloat16. With --expected, both are also compared with what
another implementation computed in float32 at temperature 1, and greedy
continuations must be the same; a GGUF file's weights are then rounded to
bfloat16 first, as those are that such files are made with.

Exit status 1 where a difference is beyond tolerance: in float32 the largest,
above --tolerance nats; in bfloat16 the share of ratios outside [0.9, 1.1]
between the two sides, above 10 %; or a greedy continuation that is not the
expected one, in float32.
"""

import dataclasses
import json
import pathlib
import sys

import command_line
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from rich import box
from rich.console import Console
from rich.table import Table

from configs import darl
from darl_jax import config as config_lib
from darl_jax import parity
from darl_jax.config import ConfigError, RunConfig
from darl_jax.models import published
from darl_jax.prompts import dataset
from darl_jax.sharding import meshes

# Where the model has no tokenizer, prompts are random tokens, so many of them.
_RANDOM_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class _Questions:
  """Prompts int32 [P] each, and what ends their answers."""

  prompts: tuple[np.ndarray, ...]
  stop_ids: tuple[int, ...]
  pad_id: int


def define_flags() -> None:
  flags.DEFINE_string("model", None, "Folder, hub id or .gguf.", required=True)
  flags.DEFINE_string("expected", None, "What another implementation computed.")
  flags.DEFINE_float("temperature", 1.0, "Of the sampled answers.", 1e-3)
  flags.DEFINE_integer("prompts", 8, "Questions asked.", 1)
  flags.DEFINE_integer("tokens", 32, "Most tokens of an answer.", 2)
  flags.DEFINE_float(
    "tolerance", parity.TOLERANCE, "Largest difference in float32, nats.", 0.0
  )
  flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")


def main(_) -> int:
  meshes.prepare_cpu(1)
  try:
    gaps, differ = _measure(published.locate(flags.FLAGS.model))
  except ConfigError as error:
    print(f"ConfigError: {error}", file=sys.stderr)
    return 2
  problems = [gap.problem(flags.FLAGS.tolerance) for gap in gaps]
  problems = [problem for problem in problems if problem]
  if differ["float32"]:
    problems.append(
      f"{differ['float32']} greedy continuations in float32 are not the "
      "expected ones"
    )
  if flags.FLAGS.json:
    rows = [dataclasses.asdict(gap) for gap in gaps]
    report = dict(gaps=rows, greedy_differ=differ, problems=problems)
    print(json.dumps(report, indent=2))
  else:
    _print_table(gaps, differ)
    for problem in problems:
      print(f"beyond tolerance: {problem}")
  return 1 if problems else 0


def _measure(
  path: pathlib.Path,
) -> tuple[list[parity.Gaps], dict[str, int | None]]:
  """All comparisons, and by dtype the greedy continuations that differ."""
  fields = published.read_config(path)
  expected = None
  if flags.FLAGS.expected is not None:
    expected = parity.read_expected(
      flags.FLAGS.expected, vocab_size=fields["vocab_size"]
    )
  questions = _questions(path, fields["vocab_size"])
  config = _config(
    fields,
    questions.prompts,
    tokens=flags.FLAGS.tokens,
    temperature=flags.FLAGS.temperature,
  )
  devices = meshes.split_devices(config.mesh)
  keywords = dict(
    meshes=devices, stop_ids=questions.stop_ids, pad_id=questions.pad_id
  )
  published.check(path, config.model)
  params, gaps, differ = None, [], {}
  for dtype in parity.DTYPES:
    sides = parity.Sides(config, dtype=dtype, **keywords)
    if params is None:
      exact = expected is None
      params = published.load(
        path,
        config.model,
        shardings=sides.param_shardings,
        round_to=jnp.dtype("float32" if exact else "bfloat16"),
      )
    gaps.append(sides.gaps(params, questions.prompts))
    differ[dtype] = None
    if expected is not None:
      greedy = _config(
        fields,
        (*expected.prompts, *expected.tokens),
        tokens=expected.longest_response,
        temperature=0.0,
      )
      found, differ[dtype] = parity.Sides(
        greedy, dtype=dtype, **keywords
      ).expected_gaps(params, expected)
      gaps += found
    jax.clear_caches()  # Of a large model, programs of one dtype are enough.
  return gaps, differ


def _questions(path: pathlib.Path, vocab_size: int) -> _Questions:
  """Sums through the model's chat template, or random tokens."""
  count = flags.FLAGS.prompts
  if path.suffix != ".gguf" and not (path / "tokenizer.json").is_file():
    rng = np.random.default_rng(0)
    shape = (count, _RANDOM_TOKENS)
    random = rng.integers(vocab_size, size=shape, dtype=np.int32)
    return _Questions(tuple(random), stop_ids=(), pad_id=0)
  values = dict(
    dataset="chain_sum",
    params={},
    num_items=2 * count + 20,
    heldout_fraction=0.1,
    max_tokens=2**20,
    instruction="{question}",
    tokenizer=str(path),
    system="",
    vocab_size=320,
  )
  prompts = dataset.load(config_lib.PromptsConfig(**values), seed=0)
  tokenizer = prompts.tokenizer
  if tokenizer.vocab_size > vocab_size:
    raise ConfigError(
      [
        f"The tokenizer has {tokenizer.vocab_size} tokens, and the model "
        f"{vocab_size} rows. Try the folder as it was published."
      ],
      place=str(path),
    )
  return _Questions(
    tuple(prompt.tokens for prompt in prompts.train[:count]),
    stop_ids=tokenizer.stop_ids,
    pad_id=tokenizer.pad_id,
  )


def _config(
  fields: dict, prompts: tuple, *, tokens: int, temperature: float
) -> RunConfig:
  """A run with room for these prompts and answers; two share a packed row."""
  longest = max(map(len, prompts))
  config = darl.get_config()
  config.model.update(fields | dict(remat="none"))
  config.prompts.max_tokens = longest
  config.rollout.update(
    dict(
      prompts_per_batch=4,
      samples_per_prompt=2,
      max_response_tokens=tokens,
      chunk_tokens=8,
    )
  )
  config.replay.min_batch = 1
  config.learner.update(
    dict(rows=1, score_rows=4, row_tokens=2 * (longest + tokens))
  )
  parsed = config_lib.parse(config)
  # Of a run it is above 0.
  rollout = dataclasses.replace(parsed.rollout, temperature=temperature)
  if temperature == 0:
    rollout = dataclasses.replace(rollout, samples_per_prompt=1)
  return dataclasses.replace(parsed, rollout=rollout)


def _print_table(
  gaps: list[parity.Gaps], differ: dict[str, int | None]
) -> None:
  table = Table(
    title="|difference of log-probs|, nats per token",
    caption="out: share of ratios of probabilities outside [0.9, 1.1]",
    box=box.SIMPLE,
    padding=(0, 1, 0, 0),
  )
  for name in ("between", "dtype", "T"):
    table.add_column(name, no_wrap=True)
  for name in ("tokens", "p50", "p95", "max", "out"):
    table.add_column(name, justify="right", no_wrap=True)
  for gap in gaps:
    table.add_row(
      gap.between,
      gap.dtype,
      f"{gap.temperature:g}",
      str(gap.tokens),
      *(f"{value:.2g}" for value in (gap.p50, gap.p95, gap.largest)),
      f"{gap.outside:.2%}",
    )
  console = Console()
  console.print(table)
  for dtype, count in differ.items():
    if count is not None:
      console.print(f"greedy continuations that differ in {dtype}: {count}")


if __name__ == "__main__":
  logging.set_verbosity(logging.ERROR)
  app.run(main, flags_parser=command_line.parser(define_flags))
