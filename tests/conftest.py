"""Every test runs on 8 virtual CPU devices, with strict broadcasting."""

import gc
import os

# Most of the tests' time goes into compiling programs that then run for
# milliseconds. Before jax is imported, and first, so that flags which are set
# already have the last word; the runs that tests start inherit them.
os.environ["XLA_FLAGS"] = " ".join(
  (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # Virtual devices that wait for one of them: a busy machine is no deadlock.
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    os.environ.get("XLA_FLAGS", ""),
  )
).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

# Before anything starts a backend: devices cannot be added afterwards.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Ranks that differ are where a [B] silently meets a [B, T].
jax.config.update("jax_numpy_rank_promotion", "raise")

from darl_jax.models import transformer  # noqa: E402

# So that tests' narrow models take the way of those that people sample from.
transformer._OUTPUTS_FIRST_DIM = 16


@pytest.fixture(scope="module", autouse=True)
def release_programs():
  """Unmaps what a module compiled.

  Each program is mapped in several pieces, and Linux gives a process 65,530 of
  them. A run of thousands of tests was once aborted inside XLA, and these maps
  are the likely cause, not the proven one.
  """
  yield
  jax.clear_caches()
  gc.collect()
