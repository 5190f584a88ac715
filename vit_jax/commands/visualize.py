r"""Draw the paper's figures for a run or a file of weights.

  vit_jax visualize --workdir=/tmp/digits --out=/tmp/figures
  vit_jax visualize --workdir=/tmp/run --images a.jpg b.png --out=DIR
  vit_jax visualize --weights=ViT-B_16.npz --images a.jpg --out=DIR
  vit_jax visualize --workdir=/tmp/run --out=DIR \
    --figures filters attention_rollout
  vit_jax visualize --workdir=/tmp/detr --images street.jpg --out=DIR \
    --figures encoder_attention query_attention --points 0.3,0.5 0.7,0.4
  vit_jax visualize --workdir=/tmp/run --images a.jpg --out=DIR \
    --figures explanations --explain legrad grad_cam --class=bee

Each command writes one PNG per figure, and index.html, which shows all of them. It
leaves out figures that the model cannot have, and says why.
Without --images it draws the first images of the run's test split. Needs the extra
`plots`.

The figures: attention_rollout, attention_maps, register_attention, patch_components
(colours as in DINOv2's paper), attention_distance, filters, position_similarity,
reconstructions (of masked patches), learning_curves, explanations and
class_explanations (how much each patch speaks for a class), confusion and mistakes (of a
classifier, on the run's test split or --split); segmentation (classes of pixels, true and
predicted, and errors); for a detector encoder_attention (at
the centres of its boxes, or --points), query_attention, and query_boxes (on the whole
split).
"""

import argparse
from collections.abc import Sequence

from vit_jax import console
from vit_jax.commands import flags

_MOST = 256  # Maximum number of images.
# Flags that few figures read (gallery.Entry.flags), and their names in the namespace.
_FLAGS_OF_FIGURES = {
  '--points': 'points',
  '--foreground': 'foreground',
  '--explain': 'explain',
  '--class': 'class_name',
}


def make_parser() -> flags.Parser:
  """Returns the parser of the command."""
  parser = flags.Parser('visualize', __doc__)
  flags.add_model_flags(parser)
  flags.add_image_flags(parser)
  parser.add_argument(
    '--images',
    nargs='+',
    help='images of any size, folders or patterns (the first images of the split)',
  )
  parser.add_argument(
    '--split', help="split of the run's data set (the run's test split)"
  )
  parser.add_argument(
    '--num_images',
    type=int,
    help='number of images to take from the split (8)',
  )
  parser.add_argument(
    '--figures', nargs='+', metavar='NAME', help='figures to draw (all)'
  )
  parser.add_argument(
    '--points',
    nargs='+',
    type=_point,
    metavar='X,Y',
    help='points for encoder_attention, as shares of width and height (box centres)',
  )
  parser.add_argument(
    '--foreground',
    choices=('positive', 'negative'),
    default='',
    help='patch_components: colour only patches whose first component has this sign',
  )
  parser.add_argument(
    '--explain',
    nargs='+',
    metavar='METHOD',
    help='methods of explanations: legrad, rollout_gradient, grad_cam, rollout (all)',
  )
  parser.add_argument(
    '--class',
    dest='class_name',
    metavar='NAME',
    help='class to explain in explanations (the predicted one)',
  )
  parser.add_argument(
    '--out', required=True, help='new or empty folder for the figures'
  )
  return parser


def _point(text: str) -> tuple[float, float]:
  """Parses a point such as '0.3,0.5'."""
  try:
    x, y = map(float, text.split(','))
  except ValueError as e:
    raise argparse.ArgumentTypeError(
      f"'{text}' is not a point: pass x,y as shares of width and height, such as 0.3,0.5"
    ) from e
  return x, y


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the flags; ValueError if they ask for nothing to draw."""
  args = make_parser().parse_args(argv)
  if args.split is not None and not args.workdir:
    raise ValueError(
      f'--split={args.split} needs a run: pass --workdir=RUN, or omit --split'
    )
  if args.split is not None:
    from vit_jax.configs import schema  # Late: takes a second.

    schema.check('split', args.split, schema.Split, '--')
  if args.num_images is not None and args.images:
    raise ValueError(
      f'--num_images={args.num_images} takes images from a split, and --images names '
      'them: leave out one of the two'
    )
  args.num_images = 8 if args.num_images is None else args.num_images
  if not 1 <= args.num_images <= _MOST:
    raise ValueError(f'--num_images={args.num_images} must be from 1 to {_MOST}')
  return args


def main(argv: Sequence[str]) -> int:
  """Draws figures into a folder; returns the exit status."""
  args = parse(argv)
  from vit_jax.data.images import listing

  if args.images:
    args.images = listing.expand(args.images)
    if len(args.images) > _MOST:
      raise ValueError(
        f'--images names {len(args.images):,} images: pass at most {_MOST}, since '
        'figures show all of them'
      )
  _draw(args)
  return 0


def _draw(args: argparse.Namespace) -> None:
  """Draws the figures that the flags ask for."""
  from vit_jax.figures import drawing, gallery, html_page, visualize
  from vit_jax.run import workdir as workdir_lib

  drawing.require_matplotlib()
  out = html_page.check(workdir_lib.absolute(args.out))
  model = flags.load_model(args, max_image_pixels=args.max_image_pixels)
  subject = visualize.subject(
    model,
    args.images,
    args.split,
    args.num_images,
    args.points,
    args.foreground,
    args.explain,
    args.class_name,
  )
  entries, lacking = gallery.choose(subject, args.figures)
  names = ', '.join(entry.name for entry in entries)
  for flag, name in _FLAGS_OF_FIGURES.items():
    is_read = any(flag in entry.flags for entry in entries)
    if getattr(args, name) and not is_read:
      raise ValueError(
        f'{flag} changes none of the figures {names}: leave it out, or draw a figure '
        'that it changes (--figures)'
      )
  for name, reason in lacking.items():
    console.log(f'Left out: {name}: {reason}.')
  sections = []
  for entry in entries:
    with console.status(entry.title):
      figures = gallery.draw(entry, subject)
      pictures = {name: drawing.png(figure) for name, figure in figures.items()}
    sections.append((entry, pictures))
  title, facts = visualize.describe(model)
  if args.weights:
    facts['weights'] = args.weights
  html_page.write(out, f'Inside {title}', facts, sections, lacking)
  count = sum(len(pictures) for _, pictures in sections)
  console.log(f'Wrote {count} figures and {out}/index.html, which shows them all.')
