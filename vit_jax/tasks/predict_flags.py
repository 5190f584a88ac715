"""The flags of `vit_jax predict` that only some of this package's tasks have.

Without JAX, so that `vit_jax predict --help` is fast. A task outside the package declares
`FLAGS`, `IMAGELESS` and `NEEDS` in its class.
"""

import argparse
from collections.abc import Mapping
import types
from typing import Any, NamedTuple

_MOST_SAMPLES = 4096  # Largest --sample.


class PredictFlags(NamedTuple):
  """Flags of a task, see vit_jax.tasks.parts.Hooks."""

  FLAGS: dict[str, dict[str, Any]]
  IMAGELESS: tuple[str, ...] = ()
  NEEDS: Mapping[str, tuple[str, ...]] = types.MappingProxyType({})


def _count(text: str) -> int:
  """Parses --sample."""
  count = int(text) if text.isdecimal() else 0
  if not 1 <= count <= _MOST_SAMPLES:
    raise argparse.ArgumentTypeError(
      f"'{text}' must be from 1 to {_MOST_SAMPLES:,}, which fit into one picture"
    )
  return count


def _top(text: str) -> int:
  """Parses --top."""
  count = int(text) if text.isdecimal() else 0
  if count < 1:
    raise argparse.ArgumentTypeError(f"'{text}' must be an integer of at least 1")
  return count


_TOP = {'--top': dict(type=_top, help='number of classes or texts to print (5)')}
CLASSIFY = PredictFlags(_TOP)
DETECTION = PredictFlags(
  {'--threshold': dict(type=float, help='lowest score of an object, 0 to 1 (0.7)')}
)
IMAGE_TEXT = PredictFlags(
  {
    **_TOP,
    '--classes': dict(
      metavar='A;B;C',
      help="class names to choose from, as in --classes='a cat;a dog', or a file with one "
      "per line; the run's templates turn them into sentences",
    ),
    '--texts': dict(
      metavar='FILE',
      help='file with one text per line, to choose from, or without images to embed in '
      'the table --out',
    ),
  },
  IMAGELESS=('texts',),
  NEEDS={'top': ('images',), 'classes': ('images',)},
)
PIXELS = PredictFlags(
  {
    '--sample': dict(type=_count, metavar='NUMBER', help='number of images to draw'),
    '--complete': dict(
      nargs='+', metavar='FILE', help='image files whose lower part is drawn'
    ),
    '--rows': dict(
      type=int, help='rows of the image to keep (half; all if it is wider than tall)'
    ),
    '--seed': dict(type=int, help='random seed (0)'),
    '--temperature': dict(type=float, help='below 1: more likely colours (1)'),
    '--top_k': dict(type=int, help='sample from the k most likely colours (all)'),
  },
  IMAGELESS=('sample', 'complete'),
  NEEDS={
    'rows': ('complete',),
    'seed': ('sample', 'complete'),
    'temperature': ('sample', 'complete'),
    'top_k': ('sample', 'complete'),
  },
)
PIXELS_FINETUNE = PredictFlags(
  {**_TOP, **PIXELS.FLAGS}, PIXELS.IMAGELESS, {'top': ('images',), **PIXELS.NEEDS}
)
SEMANTIC = PredictFlags(
  {
    '--masks': dict(
      metavar='FOLDER',
      help='folder to write a mask per image to, a PNG with a palette whose numbers are '
      'those of the data; masks that are there are kept, so that the same command resumes',
    ),
  }
)
SEGMENT = PredictFlags(
  {
    **DETECTION.FLAGS,
    '--instances': dict(
      action='store_const',
      const=True,
      help='with EoMT: the instances of things, whose masks may overlap, instead of segments',
    ),
  }
)
BY_TASK = {
  'classify': CLASSIFY,
  'detect': DETECTION,
  'image_text': IMAGE_TEXT,
  'pixels': PIXELS,
  'pixels_finetune': PIXELS_FINETUNE,
  'segment': SEGMENT,
  'segment_semantic': SEMANTIC,
}
