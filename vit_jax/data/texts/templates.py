"""Prompt templates, which turn the name of a class into sentences.

CLIP's templates (Radford et al., ICML 2021; its notebook
Prompt_Engineering_for_ImageNet): `full` are the 80 of the paper, and `short` are the
bare name and the seven templates that forward selection chose, as used for LiT's
zero-shot results (arXiv 2111.07991).
"""

from collections.abc import Sequence
import os

from vit_jax.data.images import image_files
from vit_jax.data.lazy import tf
from vit_jax.distributed import text_files

_SHORT = """
{}
itap of a {}.
a bad photo of the {}.
a origami {}.
a photo of the large {}.
a {} in a video game.
art of the {}.
a photo of the small {}.
"""
# Completes "a ... photo of a {}." and "a ... photo of the {}.".
_PHOTOS = (
  'bad',
  'low resolution',
  'cropped',
  'bright',
  'clean',
  'dirty',
  'dark',
  'cool',
  'close-up',
  'black and white',
  'pixelated',
  'jpeg corrupted',
  'blurry',
  'good',
  'large',
  'small',
  'nice',
  'weird',
  '',
)
# Adjectives that complete "a photo of a ... {}." instead.
_OF = ('clean', 'dirty', 'cool', 'large', 'small', 'nice', 'weird')
_PICTURES = (
  'a sculpture of',
  'a rendering of',
  'graffiti of',
  'a tattoo of',
  'a drawing of',
  'a painting of',
  'a doodle of',
  'a sketch of',
  'a rendition of',
  'art of',
  'itap of',
)
_MADE_OF = ('embroidered', 'plastic', 'origami', 'toy', 'cartoon', 'plushie')
_OTHERS = """
a photo of many {}.
a photo of the hard to see {}.
a photo of a hard to see {}.
a photo of my {}.
a photo of one {}.
a {} in a video game.
the {} in a video game.
itap of my {}.
"""


def _photo(kind: str, article: str) -> str:
  if kind in _OF:
    return f'a photo of {article} {kind} {{}}.'
  return f'a {kind} photo of {article} {{}}.'.replace('  ', ' ')


def _full() -> tuple[str, ...]:
  """Returns the 80 templates of CLIP's paper."""
  templates = []
  for kind in _PHOTOS:
    templates += [_photo(kind, 'a'), _photo(kind, 'the')]
  for picture in _PICTURES:
    templates += [f'{picture} a {{}}.', f'{picture} the {{}}.']
  for material in _MADE_OF:
    templates += [f'a {material} {{}}.', f'the {material} {{}}.']
  return (*templates, *_OTHERS.strip().splitlines())


TEMPLATES = {'short': tuple(_SHORT.strip().splitlines()), 'full': _full()}


def get(name: str) -> tuple[str, ...]:
  """Returns templates, each with one `{}` for the name of a class.

  `name` is a key of TEMPLATES, a template, or a file with one template per line.
  ValueError if a template does not have one `{}`.
  """
  if name in TEMPLATES:
    return TEMPLATES[name]
  templates = [name]
  if '{' not in name and os.path.splitext(name)[1]:
    templates = lines(name, 'templates')
  for template in templates:
    if template.count('{}') != 1:
      raise ValueError(
        f"templates='{name}': the template '{template}' needs one {{}} for the name "
        f'of a class: use {", ".join(TEMPLATES)}, a template such as "a photo of a '
        '{}", or a file with one per line (--config.task_options.templates)'
      )
  return tuple(templates)


def lines(path: str, argument: str) -> list[str]:
  """Returns the non-empty lines of a text file.

  Args:
    path: the file.
    argument: name of the argument, for errors.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it has no lines.
  """
  if not tf.io.gfile.exists(path):
    raise FileNotFoundError(f"{argument}='{path}' does not exist: pass a file")
  content = image_files.read_file(path)
  texts = []
  for line in text_files.lines(content, path):
    if text := line.strip():
      texts.append(text)
  if not texts:
    raise ValueError(f"{argument}='{path}' has no lines: write one string per line")
  return texts


def listed(value: str, argument: str) -> list[str]:
  """Returns strings given as 'a;b;c', or as a file with one per line."""
  if ';' not in value and tf.io.gfile.exists(value):
    return lines(value, argument)
  return [text.strip() for text in value.split(';') if text.strip()]


def fill(names: Sequence[str], templates: Sequence[str]) -> list[str]:
  """Returns each of n names in each of m templates, n * m strings, name by name."""
  texts = []
  for name in names:
    texts += [template.replace('{}', name) for template in templates]
  return texts
