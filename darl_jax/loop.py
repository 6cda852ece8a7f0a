"""The run. Start reading here.

    prompts --> rollout --> rewards --> replay.ring --> learner
                   ^                        |  ^           |
                   +------- snapshots ------+  +-----------+

``Run`` builds the stages and owns what they share; ``Run.train`` is the loop.
The stages know nothing of each other: they meet here, through ``types.py``.
With ``replay.max_staleness = 0`` the same stages run in turn in one thread, and
the run is deterministic.
"""

import dataclasses
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from darl_jax import checkpoint, metrics
from darl_jax import config as config_lib
from darl_jax.config import ConfigError, PromptsConfig, RunConfig
from darl_jax.evaluate import Evaluation, Evaluator
from darl_jax.learner.step import Learner
from darl_jax.learner.warm_start import warm_start
from darl_jax.models import lora, published
from darl_jax.models.transformer import Policy
from darl_jax.prompts import dataset
from darl_jax.prompts.stop_strings import StopStrings
from darl_jax.replay import batching, selection
from darl_jax.replay.ring import Entry, Pool, Ring, Starved
from darl_jax.rewards.pool import VerifierPool
from darl_jax.rollout.actor import Actor
from darl_jax.rollout.engine import Engine
from darl_jax.rollout.placement import Placement
from darl_jax.sharding import meshes, transfer
from darl_jax.summary import RewardMeter, Summary
from darl_jax.types import Params, PolicySnapshot, TrainState, TrajectoryGroup

# Seconds between looks at whether another thread has failed.
_POLL_S = 0.2
# Held-out answers written down at each evaluation, for people to read.
_NUM_SAMPLES = 8
# Trajectories of several versions that are computed again under each of them.
_NUM_MIXED = 8


class Interrupted(Exception):
  """The run was asked to stop, by Ctrl-C or SIGTERM."""


def interrupted(error: BaseException | None) -> bool:
  """Whether ``error`` is what an ``Interrupted`` led to, at any remove.

  It reaches the loop through the ring, or through the verifier that could not
  deliver to the ring.
  """
  while error is not None and not isinstance(error, Interrupted):
    error = error.__cause__
  return error is not None


@dataclasses.dataclass(frozen=True)
class Chosen:
  """What one step trains on.

  Attributes:
    pool: All that could have been chosen.
    entries: The chosen ones.
    logprobs: float32, flat over the entries' tokens, under the weights at the
      start of the step.
    rng: Of the step's draws.
    report: Metrics of pool, kept and dropped.
  """

  pool: Pool
  entries: Sequence[Entry]
  logprobs: np.ndarray
  rng: np.random.Generator
  report: Mapping[str, float]


