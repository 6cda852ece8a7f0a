"""launch/export.py: a run's checkpoint as a folder that others load."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from etils import epath
from jax.sharding import Mesh

from darl_jax import config
from darl_jax.checkpoint import run_state, sealed
from darl_jax.config import ModelConfig
from darl_jax.learner import state as learner_state
from darl_jax.models import hf, presets
from darl_jax.models.transformer import Policy
from darl_jax.prompts.tokenizer import Tokenizer
from darl_jax.replay.saved import RingState
from darl_jax.rollout.actor import ActorState
from darl_jax.rollout.engine import EngineState, EngineStats
from darl_jax.sharding import meshes, rules
from darl_jax.types import TrainState
from tests.fixtures import tiny_config

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _export(*arguments: str) -> tuple[int, str, str]:
  """Exit status, stdout and stderr."""
  done = subprocess.run(
    [sys.executable, "launch/export.py", *arguments],
    cwd=_ROOT,
    env=os.environ | {"PYTHONPATH": str(_ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  return done.returncode, done.stdout, done.stderr


def save(folder: pathlib.Path, state: TrainState, run_config) -> None:
  """A checkpoint of a run that has sampled nothing yet."""
  folder = epath.Path(folder)
  folder.mkdir(parents=True)
  run_state.write(
    folder,
    run_state.RunState(
      step=int(state.step),
      config=config.to_dict(run_config),
      accuracy=None,
      learner=state,
      ring=RingState(snapshots=[], samples=[], awaiting={}, counts={}),
      actor=ActorState(
        drawn=0, in_flight={}, prompts={}, engine=EngineState(EngineStats(), {})
      ),
      meters={},
    ),
  )
  sealed.seal(folder)


class ExportTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.workdir = pathlib.Path(folder) / "run"
    cls.workdir.mkdir()
    cls.config = config.parse(tiny_config.get_config())
    text = json.dumps(config.to_dict(cls.config))
    (cls.workdir / "config.json").write_text(text)
    tokenizer = Tokenizer.train(["What is 1 + 2?"], vocab_size=270)
    tokenizer.save(cls.workdir / "tokenizer.json")
    policy = Policy(cls.config.model, vocab_size=tokenizer.vocab_size)
    # The run trained on several devices; the export has one.
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2, 1), meshes.TRAIN_AXES)
    shardings = rules.param_shardings(
      policy.logical_axes,
      jax.eval_shape(policy.init, jax.random.key(0)),
      mesh=mesh,
      rules=rules.TRAIN_RULES,
    )
    init = jax.jit(policy.init, out_shardings=shardings)
    optimizer = learner_state.adamw(cls.config.learner, 1e-3)
    for step in (2, 11):  # Not in the order of their names' digits.
      cls.params = init(jax.random.key(step))
      state = learner_state.init(cls.params, optimizer)
      state = TrainState(jnp.int32(step), state.params, state.opt_state)
      save(cls.workdir / "checkpoints" / f"step_{step:08d}", state, cls.config)
    cls.vocab_size = tokenizer.vocab_size

  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)
    self.out = self.folder / "out"

  def _refused(self, workdir, *flags) -> str:
    status, stdout, stderr = _export(
      f"--workdir={workdir}", f"--out={self.out}", *flags
    )
    self.assertEqual((status, stdout), (2, ""), stderr)
    self.assertStartsWith(stderr, "ConfigError: ")
    self.assertNotIn("Traceback", stderr)
    return stderr

  def _copy(self, *names: str) -> pathlib.Path:
    """A workdir with these of the run's files."""
    workdir = self.folder / "run"
    workdir.mkdir()
    for name in names:
      (workdir / name).write_bytes((self.workdir / name).read_bytes())
    return workdir

  def _load(self):
    values = hf.read_config(self.out)
    model = ModelConfig(
      **values, compute_dtype="float32", remat="none", **presets.FRESH
    )
    policy = Policy(model, vocab_size=model.vocab_size)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), meshes.TRAIN_AXES)
    shardings = rules.param_shardings(
      policy.logical_axes,
      jax.eval_shape(policy.init, jax.random.key(0)),
      mesh=mesh,
      rules=rules.TRAIN_RULES,
    )
    return model, hf.load(self.out, model, shardings=shardings)

  @parameterized.parameters("float32", "bfloat16")
  def test_the_newest_checkpoint(self, dtype):
    status, stdout, stderr = _export(
      f"--workdir={self.workdir}", f"--out={self.out}", f"--dtype={dtype}"
    )
    self.assertEqual(status, 0, stderr)
    self.assertIn("after 11 steps, as Qwen3ForCausalLM in " + dtype, stdout)
    model, params = self._load()
    self.assertEqual(model.vocab_size, self.vocab_size)
    self.assertEqual(model.embed_dim, self.config.model.embed_dim)
    for got, want in zip(
      jax.tree.leaves(params), jax.tree.leaves(self.params), strict=True
    ):
      want = np.asarray(want.astype(jnp.dtype(dtype)), np.float32)
      np.testing.assert_array_equal(np.asarray(got), want)
    for name in ("config.json", "generation_config.json"):
      values = json.loads((self.out / name).read_text())
      self.assertEqual(values["eos_token_id"], [2])
      self.assertEqual(values["pad_token_id"], 0)
    self.assertEqual(
      (self.out / "tokenizer.json").read_bytes(),
      (self.workdir / "tokenizer.json").read_bytes(),
    )
    about = json.loads((self.out / "tokenizer_config.json").read_text())
    self.assertEqual(about["eos_token"], "<eos>")

  def test_a_published_tokenizer_goes_along(self):
    workdir = self._copy("config.json", "tokenizer.json")
    (workdir / "checkpoints").symlink_to(self.workdir / "checkpoints")
    generation = dict(eos_token_id=[3, 7], pad_token_id=1, top_p=0.9)
    for name, text in (
      ("generation_config.json", json.dumps(generation)),
      ("tokenizer_config.json", '{"bos_token": "<s>"}'),
      ("chat_template.jinja", "{{ messages }}"),
    ):
      (workdir / name).write_text(text)
    status, _, stderr = _export(f"--workdir={workdir}", f"--out={self.out}")
    self.assertEqual(status, 0, stderr)
    written = json.loads((self.out / "generation_config.json").read_text())
    self.assertEqual(written, generation)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
      self.assertEqual(
        (self.out / name).read_text(), (workdir / name).read_text()
      )

  def test_an_existing_folder_is_refused_by_name(self):
    self.out.mkdir()
    self.assertIn(f"--out={self.out} exists", self._refused(self.workdir))
    self.assertEqual(list(self.out.iterdir()), [])

  def test_no_run(self):
    self.assertIn("config.json cannot be read", self._refused(self.folder))

  def test_no_checkpoint(self):
    workdir = self._copy("config.json", "tokenizer.json")
    # What an interrupted save leaves is none.
    (workdir / "checkpoints" / "step_00000009" / "learner").mkdir(parents=True)
    self.assertIn("holds no checkpoint", self._refused(workdir))
    self.assertFalse(self.out.exists())

  def test_a_checkpoint_of_another_model(self):
    workdir = self._copy("tokenizer.json")
    values = config.to_dict(self.config)
    values["model"]["embed_dim"] = 32
    (workdir / "config.json").write_text(json.dumps(values))
    (workdir / "checkpoints").symlink_to(self.workdir / "checkpoints")
    said = self._refused(workdir)
    self.assertIn("step_00000011 is not of this", said)
    # All of them, but the norms of queries and keys.
    self.assertIn("11 parameters differ: ", said)
    self.assertIn("embedding is (259, 16), not (259, 32); ", said)
    self.assertFalse(self.out.exists())

  def test_a_wrong_flag(self):
    self.assertIn("float16", self._refused(self.workdir, "--dtype=float16"))
