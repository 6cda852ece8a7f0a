"""The run. Start reading here.

    prompts --> rollout --> rewards --> replay.ring --> learner
                   ^                        |  ^           |
                   +------- snapshots ------+  +-----------+

``Run`` builds the stages and owns what they share; ``Run.train`` is the loop.
The stages know nothing of each other: they meet here, through ``types.py``.
With ``replay.max_staleness = 0`` the same stages run in turn in one thread, and
the run is deterministic. A run that was killed goes on where its newest
checkpoint left it.
"""

import dataclasses
import functools
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from darl_jax import config as config_lib
from darl_jax import metrics
from darl_jax import workdir as workdir_lib
from darl_jax.checkpoint import changes, run_state, sealed
from darl_jax.checkpoint.store import Checkpoints, Found
from darl_jax.config import ConfigError, PromptsConfig, RunConfig
from darl_jax.evaluate import Evaluation, Evaluator
from darl_jax.learner.step import Learner
from darl_jax.learner.warm_start import warm_start
from darl_jax.models import lora, published
from darl_jax.models.transformer import Policy
from darl_jax.prompts import dataset
from darl_jax.prompts.stop_strings import StopStrings
from darl_jax.replay import batching, selection
from darl_jax.replay.recording import (
  RecordingRing,
  ReplayedRing,
  Schedule,
  ScheduleWriter,
)
from darl_jax.replay.ring import Entry, Pool, Ring, RingClosed, Starved
from darl_jax.rescoring import proximal
from darl_jax.rescoring.rescorer import Rescorer
from darl_jax.rescoring.sampler_parity import SamplerParity
from darl_jax.rewards import shaping
from darl_jax.rewards.pool import VerifierPool
from darl_jax.rollback import Judge
from darl_jax.rollout.actor import Actor
from darl_jax.rollout.engine import Engine
from darl_jax.rollout.placement import Placement
from darl_jax.sharding import meshes
from darl_jax.summary import RewardMeter, Summary
from darl_jax.types import (
  Batch,
  Params,
  PolicySnapshot,
  TrainState,
  TrajectoryGroup,
)
from darl_jax.watch import Alarmed, Watch, dump_batch

# Seconds between looks at whether another thread has failed.
_POLL_S = 0.2
# Held-out answers written down at each evaluation, for people to read.
_NUM_SAMPLES = 8


class Interrupted(Exception):
  """The run was asked to stop, by Ctrl-C or SIGTERM."""


