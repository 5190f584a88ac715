"""The parser of the commands, and flags that several of them have.

Each command has `make_parser`, the parser of its flags, and `main`, which runs
it and returns the exit status. `parse`, where it has one, parses its flags and
checks them together; it raises ValueError for wrong ones, as the parser does.
"""

import argparse
import difflib
import os

from etils import epath

from vit_jax import console

_CONFIG = 'config'


def count(text: str) -> int:
  """Parses an integer of at least 1."""
  found = int(text) if text.replace('_', '').isdecimal() else 0
  if found < 1:
    raise argparse.ArgumentTypeError(f"'{text}' must be an integer of at least 1")
  return found


def pixels(text: str) -> int | tuple[int, int]:
  """Parses SIDE or HEIGHT,WIDTH (also HEIGHTxWIDTH)."""
  found = tuple(map(count, text.replace('x', ',').split(',')))
  if len(found) > 2:
    raise argparse.ArgumentTypeError(f"'{text}' must be SIDE or HEIGHT,WIDTH in pixels")
  return found if len(found) > 1 else found[0]


def height_width(text: str) -> tuple[int, int]:
  """Parses SIDE or HEIGHT,WIDTH; a side is that of a square."""
  found = pixels(text)
  return found if isinstance(found, tuple) else (found, found)


class Parser(argparse.ArgumentParser):
  """Parser of a command; raises ValueError for wrong flags.

  `text` is what --help prints of the command, the docstring of its module.
  """

  def __init__(self, command: str, text: str):
    super().__init__(
      prog=f'vit_jax {command}',
      description=text,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
    )

  def add_config(self, text: str = 'config file of a training'):
    """Adds --config=FILE.py:ARG and flags that set its keys.

    The namespace has the path in `config_file`, and in `config` the config,
    None if there is no such flag.
    """
    self.add_argument(
      f'--{_CONFIG}', metavar='FILE[:ARG]',
      help=f'{text}, with an argument for it after a colon; --config.KEY=VALUE '
      'sets one of its keys',
    )  # fmt: skip
    self.set_defaults(config_file=None)

  def parse_args(self, args, namespace=None):
    given, args = _split(args) if self._has_config() else ([], args)
    # Flags may stand between arguments, of which the last may be missing.
    found, rest = self.parse_known_intermixed_args(args, namespace)
    if rest:
      self._refuse(rest)
    if getattr(found, 'step', None) is not None and not found.workdir:
      raise ValueError(
        f'--step={found.step} selects a checkpoint of a run: give --workdir=RUN, '
        'or leave out --step'
      )
    for name in ('num_heads', 'gelu'):
      if getattr(found, name, None) and getattr(found, 'workdir', None):
        raise ValueError(
          f'--{name} is for weights without a config, and a run has one: give '
          f'--weights=FILE, or leave out --{name}'
        )
    if self._has_config():
      _load_config(found, given)
    return found

  def error(self, message):
    raise ValueError(f'{message.removeprefix("argument ")} (see --help)')

  def flags(self) -> list[str]:
    """Returns the names of all flags, with their dashes."""
    return list(self._option_string_actions)

  def _has_config(self):
    return f'--{_CONFIG}' in self.flags()

  def _refuse(self, words):
    """Raises ValueError for words that are no flags of the command."""
    unknown = [word for word in words if word.startswith('-')]
    if not unknown:
      hint = f' (--images {words[0]})' if '--images' in self.flags() else ''
      raise ValueError(f'unknown arguments {words}: flags begin with --{hint}')
    flag, _, value = unknown[0].partition('=')
    if flag.startswith('--jax_'):
      raise ValueError(
        f'there is no flag {flag}: the settings of JAX are variables of the '
        f'environment, such as {flag[2:].upper()}={value or "VALUE"}'
      )
    first, dot, key = flag.lstrip('-').partition('.')
    near = difflib.get_close_matches(f'--{first}', self.flags(), n=1)
    if self._has_config() and not dot:
      from vit_jax.configs import common

      if first in common.get_config():
        near = [f'--{_CONFIG}.{first}']
    hint = f': did you mean {near[0]}{dot}{key}?' if near else ''
    raise ValueError(f'there is no flag {flag}{hint} (see --help)')


