"""Which page of a paged KV cache holds what: the host's bookkeeping."""

import collections
import dataclasses
import operator
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
  """A page's place in the prefix cache, which is one tree per version.

  Attributes:
    page: Its index; 0 at a tree's root, which holds no tokens.
    tokens: Bytes of the page's own tokens, its key among its siblings.
    parent: Of the page before; None at a root.
    depth: Pages from the start of the sequence to this one, inclusive.
    children: Pages that can follow, by the bytes of their tokens.
  """

  page: int = 0
  tokens: bytes = b""
  parent: "_Node | None" = None
  depth: int = 0
  children: dict[bytes, "_Node"] = dataclasses.field(default_factory=dict)


class PagePool:
  """References to the pages of one data replica, and its prefix cache.

  A page is ``page_tokens`` slots, in every layer, for the keys and values of
  consecutive tokens of a sequence. The arrays are the sampler's; the pool
  decides who may use which page, and is called from one thread. A page is

  * referenced: sequences hold it, each counted once,
  * cached: nobody holds it, but its contents can still be matched, or
  * free.

  Page 0 is none of them: it is never handed out, and padding writes to it.

  A sequence is admitted by ``match``, which holds on to what is cached of it,
  and then ``allocate`` for the rest; once its keys and values are computed,
  ``register`` offers them to others; in the end ``release`` lets all of it go.

  A cached page is found by the policy version, all tokens before it and its own
  tokens, compared exactly. The version is part of the key because keys and
  values depend on the weights: a prefix cache that outlives a weight update
  keeps answering with the old policy's, and the sampler's log-probs drift away
  from the learner's without an error anywhere.

  Every call takes time in proportion to the pages that it names or changes, and
  their ancestors.

  Attributes:
    num_pages: Of the arrays, page 0 included.
    page_tokens: Slots of a page.
  """

  def __init__(self, num_pages: int, page_tokens: int):
    """All pages but page 0 are free.

    Raises:
      ValueError: No page is left to hand out, or a page has no slot.
    """
    if num_pages < 2:
      raise ValueError(f"{num_pages} pages: page 0 is reserved, so at least 2")
    if page_tokens < 1:
      raise ValueError(f"{page_tokens} slots per page: at least 1")
    self.num_pages = num_pages
    self.page_tokens = page_tokens
    self._references = [0] * num_pages
    self._free = list(range(num_pages - 1, 0, -1))
    # In the order of eviction. A plain dict would keep the slots of what was
    # taken from its front, and pass over them again for the next one.
    self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()
    self._nodes: dict[int, _Node] = {}  # Of the registered pages.
    self._roots: dict[int, _Node] = {}  # By version.
    self._oldest_version: int | None = None  # None: nothing was forgotten.

  @property
  def available(self) -> int:
    """Pages that ``allocate`` can hand out now: all without references."""
    return len(self._free) + len(self._cached)

  def allocate(self, count: int) -> list[int] | None:
    """Pages of no particular contents, each referenced once.

    Free pages come first, then cached ones, those used least recently before
    others; a use of a page is a use of all pages before it, so that a prefix
    outlives what follows it. What follows an evicted page and is referenced
    stays with its holders, but cannot be matched any longer.

    Args:
      count: Pages to hand out.

    Returns:
      All of them, or None, with nothing changed, where fewer are available.

    Raises:
      ValueError: ``count`` is negative.
    """
    if count < 0:
      raise ValueError(f"cannot allocate {count} pages")
    if count > self.available:
      return None
    while len(self._free) < count:
      self._unregister(self._nodes[next(iter(self._cached))])
    pages = [self._free.pop() for _ in range(count)]
    for page in pages:
      self._references[page] = 1
    return pages

  def retain(self, pages: Iterable[int]) -> None:
    """Adds a reference to each page, as often as it is named.

    Pages are shared to be read. Two sequences cannot both go on in a partial
    page: one of them needs a copy.

    Raises:
      ValueError: A page is out of range or has no reference yet; nothing has
        changed then.
    """
    for page, times in self._held(pages).items():
      self._references[page] += times

  def release(self, pages: Iterable[int]) -> None:
    """Takes a reference from each page, as often as it is named.

    One without further references is free or, if registered, cached.

    Raises:
      ValueError: A page is out of range or has fewer references; nothing has
        changed then.
    """
    counts = self._held(pages)
    for page, times in counts.items():
      if times > self._references[page]:
        raise ValueError(
          f"page {page} is released {times} times and has "
          f"{self._references[page]} references"
        )
    cached = []
    for page, times in counts.items():
      self._references[page] -= times
      if self._references[page]:
        continue
      if page in self._nodes:
        cached.append(page)
      else:
        self._free.append(page)
    self._mark_used(cached)

  def match(self, version: int, tokens: np.ndarray) -> list[int]:
    """The longest run of full pages that is known, each retained once more.

    A sampler needs the last prompt token's logits, so at least that one token
    has to be computed: it asks for the tokens before.

    Args:
      version: Of the policy that would compute the keys and values.
      tokens: int32 [T], the start of a sequence.

    Returns:
      Pages of the first ``page_tokens`` tokens, of the next ones, and so on.

    Raises:
      ValueError: ``tokens`` is not a row of int32.
    """
    keys = self._full_pages(tokens)
    pages = [node.page for node in self._known(version, keys)]
    for page in pages:
      self._references[page] += 1
      self._cached.pop(page, None)
    return pages

  def register(
    self, version: int, tokens: np.ndarray, pages: Sequence[int]
  ) -> None:
    """Lets every full page of a sequence be matched from now on.

    Where other pages of the same contents are registered already, they stay,
    and the new ones go on without: they are free once released. So a longer
    sequence may be registered again. Of a forgotten version nothing is
    registered: a sequence may have been under way when it was forgotten.

    Args:
      version: Of the one policy that computed all the keys and values; what
        was computed across a weight update must not be registered.
      tokens: int32 [T], from the start of the sequence.
      pages: Which hold them, in order and each referenced; more may follow.

    Raises:
      ValueError: ``tokens`` is not a row of int32; the pages are too few; or
        one is out of range, not referenced, named twice, or registered for
        other tokens or another version. Nothing has changed then.
    """
    keys = self._full_pages(tokens)
    if len(pages) * self.page_tokens < len(tokens):
      raise ValueError(
        f"{len(pages)} pages of {self.page_tokens} slots cannot hold "
        f"{len(tokens)} tokens"
      )
    counts = self._held(pages)
    if len(counts) < len(pages):
      raise ValueError(f"a page occurs twice in one sequence: {list(pages)}")
    own = list(counts)[: len(keys)]  # As plain integers.
    known = self._known(version, keys)
    for index, page in enumerate(own):
      node = self._nodes.get(page)
      if node and (index >= len(known) or known[index] is not node):
        raise ValueError(
          f"page {page} is registered for other tokens or another version"
        )
    if self._oldest_version is not None and version < self._oldest_version:
      return
    node = known[-1] if known else self._roots.setdefault(version, _Node())
    for index in range(len(known), len(keys)):
      child = _Node(own[index], keys[index], parent=node, depth=index + 1)
      node.children[child.tokens] = child
      self._nodes[child.page] = child
      node = child

  def forget(self, before: int) -> None:
    """Nothing of an older version can be matched any longer, ever.

    Its cached pages are free now, its referenced ones once released.

    Args:
      before: The oldest version that stays.
    """
    if self._oldest_version is not None:
      before = max(before, self._oldest_version)
    self._oldest_version = before
    for version in [old for old in self._roots if old < before]:
      for node in list(self._roots.pop(version).children.values()):
        self._unregister(node)

  def check(self) -> None:
    """Raises RuntimeError unless the books agree; takes time, for tests."""
    problems = [*self._state_problems(), *self._tree_problems()]
    if problems:
      raise RuntimeError("; ".join(problems))

  def _held(self, pages: Iterable[int]) -> collections.Counter[int]:
    """How often each page is named, in their order: all have references."""
    counts = collections.Counter(map(operator.index, pages))
    for page in counts:
      if not 0 < page < self.num_pages:
        raise ValueError(
          f"page {page} is none of the pages 1 to {self.num_pages - 1}"
        )
      if not self._references[page]:
        raise ValueError(f"page {page} is not referenced")
    return counts

  def _full_pages(self, tokens: np.ndarray) -> list[bytes]:
    """The bytes of each full page's tokens."""
    if tokens.ndim != 1 or tokens.dtype != np.int32:
      # Other types' bytes would never match, or match what they should not.
      raise ValueError(
        f"tokens are {tokens.dtype}{list(tokens.shape)} and not a row of int32"
      )
    size = self.page_tokens
    full = len(tokens) - len(tokens) % size
    return [tokens[at : at + size].tobytes() for at in range(0, full, size)]

  def _known(self, version: int, keys: Sequence[bytes]) -> list[_Node]:
    """The longest registered run of these pages from a sequence's start."""
    node = self._roots.get(version, _Node())
    known = []
    for key in keys:
      node = node.children.get(key)
      if node is None:
        break
      known.append(node)
    return known

  def _mark_used(self, pages: Sequence[int]) -> None:
    """Marks registered pages, and all those before them, as just used.

    Every cached page comes after its cached descendants, whatever the order in
    which they were released: the first one has none.
    """
    used = {}
    for page in pages:
      node = self._nodes[page]
      while node.parent and node.page not in used:
        used[node.page] = node
        node = node.parent
    for node in sorted(used.values(), key=lambda node: -node.depth):
      if not self._references[node.page]:
        self._cached[node.page] = None
        self._cached.move_to_end(node.page)

  def _unregister(self, node: _Node) -> None:
    """Drops a page and all that follow it; those without references are free.

    A page cannot be matched without the ones before it.
    """
    del node.parent.children[node.tokens]
    pending = [node]
    while pending:
      node = pending.pop()
      pending.extend(node.children.values())
      del self._nodes[node.page]
      if node.page in self._cached:
        del self._cached[node.page]
        self._free.append(node.page)

  def _state_problems(self) -> list[str]:
    """What is wrong with the pages' states."""
    problems = []
    referenced = [page for page, count in enumerate(self._references) if count]
    states = sorted([*self._free, *self._cached, *referenced])
    if states != list(range(1, self.num_pages)):
      problems.append(
        "not every page but 0 is exactly one of free, cached and referenced: "
        f"{self._free}, {list(self._cached)}, {referenced}"
      )
    if min(self._references) < 0:
      problems.append(f"negative references: {self._references}")
    if not self._cached.keys() <= self._nodes.keys():
      problems.append("a cached page is not registered")
    if not self._nodes.keys().isdisjoint(self._free):
      problems.append("a free page is registered")
    return problems

  def _tree_problems(self) -> list[str]:
    """What is wrong with the trees of registered pages."""
    problems = []
    order = {page: rank for rank, page in enumerate(self._cached)}
    found = {}
    for version, root in self._roots.items():
      if self._oldest_version is not None and version < self._oldest_version:
        problems.append(f"version {version} is forgotten and has a tree")
      # With the rank of the nearest cached page before.
      pending = [(root, self.num_pages)]
      while pending:
        parent, limit = pending.pop()
        for tokens, node in parent.children.items():
          page = node.page
          rank = order.get(page, limit)
          links = (node.parent, node.tokens, node.depth)
          if links != (parent, tokens, parent.depth + 1):
            problems.append(f"page {page} is not where its parent has it")
          if len(tokens) != self.page_tokens * np.dtype(np.int32).itemsize:
            problems.append(f"page {page} is registered and not full")
          if rank > limit:
            problems.append(f"page {page} would outlive the one before it")
          if page in found:
            problems.append(f"page {page} is registered twice")
          else:
            found[page] = node
            pending.append((node, rank))
    if found != self._nodes:
      problems.append(
        f"registered are {sorted(self._nodes)}, in trees {sorted(found)}"
      )
    return problems
