r"""Export a model to ONNX, StableHLO or SavedModel.

  vit_jax export --workdir=/tmp/digits --to=stablehlo --out=/tmp/digits_hlo
  vit_jax export --weights=ViT-B_16.npz --to=saved_model --out=/tmp/b16

Writes model.stablehlo (for jax.export.deserialize, on CPUs, GPUs and TPUs), 1/ (for
TensorFlow Serving) or model.onnx (for ONNX Runtime). Batches may have any size.
model.json describes inputs, outputs, labels and preprocessing.

The exported model is run on random images and compared with the original; if the
difference is large, nothing is kept.
"""

from collections.abc import Sequence
import shlex

from vit_jax import console
from vit_jax.commands import flags


def _size(text: str) -> str | tuple[int, int]:
  return text if text == 'free' else flags.height_width(text)


_FLAGS = {
  '--to': dict(
    required=True, choices=('stablehlo', 'saved_model', 'onnx'), help='format'
  ),
  '--out': dict(required=True, help='new folder to write'),
  '--features': dict(
    action='store_true', help='export the inputs of the head instead of predictions'
  ),
  '--texts': dict(
    action='store_true',
    help='export the text tower, whose inputs are tokens, instead of the image tower',
  ),
  '--dtype': dict(
    choices=('bfloat16', 'float16', 'int8'),
    help='store the parameters in half, or their kernels in a quarter, of the space',
  ),
  '--uint8': dict(
    action='store_true', help='take pixels from 0 to 255 instead of floats in [-1, 1]'
  ),
  '--image_size': dict(
    type=_size,
    metavar='SIDE, HEIGHT,WIDTH or free',
    help="image size in pixels; free: any size, if the model allows it (the run's "
    'evaluation size)',
  ),
}


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('export', __doc__)
  flags.add_model_flags(parser)
  parser.add(_FLAGS)
  return parser


def main(argv: Sequence[str]) -> int:
  """Exports a model; returns the exit status."""
  args = make_parser().parse_args(argv)
  console.interrupt_on_signals()
  from vit_jax.inference import export

  export.check(args.out, args.to, args.dtype, args.image_size)
  model = flags.load_model(args)
  if args.texts and not hasattr(model, 'embed_texts'):
    raise ValueError(
      f"the task '{model.config.task}' has no text tower: leave out --texts"
    )
  options = {'texts': True} if args.texts else {}
  model.export(
    args.out,
    args.to,
    features=args.features,
    dtype=args.dtype,
    uint8=args.uint8,
    image_size=args.image_size,
    command=shlex.join(['vit_jax', 'export', *argv]),
    **options,
  )
  return 0
