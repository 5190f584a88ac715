"""What the command lines share: words for people, quiet logs, errors in one line."""

from collections.abc import Callable
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

from absl import flags
from absl import logging
import tqdm

_EXPECTED = (ValueError, FloatingPointError, OSError, ImportError)
_muted = False
# --config.task_options.NAME=VALUE, also of a config within the config.
_OPTION = re.compile(
  r'--?config\.((?:\w+\.)*)task_options\.(\w+)=(.*)', re.DOTALL
)
# --config.model.NAME=VALUE, likewise; without a value for what is true or false.
_MODEL_OPTION = re.compile(
  r'--?(no)?config\.((?:\w+\.)*)model\.([\w.]+)(?:=(.*))?', re.DOTALL
)
# The length of a run or of its warm-up.
_LENGTH = re.compile(r'--?config\.((?:\w+\.)*(?:total|warmup))_(steps|epochs)=')
# --config.KEY=None, which absl would read as a text, or refuse.
_NONE = re.compile(r'--?config\.((?!.*task_options\.)[\w.]+)=None')


def quiet():
  """Leaves out of the log what only concerns the libraries underneath.

  That is all below a warning, and what Orbax says of a failed save: hundreds of
  tracebacks from its threads, of an error that the caller gets anyway.
  """
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
  """Hides what libraries write to stderr inside a `with` block.

  Also what is written past Python; if the block fails it is shown.
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
  """Imports TensorFlow without the notes that it prints and no setting hides.

  (Switching off oneDNN would hide them, and slow the input pipeline by a third.)
  """
  if 'tensorflow' in sys.modules:
    return
  with hidden_stderr():
    tf = importlib.import_module('tensorflow')
    tf.config.set_visible_devices([], 'GPU')  # They are for JAX alone.
    tf.constant(0)


def avoid_libtpu():
  """Keeps JAX from libtpu where there is no TPU.

  It may be installed for vit_jax.plan alone. JAX loads it all the same, and then
  it complains, and the profiler crashes beside it.
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
  """Tells the process that speaks; without JAX there is but one."""
  jax = sys.modules.get('jax')
  return jax is None or jax.process_index() == 0


@contextlib.contextmanager
def muted():
  """Shows nothing inside a `with` block, neither lines nor bars."""
  global _muted
  before, _muted = _muted, True
  try:
    yield
  finally:
    _muted = before


def is_muted() -> bool:
  """Tells whether `muted` is in force."""
  return _muted


def say(text: str):
  """Prints a line, from the first process only, around a bar if one is shown."""
  if _is_first() and not _muted:
    tqdm.tqdm.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def waiting(text: str, every: float = 1.0):
  """Says what takes long inside a `with` block; on a terminal, how long so far.

  Args:
    text: what is done.
    every: seconds after which the time is shown anew.
  """
  # To stdout: what libraries write to stderr may be hidden meanwhile.
  if not _is_first() or _muted or not sys.stdout.isatty():
    say(f'{text} ...')
    yield
    return
  done = threading.Event()

  def tick():
    while not done.wait(every):
      line.refresh()

  with tqdm.tqdm(
    desc=text,
    bar_format='{desc} ... {elapsed}',
    file=sys.stdout,
    dynamic_ncols=True,
  ) as line:
    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
      yield
    finally:
      done.set()
      ticking.join()


def size(count: float | None) -> str:
  """Formats bytes as people read them: '3.2 MiB', '2.09 GiB', 'unknown'."""
  if count is None:
    return 'unknown'
  if count < 2**30 / 10:
    return f'{count / 2**20:.1f} MiB'
  return f'{count / 2**30:.2f} GiB'


def duration(seconds: float) -> str:
  """Formats seconds as people read them: '48s', '3m 05s', '2h 07m', '3d 04h'."""
  seconds = round(seconds)
  if seconds < 60:
    return f'{seconds}s'
  if seconds < 3600:
    return f'{seconds // 60}m {seconds % 60:02}s'
  if seconds < 86400:
    return f'{seconds // 3600}h {seconds % 3600 // 60:02}m'
  return f'{seconds // 86400}d {seconds % 86400 // 3600:02}h'


