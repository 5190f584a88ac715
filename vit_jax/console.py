"""Shared by all commands: output, quiet logs, one-line errors."""

import ast
from collections.abc import Sequence
import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import logging as python_logging
import os
import pathlib
import pkgutil
import platform
import sys
import tempfile
import threading
import traceback
import types
from typing import Any, TextIO

from absl import flags as absl_flags, logging
import tqdm

_EXPECTED = (ValueError, FloatingPointError, OSError, ImportError)
# Modules of the extra `train`, which most commands import.
TRAIN_MODULES = (
  'array_record', 'clu', 'faster_coco_eval', 'google_crc32c',
  'importlib_resources', 'matplotlib', 'orbax', 'sklearn', 'tensorboard', 'tensorflow',
  'tensorflow_datasets', 'threadpoolctl',
)  # fmt: skip
_muted = False
# Modules of tasks that the command line names (--task), which a run may import.
named_tasks: set[str] = set()


def quiet():
  """Logs only warnings, and only those that concern users of this package.

  Also drops Orbax's log of a failed save: hundreds of tracebacks from its
  threads, for an error that the caller receives anyway.
  """
  logging.use_absl_handler()
  absl_flags.FLAGS.mark_as_parsed()  # Else absl says that nothing parsed them.
  logging.set_verbosity(logging.WARNING)
  logging.get_absl_handler().addFilter(lambda record: 'orbax' not in record.pathname)
  logging.get_absl_handler().setFormatter(
    python_logging.Formatter('%(levelname)s: %(message)s')
  )
  python_logging.getLogger('asyncio').setLevel(python_logging.CRITICAL)


@contextlib.contextmanager
def hidden_stderr():
  """Hides output of libraries on stderr inside a `with` block.

  This includes output of C++ code. If the block fails, the output is shown.
  """
  sys.stderr.flush()
  stderr = os.dup(2)
  with tempfile.TemporaryFile() as notes:
    os.dup2(notes.fileno(), 2)
    try:
      yield
    except BaseException:
      notes.seek(0)
      os.write(stderr, notes.read())
      raise
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)


def load_tensorflow():
  """Imports TensorFlow without the messages that no setting hides.

  (Switching off oneDNN would hide them, but slows the input pipeline by a
  third.)
  """
  if 'tensorflow' in sys.modules:
    return
  with hidden_stderr():
    tf = importlib.import_module('tensorflow')
    tf.config.set_visible_devices([], 'GPU')  # JAX alone uses the GPUs.
    tf.constant(0)


def avoid_absent_gpus():
  """Keeps JAX from loading CUDA on a machine without a GPU, where it prints errors.

  Does nothing if the environment names JAX_PLATFORMS.
  """
  spec = importlib.util.find_spec('jax_plugins')
  paths = spec.submodule_search_locations if spec else []
  cuda = any('cuda' in module.name for module in pkgutil.iter_modules(paths))
  if 'JAX_PLATFORMS' in os.environ or not cuda or _has_nvidia_driver():
    return
  print(
    'This machine has no NVIDIA driver (libcuda.so.1), so that JAX for CUDA '
    'finds no GPU: computing on the CPU. JAX_PLATFORMS=cpu hides this line.',
    file=sys.stderr,
  )
  os.environ['JAX_PLATFORMS'] = 'cpu'
  if 'jax' in sys.modules:
    sys.modules['jax'].config.update('jax_platforms', 'cpu')


def _has_nvidia_driver() -> bool:
  try:
    ctypes.CDLL('libcuda.so.1')
  except OSError:
    return False
  return True


def _is_first() -> bool:
  """Returns whether this is the first process, which alone prints."""
  jax = sys.modules.get('jax')
  return jax is None or jax.process_index() == 0


@contextlib.contextmanager
def muted():
  """Suppresses lines and bars inside a `with` block."""
  global _muted
  before, _muted = _muted, True
  try:
    yield
  finally:
    _muted = before


