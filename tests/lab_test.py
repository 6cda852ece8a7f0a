"""The lab: its law of ages, its runs, what it compares, and its statistics."""

import dataclasses
import importlib
import json
import math
import pathlib
import sys

import numpy as np
import pytest
import scipy.stats

from tests.fixtures import runs

_BENCH = str(pathlib.Path(__file__).resolve().parent.parent / "bench")


def _bench(name: str):
  """A script beside the others, as they import each other."""
  if _BENCH not in sys.path:
    sys.path.append(_BENCH)
  return importlib.import_module(name)


compile_once = runs.compile_once

lab = _bench("lab")
lab_methods = _bench("lab_methods")
lab_report = _bench("lab_report")
lab_run = _bench("lab_run")

_TASK = lab_methods.TASKS["spell_backward"]


class TestStaleness:
  def test_uniform_ages_have_the_law(self):
    staleness = lab_run.Staleness("uniform", 4)
    drawn = np.concatenate(
      [staleness.ages(10, step=s, seed=0) for s in range(100, 600)]
    )
    counts = np.bincount(drawn, minlength=5)
    assert len(counts) == 5
    assert scipy.stats.chisquare(counts).pvalue > 1e-3

  def test_no_age_reaches_before_the_first_version(self):
    for law in ("uniform", "fixed", "mixed"):
      for step in range(6):
        ages = lab_run.Staleness(law, 4).ages(50, step=step, seed=1)
        assert set(ages.tolist()) <= set(range(min(step, 4) + 1))
    assert set(lab_run.Staleness("fixed", 4).ages(9, step=9, seed=0)) == {4}

  def test_ages_are_those_of_seed_and_step(self):
    law = lab_run.Staleness("uniform", 64)
    first = law.ages(16, step=70, seed=3)
    np.testing.assert_array_equal(first, law.ages(16, step=70, seed=3))
    assert (first != law.ages(16, step=71, seed=3)).any()
    assert (first != law.ages(16, step=70, seed=4)).any()


def _config(method="darl", *, bound=3, steps=7, **changes):
  method = lab_methods.METHODS[method]
  settings = lab_methods.METHODS[method.tuned_as].grid[0]
  settings = {**settings, "learner.warmup_steps": 0, **changes}
  config = lab_methods.make_config(
    _TASK, method, settings, bound=bound, steps=steps
  )
  return dataclasses.replace(
    config,
    prompts=dataclasses.replace(config.prompts, num_items=600),
    warm_start=dataclasses.replace(config.warm_start, steps=2),
    rollout=dataclasses.replace(
      config.rollout, prompts_per_batch=4, samples_per_prompt=8, slots=32
    ),
    replay=dataclasses.replace(config.replay, max_candidates=64, min_batch=4),
    learner=dataclasses.replace(
      config.learner, batch_size=32, rows=32, score_rows=16
    ),
    evaluate=dataclasses.replace(config.evaluate, every=3, num_prompts=32),
  )


@pytest.fixture(scope="module")
def small_lab(tmp_path_factory):
  return lab_run.Lab(_config(), tmp_path_factory.mktemp("lab"))


