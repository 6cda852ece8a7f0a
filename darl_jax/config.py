"""The run's configuration: parsed once, checked once, frozen.

Every default lives in ``configs/``; nothing here has one. ``parse`` turns the
``ConfigDict`` into the frozen dataclasses below and reports *every* problem at
once, before anything is allocated: unknown, missing and mistyped fields, values
out of range, and combinations that cannot work.
"""

import contextlib
import dataclasses
import difflib
import fnmatch
import json
import math
import numbers
import struct
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

# Unlike a str field, which must name something, it may be "".
Text = typing.NewType("Text", str)


class ConfigError(Exception):
  """Everything that is wrong with a config, as one message."""

  def __init__(self, problems: Sequence[str], *, place: str = "the config"):
    self.problems = tuple(problems)
    plural = "problem" if len(problems) == 1 else "problems"
    lines = [f"{len(problems)} {plural} in {place}:"]
    lines += [f"  * {problem}" for problem in problems]
    super().__init__("\n".join(lines))


@dataclasses.dataclass(frozen=True)
class PromptsConfig:
  """Where prompts come from.

  Attributes:
    dataset: Name of a reasoning-gym dataset, or the path of a JSON-lines file,
      which ends in ".jsonl".
    params: That dataset's own parameters, or for a file {"verifier", "box"}
      (see docs/rewards.md), written as JSON text in the config.
    num_items: Items drawn from the generator, or lines read of the file at
      most, before equal questions merge.
    heldout_fraction: Share of distinct questions never trained on.
    max_tokens: Longer prompts are dropped, and counted.
    instruction: The text that asks a question, with "{question}" in its place.
    tokenizer: A published model's folder or .gguf file, which ask through its
      chat template; "" takes that of model.checkpoint, and without one trains
      a tokenizer on the task's text.
    system: The template's system message; "" leaves it to the template.
    vocab_size: Upper bound for the tokenizer trained on the task's text.
  """

  dataset: str
  params: Mapping[str, Any]
  num_items: int
  heldout_fraction: float
  max_tokens: int
  instruction: str
  tokenizer: Text
  system: Text
  vocab_size: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder's shape; ``models/presets.py`` has named ones.

  Attributes:
    mlp_dim: Width of each layer's SwiGLU; unused with experts.
    rope_theta: Base of the rotary frequencies.
    rope_scaling_factor: Low rotary frequencies are divided by it (Llama 3.1);
      1 leaves all as they are, and then the next three mean nothing.
    rope_low_frequency_factor: Frequencies that turn less often than this in
      the original context are divided in full.
    rope_high_frequency_factor: Those that turn more often than this are kept;
      what lies between is interpolated.
    rope_original_context: Tokens of the context before it was stretched.
    context_tokens: Longest sequence that the model is made for; no trajectory
      may be longer.
    norm_eps: Added to the mean square in RMSNorm.
    tie_embeddings: Use the embedding as the output projection.
    qkv_bias: Biases on query, key and value projections (Qwen2).
    qk_norm: RMSNorm on each query and key head (Qwen3).
    num_experts: E, SwiGLUs of each layer among which a router chooses (Qwen3
      MoE); 0 has one, and then the next three mean nothing.
    experts_per_token: Experts chosen for a token.
    expert_mlp_dim: Width of an expert.
    normalize_expert_weights: The chosen experts' probabilities are divided by
      their sum.
    compute_dtype: Dtype of the learner's activations and matmul operands;
      its parameters, reductions, norms and log-probs are always float32.
    remat: What the backward pass computes again instead of reading it from
      memory: nothing, all of a layer but its attention, or all of a layer.
    vocab_size: V, rows of the embedding; 0 takes the tokenizer's, and a model
      may have more.
    checkpoint: Where the parameters start: a published model's folder, its id
      on the hub, or a .gguf file, whose shape this must be; "" makes fresh
      ones.
    lora_rank: Rank of the adapters (LoRA), which alone are trained and
      published then; 0 trains everything, and then the next two mean nothing.
    lora_alpha: What an adapter adds is scaled by lora_alpha / lora_rank.
    lora_targets: Kernels that get an adapter: shell patterns, separated by
      commas, of attention.query, key, value and output, feed_forward.gate, up
      and down, and with experts feed_forward.router.
  """

  num_layers: int
  embed_dim: int
  mlp_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float
  rope_scaling_factor: float
  rope_low_frequency_factor: float
  rope_high_frequency_factor: float
  rope_original_context: int
  context_tokens: int
  norm_eps: float
  tie_embeddings: bool
  qkv_bias: bool
  qk_norm: bool
  num_experts: int
  experts_per_token: int
  expert_mlp_dim: int
  normalize_expert_weights: bool
  compute_dtype: Literal["float32", "bfloat16"]
  remat: Literal["none", "attention", "layer"]
  vocab_size: int
  checkpoint: Text
  lora_rank: int
  lora_alpha: float
  lora_targets: Text

  @property
  def lora_kernels(self) -> frozenset[str]:
    """Names of the kernels that have adapters: "attention.query"."""
    if not self.lora_rank:
      return frozenset()
    return frozenset().union(*_lora_targets(self).values())

  @property
  def lora_scale(self) -> float:
    """Of what an adapter adds."""
    return self.lora_alpha / self.lora_rank


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
  """Supervised steps on reference answers before RL.

  Attributes:
    steps: Most steps; 0 skips the stage.
    target_accuracy: Stop before, once answers sampled at temperature 1 are
      right this often (running mean over batches), so that runs of different
      seeds start RL alike; 1 never stops early.
    batch_size: Question-answer pairs per step.
  """

  steps: int
  target_accuracy: float
  batch_size: int
  learning_rate: float


class Truncation:
  """Base of what has the fields top_k, top_p and min_p."""

  @property
  def truncates(self) -> bool:
    """Whether some tokens may be left out of the draw."""
    return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Truncation):
  """Sampling.

  Attributes:
    prompts_per_batch: Prompts generated together; also the fresh prompts that
      one learner step is worth when generation is paced.
    samples_per_prompt: G; a group of one has nothing to compare with.
    max_response_tokens: R, the stop token included.
    chunk_tokens: Tokens per decode dispatch, and of a page of the cache.
      Between dispatches samples enter and leave, and weights are taken up.
    slots: Samples that decode together; 0 for all of ``prompts_per_batch``.
    cache_tokens: Of the paged cache on each data slice of the mesh; 0 for all
      slots at full length. With less, samples may have to wait, or to be read
      again.
    prefill_tokens: That a prefill dispatch reads on each data slice.
    extra_samples: Begun for each prompt beyond G; the first G to end are kept
      and the others given up.
    weight_update: How running samples meet new weights: "swap" goes on with
      the keys and values that are cached, "recompute" computes them again, and
      "drain" takes the weights up when all running samples have ended.
    temperature: Of the sampled distribution, for sampler and learner alike,
      and so are the next three. Each truncates what the one before it left;
      then every token keeps its support, which the learner's log-probs are
      of, too.
    top_k: Only the k most likely tokens are drawn; 0 for all.
    top_p: Only the most likely tokens that together hold this share of the
      probability are drawn; 1 for all.
    min_p: Only tokens at least this share as probable as the most likely one
      are drawn; 0 for all.
    stop_strings: A response ends with the first token after which its text has
      one of these, as with a stop token; () for none. What that token says
      behind the string stays.
    dtype: Parameters and activations on the rollout mesh.
    cache_dtype: Of cached keys and values; "" for ``dtype``. "int8" keeps a
      float32 scale for each token and head: a quarter of float32, and sampled
      log-probs that differ by the rounding from the learner's.
  """

  prompts_per_batch: int
  samples_per_prompt: int
  max_response_tokens: int
  chunk_tokens: int
  slots: int
  cache_tokens: int
  prefill_tokens: int
  extra_samples: int
  weight_update: Literal["swap", "recompute", "drain"]
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  stop_strings: tuple[str, ...]
  dtype: Literal["float32", "bfloat16"]
  cache_dtype: Literal["", "float32", "bfloat16", "int8"]

  @property
  def num_slots(self) -> int:
    """Samples that decode together."""
    return _num_slots(self)

  @property
  def samples_begun(self) -> int:
    """Of each prompt, those to be given up included."""
    return self.samples_per_prompt + self.extra_samples

  def beside(
    self, num_prompts: int, *, samples_per_prompt: int, data: int
  ) -> "RolloutConfig":
    """For prompts that are asked beside training, in the memory that it takes.

    As many prompts at a time as training reads, and as many answers as it
    decodes, where there are several to each.

    Args:
      num_prompts: Asked at once.
      samples_per_prompt: Answers to each.
      data: Slices of the rollout mesh.
    """
    most = self.prompts_per_batch
    if samples_per_prompt > 1:
      most = min(most, max(self.num_slots // samples_per_prompt, 1))
    return dataclasses.replace(
      self,
      prompts_per_batch=-(-min(num_prompts, most) // data) * data,
      samples_per_prompt=samples_per_prompt,
      extra_samples=0,
      slots=0,
    )


@dataclasses.dataclass(frozen=True)
class RewardsConfig:
  """Verification.

  Attributes:
    workers: Verifier processes.
    time_limit_s: Seconds for one answer before its worker is killed.
    memory_limit_mb: Address space of a worker.
    partial_credit: Reward of an answer that is not right, as a multiple of
      the score that its verifier gives it. A right one (score >= 0.99) pays 1.
    overlong_penalty: What the longest answer loses of its reward before it
      becomes an advantage; 0 for none, and then the next one means nothing.
    overlong_buffer_tokens: The last of rollout.max_response_tokens, over which
      that loss grows from nothing.
    require_isolation: Refuse to start where the system cannot keep verifiers
      from the network and from all files but programs (docs/security.md).
  """

  workers: int
  time_limit_s: float
  memory_limit_mb: int
  partial_credit: float
  overlong_penalty: float
  overlong_buffer_tokens: int
  require_isolation: bool


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
  """The ring and the selection from it (method 1, 2.1, 2.2).

  Attributes:
    num_snapshots: K, slots of the ring.
    max_staleness: Greatest age, in versions, of a trajectory trained on. 0 is
      the synchronous, deterministic algorithm.
    max_uses: Times that a trajectory may be trained on.
    drop_overlong: Leave answers that were cut at the length limit out of
      training; their rewards count in their group all the same.
    metric: Mismatch metric, lower is better matched.
    selection_mode: How a step's batch is drawn from the pool: keep_best,
      reject_worst, or a control that takes as many as reject_worst would.
    keep_fraction: Share of the pool that keep_best keeps.
    reject_fraction: Worst share of the pool that reject_worst drops.
    max_metric: Hard bound on the metric in either of these; inf for none.
    max_candidates: Most trajectories of the ring that are scored for a step,
      drawn anew each time (the youngest under ``newest``); 0 for all.
    min_batch: Fewest selected trajectories to train on.
    snapshot_bytes: Budget of host memory for snapshots' parameters.
    trajectory_bytes: Budget of host memory for trajectories.
    timeout_s: Longest wait for min_batch before the run fails, diagnosed.
  """

  num_snapshots: int
  max_staleness: int
  max_uses: int
  drop_overlong: bool
  metric: Literal[
    "variance",
    "second_moment",
    "harmful",
    "entropy_scaled",
    "length_corrected",
  ]
  selection_mode: Literal["keep_best", "reject_worst", "random", "newest"]
  keep_fraction: float
  reject_fraction: float
  max_metric: float
  max_candidates: int
  min_batch: int
  snapshot_bytes: int
  trajectory_bytes: int
  timeout_s: float


_BALANCE = ("balance", "balance_length_normalized")


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """The multi-behavior objective (method 2.3), its family and advantages (3).

  Attributes:
    loss: The policy loss: the clipped one of tokens; the same where ``m2po`` or
      ``estr`` masks tokens first; or one of its own, ``gspo``, ``cispo``,
      ``topr``.
    advantage: How rewards of a group become advantages.
    reward_tolerance: A group whose rewards span no more has advantage 0.
    behavior_weighting: How the weight of each behavior policy is set. Under
      ``balance`` each trajectory has one, in the place of prox/mu and within
      its cap: prox over the mixture of the ring's snapshots, which costs a
      scoring pass under each; ``balance_length_normalized`` takes the mean
      log-probs of tokens, which biases it.
    weight_cap: Greatest weight of a version relative to pooled weighting.
    kappa: Strength of moment and inverse_variance weighting.
    trust_region: Centre of the clip: the behavior policy, or a proximal policy
      with the behavior ratio as a detached weight.
    proximal: The proximal policy of the decoupled trust region: the policy at
      the start of the step; the ring's snapshot that sampled the token, scored
      by the learner; log-linear between that and the current one; or ``ewma``,
      an average of the policies so far, kept and scored by the learner.
    proximal_lag: Versions that the log-linear one is behind the current one.
    ewma_window: W, versions: the average weighs each policy by b = W / (W + 2)
      of its successor, which makes it W / 2 versions old; 0 is the policy at
      the start of the step.
    ewma_min_passed_fraction: The average starts anew after a step of which a
      smaller share of the tokens passes the mask of prox/mu and the clip; 0
      never does.
    clip_low: The ratio is clipped below at 1 - clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    gspo_clip_low: As clip_low, of the ratio of a trajectory under ``gspo``.
    gspo_clip_high: As clip_high, likewise.
    m2po_max_second_moment: Under ``m2po`` the mean of the squared log-ratio,
      nats^2, over the tokens that the update would push further away.
    estr_threshold: Under ``estr`` the greatest squared log-ratio of a token, in
      units of the sampler's entropy there plus estr_epsilon; nats.
    estr_epsilon: Nats.
    clip_age_decay: Both clip distances shrink by this factor per version of
      age.
    step_ess_target: An optimizer step is scaled by sqrt(min(1, s / target)), s
      being the effective sample size of its trajectories' ratios as a share of
      their number (VCPO); 0 for no scaling.
    dual_clip: For negative advantages the term is at least this times A.
    denominator: Tokens that the loss is divided by: all drawn ones, dead
      groups' included, or live ones only.
    max_behavior_weight: Cap of prox/mu in the decoupled trust region.
    behavior_weight_mode: Above that cap the weight is truncated to it, or the
      token masked; ``band`` masks those below the cap's inverse, too.
    kl_coefficient: Weight in the loss of an estimate of a KL divergence, nats;
      0 for none.
    kl_target: From where: KL(mu || pi) to the policy mu that sampled the token,
      or KL(pi || ref) to the one that the run began with, which the learner
      then keeps.
    kl_estimator: Which estimate: k1, k2 or k3.
    max_versions: E, entries of a batch's version table.
  """

  loss: Literal["clipped", "gspo", "cispo", "topr", "m2po", "estr"]
  advantage: Literal["group", "group_centered", "rloo"]
  reward_tolerance: float
  behavior_weighting: Literal[
    "pooled",
    "ess_token",
    "moment",
    "inverse_variance",
    "balance",
    "balance_length_normalized",
  ]
  weight_cap: float
  kappa: float
  trust_region: Literal["behavior", "decoupled"]
  proximal: Literal["recompute", "snapshot", "loglinear", "ewma"]
  proximal_lag: int
  ewma_window: int
  ewma_min_passed_fraction: float
  clip_low: float
  clip_high: float
  clip_age_decay: float
  gspo_clip_low: float
  gspo_clip_high: float
  m2po_max_second_moment: float
  estr_threshold: float
  estr_epsilon: float
  step_ess_target: float
  dual_clip: float
  denominator: Literal["all", "live"]
  max_behavior_weight: float
  behavior_weight_mode: Literal["truncate", "mask", "band"]
  kl_coefficient: float
  kl_target: Literal["behavior", "reference"]
  kl_estimator: Literal["k1", "k2", "k3"]
  max_versions: int

  @property
  def averages_policies(self) -> bool:
    """Whether the proximal policy is an average that the learner keeps."""
    return self.proximal == "ewma"

  @property
  def keeps_reference(self) -> bool:
    """Whether the learner keeps the policy that the run began with."""
    return self.kl_target == "reference"

  @property
  def balances(self) -> bool:
    """Whether trajectories are weighed, by the balance heuristic."""
    return self.behavior_weighting in _BALANCE


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
  """Optimisation.

  Attributes:
    schedule: Shape of the learning rate after warm-up.
    warmup_steps: Optimizer steps of linear warm-up; the first is at
      learning_rate / warmup_steps.
    final_learning_rate: At the run's last optimizer step; equal to
      learning_rate under the constant schedule.
    batch_size: Most trajectories per learner step.
    minibatches: M, optimizer steps per learner step.
    microbatches: Parts of a minibatch whose gradients are accumulated.
    rows: Packed rows per learner step, over all its minibatches.
    row_tokens: T, tokens of a packed row.
    score_rows: Packed rows per dispatch of the scoring pass.
  """

  learning_rate: float
  schedule: Literal["constant", "linear", "cosine"]
  warmup_steps: int
  final_learning_rate: float
  b1: float
  b2: float
  eps: float
  weight_decay: float
  max_grad_norm: float
  batch_size: int
  minibatches: int
  microbatches: int
  rows: int
  row_tokens: int
  score_rows: int


@dataclasses.dataclass(frozen=True)
class TrainMeshConfig:
  """Devices of the learner along each axis."""

  data: int
  fsdp: int
  tensor: int

  @property
  def size(self) -> int:
    return self.data * self.fsdp * self.tensor


@dataclasses.dataclass(frozen=True)
class RolloutMeshConfig:
  """Devices of the sampler along each axis."""

  data: int
  tensor: int

  @property
  def size(self) -> int:
    return self.data * self.tensor


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  train: TrainMeshConfig
  rollout: RolloutMeshConfig


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
  """Accuracy on held-out prompts.

  Attributes:
    every: Learner steps between evaluations; there is always one before the
      first step and one after the last.
    num_prompts: Held-out prompts asked each time.
    temperature: Of the answers, which are truncated as the rollout's are; 0
      is greedy.
    samples_per_prompt: k, answers to each of them: accuracy is then their mean
      (avg@k), and pass@k is reported beside it.
  """

  every: int
  num_prompts: int
  temperature: float
  samples_per_prompt: int


@dataclasses.dataclass(frozen=True)
class RollbackConfig:
  """Steps that are undone where they made the sampler worse (MIPU).

  Attributes:
    num_prompts: Prompts asked of each new policy, with
      rollout.samples_per_prompt answers to each, which are not trained on; 0
      judges no step, and then the next ones mean nothing.
    tolerance: c of the first step, in units of advantage: a step is undone
      where T_post, what the sampler earns more than the learner, is below -c.
    final_tolerance: c of the last step; linear between.
    max_ratio: Cap of pi/mu of an answer in T_post.
  """

  num_prompts: int
  tolerance: float
  final_tolerance: float
  max_ratio: float


# What ``watch.py`` looks for, by the names that watch.stop_on takes.
ALARMS = (
  "non_finite",
  "empty_minibatch",
  "ess_collapse",
  "parity_drift",
  "length_bias",
  "advantage_bias",
  "entropy_collapse",
  "entropy_drop",
  "reward_zero",
  "reward_one",
  "samples_lost",
  "gradient_spike",
)


@dataclasses.dataclass(frozen=True)
class WatchConfig:
  """When a run's own metrics say that something is wrong.

  Attributes:
    window: Steps over which rewards and the fates of samples are averaged, of
      which a gradient norm is compared with the median, and the first steps,
      whose entropy is remembered.
    patience: Steps in a row beyond a bound before its alarm speaks, and within
      it before it is over. At once speak gradients and averages of a window.
    repeat_every: Steps after which an alarm that lasts speaks again.
    stop_on: Alarms that end the run: names in ``ALARMS``; () for none.
    stop_after: Steps in a row beyond its bound after which one of these does.
    min_ess_fraction: Least effective sample size, as a share of the tokens; 0
      for no bound.
    max_parity_p95: Greatest 95th percentile of |log-prob difference| between
      sampler and learner, nats; like every bound from here on, inf for none.
    max_length_ratio: Greatest factor between the mean lengths of kept and pool.
    max_advantage_bias: Greatest difference between the mean advantages of kept
      and pool, in standard errors of a uniform draw.
    min_entropy: Least mean entropy of a sampled token, nats; 0 for no bound.
    min_entropy_fraction: Least entropy as a share of that of the first steps;
      0 for no bound.
    reward_margin: A mean reward this near to 0 or 1 has nothing to teach.
    max_lost_fraction: Greatest share of the samples that are generated and then
      expire or are dropped untrained.
    max_grad_norm_ratio: Greatest gradient norm, as a multiple of the median.
  """

  window: int
  patience: int
  repeat_every: int
  stop_on: tuple[str, ...]
  stop_after: int
  min_ess_fraction: float
  max_parity_p95: float
  max_length_ratio: float
  max_advantage_bias: float
  min_entropy: float
  min_entropy_fraction: float
  reward_margin: float
  max_lost_fraction: float
  max_grad_norm_ratio: float


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What a run that is killed goes on from.

  Attributes:
    directory: Of this run's checkpoints: a folder, or a bucket's path; "" for
      ``checkpoints`` in the workdir.
    every: Learner steps between them; there is always one before the first
      step, and one where the run ends or is asked to stop.
    keep_last: The newest are kept, so many.
    keep_best: And so many of those with the best held-out accuracy, among the
      steps that were both saved and evaluated.
  """

  directory: Text
  every: int
  keep_last: int
  keep_best: int


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """A whole run.

  Attributes:
    seed: Of everything that is drawn.
    num_steps: Learner steps, each of which publishes one version.
  """

  seed: int
  num_steps: int
  prompts: PromptsConfig
  model: ModelConfig
  warm_start: WarmStartConfig
  rollout: RolloutConfig
  rewards: RewardsConfig
  replay: ReplayConfig
  objective: ObjectiveConfig
  learner: LearnerConfig
  rollback: RollbackConfig
  mesh: MeshConfig
  evaluate: EvaluateConfig
  watch: WatchConfig
  checkpoint: CheckpointConfig

  @property
  def synchronous(self) -> bool:
    return self.replay.max_staleness == 0


