"""Shared by the command lines: output, quiet logs, flags, one-line errors."""

import argparse
import ast
from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import difflib
import glob
import importlib
import importlib.metadata
import importlib.util
import logging as python_logging
import os
import pathlib
import re
import sys
import tempfile
import threading
import traceback
from typing import TextIO

from absl import flags
from absl import logging
import tqdm

_EXPECTED = (ValueError, FloatingPointError, OSError, ImportError)
_muted = False
# --config.task_options.NAME=VALUE, also in a config within the config.
_OPTION = re.compile(
  r'--?config\.((?:\w+\.)*)task_options\.(\w+)=(.*)', re.DOTALL
)
# --config.model.NAME=VALUE, likewise; booleans need no value.
_MODEL_OPTION = re.compile(
  r'--?(no)?config\.((?:\w+\.)*)model\.([\w.]+)(?:=(.*))?', re.DOTALL
)
# Length of a run or of its warm-up.
_LENGTH = re.compile(r'--?config\.((?:\w+\.)*(?:total|warmup))_(steps|epochs)=')
# --config.KEY=None, which absl would read as text or refuse.
_NONE = re.compile(r'--?config\.((?!.*task_options\.)[\w.]+)=None')


def quiet():
  """Logs only warnings, and only those that concern users of this package.

  Also drops Orbax's log of a failed save: hundreds of tracebacks from its
  threads, for an error that the caller receives anyway.
  """
  logging.use_absl_handler()
  logging.set_verbosity(logging.WARNING)
  logging.get_absl_handler().addFilter(
    lambda record: 'orbax' not in record.pathname
  )
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


