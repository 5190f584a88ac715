r"""Times what users wait for, and writes a table and JSON; run in a checkout:

  python -m benchmarks --json=/tmp/benchmark.json

Sections (choose with --only): import, start, train, inference, pipeline, weights,
checkpoints, sampling, hosts; and predict and engines, which are left out unless named,
since they need other packages (predicting.py, engines.py). Each is warmed up, repeated, and reported as median,
minimum and maximum. A step's share of the peak is relative to a large matrix product of
the same type, measured in the same run. Programs that are compared take turns.

  python -m benchmarks --beside=timm --only train inference --model=b16 \
    --batch=256 --dtype=bfloat16 --json=/tmp/b16.json

also times timm's model with torch.compile ('.[test]' brings timm) on the same
device: images per second, time to compile, memory.
"""

from collections.abc import Mapping, Sequence
import importlib
import json
import os
import pathlib
import platform
import sys
from typing import Any

from vit_jax import console
from vit_jax.commands import flags

# Name of a section -> function from the arguments to rows of the table.
SECTIONS = {
  'import': 'start:import_rows',
  'start': 'start:start_rows',
  'train': 'steps:train_rows',
  'inference': 'steps:inference_rows',
  'pipeline': 'pipeline:rows',
  'predict': 'predicting:rows',
  'weights': 'start:weights_rows',
  'checkpoints': 'checkpoints:rows',
  'sampling': 'sampling:rows',
  'hosts': 'hosts:rows',
  'engines': 'engines:rows',
}
# These need further packages.
_ON_REQUEST = ('predict', 'engines')
DEFAULT_SECTIONS = tuple(name for name in SECTIONS if name not in _ON_REQUEST)


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('', __doc__)
  parser.prog = 'python -m benchmarks'
  add = parser.add_argument
  add(
    '--only',
    nargs='+',
    choices=SECTIONS,
    help='sections to time (all but predict and engines)',
  )
  add('--json', metavar='FILE', help='file for the results')
  add('--repeats', type=flags.count, default=5, help='measured calls (5)')
  add('--model', default='s16', help='model to step (s16), or --config of a run')
  add('--batch', type=flags.count, default=8, help='images per step (8)')
  add('--image_size', type=flags.count, default=224)
  parser.add_config()
  add('--dtype', default='float32', choices=('float32', 'bfloat16'))
  add(
    '--beside',
    choices=('timm', 'timm_eager'),
    help="time timm's model too, with torch.compile or without",
  )
  return parser


def main(argv: Sequence[str] | None = None) -> None:
  """Times the sections, prints their rows and writes them to --json."""
  args = make_parser().parse_args(sys.argv[1:] if argv is None else argv)
  flags.check_output('json', args.json)
  if 'jax' not in sys.modules:  # JAX reads these when it is imported.
    # Compilation is timed too, and two programs share the memory of a GPU.
    os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  import jax

  from benchmarks import steps

  steps.check(args)
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
  for section in args.only or DEFAULT_SECTIONS:
    module, name = SECTIONS[section].split(':')
    module = importlib.import_module(f'benchmarks.{module}')
    results[section] = getattr(module, name)(args)
    for row in results[section]:
      print(_text(row), flush=True)
  if args.json:
    report = {'machine': machine, 'results': results}
    pathlib.Path(args.json).write_text(json.dumps(report, indent=1))


def _text(row: Mapping[str, Any]) -> str:
  columns = [
    f'{row["name"]:<45} {row["median"]:>9.2f} {row["unit"]:<8} '
    f'({row["min"]:.2f} to {row["max"]:.2f})'
  ]
  if share := row.get('share_of_peak'):
    columns.append(f'{100 * share:.0f} % of peak')
  if seconds := row.get('first_call_seconds'):
    columns.append(f'compiled in {console.duration(seconds)}')
  if peak := row.get('peak_bytes'):
    columns.append(f'memory {console.size(peak)}')
  return '  '.join(columns)


if __name__ == '__main__':
  console.use_huge_pages()
  console.quiet()
  console.avoid_absent_gpus()
  try:
    main()
  except (ValueError, ImportError) as e:
    sys.exit(f'Error: {e}')
