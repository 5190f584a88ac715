r"""Shows what a trained model makes of photographs, on a page for your browser.

  vit_jax demo --workdir=/tmp/digits
  vit_jax demo --weights=ViT-B_16.npz --port=8000

Open the address that the command prints, and drop a photograph on the page. A
classifier shows the most probable classes, and attention rollout over the image; a
detector boxes or segments above a score that you choose, and the attention of the
box that you click; a model of pixels (configs/igpt.py) completes the image.

Only this machine can open the page unless you give another --host. What is
uploaded is deleted after ten minutes, and when the command ends. Needs Gradio:
pip install -e '.[demo]'.
"""

from collections.abc import Sequence

from vit_jax import console
from vit_jax.commands import flags


def make_parser() -> flags.Parser:
  parser = flags.Parser('demo', __doc__)
  flags.add_model_flags(parser)
  parser.add_argument(
    '--host',
    default='127.0.0.1',
    help='address to listen on; 0.0.0.0: all of this machine, for everybody who can '
    'reach it (127.0.0.1)',
  )
  parser.add_argument(
    '--port', type=flags.count, help='port (the first free one from 7860)'
  )
  return parser


def main(argv: Sequence[str]) -> int:
  """Shows the model of the command line until Ctrl-C."""
  args = make_parser().parse_args(argv)
  console.load_tensorflow()
  from vit_jax import predict
  from vit_jax.figures import drawing, visualize
  from vit_jax.inference import demo

  drawing.require_matplotlib()
  demo.check(args.host, args.port)
  model = predict.of_flags(args)
  demo.serve(model, *visualize.describe(model), args.host, args.port)
  return 0
