"""What the command lines share: quiet logs, errors in one line."""

from collections.abc import Callable
import importlib
import logging as python_logging
import os
import pathlib
import sys
import tempfile
import traceback

from absl import logging

_EXPECTED = (ValueError, FloatingPointError, OSError, ImportError)


def quiet():
  """Leaves out of the log what only concerns the libraries underneath.

  That is all below a warning, and what Orbax says of a failed save: hundreds of
  tracebacks from its threads, of an error that the caller gets anyway.
  """
  logging.set_verbosity(logging.WARNING)
  logging.get_absl_handler().addFilter(
    lambda record: 'orbax' not in record.pathname
  )
  python_logging.getLogger('asyncio').setLevel(python_logging.CRITICAL)


def load_tensorflow():
  """Imports TensorFlow without the notes that it prints and no setting hides.

  (Switching off oneDNN would hide them, and slow the input pipeline by a third.)
  """
  if 'tensorflow' in sys.modules:
    return
  stderr = os.dup(2)
  with tempfile.TemporaryFile() as notes:
    os.dup2(notes.fileno(), 2)
    try:
      tf = importlib.import_module('tensorflow')
      tf.config.set_visible_devices([], 'GPU')  # They are for JAX alone.
      tf.constant(0)
    except BaseException:
      notes.seek(0)
      os.write(stderr, notes.read())
      raise
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)


def run(function: Callable[[], int | None]):
  """Runs a program, and exits with the status that it returns.

  An error that this package raises itself (a wrong flag, a missing folder) is
  printed without a traceback; any other keeps it.
  """
  try:
    sys.exit(function())
  except KeyboardInterrupt:
    print('Interrupted.', file=sys.stderr)
    sys.exit(130)
  except _EXPECTED as e:
    source = pathlib.Path(traceback.extract_tb(e.__traceback__)[-1].filename)
    if not {'vit_jax', 'configs'} & set(source.parts[-3:-1]):
      raise
    print(f'Error: {e}', file=sys.stderr)
    sys.exit(1)