def parse(
  config: Mapping[str, Any],
  *,
  extra_checks: Sequence[Callable[[Any], list[str]]] = (),
) -> RunConfig:
  """Turns a nested mapping (a ``ConfigDict``) into a checked ``RunConfig``.

  Args:
    config: Every field of ``RunConfig``.
    extra_checks: Checks that need what this module may not import, such as
      the names of the datasets; each takes the fields and returns problems.

  Raises:
    ConfigError: Listing every problem. A cross-field check is left out only
      where a field that it reads is itself a problem.
  """
  problems: list[str] = []
  fields = _parse_fields(RunConfig, config, "", problems)
  for check in (*_CROSS_FIELD_CHECKS, *extra_checks):
    # A field that did not parse is reported already.
    with contextlib.suppress(_UnknownFieldError):
      problems.extend(check(fields))
  if problems:
    raise ConfigError(problems)
  return _construct(RunConfig, fields)


def to_dict(config: RunConfig) -> dict[str, Any]:
  """The config as plain JSON data, in the form that ``parse`` takes.

  JSON has no infinity: an infinite value is written as the text "inf".
  """
  values = _finite(dataclasses.asdict(config))
  values["prompts"]["params"] = json.dumps(config.prompts.params)
  return values


def _finite(values: Any) -> Any:
  """``values`` with text in place of infinities, at any depth."""
  if isinstance(values, dict):
    return {name: _finite(value) for name, value in values.items()}
  infinite = isinstance(values, float) and math.isinf(values)
  return str(values) if infinite else values


