"""The parser of the commands, and flags that several of them share.

Each command has a table of its flags (name -> arguments of `add_argument`),
`make_parser`, and `main`, which returns the exit status. `parse`, where there is
one, also checks flags against each other. Wrong flags raise ValueError.
"""

import argparse
from collections.abc import Mapping
import difflib
import os
from typing import Any

from etils import epath

from vit_jax import console
from vit_jax.distributed import files

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
  """Parses SIDE (of a square) or HEIGHT,WIDTH."""
  found = pixels(text)
  return found if isinstance(found, tuple) else (found, found)


class Parser(argparse.ArgumentParser):
  """The parser of a command, with its description and its table of flags."""

  def __init__(self, command: str, text: str, table: Mapping[str, Any] = {}):
    super().__init__(
      prog=f'vit_jax {command}',
      description=text,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
    )
    self.add(table)

  def add(self, table: Mapping[str, Any], group: str | None = None):
    """Adds flags, name -> arguments of `add_argument`, under a title in --help."""
    place = self.add_argument_group(group) if group else self
    for name, options in table.items():
      place.add_argument(name, **options)

  def add_config(self, text: str = 'config file'):
    """Adds --config=FILE.py:ARG and --config.KEY=VALUE.

    The namespace has the path in `config_file`, and the config (or None) in `config`.
    """
    text = f'{text}; --config.KEY=VALUE sets a key'
    self.add({f'--{_CONFIG}': dict(metavar='FILE[:ARG]', help=text)})
    self.set_defaults(config_file=None)

  def parse_args(self, args, namespace=None, check_config=None):
    """Parses flags; `check_config` checks the namespace once the config is read.

    Its errors and those of --config.KEY=VALUE are raised together.
    """
    given, args = _split(args) if self._has_config() else ([], args)
    for key, value in given:
      _check_utf8(f'--{_CONFIG}.{key}', value)
    # Intermixed: flags may be given between positional arguments.
    found, rest = self.parse_known_intermixed_args(args, namespace)
    if rest:
      self._refuse(rest)
    # The shell does not expand `~` in --FLAG=~/PATH.
    for name, value in vars(found).items():
      setattr(found, name, _with_home(value))
      if name != 'images':  # TensorFlow decodes them from their contents.
        _check_utf8(name, value)
    if getattr(found, 'step', None) is not None and not found.workdir:
      raise ValueError(
        f'--step={found.step} selects a checkpoint of a run: add --workdir=RUN, or '
        'leave out --step'
      )
    for name in ('num_heads', 'gelu', 'entry', 'base'):
      if getattr(found, name, None) and getattr(found, 'workdir', None):
        raise ValueError(
          f'--{name} is for weights of other programs, not for a run: pass '
          f'--weights=FILE, or leave out --{name}'
        )
    if self._has_config():
      _load_config(found, given, check_config)
    return found

  def error(self, message):
    raise ValueError(f'{message.removeprefix("argument ")} (see --help)')

  def flags(self) -> list[str]:
    """Returns the names of all flags, with their dashes."""
    return list(self._option_string_actions)

  def _has_config(self):
    return f'--{_CONFIG}' in self.flags()

  def _refuse(self, words):
    """Raises ValueError for words that are not flags of the command."""
    unknown = [word for word in words if word.startswith('-')]
    if not unknown:
      hint = f' (--images {words[0]})' if '--images' in self.flags() else ''
      raise ValueError(f'unknown arguments {words}: flags begin with --{hint}')
    flag, _, value = unknown[0].partition('=')
    if flag.startswith('--jax_'):
      raise ValueError(
        f'there is no flag {flag}: set JAX options as environment variables, such '
        f'as {flag[2:].upper()}={value or "VALUE"}'
      )
    first, dot, key = flag.lstrip('-').partition('.')
    near = difflib.get_close_matches(f'--{first}', self.flags(), n=1)
    if self._has_config() and not dot:
      from vit_jax.configs import common

      if first in common.get_config():
        near = [f'--{_CONFIG}.{first}']
    hint = f': did you mean {near[0]}{dot}{key}?' if near else ''
    raise ValueError(f'there is no flag {flag}{hint} (see --help)')


def _with_home(value):
  """Replaces a leading '~' in a string or in each of a list."""
  if isinstance(value, list):
    return [*map(_with_home, value)]
  return files.expanded(value) if isinstance(value, str) else value


def _check_utf8(name, value):
  """Raises ValueError for a string, or one in a list, that libraries cannot pass on."""
  for text in value if isinstance(value, list) else [value]:
    if isinstance(text, str) and not text.isascii():
      try:
        text.encode()
      except UnicodeEncodeError:
        raise ValueError(
          f"{name}='{text}' is not UTF-8: rename the file or folder, or link to it"
        ) from None


