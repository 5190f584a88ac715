"""Checks the shapes of arguments and results while the tests run."""

import beartype
import jaxtyping

# These modules annotate arrays with their shapes.
MODULES = (
  'vit_jax.layers',
  'vit_jax.models_bit',
  'vit_jax.models_detr',
  'vit_jax.models_eomt',
  'vit_jax.models_igpt',
  'vit_jax.models_lit',
  'vit_jax.models_mixer',
  'vit_jax.models_resnet',
  'vit_jax.models_vit',
)


def check_imports():
  """Decorates the functions of these modules with `checked` when they are imported."""
  jaxtyping.install_import_hook(MODULES, 'tests.shapes.checked')
  enable(False)


def enable(is_enabled):
  """Switches the checks, which make tracing a model a quarter slower, on or off."""
  jaxtyping.config.update('jaxtyping_disable', not is_enabled)


def checked(function):
  """Checks annotations of arrays; mypy checks the others."""
  if function.__name__ == '__init__':  # JAX makes pytrees of other things too.
    return function
  arrays = {}
  for name, annotation in function.__annotations__.items():
    if 'jaxtyping' in repr(annotation):
      arrays[name] = annotation
  function.__annotations__ = arrays
  return beartype.beartype(function)