class _UnknownFieldError(Exception):
  """A check read a field that did not parse."""


class _Fields:
  """The fields that parsed; reading another raises ``_UnknownFieldError``."""

  def __getattr__(self, name):
    raise _UnknownFieldError(name)


def _construct(cls: type, fields: Any) -> Any:
  if not dataclasses.is_dataclass(cls):
    return fields
  hints = typing.get_type_hints(cls)
  return cls(
    **{
      field.name: _construct(hints[field.name], getattr(fields, field.name))
      for field in dataclasses.fields(cls)
    }
  )


def _parse_fields(
  cls: type, config: Mapping[str, Any], path: str, problems: list[str]
) -> _Fields:
  """Parses each field of ``cls`` by its type and range."""
  hints = typing.get_type_hints(cls)
  unknown = [name for name in config if name not in hints]
  for name in sorted(n if isinstance(n, str) else _shown(n) for n in unknown):
    near = difflib.get_close_matches(name, hints, n=1, cutoff=0.0)
    problems.append(f"{path}{_cut(name)} is not a field. Try {path}{near[0]}.")
  result = _Fields()
  for name, hint in hints.items():
    where = path + name
    if name not in config:
      problems.append(
        f"{where} is missing. Set it, or start from configs/darl.py."
      )
      continue
    value = config[name]
    if dataclasses.is_dataclass(hint):
      if isinstance(value, Mapping) or hasattr(value, "items"):
        parsed = _parse_fields(hint, value, where + ".", problems)
        setattr(result, name, parsed)
      else:
        problems.append(
          f"{where} = {_shown(value)} is not a group of fields. Try "
          f"{where}.{dataclasses.fields(hint)[0].name}=..."
        )
      continue
    try:
      parsed = _parse_value(hint, value)
      _check_range(_RANGES.get(where), parsed)
    except ValueError as error:
      problems.append(f"{where} = {_shown(value)} {error}")
    else:
      setattr(result, name, parsed)
  return result


