"""Calls the optimisers and schedules that a config names, 'MODULE:NAME'.

They are functions of optax, such as 'optax:lamb', or of a module of the user.
"""

from collections.abc import Callable, Mapping
import difflib
import inspect
from typing import Any, NamedTuple

from vit_jax import user_code

HINT = (
  "use a function of optax, such as 'optax:lamb' or 'optax.contrib:muon', or one of a "
  "module that Python finds from the current folder or PYTHONPATH, 'my_module:NAME'"
)


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
    """Returns the function; ValueError if its module has none of that name."""
    module_name, _, name = self.name.partition(':')
    setting = f"{self.key}='{self.name}'"
    module = user_code.import_module(
      module_name, setting, f'{HINT} (config.{self.key})'
    )
    function = getattr(module, name, None)
    if callable(function):
      return function
    functions = dict(inspect.getmembers(module, inspect.isfunction))
    hint = HINT
    if near := difflib.get_close_matches(name, functions, n=1):
      hint = f"did you mean '{module_name}:{near[0]}'?"
    raise ValueError(
      f'{setting} is not a function of that module: {hint} (config.{self.key})'
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
