r"""Serve a web demo of a model for your photos.

  vit_jax demo --workdir=/tmp/digits
  vit_jax demo --weights=ViT-B_16.npz --port=8000

Open the printed address in a browser and drop a photo on the page. By default only
this machine can reach it. Uploads are deleted after ten minutes and when the command
ends. Needs the extra `demo`.
"""

from collections.abc import Sequence

from vit_jax.commands import flags

# A larger photo takes seconds and gigabytes to decode, and visitors wait for each other.
_MAX_PIXELS = 25_000_000

_FLAGS = {
  '--host': dict(
    default='127.0.0.1',
    help='address to listen on; 0.0.0.0: open to everyone who can reach this machine '
    '(127.0.0.1)',
  ),
  '--port': dict(type=flags.count, help='port (the first free one from 7860)'),
}


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('demo', __doc__)
  flags.add_model_flags(parser)
  flags.add_image_flags(parser, _MAX_PIXELS)
  parser.add(_FLAGS)
  return parser


def main(argv: Sequence[str]) -> int:
  """Serves the demo until Ctrl-C."""
  args = make_parser().parse_args(argv)
  from vit_jax.figures import drawing, visualize
  from vit_jax.inference import demo

  drawing.require_matplotlib()
  demo.check(args.host, args.port)
  model = flags.load_model(args, max_image_pixels=args.max_image_pixels)
  demo.serve(model, *visualize.describe(model), args.host, args.port)
  return 0
