r"""Evaluates a trained model on any split, without training.

  vit_jax evaluate --workdir=/tmp/digits --split=test
  vit_jax evaluate --workdir=/tmp/run --split=test --dataset=/data/other

and on ImageNet's validation images by ReaL labels too:

  vit_jax evaluate --workdir=/tmp/run --split=validation --real=real.json

On several hosts: as of `vit_jax train`.
"""

import argparse
from collections.abc import Sequence

from vit_jax.commands import flags, hosts


def make_parser() -> flags.Parser:
  parser = flags.Parser('evaluate', __doc__)
  parser.add_argument('--workdir', help='folder of the run; or gs://...')
  add_flags(parser, '--split')
  hosts.add_flags(parser)
  return parser


def add_flags(parser: flags.Parser, split: str):
  """Adds the flags of an evaluation; `split` is stored in `evaluate`."""
  group = parser.add_argument_group('evaluation, without training')
  group.add_argument(
    split,
    dest='evaluate',
    metavar='SPLIT',
    help="split to evaluate the run in --workdir on: 'test', 'train[:10%%]', ...",
  )
  group.add_argument('--dataset', help='another data set with the same classes')
  group.add_argument(
    '--real',
    metavar='FILE',
    help='ImageNet ReaL labels, real.json of '
    'github.com/google-research/reassessed-imagenet; adds accuracy_real',
  )
  group.add_argument(
    '--option',
    action='append',
    metavar='NAME=VALUE',
    help="option of the task in place of the run's, such as tight=1 for a "
    'detector; can be given several times',
  )
  flags.add_trust_flags(parser)


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the flags; raises ValueError for wrong ones."""
  args = make_parser().parse_args(argv)
  flags.require(args, workdir='FOLDER')
  if not args.evaluate:
    raise ValueError('--split=SPLIT is needed (see --help)')
  return args


def run(args: argparse.Namespace) -> int:
  """Evaluates as the flags say; returns the exit status."""

  def work():
    from vit_jax import predict
    from vit_jax.evaluators import evaluation

    options = evaluation.parse_options(args.option or ())
    mesh = evaluation.run_mesh(args.workdir)
    evaluation.evaluate(
      predict.load(args.workdir, mesh=mesh),
      args.evaluate,
      args.dataset,
      real_labels=args.real,
      options=options,
    )

  return hosts.run(args, work)


def main(argv: Sequence[str]) -> int:
  return run(parse(argv))
