"""A run that was killed goes on as if nothing had happened."""

import dataclasses
import errno
import functools
import json
import pathlib
import shutil
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from configs import darl, sync_grpo
from darl_jax import config, loop, metrics
from darl_jax.checkpoint import run_state, sealed, store
from tests.fixtures.runs import (
  Ended,
  compile_once,  # noqa: F401, a fixture
  execute,
  interrupt_at,
  kill_at,
  leaves,
  make_config,
  new_workdir,
)

# Of metrics: what the clock decides, and what counts processes.
UNTIMED = ("time", "speed/", "wait/", "seconds", "checkpoint/", "verify/")


def untimed(workdir) -> list[dict]:
  return [
    {k: v for k, v in row.items() if not any(name in k for name in UNTIMED)}
    for row in metrics.read_metrics(workdir)
  ]


def assert_accounts_add_up(test, ended: Ended) -> None:
  accounting = ended.run.ring.accounting()
  accounting.check()
  test.assertEqual(ended.summary["generated"], accounting.generated)


@functools.cache
def undisturbed(**changes) -> Ended:
  return execute(
    make_config(sync_grpo, num_steps=6, warm_start__steps=2, **changes),
    new_workdir(),
  )


class SynchronousTest(parameterized.TestCase):
  """Bit for bit what it would have been."""

  def _assert_same(self, ended: Ended, workdir, **changes):
    whole = undisturbed(**changes)
    self.assertIsNone(whole.error)
    self.assertIsNone(ended.error)
    for ours, theirs in zip(
      leaves(ended.run.state), leaves(whole.run.state), strict=True
    ):
      np.testing.assert_array_equal(ours, theirs)
    self.assertEqual(untimed(workdir), untimed(whole.run.workdir))
    samples = [
      (d / "samples.jsonl").read_text() for d in (workdir, whole.run.workdir)
    ]
    self.assertEqual(*samples)
    self.assertEqual(ended.run.watch.state(), whole.run.watch.state())
    for name in ("generated", "trained", "dropped_reasons", "accuracies"):
      self.assertEqual(ended.summary[name], whole.summary[name], name)

  @parameterized.parameters(
    (kill_at, 1), (kill_at, 3), (kill_at, 5), (interrupt_at, 3)
  )
  def test_goes_on(self, fault, step):
    workdir = new_workdir()
    run_config = make_config(sync_grpo, num_steps=6, warm_start__steps=2)
    first = execute(run_config, workdir, prepare=fault(step))
    self.assertIsInstance(first.error, loop.Interrupted)
    ended = execute(run_config, workdir)
    self._assert_same(ended, workdir)
    self.assertEqual(ended.summary["resumed"], 1)
    saved = step // 2 * 2 if fault is kill_at else step
    [said] = [text for text in ended.said if "goes on after" in text]
    self.assertIn(f"goes on after step {saved}, from ", said)

  def test_killed_again_and_again(self):
    workdir = new_workdir()
    run_config = make_config(sync_grpo, num_steps=6, warm_start__steps=2)
    for step in (1, 3, 3, 5):
      execute(run_config, workdir, prepare=kill_at(step))
    ended = execute(run_config, workdir)
    self._assert_same(ended, workdir)
    # Of the processes that got as far as a checkpoint of their own.
    self.assertEqual(ended.summary["resumed"], 3)

  def test_stopped_while_it_generates(self):
    """Prompts that were drawn are generated first, under their numbers."""

    def prepare(run):
      fetch = run.actor._fetch

      def fetch_and_interrupt():
        if run.ring.version == 3:
          run.interrupt()
        return fetch()

      run.actor._fetch = fetch_and_interrupt

    workdir = new_workdir()
    run_config = make_config(sync_grpo, num_steps=6, warm_start__steps=2)
    first = execute(run_config, workdir, prepare=prepare)
    self.assertIsInstance(first.error, loop.Interrupted)
    self.assertEqual(first.summary["prompts_in_flight"], 4)
    ended = execute(run_config, workdir)
    self.assertTrue(
      any("4 groups are generated again" in t for t in ended.said)
    )
    self._assert_same(ended, workdir)

  def test_stopped_while_answers_are_verified(self):
    def prepare(run):
      begin = run.ring.begin

      def begin_and_interrupt(groups):
        begin(groups)
        if run.ring.version == 3:
          run._verify = lambda groups: None
          run._join_verifier = run._check
          run.interrupt()

      run.ring.begin = begin_and_interrupt

    workdir = new_workdir()
    run_config = make_config(sync_grpo, num_steps=6, warm_start__steps=2)
    first = execute(run_config, workdir, prepare=prepare)
    self.assertIsInstance(first.error, loop.Interrupted)
    self.assertEqual(first.summary["awaiting_verification"], 16)
    ended = execute(run_config, workdir)
    self._assert_same(ended, workdir)

  def test_killed_before_the_first_checkpoint(self):
    def prepare(run):
      run.checkpoints.save = mock.Mock()
      kill_at(3)(run)

    workdir = new_workdir()
    run_config = make_config(sync_grpo, num_steps=6, warm_start__steps=2)
    execute(run_config, workdir, prepare=prepare)
    self.assertFalse((workdir / "checkpoints").exists())
    (workdir / "summary.json").unlink()  # A killed process writes none.
    ended = execute(run_config, workdir)
    self._assert_same(ended, workdir)
    self.assertEqual(ended.summary["resumed"], 0)

  def test_truncated_sampling(self):
    workdir = new_workdir()
    changes = dict(rollout__top_p=0.9)
    run_config = make_config(
      sync_grpo, num_steps=6, warm_start__steps=2, **changes
    )
    execute(run_config, workdir, prepare=kill_at(3))
    self._assert_same(execute(run_config, workdir), workdir, **changes)

  def test_policies_that_the_learner_keeps(self):
    workdir = new_workdir()
    changes = dict(
      objective__trust_region="decoupled",
      objective__proximal="ewma",
      objective__kl_coefficient=0.1,
      objective__kl_target="reference",
    )
    run_config = make_config(
      sync_grpo, num_steps=6, warm_start__steps=2, **changes
    )
    execute(run_config, workdir, prepare=kill_at(3))
    ended = execute(run_config, workdir)
    self._assert_same(ended, workdir, **changes)
    state = ended.run.state
    self.assertGreater(float(state.proximal_average.weight), 1.5)
    # After the warm start, as version 0 was published.
    first = execute(
      make_config(sync_grpo, num_steps=0, warm_start__steps=2, **changes),
      new_workdir(),
    )
    for reference, params, now in zip(
      *map(leaves, (state.reference, first.run.state.params, state.params)),
      strict=True,
    ):
      np.testing.assert_array_equal(reference, params)
      self.assertTrue(np.any(reference != now))

  def test_another_mesh(self):
    """The same up to the order of sums."""
    workdir = new_workdir()
    run_config = make_config(sync_grpo, num_steps=6, warm_start__steps=2)
    execute(run_config, workdir, prepare=kill_at(3))
    mesh = dict(mesh__train__data=2, mesh__train__fsdp=2, mesh__rollout__data=2)
    ended = execute(
      make_config(sync_grpo, num_steps=6, warm_start__steps=2, **mesh), workdir
    )
    self.assertIsNone(ended.error)
    self.assertIn(
      "since it was saved: mesh.train.data was 1, and is 2", ended.said
    )
    self.assertLen(
      jax.tree.leaves(ended.run.state.params)[0].sharding.device_set, 4
    )
    for ours, theirs in zip(
      leaves(ended.run.state.params),
      leaves(undisturbed().run.state.params),
      strict=True,
    ):
      np.testing.assert_allclose(ours, theirs, atol=2e-3)


