"""Which checkpoints are kept, found, and named; without a run around them."""

import pathlib
import tempfile
import threading
from unittest import mock

import numpy as np
from absl.testing import parameterized
from etils import epath

from darl_jax.checkpoint import changes, run_state, sealed, store
from darl_jax.config import CheckpointConfig
from darl_jax.replay.saved import RingState, SavedSample
from darl_jax.rollout.actor import ActorState
from darl_jax.rollout.engine import EngineState, EngineStats
from darl_jax.types import (
  Finish,
  PolicySnapshot,
  SupportMask,
  TrainState,
  Trajectory,
)


def make_state(step=3, accuracy=None, **ring) -> run_state.RunState:
  held = dict(snapshots=[], samples=[], awaiting={}, counts={"generated": 0})
  return run_state.RunState(
    step=step,
    config={"seed": 0},
    accuracy=accuracy,
    learner=TrainState(
      np.array(step, np.int32), {"w": np.arange(4.0)}, {"mu": np.ones(4)}
    ),
    ring=RingState(**held | ring),
    actor=ActorState(
      drawn=5,
      in_flight={4: "d", 2: "b"},
      prompts={"next_index": 1},
      engine=EngineState(EngineStats(tokens=7, seconds=0.5), {}),
    ),
    meters={"rewards": [1, 2]},
  )


def make_trajectory(length=5, **changes) -> Trajectory:
  rng = np.random.default_rng(length)
  fields = dict(
    prompt_id=f"p{length}",
    group_id=length,
    tokens=rng.integers(9, size=length).astype(np.int32),
    loss_mask=np.arange(length) > 1,
    behavior_logprobs=rng.normal(size=length).astype(np.float32),
    behavior_entropy=rng.random(length).astype(np.float32),
    policy_version=np.full(length, 2, np.int32),
    turn=np.zeros(length, np.int32),
    finish=Finish.STOP,
    reward=0.5,
  )
  return Trajectory(**fields | changes)


class StoreTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = epath.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.said = []

  def _store(self, keep_last=2, keep_best=1) -> store.Checkpoints:
    config = CheckpointConfig(
      directory="", every=1, keep_last=keep_last, keep_best=keep_best
    )
    return store.Checkpoints(
      config, self.folder / "checkpoints", say=self.said.append
    )

  def _steps(self) -> list[int]:
    return sorted(
      int(path.name[5:]) for path in (self.folder / "checkpoints").iterdir()
    )

  @parameterized.parameters(
    (2, 0, {}, [4, 5]),
    (1, 1, {1: 0.3, 2: 0.9, 4: 0.5}, [2, 5]),
    (1, 2, {1: 0.3, 2: 0.9, 4: 0.5}, [2, 4, 5]),
    # Of equal ones the newest.
    (1, 1, {1: 0.9, 2: 0.9, 3: 0.1}, [2, 5]),
    (1, 3, {1: 0.9}, [1, 5]),
    (3, 1, {5: 1.0}, [3, 4, 5]),
  )
  def test_what_is_kept(self, keep_last, keep_best, accuracies, kept):
    checkpoints = self._store(keep_last, keep_best)
    for step in range(1, 6):
      state = make_state(step, accuracies.get(step))
      checkpoints.save(lambda state=state: state, wait=True)
    self.assertEqual(self._steps(), kept)
    # Another process, which reads the accuracies from the files.
    again = self._store(keep_last, keep_best)
    again.save(lambda: make_state(6), wait=True)
    best = sorted(accuracies, key=lambda s: (accuracies[s], s))[-keep_best:]
    last = [4, 5, 6][-keep_last:]
    expected = {*last, *(best if keep_best else [])} & {*kept, 6}
    self.assertEqual(self._steps(), sorted(expected))
    self.assertEqual(again.newest().step, 6)

  def test_what_was_cut_short_is_no_checkpoint(self):
    checkpoints = self._store()
    checkpoints.save(lambda: make_state(1), wait=True)
    half = self.folder / "checkpoints" / "step_00000002"
    half.mkdir()
    (half / "run.json").write_text("{}")
    self.assertEqual(self._store().newest().step, 1)
    self.assertEqual(self.said, [])
    checkpoints.save(lambda: make_state(3), wait=True)
    self.assertEqual(self._steps(), [1, 3])

  def test_a_damaged_one_takes_no_place(self):
    checkpoints = self._store(keep_last=1, keep_best=0)
    checkpoints.save(lambda: make_state(9), wait=True)
    checkpoints.saved_step = None
    path = self.folder / "checkpoints" / "step_00000009" / "arrays.safetensors"
    again = self._store(keep_last=2, keep_best=0)
    again.save(lambda: make_state(4), wait=True)
    path.write_bytes(path.read_bytes()[:-1])
    third = self._store(keep_last=1, keep_best=0)
    found = third.newest()
    self.assertEqual(found.step, 4)
    third.resumed_from(found)
    third.save(lambda: make_state(5), wait=True)
    self.assertEqual(self._steps(), [5])

  def test_it_says_what_it_waits_for(self):
    checkpoints = self._store()
    go_on = threading.Event()
    write = run_state.write

    def slow(folder, state):
      go_on.wait(20)
      write(folder, state)

    captured = []

    def capture(step):
      captured.append(step)
      return make_state(step)

    def say(text):
      self.said.append((text, list(captured)))
      go_on.set()

    checkpoints._say = say
    with (
      mock.patch.object(run_state, "write", slow),
      mock.patch.object(store, "_SAY_AFTER_S", 0.05),
    ):
      checkpoints.save(lambda: capture(1))
      checkpoints.save(lambda: capture(2), wait=True)
    text, captured_then = self.said[0]
    self.assertIn("waiting for the checkpoint of step 1", text)
    self.assertEqual(captured_then, [1])  # The second waits for the first.
    self.assertEqual(self._steps(), [1, 2])
    self.assertGreater(checkpoints.metrics()["checkpoint/max_stall_s"], 0)

  def test_a_disk_that_recovers(self):
    checkpoints = self._store()
    with mock.patch.object(run_state, "write", side_effect=OSError("no space")):
      checkpoints.save(lambda: make_state(1))
      checkpoints.wait()
      with self.assertRaisesRegex(store.CheckpointFailed, "no space"):
        checkpoints.save(lambda: make_state(2), wait=True)
    self.assertIsNone(checkpoints.saved_step)
    self.assertIn("step 1 could not be written", self.said[0])
    checkpoints.save(lambda: make_state(3), wait=True)
    self.assertEqual((checkpoints.saved_step, self._steps()), (3, [3]))
    self.assertEqual(checkpoints.metrics()["checkpoint/failed"], 2)


class RunStateTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = epath.Path(folder)

  def _round_trip(self, state, snapshot=None):
    run_state.write(self.folder, state)
    learner = state.learner
    return run_state.read(self.folder, learner=learner, snapshot=snapshot)

  def _assert_same(self, ours: Trajectory, theirs: Trajectory):
    for name, value in vars(theirs).items():
      got = getattr(ours, name)
      if name == "support_mask" and value is not None:
        np.testing.assert_array_equal(got.dense(), value.dense())
      elif isinstance(value, np.ndarray):
        self.assertEqual(got.dtype, value.dtype, name)
        np.testing.assert_array_equal(got, value)
      else:
        self.assertEqual(got, value, name)

  def test_nothing_in_the_ring(self):
    state = make_state()
    read = self._round_trip(state)
    self.assertEqual((read.step, read.config), (3, {"seed": 0}))
    self.assertEqual(list(read.actor.in_flight.items()), [(4, "d"), (2, "b")])
    self.assertEqual(read.actor.engine.stats, state.actor.engine.stats)
    self.assertEqual(read.meters, state.meters)
    self.assertEqual((read.ring.samples, read.ring.awaiting), ([], {}))
    np.testing.assert_array_equal(read.learner.params["w"], np.arange(4.0))

  @parameterized.parameters(False, True)
  def test_every_field(self, truncated):
    def support(length):
      if not truncated:
        return {}
      bits = np.zeros((length, 3), np.uint8)
      bits[2:] = np.random.default_rng(0).integers(256, size=(length - 2, 3))
      return dict(support_mask=SupportMask.of(bits))

    params = {
      "layers": {"w": np.arange(3).astype(run_state._BFLOAT16)},
      "norm": np.ones(2, np.float32),
    }
    state = make_state(
      snapshots=[PolicySnapshot(2, params), PolicySnapshot(3, params)],
      samples=[
        SavedSample(
          (5, 1), make_trajectory(5, **support(5)), np.float32(-0.5), 2
        ),
        SavedSample(
          (7, 0),
          make_trajectory(7, finish=Finish.LENGTH, **support(7)),
          np.float32(1),
          0,
        ),
      ],
      awaiting={
        9: [make_trajectory(9, reward=None, **support(9))],
        6: [make_trajectory(6, reward=None, **support(6))] * 2,
      },
    )
    lengths = {b"\x01\x00": 3.5, b"\x02": 1.25}
    engine = EngineState(EngineStats(), lengths)
    actor = ActorState(1, {}, None, engine)
    object.__setattr__(state, "actor", actor)
    read = self._round_trip(state, snapshot=params)
    for ours, theirs in zip(read.ring.samples, state.ring.samples, strict=True):
      self.assertEqual(
        (ours.id, ours.advantage, ours.uses),
        (theirs.id, theirs.advantage, theirs.uses),
      )
      self._assert_same(ours.trajectory, theirs.trajectory)
    self.assertEqual(list(read.ring.awaiting), [9, 6])
    for group, expected in state.ring.awaiting.items():
      for ours, theirs in zip(read.ring.awaiting[group], expected, strict=True):
        self._assert_same(ours, theirs)
    self.assertEqual(
      list(read.actor.engine.lengths.items()), [*lengths.items()]
    )
    self.assertEqual([s.version for s in read.ring.snapshots], [2, 3])
    for leaf, expected in (
      (read.ring.snapshots[0].params["layers"]["w"], params["layers"]["w"]),
      (read.ring.snapshots[1].params["norm"], params["norm"]),
    ):
      self.assertEqual(leaf.dtype, expected.dtype)
      self.assertFalse(leaf.flags.writeable)
      np.testing.assert_array_equal(leaf, expected)

  def test_another_format(self):
    run_state.write(self.folder, make_state())
    path = self.folder / "run.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with self.assertRaisesRegex(ValueError, "format 2, and this program rea"):
      run_state.read_header(self.folder)


class SealedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = epath.Path(folder) / "sealed"
    (self.folder / "deep" / "er").mkdir(parents=True)
    (self.folder / "a").write_text("first")
    (self.folder / "deep" / "er" / "b").write_bytes(bytes(range(99)))

  def test_whole(self):
    self.assertFalse(sealed.is_sealed(self.folder))
    self.assertEqual(sealed.seal(self.folder), 5 + 99)
    self.assertTrue(sealed.is_sealed(self.folder))
    self.assertIsNone(sealed.damage(self.folder))

  def test_any_byte(self):
    sealed.seal(self.folder)
    for path in pathlib.Path(self.folder).rglob("*"):
      if path.is_dir():
        continue
      content = path.read_bytes()
      for at in range(0, len(content), 7):
        for bit in (1, 32):
          changed = bytearray(content)
          changed[at] ^= bit
          path.write_bytes(changed)
          self.assertIsNotNone(sealed.damage(self.folder), (path, at, bit))
      path.write_bytes(content)
    self.assertIsNone(sealed.damage(self.folder))

  def test_said(self):
    sealed.seal(self.folder)
    (self.folder / "deep" / "er" / "b").unlink()
    self.assertEqual(sealed.damage(self.folder), "deep/er/b is missing")
    (self.folder / "a").write_text("firs")
    self.assertEqual(sealed.damage(self.folder), "a has 4 bytes instead of 5")
    (self.folder / sealed.MANIFEST).write_text("{")
    self.assertIn("is not as it was written", sealed.damage(self.folder))

  def test_from_the_first_moment_of_its_removal_it_is_not_sealed(self):
    sealed.seal(self.folder)
    with (
      mock.patch.object(
        type(self.folder), "rmtree", side_effect=OSError("killed")
      ),
      self.assertRaises(OSError),
    ):
      sealed.remove(self.folder)
    self.assertFalse(sealed.is_sealed(self.folder))


class ChangesTest(parameterized.TestCase):
  def test_what_comes_back_from_json_is_no_change(self):
    saved = {"a": {"x": [1, 2], "y": "inf"}, "b": 1}
    now = {"a": {"x": (1, 2), "y": "inf"}, "b": 1}
    self.assertEqual(changes.compare(saved, now), ([], []))

  def test_fields_that_only_one_program_knows(self):
    problems, notes = changes.compare({"a": {"old": 1}}, {"a": {"new": 2}})
    self.assertEqual(problems, [])
    self.assertEqual(
      notes, ["a.new is new, and 2", "a.old = 1 is no field any more"]
    )

  @parameterized.parameters(
    ({"seed": 1}, {"seed": 2}, True),
    ({"model": {"mlp_dim": 1}}, {"model": {"mlp_dim": 2}}, True),
    ({"model": {"remat": "none"}}, {"model": {"remat": "layer"}}, False),
    ({"rollout": {"top_p": 1.0}}, {"rollout": {"top_p": 0.9}}, True),
    ({"rollout": {"slots": 1}}, {"rollout": {"slots": 2}}, False),
    ({"learner": {"row_tokens": 9}}, {"learner": {"row_tokens": 8}}, True),
    ({"learner": {"row_tokens": 8}}, {"learner": {"row_tokens": 9}}, False),
    (
      {"prompts": {"params": {"a": 1}}},
      {"prompts": {"params": {"a": 2}}},
      True,
    ),
  )
  def test_what_stops_a_run(self, saved, now, stops):
    problems, notes = changes.compare(saved, now)
    self.assertLen(problems if stops else notes, 1)
    self.assertEmpty(notes if stops else problems)
