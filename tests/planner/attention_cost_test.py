"""Splash attention's cost, against a count of its blocks and a compiled one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.config import ConfigError
from darl_jax.models import attention
from darl_jax.planner import attention_cost, hlo_cost, topology
from darl_jax.sharding import rules

HEADS, KV_HEADS, LENGTH, WIDTH = 8, 2, 1024, 128


def metadata(block: int, fused: bool = False) -> str:
  names = ("", "_q", "_kv", "_q_dkv", "_kv_dkv", "_q_dq", "_kv_dq")
  blocks = ", ".join(f'\\"block{name}\\": {block}' for name in names)
  return f'{blocks}, \\"use_fused_bwd_kernel\\": {str(fused).lower()}'


def operands() -> list[tuple[str, tuple[int, ...], float]]:
  query, key = (HEADS, LENGTH, WIDTH), (KV_HEADS, LENGTH, WIDTH)
  arrays = [("s8", (1, 1, 1)), ("bf16", query), ("bf16", key), ("bf16", key)]
  return [(kind, shape, 2.0 * np.prod(shape)) for kind, shape in arrays]


class SplashAttentionTest(parameterized.TestCase):
  @parameterized.parameters(
    ("splash_mqa_fwd_segmented_residuals", 2, False),
    ("splash_mha_fwd_no_residuals", 2, False),
    ("splash_mqa_dq_segmented_no_residuals", 3, False),
    ("splash_mqa_dkv_segmented_no_residuals", 4, False),
    ("splash_mqa_dkv_segmented_no_residuals", 5, True),
  )
  def test_flops_of_the_blocks_under_the_diagonal(self, name, products, fused):
    for block in (128, 256, 512, 1024):
      cost = attention_cost.splash_attention(
        name, metadata(block, fused), operands()
      )
      blocks = sum(
        column <= row
        for row in range(LENGTH // block)
        for column in range(LENGTH // block)
      )
      self.assertEqual(
        cost.flops, 2 * products * HEADS * blocks * block**2 * WIDTH
      )

  def test_keys_are_read_again_for_each_block_of_queries(self):
    name = "splash_mqa_fwd_segmented_residuals"
    whole, halves = (
      attention_cost.splash_attention(name, metadata(block), operands()).bytes
      for block in (1024, 512)
    )
    query, keys = 2 * HEADS * LENGTH * WIDTH, 2 * HEADS * LENGTH * WIDTH
    self.assertEqual(whole, 2 * query + 2 * keys)
    # Three of four blocks, and two rows of them.
    self.assertEqual(halves, 2 * query + 2 * keys * 1.5)

  @parameterized.parameters("token_logprob", "splash", "my_splash_mqa_fwd")
  def test_other_kernels_are_none_of_these(self, name):
    self.assertIsNone(
      attention_cost.splash_attention(name, metadata(128), operands())
    )

  def test_of_a_compiled_program(self):
    try:
      devices = topology.devices("v5p:2x2x1")[:1]
    except ConfigError as error:
      pytest.skip(str(error))
    mesh = Mesh(np.array(devices).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    partition = rules.partition(mesh, rules.TRAIN_RULES)
    whole = NamedSharding(mesh, PartitionSpec())
    query, key = (
      jax.ShapeDtypeStruct(
        (2, LENGTH, heads, WIDTH), jnp.bfloat16, sharding=whole
      )
      for heads in (HEADS, KV_HEADS)
    )
    segments = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32, sharding=whole)

    def loss(query, key, value, segments):
      out = attention.attend_packed(
        query, key, value, segments, partition=partition
      )
      return jnp.sum(out.astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(
      query, key, key, segments
    )
    cost = hlo_cost.analyze(lowered.compile().as_text())
    self.assertLen(cost.kernels, 3)
    for kernel in cost.kernels.values():
      self.assertEqual(kernel.source, "shapes", kernel.name)
    # One block: nothing is skipped. Nine products, forward and backward.
    pairs = 2 * HEADS * LENGTH**2
    self.assertEqual(cost.kernel_flops, 2 * 9 * pairs * WIDTH)