class _Replayed(NamedTuple):
  """What a replay does for the threads of the recorded run."""

  submit: Callable[[], None]
  advance: Callable[[], Sequence[TrajectoryGroup]]
  admit: Callable[[TrajectoryGroup], None]


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
    record: bool = False,
    replay: Schedule | None = None,
    make_engine: Callable[..., Engine] = Engine,
  ):
    """Builds every stage; starts the verifier's processes and nothing else.

    Args:
      config: Parsed and checked.
      workdir: Created if absent. A run in it that was not finished is gone on
        with, from its newest checkpoint.
      record: Write the schedule of this process to the workdir, for
        ``replay``. A synchronous run has none.
      replay: Do what was recorded, in one thread, and compare. The config is
        that of the recorded run.
      make_engine: Builds the sampler of the training rollouts.

    Raises:
      ConfigError: The devices, the checkpoint, the prompts or the workdir do
        not fit, or what is saved there does not.
    """
    self.config = config
    self.workdir = workdir
    self.progress = metrics.Progress()
    self.checkpoints = Checkpoints(
      config.checkpoint,
      epath.Path(config.checkpoint.directory or workdir / "checkpoints"),
      say=self.progress.alarm,
    )
    self._replay = replay
    self._saved = self._find_saved()
    self.meshes = meshes.split_devices(config.mesh)
    self.checkpoint = _locate_checkpoint(config)
    self.prompts = dataset.load(
      _with_tokenizer(config.prompts, self.checkpoint), seed=config.seed
    )
    self._fingerprint = dataset.fingerprint(self.prompts)
    problems = _prompt_problems(config, self.prompts)
    if self._saved and self._saved.header["meters"]["prompts"] != (
      self._fingerprint
    ):
      problems.append(
        f"prompts.dataset = {config.prompts.dataset!r} gives other prompts "
        f"than those that {self._saved.folder} is of. Try to restore its file, "
        "or another workdir."
      )
    if problems:
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
    problems = proximal.snapshot_problems(config, self.learner.param_shapes)
    if problems:
      raise ConfigError(problems)
    self._schedule: ScheduleWriter | None = None
    self.ring = self._make_ring(record)
    self.rescorer = Rescorer(self.learner, config.learner, self.ring)
    self.parity = SamplerParity(self.rescorer)
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
      fetch=self._newest_for_rollouts,
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
    self.judge: Judge | None = None
    if config.rollback.num_prompts:
      self.judge = Judge(
        self.policy,
        config,
        self.learner,
        self.prompts.train,
        exclusive=self._rollout_mesh_free,
        place=self._placement.place,
        verify=self._verify_now,
        measured=self.ring.measured,
        **engine_arguments,
      )
    self._lock = workdir_lib.claim(workdir)
    self.writer = metrics.MetricsWriter(
      workdir, last_step=self._saved.step if self._saved else -1
    )
    self.verifier = VerifierPool(
      config.rewards,
      task=dataset.verifier_task(
        config.prompts, seed=config.seed, rewards=config.rewards
      ),
      decode=tokenizer.decode,
      fail=self.ring.close,
    )
    if replay is not None:
      self.ring.producers = _Replayed(
        submit=self.actor.submit,
        advance=self.actor.replay_round,
        admit=self._admit,
      )
    self.rewards = RewardMeter()
    self.summary = Summary()
    self.watch = Watch(config.watch)
    self.state: TrainState | None = None
    self.stopping = False

  def execute(self) -> dict[str, Any]:
    """The whole run: warm start, evaluation, training, evaluation.

    However it ends, the workdir then says how far it got (``summary.json``),
    and its newest checkpoint is of the last finished step.

    Returns:
      The summary.

    Raises:
      Interrupted: The run was asked to stop, and is saved.
      RingFailed: Another thread failed; the cause says how.
      Starved: Too few trajectories passed the selection in time.
    """
    error: BaseException | None = None
    try:
      self.writer.write_json("config.json", config_lib.to_dict(self.config))
      self.prompts.tokenizer.save(self.workdir / "tokenizer.json")
      with self.progress:
        self._introduce()
        if self._saved is None:
          self._begin()
        else:
          self._resume(self._saved)
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
    self.progress.stage("train", config.num_steps, done=self._step)
    self.summary.training_started()
    if not config.synchronous and self._replay is None:
      self.actor.start()
    for version in range(self._step, config.num_steps):
      self._check()
      chosen = self._choose(self.state.params, version)
      batch, placed, batch_metrics = batching.build_batch(
        chosen.entries,
        chosen.logprobs,
        objective=config.objective,
        learner=config.learner,
        version=version,
        dead_tokens=chosen.pool.dead_tokens,
        rng=chosen.rng,
        **proximal.batch_arguments(
          self.rescorer,
          config,
          pool=chosen.pool,
          entries=chosen.entries,
          scored_logprobs=chosen.logprobs,
        ),
      )
      # If the run is ended from here to the new version, the step is either
      # done or as if it had not begun: what is saved is between two steps.
      step_metrics, judged = self._take_step(batch, version + 1)
      ages = self.summary.stepped(version + 1, placed)
      self.ring.mark_trained(placed, chosen.pool)
      self._publish(version=version + 1)
      values = self._report(
        version + 1,
        {
          **chosen.report,
          **_prefixed("batch", batch_metrics),
          **ages,
          **judged,
        },
        step_metrics,
      )
      self._observe(version + 1, batch, values)
      last = version + 1 == config.num_steps
      if last:
        self._stop_generating()
      if last or (version + 1) % config.evaluate.every == 0:
        self._evaluate(version + 1)
      if (version + 1) % config.checkpoint.every == 0:
        self.checkpoints.save(self._capture)

  def interrupt(self) -> None:
    """Ends the run where it waits next; callable from a signal handler."""
    self.stopping = True
    self.ring.close()

  def _check(self) -> None:
    """For wherever the loop waits: whether it should go on.

    Raises:
      Interrupted: The run was asked to stop.
      RingFailed: Another thread failed.
    """
    self.ring.check()
    if self.stopping:
      raise Interrupted(
        f"stopped on request; see {self.workdir}/summary.json. The same "
        f"command with --workdir={self.workdir} goes on."
      )

  @property
  def _step(self) -> int:
    """Learner steps taken."""
    return int(self.state.step)

  # -------------------------------------------------------- begin and go on

  def _make_ring(self, record: bool) -> Ring:
    config = self.config
    make = Ring
    if self._replay is not None:
      make = functools.partial(ReplayedRing, schedule=self._replay)
    elif record and not config.synchronous:
      make = functools.partial(RecordingRing, record=self._record)
    return make(
      config.replay,
      advantage=config.objective.advantage,
      reward_tolerance=config.objective.reward_tolerance,
      groups_per_version=config.rollout.prompts_per_batch,
      truncated=config.rollout.truncates,
      shaping=shaping.of_lengths(
        config.rewards,
        max_response_tokens=config.rollout.max_response_tokens,
      ),
    )

  def _record(self, event: Any) -> None:
    """The first event of a process begins its file."""
    if self._schedule is None:
      step = self._saved.step if self._saved else 0
      header = {
        "config": config_lib.to_dict(self.config),
        "step": step,
        "checkpoint": str(self._saved.folder) if self._saved else None,
      }
      path = self.workdir / f"schedule_{step:08d}.jsonl"
      self._schedule = ScheduleWriter(path, header)
    self._schedule.write(event)

  def _find_saved(self) -> Found | None:
    """The checkpoint to go on from.

    Raises:
      ConfigError: There is one, and this run cannot go on from it.
    """
    if self._replay is not None:
      if (self.workdir / "config.json").exists():
        raise ConfigError(
          [
            f"workdir = {self.workdir} already holds a run, which a replay "
            f"would overwrite. Try --workdir={self.workdir}-replayed."
          ]
        )
      return _recorded_checkpoint(self._replay)
    saved = self.checkpoints.newest()
    problems = workdir_lib.problems(
      self.workdir,
      str(self.checkpoints.folder),
      saved_step=saved.step if saved else None,
      num_steps=self.config.num_steps,
    )
    if saved is not None:
      config = config_lib.to_dict(self.config)
      fixed, notes = changes.compare(saved.header["config"], config)
      problems += fixed
      for note in notes:
        self.progress.message(f"since it was saved: {note}")
    if problems:
      raise ConfigError(problems)
    return saved

  def _begin(self) -> None:
    """Version 0: parameters, warm start, and what they are worth."""
    self.state = self.learner.init_state(
      self._warm_start(self._initial_params())
    )
    self._placement.keep(self.learner.frozen)
    self._publish(version=0)
    self._evaluate(0)
    self.checkpoints.save(self._capture)

  def _resume(self, saved: Found) -> None:
    """Takes up what a checkpoint holds."""
    start = time.monotonic()
    if self.config.model.lora_rank:
      self.learner.init_state(self._initial_params())  # The frozen ones.
    trained, _ = lora.split(self.learner.param_shapes)
    state = run_state.read(
      saved.folder, learner=self.learner.abstract_state(), snapshot=trained
    )
    self.state = state.learner
    self._placement.keep(self.learner.frozen)
    self.ring.restore(state.ring, groups_in_flight=len(state.actor.in_flight))
    prompts = {prompt.id: prompt for prompt in self.prompts.train}
    self.actor.restore(state.actor, prompts)
    self.summary.restore(state.meters["summary"])
    self.rewards.restore(state.meters["rewards"])
    self.watch.restore(state.meters["watch"])
    self.checkpoints.resumed_from(saved)
    # Generated and not verified then: their prompts are known by their ids.
    self._verify(
      [
        TrajectoryGroup(group_id, prompts[group[0].prompt_id], tuple(group))
        for group_id, group in state.ring.awaiting.items()
      ]
    )
    if self.config.synchronous:
      self._join_verifier()  # Before more is generated.
    self.progress.message(
      f"goes on after step {saved.step}, from {saved.folder} "
      f"({time.monotonic() - start:.1f} s): {self.ring.accounting()}; "
      f"{len(state.actor.in_flight)} groups are generated again"
    )

  def _capture(self) -> run_state.RunState:
    """The run between two steps, for a checkpoint."""
    with self.actor.captured() as generation:
      ring = self.ring.capture()
    return run_state.RunState(
      step=self._step,
      config=config_lib.to_dict(self.config),
      accuracy=self.summary.accuracy_at(self._step),
      # Copies: the state is donated to the next step.
      learner=jax.tree.map(np.array, self.state),
      ring=ring,
      actor=generation,
      meters={
        "summary": self.summary.state(self.verifier.metrics()),
        "rewards": self.rewards.state(),
        "prompts": self._fingerprint,
        "watch": self.watch.state(),
      },
    )

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
      self._check()

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

  def _on_rollout_mesh(self, snapshot: PolicySnapshot) -> PolicySnapshot:
    """All parameters of a snapshot, moved where it is not the last one."""
    held = self._rollout_snapshot
    if held is None or held.version != snapshot.version:
      held = self._rollout_snapshot = self._placement.place(snapshot)
    return held

  def _newest_for_rollouts(self) -> PolicySnapshot:
    if self.config.synchronous:
      self._check()  # This is the loop's thread.
    return self._on_rollout_mesh(self.ring.latest())

  def _verify_for_training(self, groups: Sequence[TrajectoryGroup]) -> None:
    """Generated groups: counted by the ring, then verified, then admitted."""
    self.ring.begin(groups)
    self._verify(groups)

  def _verify(self, groups: Sequence[TrajectoryGroup]) -> None:
    """Groups that the ring counted: verified, then admitted."""
    if self._replay is not None:
      self.ring.hold(groups)  # Their rewards are recorded.
    else:
      self.verifier.submit(groups, deliver=self._admit)

  def _admit(self, group: TrajectoryGroup) -> None:
    self.rewards.add(group)
    self.ring.admit(group)

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
        self._check()
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
      except RingClosed:
        self._check()
        raise
      finally:
        self.summary.learner_waited(time.monotonic() - start)
      choice = batching.choose(
        pool,
        functools.partial(self.learner.score, params),
        replay=replay,
        learner=config.learner,
        rng=rng,
      )
      kept, stats = choice.kept, choice.stats
      if len(kept) >= replay.min_batch:
        break
      # max_metric bars too many of this pool: wait until there are more.
      needed = len(pool) + 1
      barred = (
        f"replay.max_metric = {replay.max_metric:g} bars all but {len(kept)} "
        f"of {len(stats)} trajectories, and replay.min_batch = "
        f"{replay.min_batch} are needed; their mean {replay.metric} is "
        f"{selection.mismatch(stats, metric=replay.metric).mean():.3g}. "
        "Try a greater replay.max_metric, or a smaller learning rate."
      )
    report = selection.report(stats, kept, metric=replay.metric)
    return Chosen(
      pool=pool,
      entries=choice.entries,
      logprobs=choice.logprobs,
      rng=rng,
      report={
        **_prefixed("select", report),
        **self.parity.newest(
          choice.plan, choice.per_token, version=pool.version
        ),
        **(
          {}
          # As often as answers are evaluated: it computes much again.
          if version % config.evaluate.every
          else self.parity.mixed(pool)
        ),
      },
    )

  def _take_step(
    self, batch: Batch, version: int
  ) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """The learner's step to that version, undone where it is rejected.

    Returns:
      The learner's metrics, and the judge's.
    """
    if self.judge is None:
      self.state, step_metrics = self.learner.step(self.state, batch)
      return step_metrics, {}
    kept = self.judge.keep(self.state)
    self.state, step_metrics = self.learner.step(self.state, batch)
    try:
      verdict = self.judge.verdict(self.state.params, version=version)
    except BaseException:
      self.state = self.judge.restored(kept)
      raise
    if verdict.rejected:
      step, self.state = self.state.step, self.judge.restored(kept)
      self.state = dataclasses.replace(self.state, step=step)
      self.progress.message(f"step {version} is undone: {verdict}")
    return step_metrics, verdict.metrics()

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
      self._check()
    return pool

  def _join_verifier(self) -> None:
    """Waits until all is verified, or the run is ended."""
    deadline = time.monotonic() + self.config.replay.timeout_s
    while True:
      left = deadline - time.monotonic()
      try:
        return self.verifier.join(min(left, _POLL_S))
      except TimeoutError as error:
        self._check()
        if left <= _POLL_S:
          limit = self.config.replay.timeout_s
          raise TimeoutError(
            f"verification took longer than replay.timeout_s = {limit:g}"
          ) from error

  # ------------------------------------------------------------ what is seen

  def _evaluate(self, step: int) -> None:
    """Held-out accuracy of the newest snapshot, and some of its answers."""
    with self._rollout_mesh_free:  # Room for the snapshot, too.
      newest = self._on_rollout_mesh(self.ring.snapshot(step))
      answered = self.evaluator.answer(newest)
    evaluation = self.evaluator.judge(self._verify_now(answered))
    self.summary.evaluated(step, evaluation.accuracy)
    samples = list(self._samples(evaluation))
    self._write(step, evaluation.metrics(), samples)
    self.progress.update(evaluation.metrics())
    shown = samples[step % len(samples)]
    self.progress.message(
      f"step {step}: held-out accuracy {evaluation.accuracy:.3f}; "
      + "".join(f"pass@{k} {p:.3f}; " for k, p in evaluation.pass_at.items())
      + f"{shown['prompt']!r} -> {shown['response']!r}, and "
      f"{shown['reference']!r} is right"
    )

  def _write(
    self,
    step: int,
    values: Mapping[str, float],
    samples: Sequence[Mapping[str, Any]] = (),
  ) -> None:
    """To the files; what a full disk does not take costs no step."""
    try:
      self.writer.write(step, values)
      if samples:
        self.writer.write_samples(step, samples)
    except OSError as error:
      self.progress.alarm(f"what step {step} measured is lost: {error}")

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
  ) -> dict[str, float]:
    """One step's metrics, to the files and to the display."""
    occupancy = self.ring.occupancy()
    accounting = self.ring.accounting()
    # The optimizer knows of no step that was undone before this one.
    taken = step - self.summary.rollbacks
    updates = taken * self.config.learner.minibatches
    values = {
      **metrics.flatten(step_metrics),
      **host_metrics,
      **self.rewards.drain(),
      **self.actor.metrics(),
      **_prefixed("verify", self.verifier.metrics()),
      **_prefixed("fate", accounting.counts()),
      **self.summary.speeds(occupancy, self.actor.metrics()),
      **self._waits(),
      **self.checkpoints.metrics(),
      "train/learning_rate": float(self.learner.schedule(updates - 1)),
    }
    self.summary.judged(values)
    self._write(step, values)
    self.progress.ring(
      (slot.version, slot.age, slot.trajectories) for slot in occupancy.slots
    )
    self.progress.advance(1, **values)
    return values

  def _observe(
    self, step: int, batch: Batch, values: Mapping[str, float]
  ) -> None:
    """Says what looks wrong with a step.

    Raises:
      Alarmed: So wrong that the run must end.
    """
    if values["train/non_finite"]:
      folder = self.workdir / "non_finite"
      dumped = dump_batch(folder, step, batch, values)
      self.progress.message(f"step {step} was not finite: {dumped}")
    alarms = self.watch.observe(step, values)
    for alarm in alarms:
      if alarm.kind == "ends":
        self.progress.message(alarm.text)
      else:
        self.progress.alarm(alarm.text)
    if stops := [alarm.text for alarm in alarms if alarm.stop]:
      raise Alarmed(" ".join(stops))

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
    """Ends threads and processes, and saves the run.

    Whichever of it fails, the rest is done. A failure is the run's error if it
    had none, and a note on the one that it had.
    """
    self.summary.training_ended()
    for clean_up in (
      self.ring.close,
      self.actor.stop,
      self.verifier.close,
      self._save_at_the_end,
      lambda: self.ring.accounting().check(),
    ):
      try:
        clean_up()
      except Exception as failure:
        if error is None or isinstance(error, Interrupted):
          error = failure  # Being asked to stop was none.
        else:
          error.add_note(f"While ending the run: {failure!r}")
    return error

  def _save_at_the_end(self) -> None:
    """Unless that step is saved already, or nothing is there to save.

    A step that failed half-way is not saved: its samples would count as new.
    """
    self.checkpoints.wait()
    if (
      self.state is not None
      and self.checkpoints.saved_step != self._step
      and self.ring.is_at(self._step)
    ):
      self.checkpoints.save(self._capture, wait=True)

  def _summarize(self, error: BaseException | None) -> dict[str, Any]:
    """Writes ``summary.json``, last of all, and the learning curve."""
    self.summary.ended(error, interrupted=isinstance(error, Interrupted))
    summary = self.summary.to_dict(
      self.ring.accounting(),
      self.ring.occupancy(),
      self.actor.metrics(),
      self.verifier.metrics(),
      self._waits(),
    )
    summary["compiles"] = self.learner.compiles() | self.actor.compiles()
    try:
      self.writer.write_json("summary.json", summary)
      self.writer.close()
      metrics.save_learning_curve(self.workdir)
    except OSError as failure:
      self.progress.alarm(f"the summary could not be written: {failure}")
    self._lock.close()
    if self._schedule is not None:
      self._schedule.close()
    if self._replay is not None:
      self.progress.message(
        f"{self.ring.done} events were done again, bit for bit as recorded"
      )
    self.progress.message(
      f"{summary['status']}: {summary['steps']} steps in "
      f"{summary['seconds']:.0f} s; see {self.workdir}/summary.json and "
      f"{metrics.CURVE_FILE}"
    )
    return summary


def _recorded_checkpoint(replay: Schedule) -> Found | None:
  """Where the recorded process began; None where that was the beginning.

  Raises:
    ConfigError: It is gone.
  """
  folder = replay.header["checkpoint"]
  if folder is None:
    return None
  wrong = sealed.damage(epath.Path(folder))
  if wrong is not None:
    raise ConfigError(
      [
        f"the schedule begins at step {replay.header['step']}, from {folder}, "
        f"which cannot be read: {wrong}. Try a schedule that begins at step 0, "
        "or a greater checkpoint.keep_last."
      ],
      place="--replay",
    )
  header = run_state.read_header(epath.Path(folder))
  return Found(epath.Path(folder), replay.header["step"], header)


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
  if config.rollback.num_prompts > len(prompts.train):
    problems.append(
      f"rollback.num_prompts = {config.rollback.num_prompts}, but only "
      f"{len(prompts.train)} prompts are trained on. Try "
      f"rollback.num_prompts={len(prompts.train)}."
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
