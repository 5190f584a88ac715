r"""Evaluate a trained model on any split, without training.

  vit_jax evaluate --workdir=/tmp/digits --split=test
  vit_jax evaluate --workdir=/tmp/run --split=validation --real=real.json
  vit_jax evaluate --workdir=/tmp/digits --split=test --report --predictions=test.csv

To use several hosts, run the command on each, as with `vit_jax train`.
"""

import argparse
from collections.abc import Sequence
import os

from vit_jax.commands import flags, hosts


def _evaluators(text: str) -> dict:
  """Parses the value of --evaluators, a dict."""
  from vit_jax.configs import common, schema  # Late, for a fast --help.

  try:
    return schema.parse('evaluators', text, common.Evaluators)
  except ValueError as e:
    raise argparse.ArgumentTypeError(f'{e}') from e


_SPLIT = dict(
  dest='evaluate',
  metavar='SPLIT',
  help="split on which to evaluate the run in --workdir: 'test', 'train[:10%%]', ...",
)
_FLAGS = {
  '--dataset': dict(help='another data set with the same classes'),
  '--real': dict(
    metavar='FILE',
    help='ImageNet ReaL labels (real.json of '
    'github.com/google-research/reassessed-imagenet); adds accuracy_real',
  ),
  '--evaluators': dict(
    type=_evaluators,
    metavar='DICT',
    help="evaluators to add, as in config.evaluators: {'ece': {'type': 'MODULE:CLASS'}}",
  ),
  '--report': dict(
    nargs='?',
    const='',
    metavar='FOLDER',
    help='print precision, recall, F1, AUROC and calibration by class, the IoU by class of '
    'a segmentation, or the errors of a regression, and write them to FOLDER (default: '
    'report/ in the workdir)',
  ),
  '--predictions': dict(
    metavar='FILE',
    help='write label, predicted class and probabilities of each image, true and predicted '
    'numbers, or the measures of a segmentation to a .csv, .jsonl or .parquet file',
  ),
  '--calibrate': dict(
    metavar='SPLIT',
    help='first scale probabilities by a temperature that is chosen on SPLIT, which the '
    'run was not trained on, and store it in the workdir',
  ),
  '--option': dict(
    action='append',
    metavar='NAME=VALUE',
    help='override an option of the task, such as tight=1; may be repeated',
  ),
  '--compute_dtype': flags.COMPUTE_DTYPE,
}
NAMES = tuple(flag.removeprefix('--') for flag in _FLAGS)


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('evaluate', __doc__)
  parser.add({'--workdir': dict(help='folder of the run, local or gs://')})
  add_flags(parser, '--split')
  hosts.add_flags(parser)
  return parser


def add_flags(parser: flags.Parser, split: str) -> None:
  """Adds the flags of an evaluation; the flag named `split` sets `evaluate`."""
  parser.add({split: _SPLIT, **_FLAGS}, 'evaluation, without training')
  flags.add_trust_flags(parser)


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the flags; ValueError without --workdir or --split."""
  args = make_parser().parse_args(argv)
  flags.require(args, workdir='FOLDER')
  if not args.evaluate:
    raise ValueError('--split=SPLIT is required, such as --split=test (see --help)')
  return args


def run(args: argparse.Namespace) -> int:
  """Evaluates the run of the flags; returns the exit status."""

  def work() -> None:
    from vit_jax import predict
    from vit_jax.evaluators import evaluation

    options = evaluation.parse_options(args.option or ())
    mesh = evaluation.run_mesh(args.workdir)
    dtype = args.compute_dtype
    model = predict.load(args.workdir, mesh=mesh, compute_dtype=dtype)
    if args.calibrate is not None:
      model = evaluation.calibrated(model, args.calibrate)
    report = args.report
    if report == '':
      report = os.path.join(args.workdir, 'report')
    evaluation.evaluate(
      model,
      args.evaluate,
      args.dataset,
      real_labels=args.real,
      options=options,
      evaluators=args.evaluators,
      report=report,
      predictions=args.predictions,
    )

  return hosts.run(args, work)


def main(argv: Sequence[str]) -> int:
  """Evaluates a run; returns the exit status."""
  return run(parse(argv))
