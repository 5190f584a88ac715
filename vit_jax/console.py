"""Console output of all commands: logs, progress, messages."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import io
import logging as python_logging
import os
import pathlib
import pkgutil
import platform
import re
import signal
import sys
import threading
import traceback
import types
from typing import Any, TextIO

from absl import flags as absl_flags, logging
import tqdm

_ROOT = pathlib.Path(__file__).parents[1]  # A checkout, or site-packages.

# Modules of the extra `train`, which most commands need.
TRAIN_MODULES = (
  'array_record',
  'clu',
  'faster_coco_eval',
  'importlib_resources',
  'matplotlib',
  'orbax',
  'sklearn',
  'tensorboard',
  'tensorflow',
  'tensorflow_datasets',
)
# Characters that change what a terminal shows elsewhere, and bytes of file names that
# are not UTF-8: C0 except tab and newline, DEL, C1, controls of the writing direction.
_CONTROLS = re.compile(
  '[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]'
)
# Parts of the paths of Orbax and of clu's writer thread.
_RAISING = ('orbax', 'clu/asynclib')
_KERAS_CALLBACK = 'tensorboard.plugins.hparams._keras'
_muted = False
_logged: set[str] | None = None  # See `muted`.
# Modules of tasks that --task allows a run to import.
named_tasks: set[str] = set()


def printable(text: str) -> str:
  """Returns a text with visible escapes, such as \\x1b, for control characters.

  Class names, captions and file names of strangers may have such characters. Tabs and
  newlines stay.
  """
  return _CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
  """Returns the visible escape of a matched character."""
  return match[0].encode('unicode_escape').decode('ascii')


def prepare_streams() -> None:
  """Opens standard streams that are closed, and escapes what stdout cannot encode."""
  for descriptor, name in enumerate(('stdin', 'stdout', 'stderr')):
    try:
      os.fstat(descriptor)
    except OSError:
      # A file gets the lowest free number, which is this one.
      os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if getattr(sys, name) is None:
      mode = 'w' if descriptor else 'r'
      setattr(sys, name, open(os.devnull, mode))
  if isinstance(sys.stdout, io.TextIOWrapper):
    # It fails if the file was replaced by a pipe after it was opened.
    with contextlib.suppress(OSError):
      sys.stdout.reconfigure(errors='backslashreplace')


class _Formatter(python_logging.Formatter):
  """Formats records of the log for a terminal."""

  def format(self, record: python_logging.LogRecord) -> str:
    return printable(super().format(record))


def quiet() -> None:
  """Limits logs to warnings; drops what libraries log of errors that they raise."""
  logging.use_absl_handler()
  absl_flags.FLAGS.mark_as_parsed()  # Else absl warns that they are not.
  logging.set_verbosity(logging.WARNING)
  handler = logging.get_absl_handler()
  handler.addFilter(_is_not_raised)
  handler.setFormatter(_Formatter('%(levelname)s: %(message)s'))
  python_logging.getLogger('asyncio').setLevel(python_logging.CRITICAL)
  # It has its own handler.
  python_logging.getLogger('huggingface_hub').propagate = False
  sys.unraisablehook = functools.partial(_show_unraisable, sys.unraisablehook)


def _is_not_raised(record: python_logging.LogRecord) -> bool:
  """Returns whether a record is not about an error that its library also raises."""
  return not any(part in record.pathname for part in _RAISING)


def _show_unraisable(show: Callable, unraisable: 'sys.UnraisableHookArgs') -> None:
  """Shows an error in a callback, unless it follows from one that Orbax raises.

  Orbax raises the first error of TensorStore, and closes the event loop of the others.
  Python drops a Ctrl-C that arrives in a callback, such as JAX's at each garbage
  collection: it is sent again, once the callback has ended.
  """
  if isinstance(unraisable.exc_value, KeyboardInterrupt):
    main_thread = threading.main_thread().ident
    threading.Timer(0.1, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
  elif str(unraisable.exc_value) != 'Event loop is closed':
    show(unraisable)


def interrupt_on_signals() -> None:
  """Lets SIGTERM and SIGHUP act like Ctrl-C, after which no temporary files are left.

  SIGHUP, of a terminal that was closed, stays ignored if it was, as by nohup.
  """
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.default_int_handler)


def exit_at_once(status: int) -> None:
  """Ends this process without Python's shutdown.

  The shutdown waits for threads, and crashes while XLA compiles or computes.
  """
  with contextlib.suppress(OSError):
    sys.stdout.flush()
    sys.stderr.flush()
  os._exit(status)


@contextlib.contextmanager
def hidden_stderr() -> Iterator[None]:
  """Hides what C++ libraries print to stderr inside a `with` block.

  TensorFlow ignores TF_CPP_MIN_LOG_LEVEL for its first lines, and libtpu for some.
  """
  sys.stderr.flush()
  stderr = os.dup(2)
  with open(os.devnull, 'w') as null:
    os.dup2(null.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(stderr, 2)
    os.close(stderr)


def import_tensorflow() -> types.ModuleType:
  """Imports TensorFlow; Keras, a third of its import, only once tf.keras is used."""
  # Triton, which comes with PyTorch, crashes the interpreter if it is imported after
  # TensorFlow (triton 3.7, TensorFlow 2.21), as timm and transformers do.
  if 'tensorflow' not in sys.modules and importlib.util.find_spec('triton'):
    importlib.import_module('triton')
  # TensorBoard's writers would use it to define this callback.
  sys.modules.setdefault(
    _KERAS_CALLBACK, types.SimpleNamespace(Callback=_make_keras_callback)
  )
  name = 'TF_USE_LEGACY_KERAS'  # With '1', only tf_keras is imported, where it exists.
  if name in os.environ or importlib.util.find_spec('tf_keras'):
    return importlib.import_module('tensorflow')
  os.environ[name] = '1'
  try:
    return importlib.import_module('tensorflow')
  finally:
    os.environ.pop(name, None)  # Another thread may import it too.


def _make_keras_callback(*args: Any, **kwargs: Any) -> Any:
  """Makes TensorBoard's callback for Keras, `hparams.api.KerasCallback`."""
  sys.modules.pop(_KERAS_CALLBACK, None)
  return importlib.import_module(_KERAS_CALLBACK).Callback(*args, **kwargs)


