"""The sampling engine: continuous batching over a paged cache.

Samples decode in a fixed number of slots. Between two chunks of tokens those
that have ended leave and waiting ones enter, new weights are taken up, and
pages are given out; shapes stay the same, so that each program compiles once
for each width of its page tables, when it is first wanted.
"""

import dataclasses
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from darl_jax import config as config_lib
from darl_jax.config import ConfigError, RolloutConfig
from darl_jax.models.transformer import Policy
from darl_jax.rollout.decode import Chunk, Decoder, Pages, Rows, request_keys
from darl_jax.rollout.pages import PagePool
from darl_jax.rollout.placement import unstacked_on
from darl_jax.rollout.sampling import Sampled, Sampling
from darl_jax.rollout.schedule import Group, Prefix, Sample, Schedule
from darl_jax.sharding import rules
from darl_jax.types import (
  Finish,
  Params,
  PolicySnapshot,
  Prompt,
  SupportMask,
  Trajectory,
  TrajectoryGroup,
)

# Of JAX's default generator.
_KEY_WORDS = 2
# Folded into the run's seed: the parameters start from the bare one.
_SAMPLING_STREAM = 1
# Page tables of decode have at most so many widths, in equal steps of at least
# so many tokens.
_MAX_WIDTHS = 4
_MIN_STEP_TOKENS = 32
# Samples of a prompt attend to it together from so many tokens on. Below, it
# costs more to arrange the queries than to read its keys for each of them.
_SHARED_TOKENS = 128
# How many prompts' lengths are remembered, the latest.
_REMEMBERED_PROMPTS = 2**16
# Tokens found in the cache are used from so many on: what follows them takes a
# row of prefill for itself, where short prompts share one.
_LEAST_MATCH = 128
_INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class EngineStats:
  """Counts since the engine was made; differences of two say what was between.

  Attributes:
    tokens: Sampled and delivered.
    aborted_tokens: Sampled by samples that were given up.
    aborted: Samples given up, with their group or since enough others of it
      had ended before.
    slot_tokens: Tokens that all slots could have sampled.
    prefill_tokens: Read, padding apart.
    prefix_hits: Tokens that were found in the cache instead.
    preemptions: Samples that lost their pages to others.
    swaps: Weights taken up while samples were running.
    chunks: Decode dispatches.
    seconds: Spent generating.
  """

  tokens: int = 0
  aborted_tokens: int = 0
  aborted: int = 0
  slot_tokens: int = 0
  prefill_tokens: int = 0
  prefix_hits: int = 0
  preemptions: int = 0
  swaps: int = 0
  chunks: int = 0
  seconds: float = 0.0

  def plus(self, **counts: float) -> "EngineStats":
    """With these added."""
    values = {name: getattr(self, name) + n for name, n in counts.items()}
    return dataclasses.replace(self, **values)

  def since(self, start: "EngineStats") -> "EngineStats":
    """What was counted after ``start``."""
    return EngineStats(
      **{
        field.name: getattr(self, field.name) - getattr(start, field.name)
        for field in dataclasses.fields(self)
      }
    )

  @property
  def slot_occupancy(self) -> float:
    """Share of the slots' tokens that were delivered."""
    return self.tokens / self.slot_tokens if self.slot_tokens else 0.0


class EngineState(NamedTuple):
  """What an engine knows beside the samples that run in it.

  Attributes:
    stats: What it counted.
    lengths: Mean length of the last responses to a prompt, by its tokens as
      bytes of int32, the latest last.
  """

  stats: EngineStats
  lengths: Mapping[bytes, float]


class _InFlight(NamedTuple):
  """A chunk that was dispatched: its samples by row, tokens, and version."""

  rows: dict[int, Sample]
  sampled: Sampled
  version: int


