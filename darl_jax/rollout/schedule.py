"""Who decodes next: samples, slots and pages, on the host and without arrays.

What a sample has cached is a *prefix*, which prefill reads (its prompt without
the last token, shared by all samples of the group; or everything it has, where
it lost its pages), and then pages of its own, each filled by one chunk. Its
newest token is pending: the next chunk reads it first. So every chunk begins
at a page's first slot, and the first token sampled takes no program of its own.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from darl_jax.rollout.pages import PagePool
from darl_jax.types import Prompt, SupportMask


@dataclasses.dataclass(eq=False)
class Prefix:
  """Tokens that prefill reads, and the pages that hold them then.

  Attributes:
    tokens: int32 [n]; may be none.
    epoch: The engine's count of the weights that read them: keys and values
      of other weights are of no use.
    pages: Enough for all tokens, referenced by this prefix.
    read: How many tokens the pages hold already: whole pages.
    users: Running samples that attend to it.
  """

  tokens: np.ndarray
  epoch: int
  pages: list[int]
  read: int
  users: int = 0


@dataclasses.dataclass(eq=False)
class Group:
  """The samples of one prompt.

  Attributes:
    group_id: The caller's number.
    prompt: What is asked.
    wanted: Samples to deliver; when so many have ended the others are given up.
    limit: Most tokens of a response.
    expected: Tokens that a response may well have.
    samples: All of them.
    ended: Those that have ended, in that order.
    prefix: The prompt's, once a sample has run.
  """

  group_id: int
  prompt: Prompt
  wanted: int
  limit: int
  expected: float
  samples: list["Sample"] = dataclasses.field(default_factory=list)
  ended: list["Sample"] = dataclasses.field(default_factory=list)
  prefix: Prefix | None = None


@dataclasses.dataclass(eq=False)
class Sample:
  """One response, as far as it got.

  Attributes:
    group: Its group.
    index: Its number in the group.
    key: uint32 [key words], data of the key that its draws come from.
    tokens: What it sampled.
    logprobs: Of each token, nats.
    entropy: Of each token's distribution, nats.
    versions: The policy that sampled each token.
    supports: Of the tokens of each chunk, where sampling truncates.
    stopped: Its last token is a stop token, or completes a stop string.
    prefix: What its pages follow, while it runs.
    pages: Its own, all full but the one that was reserved for the next chunk.
  """

  group: Group
  index: int
  key: np.ndarray
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  entropy: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  supports: list[SupportMask] = dataclasses.field(default_factory=list)
  stopped: bool = False
  prefix: Prefix | None = None
  pages: list[int] = dataclasses.field(default_factory=list)

  @property
  def pending(self) -> int:
    """The newest token, which no page holds."""
    return self.tokens[-1] if self.tokens else int(self.group.prompt.tokens[-1])

  @property
  def cached(self) -> np.ndarray:
    """int32, all tokens but the pending one."""
    prompt = self.group.prompt.tokens
    if not self.tokens:
      return prompt[:-1]
    return np.concatenate([prompt, self.tokens[:-1]]).astype(np.int32)

  @property
  def begun(self) -> bool:
    """Whether it has sampled anything."""
    return bool(self.tokens)

  @property
  def ended(self) -> bool:
    return self.stopped or len(self.tokens) >= self.group.limit


class Schedule:
  """The slots and pages of one data slice of the sampler.

  Attributes:
    pool: Its pages.
    preemptions: Samples that lost their pages to others, so far.
    hits: Tokens that did not have to be read, so far.
  """

  def __init__(self, *, slots: int, pool: PagePool, least_match: int = 1):
    """
    Args:
      slots: Samples that decode together.
      pool: Its pages; a chunk samples one page of tokens.
      least_match: Tokens found in the cache are used from so many on.
    """
    self._slots = slots
    self._least_match = least_match
    self.pool = pool
    self._waiting: collections.deque[Sample] = collections.deque()
    self._running: list[Sample] = []
    self.preemptions = 0
    self.hits = 0

  @property
  def load(self) -> int:
    """Samples that run or wait."""
    return len(self._waiting) + len(self._running)

  @property
  def running(self) -> Sequence[Sample]:
    """Samples that have a slot, in the order of admission."""
    return self._running

  @property
  def begun(self) -> bool:
    """Whether a sample that has not ended has sampled tokens already."""
    # Those that lost their slots wait before all others.
    waiting = bool(self._waiting) and self._waiting[0].begun
    return waiting or bool(self._running)

  def submit(self, group: Group) -> None:
    """Queues the samples of a group, behind all that should be as long.

    The longest first: those that begin last then end soon after the others, and
    few slots are idle for long. Where nothing is known of their lengths, this
    is their order.
    """
    self._waiting.extend(group.samples)
    self._waiting = collections.deque(
      sorted(self._waiting, key=lambda s: (not s.begun, -s.group.expected))
    )

  def admit(self, epoch: int, *, only_begun: bool = False) -> list[Prefix]:
    """Gives slots to waiting samples, in their order, while there are pages.

    Args:
      epoch: Of the weights that read what has to be read.
      only_begun: Only samples that have sampled tokens already enter.

    Returns:
      Prefixes to read before the next chunk.
    """
    unread = []
    while self._waiting and len(self._running) < self._slots:
      sample = self._waiting[0]
      if only_begun and not sample.begun:
        break
      prefix = self._prefix(sample, epoch)
      if prefix is None:
        break
      # Each that runs wants a page for the next chunk, too: without, what was
      # read now would be lost at once.
      if self.pool.available <= len(self._running):
        self._release_unused(prefix, sample.group)
        break
      if not prefix.users:
        self.hits += prefix.read
        if prefix.read < len(prefix.tokens):
          unread.append(prefix)
      prefix.users += 1
      sample.prefix = prefix
      self._running.append(self._waiting.popleft())
    return unread

  def has_read(self, prefix: Prefix) -> None:
    """Its pages are filled: others that begin alike may use them."""
    prefix.read = len(prefix.tokens)
    self.pool.register(prefix.epoch, prefix.tokens, prefix.pages)

  def reserve(self) -> Sequence[Sample]:
    """Gives each running sample a page more, for its next chunk.

    Where there are not enough, those admitted last lose their slots and are
    read again later.

    Returns:
      Those that still run, in the order of admission.
    """
    for sample in tuple(self._running):
      while sample.prefix is not None:
        page = self.pool.allocate(1)
        if page is not None:
          sample.pages += page
          break
        # The last has no page for this chunk yet: it is never before this one.
        self.preempt(self._running[-1])
        self.preemptions += 1
    return tuple(self._running)

  def preempt(self, sample: Sample) -> None:
    """Takes a running sample's pages; it waits before all others."""
    self.leave(sample)
    self._waiting.appendleft(sample)

  def renew(self, epoch: int) -> list[Prefix]:
    """All that running samples have cached is to be read again, where it is.

    Args:
      epoch: Of the weights that will.

    Returns:
      Their prefixes. What is in the samples' own pages comes after those.
    """
    prefixes = {id(s.prefix): s.prefix for s in self._running}
    for prefix in prefixes.values():
      prefix.epoch, prefix.read = epoch, 0
    return list(prefixes.values())

  def leave(self, sample: Sample) -> None:
    """Frees a running sample's slot and pages."""
    self._running.remove(sample)
    self.pool.release(sample.pages)
    sample.pages = []
    prefix, sample.prefix = sample.prefix, None
    prefix.users -= 1
    self._release_unused(prefix, sample.group)

  def give_up(self, group: Group) -> None:
    """Forgets the samples of a group that have not ended."""
    for sample in [s for s in self._running if s.group is group]:
      self.leave(sample)
    self._waiting = collections.deque(
      sample for sample in self._waiting if sample.group is not group
    )

  def _release_unused(self, prefix: Prefix, group: Group) -> None:
    """Full pages of a prefix stay in the pool's cache after its last user."""
    if prefix.users:
      return
    self.pool.release(prefix.pages)
    if group.prefix is prefix:
      group.prefix = None

  def _prefix(self, sample: Sample, epoch: int) -> Prefix | None:
    """What the sample's own pages will follow; None where pages are short."""
    group = sample.group
    shared = not sample.tokens
    if shared and group.prefix and group.prefix.epoch == epoch:
      return group.prefix
    tokens = sample.cached
    size = self.pool.page_tokens
    pages = self.pool.match(epoch, tokens)
    if len(pages) * size < self._least_match:
      self.pool.release(pages)
      pages = []
    more = self.pool.allocate(-(-len(tokens) // size) - len(pages))
    if more is None:
      self.pool.release(pages)
      return None
    prefix = Prefix(tokens, epoch, pages + more, read=len(pages) * size)
    if shared:
      group.prefix = prefix
    return prefix
