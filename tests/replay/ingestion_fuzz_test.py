"""Anything given to the ring: a ValueError that names it, or exact accounts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import darl
from darl_jax import config as config_lib
from darl_jax import types
from darl_jax.replay import ring as ring_lib

_PROMPT_TOKENS = 2
_WIDTH = 2  # Bytes of a support: 16 tokens.
_DEFAULT = config_lib.parse(darl.get_config())
_ARRAYS = (
  "tokens",
  "loss_mask",
  "behavior_logprobs",
  "behavior_entropy",
  "policy_version",
  "turn",
)

# What an array of a trajectory may be instead of what it was.
_SPOILED = {
  "none": lambda array: None,
  "list": lambda array: array.tolist(),
  "ragged": lambda array: [[1], [2, 3]],
  "text": lambda array: "tokens",
  "number": lambda array: 3,
  "scalar": lambda array: np.array(3),
  "device": lambda array: jnp.zeros(array.shape, array.dtype),
  "objects": lambda array: array.astype(object),
  "double": lambda array: array.astype(np.float64),
  "swapped": lambda array: array.astype(array.dtype.newbyteorder()),
  "matrix": lambda array: array[:, None],
  "masked": lambda array: np.ma.masked_array(array),
  "short": lambda array: array[:-1],
  "long": lambda array: np.concatenate([array, array]),
  "empty": lambda array: array[:0],
  "view": lambda array: np.repeat(array, 2)[::2],
  "zeros": lambda array: np.zeros_like(array),
  "ones": lambda array: np.ones_like(array),
  "negative": lambda array: np.full(array.shape, -1).astype(array.dtype),
  "newer": lambda array: array + np.ones_like(array),
  "reversed": lambda array: array[::-1],
  "nan": lambda array: _last(array, np.nan),
  "inf": lambda array: _last(array, np.inf),
  "huge": lambda array: _last(array, 2**31 - 1),
}
# What else of a trajectory.
_CHANGES = {
  "other group": dict(group_id=999),
  "other prompt": dict(prompt_id="x"),
  "no prompt": dict(prompt_id=None),
  "no finish": dict(finish=None),
  "text as finish": dict(finish="stop"),
  "aborted": dict(finish=types.Finish.ABORTED),
  "rewarded": dict(reward=np.nan),
}
# And of the support of a trajectory.
_SUPPORTS = {
  "none": lambda mask: None,
  "array": lambda mask: mask.dense(),
  "object": lambda mask: object(),
  "wide": lambda mask: dataclasses.replace(mask, width=_WIDTH + 1),
  "no width": lambda mask: dataclasses.replace(mask, width=None),
  "flat": lambda mask: dataclasses.replace(mask, width=0),
  "unpaired": lambda mask: dataclasses.replace(mask, data=mask.data[1:]),
  "nothing": lambda mask: dataclasses.replace(mask, data=mask.data * 0),
  "unsorted": lambda mask: dataclasses.replace(
    mask, columns=mask.columns[::-1]
  ),
  "no offsets": lambda mask: dataclasses.replace(
    mask, offsets=mask.offsets[:0]
  ),
  "falling": lambda mask: dataclasses.replace(mask, offsets=mask.offsets[::-1]),
  "overflowing": lambda mask: dataclasses.replace(
    mask, offsets=_overflowing(mask.offsets)
  ),
}
_REWARDS = (
  0.0, 1.0, 0.0, 1.0, 0.5, -1.0, None, np.nan, np.inf, -np.inf, 1e308, -1e308,
  5e-324, 3e38, -3e38, 10**400, np.float32(0.25), np.int64(1), True, "1",
  np.array([1.0]), 1j,
)  # fmt: skip
_FAILURES = (None, None, None, "timeout", "crash: -9", "", ":", 7, b"x")


def _last(array: np.ndarray, value: float) -> np.ndarray:
  changed = array.copy()
  with np.errstate(invalid="ignore"):
    changed[-1:] = np.array([value]).astype(array.dtype)
  return changed


def _overflowing(offsets: np.ndarray) -> np.ndarray:
  """Each is above the one before, if differences wrap around."""
  changed = offsets.copy()
  changed[1:-1] = [2**63 - 1, -(2**63)][: len(offsets) - 2] + [-1] * max(
    len(offsets) - 4, 0
  )
  return changed


@dataclasses.dataclass(frozen=True)
class Spec:
  """A group to be: shrunk by hypothesis as the numbers it is made of.

  Attributes:
    seed: Of lengths, versions and masks.
    ids: Group ids to take: 0 for a new one, else one begun before.
    size: Samples.
    spoiled: (sample, array, how) of what is wrong with it.
  """

  seed: int
  repeated: bool
  size: int
  spoiled: tuple[tuple[int, str, str], ...]


_SPOILS = st.one_of(
  st.tuples(
    st.integers(0, 3),
    st.sampled_from(_ARRAYS),
    st.sampled_from(sorted(_SPOILED)),
  ),
  st.tuples(
    st.integers(0, 3), st.just("field"), st.sampled_from(sorted(_CHANGES))
  ),
  st.tuples(
    st.integers(0, 3), st.just("support"), st.sampled_from(sorted(_SUPPORTS))
  ),
  st.tuples(
    st.just(0),
    st.just("group"),
    st.sampled_from(["no samples", "text id", "float id", "true id", "no one"]),
  ),
)


@st.composite
def _specs(draw, *, sound: bool):
  repeated = not sound and draw(st.sampled_from([False, False, False, True]))
  spoils = st.lists(_SPOILS, min_size=1, max_size=2)
  return Spec(
    seed=draw(st.integers(0, 2**16)),
    repeated=repeated,
    size=draw(st.integers(2 if sound else 1, 4)),
    spoiled=() if sound or repeated else tuple(draw(spoils)),
  )


@st.composite
def _operations(draw):
  """One operation; two of three are as a run's, so that the ring fills."""
  sound = draw(st.integers(0, 2)) > 0
  name = draw(st.sampled_from(["begin", "admit", "step", "push"]))
  if name == "push":
    return name, 1 if sound else draw(st.sampled_from([2, 0, -1]))
  if name == "begin":
    specs = draw(st.lists(_specs(sound=True), min_size=2, max_size=3))
    if not sound:
      specs.append(draw(_specs(sound=False)))
    return name, specs
  if name == "admit" and sound:
    rewards = draw(st.permutations([0.0, 1.0, 0.5, 1.0]))
    return name, draw(st.integers(0, 1)), rewards, [], 0
  if name == "admit":
    return (
      name,
      draw(st.integers(0, 5)),
      draw(st.lists(st.sampled_from(_REWARDS), min_size=4, max_size=4)),
      draw(st.lists(st.sampled_from(_FAILURES), max_size=4)),
      draw(st.sampled_from([0, 0, 0, 0, -1, 1])),
    )
  if sound:
    return name, draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 2, 4]))
  chosen = st.lists(st.integers(0, 5), max_size=4)
  return "train", draw(st.integers(0, 5)), draw(chosen)


