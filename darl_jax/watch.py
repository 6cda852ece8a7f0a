"""The numerical watch: says when a run's own metrics look wrong.

The loop gives it each step's metrics by their names in ``metrics.jsonl``. What
an alarm looks at is one function below, which reads the metrics and says
whether a bound is passed; when it speaks, again, and no more is the same for
all (``Watch.observe``). A metric that is not a number is beyond every bound,
and a step without the metric says nothing.
"""

import collections
import dataclasses
import io
import json
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from darl_jax import types
from darl_jax.config import ALARMS, WatchConfig

# Batches written down in one run: the first ones tell what happened.
_MAX_DUMPS = 3


@dataclasses.dataclass(frozen=True)
class Alarm:
  """What ``Watch.observe`` has to say.

  Attributes:
    name: One of ``config.ALARMS``.
    kind: Whether it begins, goes on after ``repeat_every`` steps, or is over.
    text: A sentence or more: value, bound, likely cause, and what to try.
    stop: Whether the run must end.
  """

  name: str
  kind: Literal["begins", "lasts", "ends"]
  text: str
  stop: bool = False


class Alarmed(RuntimeError):
  """The run was ended by an alarm that ``watch.stop_on`` names."""


@dataclasses.dataclass(frozen=True)
class _Reading:
  """One step's value against its bound.

  Attributes:
    beyond: Whether the bound is passed.
    text: Of an alarm.
    value: For the message that it is over.
    at_once: Whether one step suffices.
  """

  beyond: bool
  text: str
  value: float
  at_once: bool = False


@dataclasses.dataclass
class _Status:
  """Where an alarm stands.

  Attributes:
    beyond: Steps in a row beyond the bound.
    within: Steps in a row within it.
    since: Step at which it began to speak; None while it is silent.
    spoken: Step at which it last spoke.
  """

  beyond: int = 0
  within: int = 0
  since: int | None = None
  spoken: int = 0


class _History:
  """What alarms remember of earlier steps; finite numbers only.

  Attributes:
    first_entropies: Of the run's first ``window`` steps.
    rewards: Means of the last ``window`` steps.
    grad_norms: Of the last ``window`` steps before this one.
    fates: (generated, lost) so far, of the last ``window`` + 1 steps.
  """

  def __init__(self, window: int):
    self.window = window
    self.first_entropies: list[float] = []
    self.rewards: collections.deque[float] = collections.deque(maxlen=window)
    self.grad_norms: collections.deque[float] = collections.deque(maxlen=window)
    self.fates: collections.deque[tuple[float, float]] = collections.deque(
      maxlen=window + 1
    )

  def add(self, metrics: Mapping[str, float]) -> None:
    """Notes a step; the gradient norm is noted after it is read."""
    reward = metrics.get("train/reward")
    if reward is not None and math.isfinite(reward):
      self.rewards.append(float(reward))
    entropy = metrics.get("train/entropy")
    if (
      entropy is not None
      and math.isfinite(entropy)
      and len(self.first_entropies) < self.window
    ):
      self.first_entropies.append(float(entropy))
    if "fate/generated" in metrics:
      lost = metrics["fate/dropped_unused"] + metrics["fate/expired_unused"]
      self.fates.append((float(metrics["fate/generated"]), float(lost)))

  def add_grad_norm(self, metrics: Mapping[str, float]) -> None:
    norm = metrics.get("train/grad_norm")
    if norm is not None and math.isfinite(norm):
      self.grad_norms.append(float(norm))


