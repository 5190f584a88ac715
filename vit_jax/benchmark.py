r"""Times the steps that users wait for, and writes a table and JSON.

  python -m vit_jax.benchmark --json=/tmp/benchmark.json

Sections (choose with --only): import, start, train, inference, pipeline,
weights, detection, sampling. Each section is warmed up, repeated, and reported as
median, minimum and maximum. A step's share of the peak is relative to the speed
of a large float32 matrix product, measured in the same run. Programs that are
compared take turns.
"""

import argparse
import contextlib
import json
import pathlib
import platform

import jax

from vit_jax import cli
from vit_jax.benchmarks import detection
from vit_jax.benchmarks import pipeline
from vit_jax.benchmarks import sampling
from vit_jax.benchmarks import start
from vit_jax.benchmarks import steps

# Name of a section -> function from the arguments to rows of the table.
SECTIONS = {
  'import': start.import_rows,
  'start': start.start_rows,
  'train': steps.train_rows,
  'inference': steps.inference_rows,
  'pipeline': pipeline.rows,
  'weights': start.weights_rows,
  'detection': detection.rows,
  'sampling': sampling.rows,
}


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of this command."""
  parser = cli.parser('vit_jax.benchmark', __doc__)
  parser.add_argument(
    '--only', nargs='+', choices=SECTIONS, default=list(SECTIONS)
  )
  parser.add_argument('--json', type=pathlib.Path, help='file for the results')
  parser.add_argument(
    '--repeats', type=int, default=5, help='measured calls (5)'
  )
  parser.add_argument('--model', default='s16', help='model to step (s16)')
  parser.add_argument(
    '--batch', type=int, default=8, help='images per step (8)'
  )
  parser.add_argument('--image_size', type=int, default=224)
  parser.add_argument(
    '--dtype', default='float32', choices=('float32', 'bfloat16')
  )
  return parser


def main() -> None:
  """Runs the sections of the command line; prints and writes the results."""
  args = make_parser().parse_args()
  cli.quiet()
  cli.avoid_libtpu()
  if args.repeats < 1:
    raise ValueError(f'repeats={args.repeats} must be at least 1 (--repeats)')
  device = jax.devices()[0]
  machine = {
    'device': device.device_kind,
    'platform': device.platform,
    'num_devices': jax.device_count(),
    'processor': platform.processor() or platform.machine(),
    'python': platform.python_version(),
    'jax': jax.__version__,
  }
  print(', '.join(f'{key} {value}' for key, value in machine.items()))
  results = {}
  with contextlib.ExitStack() as stack:
    if args.json:
      args.json.parent.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(args.json.open('w'))
    for section in args.only:
      results[section] = SECTIONS[section](args)
      for line in results[section]:
        share = line.get('share_of_peak')
        print(
          f'{line["name"]:<45} {line["median"]:>9.2f} {line["unit"]:<8}'
          f' ({line["min"]:.2f} to {line["max"]:.2f})'
          + (f'  {100 * share:.0f} % of peak' if share else ''),
          flush=True,
        )
    if args.json:
      json.dump({'machine': machine, 'results': results}, file, indent=1)


if __name__ == '__main__':
  cli.run(main)
