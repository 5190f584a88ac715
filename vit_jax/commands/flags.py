"""The parser of the commands, and flags that several of them share.

Each command has a table of its flags (name -> arguments of `add_argument`),
`make_parser`, and `main`, which returns the exit status. `parse`, where there is
one, also checks flags against each other. Wrong flags raise ValueError.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import difflib
import functools
import os
from typing import TYPE_CHECKING, Any, NoReturn

from etils import epath

from vit_jax import console
from vit_jax.configs import synonyms
from vit_jax.distributed import files

if TYPE_CHECKING:
  from vit_jax.inference import predictor

_CONFIG = 'config'


def count(text: str) -> int:
  """Parses an integer of at least 1."""
  value = int(text) if text.replace('_', '').isdecimal() else 0
  if value < 1:
    raise argparse.ArgumentTypeError(f"'{text}' must be an integer of at least 1")
  return value


def pixels(text: str) -> int | tuple[int, int]:
  """Parses SIDE or HEIGHT,WIDTH (also HEIGHTxWIDTH)."""
  sides = [count(side) for side in text.replace('x', ',').split(',')]
  if len(sides) > 2:
    raise argparse.ArgumentTypeError(f"'{text}' must be SIDE or HEIGHT,WIDTH in pixels")
  return (sides[0], sides[1]) if len(sides) == 2 else sides[0]


def height_width(text: str) -> tuple[int, int]:
  """Parses SIDE (of a square) or HEIGHT,WIDTH."""
  sides = pixels(text)
  return sides if isinstance(sides, tuple) else (sides, sides)


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

  def add(self, table: Mapping[str, Any], group: str | None = None) -> None:
    """Adds flags, name -> arguments of `add_argument`, under a title in --help."""
    place = self.add_argument_group(group) if group else self
    for name, options in table.items():
      place.add_argument(name, **options)

  def add_config(self) -> None:
    """Adds --config=FILE.py:ARG and --config.KEY=VALUE.

    The namespace has the path in `config_file`, and the config (or None) in `config`.
    """
    text = 'config file; --config.KEY=VALUE sets a key'
    self.add({f'--{_CONFIG}': dict(metavar='FILE[:ARG]', help=text)})
    self.set_defaults(config_file=None)

  def parse_args(  # type: ignore[override]
    self,
    args: Sequence[str],
    namespace: argparse.Namespace | None = None,
    check_config: Callable[[argparse.Namespace], None] | None = None,
  ) -> argparse.Namespace:
    """Parses flags; `check_config` checks the namespace once the config is read.

    Its errors and errors in --config.KEY=VALUE are raised together.
    """
    settings: list[tuple[str, str | bool]] = []
    if self._has_config():
      settings, args = _split(args)
    for key, value in settings:
      _check_utf8(f'--{_CONFIG}.{key}', value)
    # Intermixed: flags may be given between positional arguments.
    flags, unknown = self.parse_known_intermixed_args(args, namespace)
    if unknown:
      self._refuse(unknown)
    # The shell does not expand `~` in --FLAG=~/PATH.
    for name, value in vars(flags).items():
      setattr(flags, name, _with_home(value))
      if name != 'images':  # TensorFlow decodes them from their contents.
        _check_utf8(name, value)
    if getattr(flags, 'step', None) is not None and not flags.workdir:
      raise ValueError(
        f'--step={flags.step} selects a checkpoint of a run: add --workdir=RUN, or '
        'leave out --step'
      )
    for name in ('num_heads', 'gelu', 'entry', 'base'):
      if getattr(flags, name, None) and getattr(flags, 'workdir', None):
        raise ValueError(
          f'--{name} is for weights of other programs, not for a run: pass '
          f'--weights=FILE, or leave out --{name}'
        )
    if self._has_config():
      _load_config(flags, settings, check_config)
    return flags

  def error(self, message: str) -> NoReturn:
    """Raises ValueError instead of ending the process."""
    raise ValueError(f'{message.removeprefix("argument ")} (see --help)')

  def flags(self) -> list[str]:
    """Returns the names of all flags, with their dashes."""
    return list(self._option_string_actions)

  def _has_config(self) -> bool:
    return f'--{_CONFIG}' in self.flags()

  def _refuse(self, unknown: Sequence[str]) -> NoReturn:
    """Raises ValueError for arguments that are not flags of the command."""
    unknown_flags = [argument for argument in unknown if argument.startswith('-')]
    if not unknown_flags:
      hint = f' (--images {unknown[0]})' if '--images' in self.flags() else ''
      raise ValueError(f'unknown arguments {unknown}: flags begin with --{hint}')
    flag, _, value = unknown_flags[0].partition('=')
    if flag.startswith('--jax_'):
      raise ValueError(
        f'there is no flag {flag}: set JAX options as environment variables, such '
        f'as {flag[2:].upper()}={value or "VALUE"}'
      )
    first, dot, key = flag.lstrip('-').replace('-', '_').partition('.')
    near = difflib.get_close_matches(f'--{first}', self.flags(), n=1)
    if self._has_config() and not dot:
      from vit_jax.configs import common

      if first in common.get_config():
        near = [f'--{_CONFIG}.{first}']
    hint = f': did you mean {near[0]}{dot}{key}?' if near else ''
    synonym = synonyms.SYNONYMS.get(first, '')
    is_known = synonym.startswith(tuple(self.flags())) or not synonym.startswith('--')
    if synonym and is_known:
      hint = f': {synonyms.hint(first)}'
    raise ValueError(f'there is no flag {flag}{hint} (see --help)')


def _with_home(value: Any) -> Any:
  """Replaces a leading '~' in a string or in each of a list."""
  if isinstance(value, list):
    return [_with_home(item) for item in value]
  return files.expanded(value) if isinstance(value, str) else value


def _check_utf8(name: str, value: Any) -> None:
  """Raises ValueError for a string, or one in a list, that libraries cannot pass on."""
  texts = value if isinstance(value, list) else [value]
  for text in texts:
    if not isinstance(text, str):
      continue
    try:
      text.encode()
    except UnicodeEncodeError:
      raise ValueError(
        f"{name}='{text}' is not UTF-8: rename the file or folder, or link to it"
      ) from None


def _split(
  argv: Sequence[str],
) -> tuple[list[tuple[str, str | bool]], list[str]]:
  """Returns the config keys of a command line as pairs, and all other arguments."""
  remaining = list(argv)
  settings: list[tuple[str, str | bool]] = []
  arguments = []
  while remaining:
    argument = remaining.pop(0)
    flag, equals, value = argument.partition('=')
    if flag.startswith(f'--no{_CONFIG}.') and not equals:
      settings.append((flag.removeprefix(f'--no{_CONFIG}.'), False))
    elif flag.startswith(f'--{_CONFIG}.'):
      name = flag.removeprefix(f'--{_CONFIG}.')
      if equals:
        settings.append((name, value))
      elif remaining and not remaining[0].startswith('--'):
        settings.append((name, remaining.pop(0)))
      else:
        settings.append((name, True))
    else:
      arguments.append(argument)
  return settings, arguments


def _load_config(
  flags: argparse.Namespace,
  settings: Sequence[tuple[str, str | bool]],
  check_config: Callable[[argparse.Namespace], None] | None = None,
) -> None:
  """Replaces the name of the config file by its config with the keys set."""
  if not flags.config:
    flags.config = None
    if settings:
      key, _ = settings[0]
      raise ValueError(f'--config.{key} sets a key of a config: add --config=FILE')
    return
  # Imported late, so that --help and errors in other flags are fast.
  from vit_jax.configs import schema
  from vit_jax.run import config as run_config, overrides

  flags.config, flags.config_file = overrides.load(flags.config)
  checks = [
    functools.partial(overrides.set_keys, flags.config, settings),
    functools.partial(run_config.expand_paths, flags.config),
  ]
  if check_config:
    checks.append(functools.partial(check_config, flags))
  schema.run_checks(checks)


def require(args: argparse.Namespace, **examples: str) -> None:
  """Raises ValueError unless flags are given; maps each name to a sample value."""
  for name, example in examples.items():
    if not getattr(args, name):
      raise ValueError(f'--{name}={example} is required (see --help)')


def heads(text: str) -> int | tuple[int, int]:
  """Parses NUMBER, or IMAGE,TEXT for two towers."""
  numbers = [count(number) for number in text.split(',')]
  if len(numbers) > 2:
    raise argparse.ArgumentTypeError(f"'{text}' must be NUMBER or IMAGE,TEXT")
  return (numbers[0], numbers[1]) if len(numbers) == 2 else numbers[0]


def load_model(args: argparse.Namespace, **options: Any) -> 'predictor.Predictor':
  """Loads the model of --weights, or of --workdir and --step.

  `options` are further arguments of predict.load_weights or predict.load.
  """
  from vit_jax import predict  # Late: imports JAX.

  options['compute_dtype'] = args.compute_dtype
  if not args.weights:
    return predict.load(args.workdir, args.step, **options)
  return predict.load_weights(
    args.weights,
    num_heads=args.num_heads,
    gelu=args.gelu,
    entry=args.entry,
    base=args.base,
    **options,
  )


COMPUTE_DTYPE = dict(
  # Those of config.model.dtype, whose module takes long to import.
  choices=('auto', 'float32', 'bfloat16', 'float16'),
  help="type of the computation, by default the run's, or float32 for --weights; auto is "
  'bfloat16 except on CPUs; CPUs with AMX are faster in bfloat16 too',
)


def add_model_flags(parser: Parser) -> None:
  """Adds the flags that select a model."""
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--workdir', help='folder of a run')
  source.add_argument(
    '--weights', help='file or folder of weights, or hf://OWNER/NAME, instead of a run'
  )
  parser.add(
    {
      '--step': dict(type=int, help='step of the checkpoint (newest)'),
      '--compute_dtype': COMPUTE_DTYPE,
    }
  )
  add_weights_flags(parser)
  add_trust_flags(parser)


def add_weights_flags(parser: Parser) -> None:
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


def add_image_flags(parser: Parser, limit: int | None = None) -> None:
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


def add_trust_flags(parser: Parser) -> None:
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

  def __call__(self, *_: Any) -> None:
    os.environ['VIT_JAX_INSECURE'] = '1'


def _named_task(module: str) -> str:
  """Lets a run import a module for its task or an evaluator."""
  console.named_tasks.add(module)
  return module


def check_output(
  name: str, path: str | os.PathLike | None, is_folder: bool = False
) -> None:
  """Raises ValueError unless a file can be written to the path of a flag --NAME.

  `is_folder`: whether the path is a folder, which may exist.
  """
  if path and not epath.Path(path).parent.is_dir():
    raise ValueError(
      f"{name}='{path}': its folder does not exist: create it, or pass another "
      f'path (--{name})'
    )
  if path and not is_folder and epath.Path(path).is_dir():
    raise ValueError(f"{name}='{path}' is a folder: pass a file path (--{name})")