def kind_of_output(stream: TextIO | None = None) -> str:
  """Tells who reads what this process prints to a stream (sys.stderr).

  It is 'notebook' in the kernel of a notebook, of Jupyter or Colab; 'terminal'
  where the stream is one; else 'log', a file or a pipe.
  """
  ipython = sys.modules.get('IPython')
  shell = ipython and ipython.get_ipython()
  if shell and 'IPKernelApp' in shell.config:
    return 'notebook'
  return 'terminal' if (stream or sys.stderr).isatty() else 'log'


def bar(stream: TextIO | None = None, **kwargs) -> tqdm.tqdm:
  """Makes a progress bar: a widget in a notebook, text on a terminal.

  Args:
    stream: where a bar of text is printed to, by default sys.stderr.
    **kwargs: see tqdm.tqdm. By default the bar is disabled, and shows nothing,
      in a log, inside `muted`, and in all processes but the first.
  """
  kind = kind_of_output(stream)
  hidden = kind == 'log' or _muted or not _is_first()
  kwargs = {'disable': hidden, 'dynamic_ncols': True, 'file': stream, **kwargs}
  if kind != 'notebook':
    return tqdm.tqdm(**kwargs)
  # A notebook shows what is written to stderr as an error.
  kwargs['file'] = sys.stdout
  if not importlib.util.find_spec('ipywidgets'):
    return tqdm.tqdm(**kwargs)
  return importlib.import_module('tqdm.auto').tqdm(**kwargs)


def say(text: str):
  """Prints a line from the first process, without breaking progress bars."""
  if _is_first() and not _muted:
    tqdm.tqdm.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def waiting(text: str, every: float = 1.0, leave: bool = True):
  """Shows what a `with` block does, on a terminal with the time it has taken.

  The time is updated `every` so many seconds. `leave` tells whether a terminal
  still shows the line after the block.
  """
  done = threading.Event()

  def tick():
    while not done.wait(every):
      line.refresh()

  # To stdout: what libraries write to stderr may be hidden meanwhile.
  form = '{desc} ... {elapsed}'
  with bar(sys.stdout, desc=text, bar_format=form, leave=leave) as line:
    if line.disable:
      say(f'{text} ...')
    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
      yield
    finally:
      done.set()
      ticking.join()


def literal(text: str) -> Any:
  """Returns the value of a literal of Python; of other texts, the text."""
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return float(text) if text.lower() in ('nan', 'inf', '-inf') else text


def cache_folder() -> pathlib.Path:
  """Returns the folder for what may be made or fetched again.

  It is $VIT_JAX_CACHE, by default ~/.cache/vit_jax, and need not exist.
  """
  folder = os.environ.get('VIT_JAX_CACHE', '~/.cache/vit_jax')
  return pathlib.Path(folder).expanduser()


def compiled_folder() -> pathlib.Path:
  """Returns the folder for what JAX compiles, below the cache folder.

  Machines with the same home folder may have different processors, each of which
  has a folder of its own.
  """
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    names = ('model name', 'flags', 'CPU part', 'Features')
    cpu = sorted({line for line in lines if line.startswith(names)})
  except OSError:
    cpu = [platform.processor()]
  cpu = hashlib.sha256('\n'.join([platform.machine(), *cpu]).encode())
  return cache_folder() / 'compiled' / cpu.hexdigest()[:8]


def keep_compiled():
  """Makes JAX keep what it compiles, for the next start.

  JAX reads JAX_COMPILATION_CACHE_DIR when it is imported; what the user has set
  there, also '' for no folder, stays.
  """
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(compiled_folder()))


def size(count: float | None) -> str:
  """Formats bytes for people: '3.2 MiB', '2.09 GiB', 'unknown'."""
  if count is None:
    return 'unknown'
  if count < 2**30 / 10:
    return f'{count / 2**20:.1f} MiB'
  return f'{count / 2**30:.2f} GiB'


