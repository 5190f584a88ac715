"""Tests of the FLOP count against closed forms and brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.configs import models as model_configs
from vit_jax.distributed import sharding
from vit_jax.layers import attention
from vit_jax.planning import flops


def multiply_adds(
  model, image_size, num_classes, channels=3, *, as_run
):  # fmt: skip
  """Counts the multiply-adds of a ViT's forward pass in closed form.

  With `as_run`, the last layer of a model with a class token computes the keys
  and values of all tokens, and everything else only for the class token.
  """
  width, encoder = model.hidden_size, model.transformer
  patch_height, patch_width = model.patches.size
  patches = (image_size[0] // patch_height) * (image_size[1] // patch_width)
  tokens = patches + model.classifier.startswith('token') + model.get('registers', 0)
  products = 3 if encoder.get('mlp') == 'swiglu' else 2  # In the MLP.
  embedding = patches * patch_height * patch_width * channels * width
  dense = tokens * (4 * width * width + products * width * encoder.mlp_dim)
  attention = 2 * tokens * tokens * width
  head = width * num_classes
  if model.get('representation_size'):
    head = model.representation_size * (width + num_classes)
  total = embedding + encoder.num_layers * (dense + attention) + head
  if as_run and model.classifier == 'token':
    unread = tokens - 1
    total -= unread * width * (2 * width + products * encoder.mlp_dim + 2 * tokens)
  return total


def test_a_distillation_token_adds_a_token_and_a_head():
  config = model_configs.get_config('s16')
  config.distilled, config.transformer.num_layers = True, 1
  model = models.make_model(config, num_classes=10)
  # 6 patches and 2 tokens, all of them computed.
  layer = 8 * (4 * 384**2 + 2 * 384 * 1536) + 2 * 8 * 8 * 384
  want = 6 * 768 * 384 + layer + 2 * 384 * 10
  assert flops.forward_flops(model, (32, 48)) == 2 * want


@pytest.mark.parametrize('whole', [False, True])
def test_vit_matches_the_closed_form(whole):
  config = model_configs.get_config('s16')
  config.transformer.num_layers = 2
  model = models.make_model(config, num_classes=10)
  got = flops.forward_flops(model, (96, 64), whole=whole)
  want = multiply_adds(config, (96, 64), 10, as_run=not whole)
  assert got == 2 * want


@pytest.mark.parametrize('name', ['22b14', 'dinov2_g14_reg4'])
def test_encoder_variants_match_the_closed_form(name):
  config = model_configs.get_config(name)
  config.hidden_size = 96
  config.transformer.update(num_layers=2, mlp_dim=64)
  model = models.make_model(config, num_classes=10)
  for whole in (False, True):
    want = multiply_adds(config, (28, 42), 10, as_run=not whole)
    assert flops.forward_flops(model, (28, 42), whole=whole) == 2 * want


def test_rectangles_mean_pooling_and_pre_logits():
  config = model_configs.get_config('s16_gap_norep')
  config.representation_size = 100
  config.transformer.num_layers = 2
  model = models.make_model(config, num_classes=10)
  layer = 8 * (4 * 384**2 + 2 * 384 * 1536) + 2 * 8 * 8 * 384
  want = 8 * 256 * 384 + 2 * layer + 384 * 100 + 100 * 10
  assert flops.forward_flops(model, (64, 32), channels=1) == 2 * want
  assert multiply_adds(config, (64, 32), 10, 1, as_run=True) == want


def test_mixer_matches_the_closed_form():
  config = model_configs.get_config('mixer_b32')
  config.num_blocks = 2
  model = models.make_model(config, num_classes=10)
  # 4 tokens of width 768; an MLP over the tokens, one over the channels.
  layer = 768 * 2 * 4 * 384 + 4 * 2 * 768 * 3072
  want = 4 * 32 * 32 * 3 * 768 + 2 * layer + 768 * 10
  assert flops.forward_flops(model, (64, 64)) == 2 * want


def products(size, taps, stride, padding, holes, spread):
  """Counts the products of a window with image pixels along one axis.

  The image is ones; its padding and the holes between its pixels are zeros.
  """
  low, high = padding
  row = np.zeros(holes * (size - 1) + 1)
  row[::holes] = 1
  row = np.concatenate([np.zeros(low), row, np.zeros(high)])
  span = spread * (taps - 1) + 1
  starts = range(0, len(row) - span + 1, stride)
  return sum(row[s : s + span : spread].sum() for s in starts)


@pytest.mark.parametrize(
  'stride, padding, holes, spread, groups',
  [
    (1, (1, 1), 1, 1, 1),
    (2, (3, 3), 1, 1, 2),
    (1, (2, 1), 2, 1, 1),
    (2, (2, 4), 3, 2, 1),
  ],
)
def test_zeros_in_a_convolution_do_not_count(stride, padding, holes, spread, groups):
  def convolve(image, kernel):
    return jax.lax.conv_general_dilated(
      image,
      kernel,
      (stride, 1),
      [padding, (0, 1)],
      lhs_dilation=(holes, 1),
      rhs_dilation=(spread, 1),
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      feature_group_count=groups,
    )

  image, kernel = jnp.ones((3, 8, 7, 4)), jnp.ones((3, 2, 4 // groups, 6))
  rows = products(8, 3, stride, padding, holes, spread)
  columns = products(7, 2, 1, (0, 1), 1, 1)
  want = 2 * rows * columns * 3 * (4 // groups) * 6
  assert flops.count_flops(jax.make_jaxpr(convolve)(image, kernel)) == want


def test_each_gradient_of_a_convolution_costs_a_forward_pass():
  """Both gradients are convolutions with holes in the image or between the taps."""

  def total(kernel, image, stride, padding):
    return jax.lax.conv_general_dilated(
      image,
      kernel,
      (stride, stride),
      padding,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    ).sum()

  image, kernel = jnp.ones((2, 9, 8, 4)), jnp.ones((3, 3, 4, 5))
  for case in itertools.product((1, 2), ('SAME', 'VALID')):
    forward = jax.make_jaxpr(lambda k, x, case=case: total(k, x, *case))
    backward = jax.make_jaxpr(
      jax.grad(lambda k, x, case=case: total(k, x, *case), argnums=(0, 1))
    )
    count = flops.count_flops(forward(kernel, image))
    assert flops.count_flops(backward(kernel, image)) == 3 * count


def test_loops_and_recomputation_count():
  def body(x, _):
    return jnp.tanh(x @ x), None

  def loop(x):
    return jax.lax.scan(body, x, None, length=5)[0].sum()

  x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
  product = 2 * 4**3
  assert flops.count_flops(jax.jit(loop).trace(x).jaxpr) == 5 * product
  grad = jax.jit(jax.grad(loop)).trace(x).jaxpr
  assert flops.count_flops(grad) == 3 * 5 * product
  again = jax.jit(jax.grad(jax.checkpoint(loop))).trace(x).jaxpr
  assert flops.count_flops(again) >= 4 * 5 * product


def test_kernels_of_all_devices_count():
  """Attention of 8 images of 5 tokens and 3 heads on 8 devices."""
  x = jax.ShapeDtypeStruct((8, 5, 3, 64), jnp.float32)
  flash = attention.IMPLEMENTATIONS['flash']

  def backward(x):
    return jax.grad(lambda *heads: flash(*heads).sum(), (0, 1, 2))(x, x, x)

  product = 2 * 8 * 3 * 5 * 5 * 64
  with jax.set_mesh(sharding.make_mesh({'data': 8})):
    forward = jax.jit(lambda x: flash(x, x, x)).trace(x).jaxpr
    assert flops.count_flops(forward) == 2 * product
    # The backward pass computes the logits again.
    assert flops.count_flops(jax.jit(backward).trace(x).jaxpr) == (2 + 5) * product
