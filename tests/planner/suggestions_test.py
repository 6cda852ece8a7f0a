"""What is suggested where something does not fit: the arithmetic, by hand."""

import dataclasses

from absl.testing import parameterized

from configs import darl
from darl_jax import config as config_lib
from darl_jax.planner import chips, suggestions
from darl_jax.planner.programs import Memory, Program

GIB = 2**30
V5E = chips.CHIPS["v5e"]  # 15.75 GiB.


def config(**changes) -> config_lib.RunConfig:
  values = darl.get_config()
  values.learner.update(dict(rows=64, row_tokens=1024, score_rows=16))
  values.model.head_dim = 128
  values.replay.snapshot_bytes = 100 * GIB
  values.mesh.rollout.data = 2
  with values.unlocked():
    for name, value in changes.items():
      values.update_from_flattened_dict({name.replace("__", "."): value})
  return config_lib.parse(values)


def program(name: str, mesh: str = "train", **changes) -> Program:
  """Of 4 GiB of arguments, and 20 GiB in all."""
  values = dict(
    name=name,
    mesh=mesh,
    devices=1,
    chip=V5E,
    resident=0.0,
    tokens=1.0,
    model_flops=1.0,
    compile_seconds=1.0,
    memory=Memory(4 * GIB, 0, 0, 16 * GIB, 0, 20 * GIB),
  )
  return Program(**(values | changes))


def suggest(run, *which, ring_bytes=GIB, frozen=0.0) -> list[str]:
  return suggestions.suggest(
    run,
    V5E,
    which,
    snapshot_bytes=GIB,
    ring_bytes=ring_bytes,
    host_bytes=192e9,
    param_bytes=dict(trained=GIB, frozen=frozen, snapshot=GIB / 2, kept=frozen),
  )


class SuggestionsTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(learner__row_tokens=1000), "learner.row_tokens=1024 and heads"),
    (dict(model__head_dim=64), "model.head_dim=64 attention takes no kernel"),
  )
  def test_attention_without_its_kernel(self, changes, words):
    small = program("train_step", memory=Memory(GIB, 0, 0, GIB, 0, 2 * GIB))
    [line] = suggest(config(**changes), small)
    self.assertIn(words, line)
    # So short a row is no matter.
    self.assertEmpty(suggest(config(learner__row_tokens=48), small))

  def _assert_one(self, lines, *parts):
    [line] = [line for line in lines if parts[0] in line]
    for part in parts:
      self.assertIn(part, line)

  def test_nothing_where_all_fits(self):
    small = Memory(GIB, 0, 0, GIB, 0, 2 * GIB)
    self.assertEmpty(suggest(config(), program("train_step", memory=small)))

  def test_fewer_rows_at_a_time(self):
    # 4 GiB of state and 1 of gradients stay; 15 GiB go with the 64 rows.
    lines = suggest(config(), program("train_step"))
    self._assert_one(
      lines, "learner.microbatches=2 (of 1)", "32 rows", "12.5 GiB"
    )
    # Two sums of gradients stay, 14 GiB go with 32 rows: a half is enough.
    lines = suggest(config(learner__microbatches=2), program("train_step"))
    self._assert_one(lines, "learner.microbatches=4 (of 2)", "13.0 GiB")

  def test_as_many_as_it_takes(self):
    much = Memory(4 * GIB, 0, 0, 96 * GIB, 0, 100 * GIB)
    lines = suggest(config(), program("train_step", memory=much))
    # 5 + 95 / 16 = 10.9 GiB, where 5 + 95 / 8 = 16.9.
    self._assert_one(lines, "learner.microbatches=16 (of 1)", "10.9 GiB")

  def test_one_row_is_the_least(self):
    run = config(learner__microbatches=64)
    lines = suggest(run, program("train_step"))
    self.assertFalse([line for line in lines if "microbatches" in line])

  def test_recomputation(self):
    lines = suggest(config(), program("train_step"))
    # 2 layers, 64 rows of 1024 tokens, 64 wide, 4 bytes.
    self._assert_one(lines, "model.remat='layer' (of 'none')", "0.0 GiB")
    lines = suggest(config(model__remat="layer"), program("train_step"))
    self.assertFalse([line for line in lines if "remat" in line])

  def test_more_devices_for_the_state(self):
    large = Memory(40 * GIB, 0, 0, 4 * GIB, 0, 44 * GIB)
    lines = suggest(config(), program("train_step", memory=large))
    # 41 GiB of state and gradients over 4, and 3 GiB: 13.3.
    self._assert_one(lines, "mesh.train.fsdp=4 (of 1)", "4 train", "13.2 GiB")

  def test_a_compiler_out_of_memory(self):
    failed = program(
      "train_step", memory=None, needed=20 * GIB, failure="RESOURCE_EXHAUSTED"
    )
    # Parameters, moments and gradients of 1 GiB each, and 16 GiB of rows.
    self._assert_one(
      suggest(config(), failed), "learner.microbatches=2 (of 1)", "12.0 GiB"
    )

  def test_no_figure_no_arithmetic(self):
    failed = program("train_step", memory=None, failure="no VMEM for kernel")
    self.assertEqual(
      suggest(config(), failed), ["train_step: no VMEM for kernel"]
    )

  def test_the_scoring_pass(self):
    # Parameters and 2 GiB beside it stay; 19 GiB go with 16 rows.
    lines = suggest(config(), program("score", resident=2 * GIB))
    self._assert_one(lines, "learner.score_rows=10 (of 16)", "14.9 GiB")

  def test_frozen_parameters_stay_too(self):
    run = config()
    failed = program(
      "train_step", memory=None, needed=20 * GIB, failure="RESOURCE_EXHAUSTED"
    )
    # 4 GiB for what is trained, 2 frozen, and 14 GiB of rows.
    self._assert_one(
      suggest(run, failed, frozen=2 * GIB),
      "learner.microbatches=2 (of 1)",
      "13.0 GiB",
    )
    # 17 GiB go with 16 rows, 17.5 GiB with 320 slots.
    scoring = program("score", resident=0.0)
    lines = suggest(run, scoring, frozen=2 * GIB)
    self._assert_one(lines, "learner.score_rows=12 (of 16)", "15.8 GiB")
    lines = suggest(run, program("decode", "rollout"), frozen=1.5 * GIB)
    self._assert_one(lines, "rollout.slots=242 (of 320)", "15.7 GiB")

  def test_the_sampler(self):
    # Two snapshots stay; 19.5 GiB go with 320 slots; 2 data slices.
    run = config()
    lines = suggest(run, program("decode", "rollout", resident=GIB / 2))
    self._assert_one(lines, "rollout.slots=242 (of 320)", "15.7 GiB")
    self._assert_one(
      lines, "mesh.rollout.tensor=2 (of 1)", "4 rollout", "10.2 GiB"
    )
    self._assert_one(lines, "rollout.dtype='bfloat16'")

  def test_a_tensor_axis_that_divides_no_heads_is_not_suggested(self):
    much = Memory(4 * GIB, 0, 0, 96 * GIB, 0, 100 * GIB)
    lines = suggest(config(), program("decode", "rollout", memory=much))
    self.assertFalse([line for line in lines if "tensor" in line])

  def test_budget_of_the_ring(self):
    run = config(replay__snapshot_bytes=3 * GIB)
    self._assert_one(
      suggest(run), f"replay.snapshot_bytes={5 * GIB}", "holds 3 snapshots"
    )
    self.assertEmpty(suggest(config(replay__snapshot_bytes=5 * GIB)))

  def test_memory_of_the_host(self):
    run = dataclasses.replace(config())
    lines = suggest(run, ring_bytes=1000 * GIB)
    # 192e9 bytes less 0.25 GiB of trajectories: 178 snapshots of 1 GiB.
    self._assert_one(lines, "replay.num_snapshots=177", "1000 GiB")
