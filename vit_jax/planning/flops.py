"""Counts the FLOPs of the matrix products and convolutions in a program.

Other operations (norms, softmax, activations) do not count, as usual. The counts
agree with table 6 of arXiv 2010.11929; see benchmarks/costs.py.
"""

from collections.abc import Iterator, Mapping
import math
from typing import Any

from flax import core, linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.layers import xla_hints


def forward_flops(
  model: nn.Module, image_size: tuple[int, int], channels: int = 3, whole: bool = False
) -> int:
  """Counts the FLOPs of one forward pass on one image, without compiling it.

  `model` is a Linen module called with (images, train=False), and `image_size` is
  (height, width) in pixels. `whole` counts all tokens of the last layer, as
  published figures do; a Vision Transformer that reads only its class token computes
  no other token there.
  """
  images = jax.ShapeDtypeStruct((1, *image_size, channels), jnp.float32)

  def init(images: jax.Array) -> Any:
    # Initialisers multiply no matrices. With mutable `intermediates`, the last layer
    # computes all tokens.
    mutable = True if whole else core.DenyList('intermediates')
    return model.init(jax.random.key(0), images, train=False, mutable=mutable)

  return count_flops(jax.make_jaxpr(init)(images))


def training_exaflops(forward: int, images: float) -> float:
  """Returns the compute of a training on a number of images in exaFLOPs.

  `forward` are the FLOPs of a forward pass on one image, see `forward_flops`; a
  forward and backward pass count three times as much.
  """
  return 3 * forward * images / 1e18


def count_flops(jaxpr: Any) -> int:
  """Counts the FLOPs of the matrix products in a program, as it is written.

  Recomputed products count again, and the body of a loop or kernel counts as often
  as it runs; the compiler's own count does neither reliably. As in XLA, zeros that a
  convolution inserts (padding, dilation) do not count. `jaxpr` is a Jaxpr or
  ClosedJaxpr, such as `jax.jit(f).trace(...).jaxpr`.
  """
  jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
  total = 0
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if name == 'dot_general':
      (contracted, _), _ = eqn.params['dimension_numbers']
      shape = eqn.invars[0].aval.shape
      depth = math.prod(shape[i] for i in contracted)
      total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
    elif name == xla_hints.PRODUCT:
      shapes = (operand.aval.shape for operand in eqn.invars)
      sizes = xla_hints.axis_sizes(eqn.params['subscripts'], *shapes)
      total += 2 * math.prod(sizes.values())
    elif name == 'conv_general_dilated':
      total += _convolution_flops(eqn)
    times = 1
    if name == 'scan':
      times = eqn.params['length']
    elif name == 'pallas_call':
      times = math.prod(eqn.params['grid_mapping'].grid)
    elif name == 'shard_map':  # The program of each device.
      times = eqn.params['mesh'].size
    for inner in _inner_jaxprs(eqn.params):
      total += times * count_flops(inner)
  return total


def loop_lengths(jaxpr: Any) -> set[int]:
  """Returns how often the loops (jax.lax.scan) in a program run their bodies.

  For `jaxpr` see `count_flops`.
  """
  lengths = set()
  for eqn in getattr(jaxpr, 'jaxpr', jaxpr).eqns:
    if eqn.primitive.name == 'scan':
      lengths.add(eqn.params['length'])
    for inner in _inner_jaxprs(eqn.params):
      lengths |= loop_lengths(inner)
  return lengths


def _convolution_flops(eqn: Any) -> int:
  """Counts the FLOPs of a convolution without products with inserted zeros."""
  numbers = eqn.params['dimension_numbers']
  params = eqn.params
  image, kernel = (v.aval.shape for v in eqn.invars)
  out = eqn.outvars[0].aval.shape
  batch, features, *out_axes = numbers.out_spec
  _, depth, *kernel_axes = numbers.rhs_spec  # Inputs of each output channel.
  products = out[batch] * out[features] * kernel[depth]
  axes = zip(
    numbers.lhs_spec[2:],
    kernel_axes,
    out_axes,
    params['window_strides'],
    params['padding'],
    params['lhs_dilation'],
    params['rhs_dilation'],
    strict=True,
  )
  for image_axis, kernel_axis, out_axis, stride, pad, holes, spread in axes:
    # Where each output reads the image with its padding and holes.
    reads = stride * np.arange(out[out_axis])[:, None]
    reads = reads + spread * np.arange(kernel[kernel_axis]) - pad[0]
    inside = (reads >= 0) & (reads < holes * image[image_axis])
    products *= int(np.sum(inside & (reads % holes == 0)))
  return 2 * products


def _inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
  for value in params.values():
    items = value if isinstance(value, tuple | list) else (value,)
    for item in items:
      if hasattr(getattr(item, 'jaxpr', item), 'eqns'):
        yield item
