"""Who decodes next: nothing is lost, shared by mistake, or waits for ever."""

import collections

import numpy as np
from absl.testing import parameterized

from darl_jax.rollout.pages import PagePool
from darl_jax.rollout.schedule import Group, Sample, Schedule
from darl_jax.types import Prompt

_PAGE = 4


def _tokens(count, first=0):
  return np.arange(first, first + count, dtype=np.int32)


def _group(
  group_id=0, *, prompt=None, samples=2, wanted=None, limit=8, expected=None
) -> Group:
  prompt = _tokens(6, 100 * group_id) if prompt is None else prompt
  group = Group(
    group_id,
    Prompt(f"prompt-{group_id}", prompt, {}),
    wanted=wanted or samples,
    limit=limit,
    expected=limit if expected is None else expected,
  )
  group.samples = [
    Sample(group, index, np.zeros(2, np.uint32)) for index in range(samples)
  ]
  return group


def _schedule(*, slots=4, pages=50, page=_PAGE, least_match=1) -> Schedule:
  pool = PagePool(pages + 1, page)
  return Schedule(slots=slots, pool=pool, least_match=least_match)


class _Driver:
  """Does with a schedule what the engine does, and looks on."""

  def __init__(self, schedule, *, slots, page):
    self.schedule = schedule
    self.slots = slots
    self.page = page
    self.epoch = 1
    self.groups = {}
    self.limits = {}
    self.ended = collections.Counter()
    self.delivered = []
    # Groups in the order in which their samples were first admitted.
    self.first_admitted = []
    # What each page was last told to hold, by the tokens from the start of a
    # sequence to the page's end, and the weights that computed it.
    self.contents = {}

  def submit(self, group):
    self.groups[group.group_id] = group
    self.limits[group.group_id] = group.limit
    self.schedule.submit(group)

  def admit(self, **kwargs):
    before = set(map(id, self.schedule.running))
    unread = self.schedule.admit(self.epoch, **kwargs)
    new = [s for s in self.schedule.running if id(s) not in before]
    for sample in new:
      if not sample.tokens and sample.index == 0:
        self.first_admitted.append(sample.group.group_id)
    for prefix in unread:
      assert prefix.read < len(prefix.tokens)
      assert prefix.read % self.page == 0
      self._write(prefix.tokens, prefix.pages, prefix.read)
      self.schedule.has_read(prefix)
    self._check_prefixes()
    return new

  def round(self, stops, **kwargs):
    """A round of the engine; ``stops`` says where a sample's chunk ends."""
    new = self.admit(**kwargs)
    running = self.schedule.reserve()
    # What was read is of use at once.
    assert all(sample in running for sample in new)
    assert [*running] == [*self.schedule.running]
    assert len(running) <= self.slots
    self._check_pages(running)
    complete = []
    for sample in running:
      cached = sample.cached
      tokens, stopped = stops(sample)
      room = sample.group.limit - len(sample.tokens)
      sample.tokens += tokens[:room]
      sample.stopped = stopped and len(tokens) <= room
      self.contents[sample.pages[-1]] = (
        self.epoch,
        cached.tobytes(),
        "response",
      )
      if not sample.ended:
        continue
      self.schedule.leave(sample)
      self.ended[sample.group.group_id, sample.index] += 1
      sample.group.ended.append(sample)
      if len(sample.group.ended) == sample.group.wanted:
        complete.append(sample.group)
    for group in complete:
      self.forget(group)
      self.delivered.append(group.group_id)
    self.schedule.pool.check()
    return running

  def forget(self, group):
    del self.groups[group.group_id]
    self.schedule.give_up(group)

  def update(self, mode):
    self.epoch += 1
    self.schedule.pool.forget(self.epoch)
    if mode == "recompute":
      for prefix in self.schedule.renew(self.epoch):
        assert (prefix.epoch, prefix.read) == (self.epoch, 0)
        self._write(prefix.tokens, prefix.pages, 0)
        self.schedule.has_read(prefix)
      self._check_prefixes()

  def preempt_all(self):
    for sample in reversed(tuple(self.schedule.running)):
      self.schedule.preempt(sample)

  def check_all_free(self):
    assert not self.schedule.load
    assert not self.schedule.begun
    pool = self.schedule.pool
    pool.check()
    assert pool.available == pool.num_pages - 1

  def _write(self, tokens, pages, start):
    for index, page in enumerate(pages):
      end = (index + 1) * self.page
      if end > start:
        self.contents[page] = self.epoch, tokens[:end].tobytes(), "prefix"

  def _check_prefixes(self):
    """What a prefix's pages hold is what it says, under its own weights."""
    for sample in self.schedule.running:
      prefix = sample.prefix
      assert prefix.read == len(prefix.tokens)
      for index, page in enumerate(prefix.pages):
        want = prefix.tokens[: (index + 1) * self.page].tobytes()
        assert self.contents[page] == (prefix.epoch, want, "prefix")

  def _check_pages(self, running):
    """No page is written by one sample and held by another."""
    own = collections.Counter()
    shared = collections.defaultdict(set)
    users = collections.Counter()
    for sample in running:
      own.update(sample.pages)
      users[id(sample.prefix)] += 1
      for index, page in enumerate(sample.prefix.pages):
        end = (index + 1) * self.page
        shared[page].add(sample.prefix.tokens[:end].tobytes())
      # All tokens have a slot, and the chunk begins a page.
      cached = len(sample.prefix.tokens) + (len(sample.pages) - 1) * self.page
      assert cached == len(sample.cached)
      room = len(sample.prefix.pages) * self.page
      assert 0 <= room - len(sample.prefix.tokens) < self.page
    assert all(count == 1 for count in own.values())
    assert own.keys().isdisjoint(shared)
    assert 0 not in own and 0 not in shared
    # Two prefixes share a page if they begin with the same tokens.
    assert all(len(tokens) == 1 for tokens in shared.values())
    for sample in running:
      assert sample.prefix.users == users[id(sample.prefix)]