def needed(package: str, extra: str, what: str) -> types.ModuleType:
  """Imports a package of an extra; the error says how to install it."""
  try:
    return importlib.import_module(package)
  except ImportError as e:
    raise ImportError(_install(package, extra, what)) from e


def _install(package: str, extra: str, what: str) -> str:
  return (
    f"{what} needs {package.partition('.')[0]}: pip install -e '.[{extra}]' in "
    'the checkout of vit_jax'
  )


def machine_memory() -> int:
  """Returns the bytes of memory of this machine."""
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def duration(seconds: float) -> str:
  """Formats seconds for people: '48s', '3m 05s', '2h 07m', '3d 04h'."""
  seconds = round(seconds)
  if seconds < 60:
    return f'{seconds}s'
  if seconds < 3600:
    return f'{seconds // 60}m {seconds % 60:02}s'
  if seconds < 86400:
    return f'{seconds // 3600}h {seconds % 3600 // 60:02}m'
  return f'{seconds // 86400}d {seconds % 86400 // 3600:02}h'


def place_of(error: Exception, file: str | None = None) -> str:
  """Returns 'file:line' of the code (perhaps of a file) that raised an error."""
  if isinstance(error, SyntaxError):
    return f'{error.filename}:{error.lineno}'
  frame = [
    frame
    for frame in traceback.extract_tb(error.__traceback__)
    # Others are those of Python's import machinery.
    if frame.filename == file or not (file or frame.filename.startswith('<'))
  ][-1]
  return f'{frame.filename}:{frame.lineno}'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a table as text: the first column to the left, the others right."""
  lines = [[str(cell) for cell in row] for row in (header, *rows)]
  widths = [max(map(len, column)) for column in zip(*lines)]
  return '\n'.join(
    '  '.join(
      cell.rjust(width) if column else cell.ljust(width)
      for column, (cell, width) in enumerate(zip(line, widths))
    ).rstrip()
    for line in lines
  )


def run(command: str, argv: Sequence[str] | None = None):
  """Runs a module of vit_jax/commands, and exits with the status it returns.

  An error raised by this package (a wrong flag, a missing folder) is printed
  without a traceback; any other error with its traceback.
  """
  quiet()
  avoid_absent_gpus()
  keep_compiled()
  try:
    module = importlib.import_module(f'vit_jax.commands.{command}')
    status = module.main(sys.argv[1:] if argv is None else argv)
    sys.stdout.flush()
    sys.exit(status)
  except BrokenPipeError:  # What reads the output, such as `head`, has enough.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)  # 128 and the number of SIGPIPE, as of other programs.
  except KeyboardInterrupt as e:
    print(str(e) or 'Interrupted.', file=sys.stderr)
    sys.exit(130)
  except Exception as e:
    frame = traceback.extract_tb(e.__traceback__)[-1]
    source = pathlib.Path(frame.filename)
    ours = {'vit_jax', 'configs'} & set(source.parts[-4:-1])
    if isinstance(e, ModuleNotFoundError) and e.name in TRAIN_MODULES:
      reason = _install(e.name, 'train', f'vit_jax {command}')
    elif isinstance(e, _EXPECTED) and ours:
      reason = f'{e}'
    elif (source.name, frame.name) == ('xla_bridge.py', 'backends'):
      reason = _no_device(e)
    else:
      raise
    print(f'Error: {reason}', file=sys.stderr)
    sys.exit(1)


def _no_device(error):
  """Describes an error of JAX that finds no device of the platform it is given."""
  wanted = sys.modules['jax'].config.jax_platforms
  lines = str(error).splitlines()
  cause = f' ({lines[0]})' if lines else ''
  return (
    f'JAX_PLATFORMS={wanted}: JAX finds no such device on this machine{cause}: '
    'install JAX for it, or unset JAX_PLATFORMS'
  )
