r"""Exports a trained model for programs that serve it without this package.

  vit_jax export --workdir=/tmp/digits --to=stablehlo --out=/tmp/digits_hlo
  vit_jax export --weights=ViT-B_16.npz --to=saved_model --out=/tmp/b16
  vit_jax export --workdir=/tmp/digits --to=onnx --out=/tmp/digits_onnx

--to=stablehlo writes model.stablehlo, which jax.export.deserialize reads, one file
for CPUs, GPUs and TPUs; --to=saved_model a SavedModel in 1/, as TensorFlow Serving
wants it; --to=onnx model.onnx, for ONNX Runtime. Batches may have any size.

Of image and text towers the image tower is exported, and with --texts the text
tower, whose inputs are tokens; the outputs are embeddings of length 1.

The command runs what it has written on a few images, prints the largest difference
to the model, and leaves nothing behind if it is large. model.json beside it names
inputs, outputs and labels, and tells how images are prepared.
"""

from collections.abc import Sequence
import shlex

from vit_jax import console
from vit_jax.commands import flags


def make_parser() -> flags.Parser:
  parser = flags.Parser('export', __doc__)
  parser.add_argument(
    'images',
    nargs='*',
    help='images to compare on: files, folders, patterns or lists, as for '
    "vit_jax predict (those of the run's test split, or two photographs)",
  )
  flags.add_model_flags(parser)
  parser.add_argument(
    '--to',
    required=True,
    choices=('stablehlo', 'saved_model', 'onnx'),
    help='the format',
  )
  parser.add_argument('--out', required=True, help='new folder to write')
  parser.add_argument(
    '--features',
    action='store_true',
    help='exports the inputs of the head in place of the predictions',
  )
  parser.add_argument(
    '--texts',
    action='store_true',
    help='exports the text tower, of tokens, in place of the image tower',
  )
  parser.add_argument(
    '--dtype',
    choices=('bfloat16', 'float16'),
    help='stores the parameters in this type, in half of the space',
  )
  parser.add_argument(
    '--uint8',
    action='store_true',
    help='takes pixels from 0 to 255 in place of floats from -1 to 1',
  )
  parser.add_argument(
    '--image_size',
    type=_size,
    metavar='SIDE, HEIGHT,WIDTH or free',
    help='pixels of the images; free: any size, for models that allow it (as in '
    'the evaluation of the run)',
  )
  return parser


def _size(text):
  return text if text == 'free' else flags.height_width(text)


def main(argv: Sequence[str]) -> int:
  args = make_parser().parse_args(argv)
  console.load_tensorflow()
  from vit_jax import predict
  from vit_jax.data.images import listing
  from vit_jax.inference import export

  export.check(args.out, args.to, args.dtype, args.image_size)
  images = listing.expand(args.images) if args.images else None
  model = predict.of_flags(args)
  if args.texts and 'texts' not in model.FLAGS:
    raise ValueError(
      f"the task '{model.config.task}' has no text tower: leave out --texts"
    )
  model.export(
    args.out,
    args.to,
    features=args.features,
    dtype=args.dtype,
    uint8=args.uint8,
    image_size=args.image_size,
    images=images,
    **({'texts': True} if args.texts else {}),
    command=shlex.join(['vit_jax', 'export', *argv]),
  )
  return 0
