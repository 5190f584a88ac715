"""Loops over identical layers, and what their backward pass stores."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from vit_jax.layers import dtypes, xla_hints
from vit_jax.layers.dtypes import Array


def _stores_products_without_batch(primitive: Any, *args: Any, **params: Any) -> bool:
  if primitive.name == xla_hints.PRODUCT:
    return not xla_hints.batch_axes(params['subscripts'])
  dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return dots(primitive, *args, **params)


# Values of `remat` -> which results in a layer are stored for the backward pass, in
# addition to the layer's input; everything else is recomputed.
REMAT_POLICIES = {'full': None, 'dots': _stores_products_without_batch}
# TPUs train more layers than this in a loop, unless the config says otherwise.
DEEP = 12


def is_looped(
  scan: bool | None, num_layers: int, train: bool, platform: str | None = None
) -> bool:
  """Returns whether layers are applied in a loop, which compiles once.

  With `scan` None, only training of more than DEEP layers on TPUs is looped: without
  gradients a loop would copy the parameters for little gain. On GPUs it would read and
  write more than twice as many bytes of activations; on CPUs it would be slower, by
  8 % in 24 layers of Ti/16. `platform` is by default `dtypes.platform()`.
  """
  if scan is None:
    scan = train and num_layers > DEEP
    scan = scan and (platform or dtypes.platform()) == 'tpu'
  return scan and num_layers > 1


def _loop_policy(primitive: Any, *args: Any, **params: Any) -> bool:
  """Returns whether a loop without `remat` stores a result of a layer.

  By default a loop stores every activation of every layer. Results of matrix
  products, and of cuDNN's attention, suffice: the rest is recomputed cheaply from
  them.
  """
  name = primitive.name
  if name == xla_hints.PRODUCT or name.startswith('dot_product_attention'):
    return True
  return jax.checkpoint_policies.dots_saveable(primitive, *args, **params)


def recomputed(
  cls: type[nn.Module],
  remat: str,
  looped: bool = False,
) -> type[nn.Module]:
  """Returns the class of a layer whose backward pass recomputes activations.

  `remat` is '' or a key of REMAT_POLICIES. In a loop (`looped`) something is always recomputed.
  """
  if not (remat or looped):
    return cls
  return nn.remat(
    cls,
    policy=REMAT_POLICIES.get(remat, _loop_policy),
    prevent_cse=not looped,
  )


def over_layers(
  apply: Callable[..., Array],
  x: Float[Array, 'B N D'],
  *by_layer: Sequence[Any] | Array,
) -> Float[Array, 'B N D']:
  """Applies layers to `x` one after another in a loop, which is compiled once.

  `apply` is a function from `x` and what belongs to one layer to the next `x`.
  `by_layer` are lists with a tree of arrays for each layer, such as its
  parameters, or with None for every layer.
  """
  stacked = tuple(
    jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) for trees in by_layer
  )

  def step(
    x: Float[Array, 'B N D'], layer_args: Sequence[Any]
  ) -> tuple[Float[Array, 'B N D'], None]:
    return apply(x, *layer_args), None

  x, _ = jax.lax.scan(step, x, stacked)
  return x