@pytest.mark.slow
class TestRun:
  def test_the_same_run_twice(self, small_lab):
    staleness = lab_run.Staleness("uniform", 3)
    first, again, other = (
      small_lab.run(_config(), staleness, seed=seed) for seed in (5, 5, 6)
    )
    timed = ("seconds", "cpu_seconds")
    first, again = (
      {k: v for k, v in row.items() if k not in timed} for row in (first, again)
    )
    assert first == again
    assert other["scalars"] != first["scalars"]
    assert [x for x, _ in first["curve"]] == [0, 3 * 32, 6 * 32, 7 * 32]
    assert json.loads(json.dumps(first)) == first

  def test_each_sample_is_trained_at_the_age_that_the_law_says(self, small_lab):
    row = small_lab.run(_config("grpo"), lab_run.Staleness("fixed", 3), seed=5)
    # min(3, step) at the steps 0, 1, 2 and from then on.
    assert set(row["ages"]) == {"0", "1", "2", "3"}
    trained = sum(row["ages"].values())
    assert trained == row["fates"]["trained"]
    assert row["ages"]["3"] > row["ages"]["0"] + row["ages"]["1"]

  def test_without_the_ring_a_sample_is_used_once(self, small_lab):
    rows = [
      small_lab.run(_config(name), lab_run.Staleness("uniform", 3), seed=5)
      for name in ("grpo", "grpo+ring")
    ]
    once, again = (max(v or 0 for v in r["scalars"]["uses"]) for r in rows)
    assert once == 0 < again

  def test_mixed_responses_begin_with_an_older_version(self, small_lab):
    config = _config("grpo", bound=2)
    config = dataclasses.replace(
      config, rollout=dataclasses.replace(config.rollout, chunk_tokens=2)
    )
    staleness = lab_run.Staleness("mixed", 2)
    run = lab_run._Run(
      lab_run.Lab(config, small_lab._folder), config, staleness, seed=5
    )
    run._plan()
    for version in range(3):
      run._due.clear()
      run._publish(version)
    versions = {
      tuple(trajectory.policy_version[trajectory.loss_mask].tolist())
      for groups in run._due.values()
      for group in groups
      for trajectory in group.trajectories
    }
    assert {(1,) * 2 + (2,) * n for n in range(5)} >= versions - {(1,)}
    assert any(len(set(tokens)) == 2 for tokens in versions)

  def test_the_learner_is_compiled_once_for_all_seeds(self, small_lab):
    config = _config()
    assert small_lab.learner(config) is small_lab.learner(_config())
    compiles = small_lab.learner(config).compiles()
    assert max(compiles.values()) <= 1


class TestMethods:
  def test_every_setting_parses_at_every_bound(self):
    for method in lab_methods.METHODS.values():
      tuned = lab_methods.METHODS[method.tuned_as]
      for settings in tuned.grid:
        for bound in (0,) if method.synchronous else (16, 64):
          lab_methods.make_config(
            _TASK, method, settings, bound=bound, steps=240
          )

  def test_tuning_is_equal(self):
    grids = [m.grid for m in lab_methods.METHODS.values() if m.grid]
    assert {len(grid) for grid in grids} == {6}
    for grid in grids:
      assert len({json.dumps(settings) for settings in grid}) == 6

  def test_what_is_compared_is_the_same_but_for_the_method(self):
    def shared(name):
      method = lab_methods.METHODS[name]
      config = lab_methods.make_config(
        _TASK,
        method,
        lab_methods.METHODS[method.tuned_as].grid[0],
        bound=16,
        steps=240,
      )
      learner = dataclasses.replace(
        config.learner, learning_rate=1.0, final_learning_rate=1.0
      )
      return config.prompts, config.rollout, config.evaluate, learner

    names = [n for n, m in lab_methods.METHODS.items() if not m.synchronous]
    assert all(shared(name) == shared(names[0]) for name in names)


