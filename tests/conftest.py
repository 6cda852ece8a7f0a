"""Every test runs on 8 virtual CPU devices, with strict broadcasting."""

import jax

# Before anything starts a backend: devices cannot be added afterwards.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Ranks that differ are where a [B] silently meets a [B, T].
jax.config.update("jax_numpy_rank_promotion", "raise")
