r"""Times ViTs here and in timm, each program alone in a process of its own, on a CPU:

  python -m benchmarks.alone --rounds=3 --image_size=28 --patch=4 --width 96 384 --batch=64

Two programs that take turns within seconds disturb each other: after PyTorch has run, Linux
takes longer to map huge pages for JAX. Here, the programs take turns as whole processes.
A process warms up, and its speed is the median of three turns of two seconds. Prints a row
per mode, width, batch and type, with the images per second of each round. Needs `pip install -e '.[test]'`.
"""

import argparse
from collections.abc import Callable, Sequence
import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import steps, timing, timm_steps
from vit_jax import console
from vit_jax.commands import flags
from vit_jax.configs import common, models

_TURNS = 3
_COMPILED = {'timm': False, 'timm_compiled': True}
PROGRAMS = ('ours', *_COMPILED)


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('', __doc__)
  parser.prog = 'python -m benchmarks.alone'
  add = parser.add_argument
  add('--rounds', type=flags.count, default=3, help='processes per program (3)')
  add('--programs', nargs='+', choices=PROGRAMS, default=PROGRAMS)
  add('--modes', nargs='+', choices=('train', 'infer'), default=('train', 'infer'))
  add('--dtype', nargs='+', choices=('float32', 'bfloat16'), default=('float32',))
  add('--width', nargs='+', type=flags.count, default=(96,), help='widths (96)')
  add('--layers', type=flags.count, default=4, help='layers (4)')
  add('--batch', nargs='+', type=flags.count, default=(64,), help='images (64)')
  add('--image_size', type=flags.count, default=28)
  add('--patch', type=flags.count, default=4, help='side of a patch (4)')
  return parser


def _config(width: int, layers: int, patch: int, image_size: int) -> Any:
  """Returns the config of a ViT with heads of 32 channels, or 64 from width 384 on."""
  head_width = 32 if width < 384 else 64
  if width % head_width:
    raise ValueError(
      f'width={width} is not a multiple of {head_width}, the width of a head (--width)'
    )
  config = common.get_config()
  config.model = models.get_config('ti16')
  config.model.hidden_size = width
  config.model.patches.size = (patch, patch)
  config.model.transformer.num_layers = layers
  config.model.transformer.num_heads = width // head_width
  config.model.transformer.mlp_dim = 4 * width
  config.pp.crop = image_size
  return config


def _timed(step: Callable[[int], Any], batch: int, seconds: float) -> float:
  """Returns the images per second of a function that makes a number of steps."""
  step(3)  # Compiles.
  start = time.perf_counter()
  step(1)
  count = max(1, round(seconds / (time.perf_counter() - start)))
  [times] = timing.measure(lambda: step(count), repeats=_TURNS)
  return batch * count / statistics.median(times)


def _time_ours(config: Any, mode: str, dtype: str, batch: int, seconds: float) -> float:
  """Returns the images per second of this package."""
  import jax

  from vit_jax.distributed import sharding

  args = argparse.Namespace(
    config=config,
    dtype=dtype,
    batch=batch,
    image_size=config.pp.crop,
    beside='timm',  # Without dropout, as timm's models.
  )
  mesh = sharding.make_mesh({'data': -1})
  with jax.set_mesh(mesh):
    step = steps.make_step(args, mesh, mode == 'train')
    return _timed(step, batch, seconds)


def _time_timm(
  config: Any, mode: str, dtype: str, batch: int, seconds: float, compiled: bool
) -> float:
  """Returns the images per second of timm."""
  step = timm_steps.make_step(
    timm_steps.arguments(config.model, config.pp.channels),
    batch,
    config.pp.crop,
    dtype,
    train=mode == 'train',
    compiled=compiled,
  )

  def make(count: int) -> None:
    for _ in range(count):
      step()

  return _timed(make, batch, seconds)


def measure_one(
  program: str,
  mode: str,
  dtype: str,
  batch: int,
  seconds: float = timing.TURN_SECONDS,
  **model: int,
) -> None:
  """Prints the images per second of a program in this process; see `_config`."""
  config = _config(**model)
  if program in _COMPILED:
    speed = _time_timm(config, mode, dtype, batch, seconds, _COMPILED[program])
  else:
    speed = _time_ours(config, mode, dtype, batch, seconds)
  print(json.dumps(speed))


def _in_a_process(**arguments: Any) -> float:
  """Returns the images per second of a program in a process of its own."""
  call = f'from benchmarks import alone; alone.measure_one(**{arguments!r})'
  output = subprocess.check_output([sys.executable, '-c', call], text=True)
  return json.loads(output.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
  """Times the programs and prints a table in Markdown."""
  args = make_parser().parse_args(argv)
  console.require('timm', 'test', 'this comparison')
  for width in args.width:
    _config(width, args.layers, args.patch, args.image_size)
  print(f'| img/s | {" | ".join(args.programs)} |')
  print('|---' * (1 + len(args.programs)) + '|')
  for mode, width, batch, dtype in itertools.product(
    args.modes, args.width, args.batch, args.dtype
  ):
    speeds: dict[str, list[str]] = {program: [] for program in args.programs}
    for _ in range(args.rounds):
      for program in args.programs:
        speed = _in_a_process(
          program=program,
          mode=mode,
          dtype=dtype,
          batch=batch,
          width=width,
          layers=args.layers,
          patch=args.patch,
          image_size=args.image_size,
        )
        speeds[program].append(f'{speed:,.0f}')
    cells = [', '.join(values) for values in speeds.values()]
    title = f'{mode}: width {width}, {args.layers} layers, batch {batch}, {dtype}'
    print(f'| {title} | {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
  console.use_huge_pages()
  try:
    main()
  except (ValueError, ImportError, subprocess.CalledProcessError) as e:
    sys.exit(f'Error: {e}')