@functools.cache
def load_tensorflow() -> None:
  """Imports TensorFlow silently, and leaves the GPUs to JAX."""
  with hidden_stderr():
    tf = import_tensorflow()
    with contextlib.suppress(RuntimeError):  # The caller has initialised it.
      tf.config.set_visible_devices([], 'GPU')
    tf.constant(0)


def use_huge_pages() -> None:
  """Restarts the process of a command with huge pages, if Linux offers them.

  On CPUs, XLA allocates the activations of every update anew. In pages of 4 KiB, mapping
  them takes a quarter of the time (docs/speed.md). glibc reads the setting at the start of
  a process only. Does nothing if GLIBC_TUNABLES is set or the process is another program.
  """
  program = pathlib.PurePath(sys.orig_argv[1]).name if sys.orig_argv[1:] else ''
  if program == '-m':
    program = sys.orig_argv[2].split('.')[0]
  if program not in ('vit_jax', 'benchmarks') or 'GLIBC_TUNABLES' in os.environ:
    return
  setting = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
  if setting.exists() and '[madvise]' in setting.read_text():
    os.environ['GLIBC_TUNABLES'] = 'glibc.malloc.hugetlb=1'
    os.execv(sys.executable, sys.orig_argv)


def avoid_absent_gpus(quiet: bool = False) -> None:
  """Sets JAX_PLATFORMS=cpu if JAX for CUDA is installed but there is no NVIDIA driver.

  JAX would print a traceback. Says so unless `quiet`. Does nothing if JAX_PLATFORMS is set.
  """
  spec = importlib.util.find_spec('jax_plugins')
  paths = spec.submodule_search_locations if spec else []
  cuda = any('cuda' in module.name for module in pkgutil.iter_modules(paths))
  if 'JAX_PLATFORMS' in os.environ or not cuda:
    return
  try:
    ctypes.CDLL('libcuda.so.1')
  except OSError:
    if not quiet:
      log_error(
        'No NVIDIA driver (libcuda.so.1) found: computing on the CPU. Set '
        'JAX_PLATFORMS=cpu to hide this line.'
      )
    os.environ['JAX_PLATFORMS'] = 'cpu'
    if 'jax' in sys.modules:
      sys.modules['jax'].config.update('jax_platforms', 'cpu')


def _is_first() -> bool:
  """Returns whether this is process 0, the only one that prints."""
  jax = sys.modules.get('jax')
  # process_index would start the devices of a command that needs none.
  return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def muted(logged: set[str] | None = None) -> Iterator[None]:
  """Suppresses lines and bars inside a `with` block.

  With `logged`, a set that several blocks may share, `log` prints a text with a `key` that
  is not in the set, and adds it.
  """
  global _muted, _logged
  before = _muted, _logged
  _muted, _logged = True, logged
  try:
    yield
  finally:
    _muted, _logged = before


def kind_of_output(stream: TextIO | None = None) -> str:
  """Returns where a stream (default: sys.stderr) is shown.

  'notebook' in a Jupyter or Colab kernel, 'terminal', or 'log' (a file or pipe).
  """
  ipython = sys.modules.get('IPython')
  shell = ipython and ipython.get_ipython()
  if shell and 'IPKernelApp' in shell.config:
    return 'notebook'
  return 'terminal' if (stream or sys.stderr).isatty() else 'log'


def bar(stream: TextIO | None = None, **kwargs: Any) -> tqdm.tqdm:
  """Returns a progress bar: a widget in a notebook, text on a terminal.

  By default it is disabled in a log, inside `muted`, and in all processes but the
  first. `stream` (default: sys.stderr) is used for text; `kwargs` go to tqdm.tqdm.
  """
  kind = kind_of_output(stream)
  if kwargs.get('desc'):
    kwargs['desc'] = printable(kwargs['desc'])
  hidden = kind == 'log' or _muted or not _is_first()
  kwargs = {'disable': hidden, 'dynamic_ncols': True, 'file': stream, **kwargs}
  if kind != 'notebook':
    return tqdm.tqdm(**kwargs)
  kwargs['file'] = sys.stdout  # A notebook shows stderr as an error.
  if not importlib.util.find_spec('ipywidgets'):
    return tqdm.tqdm(**kwargs)
  return importlib.import_module('tqdm.auto').tqdm(**kwargs)