class Engine:
  """Prompts and snapshots in, trajectory groups out.

  ``submit`` queues prompts and ``step`` does a round of work, for a thread that
  never stops; ``generate`` and ``stream`` do both. One thread at a time.
  """

  def __init__(
    self,
    policy: Policy,
    config: RolloutConfig,
    *,
    mesh: Mesh,
    max_prompt_tokens: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
    seed: int,
    stops: Callable[[Sequence[int], int], int | None] | None = None,
  ):
    """Compiles nothing yet, and allocates nothing.

    Args:
      policy: Whose parameters the snapshots hold.
      config: Slots, pages, and how new weights are taken up.
      mesh: The rollout mesh.
      max_prompt_tokens: P.
      stop_ids: Tokens that end a response; the first one sampled is kept.
      pad_id: Fills what nobody reads.
      seed: Of the sampling keys; a request's tokens follow from seed, group
        and sample alone.
      stops: Where ``config.stop_strings`` end a response: takes its tokens and
        how many of them are new, and returns how many to keep, or None. None
        where there are no such strings.

    Raises:
      ValueError: ``config.stop_strings`` and ``stops``: one without the other;
        or an argument is out of its range.
      ConfigError: A field of the config has no such value, or the cache has no
        room for the longest sample.
    """
    _check_arguments(
      max_prompt_tokens, pad_id, seed, vocab_size=policy.vocab_size
    )
    if problems := config_lib.rollout_problems(config):
      raise ConfigError(problems)
    if bool(config.stop_strings) != (stops is not None):
      raise ValueError(
        f"rollout.stop_strings = {config.stop_strings!r} and stops = {stops}: "
        "strings need a function that finds them "
        "(prompts.stop_strings.StopStrings), and without strings it is None"
      )
    self.config = config
    self._stops = stops
    self._replicas = mesh.shape["data"]
    self._max_prompt_tokens = max_prompt_tokens
    self._vocab_size = policy.vocab_size
    self._stop_ids = frozenset(stop_ids)
    self._pad_id = pad_id
    self._page = config.chunk_tokens
    self._decoder = Decoder(
      policy,
      sampling=Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
      ),
      page_tokens=self._page,
      dtype=jnp.dtype(config.dtype),
      cache_dtype=jnp.dtype(config.cache_dtype or config.dtype),
      unstacked=unstacked_on(mesh),
      mesh=mesh,
    )
    self._slots = -(-config.num_slots // self._replicas)
    longest = max_prompt_tokens + config.max_response_tokens
    self._prompt_pages = self._pages_of(max_prompt_tokens - 1)
    samples = config.samples_begun
    self._may_share = (
      samples > 1
      and self._slots % samples == 0
      and self._prompt_pages * self._page >= _SHARED_TOKENS
    )
    self._widths = _widths(
      # A sample that lost its pages has a prefix that ends anywhere.
      self._pages_of(longest) + 1,
      self._page,
    )
    self._num_pages = self._count_pages()
    self._schedules = [
      Schedule(
        slots=self._slots,
        pool=PagePool(self._num_pages, self._page),
        least_match=_LEAST_MATCH,
      )
      for _ in range(self._replicas)
    ]
    self._groups: dict[int, tuple[Group, Schedule]] = {}
    self._pages: Pages | None = None
    self._snapshot: PolicySnapshot | None = None
    self._epoch = 0
    # Mean length of the last responses to a prompt, by its tokens.
    self._lengths: dict[bytes, float] = {}
    # Bits of the last chunk's tokens, by sample.
    self._supports: list[tuple[Sample, np.ndarray]] = []
    self._in_flight: _InFlight | None = None
    self._busy_since: float | None = None
    # A piece of a row begins at a page's first slot.
    least = min(_min_row_tokens(mesh), config.prefill_tokens)
    self._row_tokens = self._page * self._pages_of(
      max(max_prompt_tokens - 1, least)
    )
    self._prefill_rows = max(1, config.prefill_tokens // self._row_tokens)
    self._rows = rules.rows_sharding(mesh, rules.ROLLOUT_RULES)
    self._root = jax.random.fold_in(jax.random.key(seed), _SAMPLING_STREAM)
    self._request_keys = jax.jit(lambda ids: request_keys(self._root, ids))
    self.stats = EngineStats()

  # ------------------------------------------------------------------ requests

  @property
  def pending(self) -> int:
    """Groups that were submitted and not delivered."""
    return len(self._groups)

  @property
  def free_slots(self) -> int:
    """Slots that nothing runs in or waits for."""
    return sum(max(self._slots - s.load, 0) for s in self._schedules)

  def submit(
    self, prompt: Prompt, group_id: int, *, max_tokens: int | None = None
  ) -> None:
    """Queues the samples of a prompt.

    Args:
      prompt: At most P tokens, which are copied.
      group_id: Unlike those of all groups that are pending; below 2^31.
      max_tokens: Of each response; the config's by default, which is the most.

    Raises:
      ValueError: The prompt is empty, too long, not a row of int32 or not of
        the vocabulary, or a number is taken or out of its range.
    """
    tokens = self._copied(prompt)
    if not is_whole(group_id) or not 0 <= group_id <= _INT32.max:
      raise ValueError(
        f"group_id = {group_id!r} is not an integer from 0 to {_INT32.max}: "
        "the sampling keys are of 32 bits of it"
      )
    if group_id in self._groups:
      raise ValueError(f"group {group_id} is pending already")
    limit = self.config.max_response_tokens
    if max_tokens is not None:
      if not is_whole(max_tokens) or not 1 <= max_tokens <= limit:
        raise ValueError(
          f"max_tokens = {max_tokens!r} is not an integer between 1 and "
          f"rollout.max_response_tokens = {limit}"
        )
      limit = int(max_tokens)
    prompt = dataclasses.replace(prompt, tokens=tokens)
    wanted, begun = self.config.samples_per_prompt, self.config.samples_begun
    seen = self._lengths.get(prompt.tokens.tobytes(), limit)
    group = Group(group_id, prompt, wanted, limit, expected=min(seen, limit))
    ids = np.stack([np.full(begun, group_id), np.arange(begun)], axis=1)
    keys = np.asarray(self._request_keys(ids.astype(np.int32)))
    group.samples = [Sample(group, i, key) for i, key in enumerate(keys)]
    schedule = min(self._schedules, key=lambda schedule: schedule.load)
    schedule.submit(group)
    self._groups[group_id] = group, schedule

  def _copied(self, prompt: Prompt) -> np.ndarray:
    """The prompt's tokens, read-only, if they are any that a prompt may have.

    Raises:
      ValueError: They are not.
    """
    given = prompt.tokens
    if not isinstance(given, np.ndarray):
      raise ValueError(
        f"prompt {prompt.id}'s tokens are a {type(given).__name__} and not an "
        "array. Try np.asarray(tokens, np.int32)."
      )
    if given.dtype != np.int32 or given.ndim != 1:
      raise ValueError(
        f"prompt {prompt.id} is {given.dtype}{list(given.shape)} and not a row "
        "of int32"
      )
    length = len(given)
    if length == 0:
      raise ValueError(
        f"prompt {prompt.id} has no tokens: nothing predicts its response"
      )
    if length > self._max_prompt_tokens:
      raise ValueError(
        f"prompt {prompt.id} has {length} tokens, more than the "
        f"{self._max_prompt_tokens} that the cache has room for"
      )
    if given.min() < 0 or given.max() >= self._vocab_size:
      problem = token_problem(given.tolist(), self._vocab_size)
      raise ValueError(f"prompt {prompt.id} {problem}")
    tokens = given.copy()
    tokens.flags.writeable = False
    return tokens

  def step(self, snapshot: PolicySnapshot) -> list[TrajectoryGroup]:
    """Takes up the chunk that was begun last, and begins the next one.

    What the caller does between two calls overlaps with that chunk, where
    programs run beside their caller (``meshes.prepare_cpu`` says where not).

    Args:
      snapshot: The newest, placed as ``Placement`` does. The next chunk's
        tokens bear its version; with ``weight_update = "drain"`` it waits for
        running samples.

    Returns:
      Groups that are complete now.

    Raises:
      BaseException: What interrupts it, or what the devices report: then all
        groups are given up.
    """
    start = self._busy_since or time.monotonic()
    complete: list[Group] = []
    try:
      complete = self._finish_chunk()
      self._begin_chunk(snapshot)
      # While the devices work on the next chunk.
      self._keep_supports()
      done = [self._deliver(group) for group in complete]
    except BaseException:
      self.give_up()
      for group in complete:
        self._count_aborted(group.samples)
      # They may be donated already, or half written.
      self.release()
      raise
    end = time.monotonic()
    self._busy_since = end if self._in_flight else None
    self.stats = dataclasses.replace(
      self.stats,
      seconds=self.stats.seconds + end - start,
      prefix_hits=sum(schedule.hits for schedule in self._schedules),
      preemptions=sum(schedule.preemptions for schedule in self._schedules),
    )
    return done

  def stream(
    self,
    prompts: Sequence[Prompt],
    *,
    first_group_id: int,
    fetch: Callable[[], PolicySnapshot],
  ) -> Iterator[TrajectoryGroup]:
    """Answers prompts and yields each group when its last sample has ended.

    Args:
      prompts: Any number.
      first_group_id: Groups are numbered from here, in the prompts' order.
      fetch: The newest snapshot, placed; asked before every chunk.

    Raises:
      RuntimeError: Other groups are pending, whose answers would be lost.
      ValueError: As ``submit`` does, before anything is generated.
    """
    if self.pending:
      raise RuntimeError(
        f"{self.pending} groups are pending, {min(self._groups)} the first: an "
        "engine answers one stream at a time. Exhaust or close the other one "
        "first."
      )
    try:
      for index, prompt in enumerate(prompts):
        self.submit(prompt, first_group_id + index)
      while self.pending:
        yield from self.step(fetch())
    finally:
      self.give_up()

  def generate(
    self,
    prompts: Sequence[Prompt],
    *,
    first_group_id: int,
    fetch: Callable[[], PolicySnapshot],
  ) -> tuple[list[TrajectoryGroup], EngineStats]:
    """As ``stream``; all groups in the prompts' order, and what it took."""
    before = self.stats
    groups = self.stream(prompts, first_group_id=first_group_id, fetch=fetch)
    ordered = sorted(groups, key=lambda group: group.group_id)
    return ordered, self.stats.since(before)

  def give_up(self) -> None:
    """Forgets all groups that are pending."""
    self._in_flight = self._busy_since = None
    self._supports = []
    for group, _ in tuple(self._groups.values()):
      self._forget(group)
      self._count_aborted(group.samples)

  def release(self) -> None:
    """Lets the cache and the weights go, until something is generated again.

    Raises:
      RuntimeError: Groups are pending.
    """
    if self.pending:
      raise RuntimeError(f"{self.pending} groups are pending")
    self._pages = self._snapshot = None

  def capture(self) -> EngineState:
    """What a later engine is to go on with; samples under way are not."""
    return EngineState(self.stats, dict(self._lengths))

  def restore(self, state: EngineState) -> None:
    """Takes over what another engine knew; this one is new."""
    self.stats = state.stats
    self._lengths = dict(state.lengths)
    # The counts that are added up over the data slices.
    self._schedules[0].hits = state.stats.prefix_hits
    self._schedules[0].preemptions = state.stats.preemptions

  def _forget(self, group: Group) -> None:
    _, schedule = self._groups.pop(group.group_id)
    schedule.give_up(group)

  def _count_aborted(self, samples: Sequence[Sample]) -> None:
    self.stats = self.stats.plus(
      aborted=len(samples),
      aborted_tokens=sum(len(sample.tokens) for sample in samples),
    )

  # ------------------------------------------------------------------- a round

  def _begin_chunk(self, snapshot: PolicySnapshot) -> None:
    """Weights, admission, prefill, and the dispatch of one chunk of tokens."""
    if self._pages is None:
      self._pages = self._decoder.empty_pages(self._num_pages)
    held = self._epoch
    draining = not self._take_up(snapshot)
    renewed = [[] for _ in self._schedules]
    if self.config.weight_update == "recompute" and self._epoch != held:
      renewed = [schedule.renew(self._epoch) for schedule in self._schedules]
    running = [list(schedule.running) for schedule in self._schedules]
    prefixes = [
      stale + schedule.admit(self._epoch, only_begun=draining)
      for stale, schedule in zip(renewed, self._schedules, strict=True)
    ]
    self._read([[_Reading.of(p) for p in each] for each in prefixes])
    for schedule, each in zip(self._schedules, prefixes, strict=True):
      for prefix in each:
        schedule.has_read(prefix)
    if any(renewed):
      self._read(
        [[_Reading.behind(s) for s in each if s.pages] for each in running]
      )
    reserved = [schedule.reserve() for schedule in self._schedules]
    if not any(reserved):
      return
    rows, chunk = self._chunk(reserved)
    self._pages, sampled = self._decoder.decode(
      self._snapshot.params, self._pages, self._on_mesh(chunk)
    )
    self._in_flight = _InFlight(rows, sampled, self._snapshot.version)

  def _take_up(self, snapshot: PolicySnapshot) -> bool:
    """Whether the newest weights are held: not while samples must end first."""
    held = self._snapshot
    begun = any(schedule.begun for schedule in self._schedules)
    waits = begun and self.config.weight_update == "drain"
    if held is not None and held.params is snapshot.params:
      if not waits:
        self._snapshot = snapshot
      return True
    if isinstance(snapshot.params["layers"], tuple) != self._decoder.unstacked:
      raise ValueError(
        "the snapshot's parameters are not as the sampler takes them on this "
        "mesh: rollout.placement.Placement puts them there"
      )
    if waits:
      return False
    running = any(schedule.running for schedule in self._schedules)
    self._snapshot = snapshot
    # The key of the prefix cache: other parameters are another policy, even
    # under the same version.
    self._epoch += 1
    for schedule in self._schedules:
      schedule.pool.forget(self._epoch)
    self.stats = self.stats.plus(swaps=int(running))
    return True

  def _read(self, unread: Sequence[Sequence["_Reading"]]) -> None:
    """Prefills; ``unread`` by data slice."""
    width = self._row_tokens

    def at_once(reading: _Reading) -> bool:
      fresh = reading.head is None and not reading.read
      return fresh and len(reading.tokens) <= width

    whole = [list(filter(at_once, readings)) for readings in unread]
    packed = [_pack(readings, width, self._page) for readings in whole]
    self._prefill(packed, table_pages=0)
    parts = [[r for r in readings if not at_once(r)] for readings in unread]
    while any(parts):
      # A part attends to those before it, which must be in their pages.
      rows = [
        [[(r, r.read, min(r.read + width, len(r.tokens)))] for r in readings]
        for readings in parts
      ]
      deepest = max(len(r.before(self._page)) for rs in parts for r in rs)
      self._prefill(rows, table_pages=self._width(max(deepest, 1)))
      for row in (row for rows_ in rows for row in rows_):
        for reading, _, stop in row:
          reading.read = stop
      parts = [[r for r in rs if r.read < len(r.tokens)] for rs in parts]

  def _prefill(
    self, packed: Sequence[Sequence["_PackedRow"]], *, table_pages: int
  ) -> None:
    """Dispatches rows, by data slice, as many at a time as a program takes."""
    size = self._prefill_rows
    for start in range(0, max(map(len, packed)), size):
      rows = self._empty_rows(table_pages)
      for replica, all_rows in enumerate(packed):
        for index, row in enumerate(all_rows[start : start + size]):
          self._fill(rows, replica * size + index, row)
      self._pages = self._decoder.prefill(
        self._snapshot.params, self._pages, self._on_mesh(rows)
      )

  def _empty_rows(self, table_pages: int) -> Rows:
    count, width = self._replicas * self._prefill_rows, self._row_tokens

    def zeros(*shape: int) -> np.ndarray:
      return np.zeros((count, *shape), np.int32)

    return Rows(
      tokens=zeros(width) + np.int32(self._pad_id),
      positions=zeros(width),
      segment_ids=zeros(width),
      write=zeros(width // self._page),
      table=zeros(table_pages),
      head_tokens=zeros(),
      head_pages=zeros(),
      own_tokens=zeros(),
    )

  def _fill(self, rows: Rows, at: int, row: "_PackedRow") -> None:
    """Writes the pieces of one row behind each other, from page to page."""
    page, slot = self._page, 0
    for segment, (reading, start, stop) in enumerate(row, 1):
      head = reading.head
      piece = slice(slot, slot + stop - start)
      rows.tokens[at, piece] = reading.tokens[start:stop]
      first_position = 0 if head is None else len(head.tokens)
      rows.positions[at, piece] = first_position + np.arange(start, stop)
      rows.segment_ids[at, piece] = segment
      pages = reading.pages[start // page : self._pages_of(stop)]
      first = slot // page
      rows.write[at, first : first + len(pages)] = pages
      before = reading.before(page)
      rows.table[at, : len(before)] = before
      if head is not None:
        rows.head_tokens[at] = len(head.tokens)
        rows.head_pages[at] = len(head.pages)
      rows.own_tokens[at] = start
      slot += len(pages) * page
      self.stats = self.stats.plus(prefill_tokens=stop - start)

  def _chunk(
    self, reserved: Sequence[Sequence[Sample]]
  ) -> tuple[dict[int, Sample], Chunk]:
    """By row its sample, and the arrays of a dispatch."""
    lanes, rows = self._seated(reserved)
    lane_rows = self._replicas * self._slots // max(len(lanes), 1)

    def in_lane(row: int, sample: Sample) -> bool:
      return bool(lanes) and lanes[row // lane_rows] is sample.prefix

    most = max(
      len(sample.pages)
      - 1
      + (0 if in_lane(row, sample) else len(sample.prefix.pages))
      for row, sample in rows.items()
    )
    chunk = self._empty_chunk(self._width(max(most, 1)))
    for lane, prefix in enumerate(lanes):
      if prefix is not None:
        chunk.lanes[lane, : len(prefix.pages)] = prefix.pages
        chunk.lane_tokens[lane] = len(prefix.tokens)
    for row, sample in rows.items():
      prefix, (*table, page) = sample.prefix, sample.pages
      own = len(table)
      chunk.pending[row] = sample.pending
      chunk.positions[row] = len(prefix.tokens) + own * self._page
      chunk.counts[row] = len(sample.tokens)
      chunk.keys[row] = sample.key
      chunk.write[row] = page
      chunk.own_tokens[row] = own * self._page
      if in_lane(row, sample):
        chunk.in_lane[row] = True
      else:
        table = prefix.pages + table
        chunk.head_tokens[row] = len(prefix.tokens)
        chunk.head_pages[row] = len(prefix.pages)
      chunk.table[row, : len(table)] = table
    return rows, chunk

  def _empty_chunk(self, table_pages: int) -> Chunk:
    """Of rows without samples."""
    count = self._replicas * self._slots
    lanes = count // self.config.samples_begun if self._may_share else count

    def zeros(*shape: int, dtype=np.int32) -> np.ndarray:
      return np.zeros(shape, dtype)

    return Chunk(
      pending=zeros(count) + np.int32(self._pad_id),
      positions=zeros(count),
      counts=zeros(count),
      keys=zeros(count, _KEY_WORDS, dtype=np.uint32),
      lanes=zeros(lanes, self._prompt_pages if self._may_share else 0),
      lane_tokens=zeros(lanes),
      in_lane=zeros(count, dtype=bool),
      table=zeros(count, table_pages),
      head_tokens=zeros(count),
      head_pages=zeros(count),
      own_tokens=zeros(count),
      write=zeros(count),
    )

  def _seated(
    self, reserved: Sequence[Sequence[Sample]]
  ) -> tuple[list[Prefix | None], dict[int, Sample]]:
    """The prefix of each lane, if there are lanes, and by row its sample.

    A prefix has lanes as long as there are any, those of the most samples
    first. The samples of others take the rows that are left, and read their
    prefixes each for itself.
    """
    lanes: list[Prefix | None] = []
    rows: dict[int, Sample] = {}
    size = self.config.samples_begun
    count = self._slots // size if self._may_share else 0
    for replica, samples in enumerate(reserved):
      first = replica * self._slots
      together, rest = self._together(samples)
      here: list[Prefix | None] = [None] * count
      for lane, each in enumerate(together[:count]):
        here[lane] = each[0].prefix
        rows.update(enumerate(each, first + lane * size))
      lanes += here
      rest += [sample for each in together[count:] for sample in each]
      mine = range(first, first + self._slots)
      free = [row for row in mine if row not in rows]
      rows.update(zip(free, rest, strict=False))
    return lanes, rows

  def _together(
    self, samples: Sequence[Sample]
  ) -> tuple[list[list[Sample]], list[Sample]]:
    """Samples by prefix, the most first; and those whose prefixes are longer
    than a lane's table. No prefix has more than a lane has rows: it is that of
    one group's samples."""
    by_prefix: dict[int, list[Sample]] = {}
    rest = []
    for sample in samples:
      if len(sample.prefix.pages) > self._prompt_pages:
        rest.append(sample)
      else:
        by_prefix.setdefault(id(sample.prefix), []).append(sample)
    return sorted(by_prefix.values(), key=len, reverse=True), rest

  def _finish_chunk(self) -> list[Group]:
    """Takes the tokens of a chunk up; returns groups that are complete."""
    if self._in_flight is None:
      return []
    chunk, self._in_flight = self._in_flight, None
    sampled, version = jax.tree.map(np.asarray, chunk.sampled), chunk.version
    ended = []
    for row, sample in chunk.rows.items():
      count = self._extend(sample, row, sampled, version)
      if sample.ended:
        ended.append((count, sample.group.group_id, sample.index, sample))
    complete = []
    # In the order in which they sampled their last tokens.
    for *_, sample in sorted(ended, key=lambda each: each[:3]):
      group, schedule = self._groups[sample.group.group_id]
      schedule.leave(sample)
      group.ended.append(sample)
      if len(group.ended) == group.wanted:
        complete.append(group)
    slots = self._replicas * self._slots * self._page
    self.stats = self.stats.plus(slot_tokens=slots, chunks=1)
    for group in complete:
      self._forget(group)
    return complete

  def _extend(
    self, sample: Sample, row: int, sampled: Sampled, version: int
  ) -> int:
    """Adds a row's tokens to its sample; how many there were to add."""
    room = sample.group.limit - len(sample.tokens)
    tokens = sampled.tokens[row, :room].tolist()
    stop = next((i for i, t in enumerate(tokens) if t in self._stop_ids), None)
    if stop is not None:
      sample.stopped = True
      tokens = tokens[: stop + 1]
    sample.tokens += tokens
    count = len(tokens)
    if self._stops is not None:
      kept = self._stops(sample.tokens, count)
      if kept is not None:
        _check_kept(kept, total=len(sample.tokens), new=count)
        sample.stopped = True
        count -= len(sample.tokens) - kept
        del sample.tokens[kept:]
    sample.logprobs += sampled.logprobs[row, :count].tolist()
    sample.entropy += sampled.entropy[row, :count].tolist()
    sample.versions += [version] * count
    if sampled.support is not None:
      self._supports.append((sample, sampled.support[row, :count]))
    return count

  def _keep_supports(self) -> None:
    """Packs what the last chunk drew from."""
    for sample, bits in self._supports:
      sample.supports.append(SupportMask.of(bits))
    self._supports = []

  def _deliver(self, group: Group) -> TrajectoryGroup:
    chosen = sorted(group.ended[: group.wanted], key=lambda s: s.index)
    given_up = [s for s in group.samples if s not in chosen]
    self._count_aborted(given_up)
    tokens = sum(len(sample.tokens) for sample in chosen)
    self.stats = self.stats.plus(tokens=tokens)
    self._remember(group.prompt, tokens / len(chosen))
    return TrajectoryGroup(
      group.group_id, group.prompt, tuple(map(_trajectory, chosen))
    )

  def _remember(self, prompt: Prompt, length: float) -> None:
    key = prompt.tokens.tobytes()
    self._lengths.pop(key, None)
    self._lengths[key] = length
    while len(self._lengths) > _REMEMBERED_PROMPTS:
      del self._lengths[next(iter(self._lengths))]

  # ------------------------------------------------------------------- programs

  def compiles(self) -> dict[str, int]:
    """How often each program was compiled: once for each width of its table."""
    return self._decoder.compiles()

  @property
  def prefill_tokens(self) -> int:
    """Tokens of a prefill dispatch, padding included."""
    return self._replicas * self._prefill_rows * self._row_tokens

  def programs(
    self, params: Params
  ) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Both programs of the sampler, to be compiled and not run.

    Args:
      params: Shapes, with their shardings, as ``Placement.abstract`` has them.

    Returns:
      By name, a function that traces it: prefill of fresh prompts, and decode
      with the longest page tables.
    """
    pages = self._decoder.abstract_pages(self._num_pages)
    rows = self._empty_rows(0)
    chunk = self._empty_chunk(self._widths[-1])

    def abstract(inputs: Any) -> Any:
      return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
          leaf.shape, leaf.dtype, sharding=self._rows
        ),
        inputs,
      )

    return {
      "prefill": lambda: self._decoder.prefill.lower(
        params, pages, abstract(rows)
      ),
      "decode": lambda: self._decoder.decode.lower(
        params, pages, abstract(chunk)
      ),
    }

  def _on_mesh(self, inputs: Any) -> Any:
    return jax.device_put(inputs, self._rows)

  def _pages_of(self, tokens: int) -> int:
    return -(-tokens // self._page)

  def _width(self, pages: int) -> int:
    """The narrowest table that holds so many pages."""
    return next(width for width in self._widths if width >= pages)

  def _count_pages(self) -> int:
    """Pages of a data slice, page 0 included.

    Raises:
      ConfigError: They do not hold the longest sample, or are too many.
    """
    shape = dict(
      max_prompt_tokens=self._max_prompt_tokens, replicas=self._replicas
    )
    if problems := config_lib.cache_problems(self.config, **shape):
      raise ConfigError(problems)
    return config_lib.cache_pages(self.config, **shape) + 1


@dataclasses.dataclass(eq=False)
class _Reading:
  """Tokens that prefill reads into pages of theirs.

  Attributes:
    tokens: int32 [n].
    pages: Enough for them.
    read: How many the pages hold already: whole pages.
    head: What comes before them; None where they begin a sequence.
  """

  tokens: np.ndarray
  pages: Sequence[int]
  read: int
  head: Prefix | None

  @classmethod
  def of(cls, prefix: Prefix) -> "_Reading":
    return cls(prefix.tokens, prefix.pages, prefix.read, None)

  @classmethod
  def behind(cls, sample: Sample) -> "_Reading":
    """What a running sample has cached behind its prefix."""
    prefix = sample.prefix
    return cls(sample.cached[len(prefix.tokens) :], sample.pages, 0, prefix)

  def before(self, page: int) -> list[int]:
    """The pages before the tokens that are read next."""
    head = [] if self.head is None else self.head.pages
    return [*head, *self.pages[: self.read // page]]


# Pieces of readings that share a row of prefill: which, first token, end.
_PackedRow = Sequence[tuple[_Reading, int, int]]


def _pack(
  readings: Sequence[_Reading], width: int, page: int
) -> list[list[tuple[_Reading, int, int]]]:
  """Whole readings into rows, each where there is room first."""
  rows: list[list[tuple[_Reading, int, int]]] = []
  room: list[int] = []
  for reading in readings:
    needed = -(-len(reading.tokens) // page) * page
    at = next((i for i, left in enumerate(room) if left >= needed), len(rows))
    if at == len(rows):
      rows.append([])
      room.append(width)
    rows[at].append((reading, 0, len(reading.tokens)))
    room[at] -= needed
  return rows


def is_whole(value: Any) -> bool:
  """Whether it is an integer; True and False are none."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def token_problem(tokens: Sequence[int], vocab_size: int) -> str:
  """The first that is no token, to go behind a prompt's name; "" if all are."""
  for at, token in enumerate(tokens):
    if not 0 <= token < vocab_size:
      return (
        f"has token {token} at position {at}, which is not of the vocabulary: "
        f"ids are from 0 to {vocab_size - 1}"
      )
  return ""


def _check_arguments(
  max_prompt_tokens: Any, pad_id: Any, seed: Any, *, vocab_size: int
) -> None:
  """Raises ValueError for what an engine cannot be made with."""
  problems = [
    *config_lib.value_problems(
      "max_prompt_tokens", max_prompt_tokens, field="prompts.max_tokens"
    ),
    *config_lib.value_problems("seed", seed, field="seed"),
  ]
  if not is_whole(pad_id) or not 0 <= pad_id < vocab_size:
    problems.append(
      f"pad_id = {pad_id!r} is not of the vocabulary: ids are from 0 to "
      f"{vocab_size - 1}. Try 0."
    )
  if problems:
    raise ValueError("\n".join(problems))


def _check_kept(kept: Any, *, total: int, new: int) -> None:
  """Raises ValueError where a response would lose tokens seen before."""
  if not is_whole(kept) or not total - new < kept <= total:
    raise ValueError(
      f"stops returned {kept!r} of {total} tokens, {new} of them new: it keeps "
      f"from {total - new + 1} to {total}, or returns None"
    )


def _widths(most: int, page_tokens: int) -> tuple[int, ...]:
  """Widths of page tables, in pages; the most last."""
  step = max(-(-_MIN_STEP_TOKENS // page_tokens), -(-most // _MAX_WIDTHS))
  return (*range(step, most, step), most)


def _min_row_tokens(mesh: Mesh) -> int:
  """Rows of prefill are at least as long; several short prompts share one.

  Attention kernels of accelerators want tiles. A CPU computes a row's attention
  whole, and short rows waste less of it.
  """
  return 1 if mesh.devices.flat[0].platform == "cpu" else 256


def _trajectory(sample: Sample) -> Trajectory:
  prompt, sampled = sample.group.prompt, len(sample.tokens)
  start = len(prompt.tokens)
  length = start + sampled

  def widen(values: Sequence[float], dtype: np.dtype, fill) -> np.ndarray:
    whole = np.full(length, fill, dtype)
    whole[start:] = values
    return whole

  support = None
  if sample.supports:
    support = SupportMask.concatenate(sample.supports).after(start)
  return Trajectory(
    prompt_id=prompt.id,
    group_id=sample.group.group_id,
    tokens=np.concatenate([prompt.tokens, sample.tokens]).astype(np.int32),
    loss_mask=np.arange(length) >= start,
    behavior_logprobs=widen(sample.logprobs, np.float32, 0.0),
    behavior_entropy=widen(sample.entropy, np.float32, 0.0),
    policy_version=widen(sample.versions, np.int32, sample.versions[0]),
    turn=np.zeros(length, np.int32),
    finish=Finish.STOP if sample.stopped else Finish.LENGTH,
    support_mask=support,
  )
