r"""Times the steps that users wait for, and writes a table and JSON.

  vit_jax benchmark --json=/tmp/benchmark.json

Sections (choose with --only): import, start, train, inference, pipeline,
weights, sampling. Each section is warmed up, repeated, and reported as
median, minimum and maximum. A step's share of the peak is relative to the speed
of a large matrix product of the same type, measured in the same run. Programs
that are compared take turns.

  vit_jax benchmark --beside=timm --only train inference --model=b16 \
    --batch=256 --dtype=bfloat16 --json=/tmp/b16.json

times updates and logits beside those of timm's model with torch.compile (which
'.[test]' brings), on the same device: images a second, time to compile, memory.
"""

from collections.abc import Sequence
import os
import sys

from vit_jax.commands import flags


def make_parser() -> flags.Parser:
  parser = flags.Parser('benchmark', __doc__)
  parser.add_argument(
    '--only', nargs='+', metavar='SECTION', help='sections to time (all)'
  )
  parser.add_argument('--json', metavar='FILE', help='file for the results')
  parser.add_argument(
    '--repeats', type=flags.count, default=5, help='measured calls (5)'
  )
  parser.add_argument('--model', default='s16', help='model to step (s16)')
  parser.add_argument(
    '--batch', type=flags.count, default=8, help='images per step (8)'
  )
  parser.add_argument('--image_size', type=flags.count, default=224)
  parser.add_argument(
    '--dtype', default='float32', choices=('float32', 'bfloat16')
  )
  parser.add_argument(
    '--beside',
    choices=('timm', 'timm_eager'),
    help="time timm's model too, with torch.compile or without",
  )
  return parser


def main(argv: Sequence[str]) -> int:
  args = make_parser().parse_args(argv)
  flags.check_output('json', args.json)
  if 'jax' not in sys.modules:  # JAX reads these when it is imported.
    # Compilation is timed too; and two programs share the memory of a GPU.
    os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  from vit_jax import benchmark

  benchmark.run(args)
  return 0