def log(text: str, key: str = '') -> None:
  """Prints a `printable` line from process 0 without breaking progress bars.

  For `key` see `muted`.
  """
  is_new = False
  if key and _logged is not None and key not in _logged:
    _logged.add(key)
    is_new = True
  if _is_first() and (is_new or not _muted):
    tqdm.tqdm.write(printable(text))
    sys.stdout.flush()


def log_error(text: str) -> None:
  """Prints a `printable` line to stderr, from any process."""
  print(printable(text), file=sys.stderr, flush=True)


def notify(text: str) -> None:
  """Prints a `printable` line that is not a result to stderr, from process 0."""
  if _is_first() and not _muted:
    log_error(text)


@contextlib.contextmanager
def status(text: str, leave: bool = True) -> Iterator[None]:
  """Shows what a `with` block does; on a terminal also the elapsed time.

  `leave`: whether the line stays afterwards.
  """
  done = threading.Event()

  def tick() -> None:
    while not done.wait(1):
      line.refresh()

  # To stdout, since stderr may be hidden meanwhile.
  form = '{desc} ... {elapsed}'
  with bar(sys.stdout, desc=text, bar_format=form, leave=leave) as line:
    if line.disable:
      log(f'{text} ...')
    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
      yield
    finally:
      done.set()
      ticking.join()


def cache_folder() -> pathlib.Path:
  """Returns $VIT_JAX_CACHE, by default ~/.cache/vit_jax; it need not exist."""
  folder = os.environ.get('VIT_JAX_CACHE', '~/.cache/vit_jax')
  return pathlib.Path(folder).expanduser()


def compiled_folder() -> pathlib.Path:
  """Returns JAX's compilation cache for this kind of processor.

  Machines that share a home folder may have different processors.
  """
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    names = ('model name', 'flags', 'CPU part', 'Features')
    features = sorted({line for line in lines if line.startswith(names)})
  except OSError:
    features = [platform.processor()]
  digest = hashlib.sha256('\n'.join([platform.machine(), *features]).encode())
  return cache_folder() / 'compiled' / digest.hexdigest()[:8]


def keep_compiled() -> None:
  """Sets JAX_COMPILATION_CACHE_DIR, which JAX reads when imported, unless it is set."""
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(compiled_folder()))


def size(count: float | None) -> str:
  """Formats bytes for people: '3.2 MiB', '2.09 GiB', 'unknown'."""
  if count is None:
    return 'unknown'
  if count < 2**30 / 10:
    return f'{count / 2**20:.1f} MiB'
  return f'{count / 2**30:.2f} GiB'


def pluralize(number: int, noun: str) -> str:
  """Formats a number with a noun: '1 seed', '2 processes', '1,000 images'."""
  if number == 1:
    return f'1 {noun}'
  ending = 'es' if noun.endswith('s') else 's'
  return f'{number:,} {noun}{ending}'


def require(package: str, extra: str, user: str) -> types.ModuleType:
  """Imports a package of an extra, which `user` needs; the error says how to install it."""
  try:
    return importlib.import_module(package)
  except ImportError as e:
    raise ImportError(install(package, extra, user)) from e


def install(package: str, extra: str, user: str) -> str:
  """Returns the message for a missing package of an extra."""
  module = package.partition('.')[0]
  if (_ROOT / 'setup.py').exists():
    target = f"-e '.[{extra}]' in the checkout of vit_jax"
  else:
    # pip leaves the installed vit_jax unchanged and adds the packages of the extra.
    target = f"'vit_jax[{extra}]'"
  return f'{user} needs {module}: pip install {target}'


def machine_memory() -> int:
  """Returns the memory of this machine in bytes."""
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


def error_location(error: Exception, file: str | None = None) -> str:
  """Returns 'file:line' where an error was raised, within `file` if given."""
  if isinstance(error, SyntaxError):
    return f'{error.filename}:{error.lineno}'
  location = ''
  for frame in traceback.extract_tb(error.__traceback__):
    if file:
      is_wanted = frame.filename == file
    else:
      # '<' begins the names of Python's import machinery.
      is_wanted = not frame.filename.startswith('<')
    if is_wanted:
      location = f'{frame.filename}:{frame.lineno}'
  return location


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
  """Returns a table as text: first column left-aligned, the others right-aligned."""
  cells = [list(map(str, row)) for row in (header, *rows)]
  return '\n'.join('  '.join(row).rstrip() for row in padded(cells))


def padded(rows: Sequence[Sequence[str]]) -> list[list[str]]:
  """Pads the cells of a table to equal widths: the first column on the right."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  padded_rows = []
  for first, *numbers in rows:
    row = [first.ljust(widths[0])]
    row += [cell.rjust(width) for cell, width in zip(numbers, widths[1:])]
    padded_rows.append(row)
  return padded_rows
