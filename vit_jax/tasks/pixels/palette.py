"""Palettes of iGPT, whose colours quantise the pixels of an image.

"Generative Pretraining from Pixels" (Chen et al., ICML 2020), section 2: k-means
finds the colours (512 in the paper) among the pixels of training images. A pixel
becomes the number of the nearest colour.

A palette is float32 [K, C] in [-1, 1]: K colours with C channels each. As a file it
is a .npy of that array, as released by OpenAI.
"""

from collections.abc import Iterable, Sequence
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


def quantise(images: jax.Array, palette: np.ndarray) -> jax.Array:
  """Returns the number of the nearest colour of each pixel, int32 [...].

  Takes 4 K bytes of memory per pixel, as many as the logits of its colour.

  Args:
    images: float [..., C] in [-1, 1].
    palette: K colours, float [K, C].
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

  Args:
    pixels: float [n, C] in [-1, 1], of at least `num_colors` different colours.
    num_colors: number of colours of the palette.
    seed: determines the order of the pixels and the initial colours.

  Returns:
    float32 [num_colors, C], the darkest colour first.
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
    last = max(0, len(pixels) - size)
    starts = _PASSES * list(range(0, last + 1, size))
    for start in console.bar(
      iterable=starts, desc='Finding a palette', delay=3, leave=False
    ):
      means.partial_fit(pixels[start : start + size])
    palette = means.cluster_centers_.astype(np.float32)
  return palette[np.argsort(palette.sum(axis=-1), kind='stable')]


def sample(
  batches: Iterable[np.ndarray], pixels_per_image: int, seed: int
) -> np.ndarray:
  """Takes random pixels of each image of batches [b, H, W, C]; float32 [n, C]."""
  rng = np.random.default_rng(seed)
  samples = []
  for images in batches:
    pixels = images.reshape(len(images), -1, images.shape[-1])
    if pixels.shape[1] > pixels_per_image:
      numbers = rng.random(pixels.shape[:2])
      indices = numbers.argpartition(pixels_per_image, axis=1)[:, :pixels_per_image]
      pixels = np.take_along_axis(pixels, indices[..., None], axis=1)
    samples.append(pixels.reshape(-1, pixels.shape[-1]))
  return np.concatenate(samples).astype(np.float32)


def load(path: str) -> np.ndarray:
  """Reads a palette [K, C] on process 0, which sends it to the others.

  The path, local, at gs:// or hf:// or a URL, is a .npy, or weights whose folder has
  the palette: the workdir of a run, or a model of Hugging Face.
  """
  colors = processes.from_first('reading the palette', lambda: _read(path).tolist())
  return np.asarray(colors, np.float32)


def _read(path: str) -> np.ndarray:
  file = _find(path)
  try:
    if file.suffix == '.npy':
      content = np.load(io.BytesIO(files.read(file)), allow_pickle=False)
    else:
      content = files.read_json(file)
      if isinstance(content, dict):
        content = content['clusters']
    palette = np.asarray(content, np.float32)
  except (ValueError, TypeError, KeyError, EOFError, MemoryError) as e:
    raise ValueError(f"'{file}' does not hold a palette: {e}; {_REMEDY}") from e
  has_colors = palette.ndim == 2 and palette.shape[1] in (1, 3) and len(palette)
  # The means of colours from -1 to 1 may be rounded to slightly larger ones.
  if not has_colors or not (np.abs(palette) < 1 + 1e-3).all():
    raise ValueError(
      f"'{file}' holds an array of shape {palette.shape} which is not a palette: "
      f'{_REMEDY}'
    )
  return palette


def _find(path: str) -> epath.Path:
  """Returns the file of a palette, from its path or the path of weights."""
  if hub.is_hub_path(path):
    path = str(hub.fetch(path))
  is_url = path.startswith(('http://', 'https://'))
  if path.partition('?')[0].endswith('.npy'):
    return fetch.fetch(path) if is_url else epath.Path(path)
  is_folder = not is_url and epath.Path(path).is_dir()
  folder = path if is_folder else os.path.dirname(path)
  for name in _FILES:
    file = os.path.join(folder, name)
    if is_url:
      with contextlib.suppress(FileNotFoundError, PermissionError):
        return fetch.fetch(file)
    elif epath.Path(file).exists():
      return epath.Path(file)
  raise FileNotFoundError(
    f"'{folder}' has no palette ({' or '.join(_FILES)}): {_REMEDY}"
  )


def check(
  palette: Sequence[Sequence[float]] | np.ndarray,
  num_colors: int,
  channels: int,
  origin: str = '',
) -> None:
  """Raises ValueError unless a palette [K, C] fits a model and its images.

  `origin` follows 'the palette' in messages, such as " of 'FILE'".
  """
  if len(palette) != num_colors:
    raise ValueError(
      f'the palette{origin} has {len(palette)} colours, but the model has '
      f'num_colors={num_colors}: use the palette that its weights were trained '
      f'with, or set --config.model.num_colors={len(palette)}'
    )
  if len(palette[0]) != channels:
    raise ValueError(
      f'the palette{origin} has {len(palette[0])} channels, but the images have '
      f'pp.channels={channels}: set --config.pp.channels={len(palette[0])}'
    )