class PropertyTest(parameterized.TestCase):
  @parameterized.product(
    slots=(1, 2, 5),
    page=(1, 3, 4),
    mode=("swap", "recompute", "drain"),
    spare=(0, 2, 40),
  )
  def test_every_sample_ends_once_whatever_happens(
    self, slots, page, mode, spare
  ):
    rng = np.random.default_rng([slots, page, spare, len(mode)])
    preemptions = sum(
      self._run(rng, slots=slots, page=page, mode=mode, spare=spare)
      for _ in range(6)
    )
    # They happen where pages are short, and only there.
    if slots == 1 or spare == 40 and page > 1:
      self.assertEqual(preemptions, 0)
    elif page == 1 and not spare:
      self.assertGreater(preemptions, 0)

  def _run(self, rng, *, slots, page, mode, spare):
    longest_prompt, limit = rng.integers(1, 14, size=2)
    # As the engine counts: enough for the longest sample.
    least = -(-(longest_prompt + limit) // page) + 1
    driver = _Driver(
      _schedule(
        slots=slots,
        pages=int(least) + spare,
        page=page,
        least_match=int(rng.integers(1, 9)),
      ),
      slots=slots,
      page=page,
    )
    # Prompts that begin alike, too.
    prompts = [
      np.concatenate([_tokens(2 * kind), _tokens(14, 50 * other)])
      for kind in range(3)
      for other in range(2)
    ]
    num_groups, submitted, given_up = 8, 0, set()
    draining, drained = False, []
    stop_odds = rng.choice([0.0, 0.1, 0.5])

    def stops(sample):
      tokens = rng.integers(1000, 2000, size=page).tolist()
      if rng.random() < stop_odds:
        return tokens[: rng.integers(1, page + 1)], True
      return tokens, False

    def submit():
      driver.submit(
        _group(
          submitted,
          prompt=prompts[rng.integers(6)][: rng.integers(longest_prompt) + 1],
          samples=(samples := int(rng.integers(1, 4))),
          wanted=int(rng.integers(1, samples + 1)),
          limit=int(rng.integers(limit)) + 1,
        )
      )

    for _ in range(3000):
      while submitted < num_groups and rng.random() < 0.3:
        submit()
        submitted += 1
      if driver.groups and rng.random() < 0.02:
        group = driver.groups[rng.choice([*driver.groups])]
        given_up.add(group.group_id)
        driver.forget(group)
      if rng.random() < 0.1:
        draining = True
      if draining and (mode != "drain" or not driver.schedule.begun):
        begun = [s for g in driver.groups.values() for s in g.samples]
        drained += [s for s in begun if s.tokens and not s.ended]
        driver.update(mode)
        draining = False
      driver.round(stops, only_begun=draining)
      if submitted == num_groups and not driver.groups:
        break
    else:
      self.fail("still not done after 3000 rounds")
    self.assertEqual({*driver.delivered} | given_up, set(range(num_groups)))
    self.assertEqual(len(driver.delivered) + len(given_up), num_groups)
    self.assertLessEqual(set(driver.ended.values()), {1})
    if mode == "drain":
      self.assertEmpty(drained)
    # Nobody is overtaken by one that came later and is no longer; some were
    # given up while they waited.
    for place, later in enumerate(driver.first_admitted):
      for earlier in driver.first_admitted[place + 1 :]:
        if earlier < later:
          self.assertGreater(driver.limits[later], driver.limits[earlier])
    driver.check_all_free()
    return driver.schedule.preemptions

  def test_with_the_least_pages_one_sample_is_never_preempted(self):
    for prompt, limit, page in np.ndindex(9, 9, 5):
      prompt, limit, page = prompt + 1, limit + 1, page + 1
      least = -(-(prompt + limit) // page) + 1
      driver = _Driver(
        _schedule(slots=1, pages=least, page=page), slots=1, page=page
      )
      driver.submit(_group(prompt=_tokens(prompt), samples=1, limit=limit))
      chunk = page * [7], False
      for cut in range(-(-limit // page)):
        self.assertLen(driver.round(lambda _, chunk=chunk: chunk), 1)
        if cut == 1:
          # Its prefix ends anywhere now.
          driver.update("recompute")
      self.assertEqual(driver.schedule.preemptions, 0)
      self.assertEqual(driver.delivered, [0])


def _whole_chunk(sample):
  return [7] * _PAGE, False


class OrderTest(parameterized.TestCase):
  def _driver(self, **kwargs):
    slots = kwargs.setdefault("slots", 4)
    return _Driver(_schedule(**kwargs), slots=slots, page=_PAGE)

  def _names(self, samples):
    return [(s.group.group_id, s.index) for s in samples]

  def test_admission_is_first_come_first_served(self):
    driver = self._driver(slots=3)
    for group_id in range(3):
      driver.submit(_group(group_id))
    self.assertEqual(driver.schedule.load, 6)
    self.assertEqual(self._names(driver.admit()), [(0, 0), (0, 1), (1, 0)])
    self.assertEmpty(driver.admit())
    driver.schedule.leave(driver.schedule.running[1])
    self.assertEqual(self._names(driver.admit()), [(1, 1)])
    self.assertEqual(driver.schedule.load, 5)

  def test_the_first_that_does_not_fit_lets_nobody_pass(self):
    # 3 pages for the second prompt; the third would need one.
    driver = self._driver(pages=5)
    driver.submit(_group(0, prompt=_tokens(5), samples=2))
    driver.submit(_group(1, prompt=_tokens(13, 50), samples=1))
    driver.submit(_group(2, prompt=_tokens(1, 80), samples=1))
    self.assertEqual(self._names(driver.admit()), [(0, 0), (0, 1)])

  def test_those_admitted_last_are_preempted_and_come_back_first(self):
    # One page of prompt, and room for seven more.
    driver = self._driver(pages=8)
    driver.submit(_group(0, prompt=_tokens(5), samples=3, limit=40))
    driver.submit(_group(1, prompt=_tokens(1, 70), samples=1))
    driver.submit(_group(2))
    running = driver.round(_whole_chunk)
    self.assertEqual(self._names(running), [(0, 0), (0, 1), (0, 2), (1, 0)])
    running = driver.round(_whole_chunk)
    self.assertEqual(self._names(running), [(0, 0), (0, 1), (0, 2)])
    running = driver.round(_whole_chunk)
    self.assertEqual(self._names(running), [(0, 0), (0, 1)])
    self.assertEqual(driver.schedule.preemptions, 2)
    self.assertTrue(driver.schedule.begun)
    # They wait in the order in which they were admitted.
    waiting = [*driver.schedule._waiting]
    self.assertEqual(self._names(waiting), [(0, 2), (1, 0), (2, 0), (2, 1)])
    self.assertEqual([len(s.tokens) for s in waiting], [8, 4, 0, 0])
    for sample in waiting:
      self.assertEmpty(sample.pages)
      self.assertIsNone(sample.prefix)

  def test_the_longest_are_admitted_first(self):
    driver = _Driver(_schedule(slots=2, pages=99, page=4), slots=2, page=4)
    for group_id, limit in enumerate((3, 9, 3, 12, 9)):
      driver.submit(_group(group_id, samples=1, limit=limit))
    waiting = [s.group.group_id for s in driver.schedule._waiting]
    self.assertEqual(waiting, [3, 1, 4, 0, 2])
    # What has begun stays before all others.
    driver.admit()
    first = driver.schedule.running[0]
    first.tokens.append(7)
    driver.schedule.preempt(first)
    driver.submit(_group(5, samples=1, limit=99))
    waiting = [s.group.group_id for s in driver.schedule._waiting]
    self.assertEqual(waiting, [3, 5, 4, 0, 2])

  def test_those_that_lose_their_pages_keep_their_order(self):
    driver = self._driver(slots=3)
    driver.submit(_group(0, samples=3))
    driver.submit(_group(1, samples=1))
    driver.round(_whole_chunk)
    driver.preempt_all()
    self.assertEmpty(driver.schedule.running)
    self.assertEqual(self._names(driver.admit()), [(0, 0), (0, 1), (0, 2)])
    # Counted are those that had to make room.
    self.assertEqual(driver.schedule.preemptions, 0)

  def test_only_begun(self):
    driver = self._driver(slots=2)
    driver.submit(_group(0, samples=1))
    driver.submit(_group(1, samples=1))
    self.assertFalse(driver.schedule.begun)
    self.assertEmpty(driver.admit(only_begun=True))
    driver.round(_whole_chunk)
    driver.preempt_all()
    driver.submit(_group(2, samples=1))
    self.assertTrue(driver.schedule.begun)
    driver.schedule.give_up(driver.groups[1])
    self.assertEqual(self._names(driver.admit(only_begun=True)), [(0, 0)])
    self.assertEqual(self._names(driver.admit()), [(2, 0)])

  def test_a_page_for_the_next_chunk_is_part_of_admission(self):
    # The prompt's page, and one for each of two samples.
    driver = self._driver(pages=3)
    driver.submit(_group(0, prompt=_tokens(5), samples=4, limit=4))
    running = driver.round(_whole_chunk)
    self.assertEqual(self._names(running), [(0, 0), (0, 1)])
    self.assertEqual(driver.schedule.preemptions, 0)
    running = driver.round(_whole_chunk)
    self.assertEqual(self._names(running), [(0, 2), (0, 3)])


class SharingTest(parameterized.TestCase):
  def _driver(self, **kwargs):
    return _Driver(_schedule(**kwargs), slots=4, page=_PAGE)

  def test_samples_of_a_prompt_read_it_once(self):
    schedule = _schedule()
    schedule.submit(_group(0, samples=3))
    (prefix,) = schedule.admit(1)
    # The last token is the first that decoding reads.
    np.testing.assert_array_equal(prefix.tokens, _tokens(5))
    self.assertEqual(prefix.users, 3)
    self.assertLen(prefix.pages, 2)
    for sample in schedule.running:
      self.assertIs(sample.prefix, prefix)
      self.assertEqual(sample.pending, 5)
    self.assertEqual(schedule.pool.available, 48)

  def test_a_sample_that_comes_later_takes_the_prefix_that_is_there(self):
    schedule = _schedule(slots=2)
    schedule.submit(_group(0, samples=3))
    (prefix,) = schedule.admit(1)
    schedule.has_read(prefix)
    schedule.leave(schedule.running[0])
    self.assertEmpty(schedule.admit(1))
    self.assertIs(schedule.running[-1].prefix, prefix)

  def test_the_prefix_of_a_lost_sample_is_all_it_has(self):
    driver = self._driver()
    driver.submit(_group(0, samples=2))
    driver.round(lambda sample: ([11, 12, 13, 14 + sample.index], False))
    driver.preempt_all()
    unread = driver.schedule.admit(driver.epoch)
    self.assertEqual(
      [prefix.tokens.tolist() for prefix in unread],
      [[*range(6), 11, 12, 13]] * 2,
    )
    # The prompt's full page is found in the cache.
    self.assertEqual([prefix.read for prefix in unread], [4, 4])
    self.assertEqual(unread[0].pages[:1], unread[1].pages[:1])
    self.assertEqual([s.pending for s in driver.schedule.running], [14, 15])

  def test_what_is_renewed_stays_where_it_is(self):
    driver = self._driver()
    driver.submit(_group(0, samples=2))
    driver.submit(_group(1, samples=1))
    driver.round(_whole_chunk)
    before = [(s.prefix, list(s.pages)) for s in driver.schedule.running]
    pages = [list(prefix.pages) for prefix, _ in before]
    driver.update("recompute")
    after = [(s.prefix, list(s.pages)) for s in driver.schedule.running]
    self.assertEqual(after, before)
    self.assertEqual([prefix.pages for prefix, _ in after], pages)
    self.assertLen(driver.schedule.renew(driver.epoch), 2)
    driver.preempt_all()
    self.assertEqual(driver.schedule.preemptions, 0)

  def test_what_is_renewed_is_shared_as_before(self):
    schedule = _schedule(slots=2)
    schedule.submit(_group(0, samples=3))
    for prefix in schedule.admit(1):
      schedule.has_read(prefix)
    schedule.pool.forget(2)
    [prefix] = schedule.renew(2)
    self.assertEqual((prefix.epoch, prefix.read), (2, 0))
    schedule.has_read(prefix)
    # Samples of the prompt that enter now take it, and others its full pages.
    schedule.leave(schedule.running[0])
    self.assertEqual(schedule.admit(2), [])
    self.assertEqual([s.prefix for s in schedule.running], [prefix, prefix])
    self.assertEqual(schedule.pool.match(2, prefix.tokens), prefix.pages[:1])

  def test_prompts_that_begin_alike_share_full_pages(self):
    schedule = _schedule()
    first, second = np.split(np.arange(30, dtype=np.int32), [9])
    schedule.submit(_group(0, samples=1, prompt=np.append(first, second[:3])))
    for prefix in schedule.admit(1):
      schedule.has_read(prefix)
    self.assertEqual(schedule.hits, 0)
    schedule.submit(_group(1, samples=1, prompt=np.append(first, second[5:8])))
    (prefix,) = schedule.admit(1)
    self.assertEqual(prefix.read, 8)
    self.assertEqual(prefix.pages[:2], schedule.running[0].prefix.pages[:2])
    self.assertNotEqual(prefix.pages[2], schedule.running[0].prefix.pages[2])
    self.assertEqual(schedule.hits, 8)

  @parameterized.parameters((8, 8), (9, 0))
  def test_few_tokens_in_the_cache_are_not_used(self, least_match, read):
    schedule = _schedule(least_match=least_match)
    for group_id in range(2):
      prompt = np.append(_tokens(8), _tokens(4, 50 * group_id))
      schedule.submit(_group(group_id, samples=1, prompt=prompt))
      (prefix,) = schedule.admit(1)
      schedule.has_read(prefix)
      # Of those that are not used, none stays held.
      schedule.leave(schedule.running[0])
      schedule.pool.check()
      self.assertEqual(schedule.pool.available, 50)
    self.assertLen(prefix.pages, 3)
    self.assertEqual(schedule.hits, read)

  def test_hits_are_counted_when_they_are_of_use(self):
    # Nothing is left for the second prompt's chunk until the first ends.
    schedule = _schedule(pages=4)
    schedule.submit(_group(0, samples=1, prompt=_tokens(10)))
    for prefix in schedule.admit(1):
      schedule.has_read(prefix)
    schedule.reserve()
    schedule.submit(_group(1, samples=1, prompt=_tokens(9)))
    for _ in range(3):
      self.assertEmpty(schedule.admit(1))
    self.assertEqual(schedule.hits, 0)
    schedule.leave(schedule.running[0])
    self.assertEmpty(schedule.admit(1))
    self.assertLen(schedule.running, 1)
    self.assertEqual(schedule.hits, 8)

  def test_nothing_is_shared_across_weights(self):
    driver = self._driver(slots=4)
    driver.submit(_group(0, samples=1, prompt=_tokens(9)))
    driver.round(_whole_chunk)
    driver.update("swap")
    # The same prompt again, and a second sample of a group that runs.
    driver.submit(_group(1, samples=1, prompt=_tokens(9)))
    (prefix,) = driver.schedule.admit(driver.epoch)
    self.assertEqual(prefix.read, 0)
    running = driver.schedule.running
    self.assertNotIn(prefix.pages[0], running[0].prefix.pages)

  def test_a_group_reads_its_prompt_again_for_new_weights(self):
    driver = _Driver(_schedule(slots=1), slots=1, page=_PAGE)
    driver.submit(_group(0, samples=3, limit=40))
    driver.round(_whole_chunk)
    old = driver.schedule.running[0].prefix
    driver.update("swap")
    schedule = driver.schedule
    schedule._slots = 3
    (new,) = schedule.admit(driver.epoch)
    self.assertIsNot(new, old)
    self.assertEqual(
      [sample.prefix for sample in schedule.running], [old, new, new]
    )
    # The last user of the old one takes nothing of the new one along.
    schedule.leave(schedule.running[0])
    self.assertIs(driver.groups[0].prefix, new)
    schedule.pool.check()