class TestJobs:
  def _rows(self, path, scores):
    rows = lab.Rows(path)
    for job in lab.halving_jobs("spell_backward", "grpo"):
      rows.add(job, {"curve": [[0, 0.1], [1, scores[job.settings]]]})
    return rows

  def test_the_best_two_go_on_and_the_best_of_them_is_chosen(self, tmp_path):
    rows = self._rows(tmp_path / "rows", [0.1, 0.5, 0.2, 0.9, 0.3, 0.4])
    finals = lab.final_jobs(rows, "spell_backward", "grpo")
    assert [job.settings for job in finals] == [3, 1]
    for job in finals:
      rows.add(job, {"curve": [[0, 0.1], [1, 1.0 - 0.1 * job.settings]]})
    assert lab.chosen_settings(rows, "spell_backward", "grpo") == 1
    jobs = lab.table_jobs(
      rows,
      "spell_backward",
      ["grpo"],
      ["uniform:16", "uniform:64"],
      2,
      tuned_on="spell_backward",
    )
    assert [(job.seed, job.staleness, job.settings) for job in jobs] == [
      (101, "uniform:16", 1),
      (101, "uniform:64", 1),
      (102, "uniform:16", 1),
      (102, "uniform:64", 1),
    ]

  def test_no_table_before_tuning(self, tmp_path):
    rows = lab.Rows(tmp_path / "rows")
    with pytest.raises(KeyError):
      lab.chosen_settings(rows, "spell_backward", "grpo")

  def test_what_has_its_row_is_not_done_again(self, tmp_path):
    self._rows(tmp_path / "rows", [0.1, 0.5, 0.2, 0.9, 0.3, 0.4])
    rows = lab.Rows(tmp_path / "rows")
    jobs = lab.halving_jobs("spell_backward", "grpo")
    assert all(job in rows for job in jobs)
    assert jobs[0]._replace(seed=9) not in rows

  def test_rows_of_other_settings_are_found(self, tmp_path):
    rows = lab.Rows(tmp_path / "rows")
    grid = lab_methods.METHODS["grpo"].grid
    jobs = lab.halving_jobs("spell_backward", "grpo")
    for job in jobs[:3]:
      rows.add(job, {"changes": grid[job.settings]})
    table = jobs[3]._replace(stage="table", method="grpo+ring")
    rows.add(table, {"changes": grid[3]})
    assert lab.outdated(rows) == []
    rows.add(jobs[4], {"changes": grid[5]})
    rows.add(jobs[5]._replace(settings=6), {"changes": grid[5]})
    rows.add(jobs[5]._replace(method="gone"), {"changes": grid[5]})
    found = lab.outdated(lab.Rows(tmp_path / "rows"))
    assert [text.split(":")[0] for text in found] == [
      "halving of grpo, seed 1",
      "halving of grpo, seed 1",
      "halving of gone, seed 1",
    ]

  def test_a_row_that_was_cut_off_is_done_again(self, tmp_path):
    path = tmp_path / "rows"
    self._rows(path, [0.1, 0.5, 0.2, 0.9, 0.3, 0.4])
    path.write_text(path.read_text()[:-20])
    jobs = lab.halving_jobs("spell_backward", "grpo")
    rows = lab.Rows(path)
    assert [job in rows for job in jobs] == [True] * 5 + [False]
    rows.add(jobs[-1], {"changes": {}, "curve": []})
    assert jobs[-1] in lab.Rows(path)

  def test_tuning_seeds_are_not_reported(self):
    assert max(lab._HALVING_SEED, lab._FINAL_SEED) < lab._FIRST_SEED


def _row(method, seed, accuracies):
  curve = [[1000 * i, a] for i, a in enumerate(accuracies)]
  return {"method": method, "seed": seed, "curve": curve}


