"""Parameters in 8 bits: kernels are int8 with a scale for each output channel.

A kernel W becomes round(W / s), s = max |W| / 127 over the inputs of the channel
(arXiv 1806.08342, 2.2 and 3.1.1, symmetric). Computations keep their type: kernels
return to it where a program reads them. Biases, norms and embeddings are unchanged.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.learning import optim


class Kernel(NamedTuple):
  """A kernel of 8 bits: `values` times `scale`, see `converted`."""

  values: jax.Array  # int8, with the shape of the kernel.
  scale: jax.Array  # float32 [1, ..., *outputs].


def converted(params: Any, dtype: str) -> Any:
  """Returns parameters in a type; for 'int8', only kernels change, to `Kernel`s."""

  def convert(path: Sequence[Any], x: Any) -> Any:
    if dtype != 'int8':
      return x.astype(dtype)
    name = sharding.path_name(path)
    if x.ndim < 2 or not name.endswith('kernel'):
      return x
    inputs = tuple(range(optim.num_inputs(name, x.ndim)))
    return _quantized(jnp.asarray(x, jnp.float32), inputs)

  return jax.tree_util.tree_map_with_path(convert, params)


@functools.partial(jax.jit, static_argnums=1)
def _quantized(x: jax.Array, inputs: tuple[int, ...]) -> Kernel:
  scale = jnp.max(jnp.abs(x), inputs, keepdims=True) / 127
  scale = jnp.where(scale > 0, scale, 1)
  return Kernel(jnp.round(x / scale).astype(jnp.int8), scale)


def restored(params: Any) -> Any:
  """Returns parameters whose `Kernel`s are arrays again."""

  def restore(x: Any) -> Any:
    # jnp rather than NumPy: constants of a program stay in 8 bits.
    return jnp.multiply(x.values, x.scale) if isinstance(x, Kernel) else x

  return jax.tree.map(restore, params, is_leaf=lambda x: isinstance(x, Kernel))


def check(model: Any, use: str) -> None:
  """Raises ValueError if a Predictor was loaded in 8 bits, which does not fit a `use`."""
  if isinstance(model.task.model, Model):
    raise ValueError(f"a model loaded with dtype='int8' is not for {use}")


class Model:
  """A Flax module whose `apply` takes parameters with `Kernel`s."""

  def __init__(self, module: Any) -> None:
    self.module = module

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):  # `copy` asks before there is a module.
      raise AttributeError(name)
    return getattr(self.module, name)

  def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Applies the module to `params` with kernels of 8 bits."""
    variables = {**variables, 'params': restored(variables['params'])}
    return self.module.apply(variables, *args, **kwargs)
