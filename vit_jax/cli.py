"""What the command lines share: errors that a user can act on, in one line."""

from collections.abc import Callable
import pathlib
import sys
import traceback

_EXPECTED = (ValueError, FileNotFoundError, FloatingPointError, OSError)


def run(function: Callable[[], int | None]):
  """Runs a program, and exits with the status that it returns.

  An error that this package raises itself (a wrong flag, a missing folder) is
  printed without a traceback; any other keeps it.
  """
  try:
    sys.exit(function())
  except _EXPECTED as e:
    source = pathlib.Path(traceback.extract_tb(e.__traceback__)[-1].filename)
    if not {'vit_jax', 'configs'} & set(source.parts[-3:-1]):
      raise
    print(f'Error: {e}', file=sys.stderr)
    sys.exit(1)
