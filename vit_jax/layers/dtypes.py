"""The types of the computation and of the parameters of a layer or model.

Every module has the fields `dtype` and `param_dtype`; docstrings repeat them only
where there is more to say.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp


def of(module: nn.Module, *fields: str) -> dict[str, Any]:
  """Returns a module's types and other `fields`, to pass to its submodules.

  A type may be given by name; None stays None, see flax.linen.Dense.
  """
  types = {name: getattr(module, name) for name in ('dtype', 'param_dtype')}
  types = {k: None if v is None else jnp.dtype(v) for k, v in types.items()}
  return {**types, **{name: getattr(module, name) for name in fields}}
