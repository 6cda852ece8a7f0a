"""Every parameter has a place, and every rule has a parameter."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, PartitionSpec

from darl_jax.config import ModelConfig
from darl_jax.models import presets
from darl_jax.models.transformer import Policy
from darl_jax.sharding import meshes, rules

_TABLES = dict(train=rules.TRAIN_RULES, rollout=rules.ROLLOUT_RULES)


_EXPERTS = dict(num_experts=6, experts_per_token=2, expert_mlp_dim=10)


def _mesh(name):
  devices = np.array(jax.devices())
  if name == "train":
    return Mesh(devices.reshape(2, 2, 2), meshes.TRAIN_AXES)
  return Mesh(devices.reshape(4, 2), meshes.ROLLOUT_AXES)


def _policies():
  """Every family of models."""
  for bias, norm, tied in itertools.product((False, True), repeat=3):
    changes = dict(qkv_bias=bias, qk_norm=norm, tie_embeddings=tied)
    yield _policy(**changes)
  yield _policy(**_EXPERTS)
  yield _policy(**_EXPERTS, lora_rank=2)


def _policy(**changes):
  return Policy(ModelConfig(**presets.nano() | changes), vocab_size=40)


def _names(axes):
  return jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))


class TablesTest(parameterized.TestCase):
  @parameterized.parameters("train", "rollout")
  def test_every_parameter_is_matched_and_no_rule_is_unused(self, name):
    used = {"rows"}  # Of activations and batches.
    for policy in _policies():
      axes = policy.logical_axes
      shapes = jax.eval_shape(policy.init, jax.random.key(0))
      shardings = rules.param_shardings(
        axes, shapes, mesh=_mesh(name), rules=_TABLES[name]
      )
      self.assertEqual(
        jax.tree.structure(shardings), jax.tree.structure(shapes)
      )
      used.update(itertools.chain(*_names(axes)))
    self.assertEqual(used, set(_TABLES[name]))

  @parameterized.parameters("train", "rollout")
  def test_rules_name_axes_of_their_mesh(self, name):
    mesh, named = _mesh(name), set()
    for target in _TABLES[name].values():
      named.update((target,) if isinstance(target, str) else target or ())
    self.assertEqual(named, set(mesh.axis_names))

  def test_layout(self):
    policy = _policy(qkv_bias=True, tie_embeddings=False)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))

    def specs(name):
      return jax.tree.map(
        lambda sharding: tuple(sharding.spec),
        rules.param_shardings(
          policy.logical_axes, shapes, mesh=_mesh(name), rules=_TABLES[name]
        ),
      )

    train, rollout = specs("train"), specs("rollout")
    self.assertEqual(train["embedding"], ("tensor", "fsdp"))
    self.assertEqual(rollout["embedding"], ("tensor", None))
    for tree, embed in ((train, "fsdp"), (rollout, None)):
      attention = tree["layers"]["attention"]
      feed_forward = tree["layers"]["feed_forward"]
      self.assertEqual(attention["query"], (None, embed, "tensor", None))
      self.assertEqual(attention["output"], (None, "tensor", None, embed))
      self.assertEqual(attention["key_bias"], (None, "tensor", None))
      self.assertEqual(feed_forward["up"], (None, embed, "tensor"))
      self.assertEqual(feed_forward["down"], (None, "tensor", embed))

  @parameterized.parameters(
    (6, ("tensor", "fsdp", None), ("tensor", None, "fsdp"), "tensor"),
    (5, (None, "fsdp", "tensor"), (None, "tensor", "fsdp"), None),
  )
  def test_experts_are_dealt_out_or_cut(self, count, up, down, router):
    policy = _policy(**_EXPERTS | dict(num_experts=count))
    shardings = rules.param_shardings(
      policy.logical_axes,
      jax.eval_shape(policy.init, jax.random.key(0)),
      mesh=_mesh("train"),
      rules=rules.TRAIN_RULES,
    )
    got = shardings["layers"]["feed_forward"]
    self.assertEqual(tuple(got["up"].spec), (None, *up))
    self.assertEqual(tuple(got["gate"].spec), (None, *up))
    self.assertEqual(tuple(got["down"].spec), (None, *down))
    self.assertEqual(tuple(got["router"].spec), (None, "fsdp", router))


class SpecTest(parameterized.TestCase):
  def test_a_ragged_vocabulary_is_replicated(self):
    mesh = _mesh("train")
    for size, target in ((40, "tensor"), (41, None)):
      self.assertEqual(
        rules.spec(
          ("vocab", "embed"), (size, 16), mesh=mesh, rules=rules.TRAIN_RULES
        ),
        PartitionSpec(target, "fsdp"),
      )

  def test_anything_else_ragged_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'mlp' of size 7 .*tensor.* = 2"):
      rules.spec(
        ("embed", "mlp"), (8, 7), mesh=_mesh("train"), rules=rules.TRAIN_RULES
      )

  def test_rows_are_cut_over_data_and_fsdp_together(self):
    mesh = _mesh("train")
    got = rules.spec(("rows", None), (8, 5), mesh=mesh, rules=rules.TRAIN_RULES)
    self.assertEqual(got, PartitionSpec(("data", "fsdp"), None))
    with self.assertRaisesRegex(ValueError, "'rows' of size 6 .* = 4"):
      rules.spec(("rows", None), (6, 5), mesh=mesh, rules=rules.TRAIN_RULES)

  def test_an_unknown_axis_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'expart' has no rule.*vocab"):
      rules.spec(
        ("expart",), (8,), mesh=_mesh("train"), rules=rules.TRAIN_RULES
      )

  def test_ranks_must_agree(self):
    with self.assertRaises(ValueError):
      rules.spec(
        ("embed",), (8, 8), mesh=_mesh("train"), rules=rules.TRAIN_RULES
      )


class RowsShardingTest(parameterized.TestCase):
  @parameterized.parameters(0, 2)
  def test_cuts_the_rows(self, leading):
    sharding = rules.rows_sharding(
      _mesh("train"), rules.TRAIN_RULES, leading=leading
    )
    shape = (3, 5)[:leading] + (8, 6)
    placed = jax.device_put(np.zeros(shape), sharding)
    self.assertEqual(
      placed.addressable_shards[0].data.shape, (3, 5)[:leading] + (2, 6)
    )

  def test_replicated(self):
    placed = jax.device_put(jnp.arange(3.0), rules.replicated(_mesh("rollout")))
    self.assertLen(placed.addressable_shards, 8)
    self.assertTrue(placed.is_fully_replicated)