def _split(words):
  """Splits a command line into keys of the config, and all other words.

  Returns the pairs of overrides.set_keys, and the other words.
  """
  words, given, rest = list(words), [], []
  while words:
    word = words.pop(0)
    flag, equals, value = word.partition('=')
    if flag.startswith(f'--no{_CONFIG}.') and not equals:
      given.append((flag.removeprefix(f'--no{_CONFIG}.'), False))
    elif flag.startswith(f'--{_CONFIG}.'):
      if not equals and words and not words[0].startswith('--'):
        value, equals = words.pop(0), '='
      name = flag.removeprefix(f'--{_CONFIG}.')
      given.append((name, value if equals else True))
    else:
      rest.append(word)
  return given, rest


def _load_config(found, given):
  """Replaces the name of a config file by its config, with the keys set."""
  if not found.config:
    found.config = None
    if given:
      raise ValueError(
        f'--config.{given[0][0]} sets a key of a config: give --config=FILE too'
      )
    return
  # Imported late, so that --help and errors in other flags are fast.
  from vit_jax.run import overrides

  found.config, found.config_file = overrides.load(found.config)
  overrides.set_keys(found.config, given)


def require(args: argparse.Namespace, **examples: str):
  """Raises ValueError unless flags are given; a word for each flag's value."""
  for name, word in examples.items():
    if not getattr(args, name):
      raise ValueError(f'--{name}={word} is needed (see --help)')


def add_model_flags(parser: argparse.ArgumentParser, required: bool = True):
  """Adds the flags that name a model: --workdir or --weights, --step, --task."""
  given = parser.add_mutually_exclusive_group(required=required)
  given.add_argument('--workdir', help='folder of the run')
  given.add_argument(
    '--weights',
    help='file or folder of weights, or hf://OWNER/NAME, in place of a run',
  )
  parser.add_argument('--step', type=int, help='step of the checkpoint (the newest)')
  add_weights_flags(parser)
  add_trust_flags(parser)


def heads(text: str) -> int | tuple[int, int]:
  """Parses NUMBER, or IMAGE,TEXT of two towers."""
  found = tuple(map(count, text.split(',')))
  if len(found) > 2:
    raise argparse.ArgumentTypeError(f"'{text}' must be NUMBER or IMAGE,TEXT")
  return found if len(found) > 1 else found[0]


def add_weights_flags(parser: argparse.ArgumentParser):
  """Adds --num_heads and --gelu: what no config beside weights tells."""
  parser.add_argument(
    '--num_heads',
    type=heads,
    metavar='NUMBER or IMAGE,TEXT',
    help='attention heads of weights without a config that tells them',
  )
  parser.add_argument(
    '--gelu',
    choices=('erf', 'tanh', 'quick'),
    help='GELU of such weights: exact, its approximation, or that of CLIP',
  )


def add_trust_flags(parser: argparse.ArgumentParser):
  """Adds --task and --insecure: what a command may trust."""
  parser.add_argument(
    '--insecure',
    action=_Insecure,
    nargs=0,
    help='allow files from http://',
  )
  parser.add_argument(
    '--task',
    type=_named_task,
    metavar='MODULE',
    help='module of the task of a run whose task is none of the package: its '
    'code is run, so name only a module that you trust',
  )


class _Insecure(argparse.Action):
  """Sets the variable that vit_jax/weights/fetch.py reads."""

  def __call__(self, *_):
    os.environ['VIT_JAX_INSECURE'] = '1'


def _named_task(module):
  """Lets a run import a module for its task."""
  console.named_tasks.add(module)
  return module


def check_output(name: str, path: str | os.PathLike | None):
  """Refuses the path of a file to write, of the flag --NAME, if it is a folder.

  Its folder must exist. None means that there is no such flag.
  """
  if path and not epath.Path(path).parent.is_dir():
    raise ValueError(
      f"{name}='{path}' is in no folder that exists: make the folder, or give "
      f'another path (--{name})'
    )
  if path and epath.Path(path).is_dir():
    raise ValueError(f"{name}='{path}' is a folder: give the path of a file (--{name})")
