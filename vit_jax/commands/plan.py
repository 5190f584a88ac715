r"""Plan a training run for TPUs or GPUs without one: memory, speed, cost.

  vit_jax plan --config=configs/pretrain.py:h14,imagenet21k \
    --topology=v3:4x4 --config.mesh.fsdp=32 --config.mesh.data=1

Needs the extra `plan`. Compiles the update of `vit_jax train` with the device's compiler,
which runs on any x86 Linux machine. Reports the memory per device, the FLOPs, the
compiler's estimate of the step time (for comparing programs, not a measurement; it
excludes the network, for which there is a lower bound), and the resulting duration of
the whole run.

--search tries meshes, increasing numbers of micro-batches until the run fits, and
rematerialisation where it could be faster. It ignores these keys of the config, and
prints the best plans and the flags that select them. Plans are cached in $VIT_JAX_CACHE
(by default ~/.cache/vit_jax).

A topology is a TPU version (v2, v3, v4, v5e, v5p, v6e) and the number of chips along
each axis, such as v3:4x4 or v4:2x2x4; 2xv5e:4x4 are two slices, connected by the data
center network. A device is a core on v2 and v3, which have two per chip, and a chip on
later versions. h100:1 to h100:8 and h200:1 to h200:8 are GPUs of one host. They need the
extra `cuda`, but no GPU. Their compiler estimates no times: a step takes as long as its
matrix products at the peak of the device, and then its reads and writes of main memory.

The data need not exist: the sizes of the paper's data sets are known, folders are
counted, and --num_examples and --num_classes set any other sizes. See docs/plan.md.
"""

import argparse
from collections.abc import Callable, Sequence

from vit_jax import console
from vit_jax.commands import flags
from vit_jax.planning import topology


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('plan', __doc__)
  parser.add_config()
  parser.add_argument(
    '--topology',
    default='v3:2x2',
    help='TPU version and number of chips along each axis, such as v3:4x4, or a GPU and '
    'their number, such as h100:8 (v3:2x2)',
  )
  parser.add_argument(
    '--search',
    action='store_true',
    help='try meshes, micro-batches and rematerialisation; see above',
  )
  parser.add_argument(
    '--json',
    metavar='FILE',
    help='file for the plan: an object, or with --search a list of objects, best '
    'first; bytes and FLOPs are per device',
  )
  parser.add_argument(
    '--num_examples',
    type=flags.count,
    help='number of training examples, if the data set is unknown',
  )
  parser.add_argument(
    '--num_classes',
    type=flags.count,
    help='number of classes, if the data set is unknown',
  )
  return parser


def parse(
  argv: Sequence[str],
  check_config: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.Namespace:
  """Parses the flags, see flags.Parser.parse_args; ValueError without --config."""
  args = make_parser().parse_args(argv, check_config=check_config)
  flags.require(args, config='FILE')
  return args


def _check_config(args: argparse.Namespace) -> None:
  from vit_jax.commands import start_checks  # Late, for a fast --help.

  start_checks.check_plan(args)


def main(argv: Sequence[str]) -> int:
  """Prints the plan of a run; returns the exit status."""
  args = parse(argv, _check_config)
  flags.check_output('json', args.json)
  topology.parse(args.topology)
  from vit_jax.planning import plan  # Imports JAX.

  console.log(f'Config: {args.config_file}')
  plan.run(
    args.config,
    args.topology,
    num_examples=args.num_examples,
    num_classes=args.num_classes,
    search_mesh=args.search,
    json_path=args.json,
  )
  return 0