def _shown(value: Any) -> str:
  """``value`` as a person would recognise it."""
  try:
    return _cut(repr(value))
  except Exception:  # Of whatever kind; Python writes no 5000 digits, either.
    if isinstance(value, int):
      return f"a number of {value.bit_length()} bits"
    return f"a value of type {type(value).__name__}"


def _cut(text: str) -> str:
  return text if len(text) <= 100 else text[:97] + "..."


def _parse_value(hint: Any, value: Any) -> Any:
  """``value`` as the type ``hint``, or a ValueError saying why not."""
  if typing.get_origin(hint) is Literal:
    options = typing.get_args(hint)
    # Else it may be an array, which is equal to nothing in a yes-or-no way.
    if not isinstance(value, str) or value not in options:
      near = difflib.get_close_matches(_shown(value), options, n=1, cutoff=0.0)
      listed = ", ".join(option or "''" for option in options)
      raise ValueError(f"is not one of {listed}. Try {near[0]!r}.")
    return value
  if hint is bool:
    if not isinstance(value, bool):
      raise ValueError("is not true or false. Try True.")
    return value
  if hint is int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
      finite = isinstance(value, float) and math.isfinite(value)
      near = round(value) if finite else 1
      raise ValueError(f"is not a whole number. Try {near}.")
    return int(value)
  if hint is float:
    if isinstance(value, str) and value in ("inf", "-inf"):
      return float(value)  # As to_dict writes them.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
      raise ValueError("is not a number. Try 1.0.")
    try:
      number = float(value)
    except OverflowError:
      raise ValueError("is too large a number. Try 1.0.") from None
    if math.isnan(number):
      raise ValueError("is not a number. Try 1.0.")
    return number
  if hint is Text:
    if not isinstance(value, str):
      raise ValueError("is not text. Try ''.")
    return _encodable(value)
  if hint is str:
    if not isinstance(value, str) or not value:
      raise ValueError("is not a name. Try 'chain_sum'.")
    return _encodable(value)
  if typing.get_origin(hint) is tuple:
    return _parse_texts(value)
  # A dataset's own parameters: a JSON object as text.
  try:
    parsed = json.loads(value) if isinstance(value, str) else None
    json.dumps(parsed, allow_nan=False)  # loads takes NaN and 1e999.
  except (TypeError, ValueError, RecursionError):
    parsed = None
  if not isinstance(parsed, dict):
    raise ValueError(
      """is not a JSON object as text. Try '{"min_terms": 3}'."""
    )
  return parsed


def _encodable(text: str) -> str:
  if problem := text_problem(text):
    raise ValueError(problem)
  return text


def text_problem(text: str) -> str:
  """Why a text cannot be encoded, to go behind the text; "" if it can."""
  if not _has_surrogate(text):
    return ""
  without = text.encode("utf-8", "replace").decode("utf-8")
  return (
    "has half of a surrogate pair, which is no character. Try "
    f"{_shown(without)}."
  )


def _has_surrogate(text: str) -> bool:
  return any("\ud800" <= character <= "\udfff" for character in text)


def _parse_texts(value: Any) -> tuple[str, ...]:
  if isinstance(value, str):
    raise ValueError(
      f"is one text, whose letters would be the texts. Try ({_shown(value)},)."
    )
  if not isinstance(value, (list, tuple)):
    raise ValueError("is not a tuple of texts. Try ().")
  texts = tuple(text for text in value if isinstance(text, str))
  if len(texts) != len(value):
    raise ValueError(f"is not a tuple of texts. Try {_shown(texts)}.")
  return texts


@dataclasses.dataclass(frozen=True)
class _Range:
  """Values from ``low`` to ``high``; an open end is excluded."""

  low: float
  high: float = math.inf
  open_low: bool = False
  open_high: bool = False
  infinite: bool = False  # Whether inf itself is a value.
  zero: bool = False  # Whether 0 is one below ``low``.

  def __contains__(self, value: float) -> bool:
    if value == math.inf and not self.infinite:
      return False
    if value == 0 and self.zero:
      return True
    above = value > self.low if self.open_low else value >= self.low
    below = value < self.high if self.open_high else value <= self.high
    return above and below

  def __str__(self) -> str:
    if math.isinf(self.high):
      start = f"above {self.low}" if self.open_low else f"at least {self.low}"
      return start if self.infinite else f"{start} and finite"
    left = "(" if self.open_low else "["
    right = ")" if self.open_high else "]"
    span = f"in {left}{_brief(self.low)}, {_brief(self.high)}{right}"
    return f"0 or {span}" if self.zero else span

  def nearest(self, value: float) -> float:
    """A value inside, as near to ``value`` as a person would pick."""
    below = value <= self.low
    end = self.low if below else self.high
    if math.isinf(end):
      # An infinity that is not a value: some ordinary value instead.
      return type(value)(max(self.low, 0) + 1)
    if not (self.open_low if below else self.open_high):
      return end
    span = self.high - self.low if math.isfinite(self.high) else 1.0
    inside = 1 if isinstance(value, int) else span / 10
    return end + inside if below else end - inside


def _brief(number: float) -> str:
  return f"{number:g}" if isinstance(number, float) else str(number)


def _check_range(limits: _Range | None, value: Any) -> None:
  """Raises ValueError for what is outside, or is so as float32."""
  if limits is None:
    return
  used, said = value, ""
  if isinstance(value, float) and value in limits:
    used = _as_float32(value)
    said = f"is {used:g} as float32"
  if used not in limits:
    near = limits.nearest(used)
    raise ValueError(
      f"{said and said + ', and '}must be {limits}. Try {_brief(near)}."
    )
  if (used == 0) != (value == 0) or math.isinf(used) != math.isinf(value):
    raise ValueError(f"{said}. Try {used:g}.")


def _as_float32(value: float) -> float:
  """As a device computes with it: rounded, and without subnormal numbers."""
  if math.isinf(value):
    return value
  if abs(value) < _FLOAT32_TINY:
    return 0.0
  if abs(value) > _FLOAT32_MAX:
    return math.copysign(math.inf, value)
  return struct.unpack("f", struct.pack("f", value))[0]


_FLOAT32_TINY = 2.0**-126
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127

# Integers are bounded, too, far above what anybody needs: a size by what a host
# can hold, and what is counted or drawn by an int32.
_INT32 = 2**31 - 1
_TOKENS = 2**23
_MANY = 2**20
_ITEMS = 2**24

_POSITIVE = _Range(0, open_low=True)
_AT_LEAST_0 = _Range(0)
_AT_LEAST_1 = _Range(1)
_FRACTION = _Range(0, 1, open_low=True)
# Logits divided by less leave float32.
_TEMPERATURE = _Range(1e-6, 1e6)

# Samples that decode together, at most.
_MOST_SLOTS = 2**16
# Pages of the cache on a data slice, and entries of all slots' page tables.
_MOST_PAGES = 2**24
_MOST_ENTRIES = 2**28
# Tokens of a batch, padding included.
_MOST_BATCH_TOKENS = 2**28