class TestReport:
  def test_samples_to_an_accuracy_that_is_held(self):
    row = _row("darl", 1, [0.2, 0.5, 0.3, 0.5, 0.6, 0.7, 0.7])
    # 0.4 is passed at once and lost again; it is held from 3000 on.
    assert lab_report.samples_to(row, 0.4) == pytest.approx(2500)
    assert lab_report.samples_to(row, 0.2) == 0
    assert math.isinf(lab_report.samples_to(row, 0.65))

  def test_performance_is_of_the_last_tenth(self):
    row = _row("darl", 1, [0.0] * 18 + [0.5, 0.7, 0.9])
    assert lab_report.performance(row) == pytest.approx(0.7)
    assert not lab_report.collapsed(row)
    assert lab_report.collapsed(_row("darl", 1, [0.2, 0.8, 0.7] + [0.1] * 18))

  def test_paired_is_the_t_test(self):
    rng = np.random.default_rng(0)
    x = rng.normal(0.3, 1.0, size=12)
    want = scipy.stats.ttest_1samp(x, 0)
    got = lab_report.paired(x)
    interval = want.confidence_interval(0.95)
    np.testing.assert_allclose(
      (got.p, got.low, got.high), (want.pvalue, interval.low, interval.high)
    )
    assert lab_report.paired([1.0]).low == -math.inf
    assert lab_report.paired([2.0, 2.0])[:3] == (2.0, 2.0, 2.0)

  def test_holm(self):
    np.testing.assert_allclose(
      lab_report.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02]
    )
    assert lab_report.holm([0.9, 0.8]) == [1.0, 1.0]

  def _table(self, ours, theirs):
    rows = [_row("darl", s, a) for s, a in enumerate(ours)]
    return lab_report.Table(
      rows + [_row("grpo", s, a) for s, a in enumerate(theirs)]
    )

  def test_a_ratio_of_samples_is_paired(self):
    fast = [0.0, 0.8, 0.8, 0.8, 0.8, 0.8]
    slow = [0.0, 0.4, 0.8, 0.8, 0.8, 0.8]
    table = self._table([fast] * 3, [slow] * 3)
    got = table.fewer("darl", "grpo", 0.4)
    assert math.exp(got.mean) == pytest.approx(0.5)
    assert table.better("darl", "grpo").mean == 0

  def test_censored_baselines_count_in_their_favor(self):
    fast, never = [0.0, 0.8, 0.8, 0.8], [0.0, 0.1, 0.1, 0.1]
    slow = [0.0, 0.8, 0.8, 0.8]
    table = self._table([fast] * 3, [slow, slow, never])
    got = table.fewer("darl", "grpo", 0.4)
    ratios = [1, 1, 500 / 3000]
    assert math.exp(got.mean) == pytest.approx(
      math.exp(np.mean(np.log(ratios)))
    )
    assert (
      self._table([fast] * 2, [slow, never]).fewer("darl", "grpo", 0.4) is None
    )
    assert (
      self._table([fast, never], [slow] * 2).fewer("darl", "grpo", 0.4) is None
    )

  def test_a_seed_counts_once(self):
    with pytest.raises(ValueError, match="darl has two rows of seed 1"):
      lab_report.Table([_row("darl", 1, [0.1]), _row("darl", 1, [0.2])])

  def test_a_table_is_of_one_law_and_of_synchronous_methods(self):
    rows = [
      {**_row(method, 1, [accuracy]), "staleness": staleness}
      for method, staleness, accuracy in (
        ("sync_grpo", "uniform:0", 0.3),
        ("darl", "uniform:16", 0.1),
        ("darl", "uniform:4", 0.4),
        ("darl", "uniform:0", 0.2),
      )
    ]
    tables = lab_report.tables_of(rows)
    assert list(tables) == ["uniform:0", "uniform:4", "uniform:16"]
    for table, accuracy in zip(tables.values(), (0.2, 0.4, 0.1), strict=True):
      assert table.methods == ["sync_grpo", "darl"]
      assert table.mean_performance("darl") == accuracy

  def _goals(self, **curves):
    """Whether D-ARL is better than what is published, and than a control."""
    rows = [
      _row(method, seed, curve)
      for method, curve in curves.items()
      for seed in range(3)
    ]
    tuning = [{**_row("grpo", 0, [0.2]), "stage": "final"}]
    lines = lab_report.verdict(lab_report.Table(rows), tuning)
    return [
      line.startswith("- **Met**")
      for line in lines
      if "% fewer" in line or "random" in line
    ]

  def test_a_verdict_against_what_never_got_there(self):
    never = [0.0] * 10
    early, late = [0.0, 0.0] + [0.8] * 8, [0.0] * 7 + [0.8] * 3
    # A third less than everything is shown at 1,500 of 9,000, not at 6,750.
    for darl, met in ((early, [True, True]), (late, [False, True])):
      assert self._goals(darl=darl, grpo=never, darl_random=never) == met
    # Neither got there.
    assert self._goals(darl=never, grpo=never, darl_random=never) == [
      False,
      False,
    ]
    assert self._goals(darl=early, grpo=late, darl_random=early) == [
      True,
      False,
    ]
