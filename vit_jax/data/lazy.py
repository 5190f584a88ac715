"""TensorFlow and TFDS, imported when first used.

Models, weights and exports then need neither:

  from vit_jax.data.lazy import tf
"""

from collections.abc import Callable
import functools
import importlib
import types
from typing import TYPE_CHECKING, Any

from vit_jax import console


class _Lazy(types.ModuleType):
  """A module that is imported when one of its attributes is read."""

  def __getattr__(self, name: str) -> Any:
    console.load_tensorflow()
    return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:
  import tensorflow as tf
  import tensorflow_datasets as tfds
else:
  tf, tfds = _Lazy('tensorflow'), _Lazy('tensorflow_datasets')


def no_autograph(function: Callable) -> Callable:
  """Keeps AutoGraph from rewriting a function without control flow on tensors.

  Rewriting takes half a second at the start of a run and of each evaluation.
  """

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    return tf.autograph.experimental.do_not_convert(function)(*args, **kwargs)

  setattr(call, 'autograph_info__', {})  # noqa: B010 - Marks what AutoGraph leaves alone.
  return call