class Run:
  """One training run in one workdir."""

  def __init__(
    self,
    config: RunConfig,
    workdir: pathlib.Path,
    *,
    make_engine: Callable[..., Engine] = Engine,
  ):
    """Builds every stage; starts the verifier's processes and nothing else.

    Args:
      config: Parsed and checked.
      workdir: Created if absent; must not hold a run.
      make_engine: Builds the sampler of the training rollouts.

    Raises:
      ConfigError: The devices, the checkpoint, the prompts or the workdir do
        not fit.
    """
    self.config = config
    self.workdir = workdir
    self.meshes = meshes.split_devices(config.mesh)
    self.checkpoint = _locate_checkpoint(config)
    self.prompts = dataset.load(
      _with_tokenizer(config.prompts, self.checkpoint), seed=config.seed
    )
    if problems := _prompt_problems(config, self.prompts):
      raise ConfigError(problems)
    tokenizer = self.prompts.tokenizer
    self.policy = Policy(
      config.model,
      vocab_size=config.model.vocab_size or tokenizer.vocab_size,
    )
    self.learner = Learner(
      self.policy,
      config.learner,
      config.objective,
      mesh=self.meshes.train,
      temperature=config.rollout.temperature,
      truncated=config.rollout.truncates,
      num_steps=config.num_steps,
      publish_dtype=jnp.dtype(config.rollout.dtype),
    )
    self.ring = Ring(
      config.replay,
      advantage=config.objective.advantage,
      reward_tolerance=config.objective.reward_tolerance,
      groups_per_version=config.rollout.prompts_per_batch,
      truncated=config.rollout.truncates,
    )
    self._placement = Placement(
      self.policy,
      mesh=self.meshes.rollout,
      dtype=jnp.dtype(config.rollout.dtype),
    )
    self._rollout_snapshot: PolicySnapshot | None = None
    engine_arguments = dict(
      mesh=self.meshes.rollout,
      max_prompt_tokens=config.prompts.max_tokens,
      stop_ids=tokenizer.stop_ids,
      pad_id=tokenizer.pad_id,
      seed=config.seed,
      stops=StopStrings(config.rollout.stop_strings, decode=tokenizer.decode)
      if config.rollout.stop_strings
      else None,
    )
    self._rollout_mesh_free = threading.Lock()
    self.actor = Actor(
      make_engine(self.policy, config.rollout, **engine_arguments),
      dataset.batches(
        self.prompts.train,
        batch_size=config.rollout.prompts_per_batch,
        seed=config.seed,
      ),
      exclusive=self._rollout_mesh_free,
      fetch=self._newest_on_rollout_mesh,
      reserve=self.ring.reserve,
      deliver=self._verify_for_training,
      fail=self.ring.close,
    )
    self.evaluator = Evaluator(
      self.policy,
      config,
      self.prompts.heldout,
      **engine_arguments,
    )
    self.writer = _open_workdir(workdir)
    self.verifier = VerifierPool(
      config.rewards,
      task=dataset.verifier_task(config.prompts, seed=config.seed),
      decode=tokenizer.decode,
      fail=self.ring.close,
    )
    self.rewards = RewardMeter()
    self.summary = Summary()
    self.progress = metrics.Progress()
    self.state: TrainState | None = None
    self.stopping = False

  def execute(self) -> dict[str, Any]:
    """The whole run: warm start, evaluation, training, evaluation.

    However it ends, the workdir then says how far it got (``summary.json``)
    and holds the learner's state of the last finished step.

    Returns:
      The summary.

    Raises:
      RingFailed: Another thread failed, or the run was interrupted; the cause
        says which.
      Starved: Too few trajectories passed the selection in time.
    """
    self.writer.write_json("config.json", config_lib.to_dict(self.config))
    self.prompts.tokenizer.save(self.workdir / "tokenizer.json")
    error: BaseException | None = None
    try:
      with self.progress:
        self._introduce()
        self.state = self.learner.init_state(
          self._warm_start(self._initial_params())
        )
        self._placement.keep(self.learner.frozen)
        self._publish(version=0)
        self._evaluate(0)
        self.train()
    except BaseException as caught:
      error = caught
    error = self._clean_up(error)
    summary = self._summarize(error)
    if error is not None:
      raise error
    return summary

  def _introduce(self) -> None:
    """Says what is about to run."""
    config = self.config
    learner, prompts = config.learner, self.prompts
    trained, frozen = (
      sum(leaf.size for leaf in jax.tree.leaves(part))
      for part in lora.split(self.learner.param_shapes)
    )
    train, rollout = self.meshes.train.shape, self.meshes.rollout.shape
    updates = config.num_steps * learner.minibatches
    for line in (
      f"{config.prompts.dataset}: {len(prompts.train):,} prompts to train on, "
      f"{len(prompts.heldout):,} held out; {prompts.num_duplicates:,} "
      f"duplicates merged, {prompts.num_too_long:,} too long; vocabulary "
      f"{prompts.tokenizer.vocab_size}, {trained + frozen:,} parameters"
      + f", of which {trained:,} are trained"
      * bool(frozen),
      f"train mesh {dict(train)}, rollout mesh {dict(rollout)}"
      + (", on one shared device" if self.meshes.shared else "")
      + (f"; {self.meshes.unused} devices unused" * bool(self.meshes.unused)),
      f"learning rate {learner.learning_rate:g}, {learner.schedule} to "
      f"{float(self.learner.schedule(max(updates - 1, 0))):g} at optimizer "
      f"step {updates}",
    ):
      self.progress.message(line)

  def train(self) -> None:
    """The loop: choose from the ring, step, publish, report."""
    config = self.config
    self.progress.stage("train", config.num_steps)
    self.summary.training_started()
    if not config.synchronous:
      self.actor.start()
    for version in range(config.num_steps):
      chosen = self._choose(self.state.params, version)
      batch, placed, batch_metrics = batching.build_batch(
        chosen.entries,
        chosen.logprobs,
        objective=config.objective,
        learner=config.learner,
        version=version,
        dead_tokens=chosen.pool.dead_tokens,
        rng=chosen.rng,
      )
      # Taken up at once: the old state is donated, and what follows raises if
      # the run was ended meanwhile.
      self.state, step_metrics = self.learner.step(self.state, batch)
      ages = self.summary.stepped(version + 1, placed)
      self.ring.mark_trained(placed, chosen.pool)
      self._publish(version=version + 1)
      self._report(
        version + 1,
        {**chosen.report, **_prefixed("batch", batch_metrics), **ages},
        step_metrics,
      )
      last = version + 1 == config.num_steps
      if last:
        self._stop_generating()
      if last or (version + 1) % config.evaluate.every == 0:
        self._evaluate(version + 1)

  def interrupt(self) -> None:
    """Ends the run where it waits next; callable from a signal handler."""
    self.stopping = True
    self.ring.close(Interrupted("the run was asked to stop"))

  # ------------------------------------------------------------------- stages

  def _initial_params(self) -> Params:
    """The checkpoint's parameters, or fresh ones; adapters are always fresh."""
    if self.checkpoint is None:
      return self.learner.init_trained(self.config.seed)
    trained, frozen = lora.split(self.learner.param_shardings)
    loaded = published.load(
      self.checkpoint, self.config.model, shardings=frozen or trained
    )
    if not frozen:
      return loaded
    return lora.join(self.learner.init_trained(self.config.seed), loaded)

  def _warm_start(self, params: Params) -> Params:
    """``params``, which it takes over, after the supervised stage."""
    config = self.config.warm_start
    if not config.steps:
      return params
    self.progress.stage("warm start", config.steps)
    tokenizer = self.prompts.tokenizer
    examples = [
      (prompt.tokens, tokenizer.encode_response(prompt.reference["answer"]))
      for prompt in self.prompts.train
      if prompt.reference["answer"] is not None
    ]

    def advance(values: Mapping[str, float]) -> None:
      self.progress.advance(1, **values)
      self.ring.check()

    return warm_start(
      self.policy,
      params,
      examples,
      config,
      mesh=self.meshes.train,
      seed=self.config.seed,
      advance=advance,
    )

  def _publish(self, *, version: int) -> None:
    """Gives the ring its own copy of the parameters, which nothing donates."""
    self.ring.push_snapshot(
      self.learner.snapshot(self.state.params, version=version)
    )

  def _newest_on_rollout_mesh(self) -> PolicySnapshot:
    """All parameters of the ring's newest snapshot, moved when it is new."""
    newest = self.ring.latest()
    held = self._rollout_snapshot
    if held is None or held.version != newest.version:
      held = self._rollout_snapshot = self._placement.place(newest)
    return held

  def _verify_for_training(self, groups: Sequence[TrajectoryGroup]) -> None:
    """Generated groups: counted by the ring, then verified, then admitted."""
    self.ring.begin(groups)

    def admit(group: TrajectoryGroup) -> None:
      self.rewards.add(group)
      self.ring.admit(group)

    self.verifier.submit(groups, deliver=admit)

  def _verify_now(
    self, groups: Sequence[TrajectoryGroup]
  ) -> list[TrajectoryGroup]:
    """Scores groups that are not for training, and waits for them."""
    scored: queue.SimpleQueue[TrajectoryGroup] = queue.SimpleQueue()
    self.verifier.submit(groups, deliver=scored.put)
    done: list[TrajectoryGroup] = []
    while len(done) < len(groups):
      try:
        done.append(scored.get(timeout=_POLL_S))
      except queue.Empty:
        self.ring.check()
    return sorted(done, key=lambda group: group.group_id)

  # --------------------------------------------------------------- one step

  def _choose(self, params: Params, version: int) -> Chosen:
    """Waits for a pool, scores it, and selects this step's trajectories.

    Raises:
      Starved: Too few pass the selection within ``replay.timeout_s``.
    """
    config = self.config
    replay = config.replay
    rng = np.random.default_rng([config.seed, version])
    deadline = time.monotonic() + replay.timeout_s
    needed = selection.pool_needed(replay, replay.min_batch)
    barred = ""
    while True:
      start = time.monotonic()
      try:
        pool = self._take(needed, deadline)
      except Starved as error:
        if barred:
          raise Starved(barred) from error
        raise
      finally:
        self.summary.learner_waited(time.monotonic() - start)
      plan = self._plan(pool.entries)
      # All are dispatched before the first is waited for.
      results = [self.learner.score(params, batch) for batch in plan.batches]
      stats = plan.statistics([moments for _, moments in results])
      kept = selection.select(
        stats, replay, batch_size=config.learner.batch_size, rng=rng
      )
      if len(kept) >= replay.min_batch:
        break
      # max_metric bars too many of this pool: wait until there are more.
      needed = len(pool) + 1
      barred = (
        f"replay.max_metric = {replay.max_metric:g} bars all but {len(kept)} "
        f"of {len(pool)} trajectories, and replay.min_batch = "
        f"{replay.min_batch} are needed; their mean {replay.metric} is "
        f"{selection.mismatch(stats, metric=replay.metric).mean():.3g}. "
        "Try a greater replay.max_metric, or a smaller learning rate."
      )
    report, alarms = selection.report(stats, kept, replay)
    for alarm in alarms:
      self.progress.alarm(alarm)
    per_token = plan.per_token([logprobs for logprobs, _ in results])
    return Chosen(
      pool=pool,
      entries=[pool.entries[i] for i in kept],
      logprobs=plan.tokens_of(per_token, kept),
      rng=rng,
      report={
        **_prefixed("select", report),
        **self._parity(pool, plan, per_token),
        **self._mixed_parity(pool),
      },
    )

  def _take(self, needed: int, deadline: float) -> Pool:
    """The ring's pool once it holds ``needed``; fills it when synchronous."""
    left = max(deadline - time.monotonic(), 0.0)
    limit = self.config.replay.timeout_s
    if not self.config.synchronous:
      return self.ring.take(needed, left, waited_s=limit - left)
    while (pool := self.ring.try_take(needed)) is None:
      if time.monotonic() > deadline:
        # Raises, with the diagnosis.
        return self.ring.take(needed, 0.0, waited_s=limit)
      self.actor.generate()
      self._join_verifier()
    return pool

  def _join_verifier(self) -> None:
    """Waits until all is verified, or the run is ended."""
    deadline = time.monotonic() + self.config.replay.timeout_s
    while True:
      left = deadline - time.monotonic()
      try:
        return self.verifier.join(min(left, _POLL_S))
      except TimeoutError as error:
        self.ring.check()
        if left <= _POLL_S:
          limit = self.config.replay.timeout_s
          raise TimeoutError(
            f"verification took longer than replay.timeout_s = {limit:g}"
          ) from error

  def _plan(self, entries: Sequence[Entry]) -> batching.ScoringPlan:
    """Packs trajectories for the scoring pass (method 2.1)."""
    learner = self.config.learner
    return batching.ScoringPlan(
      entries, score_rows=learner.score_rows, row_tokens=learner.row_tokens
    )

  def _parity(
    self, pool: Pool, plan: batching.ScoringPlan, per_token: np.ndarray
  ) -> dict[str, float]:
    """How the sampler's log-probs compare with the learner's, per token.

    Of the newest trajectories that a single version sampled from end to end,
    under that version: all of them where the scoring pass was under it, or else
    one dispatch, computed again.
    """
    whole = [
      (entry.trajectory.begun_by, i)
      for i, entry in enumerate(pool.entries)
      if entry.trajectory.policy_version[-1] == entry.trajectory.begun_by
    ]
    if not whole:
      return {}
    sampler, _ = max(whole)
    newest = [i for version, i in whole if version == sampler]
    if sampler == pool.version:
      chosen = [pool.entries[i].trajectory for i in newest]
      logprobs = plan.tokens_of(per_token, np.array(newest))
      behavior = np.concatenate([t.behavior_logprobs for t in chosen])
      mask = np.concatenate([t.loss_mask for t in chosen])
    else:
      try:
        params = self._on_train_mesh(self.ring.snapshot(sampler))
      except KeyError:  # Beyond replay.snapshot_bytes.
        return {}
      batch = next(self._plan([pool.entries[i] for i in newest]).batches)
      logprobs = np.asarray(self.learner.score(params, batch)[0])
      behavior, mask = batch.behavior_logprobs, batch.loss_mask
    gaps = np.abs(logprobs - behavior)[mask]
    p95, largest = float(np.quantile(gaps, 0.95)), float(np.max(gaps))
    bound = self.config.learner.parity_alarm
    if p95 > bound:
      self.progress.alarm(
        f"sampler and learner disagree: the 95th percentile of their "
        f"log-probs' difference is {p95:.2g} nats, above "
        f"learner.parity_alarm = {bound:g}"
      )
    return {"parity/p95": p95, "parity/max": largest}

  def _mixed_parity(self, pool: Pool) -> dict[str, float]:
    """What it costs to go on under new weights with what old ones cached.

    Each token of the newest trajectories that several versions sampled, against
    a forward pass of all tokens before it under the token's own version. With
    ``rollout.weight_update`` "recompute" that is what sampled it; with "swap"
    the earlier keys and values were others. As often as answers are evaluated.
    """
    if pool.version % self.config.evaluate.every:
      return {}
    mixed = [
      entry
      for entry in pool.entries
      if entry.trajectory.policy_version[-1] != entry.trajectory.begun_by
    ][-_NUM_MIXED:]
    if not mixed:
      return {}
    plan = self._plan(mixed)
    batches = list(plan.batches)
    trajectories = [entry.trajectory for entry in mixed]
    versions, behavior, mask = (
      np.concatenate([getattr(t, name) for t in trajectories])
      for name in ("policy_version", "behavior_logprobs", "loss_mask")
    )
    gaps = []
    for version in np.unique(versions[mask]):
      try:
        params = self._on_train_mesh(self.ring.snapshot(int(version)))
      except KeyError:  # Evicted, or beyond replay.snapshot_bytes.
        continue
      results = [self.learner.score(params, batch)[0] for batch in batches]
      logprobs = plan.tokens_of(plan.per_token(results), np.arange(len(mixed)))
      here = mask & (versions == version)
      gaps.append(np.abs(logprobs - behavior)[here])
    if not gaps:
      return {}
    each = np.concatenate(gaps)
    return {
      "parity/mixed_p95": float(np.quantile(each, 0.95)),
      "parity/mixed_max": float(np.max(each)),
    }

  def _on_train_mesh(self, snapshot: PolicySnapshot) -> Params:
    return transfer.to_mesh(
      snapshot.params,
      shardings=self.learner.trained_shardings,
      dtype=jnp.dtype(jnp.float32),
    )

  # ------------------------------------------------------------ what is seen

  def _evaluate(self, step: int) -> None:
    """Held-out accuracy of the newest snapshot, and some of its answers."""
    with self._rollout_mesh_free:  # Room for the snapshot, too.
      answered = self.evaluator.answer(self._newest_on_rollout_mesh())
    evaluation = self.evaluator.judge(self._verify_now(answered))
    self.summary.evaluated(step, evaluation.accuracy)
    self.writer.write(step, evaluation.metrics())
    samples = list(self._samples(evaluation))
    self.writer.write_samples(step, samples)
    self.progress.update(evaluation.metrics())
    shown = samples[step % len(samples)]
    self.progress.message(
      f"step {step}: held-out accuracy {evaluation.accuracy:.3f}; "
      f"{shown['prompt']!r} -> {shown['response']!r}, and "
      f"{shown['reference']!r} is right"
    )

  def _samples(self, evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """The first held-out answers as people read them."""
    tokenizer = self.prompts.tokenizer
    for group in evaluation.groups[:_NUM_SAMPLES]:
      answer = group.trajectories[0]
      yield {
        "prompt": tokenizer.decode_prompt(group.prompt.tokens),
        "response": tokenizer.decode(answer.response),
        "reference": group.prompt.reference["answer"],
        "reward": answer.reward,
      }

  def _report(
    self,
    step: int,
    host_metrics: Mapping[str, float],
    step_metrics: Mapping[str, Any],
  ) -> None:
    """One step's metrics, to the files and to the display."""
    occupancy = self.ring.occupancy()
    accounting = self.ring.accounting()
    updates = step * self.config.learner.minibatches
    values = {
      **metrics.flatten(step_metrics),
      **host_metrics,
      **self.rewards.drain(),
      **self.actor.metrics(),
      **_prefixed("verify", self.verifier.metrics()),
      **_prefixed("fate", accounting.counts()),
      **self.summary.speeds(occupancy, self.actor.metrics()),
      **self._waits(),
      "train/learning_rate": float(self.learner.schedule(updates - 1)),
    }
    if values["train/skipped"]:
      self.progress.alarm(
        f"step {step} left {values['train/skipped']:g} of its optimizer steps "
        "out: a gradient was not finite, or no token was left to train on"
      )
    self.writer.write(step, values)
    self.progress.ring(
      (slot.version, slot.age, slot.trajectories) for slot in occupancy.slots
    )
    self.progress.advance(1, **values)

  def _waits(self) -> dict[str, float]:
    """Who waits for whom. Alone in one thread, one side works at a time."""
    if self.config.synchronous:
      generating = self.actor.metrics()["rollout/seconds"]
      return self.summary.waits(self.summary.train_seconds - generating)
    return self.summary.waits(self.ring.occupancy().reserve_wait_s)

  # --------------------------------------------------------------- the end

  def _stop_generating(self) -> None:
    """Ends the actor, and lets the verifier finish what was generated.

    What it does not finish in time stays counted as awaiting verification.
    """
    self.summary.training_ended()
    self.actor.stop()
    try:
      self._join_verifier()
    except TimeoutError as error:
      self.progress.alarm(f"some samples stay unverified: {error}")

  def _clean_up(self, error: BaseException | None) -> BaseException | None:
    """Ends threads and processes and saves the learner's state.

    Whichever of it fails, the rest is done. A failure is the run's error if it
    had none, and a note on the one that it had.
    """
    self.summary.training_ended()
    for clean_up in (
      self.ring.close,
      self.actor.stop,
      self.verifier.close,
      self._save_state,
      self.ring.accounting().check,
    ):
      try:
        clean_up()
      except Exception as failure:
        if error is None:
          error = failure
        else:
          error.add_note(f"While ending the run: {failure!r}")
    return error

  def _save_state(self) -> None:
    if self.state is not None:
      checkpoint.save(self.workdir / "checkpoint", self.state)

  def _summarize(self, error: BaseException | None) -> dict[str, Any]:
    """Writes ``summary.json``, last of all, and the learning curve."""
    self.summary.ended(error, interrupted=interrupted(error))
    summary = self.summary.to_dict(
      self.ring.accounting(),
      self.ring.occupancy(),
      self.actor.metrics(),
      self.verifier.metrics(),
      self._waits(),
    )
    summary["compiles"] = self.learner.compiles() | self.actor.compiles()
    self.writer.write_json("summary.json", summary)
    self.writer.close()
    metrics.save_learning_curve(self.workdir)
    self.progress.message(
      f"{summary['status']}: {summary['steps']} steps in "
      f"{summary['seconds']:.0f} s; see {self.workdir}/summary.json and "
      f"{metrics.CURVE_FILE}"
    )
    return summary


def _locate_checkpoint(config: RunConfig) -> pathlib.Path | None:
  """Where the parameters start; None for fresh ones.

  Raises:
    ConfigError: It is not there, or not of the model's shape.
  """
  if not config.model.checkpoint:
    return None
  path = published.locate(config.model.checkpoint)
  published.check(path, config.model)
  return path


def _with_tokenizer(
  prompts: PromptsConfig, checkpoint: pathlib.Path | None
) -> PromptsConfig:
  """The prompts' tokenizer is the checkpoint's, unless another is named."""
  if prompts.tokenizer or checkpoint is None:
    return prompts
  return dataclasses.replace(prompts, tokenizer=str(checkpoint))


def _open_workdir(workdir: pathlib.Path) -> metrics.MetricsWriter:
  """Creates the run's folder and the files that grow with it.

  Raises:
    ConfigError: It holds a run, or cannot be written to.
  """
  try:
    if (workdir / "config.json").exists():
      raise ConfigError(
        [f"workdir = {workdir} already holds a run. Try {workdir}-2."]
      )
    return metrics.MetricsWriter(workdir)
  except OSError as error:
    raise ConfigError(
      [
        f"workdir = {workdir} is no folder to write to: {error.strerror}. "
        f"Try --workdir=runs/{workdir.name}."
      ]
    ) from error


def _prompt_problems(
  config: RunConfig, prompts: dataset.TaskPrompts
) -> list[str]:
  """What cannot be known of a config before its prompts are loaded."""
  problems = []
  limit, longest = config.rollout.max_response_tokens, prompts.longest_response
  if longest > limit:
    problems.append(
      f"rollout.max_response_tokens = {limit} cuts reference answers, of which "
      f"the longest has {longest} tokens with its stop token. Try "
      f"rollout.max_response_tokens={longest}."
    )
  if config.warm_start.steps and not any(
    prompt.reference["answer"] is not None for prompt in prompts.train
  ):
    problems.append(
      f"warm_start.steps = {config.warm_start.steps}, but "
      f"{config.prompts.dataset} has no reference answers. Try "
      "warm_start.steps=0."
    )
  rows, needed = config.model.vocab_size, prompts.tokenizer.vocab_size
  if 0 < rows < needed:
    problems.append(
      f"model.vocab_size = {rows} has no row for some of the tokenizer's "
      f"{needed} tokens. Try model.vocab_size={needed}, or 0 to follow it."
    )
  if config.evaluate.num_prompts > len(prompts.heldout):
    problems.append(
      f"evaluate.num_prompts = {config.evaluate.num_prompts}, but only "
      f"{len(prompts.heldout)} prompts are held out. Try "
      f"evaluate.num_prompts={len(prompts.heldout)}."
    )
  return problems


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
  return {f"{prefix}/{name}": value for name, value in values.items()}