_RINGS = st.fixed_dictionaries(
  dict(
    num_snapshots=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    max_uses=st.integers(1, 3),
    trajectory_bytes=st.sampled_from([2**20, 2**19, 2**18, 4000, 600, 1]),
    snapshot_bytes=st.sampled_from([1, 2**20]),
  )
)


class _Driver:
  """Applies operations to a ring and checks it after each.

  Attributes:
    refused: Of each operation that was: its message.
    begun: Groups that the ring took in, in order.
  """

  def __init__(self, test, ring, bounds, truncated):
    self.test, self.ring, self.bounds = test, ring, bounds
    self.truncated = truncated
    self.version = -1
    self.next_id = 0
    self.begun: list[types.TrajectoryGroup] = []
    self.awaiting: list[types.TrajectoryGroup] = []
    self.pools: list[ring_lib.Pool] = []
    self.generated = 0
    self.trained: set = set()

  def apply(self, operation):
    name, *arguments = operation
    before = self.ring.accounting()
    try:
      getattr(self, name)(*arguments)
    except ValueError as error:
      # Which, and why; and all or nothing.
      self.test.assertRegex(
        str(error), r"^(group \S+|snapshot -?\d+|count = |an? entry|entry )"
      )
      self.test.assertNotRegex(str(error), "ambiguous|inhomogeneous|repeats")
      self.test.assertEqual(self.ring.accounting(), before)
    self.check()

  def push(self, step):
    version = max(self.version + step, 0)
    params = {"kernel": np.zeros(3, np.float32)}
    self.ring.push_snapshot(types.PolicySnapshot(version, params))
    self.version = version

  def begin(self, specs):
    groups = [self._group(spec) for spec in specs]
    self.ring.begin(groups)
    self.begun += groups
    self.awaiting += groups
    self.generated += sum(len(group.trajectories) for group in groups)

  def admit(self, which, rewards, failures, extra):
    """Of one that awaits it; else of one admitted before, or of none."""
    size, group_id = 1, 12345
    if groups := self.awaiting or self.begun:
      group = groups[which % len(groups)]
      size, group_id = len(group.trajectories), group.group_id
    size = max(size + extra, 0)
    trajectories = [
      dataclasses.replace(_trajectory(group_id, 0, seed=0), reward=reward)
      for reward in (rewards * 2)[:size]
    ]
    prompt = types.Prompt("p", np.zeros(2, np.int32), {})
    failures = tuple(failures)
    if len(failures) > 1:  # Mostly one for each.
      failures = (failures * 5)[:size]
    self.ring.admit(
      types.TrajectoryGroup(group_id, prompt, tuple(trajectories), failures)
    )
    self.awaiting = [g for g in self.awaiting if g.group_id != group_id]

  def step(self, count, pushes):
    """Takes and trains on all or the first ones, as the loop does.

    What is pushed in between makes some of them stale: they were trained on.
    """
    held = len(self.pools)
    self.take(count)
    for _ in range(pushes):
      self.push(1)
    if len(self.pools) > held:
      pool = self.pools[-1]
      taken = len(pool) if count == 3 else count
      self.train(len(self.pools) - 1, range(taken))

  def take(self, count):
    if self.version < 0:
      with self.test.assertRaisesRegex(ring_lib.Starved, "no snapshot"):
        self.ring.take(count, 0.0)
      return
    try:
      pool = self.ring.take(count, 0.0)
    except ring_lib.Starved as error:
      self.test.assertIn("Try ", str(error))
      self.test.assertIsNone(self.ring.try_take(count))
      return
    self.test.assertGreaterEqual(len(pool), count)
    self.check_pool(pool)
    self.pools.append(pool)

  def train(self, which, chosen):
    if not self.pools:
      return
    pool = self.pools[which % len(self.pools)]
    entries = [pool.entries[i % len(pool)] for i in chosen]
    self.ring.mark_trained(entries, pool)
    self.trained |= {entry.id for entry in entries}

  def check(self):
    accounts = self.ring.accounting()
    accounts.check()
    self.test.assertEqual(accounts.generated, self.generated)
    self.test.assertEqual(accounts.trained, len(self.trained))
    self.test.assertTrue(all(n >= 0 for n in accounts.counts().values()))
    for reasons in (accounts.expired, accounts.dropped):
      self.test.assertTrue(all(reasons.values()))
    if self.version >= 0:
      state = self.ring.occupancy()
      self.test.assertLessEqual(len(state.slots), self.bounds["num_snapshots"])
      if not self.awaiting:
        held = sum(slot.num_bytes for slot in state.slots)
        self.test.assertEqual(state.trajectory_bytes, held)

  def check_pool(self, pool):
    self.test.assertEqual(pool.version, self.version)
    ids = [entry.id for entry in pool.entries]
    self.test.assertEqual(ids, sorted(set(ids)))
    for entry in pool.entries:
      trajectory = entry.trajectory
      self.test.assertIs(type(trajectory.reward), float)
      self.test.assertTrue(np.isfinite(trajectory.reward))
      self.test.assertTrue(np.isfinite(entry.advantage))
      self.test.assertNotEqual(entry.advantage, 0)
      self.test.assertBetween(entry.age, 0, self.bounds["max_staleness"])
      self.test.assertLess(entry.uses, self.bounds["max_uses"])
      self.test.assertEqual(trajectory.support_mask is not None, self.truncated)
      mask = trajectory.loss_mask
      self.test.assertTrue(mask.any() and not mask[0])
      for name in _ARRAYS:
        array = getattr(trajectory, name)
        self.test.assertEqual(array.shape, mask.shape)
        self.test.assertFalse(array.flags.writeable)
      self.test.assertTrue(np.all(trajectory.tokens >= 0))
      for name in ("behavior_logprobs", "behavior_entropy"):
        values = getattr(trajectory, name)[mask]
        self.test.assertTrue(np.all(np.isfinite(values)))

  def _group(self, spec):
    group_id = self.next_id
    if spec.repeated and self.begun:
      group_id = self.begun[spec.seed % len(self.begun)].group_id
    self.next_id += 1
    trajectories = [
      _trajectory(group_id, self.version, seed=spec.seed + i)
      for i in range(spec.size)
    ]
    if self.truncated:
      trajectories = [_supported(t) for t in trajectories]
    prompt = types.Prompt(f"p{group_id}", np.zeros(2, np.int32), {})
    for sample, what, how in spec.spoiled:
      at = sample % spec.size
      if what == "group":
        if how == "no samples":
          trajectories = []
          break
        if how == "no one":
          trajectories[0] = None
          break
        group_id = {"text id": "7", "float id": 7.5, "true id": True}[how]
        trajectories = [
          dataclasses.replace(t, group_id=group_id) for t in trajectories
        ]
      elif what == "field":
        trajectories[at] = dataclasses.replace(
          trajectories[at], **_CHANGES[how]
        )
      elif what == "support":
        mask = _supported(_trajectory(0, 0, seed=spec.seed + at)).support_mask
        trajectories[at] = dataclasses.replace(
          trajectories[at], support_mask=_SUPPORTS[how](mask)
        )
      else:
        original = _trajectory(0, self.version, seed=spec.seed + at)
        trajectories[at] = dataclasses.replace(
          trajectories[at], **{what: _SPOILED[how](getattr(original, what))}
        )
    return types.TrajectoryGroup(group_id, prompt, tuple(trajectories))


