"""How a trainer answers ``bench/grpo_step.py``; see ``protocol.py``.

  {"do": "load", "folder": DIR, "job": {...}}    ->  {"library": str}
  {"do": "step"}  ->  {"seconds": float, "processor_seconds": float,
                       "tokens": int, "parts": {str: float}}

Loading constructs everything and compiles nothing; the first step compiles. All
trainers loop by themselves, and so each of them calls ``Steps.done`` wherever
one of its steps ends: it answers, and returns when the next step is asked for.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import protocol

# Far more than anybody asks for.
MAX_STEPS = 10**6


@dataclasses.dataclass(frozen=True)
class Job:
  """What is trained.

  Attributes:
    num_layers, embed_dim, mlp_dim, num_heads, num_kv_heads, head_dim,
      vocab_size: A Qwen3 decoder's, whose embeddings are not tied.
    prompts: Token ids, to draw from.
    prompts_per_step: Distinct ones.
    samples_per_prompt: G.
    max_prompt_tokens: Of the longest.
    response_tokens: Of each response: no token stops one.
    learning_rate: Of AdamW, constant.
  """

  num_layers: int
  embed_dim: int
  mlp_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  vocab_size: int
  prompts: Sequence[Sequence[int]]
  prompts_per_step: int
  samples_per_prompt: int
  max_prompt_tokens: int
  response_tokens: int
  learning_rate: float

  @property
  def sequences(self) -> int:
    """Of a step."""
    return self.prompts_per_step * self.samples_per_prompt


class Steps:
  """The steps that the bench asks for, one by one."""

  def __init__(self, channel: protocol.Channel):
    self._channel = channel
    self._requests = iter(channel)
    self._wait()

  def done(
    self, *, tokens: int, parts: Mapping[str, float] | None = None
  ) -> None:
    """Answers for a step, and waits for the next.

    Args:
      tokens: That were sampled in it.
      parts: Seconds of its parts.

    Raises:
      SystemExit: No more steps are asked for.
    """
    self._channel.answer(
      seconds=time.perf_counter() - self._start,
      processor_seconds=time.process_time() - self._processor_start,
      tokens=tokens,
      parts=parts or {},
    )
    self._wait()

  def _wait(self) -> None:
    if next(self._requests, None) is None:
      raise SystemExit
    self._start = time.perf_counter()
    self._processor_start = time.process_time()


def serve(
  name: str, load: Callable[[Job, pathlib.Path], Callable[[Steps], None]]
) -> None:
  """Answers requests until there are no more.

  Args:
    name: Of the library, with its version.
    load: From a job and a folder to write to, to what trains until it is
      stopped.
  """
  channel = protocol.Channel()
  request = next(iter(channel))
  train = load(Job(**request["job"]), pathlib.Path(request["folder"]))
  channel.answer(library=name)
  train(Steps(channel))
