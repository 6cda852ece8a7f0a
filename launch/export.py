"""Exports: python launch/export.py --workdir=DIR --out=DIR [--dtype=bfloat16].

Writes the policy of a run's newest checkpoint as a folder that transformers and
inference servers load. Needs no accelerator.
"""

import dataclasses
import json
import os
import pathlib
import sys

# Before jax is imported: weights only pass through.
os.environ["JAX_PLATFORMS"] = "cpu"

import command_line
import jax  # noqa: E402
from absl import app, flags, logging  # noqa: E402
from etils import epath  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from darl_jax import config as config_lib  # noqa: E402
from darl_jax.checkpoint import learner_state, run_state  # noqa: E402
from darl_jax.checkpoint.store import Checkpoints, Found  # noqa: E402
from darl_jax.config import ConfigError, RunConfig  # noqa: E402
from darl_jax.models import hf, lora, published  # noqa: E402
from darl_jax.models.transformer import Policy  # noqa: E402
from darl_jax.prompts.tokenizer import Tokenizer  # noqa: E402
from darl_jax.types import Params  # noqa: E402

_GENERATION = "generation_config.json"
# What a run whose tokenizer is a published one keeps of it.
_TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
)


def define_flags() -> None:
  flags.DEFINE_string("workdir", None, "Of the run.", required=True)
  flags.DEFINE_string("out", None, "A new folder.", required=True)
  flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the weights."
  )


def main(_) -> int:
  workdir, out = (
    pathlib.Path(flags.FLAGS[name].value) for name in ("workdir", "out")
  )
  try:
    if out.exists():  # Before anything is read; ``save`` would refuse it too.
      raise ConfigError(
        [f"--out={out} exists. Try a new folder."], place="--out"
      )
    config = _read_config(workdir)
    tokenizer_files, generation = _tokenizer(workdir)
    found = _newest(workdir, config)
    params = _read_params(found.folder, config, workdir)
    if config.model.lora_rank:
      params = _merge(params, config)
    hf.save(
      params,
      dataclasses.replace(config.model, lora_rank=0),
      out,
      generation=generation,
      tokenizer_files=tokenizer_files,
      dtype=flags.FLAGS.dtype,
    )
  except (ConfigError, OSError) as error:
    print(f"ConfigError: {error}", file=sys.stderr)
    return 2
  print(f"{out}: the policy after {found.step} steps, as {_kind(out)}")
  return 0


def _kind(out: pathlib.Path) -> str:
  published = json.loads((out / "config.json").read_text("utf-8"))
  return f"{published['architectures'][0]} in {published['torch_dtype']}"


def _read_config(workdir: pathlib.Path) -> RunConfig:
  try:
    values = json.loads((workdir / "config.json").read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise ConfigError(
      [f"config.json cannot be read: {error}. Try the workdir of a run."],
      place=f"--workdir={workdir}",
    ) from error
  return config_lib.parse(values)


def _newest(workdir: pathlib.Path, config: RunConfig) -> Found:
  """The run's newest checkpoint that is whole."""
  folder = epath.Path(config.checkpoint.directory or workdir / "checkpoints")
  found = Checkpoints(config.checkpoint, folder, say=print).newest()
  if found is None:
    raise ConfigError(
      [f"{folder} holds no checkpoint. Try the workdir of a run that has one."],
      place=f"--workdir={workdir}",
    )
  return found


def _tokenizer(workdir: pathlib.Path) -> tuple[dict[str, str], dict]:
  """The tokenizer's files, by name, and the generation config."""
  files = {
    name: (workdir / name).read_text("utf-8")
    for name in _TOKENIZER_FILES
    if (workdir / name).exists()
  }
  if (workdir / _GENERATION).exists():
    return files, json.loads((workdir / _GENERATION).read_text("utf-8"))
  tokenizer = Tokenizer.load(workdir / "tokenizer.json")
  # Without it, the tokenizer of the model's family would be taken.
  files["tokenizer_config.json"] = json.dumps(
    dict(
      tokenizer_class="PreTrainedTokenizerFast",
      bos_token="<bos>",
      eos_token="<eos>",
      pad_token="<pad>",
    ),
    indent=2,
  )
  return files, dict(
    bos_token_id=tokenizer.bos_id,
    eos_token_id=list(tokenizer.stop_ids),
    pad_token_id=tokenizer.pad_id,
  )


def _read_params(
  path: epath.Path, config: RunConfig, workdir: pathlib.Path
) -> Params:
  """The checkpoint's parameters, on the host: those that were trained."""
  vocab_size = config.model.vocab_size
  if not vocab_size:
    vocab_size = Tokenizer.load(workdir / "tokenizer.json").vocab_size
  like, _ = _host_parameters(config, vocab_size)
  try:
    return learner_state.restore_params(run_state.learner_folder(path), like)
  except ValueError as error:
    said = (str(error).splitlines() or ["it cannot be read"])[0]
    raise ConfigError(
      [f"{path.name} is not of this config: {said}"],
      place=f"--workdir={workdir}",
    ) from error


def _merge(trained: Params, config: RunConfig) -> Params:
  """Adapters merged into the model that the run began with."""
  model = config.model
  path = published.locate(model.checkpoint)
  published.check(path, model)
  _, frozen = _host_parameters(config, model.vocab_size)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, frozen)
  base = published.load(path, model, shardings=shardings)
  return lora.merge(lora.join(trained, base), model)


def _host_parameters(
  config: RunConfig, vocab_size: int
) -> tuple[Params, Params]:
  """Shapes with their place in the host's memory, as ``lora.split``."""
  policy = Policy(config.model, vocab_size=vocab_size)
  host = NamedSharding(Mesh(jax.devices()[:1], ("host",)), PartitionSpec())
  return lora.split(
    jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host),
      jax.eval_shape(policy.init, jax.random.key(0)),
    )
  )


if __name__ == "__main__":
  logging.set_verbosity(logging.ERROR)
  app.run(main, flags_parser=command_line.parser(define_flags))
