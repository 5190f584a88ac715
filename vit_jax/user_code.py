"""Imports what a config names: tasks, evaluators and optimisers, also of users.

Configs and workdirs may come from anyone. A stored config is only trusted with the
modules of this package, those that the command line names, and those that this process
has imported already.
"""

import importlib
import importlib.util
import os
import sys
import types

from vit_jax import console

# Packages with tasks and evaluators.
_OWN = ('vit_jax.tasks.', 'vit_jax.evaluators.')


class UnknownModuleError(ValueError):
  """No module has the name in a config."""


class ForeignModuleError(ValueError):
  """A stored config names a module that is not in this package."""


def check_exists(module: str, setting: str, remedy: str) -> None:
  """Raises UnknownModuleError unless Python can find a module; imports nothing.

  Args:
    module: dotted name.
    setting: the key and its value, such as "task='my_task'".
    remedy: what to use instead.
  """
  package = module.partition('.')[0]
  if not all(name.isidentifier() for name in module.split('.')):
    raise UnknownModuleError(f'{setting} is unknown: {remedy}')
  if package != 'vit_jax' and os.getcwd() not in sys.path:
    # As with `python -m`; last, so that no file there shadows a package.
    sys.path.append(os.getcwd())
  if importlib.util.find_spec(package) is None:
    raise UnknownModuleError(
      f"{setting} is unknown: there is no module '{package}'; {remedy}"
    )


def import_module(module: str, setting: str, remedy: str) -> types.ModuleType:
  """Imports a module; for the arguments see `check_exists`.

  UnknownModuleError if there is none, ValueError if it fails.
  """
  check_exists(module, setting, remedy)
  try:
    return importlib.import_module(module)
  except Exception as e:
    missing = isinstance(e, ModuleNotFoundError) and e.name
    if missing and f'{module}.'.startswith(f'{missing}.'):
      raise UnknownModuleError(
        f"{setting} is unknown: there is no module '{missing}'; {remedy}"
      ) from e
    raise ValueError(
      f'{setting} cannot be imported: {type(e).__name__} at {console.error_location(e)}: {e}'
    ) from e


def import_class(module: str, name: str, setting: str, remedy: str) -> type:
  """Imports a class of a module, as `import_module`; ValueError if it has none."""
  imported = import_module(module, setting, remedy)
  if not isinstance(getattr(imported, name, None), type):
    raise ValueError(f'{setting}: the module has no class {name}; {remedy}')
  return getattr(imported, name)


def is_trusted(module: str) -> bool:
  """Returns whether a stored config may import a module."""
  return (
    module.startswith(_OWN) or module in console.named_tasks or module in sys.modules
  )


def check_trusted(module: str, use: str) -> None:
  """Raises ForeignModuleError if a stored config would import code of a stranger.

  `use` says what the module is for, such as 'its task'.
  """
  if not is_trusted(module):
    raise ForeignModuleError(
      f"{use} is the module '{module}', which is not in this package: if you trust "
      f'the code of that module, name it with --task={module} (in Python: import it '
      'first)'
    )
