"""How many tokens and vocabulary entries are worked on at a time."""

import dataclasses

import jax.numpy as jnp

# Up to this many bytes of float32 logits on a device, the definition is used
# and differentiated as it stands: it computes each logit once, where blocks
# compute it twice, and so little memory is no reason to.
SMALL_LOGITS_BYTES = 64 * 2**20

# Entries per step of the scan. Each step reads and writes the float32 [N, D]
# gradient of the hidden states once: 8 N D bytes beside 6 N D block operations.
# Compiled for a v5p with 16,384 tokens, d 4096 and 151,936 entries, forward and
# backward come to 0.247, 0.199, 0.188 and 0.187 s at blocks of 512, 1024, 2048
# and 4096, by the compiler's cycles; memory grows with the block elsewhere.
SCAN_BLOCK = 2048

# VMEM of the forward kernel, of 64 MiB a core or more on v5p and later.
VMEM_BYTES = 48 * 2**20
_LANES = 128


def check_block(name: str, size: int) -> None:
  """Raises ValueError unless ``size`` is a positive multiple of 128."""
  if size <= 0 or size % _LANES:
    near = max(_LANES, round(size / _LANES) * _LANES)
    raise ValueError(
      f"block size {name} = {size} must be a positive multiple of {_LANES}. "
      f"Nearest that is: {near}."
    )


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """Of the forward kernel.

  Attributes:
    rows: Tokens per block. Each block of tokens reads the unembedding once, so
      a thousand or so make the kernel bound by arithmetic.
    vocab: Vocabulary entries per block.

  Raises:
    ValueError: A size is not a positive multiple of 128.
  """

  rows: int
  vocab: int

  def __post_init__(self):
    for name in ("rows", "vocab"):
      check_block(name, getattr(self, name))

  def vmem_bytes(
    self, dim: int, hidden: jnp.dtype, unembedding: jnp.dtype
  ) -> int:
    """Of two buffers of each operand, its cast, and four blocks of logits."""
    cast = unembedding != hidden
    return (
      2 * self.rows * dim * hidden.itemsize
      + 2 * self.vocab * dim * unembedding.itemsize
      + cast * self.vocab * dim * hidden.itemsize
      + 4 * 4 * self.rows * self.vocab
    )


KERNEL_BLOCKS = (
  BlockSizes(rows=1024, vocab=512),
  BlockSizes(rows=1024, vocab=256),
  BlockSizes(rows=512, vocab=512),
  BlockSizes(rows=512, vocab=256),
  BlockSizes(rows=256, vocab=128),
)


def for_kernel(
  dim: int, hidden: jnp.dtype, unembedding: jnp.dtype
) -> BlockSizes | None:
  """The first of the table that fits in VMEM; None if none does."""
  hidden, unembedding = jnp.dtype(hidden), jnp.dtype(unembedding)
  for sizes in KERNEL_BLOCKS:
    if sizes.vmem_bytes(dim, hidden, unembedding) <= VMEM_BYTES:
      return sizes
  return None
