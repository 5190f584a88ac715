r"""Count the compute of pre-training, its time and its price.

  vit_jax compute
  vit_jax compute --model s16 bit_r50x1 --dataset=imagenet21k --epochs=90
  vit_jax compute --model b16 --num_examples=5e6 --num_classes=400 \
    --epochs=30 --image_size=384 --chip=v5e --mfu=0.5 --price=1.2

Without flags, counts the pre-training runs of the paper's tables 6 and 2, next to the
published exaFLOPs and core-days. No model is compiled or run: it takes seconds.

A device (a core of TPU v2 and v3, a chip of later versions) reaches --mfu of its peak.
--price is per hour and chip; chips of v2 and v3 have two cores. Only matrix products
and convolutions count: 2 FLOPs per multiply-add, times 3 for the forward and backward
pass.
"""

from collections.abc import Sequence

from vit_jax.commands import flags


def make_parser() -> flags.Parser:
  parser = flags.Parser('compute', __doc__)
  parser.add_argument(
    '--model', nargs='+', help='models to count (the ones of tables 6 and 2)'
  )
  parser.add_argument('--epochs', type=float, help='epochs of the models')
  parser.add_argument('--dataset', help='data set of known size')
  parser.add_argument(
    '--num_examples', type=float, help='images per epoch of any other data'
  )
  parser.add_argument(
    '--num_classes', type=int, help='width of the head (classes of the data set)'
  )
  parser.add_argument(
    '--image_size',
    type=flags.height_width,
    help='SIZE or HEIGHT,WIDTH in pixels (224)',
  )
  parser.add_argument('--chip', default='v3', help='TPU version (v3)')
  parser.add_argument(
    '--mfu',
    type=float,
    default=0.4,
    help="share of the devices' peak that the training reaches (0.4)",
  )
  parser.add_argument(
    '--price', type=float, help='price per hour and chip, in any currency'
  )
  parser.add_argument(
    '--json', help='file for the table: a JSON list with one object per row'
  )
  return parser


def main(argv: Sequence[str]) -> int:
  args = make_parser().parse_args(argv)
  flags.check_output('json', args.json)
  from vit_jax.planning import costs

  costs.run(args)
  return 0
