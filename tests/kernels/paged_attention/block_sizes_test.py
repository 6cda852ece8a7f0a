"""Sizes of the kernel's blocks, and which arrays it takes."""

import jax.numpy as jnp
from absl.testing import parameterized

from darl_jax.kernels.paged_attention import block_sizes

_QWEN3_8B = dict(
  width=272, kv_heads=2, page_tokens=64, head_dim=128, dtype=jnp.bfloat16
)


class BlockSizesTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, 32),  # 2 MiB of 1 KiB a slot: 2,048 slots.
    (dict(kv_heads=1), 32),  # No more than those.
    (dict(kv_heads=8), 8),
    (dict(kv_heads=8, dtype=jnp.int8), 16),
    (dict(kv_heads=8, dtype=jnp.float32), 4),
    (dict(page_tokens=16), 64),  # No more transfers than those.
    (dict(kv_heads=64, dtype=jnp.float32), 2),  # A tile at least.
    (dict(width=5), 6),  # No more than are used, in tiles of two pages.
    (dict(width=1), 2),
    (dict(page_tokens=48), 40),  # Tiles of eight pages.
    (dict(page_tokens=256), 8),
  )
  def test_pages_per_block(self, changes, pages):
    sizes = {**_QWEN3_8B, **changes}
    self.assertEqual(block_sizes.pages_per_block(**sizes), pages)
    self.assertEqual(pages * sizes["page_tokens"] % block_sizes.LANES, 0)

  @parameterized.parameters(
    ({}, True),
    (dict(head_dim=64), False),
    (dict(head_dim=256), True),
    (dict(page_tokens=8), False),  # A tile of bfloat16 has 16 rows.
    (dict(page_tokens=8, dtype=jnp.float32), True),
    (dict(page_tokens=16, dtype=jnp.int8), False),
    (dict(page_tokens=32, dtype=jnp.int8), True),
    (dict(entries=481), True),  # 481 * 272 * 4 bytes.
    (dict(entries=482), False),
    (dict(queries=64), True),
    (dict(queries=4096), False),
    (dict(width=4000, entries=4, dtype=jnp.int8), True),
    # Scales of all slots of an entry are in VMEM at once.
    (dict(width=10_000, entries=4, dtype=jnp.int8), False),
    (dict(width=10_000, entries=4), True),
  )
  def test_fits(self, changes, fits):
    sizes = dict(entries=40, queries=4, **_QWEN3_8B)
    self.assertEqual(block_sizes.fits(**{**sizes, **changes}), fits)