def _trajectory(group_id, newest, *, seed) -> types.Trajectory:
  """Sound; of at least one sampled token, mostly, and of versions so far."""
  rng = np.random.default_rng(seed)
  length = _PROMPT_TOKENS + int(rng.integers(0, 8))
  mask = np.arange(length) >= _PROMPT_TOKENS
  mask &= rng.random(length) < 0.95
  oldest = max(newest - int(rng.integers(0, 5)), 0)
  versions = np.sort(rng.integers(oldest, max(newest, 0) + 1, length))
  if rng.random() < 0.7:
    versions[:] = versions[0]
  versions[:_PROMPT_TOKENS] = versions[0]
  return types.Trajectory(
    prompt_id=f"p{group_id}",
    group_id=group_id,
    tokens=rng.integers(0, 8 * _WIDTH, length).astype(np.int32),
    loss_mask=mask,
    behavior_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
    behavior_entropy=np.where(mask, 0.7, 0).astype(np.float32),
    policy_version=versions.astype(np.int32),
    turn=np.zeros(length, np.int32),
    finish=types.Finish.STOP,
  )


def _supported(sample: types.Trajectory) -> types.Trajectory:
  """Each sampled token may be drawn, and token 9."""
  bits = np.zeros((len(sample.tokens), 8 * _WIDTH), bool)
  at = np.flatnonzero(sample.loss_mask)
  bits[at, sample.tokens[at]] = bits[at, 9] = True
  packed = np.packbits(bits, axis=1, bitorder="little")
  return dataclasses.replace(sample, support_mask=types.SupportMask.of(packed))


class IngestionFuzzTest(parameterized.TestCase):
  @settings(max_examples=900, deadline=None, derandomize=True, database=None)
  @given(
    _RINGS,
    st.sampled_from(["group", "group_centered", "rloo"]),
    st.booleans(),
    st.lists(_operations(), min_size=4, max_size=20),
  )
  def test_refused_by_name_or_accounted_for(
    self, bounds, advantage, truncated, operations
  ):
    ring = ring_lib.Ring(
      dataclasses.replace(_DEFAULT.replay, **bounds),
      advantage=advantage,
      reward_tolerance=1e-6,
      groups_per_version=2,
      truncated=truncated,
    )
    driver = _Driver(self, ring, bounds, truncated)
    driver.check()
    # A run begins with a version and some samples; now and then it does not.
    if operations[0][0] != "push":
      driver.apply(("push", 1))
      groups = [Spec(seed, False, 4, ()) for seed in (1, 2)]
      driver.apply(("begin", groups))
      driver.apply(("admit", 0, [1.0, 0.0, 0.5, 1.0], [], 0))
    for operation in operations:
      driver.apply(operation)


if __name__ == "__main__":
  absltest.main()
