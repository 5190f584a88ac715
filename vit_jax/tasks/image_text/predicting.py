"""The predictor of image and text towers, for any classes and texts.

model = predict.load_weights('LiT-B16B.npz')
model.predict(['photo.jpg'], classes=['a cat', 'a dog'])
model.embed(['photo.jpg'])      # float32 [1, E]
model.embed_texts(['a cat'])    # float32 [1, E]
"""

from collections.abc import Sequence
import functools
import re
from typing import Any

from etils import epath
import numpy as np
from scipy import special

from vit_jax import console
from vit_jax.configs import schema
from vit_jax.data.images import images as images_lib
from vit_jax.data.texts import templates as templates_lib
from vit_jax.distributed import files, sharding
from vit_jax.inference import predictor as predictor_lib, tables
from vit_jax.tasks.image_text import similarity_plots, zero_shot

_SHOWN = 5  # Texts on a page.
_MOST_TYPED = 10_000  # Characters of the classes on a page.
_SURROGATE = re.compile('[\ud800-\udfff]')  # Which UTF-8 cannot encode.


class Predictor(predictor_lib.Predictor):
  """Predicts which of given classes or texts fit images."""

  FLAGS = ('classes', 'texts')

  @functools.cached_property
  def _embedder(self):
    mesh = sharding.mesh_of(self.params)
    return zero_shot.Embedder(self.task, mesh)

  @functools.cached_property
  def _scale(self):
    """The factor on products of embeddings, and the bias added to them."""
    t = np.exp(np.asarray(self.params['t'])).item()
    return t, np.asarray(self.params.get('b', 0.0)).item()

  def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
    """Returns the embeddings of texts, float32 [n, E], of length 1."""
    texts = _listed('texts', texts)
    return self._embedder(self.params, self.extra, texts)

  def embed_classes(self, classes: Sequence[str]) -> np.ndarray:
    """Returns the embeddings of classes, float32 [C, E]: means over templates."""
    classes = _listed('classes', classes)
    return self._embedder.classes(self.params, self.extra, classes)

  def logits(self, images: Sequence[Any], embeddings: np.ndarray) -> np.ndarray:
    """Returns the logits of images and texts, float32 [n, m].

    For images see `outputs`; embeddings are of texts or classes, [m, E].
    """
    return self._logits(self.outputs(images), embeddings)

  def _logits(self, zimg, embeddings):
    t, b = self._scale
    return t * zimg @ embeddings.T + b

  def probabilities(self, logits) -> np.ndarray:
    """Returns the probabilities of texts for images, float [n, m].

    By softmax over the texts; after training with the sigmoid loss, each on its own.
    """
    logits = np.asarray(logits, np.float64)
    if 'b' in self.params:
      return special.expit(logits)
    return special.softmax(logits, axis=-1)

  def predict(
    self,
    images: Sequence[Any],
    classes: Sequence[str] | None = None,
    texts: Sequence[str] | None = None,
    top: int = 5,
    **others,
  ) -> list[list[tuple[str, float]]]:
    """Returns (text, probability) of the `top` best texts of each image.

    Takes images, see `outputs`, and either names of classes, which become sentences by
    the templates of the task, or texts as they are.
    """
    self._refuse(others)
    schema.check('top', top, schema.Count, '--')
    words, embeddings = self._choices(classes, texts)
    return list(self._best(images, words, embeddings, top))

  def _choices(self, classes, texts):
    """Returns the classes or texts to choose from, and their embeddings."""
    if (classes is None) == (texts is None):
      raise ValueError(
        'pass either classes to choose from (--classes="a cat;a dog") or texts '
        '(--texts=FILE)'
      )
    if classes is None:
      return list(texts), self.embed_texts(texts)
    return list(classes), self.embed_classes(classes)

  def _best(self, images, words, embeddings, top):
    for _, _, zimg in self.stream(images):
      yield self._of_row(zimg, words, embeddings, top)

  def _of_row(self, zimg, words, embeddings, top):
    row = self.probabilities(self._logits(zimg, embeddings))
    best = np.argsort(-row, kind='stable')[:top]
    return [(words[i], float(row[i])) for i in best]

  def _given(self, args):
    """Returns the classes and the texts of the flags, lists or None."""
    return {
      'classes': args.classes and templates_lib.listed(args.classes, 'classes'),
      'texts': args.texts and templates_lib.lines(args.texts, 'texts'),
    }

  def table_options(self, args):
    return {**super().table_options(args), **self._given(args)}

  def _columns(self, top=5, threshold=None, image_size=None, classes=None, texts=None):
    if classes is None and texts is None:
      raise tables.NoColumns(
        'for a table of an image and a text tower, pass classes '
        '(--classes="a cat;a dog") or texts (--texts=FILE), or write the embeddings '
        '(--embeddings)'
      )
    schema.check('top', top, schema.Count, '--')
    how = (*self._choices(classes, texts), top)
    return tables.choices(lambda zimg: self._of_row(zimg, *how))

  def write_texts(self, args) -> None:
    """Writes a table of the embeddings of the texts in a file, `args.texts`."""
    if args.out.endswith('/'):
      raise ValueError(
        f"out='{args.out}' is a folder: pass a file for the texts, such as "
        '--out=texts.parquet'
      )
    texts = templates_lib.lines(args.texts, 'texts')
    rows = [
      {'text': text, 'embedding': row}
      for text, row in zip(texts, self.embed_texts(texts))
    ]
    types = {'text': str, 'embedding': (float, len(rows[0]['embedding']))}
    ending = epath.Path(args.out).suffix
    with files.replacing(epath.Path(args.out)) as file:
      tables.encode(iter([tables.to_arrow(rows, types)]), file, ending)
    console.say(f"'{args.out}': {console.counted(len(rows), 'text')}")

  def report(self, images, args):
    """Yields the path of each image, then its best texts as lines.

    With `args.out` also draws the matrix of similarities.
    """
    words, embeddings = self._choices(**self._given(args))
    for path, found in zip(images, self._best(images, words, embeddings, args.top)):
      lines = [f'  {100 * p:6.2f} %  {word}' for word, p in found]
      yield '\n'.join([path, *lines])
    if args.out:
      inputs, zimg = self.run(images, keep=('image',))
      logits = self._logits(zimg, embeddings)
      picture = similarity_plots.matrix(inputs['image'], words, logits)
      epath.Path(args.out).write_bytes(images_lib.encode_png(picture))
      yield f'Wrote the similarities to {args.out}'

  def export(self, out, to, texts=False, **options):
    """Exports the image tower, or with `texts` the text tower; see Predictor.export.

    The text tower reads `tokens`, int32 [B, max_len]. Both return `embedding`, float32
    [B, E], of length 1.
    """
    for name in ('uint8', 'image_size', 'features', 'images'):
      if texts and options.get(name):
        raise ValueError(
          f'{name}={options[name]!r} is for images, but the text tower reads '
          f'tokens: leave out --{name} or --texts'
        )
    names = ('txt' if texts else 'img', 't', 'b')
    params = {k: x for k, x in self.params.items() if k in names}
    task = self.task.of_texts() if texts else self.task
    tower = predictor_lib.Predictor(task, params, self.extra, self.step)
    return tower.export(out, to, **options)

  def page(self):
    """Shows which of the typed texts fit a photo."""
    import gradio as gr

    from vit_jax.inference import demo

    typed = gr.Textbox('a cat\na dog\na car', lines=6, label='Classes, one per line')
    label = gr.Label(label='Best matches', num_top_classes=_SHOWN)

    def show(photo, lines):
      if len(lines) > _MOST_TYPED:
        raise ValueError(
          f'the classes have {len(lines):,} characters: type at most {_MOST_TYPED:,}'
        )
      words = [line.strip() for line in lines.split('\n') if line.strip()]
      if not words:
        return {}
      (found,) = self.predict([photo.path], classes=words, top=_SHOWN)
      return {label: demo.confidences(found)}

    return show, [typed], [label]


def _listed(name, texts) -> list[str]:
  """Returns texts as a list; ValueError for a string or none."""
  if isinstance(texts, str) or not len(texts):
    raise ValueError(
      f'{name}={texts!r:.80} must be a list of texts: pass [text] for a single one'
    )
  for text in texts:
    if isinstance(text, str) and _SURROGATE.search(text):
      raise ValueError(
        f'{name}={text!a:.80} is not valid Unicode: pass other characters'
      )
  return list(texts)