def avoid_libtpu():
  """Keeps JAX from loading libtpu on a machine without a TPU.

  libtpu may be installed for vit_jax.plan only. JAX would load it all the same,
  print errors, and make the profiler crash.
  """
  if (
    'JAX_PLATFORMS' in os.environ
    or importlib.util.find_spec('libtpu') is None
    or glob.glob('/dev/accel*')
    or glob.glob('/dev/vfio/*')
    or any(
      name.startswith(('jax_cuda', 'jax-cuda', 'jax_rocm', 'jax-rocm'))
      for name in importlib.metadata.packages_distributions()
    )
  ):
    return
  import jax

  jax.config.update('jax_platforms', 'cpu')


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
  """Tells who reads what this process prints.

  Args:
    stream: where it is printed to, by default sys.stderr.

  Returns:
    'notebook' in the kernel of a notebook, of Jupyter or Colab; 'terminal'
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

  Args:
    text: description of the work in the `with` block.
    every: seconds between updates of the elapsed time.
    leave: whether a terminal still shows the line after the block.
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


def size(count: float | None) -> str:
  """Formats bytes for people: '3.2 MiB', '2.09 GiB', 'unknown'."""
  if count is None:
    return 'unknown'
  if count < 2**30 / 10:
    return f'{count / 2**20:.1f} MiB'
  return f'{count / 2**30:.2f} GiB'


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


def parser(module: str, text: str) -> argparse.ArgumentParser:
  """Returns the parser of a command, with a text as its description.

  Args:
    module: name of the module, as given to `python -m`.
    text: docstring of the module.
  """
  return argparse.ArgumentParser(
    prog=f'python -m {module}',
    description=text,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )


_PROCESS_FLAGS = ('distributed', 'coordinator', 'num_processes', 'process_id')


def add_model_flags(args: argparse.ArgumentParser, required: bool = True):
  """Adds the flags that name a model: --workdir or --weights, and --step.

  Args:
    args: parser of a command.
    required: whether the command needs a model.
  """
  given = args.add_mutually_exclusive_group(required=required)
  given.add_argument('--workdir', help='folder of the run')
  given.add_argument(
    '--weights', help='file or folder of weights, in place of a run'
  )
  args.add_argument(
    '--step', type=int, help='step of the checkpoint (the newest)'
  )


def check_model_flags(args: argparse.Namespace):
  """Checks the values of the flags of `add_model_flags`.

  Raises:
    ValueError: if a step is given without a run.
  """
  if args.step is not None and not args.workdir:
    raise ValueError(
      f'--step={args.step} selects a checkpoint of a run: give --workdir=RUN, or '
      'leave out --step'
    )


def check_output(name: str, path: str | None):
  """Checks that a file can be written: its folder exists, and it is none.

  Args:
    name: name of the flag, without its dashes.
    path: value of the flag; None for no file.

  Raises:
    ValueError: if it cannot.
  """
  from etils import epath  # Imported late, so that --help is fast.

  if path and epath.Path(path).is_dir():
    raise ValueError(f"{name}='{path}' is a folder: name a file (--{name})")
  if path and not epath.Path(path).parent.is_dir():
    raise ValueError(
      f"{name}='{path}' is in no folder that exists: make the folder, or give "
      f'another path (--{name})'
    )


def define_process_flags(values: flags.FlagValues):
  """Defines the flags of a run of several processes."""
  flags.DEFINE_boolean(
    'distributed',
    True,
    'Find the other hosts of a TPU pod or a SLURM job; --nodistributed runs on '
    'this host only.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'coordinator',
    None,
    'HOST:PORT of process 0, for a run of several processes.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'num_processes',
    None,
    'With --coordinator: number of processes.',
    flag_values=values,
  )
  flags.DEFINE_integer(
    'process_id',
    None,
    'With --coordinator: number of this process, from 0.',
    flag_values=values,
  )


def process_flags(values: flags.FlagValues) -> dict:
  """Returns the arguments of vit_jax.scale.processes.connect."""
  return {name: values[name].value for name in _PROCESS_FLAGS}


def parse_flags(argv: list[str], flag_values: flags.FlagValues) -> list[str]:
  """Parses flags, including `config`; raises ValueError for wrong flags.

  A config file that does not exist is looked up among the configs installed
  with the package.

  Returns:
    The arguments that are not flags.
  """
  argv, nones = _without_nones(_join_values(argv))
  for i, arg in enumerate(argv):
    name, equals, value = arg.partition('=')
    path, colon, argument = value.partition(':')
    if name.lstrip('-') == 'config' and equals and not os.path.exists(path):
      installed = os.path.join(
        importlib.import_module('vit_jax.configs').__path__[0],
        os.path.basename(path),
      )
      if not os.path.exists(installed):
        known = sorted(os.listdir(os.path.dirname(installed)))
        raise ValueError(
          f"config='{path}' does not exist; the package has "
          f'{[k for k in known if k.endswith(".py") and k[0] != "_"]}'
        )
      argv[i] = f'{name}={installed}{colon}{argument}'
  options = [arg for arg in argv if _OPTION.match(arg) or _model_option(arg)]
  argv = [arg for arg in argv if arg not in options]
  whole = sys.argv  # config_flags looks up the flags of a config here.
  try:
    sys.argv = argv
    rest = flag_values(argv)
    _set_options(flag_values['config'].value, options)
    _set_to_none(flag_values['config'].value, nones + _overruled(argv))
    return rest
  except (AttributeError, KeyError) as e:  # The config has no such key.
    hint = re.search(r'Did you mean "(.*?)" instead of "(.*?)"', str(e))
    name = hint[2] if hint else str(e).strip('"\'')
    near = [hint[1]] if hint else _near(name)
    reason = f"config has no key '{name}'" + (
      f": did you mean '{near[0]}'?" if near else ''
    )
    help_ = (
      'see --help; the keys of a config are in configs/common.py, those of '
      'config.model in configs/models.py, those of config.task_options in the '
      'file of the task'
    )
  except (flags.Error, TypeError) as e:
    # An error in a config file arrives with its whole traceback as text.
    lines = str(e).strip().splitlines()
    reason = lines[-1] if 'Traceback' in ''.join(lines) else ' '.join(lines)
    reason = reason.removeprefix('ValueError: ')
    help_ = 'see --help'
  finally:
    sys.argv = whole
  raise ValueError(f'{reason} ({help_})')


def _near(name):
  """Returns keys of a config that a name may mean, the likeliest first."""
  options = importlib.import_module('vit_jax.configs.models').ALL_OPTIONS
  # Without a close match: keys that contain the name, such as base_lr for lr.
  keys = importlib.import_module('vit_jax.configs.common').get_config()
  return difflib.get_close_matches(
    name, [option.split('.')[-1] for option in options], n=1
  ) or [key for key in keys if name in key]


def _model_option(arg):
  """Parses the flag of a model's option, which the config may lack.

  Returns:
    (path to the model, option, value); None for other flags.

  Raises:
    ValueError: if the value has another type than the option's default.
  """
  match = _MODEL_OPTION.fullmatch(arg)
  options = importlib.import_module('vit_jax.configs.models').ALL_OPTIONS
  if not match or match[3] not in options:
    return None
  negated, path, option, value = match.groups()
  default = options[option]
  if isinstance(default, bool):
    words = {'true': True, '1': True, 'false': False, '0': False}
    value = str(not negated if value is None else value).lower()
    if value not in words:
      raise ValueError(
        f'model.{option}={value} must be True or False (config.model.{option})'
      )
    value = words[value]
  elif default is None and value is not None:
    with contextlib.suppress(ValueError, SyntaxError):
      value = ast.literal_eval(value)
  elif isinstance(default, float):
    try:
      value = float(value)
    except (TypeError, ValueError):
      raise ValueError(
        f'model.{option}={value} must be a number (config.model.{option})'
      ) from None
  return path, option, '' if value is None else value


def _set_options(config, options):
  """Sets options of a task or a model, which the config may lack."""
  for option in options:
    found = _model_option(option)
    if found:
      path, name, value = found
      holder = config
      for part in [*path.split('.')[:-1], 'model', *name.split('.')[:-1]]:
        holder = holder[part]
      with holder.unlocked(), holder.ignore_type():
        holder[name.split('.')[-1]] = value
      continue
    path, key, value = _OPTION.match(option).groups()
    holder = config
    for part in path.split('.')[:-1]:
      holder = holder[part]
    with holder.unlocked():
      if not holder.get('task_options'):
        holder.task_options = {}
      with holder.task_options.unlocked(), holder.task_options.ignore_type():
        holder.task_options[key] = value


def _without_nones(argv):
  """Returns the flags except --config.KEY=None, and the keys set to None."""
  last = {arg.partition('=')[0].lstrip('-'): arg for arg in argv}
  nones = [m[1] for m in map(_NONE.fullmatch, last.values()) if m]
  return [arg for arg in argv if not _NONE.fullmatch(arg)], nones


def _overruled(argv):
  """Returns the epochs keys whose steps key is given here, and vice versa.

  A length on the command line replaces that of the config file.
  """
  given = [m.groups() for m in map(_LENGTH.match, argv) if m]
  other = {'steps': 'epochs', 'epochs': 'steps'}
  return [
    f'{name}_{other[unit]}'
    for name, unit in given
    if (name, other[unit]) not in given
  ]


def _set_to_none(config, keys):
  for key in keys:
    *parts, name = key.split('.')
    holder = config
    for part in parts:
      holder = holder[part]
    _ = holder[name]  # Raises KeyError with suggestions if it is missing.
    with holder.ignore_type():
      holder[name] = None


def _join_values(argv):
  """Turns '--config.KEY VALUE' into '--config.KEY=VALUE'.

  For a key of any type, absl would read the first form as 'true'.
  """
  joined = []
  for arg in argv:
    last = joined[-1] if joined else ''
    if (
      last.lstrip('-').startswith('config.')
      and last.startswith('-')
      and '=' not in last
      and not arg.startswith('-')
    ):
      joined[-1] = f'{last}={arg}'
    else:
      joined.append(arg)
  return joined


def run(function: Callable[[], int | None]):
  """Runs a program, and exits with the status that it returns.

  An error raised by this package (a wrong flag, a missing folder) is printed
  without a traceback; any other error with its traceback.
  """
  try:
    sys.exit(function())
  except KeyboardInterrupt as e:
    print(str(e) or 'Interrupted.', file=sys.stderr)
    sys.exit(130)
  except _EXPECTED as e:
    source = pathlib.Path(traceback.extract_tb(e.__traceback__)[-1].filename)
    if not {'vit_jax', 'configs'} & set(source.parts[-3:-1]):
      raise
    print(f'Error: {e}', file=sys.stderr)
    sys.exit(1)