class AsynchronousTest(parameterized.TestCase):
  """Nothing is lost, nothing is used too often, no version goes back."""

  def test_goes_on(self):
    workdir = new_workdir()
    run_config = make_config(
      darl,
      num_steps=12,
      warm_start__steps=2,
      replay__max_uses=2,
      checkpoint__every=1,
    )
    trained, versions, begun = {}, [], {}

    def prepare(run):
      mark, begin = run.ring.mark_trained, run.ring.begin

      def mark_trained(entries, pool):
        step = run.ring.version
        # What a killed process did after its last checkpoint is undone.
        for uses in trained.values():
          uses.difference_update({s for s in uses if s >= step})
        for entry in entries:
          trained.setdefault(entry.id, set()).add(step)
        mark(entries, pool)

      def begin_groups(groups):
        begin(groups)
        for group in groups:
          begun[group.group_id] = group.prompt.id
          for trajectory in group.trajectories:
            versions.append((run.ring.version, trajectory.policy_version))

      run.ring.mark_trained = mark_trained
      run.ring.begin = begin_groups

    for fault in (kill_at(3), interrupt_at(6), kill_at(9)):
      ended = execute(
        run_config,
        workdir,
        prepare=lambda run, fault=fault: (prepare(run), fault(run)),
      )
      self.assertIsInstance(ended.error, loop.Interrupted)
    ended = execute(run_config, workdir, prepare=prepare)
    self.assertIsNone(ended.error)
    assert_accounts_add_up(self, ended)
    summary = ended.summary
    self.assertEqual(summary["status"], "complete")
    self.assertEqual(summary["steps"], 12)
    self.assertEqual(summary["resumed"], 3)
    # Every prompt that was drawn is begun or in flight, under its number.
    drawn = summary["prompts_drawn"]
    in_flight = ended.run.actor._in_flight
    self.assertEqual(
      set(range(drawn)), set(begun) | set(in_flight), "prompts were lost"
    )
    self.assertEmpty([i for i in range(drawn) if i in begun and i in in_flight])
    self.assertEqual(
      summary["generated"],
      run_config.rollout.samples_per_prompt * (drawn - len(in_flight)),
    )
    self.assertLessEqual(max(map(len, trained.values())), 2)
    self.assertEqual(
      len([u for u in trained.values() if u]), summary["trained"]
    )
    for newest, stamped in versions:
      self.assertLessEqual(stamped.max(), newest)
    self.assertEqual(
      [row["step"] for row in metrics.read_metrics(workdir)], list(range(13))
    )

  def test_what_was_in_the_ring_is_trained_on(self):
    workdir = new_workdir()
    run_config = make_config(darl, num_steps=6, replay__max_uses=3)
    first = execute(run_config, workdir, prepare=interrupt_at(4))
    held = first.run.ring.capture()
    self.assertNotEmpty(held.samples)
    again = []

    def prepare(run):
      restore = run.ring.restore

      def restore_and_look(state, **keywords):
        restore(state, **keywords)
        again.append(run.ring.capture())

      run.ring.restore = restore_and_look

    ended = execute(run_config, workdir, prepare=prepare)
    self.assertIsNone(ended.error)
    [restored] = again
    for ours, theirs in zip(restored.samples, held.samples, strict=True):
      self.assertEqual(
        (ours.id, ours.uses, ours.advantage),
        (theirs.id, theirs.uses, theirs.advantage),
      )
      for field in dataclasses.fields(ours.trajectory):
        np.testing.assert_array_equal(
          getattr(ours.trajectory, field.name),
          getattr(theirs.trajectory, field.name),
        )
    for ours, theirs in zip(restored.snapshots, held.snapshots, strict=True):
      self.assertEqual(ours.version, theirs.version)
      jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    self.assertEqual(restored.counts, held.counts)


