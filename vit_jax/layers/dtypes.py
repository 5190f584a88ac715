"""The types of the computation and of the parameters of a layer or model.

Every module has the fields `dtype` and `param_dtype`; docstrings repeat them only
where there is more to say.
"""

from typing import Any, TypeAlias, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

# Arrays that modules take and return; NumPy's only outside of jax.jit.
Array: TypeAlias = jax.Array | np.ndarray
# An array of NumPy or JAX; a function returns what it is given.
ArrayT = TypeVar('ArrayT', np.ndarray, jax.Array)

# The type of the computation that suits the devices (config.model.dtype).
AUTO = 'auto'


def _device() -> Any:
  """Returns a device of the current mesh, else JAX's default device or its platform."""
  mesh = jax.sharding.get_abstract_mesh()
  device = getattr(mesh, 'abstract_device', None)
  return device or jax.config.jax_default_device or jax.local_devices()[0]


def platform() -> str:
  """Returns 'cpu', 'gpu' or 'tpu': what the program that is traced is for."""
  device = _device()
  return getattr(device, 'platform', device)


def device_kind() -> str:
  """Returns the kind of device that the program is for, such as 'TPU v3'."""
  device = _device()
  return getattr(device, 'device_kind', device)


def resolve(dtype: Any, platform_: str | None = None) -> Any:
  """Returns the type of a computation: 'auto' is bfloat16 except on CPUs.

  `platform_` is by default `platform()`.
  """
  if dtype != AUTO:
    return dtype
  return 'float32' if (platform_ or platform()) == 'cpu' else 'bfloat16'


def result_of(module: nn.Module, x: Array) -> np.dtype:
  """Returns the type of a module's result on `x`, of its layers unless that is None."""
  dtype = resolve(module.dtype)
  return jnp.dtype(
    jnp.promote_types(x.dtype, module.param_dtype) if dtype is None else dtype
  )


def of(module: nn.Module, *fields: str) -> dict[str, Any]:
  """Returns a module's types and other `fields`, to pass to its submodules.

  A type may be given by name; None stays None, see flax.linen.Dense.
  """
  types = {'dtype': resolve(module.dtype), 'param_dtype': module.param_dtype}
  types = {k: None if v is None else jnp.dtype(v) for k, v in types.items()}
  return {**types, **{name: getattr(module, name) for name in fields}}
