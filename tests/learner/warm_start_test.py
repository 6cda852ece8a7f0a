"""Supervised steps before RL."""

import dataclasses
import functools

import jax
import numpy as np
from absl.testing import parameterized

from darl_jax.config import (
  MeshConfig,
  ModelConfig,
  RolloutMeshConfig,
  TrainMeshConfig,
  WarmStartConfig,
)
from darl_jax.learner.warm_start import warm_start
from darl_jax.models import presets
from darl_jax.models.transformer import Policy
from darl_jax.sharding import meshes, rules

_VOCAB, _STOP = 20, 1
_CONFIG = WarmStartConfig(
  steps=40, target_accuracy=1.0, batch_size=8, learning_rate=3e-2
)


@functools.cache
def _policy():
  config = presets.nano() | dict(
    num_layers=1, embed_dim=16, mlp_dim=24, num_heads=2, head_dim=8
  )
  return Policy(ModelConfig(**config), vocab_size=_VOCAB)


def _mesh(train=(1, 1, 1)):
  config = MeshConfig(TrainMeshConfig(*train), RolloutMeshConfig(1, 1))
  return meshes.split_devices(config).train


def _params(mesh):
  """Fresh ones each time: warm_start takes them over."""
  policy = _policy()
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  rng = np.random.default_rng(0)
  values = jax.tree.map(
    lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32), shapes
  )
  return jax.device_put(
    values,
    rules.param_shardings(
      policy.logical_axes, shapes, mesh=mesh, rules=rules.TRAIN_RULES
    ),
  )


def _examples():
  """Repeat the last token of the question; lengths differ."""
  return [
    (np.arange(2, 3 + i, dtype=np.int32), np.array([2 + i, _STOP], np.int32))
    for i in range(6)
  ]


def _run(mesh=None, examples=None, seed=0, **changes):
  """The parameters after, and what each step reported."""
  mesh = mesh or _mesh()
  reports = []
  params = warm_start(
    _policy(),
    _params(mesh),
    _examples() if examples is None else examples,
    dataclasses.replace(_CONFIG, **changes),
    mesh=mesh,
    seed=seed,
    advance=reports.append,
  )
  return params, reports


# Each run compiles anew: tests that can share one do.
@functools.cache
def _whole_run():
  return _run()[1]


@functools.cache
def _one_question():
  """With a learning rate of 0, each batch of one question is the same."""
  return _run(examples=_examples()[:1], learning_rate=0.0, steps=3)[1]


class WarmStartTest(parameterized.TestCase):
  def test_the_loss_falls_and_the_accuracy_rises(self):
    reports = _whole_run()
    self.assertLen(reports, 40)
    losses = [report["warm_start/loss"] for report in reports]
    accuracy = [report["warm_start/accuracy"] for report in reports]
    # An untrained policy is about uniform over the vocabulary.
    np.testing.assert_allclose(losses[0], np.log(_VOCAB), atol=1.0)
    self.assertLess(losses[-1], 0.4)
    self.assertGreater(accuracy[-1], 0.5)
    self.assertLess(max(accuracy), 1.0)

  def test_accuracy_is_the_chance_of_the_whole_answer(self):
    reports = _one_question()
    loss = reports[0]["warm_start/loss"]
    ((question, answer),) = _examples()[:1]
    tokens = np.concatenate([question, answer])[None]
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    params = jax.device_get(_params(_mesh()))
    hidden = jax.jit(_policy().hidden)(
      params, tokens, positions, np.ones_like(tokens)
    )
    logits = hidden @ _policy().unembedding(params).T
    logprobs = np.asarray(jax.nn.log_softmax(logits))[0]
    by_hand = -np.mean(
      [logprobs[len(question) - 1 + i, a] for i, a in enumerate(answer)]
    )
    np.testing.assert_allclose(loss, by_hand, rtol=1e-5)
    chance = np.exp(-2 * loss)  # The answer has two tokens.
    want = [chance * (1 - 0.8 ** (i + 1)) for i in range(3)]
    got = [report["warm_start/accuracy"] for report in reports]
    np.testing.assert_allclose(got, want, rtol=1e-4)

  def test_stops_at_the_target(self):
    whole = _whole_run()
    _, reports = _run(target_accuracy=0.3)
    accuracy = [report["warm_start/accuracy"] for report in reports]
    self.assertLess(len(reports), 40)
    self.assertGreaterEqual(accuracy[-1], 0.3)
    self.assertLess(accuracy[-2], 0.3)
    self.assertEqual(reports, whole[: len(reports)])

  def test_padding_and_questions_are_not_learned(self):
    # Only the answer's loss counts, so a longer row elsewhere changes nothing.
    short = _examples()[:1]
    alone = _one_question()
    long = np.arange(2, 14, dtype=np.int32)
    _, padded = _run(
      examples=[*short * 400, (long, long[:2])], learning_rate=0.0, steps=1
    )
    np.testing.assert_allclose(
      alone[0]["warm_start/loss"], padded[0]["warm_start/loss"], rtol=1e-5
    )

  def test_no_steps_return_the_parameters(self):
    mesh = _mesh()
    params = _params(mesh)
    got = warm_start(
      _policy(),
      params,
      [],
      dataclasses.replace(_CONFIG, steps=0),
      mesh=mesh,
      seed=0,
      advance=self.fail,
    )
    self.assertIs(got, params)

  def test_no_examples(self):
    with self.assertRaisesRegex(ValueError, "warm_start.steps = 0"):
      _run(examples=[])

  def test_an_exception_of_the_caller_ends_it(self):
    def advance(_):
      raise KeyboardInterrupt

    with self.assertRaises(KeyboardInterrupt):
      warm_start(
        _policy(),
        _params(_mesh()),
        _examples(),
        _CONFIG,
        mesh=_mesh(),
        seed=0,
        advance=advance,
      )

  def test_sharded_equals_unsharded(self):
    mesh = _mesh((2, 2, 1))
    got, sharded = _run(mesh, steps=3)
    want, reports = _run(steps=3)
    for one, other in zip(sharded, reports, strict=True):
      for name, value in other.items():
        np.testing.assert_allclose(one[name], value, rtol=1e-4)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, want
    )
    # They come back cut as they went in: the learner compiles for that.
    jax.tree.map(
      lambda a, b: self.assertEqual(a.sharding, b.sharding), got, _params(mesh)
    )

  def test_seeds_draw_other_batches(self):
    _, other = _run(steps=2, seed=1)
    self.assertNotEqual(other, _whole_run()[:2])