_RANGES = {
  "seed": _Range(0, _INT32),
  "num_steps": _Range(0, _INT32),
  "prompts.num_items": _Range(2, _ITEMS),
  "prompts.heldout_fraction": _Range(0, 1, open_low=True, open_high=True),
  "prompts.max_tokens": _Range(1, _TOKENS),
  "prompts.vocab_size": _Range(260, _MANY),
  "model.num_layers": _Range(1, 2**12),
  "model.embed_dim": _Range(1, _MANY),
  "model.mlp_dim": _Range(1, _MANY),
  "model.num_heads": _Range(1, 2**14),
  "model.num_kv_heads": _Range(1, 2**14),
  "model.head_dim": _Range(2, 2**14),
  "model.rope_theta": _POSITIVE,
  "model.rope_scaling_factor": _AT_LEAST_1,
  "model.rope_low_frequency_factor": _POSITIVE,
  "model.rope_high_frequency_factor": _POSITIVE,
  "model.rope_original_context": _Range(1, _INT32),
  "model.context_tokens": _Range(2, _INT32),
  "model.norm_eps": _POSITIVE,
  "model.num_experts": _Range(0, 2**14),
  "model.experts_per_token": _Range(0, 2**14),
  "model.expert_mlp_dim": _Range(0, _MANY),
  "model.vocab_size": _Range(0, _INT32),
  "model.lora_rank": _Range(0, 2**14),
  "model.lora_alpha": _POSITIVE,
  "warm_start.steps": _Range(0, _INT32),
  "warm_start.target_accuracy": _FRACTION,
  "warm_start.batch_size": _Range(1, _MANY),
  "warm_start.learning_rate": _FRACTION,
  "rollout.prompts_per_batch": _Range(1, _MOST_SLOTS),
  "rollout.samples_per_prompt": _Range(2, _MOST_SLOTS),
  "rollout.max_response_tokens": _Range(1, _TOKENS),
  "rollout.chunk_tokens": _Range(1, 2**16),
  "rollout.slots": _Range(0, _MOST_SLOTS),
  "rollout.cache_tokens": _Range(0, 2**40),
  "rollout.prefill_tokens": _Range(1, _ITEMS),
  "rollout.extra_samples": _Range(0, _MOST_SLOTS),
  "rollout.temperature": _TEMPERATURE,
  "rollout.top_k": _Range(0, _INT32),
  "rollout.top_p": _FRACTION,
  "rollout.min_p": _Range(0, 1, open_high=True),
  "rewards.workers": _Range(1, 2**12),
  "rewards.time_limit_s": _Range(0, 86_400, open_low=True),
  "rewards.memory_limit_mb": _Range(512, 2**30),
  "rewards.partial_credit": _Range(0, 1),
  "rewards.overlong_penalty": _Range(0, 1e6),
  "rewards.overlong_buffer_tokens": _Range(0, _TOKENS),
  "replay.num_snapshots": _Range(1, 2**16),
  "replay.max_staleness": _Range(0, _INT32),
  "replay.max_uses": _Range(1, _INT32),
  "replay.keep_fraction": _FRACTION,
  "replay.reject_fraction": _Range(0, 1, open_high=True),
  "replay.max_metric": _Range(-math.inf, open_low=True, infinite=True),
  "replay.max_candidates": _Range(0, _MANY),
  "replay.min_batch": _Range(1, _MANY),
  "replay.snapshot_bytes": _Range(1, 2**60),
  "replay.trajectory_bytes": _Range(1, 2**60),
  # The longest that threads can wait is some centuries.
  "replay.timeout_s": _Range(0, 10**9, open_low=True),
  "objective.reward_tolerance": _Range(0, 1, open_high=True),
  "objective.weight_cap": _Range(1, infinite=True),
  "objective.kappa": _AT_LEAST_0,
  "objective.proximal_lag": _Range(0, _INT32),
  "objective.ewma_window": _Range(0, _ITEMS),
  "objective.ewma_min_passed_fraction": _Range(0, 1),
  "objective.clip_low": _FRACTION,
  "objective.clip_high": _Range(0, open_low=True, infinite=True),
  "objective.clip_age_decay": _FRACTION,
  "objective.gspo_clip_low": _FRACTION,
  "objective.gspo_clip_high": _Range(0, open_low=True, infinite=True),
  "objective.m2po_max_second_moment": _Range(0, infinite=True),
  "objective.estr_threshold": _Range(0, open_low=True, infinite=True),
  "objective.estr_epsilon": _POSITIVE,
  "objective.step_ess_target": _Range(0, 1),
  "objective.dual_clip": _Range(1, open_low=True, infinite=True),
  "objective.max_behavior_weight": _Range(1, infinite=True),
  "objective.kl_coefficient": _AT_LEAST_0,
  "objective.max_versions": _Range(1, 2**16),
  "learner.learning_rate": _Range(0, 1),
  "learner.warmup_steps": _Range(0, _INT32),
  "learner.final_learning_rate": _Range(0, 1),
  "learner.b1": _Range(0, 1, open_high=True),
  "learner.b2": _Range(0, 1, open_high=True),
  "learner.eps": _POSITIVE,
  "learner.weight_decay": _AT_LEAST_0,
  "learner.max_grad_norm": _Range(0, open_low=True, infinite=True),
  "learner.batch_size": _Range(1, _MANY),
  "learner.minibatches": _Range(1, _MANY),
  "learner.microbatches": _Range(1, _MANY),
  "learner.rows": _Range(1, _ITEMS),
  "learner.row_tokens": _Range(2, _ITEMS),
  "learner.score_rows": _Range(1, _ITEMS),
  "rollback.num_prompts": _Range(0, _MOST_SLOTS),
  "rollback.tolerance": _AT_LEAST_0,
  "rollback.final_tolerance": _AT_LEAST_0,
  "rollback.max_ratio": _Range(1, infinite=True),
  "mesh.train.data": _Range(1, _MANY),
  "mesh.train.fsdp": _Range(1, _MANY),
  "mesh.train.tensor": _Range(1, _MANY),
  "mesh.rollout.data": _Range(1, _MANY),
  "mesh.rollout.tensor": _Range(1, _MANY),
  "evaluate.every": _Range(1, _INT32),
  "evaluate.num_prompts": _Range(1, _ITEMS),
  "evaluate.temperature": dataclasses.replace(_TEMPERATURE, zero=True),
  "evaluate.samples_per_prompt": _Range(1, _MOST_SLOTS),
  "watch.window": _Range(1, _MANY),
  "watch.patience": _Range(1, _INT32),
  "watch.repeat_every": _Range(1, _INT32),
  "watch.stop_after": _Range(1, _INT32),
  "watch.min_ess_fraction": _Range(0, 1),
  "watch.max_parity_p95": _Range(0, open_low=True, infinite=True),
  "watch.max_length_ratio": _Range(1, infinite=True),
  "watch.max_advantage_bias": _Range(0, open_low=True, infinite=True),
  "watch.min_entropy": _AT_LEAST_0,
  "watch.min_entropy_fraction": _Range(0, 1, open_high=True),
  "watch.reward_margin": _Range(0, 0.5, open_high=True),
  "watch.max_lost_fraction": _Range(0, open_low=True, infinite=True),
  "watch.max_grad_norm_ratio": _Range(1, open_low=True, infinite=True),
  "checkpoint.every": _Range(1, _INT32),
  "checkpoint.keep_last": _Range(1, _INT32),
  "checkpoint.keep_best": _Range(0, _INT32),
}


def value_problems(
  name: str, value: Any, *, field: str, least: int | None = None
) -> list[str]:
  """What is wrong with a value that means the same as a field of the config.

  Args:
    name: As the caller calls it.
    value: Of any type.
    field: The config's, "rollout.top_p".
    least: Instead of the field's own least value.
  """
  hint: Any = RunConfig
  for part in field.split("."):
    hint = typing.get_type_hints(hint)[part]
  limits = _RANGES.get(field)
  if least is not None:
    limits = dataclasses.replace(limits, low=least)
  try:
    _check_range(limits, _parse_value(hint, value))
  except ValueError as error:
    return [f"{name} = {_shown(value)} {error}"]
  return []


def rollout_problems(rollout: RolloutConfig) -> list[str]:
  """What is wrong with the fields of a config that was not parsed.

  It may have one sample for each prompt, and temperature 0.
  """
  problems = []
  for each in dataclasses.fields(RolloutConfig):
    name, value = f"rollout.{each.name}", getattr(rollout, each.name)
    if each.name == "temperature":
      problems += value_problems(name, value, field="evaluate.temperature")
    else:
      least = 1 if each.name == "samples_per_prompt" else None
      problems += value_problems(name, value, field=name, least=least)
  return problems


def _split_problems(
  name: str, value: int, *, over: str, parts: int
) -> list[str]:
  """What is wrong where ``value`` things are not a multiple of ``parts``."""
  if value % parts == 0:
    return []
  below, above = value // parts * parts, -(-value // parts) * parts
  return [
    f"{name} = {value} do not split over {over} = {parts}. "
    + (f"Nearest that do: {below}, {above}." if below else f"Try {above}.")
  ]


