"""Layers that are alike: a loop over them, and what its backward pass keeps."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

# What `remat` stores of a layer for the backward pass, beside the layer's
# input; everything else is recomputed.
REMAT_POLICIES = {
  'full': None,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
REMATS = ('', *REMAT_POLICIES)
# The same of a layer in a loop without `remat`. By default a loop stores every
# activation of every layer. Results of matrix products suffice: the rest is
# recomputed cheaply from them.
_LOOP_POLICY = jax.checkpoint_policies.dots_saveable


def recomputed(
  cls: type[nn.Module],
  remat: str,
  looped: bool = False,
  static_argnums: tuple[int, ...] = (),
) -> type[nn.Module]:
  """Returns the class of a layer whose backward pass recomputes activations.

  `remat` is one of REMATS. In a loop (`looped`) something is always recomputed.
  """
  if not (remat or looped):
    return cls
  return nn.remat(
    cls,
    static_argnums=static_argnums,
    policy=REMAT_POLICIES.get(remat, _LOOP_POLICY),
    prevent_cse=not looped,
  )


def over_layers(apply: Callable, x, *by_layer: Sequence[Any]):
  """Applies layers to `x` one after another in a loop, which is compiled once.

  `apply` is a function from `x` and what belongs to one layer to the next `x`.
  `by_layer` are lists with a tree of arrays for each layer, such as its
  parameters, or with None for every layer.
  """
  stacked = tuple(
    jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    for trees in by_layer
  )
  return jax.lax.scan(lambda x, own: (apply(x, *own), None), x, stacked)[0]
