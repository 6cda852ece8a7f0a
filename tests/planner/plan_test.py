"""A whole plan, of a run small enough to compile in a test."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from darl_jax import config as config_lib
from darl_jax.config import ConfigError
from darl_jax.models.transformer import Policy
from darl_jax.planner import plan as plan_lib
from darl_jax.planner import report, topology
from darl_jax.sharding import meshes
from tests.fixtures import tiny_config

VOCAB = 300
PROGRAMS = ("score", "train_step", "publish", "prefill", "decode")


@functools.cache
def config() -> config_lib.RunConfig:
  values = tiny_config.get_config()
  values.mesh.train.fsdp = 2
  values.mesh.rollout.data = 2
  # A step trains on half of what a batch of prompts generates.
  values.learner.batch_size = 8
  return config_lib.parse(values)


@functools.cache
def planned() -> tuple[plan_lib.Plan, list[str]]:
  try:
    topology.devices("v5e:4x2")
  except ConfigError as error:
    pytest.skip(str(error))
  told: list[str] = []
  plan = plan_lib.plan(
    config(), "v5e:4x2", vocab_size=VOCAB, progress=told.append
  )
  return plan, told


class PlanTest(parameterized.TestCase):
  def test_every_program_is_compiled_and_announced(self):
    plan, told = planned()
    names = [program.name for program in plan.programs]
    self.assertEqual(tuple(names), PROGRAMS)
    self.assertCountEqual(told, names)
    for program in plan.programs:
      self.assertTrue(program.fits, program.name)
      self.assertEmpty(program.cost.unknown_loops, program.name)
      self.assertEqual(program.devices, 2)
    self.assertTrue(plan.fits)
    self.assertEqual(plan.whole.unused_devices, 4)

  def test_flops_are_the_models(self):
    # Where nothing is computed again: little else multiplies matrices.
    plan, _ = planned()
    for program in plan.programs:
      if program.name in ("train_step", "score"):
        executed = program.cost.flops * program.devices
        self.assertLess(executed / program.model_flops, 2.0, program.name)
        self.assertGreater(executed / program.model_flops, 0.5, program.name)

  def test_what_lies_beside_a_program(self):
    plan, _ = planned()
    beside = {program.name: program.resident for program in plan.programs}
    policy = Policy(config().model, vocab_size=VOCAB)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    self.assertEqual(plan.whole.parameters, count)
    self.assertEqual(plan.whole.snapshot_bytes, 4 * count)
    self.assertEqual(beside["train_step"], 0)
    # Two moments, most of them cut in two.
    self.assertBetween(beside["publish"], 2 * 4 * count / 2, 2 * 4 * count)
    # And an older snapshot's parameters, for parity.
    self.assertAlmostEqual(beside["score"], 1.5 * beside["publish"])
    # A snapshot on its way, whole on each data slice.
    self.assertEqual(beside["decode"], 4 * count)

  def test_the_whole(self):
    plan, _ = planned()
    whole, run = plan.whole, config()
    seconds = {
      program.name: program.estimate.seconds for program in plan.programs
    }
    # Two prompts of 16 tokens and their eight answers of five, in dispatches
    # of 512 tokens read and of two for each of 16 slots.
    tokens = {program.name: program.tokens for program in plan.programs}
    self.assertEqual((tokens["prefill"], tokens["decode"]), (512, 32))
    self.assertAlmostEqual(
      whole.generation_seconds,
      32 / 512 * seconds["prefill"] + 40 / 32 * seconds["decode"],
    )
    # These have a row each, in one dispatch of 8 rows.
    self.assertAlmostEqual(
      whole.step_seconds, seconds["train_step"] + seconds["score"]
    )
    self.assertEqual(whole.snapshots, run.replay.num_snapshots + 1)
    self.assertEqual(
      whole.ring_bytes,
      whole.snapshots * whole.snapshot_bytes + run.replay.trajectory_bytes,
    )
    self.assertEqual(whole.hosts, 2)
    slower = whole.generation_seconds > whole.step_seconds
    self.assertEqual(whole.bottleneck, "rollout" if slower else "train")
    self.assertAlmostEqual(
      plan.balanced_ratio, whole.generation_seconds / whole.step_seconds
    )
    # One snapshot to the host and two to the rollout mesh's data slices, over
    # the links of that host's four chips.
    moved = 3 * whole.snapshot_bytes / (4 * plan.chip.host_bytes_per_s)
    self.assertAlmostEqual(whole.publish_seconds, seconds["publish"] + moved)

  @parameterized.parameters(
    (dict(trust_region="decoupled", proximal="ewma"), 1),
    (dict(kl_coefficient=0.1, kl_target="reference"), 0),
  )
  def test_a_policy_kept_takes_room_and_a_forward_pass(self, changes, scalars):
    values = config_lib.to_dict(config())
    values["objective"] |= changes
    run = config_lib.parse(values)
    policy = Policy(run.model, vocab_size=VOCAB)
    split = meshes.split_devices(run.mesh, jax.devices())
    theirs, ours = (
      plan_lib._lowerings(each, policy, split) for each in (config(), run)
    )
    trained = plan_lib._param_bytes(run, policy, split)["trained"]
    for name in ("score", "publish"):
      self.assertEqual(ours[name][2] - theirs[name][2], trained)
    # Of the state, which the step's program has as its arguments.
    leaves = [
      len(jax.tree.leaves(each["train_step"][0]().args_info))
      for each in (theirs, ours)
    ]
    params = jax.tree.leaves(jax.eval_shape(policy.init, jax.random.key(0)))
    self.assertEqual(leaves[1] - leaves[0], len(params) + scalars)
    flops = [
      plan_lib._work(each, VOCAB, read=64)["train_step"][1]
      for each in (config(), run)
    ]
    self.assertAlmostEqual(flops[1] / flops[0], 4 / 3)

  @parameterized.parameters((1, 1), (2, 4 / 3))
  def test_m2po_scores_before_each_of_several_steps(self, minibatches, more):
    values = config_lib.to_dict(config())
    values["objective"] |= dict(loss="m2po")
    values["learner"] |= dict(minibatches=minibatches)
    flops = [
      plan_lib._work(each, VOCAB, read=64)["train_step"][1]
      for each in (config(), config_lib.parse(values))
    ]
    self.assertAlmostEqual(flops[1] / flops[0], more)

  def test_adapters_take_little(self):
    values = config_lib.to_dict(config())
    values["model"] |= dict(
      lora_rank=2, lora_targets="attention.*", checkpoint="some/model"
    )
    run = config_lib.parse(values)
    policy = Policy(run.model, vocab_size=VOCAB)
    split = meshes.split_devices(run.mesh, jax.devices())
    whole = Policy(config().model, vocab_size=VOCAB)
    theirs = plan_lib._param_bytes(config(), whole, split)
    ours = plan_lib._param_bytes(run, policy, split)
    # 16 wide, 2 heads of 8 and one for keys: a is [16, 2], b [2, heads, 8].
    adapters = 2 * 4 * 16 + 2 * (16 + 8 + 8 + 16)
    self.assertEqual(ours["snapshot"], 4 * adapters)
    self.assertLess(ours["trained"], 4 * adapters)
    self.assertEqual(ours["frozen"], theirs["trained"])
    self.assertEqual(ours["kept"], theirs["snapshot"])
    self.assertEqual((theirs["frozen"], theirs["kept"]), (0, 0))
    trained, _ = plan_lib._work(run, VOCAB, read=64)["train_step"]
    self.assertEqual(
      trained, plan_lib._work(config(), VOCAB, read=64)["train_step"][0]
    )
    self.assertAlmostEqual(
      plan_lib._work(run, VOCAB, read=64)["train_step"][1] * 3 / 2,
      plan_lib._work(config(), VOCAB, read=64)["train_step"][1],
    )
    lowerings = plan_lib._lowerings(run, policy, split)
    for name in ("score", "train_step", "publish"):
      lower, _, beside = lowerings[name]
      lower()
      self.assertLess(beside, 0.3 * theirs["trained"] + ours["frozen"], name)

  def test_json_holds_every_figure(self):
    plan, _ = planned()
    written = json.loads(json.dumps(report.to_json(plan), allow_nan=False))
    self.assertEqual(written["topology"], "v5e:4x2")
    self.assertTrue(written["fits"])
    by_name = {entry["name"]: entry for entry in written["programs"]}
    step = by_name["train_step"]
    self.assertGreater(step["memory"]["peak"], step["memory"]["arguments"])
    self.assertGreater(step["cost"]["flops"], 0)
    self.assertGreater(step["estimate"]["seconds"], 0)
    axes = {entry["axes"] for entry in step["cost"]["collectives"]}
    self.assertIn("fsdp", axes)

  def test_too_few_devices(self):
    values = tiny_config.get_config()
    values.mesh.train.data = 8
    with self.assertRaisesRegex(ConfigError, "8 \\+ 1 = 9 devices"):
      plan_lib.plan(config_lib.parse(values), "v5e:4x2", vocab_size=VOCAB)


class MatmulParametersTest(parameterized.TestCase):
  def test_a_token_meets_only_the_experts_that_it_is_sent_to(self):
    values = tiny_config.get_config()
    values.model.update(
      dict(num_experts=4, experts_per_token=2, expert_mlp_dim=8)
    )
    model = config_lib.parse(values).model
    policy = Policy(model, vocab_size=VOCAB)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    layers = shapes["layers"]
    experts = layers["feed_forward"]
    met = sum(math.prod(leaf.shape) for leaf in layers["attention"].values())
    met -= sum(
      math.prod(leaf.shape)
      for name, leaf in layers["attention"].items()
      if name.endswith("norm")
    )
    met += math.prod(experts["router"].shape)
    for name in ("gate", "up", "down"):
      met += math.prod(experts[name].shape) // 2
    self.assertEqual(plan_lib.matmul_parameters(model, VOCAB)[0], met)

  @parameterized.parameters(True, False)
  def test_counts_the_models_matrices(self, tied):
    values = tiny_config.get_config()
    values.model.tie_embeddings = tied
    model = config_lib.parse(values).model
    policy = Policy(model, vocab_size=VOCAB)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    matrices = sum(
      math.prod(leaf.shape)
      for path, leaf in jax.tree_util.tree_leaves_with_path(shapes["layers"])
      if not path[-1].key.endswith(("norm", "bias"))
    )
    layers, output = plan_lib.matmul_parameters(model, VOCAB)
    self.assertEqual(layers, matrices)
    self.assertEqual(output, policy.unembedding(shapes).size)
    self.assertEqual(jnp.float32, policy.unembedding(shapes).dtype)