def _check_prompts(c: Any) -> list[str]:
  problems = []
  if "{question}" not in c.prompts.instruction:
    problems.append(
      f"prompts.instruction = {_shown(c.prompts.instruction)} does not ask the "
      "question. Try prompts.instruction='{question}'."
    )
  if c.prompts.system and not (c.prompts.tokenizer or c.model.checkpoint):
    problems.append(
      f"prompts.system = {_shown(c.prompts.system)} has no place without a "
      "chat template. Try prompts.system='', or a published model's folder as "
      "prompts.tokenizer or model.checkpoint."
    )
  return problems


def _check_candidates(c: Any) -> list[str]:
  replay = c.replay
  share = 1 - replay.reject_fraction
  if replay.selection_mode == "keep_best":
    share = replay.keep_fraction
  least = math.ceil(replay.min_batch / share - 1e-9)
  if replay.max_candidates == 0 or replay.max_candidates >= least:
    return []
  return [
    f"replay.max_candidates = {replay.max_candidates} leaves fewer than "
    f"replay.min_batch = {replay.min_batch} to train on, so no step could "
    f"start. Try replay.max_candidates={least}, or 0 to score all."
  ]


def _check_batch(c: Any) -> list[str]:
  problems = []
  if c.replay.min_batch > c.learner.batch_size:
    problems.append(
      f"replay.min_batch = {c.replay.min_batch} is more than "
      f"learner.batch_size = {c.learner.batch_size}, so no step could start. "
      f"Try replay.min_batch={c.learner.batch_size}."
    )
  return problems


def _check_rows(c: Any) -> list[str]:
  return _split_problems(
    "learner.rows",
    c.learner.rows,
    over="minibatches * microbatches * mesh.train.data * mesh.train.fsdp",
    parts=_row_unit(c),
  )


def _row_unit(c: Any) -> int:
  """What learner.rows must be a multiple of."""
  parts = c.learner.minibatches * c.learner.microbatches
  return parts * c.mesh.train.data * c.mesh.train.fsdp


def _check_score_rows(c: Any) -> list[str]:
  return _split_problems(
    "learner.score_rows",
    c.learner.score_rows,
    over="mesh.train.data * mesh.train.fsdp",
    parts=c.mesh.train.data * c.mesh.train.fsdp,
  )


def _check_warm_start_batch(c: Any) -> list[str]:
  return _split_problems(
    "warm_start.batch_size",
    c.warm_start.batch_size,
    over="mesh.train.data * mesh.train.fsdp",
    parts=c.mesh.train.data * c.mesh.train.fsdp,
  )


def _check_row_tokens(c: Any) -> list[str]:
  longest = c.prompts.max_tokens + c.rollout.max_response_tokens
  if c.learner.row_tokens >= longest:
    return []
  return [
    f"learner.row_tokens = {c.learner.row_tokens} cannot hold the longest "
    f"trajectory: prompts.max_tokens + rollout.max_response_tokens = {longest}."
    f" Try learner.row_tokens={longest}."
  ]