def _split(words):
  """Returns the config keys of a command line as pairs, and all other words."""
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


def _load_config(found, given, check_config=None):
  """Replaces the name of the config file by its config with the keys set."""
  if not found.config:
    found.config = None
    if given:
      raise ValueError(
        f'--config.{given[0][0]} sets a key of a config: add --config=FILE'
      )
    return
  # Imported late, so that --help and errors in other flags are fast.
  from vit_jax.configs import schema
  from vit_jax.run import config as run_config, overrides

  found.config, found.config_file = overrides.load(found.config)
  checks = [
    lambda: overrides.set_keys(found.config, given),
    lambda: run_config.expand_paths(found.config),
  ]
  if check_config:
    checks.append(lambda: check_config(found))
  schema.run_checks(checks)


def require(args: argparse.Namespace, **examples: str):
  """Raises ValueError unless flags are given; maps each name to a sample value."""
  for name, word in examples.items():
    if not getattr(args, name):
      raise ValueError(f'--{name}={word} is required (see --help)')


def heads(text: str) -> int | tuple[int, int]:
  """Parses NUMBER, or IMAGE,TEXT for two towers."""
  found = tuple(map(count, text.split(',')))
  if len(found) > 2:
    raise argparse.ArgumentTypeError(f"'{text}' must be NUMBER or IMAGE,TEXT")
  return found if len(found) > 1 else found[0]


def add_model_flags(parser: Parser, required: bool = True):
  """Adds the flags that select a model."""
  source = parser.add_mutually_exclusive_group(required=required)
  source.add_argument('--workdir', help='folder of a run')
  source.add_argument(
    '--weights', help='file or folder of weights, or hf://OWNER/NAME, instead of a run'
  )
  parser.add({'--step': dict(type=int, help='step of the checkpoint (newest)')})
  add_weights_flags(parser)
  add_trust_flags(parser)


def add_weights_flags(parser: Parser):
  """Adds --num_heads, --gelu, --entry and --base, for weights of other programs."""
  parser.add(
    {
      '--num_heads': dict(
        type=heads,
        metavar='NUMBER or IMAGE,TEXT',
        help='number of attention heads, for weights without a config',
      ),
      '--gelu': dict(
        choices=('erf', 'tanh', 'quick'),
        help="such weights' GELU: exact, tanh approximation, or CLIP's sigmoid",
      ),
      '--entry': dict(
        help='model to read from a checkpoint with several, such as student or model '
        '(averaged weights)',
      ),
      '--base': dict(
        metavar='WEIGHTS',
        help='weights of timm or Hugging Face that adapters of PEFT are merged into',
      ),
    }
  )


def add_image_flags(parser: Parser, limit: int | None = None):
  """Adds --max_image_pixels; `limit` is its default, by default the run's."""
  default = (
    f'{limit:,}' if limit else "the run's config.max_image_pixels, else 89,478,485"
  )
  parser.add(
    {
      '--max_image_pixels': dict(
        type=count,
        default=limit,
        metavar='PIXELS',
        help='largest image, height times width in pixels; a larger one is rejected '
        f'before it is decoded, which takes about 30 bytes per pixel ({default})',
      )
    }
  )


def add_trust_flags(parser: Parser):
  """Adds --task and --insecure."""
  parser.add(
    {
      '--insecure': dict(
        action=_Insecure,
        nargs=0,
        help='allow files from http://',
      ),
      '--task': dict(
        type=_named_task,
        metavar='MODULE',
        help="module of a run's own task or evaluator; its code is executed, so it must be "
        'trusted; may be repeated',
      ),
    }
  )


class _Insecure(argparse.Action):
  """Sets the environment variable that vit_jax/weights/fetch.py reads."""

  def __call__(self, *_):
    os.environ['VIT_JAX_INSECURE'] = '1'


def _named_task(module):
  """Lets a run import a module for its task or an evaluator."""
  console.named_tasks.add(module)
  return module


def check_output(name: str, path: str | os.PathLike | None, is_folder: bool = False):
  """Raises ValueError unless a file can be written to the path of a flag --NAME.

  `is_folder`: whether the path is that of a folder, which may exist.
  """
  if path and not epath.Path(path).parent.is_dir():
    raise ValueError(
      f"{name}='{path}': its folder does not exist: create it, or pass another "
      f'path (--{name})'
    )
  if path and not is_folder and epath.Path(path).is_dir():
    raise ValueError(f"{name}='{path}' is a folder: pass a file path (--{name})")
