"""Calls the optimisers and schedules of optax that a config names, 'optax:NAME'."""

from collections.abc import Callable, Mapping
import difflib
import inspect
from typing import Any, NamedTuple

import optax
import optax.contrib

from vit_jax.configs import common


class Setting(NamedTuple):
  """A key of a config that names a function, and the key of its arguments.

  A message begins with it: "optimizer='optax:lamb' with optimizer_args={'b1': 0.8}".
  """

  key: str
  name: str
  arguments_key: str
  arguments: Mapping[str, Any]

  def __str__(self) -> str:
    return (
      f"{self.key}='{self.name}' with {self.arguments_key}={dict(self.arguments)!r}"
    )

  def function(self) -> Callable[..., Any]:
    """Returns the function of optax; ValueError if optax has none of that name."""
    package, _, name = self.name.removeprefix(common.OPTAX).rpartition('.')
    module = optax.contrib if package else optax
    function = getattr(module, name, None)
    if inspect.isfunction(function):
      return function
    functions = dict(inspect.getmembers(module, inspect.isfunction))
    prefix = f'{common.OPTAX}contrib.' if package else common.OPTAX
    hint = 'see the API of optax'
    if near := difflib.get_close_matches(name, functions, n=1):
      hint = f"did you mean '{prefix}{near[0]}'?"
    raise ValueError(
      f"{self.key}='{self.name}' is not a function of optax: {hint} (config.{self.key})"
    )

  def call(self, function: Callable[..., Any], defaults: Mapping[str, Any]) -> Any:
    """Calls a function with the arguments; ValueError if they do not suit it."""
    try:
      return function(**{**defaults, **self.arguments})
    except (TypeError, ValueError, AttributeError) as e:
      names = ', '.join(inspect.signature(function).parameters)
      raise ValueError(
        f'{self}: {e}; the arguments are {names} (config.{self.arguments_key})'
      ) from e