def _check_row_capacity(c: Any) -> list[str]:
  longest = c.prompts.max_tokens + c.rollout.max_response_tokens
  per_row = c.learner.row_tokens // longest
  room = c.learner.rows * per_row
  # Rows that hold none at all are reported already.
  if room >= c.replay.min_batch or not per_row:
    return []
  unit = _row_unit(c)
  rows = -(-c.replay.min_batch // (per_row * unit)) * unit
  return [
    f"learner.rows = {c.learner.rows} of learner.row_tokens = "
    f"{c.learner.row_tokens} hold {room} of the longest trajectories "
    f"(prompts.max_tokens + rollout.max_response_tokens = {longest}), fewer "
    f"than replay.min_batch = {c.replay.min_batch}. Try learner.rows={rows}, "
    f"or replay.min_batch={room}."
  ]


def _check_batch_tokens(c: Any) -> list[str]:
  longest = c.prompts.max_tokens + c.rollout.max_response_tokens
  width = "prompts.max_tokens + rollout.max_response_tokens"
  problems = []
  for name, rows, unit, over, tokens in (
    (
      "learner.rows",
      c.learner.rows,
      _row_unit(c),
      "learner.row_tokens",
      c.learner.row_tokens,
    ),
    (
      "learner.score_rows",
      c.learner.score_rows,
      c.mesh.train.data * c.mesh.train.fsdp,
      "learner.row_tokens",
      c.learner.row_tokens,
    ),
    (
      "warm_start.batch_size",
      c.warm_start.batch_size,
      c.mesh.train.data * c.mesh.train.fsdp,
      width,
      longest,
    ),
  ):
    if rows * tokens > _MOST_BATCH_TOKENS:
      works = max(_MOST_BATCH_TOKENS // tokens // unit, 1) * unit
      problems.append(
        f"{name} = {rows} of {over} = {tokens} are {rows * tokens} tokens, "
        f"more than a host's arrays of {_MOST_BATCH_TOKENS}. Try "
        f"{name}={works}."
      )
  return problems


def _check_slots(c: Any) -> list[str]:
  data, rollout = c.mesh.rollout.data, c.rollout
  if rollout.slots:
    return _split_problems(
      "rollout.slots", rollout.slots, over="mesh.rollout.data", parts=data
    )
  slots = _num_slots(rollout)
  # Too many are reported elsewhere.
  if slots > _MOST_SLOTS or slots % data == 0:
    return []
  return [
    f"rollout.slots = 0 takes {_BATCH_SLOTS} = {slots}, which do "
    f"not split over mesh.rollout.data = {data}. Try "
    f"rollout.slots={-(-slots // data) * data}."
  ]


_BATCH_SLOTS = (
  "rollout.prompts_per_batch * (rollout.samples_per_prompt + "
  "rollout.extra_samples)"
)


def _num_slots(rollout: Any) -> int:
  samples = rollout.samples_per_prompt + rollout.extra_samples
  return rollout.slots or rollout.prompts_per_batch * samples


def cache_pages(rollout: Any, *, max_prompt_tokens: int, replicas: int) -> int:
  """Pages of the cache on each of ``replicas`` data slices of the mesh.

  Args:
    rollout: Fields as in ``RolloutConfig``.
    max_prompt_tokens: P.
    replicas: Data slices.
  """
  page = rollout.chunk_tokens
  if rollout.cache_tokens:
    return rollout.cache_tokens // page
  slots = -(-_num_slots(rollout) // replicas)
  samples = rollout.samples_per_prompt + rollout.extra_samples
  # All but its last token, whose keys the first chunk writes.
  prompt = -(-(max_prompt_tokens - 1) // page)
  own = -(-rollout.max_response_tokens // page)
  most = -(-slots // samples) * prompt + slots * own
  return max(most, _pages_of_a_sample(rollout, max_prompt_tokens))


def _pages_of_a_sample(rollout: Any, max_prompt_tokens: int) -> int:
  """Those of the longest, of which one may begin anywhere in its prefix."""
  longest = max_prompt_tokens + rollout.max_response_tokens
  return -(-longest // rollout.chunk_tokens) + 1


def cache_problems(
  rollout: Any, *, max_prompt_tokens: int, replicas: int
) -> list[str]:
  """Whether slots and pages are too many, or too few for one sample.

  The arguments are those of ``cache_pages``.
  """
  slots = _num_slots(rollout)
  if slots > _MOST_SLOTS:
    works = max(_MOST_SLOTS // replicas, 1) * replicas
    return [
      f"rollout.slots = 0 takes {_BATCH_SLOTS} = {slots}, more than "
      f"{_MOST_SLOTS}. Try rollout.slots={works}."
    ]
  problems = []
  page = rollout.chunk_tokens
  pages = cache_pages(
    rollout, max_prompt_tokens=max_prompt_tokens, replicas=replicas
  )
  least = _pages_of_a_sample(rollout, max_prompt_tokens)
  most = max(_MOST_PAGES, least)
  if pages < least:
    problems.append(
      f"rollout.cache_tokens = {rollout.cache_tokens} is less than one sample "
      "may take: prompts.max_tokens + rollout.max_response_tokens = "
      f"{max_prompt_tokens + rollout.max_response_tokens}, in pages of "
      f"rollout.chunk_tokens = {page}. Try rollout.cache_tokens={least * page},"
      " or 0 for enough."
    )
  elif pages > most:
    problems.append(
      f"rollout.cache_tokens = {rollout.cache_tokens} makes {pages} pages of "
      f"rollout.chunk_tokens = {page} on each data slice, more than {most}. "
      f"Try rollout.cache_tokens={most * page}."
    )
  if slots * least > _MOST_ENTRIES and slots > replicas:
    works = max(_MOST_ENTRIES // least // replicas, 1) * replicas
    problems.append(
      f"rollout.slots = {rollout.slots} makes {slots} page tables of {least} "
      f"entries, more than {_MOST_ENTRIES} together. Try rollout.slots={works}."
    )
  return problems


def _check_cache(c: Any) -> list[str]:
  return cache_problems(
    c.rollout,
    max_prompt_tokens=c.prompts.max_tokens,
    replicas=c.mesh.rollout.data,
  )


def stop_string_problems(
  strings: Any, *, name: str = "rollout.stop_strings"
) -> list[str]:
  """Why some of these can end no response.

  Args:
    strings: Of any type.
    name: As the caller calls them.
  """
  if problems := value_problems(name, strings, field="rollout.stop_strings"):
    return problems
  usable = tuple(
    text
    for text in strings
    if text and "\ufffd" not in text and not _has_surrogate(text)
  )
  if len(usable) == len(strings):
    return []
  unusable = next(text for text in strings if text not in usable)
  return [
    f"{name} = {_shown(tuple(strings))} has {_shown(unusable)}: every text has "
    "the empty string, U+FFFD stands for bytes that are no text yet, and no "
    "text has half of a surrogate pair. Try "
    f"{name}={_shown(usable)}."
  ]


def _check_stop_strings(c: Any) -> list[str]:
  return stop_string_problems(c.rollout.stop_strings)


def _check_heads(c: Any) -> list[str]:
  problems = []
  heads, kv_heads = c.model.num_heads, c.model.num_kv_heads
  if heads % kv_heads:
    problems.append(
      f"model.num_heads = {heads} is not a multiple of model.num_kv_heads = "
      f"{kv_heads}. Try model.num_kv_heads={math.gcd(heads, kv_heads)}."
    )
  return problems


def _check_head_dim(c: Any) -> list[str]:
  if c.model.head_dim % 2 == 0:
    return []
  return [
    f"model.head_dim = {c.model.head_dim} is odd, and rotary embedding turns "
    f"pairs. Try model.head_dim={c.model.head_dim + 1}."
  ]


def _check_rope_scaling(c: Any) -> list[str]:
  low = c.model.rope_low_frequency_factor
  high = c.model.rope_high_frequency_factor
  if c.model.rope_scaling_factor == 1 or low < high:
    return []
  return [
    f"model.rope_low_frequency_factor = {low:g} is not below "
    f"model.rope_high_frequency_factor = {high:g}. Try "
    f"model.rope_low_frequency_factor={high / 4:g}."
  ]


def _check_context(c: Any) -> list[str]:
  longest = c.prompts.max_tokens + c.rollout.max_response_tokens
  context = c.model.context_tokens
  if longest <= context:
    return []
  shorter = context - c.prompts.max_tokens
  return [
    f"prompts.max_tokens + rollout.max_response_tokens = {longest} is more "
    f"than model.context_tokens = {context}. Try "
    + (
      f"rollout.max_response_tokens={shorter}."
      if shorter > 0
      else f"model.context_tokens={longest}."
    )
  ]


def _check_experts(c: Any) -> list[str]:
  model, problems = c.model, []
  if not model.num_experts:
    return []
  if not 1 <= model.experts_per_token <= model.num_experts:
    near = min(max(model.experts_per_token, 1), model.num_experts)
    problems.append(
      f"model.experts_per_token = {model.experts_per_token} is not between 1 "
      f"and model.num_experts = {model.num_experts}. Try "
      f"model.experts_per_token={near}."
    )
  if model.expert_mlp_dim < 1:
    problems.append(
      f"model.expert_mlp_dim = {model.expert_mlp_dim} leaves "
      f"model.num_experts = {model.num_experts} experts no width. Try "
      f"model.expert_mlp_dim={model.mlp_dim}."
    )
  return problems


def _linear_kernels(model: Any) -> list[str]:
  """The names that ``lora_targets`` can match."""
  feed_forward = ["gate", "up", "down"] + ["router"] * (model.num_experts > 0)
  return [
    *(f"attention.{name}" for name in ("query", "key", "value", "output")),
    *(f"feed_forward.{name}" for name in feed_forward),
  ]


def _lora_targets(model: Any) -> dict[str, list[str]]:
  """By pattern of ``lora_targets``, the kernels that it matches."""
  patterns = (pattern.strip() for pattern in model.lora_targets.split(","))
  return {
    pattern: fnmatch.filter(_linear_kernels(model), pattern)
    for pattern in patterns
    if pattern
  }


def _check_lora(c: Any) -> list[str]:
  if not c.model.lora_rank:
    return []
  problems = []
  if not c.model.checkpoint:
    problems.append(
      f"model.lora_rank = {c.model.lora_rank} trains adapters of a frozen "
      "model, and model.checkpoint = '' names none. Try model.lora_rank=0, or "
      "a published model's folder as model.checkpoint."
    )
  targets = _lora_targets(c.model)
  unmatched = [pattern for pattern, names in targets.items() if not names]
  if unmatched or not targets:
    said = f"{', '.join(unmatched)} matches" if unmatched else "it matches"
    problems.append(
      f"model.lora_targets = {_shown(c.model.lora_targets)}: {said} no kernel. "
      f"There are {', '.join(_linear_kernels(c.model))}. Try "
      "model.lora_targets='attention.*'."
    )
  return problems


def tensor_problems(model: Any, tensor: int, *, name: str) -> list[str]:
  """What of a model does not split over a mesh's tensor axis.

  Args:
    model: Fields as in ``ModelConfig``.
    tensor: Size of the axis.
    name: As the caller calls it.
  """
  names = ["num_heads", "num_kv_heads"]
  if not model.num_experts:
    names.append("mlp_dim")
  elif model.num_experts % tensor:
    # Experts that cannot be dealt out are each cut instead.
    names.append("expert_mlp_dim")
  sizes = {each: getattr(model, each) for each in names}
  return [
    f"model.{each} = {size} does not split over {name} = {tensor}. Try "
    f"{name}={math.gcd(size, tensor)}."
    for each, size in sizes.items()
    if size % tensor
  ]


def _check_train_tensor(c: Any) -> list[str]:
  tensor = c.mesh.train.tensor
  return tensor_problems(c.model, tensor, name="mesh.train.tensor")


def _check_rollout_tensor(c: Any) -> list[str]:
  tensor = c.mesh.rollout.tensor
  return tensor_problems(c.model, tensor, name="mesh.rollout.tensor")


def _check_fsdp_split(c: Any) -> list[str]:
  size, fsdp = c.model.embed_dim, c.mesh.train.fsdp
  if size % fsdp == 0:
    return []
  return [
    f"model.embed_dim = {size} does not split over mesh.train.fsdp = {fsdp}. "
    f"Try mesh.train.fsdp={math.gcd(size, fsdp)}."
  ]


def _check_synchronous(c: Any) -> list[str]:
  if c.replay.max_staleness > 0 or c.replay.max_uses == 1:
    return []
  return [
    f"replay.max_uses = {c.replay.max_uses} means nothing with "
    "replay.max_staleness = 0: a sample is stale after its first use. Try "
    "replay.max_uses=1, or replay.max_staleness=1."
  ]


def _check_trust_region(c: Any) -> list[str]:
  if c.objective.loss == "clipped" or c.objective.trust_region == "behavior":
    return []
  return [
    f"objective.trust_region = {_shown(c.objective.trust_region)} means "
    f"nothing with objective.loss = {_shown(c.objective.loss)}, whose ratios "
    "are to the behavior policy. Try objective.trust_region='behavior', or "
    "objective.loss='clipped'."
  ]


def _check_proximal(c: Any) -> list[str]:
  objective = c.objective
  if objective.trust_region == "decoupled" or (
    objective.proximal == "recompute"
  ):
    return []
  return [
    f"objective.proximal = {_shown(objective.proximal)} has no part in "
    "objective.trust_region = 'behavior'. Try "
    "objective.proximal='recompute', or objective.trust_region='decoupled'."
  ]


def _check_kl_target(c: Any) -> list[str]:
  objective = c.objective
  if objective.kl_coefficient or objective.kl_target == "behavior":
    return []
  return [
    f"objective.kl_target = {_shown(objective.kl_target)} has no part in "
    "objective.kl_coefficient = 0. Try objective.kl_target='behavior', or "
    "objective.kl_coefficient=0.04."
  ]


def _check_behavior_weight_mode(c: Any) -> list[str]:
  objective = c.objective
  if objective.trust_region == "decoupled" or (
    objective.behavior_weight_mode == "truncate"
  ):
    return []
  return [
    "objective.behavior_weight_mode = "
    f"{_shown(objective.behavior_weight_mode)} masks tokens by prox/mu, which "
    "has no part in objective.trust_region = 'behavior'. Try "
    "objective.behavior_weight_mode='truncate', or "
    "objective.trust_region='decoupled'."
  ]


def _check_balance(c: Any) -> list[str]:
  objective, rollout = c.objective, c.rollout
  if objective.behavior_weighting not in _BALANCE:
    return []
  weighting = (
    f"objective.behavior_weighting = {_shown(objective.behavior_weighting)}"
  )
  problems = []
  if objective.trust_region != "decoupled":
    problems.append(
      f"{weighting} stands in for prox/mu, which is in no loss with "
      f"objective.trust_region = {_shown(objective.trust_region)}. Try "
      "objective.trust_region='decoupled', or "
      "objective.behavior_weighting='pooled'."
    )
  if objective.proximal not in ("recompute", "snapshot"):
    problems.append(
      f"objective.proximal = {_shown(objective.proximal)} is no policy that "
      f"could be compared with the ring's snapshots before the step, as "
      f"{weighting} does. Try objective.proximal='recompute'."
    )
  if objective.behavior_weight_mode != "truncate":
    problems.append(
      "objective.behavior_weight_mode = "
      f"{_shown(objective.behavior_weight_mode)} masks tokens by their prox/mu,"
      f" and {weighting} weighs trajectories, up to "
      "objective.max_behavior_weight. Try "
      "objective.behavior_weight_mode='truncate'."
    )
  if c.replay.max_staleness and rollout.weight_update != "drain":
    problems.append(
      f"rollout.weight_update = {_shown(rollout.weight_update)} lets a "
      f"trajectory mix versions, and {weighting} needs its probability under "
      "each of them. Try rollout.weight_update='drain'."
    )
  for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
    if getattr(rollout, name) != off:
      problems.append(
        f"rollout.{name} = {getattr(rollout, name):g} truncates by the snapshot"
        f" that sampled, and {weighting} needs probabilities under the others, "
        f"which would have truncated otherwise. Try rollout.{name}={off:g}."
      )
  return problems


def _check_trajectory_weights(c: Any) -> list[str]:
  if c.objective.loss != "gspo" or c.objective.behavior_weighting == "pooled":
    return []
  return [
    "objective.behavior_weighting = "
    f"{_shown(c.objective.behavior_weighting)} weighs the tokens of each "
    "version, and objective.loss = 'gspo' all trajectories alike. Try "
    "objective.behavior_weighting='pooled'."
  ]


def _check_clip_age_decay(c: Any) -> list[str]:
  if (
    c.objective.loss not in ("gspo", "topr") or c.objective.clip_age_decay == 1
  ):
    return []
  return [
    f"objective.clip_age_decay = {c.objective.clip_age_decay:g} narrows the "
    f"clip of tokens, and objective.loss = {_shown(c.objective.loss)} has none."
    " Try objective.clip_age_decay=1."
  ]


def _check_schedule(c: Any) -> list[str]:
  learner = c.learner
  problems = []
  if (
    learner.schedule == "cosine"
    and learner.learning_rate == 0
    and learner.final_learning_rate != 0
  ):
    problems.append(
      "learner.learning_rate = 0 stays so under the cosine schedule, which is "
      "a multiple of it, and learner.final_learning_rate = "
      f"{learner.final_learning_rate:g}. Try learner.schedule='linear', or "
      "learner.final_learning_rate=0."
    )
  if (
    learner.schedule == "constant"
    and learner.final_learning_rate != learner.learning_rate
  ):
    problems.append(
      f"learner.final_learning_rate = {learner.final_learning_rate:g} is not "
      f"learner.learning_rate = {learner.learning_rate:g}, but the schedule is "
      "constant. Try learner.schedule='linear', or "
      f"learner.final_learning_rate={learner.learning_rate:g}."
    )
  return problems


def _check_updates(c: Any) -> list[str]:
  updates, most = c.num_steps * c.learner.minibatches, _INT32
  if updates <= most:
    return []
  return [
    f"num_steps * learner.minibatches = {updates} optimizer steps are more "
    f"than can be counted. Try num_steps={most // c.learner.minibatches}."
  ]


def _check_warmup(c: Any) -> list[str]:
  updates = c.num_steps * c.learner.minibatches
  # Two updates are left for the way from learning_rate to its final value.
  if not updates or c.learner.warmup_steps <= max(updates - 2, 0):
    return []
  return [
    f"learner.warmup_steps = {c.learner.warmup_steps} leave no time for the "
    f"schedule in num_steps * learner.minibatches = {updates} optimizer steps. "
    f"Try learner.warmup_steps={updates // 10}."
  ]


def _check_overlong(c: Any) -> list[str]:
  longest = c.rollout.max_response_tokens
  buffer = c.rewards.overlong_buffer_tokens
  if not c.rewards.overlong_penalty or 1 <= buffer <= longest:
    return []
  return [
    f"rewards.overlong_buffer_tokens = {buffer} is not between 1 and "
    f"rollout.max_response_tokens = {longest}, over the last of which "
    f"rewards.overlong_penalty = {c.rewards.overlong_penalty:g} grows. Try "
    f"rewards.overlong_buffer_tokens={-(-longest // 4)}, or "
    "rewards.overlong_penalty=0."
  ]


def _check_evaluate(c: Any) -> list[str]:
  samples, data = c.evaluate.samples_per_prompt, c.mesh.rollout.data
  problems = []
  if samples > 1 and c.evaluate.temperature == 0:
    problems.append(
      f"evaluate.samples_per_prompt = {samples} asks for the same answer again "
      "and again: evaluate.temperature = 0 is greedy. Try "
      "evaluate.samples_per_prompt=1, or evaluate.temperature=1."
    )
  if samples * data > _MOST_SLOTS and data <= _MOST_SLOTS:
    problems.append(
      f"evaluate.samples_per_prompt = {samples} on each of mesh.rollout.data = "
      f"{data} are more than {_MOST_SLOTS} slots. Try "
      f"evaluate.samples_per_prompt={_MOST_SLOTS // data}."
    )
  return problems


def _check_stop_on(c: Any) -> list[str]:
  names = c.watch.stop_on
  unknown = [name for name in names if name not in ALARMS]
  if not unknown:
    return []
  known = tuple(
    difflib.get_close_matches(name, ALARMS, n=1, cutoff=0.0)[0]
    for name in names
  )
  return [
    f"watch.stop_on = {_shown(names)}: {_shown(unknown[0])} is no alarm. There "
    f"are {', '.join(ALARMS)}. Try watch.stop_on={_shown(known)}."
  ]


_CROSS_FIELD_CHECKS: tuple[Callable[[Any], list[str]], ...] = (
  _check_prompts,
  _check_candidates,
  _check_batch,
  _check_rows,
  _check_score_rows,
  _check_warm_start_batch,
  _check_row_tokens,
  _check_row_capacity,
  _check_batch_tokens,
  _check_slots,
  _check_cache,
  _check_stop_strings,
  _check_heads,
  _check_head_dim,
  _check_rope_scaling,
  _check_context,
  _check_experts,
  _check_lora,
  _check_train_tensor,
  _check_rollout_tensor,
  _check_fsdp_split,
  _check_synchronous,
  _check_trust_region,
  _check_proximal,
  _check_kl_target,
  _check_behavior_weight_mode,
  _check_balance,
  _check_trajectory_weights,
  _check_clip_age_decay,
  _check_schedule,
  _check_updates,
  _check_warmup,
  _check_overlong,
  _check_evaluate,
  _check_stop_on,
)
