"""The page pool: references, the prefix cache, and the order of eviction."""

import collections
import copy
import random

import numpy as np
from absl.testing import absltest, parameterized

from darl_jax.rollout.pages import PagePool

_SIZE = 2  # Slots of a page, where a test does not say otherwise.


def _tokens(*values: int) -> np.ndarray:
  return np.asarray(values, np.int32)


def _admit(pool: PagePool, version: int, tokens: np.ndarray) -> list[int]:
  """The pages of a sequence, as a sampler gets and registers them."""
  pages = pool.match(version, tokens)
  pages += pool.allocate(-(-len(tokens) // pool.page_tokens) - len(pages))
  pool.register(version, tokens, pages)
  return pages


def _cache(pool: PagePool, version: int, tokens: np.ndarray) -> list[int]:
  """The pages of a sequence that is over."""
  pages = _admit(pool, version, tokens)
  pool.release(pages)
  return pages


def _matches(pool: PagePool, version: int, tokens: np.ndarray) -> list[int]:
  """What a match would find; the pool stays as it is."""
  return copy.deepcopy(pool).match(version, tokens)


class ReferencesTest(parameterized.TestCase):
  def test_hands_out_all_pages_but_the_reserved_one(self):
    pool = PagePool(5, _SIZE)
    self.assertEqual(pool.available, 4)
    pages = pool.allocate(1) + pool.allocate(3)
    self.assertCountEqual(pages, [1, 2, 3, 4])
    self.assertEqual(pool.available, 0)
    pool.check()

  def test_allocates_all_or_nothing(self):
    pool = PagePool(5, _SIZE)
    held = pool.allocate(2)
    self.assertIsNone(pool.allocate(3))
    self.assertEqual(pool.available, 2)
    pool.check()
    self.assertNoCommonElements(pool.allocate(2), held)

  def test_evicts_nothing_for_what_it_cannot_hand_out(self):
    pool = PagePool(5, _SIZE)
    held = pool.allocate(1)
    cached = _cache(pool, 0, _tokens(1, 2, 3, 4))
    self.assertIsNone(pool.allocate(4))
    self.assertEqual(_matches(pool, 0, _tokens(1, 2, 3, 4)), cached)
    self.assertNoCommonElements(held, cached)

  def test_allocates_none_of_none(self):
    pool = PagePool(2, _SIZE)
    pool.allocate(1)
    self.assertEqual(pool.allocate(0), [])

  def test_a_page_is_free_after_its_last_reference(self):
    pool = PagePool(2, _SIZE)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.retain(pages * 2)
    for _ in range(3):
      pool.release(pages)
      self.assertIsNone(pool.allocate(1))
      pool.check()
    pool.release(pages)
    self.assertEqual(pool.allocate(1), pages)

  def test_counts_a_page_as_often_as_it_is_named(self):
    pool = PagePool(3, _SIZE)
    first, second = pool.allocate(2)
    pool.retain([first, first])
    pool.release([first, second, first, first])
    self.assertEqual(pool.available, 2)
    pool.check()

  def test_takes_pages_from_a_table(self):
    pool = PagePool(3, _SIZE)
    table = np.asarray(pool.allocate(2), np.int32)
    pool.register(0, _tokens(1, 2, 3, 4), table)
    pool.release(table)
    pages = pool.match(0, _tokens(1, 2, 3, 4))
    self.assertEqual([type(page) for page in pages], [int, int])
    np.testing.assert_array_equal(pages, table)

  @parameterized.parameters("retain", "release")
  def test_refuses_pages_that_nobody_holds(self, name):
    pool = PagePool(6, _SIZE)
    (held,) = pool.allocate(1)
    (cached,) = _cache(pool, 0, _tokens(1, 2))
    (freed,) = pool.allocate(1)
    pool.release([freed])
    for page in (cached, freed):
      with self.assertRaisesRegex(ValueError, f"page {page} is not ref"):
        getattr(pool, name)([held, page])
    for page in (0, -1, 6):
      with self.assertRaisesRegex(ValueError, f"page {page} is none of"):
        getattr(pool, name)([held, page])
    pool.check()
    self.assertEqual(pool.available, 4)
    pool.release([held])  # Its one reference was neither doubled nor lost.
    self.assertEqual(pool.available, 5)

  def test_refuses_to_release_more_than_was_held(self):
    pool = PagePool(2, _SIZE)
    pages = pool.allocate(1)
    with self.assertRaisesRegex(ValueError, "2 times and has 1 ref"):
      pool.release(pages * 2)
    pool.check()
    pool.release(pages)
    with self.assertRaises(ValueError):
      pool.release(pages)
    self.assertEqual(pool.available, 1)

  def test_refuses_a_negative_count(self):
    with self.assertRaisesRegex(ValueError, "-1 pages"):
      PagePool(2, _SIZE).allocate(-1)

  @parameterized.parameters((1, 4), (0, 4), (4, 0))
  def test_refuses_sizes(self, num_pages, page_tokens):
    with self.assertRaises(ValueError):
      PagePool(num_pages, page_tokens)


class PrefixTest(parameterized.TestCase):
  def test_finds_what_is_registered(self):
    pool = PagePool(9, _SIZE)
    pages = _cache(pool, 3, _tokens(1, 2, 3, 4, 5, 6))
    self.assertEqual(pool.match(3, _tokens(1, 2, 3, 4, 5, 6)), pages)
    pool.check()

  def test_finds_it_while_it_is_referenced(self):
    pool = PagePool(4, _SIZE)
    pages = _admit(pool, 0, _tokens(1, 2, 3, 4))
    self.assertEqual(pool.match(0, _tokens(1, 2, 3, 4)), pages)
    pool.release(pages)
    self.assertEqual(pool.available, 1)  # The second reference stays.
    pool.release(pages)
    self.assertEqual(pool.available, 3)

  def test_finds_nothing_before_it_is_registered(self):
    pool = PagePool(4, _SIZE)
    pages = pool.allocate(1)
    self.assertEqual(pool.match(0, _tokens(1, 2)), [])
    pool.release(pages)
    self.assertEqual(pool.match(0, _tokens(1, 2)), [])

  @parameterized.parameters(
    ((1, 2, 3, 4, 9), 2),
    ((1, 2, 3, 4, 9, 9), 2),
    ((1, 2, 3, 9, 5, 6), 1),
    ((1, 2, 3), 1),
    ((1, 9, 3, 4, 5, 6), 0),
    ((3, 4), 0),
    ((1,), 0),
    ((), 0),
  )
  def test_finds_the_longest_run_of_full_pages(self, asked, expected):
    pool = PagePool(9, _SIZE)
    pages = _cache(pool, 0, _tokens(1, 2, 3, 4, 5, 6))
    self.assertEqual(pool.match(0, _tokens(*asked)), pages[:expected])
    pool.check()

  @parameterized.parameters(2, 4)
  def test_never_finds_another_version(self, version):
    # After a weight update a cached prefix is stale: old keys and values.
    pool = PagePool(9, _SIZE)
    tokens = _tokens(1, 2, 3, 4)
    old = _cache(pool, 3, tokens)
    self.assertEqual(pool.match(version, tokens), [])
    new = _admit(pool, version, tokens)
    self.assertNoCommonElements(old, new)
    self.assertEqual(pool.match(3, tokens), old)
    self.assertEqual(pool.match(version, tokens), new)
    pool.check()

  def test_the_same_tokens_after_others_are_another_page(self):
    pool = PagePool(9, _SIZE)
    first = _cache(pool, 0, _tokens(1, 2, 7, 8))
    second = _cache(pool, 0, _tokens(3, 4, 7, 8))
    self.assertNoCommonElements(first, second)
    self.assertEqual(pool.match(0, _tokens(3, 4, 7, 8)), second)

  def test_a_partial_last_page_is_not_offered(self):
    pool = PagePool(9, _SIZE)
    pages = _cache(pool, 0, _tokens(1, 2, 3))
    self.assertLen(pages, 2)
    self.assertEqual(pool.match(0, _tokens(1, 2, 3)), pages[:1])
    self.assertEqual(pool.match(0, _tokens(1, 2, 3, 0)), pages[:1])
    # It is free, not cached: it can go without anything being evicted.
    pool.allocate(7)
    self.assertEqual(pool.match(0, _tokens(1, 2)), pages[:1])

  def test_pages_after_the_tokens_stay_plain(self):
    pool = PagePool(4, _SIZE)
    pages = pool.allocate(3)
    pool.register(0, _tokens(1, 2), pages)
    pool.release(pages)
    pool.check()
    pool.allocate(2)
    self.assertEqual(pool.match(0, _tokens(1, 2)), pages[:1])

  def test_a_longer_sequence_is_registered_again(self):
    pool = PagePool(9, _SIZE)
    pages = _admit(pool, 0, _tokens(1, 2, 3))
    pages += pool.allocate(1)
    pool.register(0, _tokens(1, 2, 3, 4, 5, 6), pages)
    self.assertEqual(pool.match(0, _tokens(1, 2, 3, 4, 5, 6)), pages)
    pool.check()

  def test_keeps_the_pages_that_were_registered_first(self):
    pool = PagePool(9, _SIZE)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.register(0, _tokens(1, 2, 3, 4), first)
    pool.register(0, _tokens(1, 2, 5, 6, 7, 8), second)
    self.assertEqual(pool.match(0, _tokens(1, 2, 3, 4)), first)
    # Of the second sequence only what the first did not have.
    expected = [first[0], *second[1:]]
    self.assertEqual(pool.match(0, _tokens(1, 2, 5, 6, 7, 8)), expected)
    pool.check()

  def test_the_pages_registered_second_are_free_once_released(self):
    pool = PagePool(3, _SIZE)
    first, second = pool.allocate(1), pool.allocate(1)
    for pages in (first, second):
      pool.register(0, _tokens(1, 2), pages)
    pool.release(second)
    self.assertEqual(pool.allocate(1), second)
    self.assertEqual(pool.match(0, _tokens(1, 2)), first)

  def test_refuses_too_few_pages(self):
    pool = PagePool(4, _SIZE)
    pages = pool.allocate(1)
    with self.assertRaisesRegex(ValueError, "1 pages of 2 slots cannot hold 3"):
      pool.register(0, _tokens(1, 2, 3), pages)
    self.assertEqual(pool.match(0, _tokens(1, 2)), [])

  @parameterized.parameters(0, -1, 4)
  def test_refuses_to_register_a_page_out_of_range(self, page):
    pool = PagePool(4, _SIZE)
    pages = pool.allocate(1)
    with self.assertRaisesRegex(ValueError, f"page {page} is none of"):
      pool.register(0, _tokens(1, 2, 3, 4), [*pages, page])
    self.assertEqual(pool.match(0, _tokens(1, 2)), [])

  def test_refuses_to_register_a_page_that_nobody_holds(self):
    pool = PagePool(4, _SIZE)
    pages = pool.allocate(2)
    pool.release(pages[1:])
    with self.assertRaisesRegex(ValueError, "is not referenced"):
      pool.register(0, _tokens(1, 2, 3, 4), pages)
    self.assertEqual(pool.match(0, _tokens(1, 2)), [])

  @parameterized.parameters(
    (0, (1, 2, 9, 9)),  # Other tokens of its own.
    (0, (9, 9, 3, 4)),  # Other tokens before.
    (1, (1, 2, 3, 4)),  # Another version.
  )
  def test_refuses_a_page_registered_otherwise(self, version, tokens):
    pool = PagePool(9, _SIZE)
    _, page = _admit(pool, 0, _tokens(1, 2, 3, 4))
    pages = [*pool.allocate(1), page]
    with self.assertRaisesRegex(ValueError, f"page {page} is registered for"):
      pool.register(version, _tokens(*tokens), pages)
    self.assertEqual(pool.match(version, _tokens(9, 9)), [])
    self.assertEqual(pool.match(1, _tokens(1, 2)), [])
    pool.check()

  def test_refuses_a_page_named_twice(self):
    pool = PagePool(4, _SIZE)
    pages = pool.allocate(1)
    with self.assertRaisesRegex(ValueError, "occurs twice"):
      pool.register(0, _tokens(1, 2, 3, 4), pages * 2)
    self.assertEqual(pool.match(0, _tokens(1, 2)), [])

  @parameterized.parameters(
    (np.zeros(4, np.int64),),
    (np.zeros(4, np.uint32),),
    (np.zeros((2, 2), np.int32),),
  )
  def test_refuses_tokens_whose_bytes_would_not_compare(self, tokens):
    pool = PagePool(9, _SIZE)
    pages = pool.allocate(4)
    with self.assertRaisesRegex(ValueError, "not a row of int32"):
      pool.match(0, tokens)
    with self.assertRaisesRegex(ValueError, "not a row of int32"):
      pool.register(0, tokens, pages)

  def test_takes_a_view_with_strides(self):
    pool = PagePool(9, _SIZE)
    pages = _cache(pool, 0, _tokens(1, 2, 3, 4))
    columns = np.asarray([[1, 0], [2, 0], [3, 0], [4, 0]], np.int32)
    self.assertEqual(pool.match(0, columns[:, 0]), pages)


class EvictionTest(parameterized.TestCase):
  def test_takes_free_pages_first(self):
    pool = PagePool(5, _SIZE)
    pages = _cache(pool, 0, _tokens(1, 2, 3, 4))
    self.assertNoCommonElements(pool.allocate(2), pages)
    self.assertEqual(pool.match(0, _tokens(1, 2, 3, 4)), pages)

  def test_a_cached_page_is_available(self):
    pool = PagePool(3, _SIZE)
    pages = _cache(pool, 0, _tokens(1, 2, 3, 4))
    self.assertEqual(pool.available, 2)
    self.assertCountEqual(pool.allocate(2), pages)
    pool.check()
    self.assertEqual(pool.match(0, _tokens(1, 2)), [])

  def test_an_evicted_page_is_plain(self):
    pool = PagePool(2, _SIZE)
    pages = _cache(pool, 0, _tokens(1, 2))
    self.assertEqual(pool.allocate(1), pages)
    pool.register(0, _tokens(5, 6), pages)
    pool.release(pages)
    self.assertEqual(pool.match(0, _tokens(1, 2)), [])
    self.assertEqual(pool.match(0, _tokens(5, 6)), pages)

  def test_takes_the_least_recently_used_first(self):
    pool = PagePool(4, _SIZE)
    sequences = [_tokens(n, n) for n in range(3)]
    pages = [_cache(pool, 0, tokens)[0] for tokens in sequences]
    pool.release(pool.match(0, sequences[0]))  # A use.
    for expected in (pages[1], pages[2], pages[0]):
      self.assertEqual(pool.allocate(1), [expected])
      pool.check()

  def test_takes_no_page_that_was_matched(self):
    pool = PagePool(4, _SIZE)
    _cache(pool, 0, _tokens(1, 1))
    _cache(pool, 0, _tokens(2, 2))
    held = pool.match(0, _tokens(1, 1))
    self.assertEqual(pool.available, 2)
    self.assertNoCommonElements(pool.allocate(2), held)
    self.assertIsNone(pool.allocate(1))

  @parameterized.parameters(
    ([0, 1, 2],), ([2, 1, 0],), ([1, 2, 0],), ([1, 0, 2],)
  )
  def test_takes_leaves_first(self, order):
    # However the sequence was released, at once or page by page.
    tokens = _tokens(1, 2, 3, 4, 5, 6)
    for at_once in (False, True):
      pool = PagePool(4, _SIZE)
      pages = _admit(pool, 0, tokens)
      released = [pages[index] for index in order]
      for group in [released] if at_once else [[page] for page in released]:
        pool.release(group)
        pool.check()
      for left in (2, 1, 0):
        self.assertEqual(pool.allocate(1), [pages[left]])
        self.assertEqual(_matches(pool, 0, tokens), pages[:left])
        pool.check()

  def test_a_use_of_a_page_is_a_use_of_those_before_it(self):
    pool = PagePool(4, _SIZE)
    prefix, suffix = _admit(pool, 0, _tokens(1, 2, 3, 4))
    pool.release([prefix])
    (other,) = _cache(pool, 0, _tokens(9, 9))
    pool.release([suffix])
    self.assertEqual(
      [pool.allocate(1) for _ in range(3)], [[other], [suffix], [prefix]]
    )

  def test_a_shared_prefix_outlives_its_branches(self):
    pool = PagePool(4, _SIZE)
    prefix, left = _cache(pool, 0, _tokens(1, 2, 3, 3))
    _, right = _cache(pool, 0, _tokens(1, 2, 4, 4))
    self.assertEqual(
      [pool.allocate(1) for _ in range(3)], [[left], [right], [prefix]]
    )

  def test_every_page_without_references_is_available(self):
    # Two sequences computed the same first page at once; the second goes on
    # after the first's, which nobody holds any longer. It must not stay locked:
    # a sequence that is alone can have the whole pool.
    pool = PagePool(4, _SIZE)
    first, second = pool.allocate(1), pool.allocate(2)
    pool.register(0, _tokens(1, 2), first)
    pool.register(0, _tokens(1, 2, 3, 4), second)
    pool.release(first)
    self.assertEqual(pool.available, 1)
    self.assertEqual(pool.allocate(1), first)
    pool.check()
    # What followed it was held, and cannot be matched without it ...
    self.assertEqual(pool.match(0, _tokens(1, 2, 3, 4)), [])
    # ... until its holder registers it anew.
    pool.register(0, _tokens(1, 2, 3, 4), second)
    self.assertEqual(pool.match(0, _tokens(1, 2, 3, 4)), second)
    pool.check()

  def test_what_followed_an_evicted_page_is_free_once_released(self):
    pool = PagePool(4, _SIZE)
    prefix, suffix = _admit(pool, 0, _tokens(1, 2, 3, 4))
    pool.release([prefix])
    held = pool.allocate(2)
    self.assertIn(prefix, held)
    pool.release([suffix])
    pool.check()
    # The page's number comes back in another sequence: no trace of the old.
    pool.register(0, _tokens(1, 2, 5, 6), held)
    self.assertEqual(pool.match(0, _tokens(1, 2, 3, 4)), held[:1])
    self.assertEqual(pool.allocate(1), [suffix])


class ForgetTest(parameterized.TestCase):
  def test_frees_cached_pages_of_older_versions(self):
    pool = PagePool(9, _SIZE)
    tokens = _tokens(1, 2, 3, 4)
    pages = [_cache(pool, version, tokens) for version in range(3)]
    pool.forget(2)
    pool.check()
    self.assertEqual(pool.available, 8)
    self.assertEqual(pool.match(0, tokens), [])
    self.assertEqual(pool.match(1, tokens), [])
    # They are free: they go before the cached ones.
    self.assertNoCommonElements(pool.allocate(6), pages[2])
    self.assertEqual(pool.match(2, tokens), pages[2])

  def test_referenced_pages_are_free_once_released(self):
    pool = PagePool(4, _SIZE)
    old = _admit(pool, 0, _tokens(1, 2, 3, 4))
    (new,) = _cache(pool, 1, _tokens(1, 2))
    pool.forget(1)
    pool.check()
    self.assertEqual(pool.available, 1)  # They are held until then.
    self.assertEqual(pool.match(0, _tokens(1, 2)), [])
    pool.release(old)
    pool.check()
    self.assertCountEqual(pool.allocate(2), old)
    self.assertEqual(pool.match(1, _tokens(1, 2)), [new])

  def test_a_version_stays_forgotten(self):
    # A sequence may have been under way when its version was forgotten.
    pool = PagePool(4, _SIZE)
    pages = pool.allocate(1)
    pool.forget(5)
    pool.forget(3)  # Takes nothing back.
    pool.register(4, _tokens(1, 2), pages)
    self.assertEqual(pool.match(4, _tokens(1, 2)), [])
    pool.register(5, _tokens(1, 2), pages)
    self.assertEqual(pool.match(5, _tokens(1, 2)), pages)
    pool.check()

  def test_long_sequences(self):
    # No call may recurse through a sequence: this one exceeds Python's stack.
    length = 5000
    pool = PagePool(length + 1, 1)
    tokens = np.arange(length, dtype=np.int32)
    pages = _cache(pool, 0, tokens)
    self.assertEqual(pool.match(0, tokens), pages)
    pool.release(pages)
    pool.check()
    pool.release(pool.allocate(length // 2))
    self.assertEqual(pool.match(0, tokens), pages[: length - length // 2])
    pool.forget(1)
    pool.check()
    self.assertEqual(pool.available, length // 2)


class CheckTest(parameterized.TestCase):
  """The check sees each kind of damage that it looks for."""

  def setUp(self):
    super().setUp()
    self.pool = PagePool(9, _SIZE)
    self.held = _admit(self.pool, 0, _tokens(1, 2, 3, 4))
    self.cached = _cache(self.pool, 1, _tokens(1, 2, 3, 4))
    self.pool.forget(0)
    self.pool.check()

  def _problem(self, message):
    with self.assertRaisesRegex(RuntimeError, message):
      self.pool.check()

  def test_sees_a_lost_page(self):
    self.pool._free.pop()
    self._problem("exactly one of")

  def test_sees_a_page_freed_twice(self):
    self.pool._free.append(self.pool._free[0])
    self._problem("exactly one of")

  def test_sees_the_reserved_page_freed(self):
    self.pool._free.append(0)
    self._problem("exactly one of")

  def test_sees_a_page_both_held_and_free(self):
    self.pool._free.append(self.held[0])
    self._problem("exactly one of.*a free page is registered")

  def test_sees_negative_references(self):
    self.pool._references[self.pool._free[0]] = -1
    self._problem("negative references")

  def test_sees_a_cached_page_that_is_not_registered(self):
    del self.pool._nodes[self.cached[1]]
    self._problem("a cached page is not registered.*registered are")

  def test_sees_a_page_that_would_outlive_the_one_before_it(self):
    self.pool._cached.move_to_end(self.cached[1])
    self._problem(f"page {self.cached[1]} would outlive")

  def test_sees_a_page_out_of_its_tree(self):
    self.pool._roots[0].children.clear()
    self._problem("registered are")

  def test_sees_a_page_under_another(self):
    suffix = self.pool._nodes[self.cached[1]]
    suffix.parent = self.pool._nodes[self.held[0]]
    self._problem(f"page {suffix.page} is not where its parent has it")

  def test_sees_a_page_registered_twice(self):
    children = self.pool._roots[0].children
    children[b"8 bytes."] = self.pool._nodes[self.held[0]]
    self._problem(f"page {self.held[0]} is registered twice")

  def test_sees_a_partial_page(self):
    node = self.pool._roots[0].children.popitem()[1]
    node.tokens = b"1234"
    self.pool._roots[0].children[node.tokens] = node
    self._problem(f"page {node.page} is registered and not full")

  def test_sees_a_forgotten_version(self):
    self.pool._oldest_version = 1
    self._problem("version 0 is forgotten and has a tree")


class Model:
  """The rules of the pool, each by brute force over all that is known.

  A registered page is known by its version and all tokens from the start of the
  sequence to its own last one. One page is before another where its tokens are
  a prefix of the other's.
  """

  def __init__(self, num_pages: int, page_tokens: int):
    self.num_pages, self.page_tokens = num_pages, page_tokens
    self.references = dict.fromkeys(range(1, num_pages), 0)
    self.registered = {}  # Page: version and tokens.
    self.last_use = {}  # Page: time.
    self.time = 0
    self.oldest = None
    self.events = collections.Counter()

  def cached(self) -> list[int]:
    return [page for page in self.registered if not self.references[page]]

  def free(self) -> set[int]:
    return {
      page
      for page, count in self.references.items()
      if not count and page not in self.registered
    }

  def available(self) -> int:
    return sum(not count for count in self.references.values())

  def follows(self, page: int, other: int) -> bool:
    """Whether a page's tokens begin with all of another's, or are the same."""
    version, tokens = self.registered[page]
    other_version, other_tokens = self.registered[other]
    return version == other_version and np.array_equal(
      tokens[: len(other_tokens)], other_tokens
    )

  def evict(self, count: int) -> set[int]:
    """Which pages go; they and what follows them are not registered after."""
    evicted = set()
    for _ in range(count):
      ranks = {
        page: (self.last_use[page], -len(self.registered[page][1]))
        for page in self.cached()
      }
      assert len(set(ranks.values())) == len(ranks), "the rule names no order"
      page = min(ranks, key=ranks.get)
      for other in list(self.registered):
        if other != page and self.follows(other, page):
          assert self.references[other], "a leaf was left"
          del self.registered[other]
          self.events["orphaned"] += 1
      del self.registered[page]
      evicted.add(page)
      self.events["evicted"] += 1
    return evicted

  def take(self, pages) -> None:
    for page in pages:
      self.references[page] += 1

  def release(self, pages) -> None:
    self.time += 1
    for page in pages:
      self.references[page] -= 1
    for page in pages:
      if not self.references[page] and page in self.registered:
        for other in self.registered:
          if self.follows(page, other):
            self.last_use[other] = self.time

  def find(self, version: int, tokens: np.ndarray) -> int | None:
    """The page of exactly these tokens."""
    for page, (known_version, known) in self.registered.items():
      if known_version == version and np.array_equal(known, tokens):
        return page
    return None

  def match(self, version: int, tokens: np.ndarray) -> list[int]:
    pages = []
    full = len(tokens) // self.page_tokens
    for number in range(1, full + 1):
      page = self.find(version, tokens[: number * self.page_tokens])
      if page is None:
        break
      pages.append(page)
    self.take(pages)
    self.events["hit"] += len(pages)
    return pages

  def register(self, version: int, tokens: np.ndarray, pages) -> None:
    if self.oldest is not None and version < self.oldest:
      self.events["too late"] += 1
      return
    for number in range(1, len(tokens) // self.page_tokens + 1):
      prefix = tokens[: number * self.page_tokens]
      known = self.find(version, prefix)
      if known is None:
        self.registered[pages[number - 1]] = (version, prefix.copy())
      elif known != pages[number - 1]:
        self.events["duplicate"] += 1

  def forget(self, before: int) -> None:
    self.oldest = before if self.oldest is None else max(before, self.oldest)
    for page, (version, _) in list(self.registered.items()):
      if version < self.oldest:
        self.events["forgotten"] += 1
        self.events["forgotten and held"] += bool(self.references[page])
        del self.registered[page]


class Driver:
  """A pool and its model, given the same random operations."""

  def __init__(self, seed: int, num_pages: int, page_tokens: int):
    self.lot = random.Random(seed)
    self.pool = PagePool(num_pages, page_tokens)
    self.model = Model(num_pages, page_tokens)
    # Of version, tokens and pages. Without tokens: some pages were released,
    # and the others are in no order, so that it cannot go on.
    self.sequences = []
    self.version = 0

  def allocate(self, count: int) -> list[int] | None:
    model, pages = self.model, self.pool.allocate(count)
    if count > model.available():
      assert pages is None
      model.events["full"] += 1
      return None
    assert len(pages) == len(set(pages)) == count
    free = model.free()
    evicted = model.evict(max(0, count - len(free)))
    # Any free pages while there are enough; else all, and the right cached.
    assert set(pages) == free | evicted if evicted else set(pages) <= free
    model.take(pages)
    return pages

  def match(self, version: int, tokens: np.ndarray) -> list[int]:
    pages = self.pool.match(version, tokens)
    assert pages == self.model.match(version, tokens)
    return pages

  def release(self, pages) -> None:
    self.pool.release(pages)
    self.model.release(pages)

  def register(self, version: int, tokens: np.ndarray, pages) -> None:
    self.pool.register(version, tokens, pages)
    self.model.register(version, tokens, pages)

  def random_tokens(self, most: int) -> np.ndarray:
    # Of two kinds only, so that sequences share prefixes of every length.
    count = self.lot.randint(0, most * self.pool.page_tokens)
    return _tokens(*self.lot.choices((0, 1), k=count))

  def grow(self, version: int, tokens: np.ndarray, pages: list[int]) -> None:
    """Finds room for all tokens; a sequence that gets none is given up."""
    more = self.allocate(-(-len(tokens) // self.pool.page_tokens) - len(pages))
    if more is None:
      return self.release(pages)
    pages = pages + more
    if self.lot.random() < 0.9:
      self.register(version, tokens, pages)
    self.sequences.append((version, tokens, pages))

  def admit(self) -> None:
    tokens = self.random_tokens(4)
    version = self.version - (self.lot.random() < 0.2)
    # Two sequences admitted at once do not see one another's pages.
    seen = self.lot.random() < 0.7
    self.grow(version, tokens, self.match(version, tokens) if seen else [])

  def extend(self) -> None:
    whole = [s for s in self.sequences if s[1] is not None]
    if whole:
      version, tokens, pages = sequence = self.lot.choice(whole)
      # By identity: arrays do not compare to one truth value.
      self.sequences = [s for s in self.sequences if s is not sequence]
      tokens = np.concatenate([tokens, self.random_tokens(2)])
      self.grow(version, tokens, pages)

  def share(self) -> None:
    """Another sequence begins with the full pages of one."""
    whole = [s for s in self.sequences if s[1] is not None]
    if whole:
      version, tokens, pages = self.lot.choice(whole)
      full = len(tokens) // self.pool.page_tokens
      self.pool.retain(pages[:full])
      self.model.take(pages[:full])
      tokens = tokens[: full * self.pool.page_tokens]
      self.sequences.append((version, tokens, pages[:full]))

  def finish(self) -> None:
    if self.sequences:
      pages = self.pick()[2]
      self.release(self.lot.sample(pages, len(pages)))

  def dissolve(self) -> None:
    """Releases a sequence page by page in any order, and some of it later."""
    if self.sequences:
      version, tokens, pages = self.pick()
      pages = self.lot.sample(pages, len(pages))
      cut = self.lot.randint(0, len(pages))
      for page in pages[:cut]:
        self.release([page])
      if pages[cut:]:
        self.sequences.append((version, None, pages[cut:]))

  def forget(self) -> None:
    before = self.version - self.lot.randint(0, 2)
    self.pool.forget(before)
    self.model.forget(before)

  def publish(self) -> None:
    self.version += 1

  def misuse(self) -> None:
    """Refused operations change nothing, which the next checks would see."""
    idle = [p for p, count in self.model.references.items() if not count]
    pages = [self.lot.choice([0, -1, self.pool.num_pages, *idle])]
    if self.sequences:
      pages = self.lot.choice(self.sequences)[2] + pages
    tokens = _tokens(*[0] * len(pages) * self.pool.page_tokens)
    for call in (
      lambda: self.pool.retain(pages),
      lambda: self.pool.release(pages),
      lambda: self.pool.register(self.version, tokens, pages),
      lambda: self.pool.register(self.version, _tokens(1), []),
      lambda: self.pool.allocate(-1),
    ):
      try:
        call()
      except ValueError:
        continue
      raise AssertionError("accepted")

  def pick(self):
    """Takes a sequence out."""
    return self.sequences.pop(self.lot.randrange(len(self.sequences)))

  def step(self) -> None:
    operations = {
      self.admit: 8,
      self.extend: 4,
      self.share: 1,
      self.finish: 5,
      self.dissolve: 3,
      self.publish: 0.5,
      self.forget: 0.5,
      self.misuse: 1,
    }
    self.lot.choices(list(operations), list(operations.values()))[0]()

  def compare(self) -> None:
    pool, model = self.pool, self.model
    pool.check()
    assert pool.available == model.available()
    held = collections.Counter(p for s in self.sequences for p in s[2])
    for page in range(1, pool.num_pages):
      assert pool._references[page] == model.references[page] == held[page]
    for page, (version, tokens) in model.registered.items():
      known = pool._known(version, pool._full_pages(tokens))
      assert len(known) == len(tokens) // pool.page_tokens
      assert known[-1].page == page


class RandomTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, 6, 1),
    (1, 8, 2),
    (2, 10, 3),
    (3, 12, 1),
    (4, 16, 2),
    (5, 24, 1),
    (6, 24, 2),
    (7, 40, 1),
    (8, 40, 2),
    (9, 64, 3),
  )
  def test_agrees_with_the_rules(self, seed, num_pages, page_tokens):
    driver = Driver(seed, num_pages, page_tokens)
    for _ in range(2000):
      driver.step()
      driver.compare()
    # Everything that the rules speak of has happened.
    for event in (
      "hit",
      "evicted",
      "orphaned",
      "duplicate",
      "full",
      "forgotten",
      "forgotten and held",
      "too late",
    ):
      self.assertGreater(driver.model.events[event], 0, event)

    pool = driver.pool
    for _, _, pages in driver.sequences:
      pool.release(pages)
      pool.check()
    pool.forget(driver.version + 1)
    pool.check()
    self.assertLen(pool._free, num_pages - 1)
    self.assertCountEqual(pool.allocate(num_pages - 1), range(1, num_pages))


if __name__ == "__main__":
  absltest.main()
