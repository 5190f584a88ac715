"""Palettes of iGPT: the colours of which the pixels of an image are numbers.

"Generative Pretraining from Pixels" (Chen et al., ICML 2020), section 2: k-means
finds the colours (512 in the paper) among the pixels of training images. A pixel
becomes the number of the nearest colour.

A palette is float32 [K, C] in [-1, 1], of K colours with C channels each. A file
of one is a .npy of that array, as OpenAI has released it.
"""

from collections.abc import Iterable
import contextlib
import json
import os
from typing import Annotated, Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
from sklearn import cluster

from vit_jax import console
from vit_jax.configs import schema
from vit_jax.distributed import processes
from vit_jax.weights import fetch, hub

# Files beside weights, of a run and of Hugging Face, and the key of the palette.
_FILES = {'palette.json': None, 'preprocessor_config.json': 'clusters'}
_REMEDY = (
  'give the palette of the weights, a .npy float [colours, channels] in [-1, 1] '
  "(config.task_options.palette); without weights '' finds one in the images"
)
# Pixels of a step of k-means, and passes over all pixels.
_BATCH, _PASSES = 16_384, 4


def quantise(images, palette) -> jax.Array:
  """Returns the number of the nearest colour of each pixel, int32 [...].

  Takes images [..., C] in [-1, 1], and 4 K bytes of memory for a pixel, as much
  as the logits of its colour.
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

  Takes pixels, float [n, C] in [-1, 1], of `num_colors` different colours at
  least. Returns float32 [num_colors, C], the darkest colour first.
  """
  pixels = np.asarray(pixels, np.float32)
  known = np.unique(pixels, axis=0)
  if len(known) < num_colors:
    raise ValueError(
      f'num_colors={num_colors} colours cannot be found in the training images, '
      f'whose pixels have only {len(known):,}: lower --config.model.num_colors'
    )
  if len(known) == num_colors:
    return _sorted(known)
  pixels = np.random.default_rng(seed).permutation(pixels)
  means = cluster.MiniBatchKMeans(num_colors, random_state=seed, n_init=1)
  # The first step chooses the colours to start from.
  size = max(_BATCH, 3 * num_colors)
  starts = _PASSES * list(range(0, max(1, len(pixels) - size + 1), size))
  with console.bar(
    total=len(starts), desc='Finding a palette', delay=3, leave=False
  ) as bar:
    for start in starts:
      means.partial_fit(pixels[start : start + size])
      bar.update()
  return _sorted(means.cluster_centers_.astype(np.float32))


def _sorted(palette):
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
  """Reads a palette [K, C] on process 0, and tells it to the others.

  The path, local, at gs:// or hf:// or a URL, is a .npy, such as the released
  kmeans_centers.npy; or it is of weights whose folder has the palette: the
  workdir of a run, or a model of Hugging Face.
  """
  found = processes.from_first('reading the palette', lambda: _read(path))
  return np.asarray(found, np.float32)


def _read(path):
  """Returns a palette as lists, see `load`."""
  file, key = _find(path)
  try:
    if file.suffix == '.npy':
      with file.open('rb') as f:
        found = np.load(f, allow_pickle=False)
    else:
      found = json.loads(file.read_text())
      found = np.asarray(found[key] if key else found)
  except (ValueError, LookupError, TypeError, EOFError, RecursionError) as e:
    raise ValueError(f"'{file}' holds no palette: {e}; {_REMEDY}") from e
  if not schema.accepts(found, Palette):
    raise ValueError(
      f"'{file}' holds {found.dtype}{list(found.shape)}: a palette must be "
      f'{schema.describe(Palette)}; {_REMEDY}'
    )
  return found.tolist()


def _find(path):
  """Returns the file of a palette, or beside weights, and its key in there."""
  if hub.is_at(path):
    path = str(hub.fetch(path))
  is_url = path.startswith(('http://', 'https://'))

  def get(path):
    if is_url:
      return fetch.fetch(path)
    if not epath.Path(path).exists():
      raise FileNotFoundError(f"there is no palette '{path}': {_REMEDY}")
    return epath.Path(path)

  if path.partition('?')[0].endswith('.npy'):
    return get(path), None
  is_folder = not is_url and get(path).is_dir()
  folder = path if is_folder else os.path.dirname(path)
  for name, key in _FILES.items():
    with contextlib.suppress(FileNotFoundError, PermissionError):
      return get(os.path.join(folder, name)), key
  raise FileNotFoundError(
    f"'{folder}' has no palette ({' or '.join(_FILES)}): {_REMEDY}"
  )


def _is_palette(palette) -> bool:
  try:
    array = np.asarray(palette, np.float32)
  except (ValueError, TypeError):
    return False
  fits = array.ndim == 2 and array.shape[1] in (1, 3) and len(array) > 0
  # k-means of colours from -1 to 1 may round a little beyond.
  return fits and (np.abs(array) < 1 + 1e-3).all()


Palette = Annotated[
  Any,
  schema.Fits(
    'colours of 3 channels (or of 1), an array [colours, channels] of numbers from '
    '-1 to 1',
    _is_palette,
  ),
]


def check(palette, num_colors: int, channels: int, where: str = ''):
  """Raises ValueError unless a palette [K, C] fits a model and its images.

  `where` tells where the palette comes from, in words.
  """
  if len(palette) != num_colors:
    raise ValueError(
      f'the palette{where} has {len(palette)} colours, and the model '
      f'num_colors={num_colors}: give the palette that its weights were trained '
      f'with, or set --config.model.num_colors={len(palette)}'
    )
  if len(palette[0]) != channels:
    raise ValueError(
      f'the palette{where} has {len(palette[0])} channels, and the images '
      f'pp.channels={channels}: set --config.pp.channels={len(palette[0])}'
    )
