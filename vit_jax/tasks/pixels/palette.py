"""Palettes of iGPT, whose colours quantise the pixels of an image.

"Generative Pretraining from Pixels" (Chen et al., ICML 2020), section 2: k-means
finds the colours (512 in the paper) among the pixels of training images. A pixel
becomes the number of the nearest colour.

A palette is float32 [K, C] in [-1, 1]: K colours with C channels each. As a file it
is a .npy of that array, as released by OpenAI.
"""

from collections.abc import Iterable
import contextlib
import io
import os

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import console
from vit_jax.distributed import files, processes
from vit_jax.weights import fetch, hub

# Files next to the weights of a run and of Hugging Face.
_FILES = ('palette.json', 'preprocessor_config.json')
_REMEDY = (
  'use the palette of the weights, a .npy float [colours, channels] in [-1, 1] with '
  "1 or 3 channels (config.task_options.palette); without weights '' finds one in "
  'the images'
)
_BATCH, _PASSES = 16_384, 4  # Pixels per step of k-means; passes over all pixels.


def quantise(images, palette) -> jax.Array:
  """Returns the number of the nearest colour of each pixel, int32 [...].

  Takes images [..., C] in [-1, 1], and 4 K bytes of memory per pixel, as many as the
  logits of its colour.
  """
  palette = jnp.asarray(palette, jnp.float32)
  # |x - c|^2 without |x|^2, which does not depend on the colour c.
  products = jnp.einsum(
    '...c,kc->...k', images, palette, precision=jax.lax.Precision.HIGHEST
  )
  distances = (palette**2).sum(axis=-1) - 2 * products
  return distances.argmin(axis=-1).astype(jnp.int32)


def fit(pixels: np.ndarray, num_colors: int, seed: int = 0) -> np.ndarray:
  """Finds a palette by k-means (scikit-learn's MiniBatchKMeans).

  Takes pixels, float [n, C] in [-1, 1], of at least `num_colors` different
  colours. Returns float32 [num_colors, C], the darkest colour first.
  """
  pixels = np.asarray(pixels, np.float32)
  palette = np.unique(pixels, axis=0)
  if len(palette) < num_colors:
    raise ValueError(
      f'num_colors={num_colors} is more than the {len(palette):,} colours of the '
      'training images: lower --config.model.num_colors'
    )
  if len(palette) > num_colors:
    from sklearn import cluster

    pixels = np.random.default_rng(seed).permutation(pixels)
    means = cluster.MiniBatchKMeans(num_colors, random_state=seed, n_init=1)
    # The first step chooses the initial colours.
    size = max(_BATCH, 3 * num_colors)
    starts = _PASSES * list(range(0, max(1, len(pixels) - size + 1), size))
    for start in console.bar(
      iterable=starts, desc='Finding a palette', delay=3, leave=False
    ):
      means.partial_fit(pixels[start : start + size])
    palette = means.cluster_centers_.astype(np.float32)
  return palette[np.argsort(palette.sum(axis=-1), kind='stable')]


def sample(batches: Iterable[np.ndarray], each: int, seed: int) -> np.ndarray:
  """Takes `each` random pixels of images [b, H, W, C]; float32 [n, C]."""
  rng, found = np.random.default_rng(seed), []
  for images in batches:
    pixels = images.reshape(len(images), -1, images.shape[-1])
    if pixels.shape[1] > each:
      order = rng.random(pixels.shape[:2]).argpartition(each, axis=1)
      pixels = np.take_along_axis(pixels, order[:, :each, None], axis=1)
    found.append(pixels.reshape(-1, pixels.shape[-1]))
  return np.concatenate(found).astype(np.float32)


def load(path: str) -> np.ndarray:
  """Reads a palette [K, C] on process 0, which sends it to the others.

  The path, local, at gs:// or hf:// or a URL, is a .npy, or weights whose folder has
  the palette: the workdir of a run, or a model of Hugging Face.
  """
  found = processes.from_first('reading the palette', lambda: _read(path).tolist())
  return np.asarray(found, np.float32)


def _read(path) -> np.ndarray:
  file = _find(path)
  try:
    if file.suffix == '.npy':
      found = np.load(io.BytesIO(files.read(file)), allow_pickle=False)
    else:
      found = files.read_json(file)
      found = found['clusters'] if isinstance(found, dict) else found
    found = np.asarray(found, np.float32)
  except (ValueError, TypeError, KeyError, EOFError, MemoryError) as e:
    raise ValueError(f"'{file}' does not hold a palette: {e}; {_REMEDY}") from e
  fits = found.ndim == 2 and found.shape[1] in (1, 3) and len(found)
  # The means of colours from -1 to 1 may be rounded to slightly larger ones.
  if not fits or not (np.abs(found) < 1 + 1e-3).all():
    raise ValueError(
      f"'{file}' holds an array of shape {found.shape} which is not a palette: "
      f'{_REMEDY}'
    )
  return found


def _find(path) -> epath.Path:
  """Returns the file of a palette, from its path or the path of weights."""
  if hub.is_at(path):
    path = str(hub.fetch(path))
  is_url = path.startswith(('http://', 'https://'))

  def get(path):
    if is_url:
      return fetch.fetch(path)
    if not epath.Path(path).exists():
      raise FileNotFoundError(f"palette='{path}' does not exist: {_REMEDY}")
    return epath.Path(path)

  if path.partition('?')[0].endswith('.npy'):
    return get(path)
  is_folder = not is_url and get(path).is_dir()
  folder = path if is_folder else os.path.dirname(path)
  for name in _FILES:
    with contextlib.suppress(FileNotFoundError, PermissionError):
      return get(os.path.join(folder, name))
  raise FileNotFoundError(
    f"'{folder}' has no palette ({' or '.join(_FILES)}): {_REMEDY}"
  )


def check(palette, num_colors: int, channels: int, where: str = ''):
  """Raises ValueError unless a palette [K, C] fits a model and its images.

  `where` describes the origin of the palette.
  """
  if len(palette) != num_colors:
    raise ValueError(
      f'the palette{where} has {len(palette)} colours, but the model has '
      f'num_colors={num_colors}: use the palette that its weights were trained '
      f'with, or set --config.model.num_colors={len(palette)}'
    )
  if len(palette[0]) != channels:
    raise ValueError(
      f'the palette{where} has {len(palette[0])} channels, but the images have '
      f'pp.channels={channels}: set --config.pp.channels={len(palette[0])}'
    )
