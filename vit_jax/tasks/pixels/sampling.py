"""Samples and completes images with a trained iGPT, and measures its bits."""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Annotated, Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import console, models_igpt, preprocess
from vit_jax.configs import schema
from vit_jax.data.images import images as images_lib
from vit_jax.data.lazy import tf
from vit_jax.figures import grids
from vit_jax.inference import engine, predictor as predictor_lib, tables

_ACROSS = 8  # Samples in a row of a picture.
_COMPLETIONS = 3  # Completions of an image in the web demo.
_Seed = Annotated[int, schema.Range(ge=0, le=2**32 - 1)]  # JAX drops further bits.


class Predictor(predictor_lib.Predictor):
  """Samples from a model of pixels; see vit_jax/tasks/pixels/pixels.py."""

  @functools.cached_property
  def _bits(self) -> Callable[..., jax.Array]:
    def bits(params: Any, extra: Any, batch: dict[str, jax.Array]) -> jax.Array:
      results = self.task.read(params, extra, batch)
      return results['bits'].mean(axis=1, where=results['counted'] > 0)

    return jax.jit(bits)

  def log_likelihood(self, images: Sequence[Any]) -> np.ndarray:
    """Returns the bits per dimension (per pixel) of each image, float32 [n].

    For `images` and errors see `outputs`; they are resized as in evaluation.
    """
    return self.run(images, self._bits, keep=())[1]

  def sample(
    self,
    n: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
  ) -> np.ndarray:
    """Samples images.

    Args:
      n: number of images.
      seed: determines them.
      temperature: divides the logits: below 1 for more likely colours.
      top_k: number of the most likely colours to sample from; None for all.

    Returns:
      uint8 [n, H, W, 3].

    Raises:
      ValueError: if an argument is out of range, or the model predicts masked pixels
        (objective 'bert').
    """
    schema.check('sample', n, schema.Count, '--')
    self._check_objective()
    colors = self._draw(np.zeros((n, 0), np.int32), seed, temperature, top_k)
    return grids.to_pixels(self.task.images(colors))

  def complete(
    self,
    images: Sequence[Any],
    rows: int | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
  ) -> np.ndarray:
    """Completes the lower part of images.

    Args:
      images: see `outputs`. If `rows` is None, an image with a smaller aspect
        ratio (height / width) than the model's images is the upper part of one.
        All others are resized to the model's size as in evaluation.
      rows: number of rows to keep of the model's H; by default all rows of an upper
        part, and half of the rows of any other image.
      seed, temperature, top_k: see `sample`, also for errors.

    Returns:
      uint8 [n, H, W, 3], in the colours of the palette.
    """
    _, completed, _ = self._complete(images, rows, seed, temperature, top_k)
    return grids.to_pixels(completed)

  def _complete(
    self,
    images: Sequence[Any],
    rows: int | None,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the images and completions [n, H, W, C], and the rows kept [n]."""
    self._check_objective()
    schema.check('rows', rows, schema.Count | None, '--')
    height, width = self.task.image_size
    if rows is not None and rows >= height:
      raise ValueError(
        f'rows={rows} leaves nothing to complete, since images of the model have '
        f'{height} rows: keep from 1 to {height - 1}'
      )
    read = functools.partial(self._upper_part, rows=rows)
    max_pixels = self.config.max_image_pixels
    upper_parts, counts = [], []
    for image in images:
      upper, count = preprocess.from_user(image, read, max_pixels)
      upper_parts.append(upper)
      counts.append(count)
    originals, kept_rows = np.stack(upper_parts), np.stack(counts)
    colors = np.array(self.task.colors(originals))
    for count in np.unique(kept_rows):
      indices = np.flatnonzero(kept_rows == count)
      prefix = colors[indices, : count * width]
      colors[indices] = self._draw(prefix, seed, temperature, top_k)
    return originals, self.task.images(colors), kept_rows

  def _check_objective(self) -> None:
    """Raises ValueError if the model does not predict pixel by pixel."""
    if not self.task.model.causal:
      raise ValueError(
        f"the model of '{self.origin}' has learned to predict masked pixels "
        "(objective 'bert') and cannot sample images: use a run of the objective "
        "'ar' (configs/igpt.py:SIZE,DATA,SIDE,ar)"
      )

  def _upper_part(self, encoded: bytes, rows: int | None) -> tuple[np.ndarray, int]:
    """Returns an image, float32 [H, W, C], and how many rows of it to keep."""
    height, width = self.task.image_size
    pixels = images_lib.decode(encoded, self.config.pp.channels)
    count = round(pixels.shape[0] * width / pixels.shape[1]) or 1
    if rows is not None or count >= height:
      image = self.task.inputs({'image': encoded})['image']
      return image.numpy(), rows or height // 2
    upper = tf.image.resize(images_lib.to_float(pixels), (count, width)).numpy()
    return np.pad(upper, ((0, height - count), (0, 0), (0, 0))), count

  def _draw(
    self, prefix: np.ndarray, seed: int, temperature: float, top_k: int | None
  ) -> np.ndarray:
    """Samples the pixels after `prefix`, int32 [n, M]; returns int32 [n, N]."""
    schema.check('seed', seed, _Seed, '--')
    keys = jax.random.split(jax.random.key(seed), len(prefix))

    def sample(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
      prefix, keys = rows
      return models_igpt.sample(
        self.task.model, self.params, prefix, keys, temperature, top_k
      )

    size = min(self.BATCH, len(prefix))
    return engine.by_parts(sample, (jnp.asarray(prefix), keys), size)

  def predict(self, images: Sequence[Any], **options: Any) -> list[Any]:
    """Returns the bits per dimension of each image."""
    self._refuse(options)
    return [float(bits) for bits in self.log_likelihood(images)]

  def _columns(self) -> tables.Columns:
    name = 'bits_per_dimension'
    return tables.Columns({name: float}, lambda _, bits: {name: bits}, self._bits)

  def describe(self, images: Sequence[str], **options: Any) -> Iterable[str]:
    """Returns what `report` prints for each image: its bits."""
    return [
      f'{image}\n  {bits:.4f} bits per dimension'
      for image, bits in zip(images, self.log_likelihood(images))
    ]

  def report(
    self,
    images: Sequence[str],
    *,
    out: epath.PathLike | None = None,
    sample: int | None = None,
    complete: Sequence[str] = (),
    rows: int | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    **options: Any,
  ) -> Iterable[str]:
    """Writes samples, or completions of images; else describes images.

    Args:
      images: paths of images to describe.
      out: picture to write, for `sample` and `complete`.
      sample: number of images to sample.
      complete: paths of images to complete.
      rows: see `complete`.
      seed, temperature, top_k: see `sample`.
      **options: of `describe`.

    Returns:
      Lines about what was written.
    """
    sources = {'images': images, '--sample': sample, '--complete': complete}
    names = [name for name, value in sources.items() if value]
    if len(names) != 1:
      raise ValueError(
        f'pass image files, --sample=NUMBER or --complete FILE, not {" and ".join(names)}'
      )
    if images:
      return self.describe(images, **options)
    if out is None or tables.is_table(out):
      raise ValueError(f'out={out} must be the path of a picture: pass --out=FILE.png')
    if sample is not None:
      picture = draw(self.sample(sample, seed, temperature, top_k))
      lines = [f'Wrote {console.pluralize(sample, "sample")} to {out}']
    else:
      originals, completed, kept_rows = self._complete(
        complete, rows, seed, temperature, top_k
      )
      columns = {'given': cut(originals, kept_rows), 'completed': completed}
      picture = grids.side_by_side(columns)
      height = self.task.image_size[0]
      lines = [
        f'{path}: {count} of {height} rows kept'
        for path, count in zip(complete, kept_rows)
      ]
      lines.append(f'Wrote the completions to {out}')
    epath.Path(out).write_bytes(images_lib.encode_png(picture))
    return lines

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Shows an image without its lower part, and completions of it."""
    import gradio as gr

    from vit_jax.inference import demo

    self._check_objective()
    seed = gr.Number(0, label='Seed', precision=0, minimum=0)
    picture = demo.picture('Completions')
    last_photo = gr.State()

    def show(photo: demo.Photo, number: float | None) -> dict:
      images = [photo.pixels] * _COMPLETIONS
      originals, completed, kept_rows = self._complete(images, None, int(number or 0))
      pictures = np.concatenate([cut(originals, kept_rows)[:1], completed])
      return {picture: draw(grids.to_pixels(pictures)), last_photo: photo}

    def show_again(photo: demo.Photo | None, number: float | None) -> dict:
      return show(photo, number) if photo else {picture: None}

    seed.change(show_again, [last_photo, seed], [picture, last_photo])
    return show, [seed], [picture, last_photo]


def draw(images: np.ndarray) -> np.ndarray:
  """Draws samples, uint8 [n, H, W, 3], side by side."""
  return grids.grid(images, columns=min(_ACROSS, len(images)), most=grids.MOST)


def cut(images: np.ndarray, rows: Any) -> np.ndarray:
  """Returns images that are grey below the `rows` kept, int or [n]."""
  below = np.arange(images.shape[1]) >= np.reshape(rows, (-1, 1))  # [n, H]
  return np.where(below[..., None, None], 0.0, images)