@functools.cache
def saved_run() -> tuple[config.RunConfig, pathlib.Path]:
  """A run with three checkpoints that was killed."""
  workdir = new_workdir()
  run_config = make_config(sync_grpo, num_steps=6, warm_start__steps=2)
  execute(run_config, workdir, prepare=kill_at(5))
  return run_config, workdir


def copy_of_saved_run() -> tuple[config.RunConfig, pathlib.Path]:
  run_config, workdir = saved_run()
  copy = new_workdir()
  shutil.copytree(workdir, copy)
  return run_config, copy


def files_of(checkpoint: pathlib.Path) -> list[str]:
  return sorted(
    str(path.relative_to(checkpoint))
    for path in checkpoint.rglob("*")
    if path.is_file()
  )


def halve(path: pathlib.Path) -> None:
  content = path.read_bytes()
  path.write_bytes(content[: len(content) // 2])


def flip(path: pathlib.Path) -> None:
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(bytes(content))


class DamageTest(parameterized.TestCase):
  """Checkpoints that are not as they were written."""

  def _found(self, workdir) -> tuple[store.Found, list[str]]:
    said = []
    checkpoints = store.Checkpoints(
      saved_run()[0].checkpoint,
      store.epath.Path(workdir / "checkpoints"),
      say=said.append,
    )
    return checkpoints.newest(), said

  def test_every_retained_checkpoint_can_be_gone_on_from(self):
    _, workdir = saved_run()
    steps = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    self.assertLen(steps, 3)
    for step in steps:
      run_config, copy = copy_of_saved_run()
      for other in steps:
        if other > step:
          shutil.rmtree(copy / "checkpoints" / other)
      ended = execute(run_config, copy)
      SynchronousTest._assert_same(self, ended, copy)

  @parameterized.parameters(halve, flip, pathlib.Path.unlink)
  def test_any_file(self, damage):
    _, workdir = saved_run()
    names = files_of(workdir / "checkpoints" / "step_00000004")
    self.assertGreater(len(names), 6)
    for name in names:
      with self.subTest(name):
        _, copy = copy_of_saved_run()
        path = copy / "checkpoints" / "step_00000004" / name
        if not path.stat().st_size:
          continue  # Nothing of it can be lost but itself.
        damage(path)
        found, said = self._found(copy)
        self.assertEqual(found.step, 2)
        if name == sealed.MANIFEST and damage is pathlib.Path.unlink:
          continue  # As if its writing had been cut short.
        self.assertLen(said, 1)
        self.assertIn("step_00000004 is damaged: ", said[0])
        self.assertIn(pathlib.Path(name).name, said[0])

  def test_a_run_goes_on_from_the_one_before(self):
    run_config, copy = copy_of_saved_run()
    flip(copy / "checkpoints" / "step_00000004" / "arrays.safetensors")
    ended = execute(run_config, copy)
    SynchronousTest._assert_same(self, ended, copy)
    self.assertTrue(any("goes on after step 2" in text for text in ended.said))
    found, said = self._found(copy)  # The damaged one is replaced.
    self.assertEqual((found.step, said), (6, []))

  def test_all_are_damaged(self):
    run_config, copy = copy_of_saved_run()
    folders = sorted((copy / "checkpoints").iterdir())
    for folder in folders:
      halve(folder / "run.json")
    with self.assertRaises(config.ConfigError) as caught:
      execute(run_config, copy)
    self.assertLen(caught.exception.problems, 3)
    for folder in folders:
      self.assertIn(
        f"{folder} is damaged: run.json has ", str(caught.exception)
      )

  def test_they_are_gone(self):
    run_config, copy = copy_of_saved_run()
    shutil.rmtree(copy / "checkpoints")
    with self.assertRaisesRegex(
      config.ConfigError,
      "already holds a run of 5 steps, and there is no checkpoint",
    ):
      execute(run_config, copy)


class DiskTest(parameterized.TestCase):
  """A checkpoint that cannot be written costs no step."""

  def _full(self, steps):
    write = run_state.write

    def write_or_not(folder, state):
      if state.step in steps:
        (folder / "half").write_text("...")
        raise OSError(errno.ENOSPC, "No space left on device")
      write(folder, state)

    return mock.patch.object(run_state, "write", write_or_not)

  def test_a_full_disk_for_a_while(self):
    workdir = new_workdir()
    run_config = make_config(sync_grpo, num_steps=6, warm_start__steps=2)
    with self._full([2, 4]):
      ended = execute(run_config, workdir)
    SynchronousTest._assert_same(self, ended, workdir)
    [first, _] = [text for text in ended.said if "could not be written" in text]
    self.assertIn("the checkpoint of step 2 could not be written to ", first)
    self.assertIn("No space left on device", first)
    self.assertEqual(ended.run.checkpoints.metrics()["checkpoint/failed"], 2)
    self.assertEqual(
      sorted(path.name for path in (workdir / "checkpoints").iterdir()),
      ["step_00000000", "step_00000006"],
    )

  def test_metrics_that_the_disk_does_not_take(self):
    def prepare(run):
      lines = run.writer._lines
      write, calls = lines.write, []

      def write_or_not(line):
        calls.append(line)
        if len(calls) in (2, 4):
          return write(line[:9])  # As a full disk does.
        return write(line)

      run.writer._lines = mock.Mock(wraps=lines, closed=False)
      run.writer._lines.write = write_or_not

    workdir = new_workdir()
    ended = execute(
      make_config(sync_grpo, num_steps=6, warm_start__steps=2),
      workdir,
      prepare=prepare,
    )
    self.assertIsNone(ended.error)
    lost = [text for text in ended.said if "measured is lost" in text]
    self.assertLen(lost, 2)
    self.assertIn("what step 1 measured is lost: ", lost[0])
    self.assertIn("No space left on device", lost[0])
    steps = [row["step"] for row in metrics.read_metrics(workdir)]
    self.assertEqual(steps, [0, 2, 3, 4, 5, 6])

  def test_a_full_disk_at_the_end(self):
    with self._full(range(1, 99)):
      ended = execute(
        make_config(sync_grpo, num_steps=3, warm_start__steps=2), new_workdir()
      )
    self.assertIsInstance(ended.error, store.CheckpointFailed)
    self.assertIn("No space left", ended.summary["error"])

  def test_a_folder_that_vanishes(self):
    workdir = new_workdir()

    def prepare(run):
      take_step = run.learner.step

      def step_and_delete(state, batch):
        result = take_step(state, batch)
        if int(result[0].step) == 3:
          run.checkpoints.wait()
          shutil.rmtree(workdir / "checkpoints")
        return result

      run.learner.step = step_and_delete

    run_config = make_config(sync_grpo, num_steps=6, warm_start__steps=2)
    ended = execute(run_config, workdir, prepare=prepare)
    SynchronousTest._assert_same(self, ended, workdir)


class ChangedTest(parameterized.TestCase):
  """Another config than the run was saved with."""

  def test_what_cannot_be_gone_on_with(self):
    _, copy = copy_of_saved_run()
    changed = make_config(
      sync_grpo,
      num_steps=6,
      seed=1,
      model__mlp_dim=48,
      rollout__temperature=0.5,
      learner__row_tokens=21,
    )
    with self.assertRaises(config.ConfigError) as caught:
      execute(changed, copy)
    self.assertEqual(
      [problem.partition(" ")[0] for problem in caught.exception.problems],
      ["learner.row_tokens", "model.mlp_dim", "rollout.temperature", "seed"],
    )
    self.assertIn("Try seed=0, or another workdir.", str(caught.exception))

  def test_what_was_not_saved(self):
    _, copy = copy_of_saved_run()
    changed = make_config(
      sync_grpo,
      num_steps=6,
      warm_start__steps=2,
      objective__trust_region="decoupled",
      objective__proximal="ewma",
      objective__kl_coefficient=0.1,
      objective__kl_target="reference",
    )
    with self.assertRaises(config.ConfigError) as caught:
      execute(changed, copy)
    reference, proximal = caught.exception.problems
    self.assertIn("average of policies", proximal)
    self.assertIn("Try objective.proximal='recompute'", proximal)
    self.assertIn("Try objective.kl_target='behavior'", reference)

  def test_what_can(self):
    _, copy = copy_of_saved_run()
    changed = make_config(
      darl,
      num_steps=8,
      replay__max_uses=2,
      learner__learning_rate=1e-4,
      learner__final_learning_rate=1e-4,
      rollout__samples_per_prompt=3,
    )
    ended = execute(changed, copy)
    self.assertIsNone(ended.error)
    self.assertEqual(ended.summary["steps"], 8)
    assert_accounts_add_up(self, ended)
    self.assertIn("since it was saved: num_steps was 6, and is 8", ended.said)
    self.assertIn(
      "since it was saved: replay.max_uses was 1, and is 2", ended.said
    )

  def test_a_file_of_prompts_that_changed(self):
    path = new_workdir().with_suffix(".jsonl")

    def write(answers):
      lines = [
        {"question": f"{i}?", "answer": str(answer)}
        for i, answer in enumerate(answers)
      ]
      path.write_text("\n".join(map(json.dumps, lines)))

    write(range(60))
    workdir = new_workdir()
    run_config = make_config(
      sync_grpo,
      prompts__dataset=str(path),
      prompts__params='{"verifier": "math", "box": "preferred"}',
      prompts__heldout_fraction=0.3,
      num_steps=3,
    )
    first = execute(run_config, workdir, prepare=kill_at(2))
    self.assertIsInstance(first.error, loop.Interrupted)
    write([*range(59), 7])
    with self.assertRaisesRegex(config.ConfigError, "gives other prompts than"):
      execute(run_config, workdir)
    write(range(60))
    self.assertIsNone(execute(run_config, workdir).error)

  def test_a_workdir_in_use(self):
    run_config, copy = copy_of_saved_run()
    held = loop.workdir_lib.claim(copy)
    with self.assertRaisesRegex(config.ConfigError, "in use by another proces"):
      execute(run_config, copy)
    held.close()
    self.assertIsNone(execute(run_config, copy).error)

  def test_a_directory_of_its_own(self):
    """A machine that is lost takes the workdir with it."""
    directory = str(new_workdir())
    run_config = make_config(
      sync_grpo,
      num_steps=6,
      warm_start__steps=2,
      checkpoint__directory=directory,
    )
    execute(run_config, new_workdir(), prepare=kill_at(3))
    ended = execute(run_config, new_workdir())
    self.assertIsNone(ended.error)
    for ours, theirs in zip(
      leaves(ended.run.state), leaves(undisturbed().run.state), strict=True
    ):
      np.testing.assert_array_equal(ours, theirs)