class Watch:
  """All alarms of one run."""

  def __init__(self, config: WatchConfig):
    self._config = config
    self._history = _History(config.window)
    self._status = {name: _Status() for name in ALARMS}

  def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
    """What one step's metrics give reason to say.

    An alarm begins when its value was beyond its bound for ``patience`` steps
    in a row (or for one, see ``WatchConfig``), lasts while it is spoken of
    again every ``repeat_every`` steps, and ends after ``patience`` steps in a
    row within. One that ``stop_on`` names has ``stop`` set once it speaks and
    its value was beyond for ``stop_after`` steps in a row.

    Args:
      step: Learner steps taken; ascending.
      metrics: By name, as written to ``metrics.jsonl``; any may be absent.
    """
    self._history.add(metrics)
    alarms = []
    for name, read in _READINGS.items():
      reading = read(metrics, self._history, self._config)
      if reading is not None:
        alarm = self._advance(name, step, reading)
        if alarm is not None:
          alarms.append(alarm)
    self._history.add_grad_norm(metrics)
    return alarms

  def state(self) -> dict[str, Any]:
    """Everything it remembers, as plain JSON data."""
    history = self._history
    return {
      "first_entropies": list(history.first_entropies),
      "rewards": list(history.rewards),
      "grad_norms": list(history.grad_norms),
      "fates": [list(pair) for pair in history.fates],
      "status": {
        name: dataclasses.asdict(status)
        for name, status in self._status.items()
      },
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from ``state``; of another ``window`` it keeps the newest.

    Raises:
      ValueError: It is no state of a watch; nothing is restored then.
    """
    history = _History(self._config.window)
    try:
      status = {
        name: _Status(**fields) for name, fields in state["status"].items()
      }
      history.first_entropies.extend(state["first_entropies"][: history.window])
      history.rewards.extend(state["rewards"])
      history.grad_norms.extend(state["grad_norms"])
      history.fates.extend((made, lost) for made, lost in state["fates"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
      raise ValueError(f"this is no state of the watch: {error!r}") from error
    if unknown := sorted(status.keys() - self._status.keys()):
      raise ValueError(
        f"the watch's state has alarms that are not known: {unknown}."
      )
    self._history = history
    self._status = {name: _Status() for name in ALARMS} | status

  def _advance(self, name: str, step: int, reading: _Reading) -> Alarm | None:
    config, status = self._config, self._status[name]
    if reading.beyond:
      status.beyond, status.within = status.beyond + 1, 0
    else:
      status.beyond, status.within = 0, status.within + 1
    if status.since is None:
      if status.beyond < (1 if reading.at_once else config.patience):
        return None
      status.since = step
      kind, text = "begins", f"step {step}: {reading.text}"
    elif status.within >= config.patience:
      text = (
        f"step {step}: {name}, since step {status.since}, is over: "
        f"{reading.value:.3g} now."
      )
      status.since = None
      return Alarm(name, "ends", text)
    else:
      kind = "lasts"
      text = f"step {step}, since step {status.since}: {reading.text}"
    stop = name in config.stop_on and status.beyond >= config.stop_after
    if stop:
      text += (
        f" The run ends: watch.stop_on has {name}, and this is step "
        f"{status.beyond} of it in a row."
      )
    elif kind == "lasts" and (
      not reading.beyond or step - status.spoken < config.repeat_every
    ):
      return None
    status.spoken = step
    return Alarm(name, kind, text, stop)


def dump_batch(
  folder: pathlib.Path,
  step: int,
  batch: types.Batch,
  metrics: Mapping[str, float],
) -> str:
  """Writes down a step that was not taken, to be looked at or taken again.

  ``step_N.npz`` has the batch's arrays by their names in ``types.Batch``, and
  ``step_N.json`` the metrics. Only the first three of a folder are written, and
  a file that cannot be does not end the run.

  Args:
    folder: Created if absent.
    step: Learner steps taken, this one included.
    batch: As it was given to the learner; numpy or device arrays.
    metrics: Of the step.

  Returns:
    What became of it, for the log.
  """
  arrays = {
    field.name: np.asarray(value)
    for field in dataclasses.fields(batch)
    if (value := getattr(batch, field.name)) is not None
  }
  # JSON has neither: as in metrics.jsonl, they are written as text.
  values = {
    name: float(value) if math.isfinite(value) else str(float(value))
    for name, value in metrics.items()
  }
  path = folder / f"step_{step}.npz"
  try:
    folder.mkdir(parents=True, exist_ok=True)
    written = [old for old in folder.glob("step_*.npz") if old != path]
    if len(written) >= _MAX_DUMPS:
      return f"{folder} has {len(written)} batches already; no more is kept."
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    text = json.dumps({"step": step, **values}, indent=1, allow_nan=False)
    # The batch last: where it is, its metrics are.
    _write(path.with_suffix(".json"), text.encode())
    _write(path, content.getvalue())
  except OSError as error:
    return f"the batch could not be written to {path}: {error.strerror}."
  return f"the batch is in {path}."


def _write(path: pathlib.Path, content: bytes) -> None:
  """All of it, or nothing."""
  unfinished = path.with_name(path.name + ".unfinished")
  unfinished.write_bytes(content)
  os.replace(unfinished, path)


# ------------------------------------------------------------------ the alarms


def _non_finite(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  skipped = metrics.get("train/non_finite")
  if skipped is None:
    return None
  text = (
    f"{skipped:g} of the step's optimizer steps were left out, for a loss or a "
    "gradient that is not finite. Parameters and optimizer are as before. "
    "Likely a log-prob, an advantage or a parameter that is not. Look at the "
    "dumped batch; try a smaller learner.learning_rate or "
    "learner.max_grad_norm, or model.compute_dtype='float32'."
  )
  return _Reading(not skipped <= 0, text, skipped, at_once=True)


def _empty_minibatch(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  if not {"train/skipped", "train/non_finite"} <= metrics.keys():
    return None
  empty = metrics["train/skipped"] - metrics["train/non_finite"]
  text = (
    f"{empty:g} of the step's optimizer steps were left out, for no token to "
    "train on: fewer trajectories were placed than there are minibatches. Try "
    "a smaller learner.minibatches, or a greater replay.min_batch."
  )
  return _Reading(not empty <= 0, text, empty)


def _ess_collapse(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  share = metrics.get("train/ess_fraction")
  if share is None:
    return None
  text = (
    f"the effective sample size is {share:.3g} of the batch's tokens, below "
    f"watch.min_ess_fraction = {config.min_ess_fraction:g}: a few tokens carry "
    "the step, since the policy has moved away from what sampled them. Try a "
    "smaller replay.max_staleness, replay.max_metric or learner.learning_rate."
  )
  return _Reading(not share >= config.min_ess_fraction, text, share)


def _parity_drift(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  gap = metrics.get("parity/p95")
  if gap is None:
    return None
  text = (
    "sampler and learner disagree: the 95th percentile of their log-probs' "
    f"difference is {gap:.2g} nats, above watch.max_parity_p95 = "
    f"{config.max_parity_p95:g}. Likely they round differently, which ratios "
    "then see as staleness. Try rollout.dtype as model.compute_dtype, "
    "rollout.cache_dtype='', or 0.1 as the bound where both are bfloat16."
  )
  return _Reading(not gap <= config.max_parity_p95, text, gap)


def _length_bias(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  kept = metrics.get("select/kept_length")
  pool = metrics.get("select/pool_length")
  if not kept or not pool:  # Means over nothing are 0.
    return None
  ratio = max(kept / pool, pool / kept)
  text = (
    f"selection prefers {'short' if kept < pool else 'long'} answers: mean "
    f"length {kept:.3g} of the kept against {pool:.3g} of the pool, a factor "
    f"above watch.max_length_ratio = {config.max_length_ratio:g}. Likely the "
    "metric depends on length. Try replay.metric='length_corrected', a greater "
    "replay.max_metric, or a smaller replay.reject_fraction."
  )
  return _Reading(not ratio <= config.max_length_ratio, text, ratio)


def _advantage_bias(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  bias = metrics.get("select/kept_advantage_bias")
  if bias is None:
    return None
  kept = metrics.get("select/kept_advantage", math.nan)
  pool = metrics.get("select/pool_advantage", math.nan)
  text = (
    f"selection prefers {'good' if bias > 0 else 'bad'} answers: mean "
    f"advantage {kept:+.3g} of the kept against {pool:+.3g} of the pool, "
    f"{abs(bias):.1f} standard errors of a uniform draw, above "
    f"watch.max_advantage_bias = {config.max_advantage_bias:g}. Wrong answers "
    "drift first, and without them the entropy collapses. Try a greater "
    "replay.max_metric, or replay.reject_fraction=0."
  )
  beyond = not abs(bias) <= config.max_advantage_bias
  return _Reading(beyond, text, bias)


def _entropy_collapse(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  entropy = metrics.get("train/entropy")
  if entropy is None:
    return None
  text = (
    f"the mean entropy of a token is {entropy:.2g} nats, below "
    f"watch.min_entropy = {config.min_entropy:g}: answers hardly vary, and "
    "groups that are all alike teach nothing. Try a greater "
    "objective.clip_high or rollout.temperature, a smaller "
    "learner.learning_rate, or harder prompts."
  )
  return _Reading(not entropy >= config.min_entropy, text, entropy)


def _entropy_drop(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  entropy, first = metrics.get("train/entropy"), history.first_entropies
  if entropy is None or len(first) < history.window:
    return None
  start = statistics.fmean(first)
  share = entropy / max(start, 1e-12)
  text = (
    f"the mean entropy of a token is {entropy:.2g} nats, {share:.2g} of the "
    f"{start:.2g} of the first {history.window} steps, below "
    f"watch.min_entropy_fraction = {config.min_entropy_fraction:g}: the policy "
    "has stopped exploring. Try a greater objective.clip_high or "
    "rollout.temperature, or a smaller learner.learning_rate."
  )
  return _Reading(not share >= config.min_entropy_fraction, text, share)


def _reward_zero(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  if "train/reward" not in metrics or len(history.rewards) < history.window:
    return None
  mean = statistics.fmean(history.rewards)
  text = (
    f"the mean reward of the last {history.window} steps is {mean:.3g}, within "
    f"watch.reward_margin = {config.reward_margin:g} of 0: nothing is right, "
    "groups are dead, and there is nothing to learn from. Likely the prompts "
    "are too hard, answers are cut off (train/truncated), or the verifier "
    "expects another form. Read samples.jsonl; try easier prompts.params, a "
    "greater rollout.max_response_tokens, warm_start.steps or "
    "rewards.partial_credit."
  )
  beyond = not mean > config.reward_margin
  return _Reading(beyond, text, mean, at_once=True)


def _reward_one(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  if "train/reward" not in metrics or len(history.rewards) < history.window:
    return None
  mean = statistics.fmean(history.rewards)
  text = (
    f"the mean reward of the last {history.window} steps is {mean:.3g}, within "
    f"watch.reward_margin = {config.reward_margin:g} of 1: everything is "
    "right, groups are dead, and there is nothing more to learn from. Read "
    "samples.jsonl for answers that only please the verifier; else try harder "
    "prompts.params, or fewer num_steps."
  )
  beyond = not mean < 1 - config.reward_margin
  return _Reading(beyond, text, mean, at_once=True)


def _samples_lost(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  if "fate/generated" not in metrics or len(history.fates) <= history.window:
    return None
  (made_then, lost_then), (made, lost) = history.fates[0], history.fates[-1]
  if made <= made_then:
    return None
  share = (lost - lost_then) / (made - made_then)
  text = (
    f"{share:.3g} of the samples of the last {history.window} steps expired or "
    "were dropped untrained, above watch.max_lost_fraction = "
    f"{config.max_lost_fraction:g}. Likely groups are dead (all rewards "
    "equal), verification fails, or samples grow stale; summary.json has the "
    "reasons. Try prompts of another difficulty, more "
    "rollout.samples_per_prompt, or a greater replay.max_staleness."
  )
  beyond = not share <= config.max_lost_fraction
  return _Reading(beyond, text, share, at_once=True)


def _gradient_spike(
  metrics: Mapping[str, float], history: _History, config: WatchConfig
) -> _Reading | None:
  norm = metrics.get("train/grad_norm")
  if norm is None or len(history.grad_norms) < history.window:
    return None
  usual = statistics.median(history.grad_norms)
  ratio = norm / max(usual, 1e-12)
  text = (
    f"the gradient norm is {norm:.3g}, {ratio:.3g} times the median of the "
    f"last {history.window} steps, above watch.max_grad_norm_ratio = "
    f"{config.max_grad_norm_ratio:g}. It was clipped to learner.max_grad_norm. "
    "Where it comes again, try a smaller learner.learning_rate, "
    "learner.max_grad_norm or learner.b2."
  )
  beyond = not ratio <= config.max_grad_norm_ratio
  return _Reading(beyond, text, ratio, at_once=True)


_Read = Callable[[Mapping[str, float], _History, WatchConfig], _Reading | None]
_READINGS: dict[str, _Read] = dict(
  non_finite=_non_finite,
  empty_minibatch=_empty_minibatch,
  ess_collapse=_ess_collapse,
  parity_drift=_parity_drift,
  length_bias=_length_bias,
  advantage_bias=_advantage_bias,
  entropy_collapse=_entropy_collapse,
  entropy_drop=_entropy_drop,
  reward_zero=_reward_zero,
  reward_one=_reward_one,
  samples_lost=_samples_lost,
  gradient_spike=_gradient_spike,
)
