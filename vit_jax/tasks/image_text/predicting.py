"""The predictor of image and text towers, for any classes and texts.

model = predict.load_weights('LiT-B16B.npz')
model.predict(['photo.jpg'], classes=['a cat', 'a dog'])
model.embed(['photo.jpg'])      # float32 [1, E]
model.embed_texts(['a cat'])    # float32 [1, E]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
_SURROGATE = re.compile('[\ud800-\udfff]')  # UTF-8 cannot encode these.


class Predictor(predictor_lib.Predictor):
  """Predicts which of given classes or texts fit images."""

  @functools.cached_property
  def _embedder(self) -> zero_shot.Embedder:
    mesh = sharding.mesh_of(self.params)
    return zero_shot.Embedder(self.task, mesh)

  @functools.cached_property
  def _scale(self) -> tuple[float, float]:
    """Returns the factor on products of embeddings, and the bias added to them."""
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

  def _logits(self, zimg: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    t, b = self._scale
    return t * zimg @ embeddings.T + b

  def probabilities(self, logits: np.ndarray) -> np.ndarray:
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
    **options: Any,
  ) -> list[list[tuple[str, float]]]:
    """Returns (text, probability) of the `top` best texts of each image.

    Args:
      images: see `outputs`.
      classes: names of classes, which become sentences by the templates of the task.
      texts: texts as they are, instead of `classes`.
      top: number of texts.
      **options: none.
    """
    self._refuse(options)
    schema.check('top', top, schema.Count, '--')
    choices, embeddings = self._choices(classes, texts)
    return list(self._best(images, choices, embeddings, top))

  def _choices(
    self, classes: Sequence[str] | None, texts: Sequence[str] | None
  ) -> tuple[list[str], np.ndarray]:
    """Returns the classes or texts to choose from, and their embeddings."""
    if classes is not None and texts is None:
      return list(classes), self.embed_classes(classes)
    if texts is not None and classes is None:
      return list(texts), self.embed_texts(texts)
    raise ValueError(
      'pass either classes to choose from (--classes="a cat;a dog") or texts '
      '(--texts=FILE)'
    )

  def _best(
    self,
    images: Sequence[Any],
    choices: Sequence[str],
    embeddings: np.ndarray,
    top: int,
  ) -> Iterator[list[tuple[str, float]]]:
    """Yields the best choices for each image."""
    for _, _, zimg in self.stream(images):
      yield self._top_choices(zimg, choices, embeddings, top)

  def _top_choices(
    self,
    zimg: np.ndarray,
    choices: Sequence[str],
    embeddings: np.ndarray,
    top: int,
  ) -> list[tuple[str, float]]:
    """Returns the best choices for an embedding of an image."""
    probabilities = self.probabilities(self._logits(zimg, embeddings))
    best = np.argsort(-probabilities, kind='stable')[:top]
    return [(choices[i], float(probabilities[i])) for i in best]

  def parse_flags(self, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Reads classes and texts: lists, or None."""
    parsed = dict(flags)
    if parsed.get('classes'):
      parsed['classes'] = templates_lib.listed(parsed['classes'], 'classes')
    if parsed.get('texts'):
      parsed['texts'] = templates_lib.lines(parsed['texts'], 'texts')
    return parsed

  def _columns(
    self,
    top: int = 5,
    classes: Sequence[str] | None = None,
    texts: Sequence[str] | None = None,
  ) -> tables.Columns:
    if classes is None and texts is None:
      raise tables.NoColumns(
        'for a table of an image and a text tower, pass classes '
        '(--classes="a cat;a dog") or texts (--texts=FILE), or write the embeddings '
        '(--embeddings)'
      )
    schema.check('top', top, schema.Count, '--')
    choices, embeddings = self._choices(classes, texts)
    return tables.choices(
      lambda zimg: self._top_choices(zimg, choices, embeddings, top)
    )

  def _write_texts(self, texts: Sequence[str], out: epath.PathLike | None) -> None:
    """Writes a table of the embeddings of texts to a file."""
    if not tables.is_table(out) or str(out).endswith('/'):
      raise ValueError(
        f'out={out} must be the file of a table of the texts, since there are no '
        'images: pass --out=texts.parquet, .csv or .jsonl, or images'
      )
    rows = []
    for text, embedding in zip(texts, self.embed_texts(texts)):
      rows.append({'text': text, 'embedding': embedding})
    types = {'text': str, 'embedding': (float, len(rows[0]['embedding']))}
    path = epath.Path(out)
    with files.replacing(path) as file:
      tables.encode(iter([tables.to_arrow(rows, types)]), file, path.suffix)

  def report(
    self,
    images: Sequence[str],
    *,
    top: int = 5,
    out: epath.PathLike | None = None,
    classes: Sequence[str] | None = None,
    texts: Sequence[str] | None = None,
  ) -> Iterator[str]:
    """Yields the path of each image, then its best texts as lines.

    With `out` also draws the matrix of similarities; without images, writes a table of
    the embeddings of the texts.
    """
    if not images and texts is not None:
      self._write_texts(texts, out)
      yield f"'{out}': {console.pluralize(len(texts), 'text')}"
      return
    choices, embeddings = self._choices(classes, texts)
    for path, predictions in zip(images, self._best(images, choices, embeddings, top)):
      lines = [f'  {100 * p:6.2f} %  {text}' for text, p in predictions]
      yield '\n'.join([path, *lines])
    if out:
      inputs, zimg = self.run(images, keep=('image',))
      logits = self._logits(zimg, embeddings)
      picture = similarity_plots.matrix(inputs['image'], choices, logits)
      epath.Path(out).write_bytes(images_lib.encode_png(picture))
      yield f'Wrote the similarities to {out}'

  def export(
    self, out: epath.PathLike, to: str, texts: bool = False, **options: Any
  ) -> float:
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
    task = self.task.text_task() if texts else self.task
    tower = predictor_lib.Predictor(task, params, self.extra, self.step)
    return tower.export(out, to, **options)

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Shows which of the typed texts fit a photo."""
    import gradio as gr

    from vit_jax.inference import demo

    textbox = gr.Textbox('a cat\na dog\na car', lines=6, label='Classes, one per line')
    label = gr.Label(label='Best matches', num_top_classes=_SHOWN)

    def show(photo: demo.Photo, lines: str) -> dict:
      if len(lines) > _MOST_TYPED:
        raise ValueError(
          f'the classes have {len(lines):,} characters: type at most {_MOST_TYPED:,}'
        )
      classes = [line.strip() for line in lines.split('\n') if line.strip()]
      if not classes:
        return {}
      [predictions] = self.predict([photo.path], classes=classes, top=_SHOWN)
      return {label: demo.confidences(predictions)}

    return show, [textbox], [label]


def _listed(name: str, texts: Sequence[str]) -> list[str]:
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
