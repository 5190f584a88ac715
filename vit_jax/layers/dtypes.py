"""The types of the computation and of the parameters of a layer or model.

Every module has the fields `dtype` and `param_dtype`; docstrings repeat them only
where there is more to say.
"""

import flax.linen as nn
import jax.numpy as jnp


def of(module: nn.Module) -> dict[str, jnp.dtype | None]:
  """Returns a module's `dtype` and `param_dtype`, to pass to its submodules.

  A type may be given by name; None stays None, see flax.linen.Dense.
  """
  given = {name: getattr(module, name) for name in ('dtype', 'param_dtype')}
  return {k: None if v is None else jnp.dtype(v) for k, v in given.items()}