def parse_flags(argv: list[str], flag_values: flags.FlagValues) -> list[str]:
  """Parses flags, `config` among them; what is wrong raises ValueError.

  A config file that is not in the current folder is looked for among those that
  are installed with the package.

  Returns:
    The arguments that are no flags.
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
          f"config='{path}' does not exist; the package brings "
          f'{[k for k in known if k.endswith(".py") and k[0] != "_"]}'
        )
      argv[i] = f'{name}={installed}{colon}{argument}'
  options = [arg for arg in argv if _OPTION.match(arg) or _model_option(arg)]
  argv = [arg for arg in argv if arg not in options]
  whole = sys.argv  # Where flags of a config are looked up.
  try:
    sys.argv = argv
    rest = flag_values(argv)
    _set_options(flag_values['config'].value, options)
    _set_to_none(flag_values['config'].value, nones + _overruled(argv))
    return rest
  except (AttributeError, KeyError) as e:  # There is no such key in the config.
    hint = re.search(r'Did you mean "(.*?)" instead of "(.*?)"', str(e))
    name = hint[2] if hint else str(e).strip('"\'')
    near = [hint[1]] if hint else _near(name)
    reason = f"config has no key '{name}'" + (
      f": did you mean '{near[0]}'?" if near else ''
    )
  except (flags.Error, TypeError) as e:
    # An error inside a config file comes with its whole traceback as text.
    lines = str(e).strip().splitlines()
    reason = lines[-1] if 'Traceback' in ''.join(lines) else ' '.join(lines)
    reason = reason.removeprefix('ValueError: ')
  finally:
    sys.argv = whole
  raise ValueError(
    f'{reason} (see --help; the keys of a config are in configs/common.py, those of '
    'config.model in configs/models.py, those of config.task_options in the file of '
    'the task)'
  )


def _near(name):
  """Returns keys of a config that may be meant by a name, the likeliest first."""
  options = importlib.import_module('vit_jax.configs.models').OPTIONS
  # Such as base_lr for lr, where there is nothing closer.
  keys = importlib.import_module('vit_jax.configs.common').get_config()
  return difflib.get_close_matches(
    name, [option.split('.')[-1] for option in options], n=1
  ) or [key for key in keys if name in key]


def _model_option(arg):
  """Parses the flag of an option of a model, which its config need not have.

  Returns:
    The path to the model, that of the option, and its value; None for other flags.

  Raises:
    ValueError: if the value is of another type than the option's default.
  """
  match = _MODEL_OPTION.fullmatch(arg)
  options = importlib.import_module('vit_jax.configs.models').OPTIONS
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
  elif isinstance(default, float):
    try:
      value = float(value)
    except (TypeError, ValueError):
      raise ValueError(
        f'model.{option}={value} must be a number (config.model.{option})'
      ) from None
  return path, option, '' if value is None else value


def _set_options(config, options):
  """Sets options of a task or a model, which the config need not have."""
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
  """Returns the flags but for --config.KEY=None, and the keys that end as None."""
  last = {arg.partition('=')[0].lstrip('-'): arg for arg in argv}
  nones = [m[1] for m in map(_NONE.fullmatch, last.values()) if m]
  return [arg for arg in argv if not _NONE.fullmatch(arg)], nones


def _overruled(argv):
  """Returns the keys of passes where only steps are given here, or the reverse.

  A length on the command line takes the place of the config file's.
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
    _ = holder[name]  # KeyError, with what it may be, where there is none.
    with holder.ignore_type():
      holder[name] = None


def _join_values(argv):
  """Turns '--config.KEY VALUE' into '--config.KEY=VALUE'.

  Where a key may be of any type, absl would take the first to mean 'true'.
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

  An error that this package raises itself (a wrong flag, a missing folder) is
  printed without a traceback; any other keeps it.
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
