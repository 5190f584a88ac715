"""Draws filters, position embeddings and attention from arrays.

Each function takes arrays and returns a matplotlib Figure for a slide. None
uses pyplot, so all work in notebooks, in threads and without a screen. To
restyle all figures, change STYLE; or draw the arrays with code of your own.
vit_jax/figures/charts.py draws curves and results.

Colour-blind people can tell the colours apart: viridis for values, the palette
of Okabe and Ito for lines.
"""

from collections.abc import Sequence
import functools
import importlib.util

import numpy as np
from PIL import Image

WIDTH = 12.8  # Default width of a figure in inches.
STYLE = {
  'font.size': 14,
  'axes.titlesize': 17,
  'axes.labelsize': 15,
  'xtick.labelsize': 13,
  'ytick.labelsize': 13,
  'legend.fontsize': 13,
  'lines.linewidth': 2.0,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'savefig.dpi': 150,
  'figure.dpi': 75,  # In notebooks.
}
BLUE, ORANGE, GREEN, PURPLE = '#0072B2', '#D55E00', '#009E73', '#CC79A7'
SKY, YELLOW, GREY, BLACK = '#56B4E9', '#E69F00', '#777777', '#000000'
LINES = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, BLACK, GREY)
# Smaller pictures are enlarged to at least this side in pixels, so that the
# maps over them are smooth.
_LEAST = 128
_TILE = 32  # The same for pictures side by side, so that the gaps are narrow.
_MOST_LAYERS = 12  # Maximum number of layers in a figure of attention maps.
_ROW_LABEL = 1.6  # Greatest width of the label of a row, in inches.
_MOST_MAPS = 8  # Maximum number of maps per row in a figure of similarity.


def require_matplotlib():
  """Raises ImportError, which names the extra, if matplotlib is missing."""
  if importlib.util.find_spec('matplotlib') is None:
    raise ImportError(
      "figures need matplotlib: pip install -e '.[plots]' in the checkout of "
      'vit_jax'
    )


def styled(function):
  """Decorates a function to draw with STYLE, whatever the caller's rcParams."""

  @functools.wraps(function)
  def draw(*args, **kwargs):
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context(STYLE):
      return function(*args, **kwargs)

  return draw


def new_figure(height: float, title: str, width: float = WIDTH):
  """Returns a figure with a title; `height` and `width` are in inches."""
  from matplotlib import figure

  fig = figure.Figure((width, height), layout='constrained')
  fig.suptitle(title, fontsize=STYLE['axes.titlesize'], fontweight='bold')
  return fig


# --- Pictures ---


def as_pixels(images) -> np.ndarray:
  """Converts a model's input images to RGB, and enlarges small ones.

  Args:
    images: float32 [..., H, W, C] in [-1, 1]; shown in grey unless C is 3.

  Returns:
    float32 [..., H', W', 3] in [0, 1].
  """
  pixels = (np.asarray(images, np.float32).clip(-1, 1) + 1) / 2
  if pixels.shape[-1] not in (1, 3):
    pixels = pixels.mean(axis=-1, keepdims=True)
  times = -(-_LEAST // min(pixels.shape[-3:-1]))
  pixels = pixels.repeat(times, axis=-3).repeat(times, axis=-2)
  return np.broadcast_to(pixels, (*pixels.shape[:-1], 3))


def overlay(pixels: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Draws a map in colours over a picture in shades of grey.

  Args:
    pixels: the picture, float32 [H, W, 3] in [0, 1].
    weights: the map, [h, w], not negative; scaled by its largest value.

  Returns:
    float32 [H, W, 3] in [0, 1].
  """
  import matplotlib

  height, width = pixels.shape[:2]
  weights = np.asarray(weights, np.float32)
  weights = weights / max(float(weights.max()), np.finfo(np.float32).tiny)
  large = Image.fromarray(weights).resize(
    (width, height), Image.Resampling.BILINEAR
  )
  large = np.asarray(large)[..., None].clip(0, 1)  # [H, W, 1]
  colours = matplotlib.colormaps['viridis'](large[..., 0])[..., :3]
  grey = pixels.mean(axis=-1, keepdims=True)
  opacity = 0.4 + 0.4 * large  # Patches of low weight stay visible.
  return ((1 - opacity) * grey + opacity * colours).astype(np.float32)


def tiles(pictures: np.ndarray, gap: float = 0.06, fill: float = 1.0):
  """Joins pictures into one, enlarging small ones.

  Args:
    pictures: [rows, columns, H, W, ...].
    gap: width of the gaps, as a share of the shorter side of a picture.
    fill: value of the gaps.

  Returns:
    The joined picture [height, width, ...]; the x of the centre of each column,
    and the y of the centre of each row, in its pixels.
  """
  times = -(-_TILE // min(pictures.shape[2:4]))
  pictures = pictures.repeat(times, axis=2).repeat(times, axis=3)
  rows, columns, height, width = pictures.shape[:4]
  gap = max(1, round(gap * min(height, width)))
  down, across = height + gap, width + gap
  sheet = np.full(
    (rows * down - gap, columns * across - gap, *pictures.shape[4:]),
    fill,
    pictures.dtype,
  )
  for i in range(rows):
    for j in range(columns):
      sheet[i * down : i * down + height, j * across : j * across + width] = (
        pictures[i, j]
      )
  return (
    sheet,
    np.arange(columns) * across + (width - 1) / 2,
    np.arange(rows) * down + (height - 1) / 2,
  )


def show_tiles(axes, pictures, columns, rows, **kwargs):
  """Draws pictures in rows and columns, with labels.

  Args:
    axes: matplotlib Axes to draw on.
    pictures: [rows, columns, H, W, ...], see `tiles`.
    columns: labels of the columns, drawn above them.
    rows: labels of the rows.
    **kwargs: `gap` and `fill` for `tiles`; all others for `imshow`.

  Returns:
    The matplotlib AxesImage, for a colour bar.
  """
  options = {k: kwargs.pop(k) for k in ('gap', 'fill') if k in kwargs}
  sheet, x, y = tiles(pictures, **options)
  shown = axes.imshow(sheet, **kwargs)
  axes.set_xticks(x, columns)
  axes.set_yticks(y, rows)
  axes.tick_params(
    length=0, top=False, labeltop=True, bottom=False, labelbottom=False
  )
  axes.xaxis.set_label_position('top')
  axes.spines[:].set_visible(False)
  return shown


def shorten(text: str, length: int = 18) -> str:
  """Shortens text to at most `length` characters, with … in the middle."""
  if len(text) <= length:
    return text
  half = (length - 1) // 2
  return f'{text[: length - 1 - half]}…{text[-half:]}'


def fitting(text: str, width: float, points: float) -> str:
  """Shortens each line of a text so that it is at most `width` inches wide.

  Args:
    text: one or more lines.
    width: greatest width in inches.
    points: size of the font.
  """
  from matplotlib import cbook
  from matplotlib import font_manager
  from matplotlib import textpath

  font = font_manager.FontProperties(size=points)

  def extent(line):
    size = textpath.text_to_path.get_text_width_height_descent(
      line, font, ismath=cbook.is_math_text(line)
    )
    return size[0] / 72

  lines = []
  for line in text.split('\n'):
    length, found = min(len(line), 80), line
    while length > 3 and extent(found) > width:
      length -= 1
      found = shorten(line, length)
    lines.append(found)
  return '\n'.join(lines)


def _colour_bar(fig, axes):
  """Adds a colour bar for the maps drawn by `overlay`."""
  from matplotlib import cm
  from matplotlib import colors

  values = cm.ScalarMappable(colors.Normalize(0, 1), 'viridis')
  bar = fig.colorbar(values, ax=axes, shrink=0.9, pad=0.01, ticks=(0, 0.5, 1))
  bar.set_label('relative attention')
  bar.outline.set_visible(False)


# --- Figures ---


@styled
def filters(components, shares):
  """Draws the principal components of filters (figure 7, left).

  Args:
    components: [n, p, q, C], see attention.principal_filters.
    shares: share of the variance that each component explains, [n].

  Returns:
    A Figure.
  """
  count, height, width, channels = components.shape
  columns = min(7, count)
  rows = -(-count // columns)
  colour = channels == 3
  ratio = height / width
  cell = min(1.6, 6.0 / (rows * ratio))
  fig = new_figure(
    1.4 + 1.06 * cell * rows * ratio,
    f'The first {count} principal components of the filters '
    f'explain {100 * shares.sum():.0f} % of the variance',
    width=max(10.0, 2.2 + 1.06 * cell * columns),
  )
  if not colour:
    components = components.mean(axis=-1)
  limit = float(np.abs(components).max())
  sheet = np.full((rows * columns, *components.shape[1:]), np.nan, np.float32)
  sheet[:count] = components
  sheet = sheet.reshape(rows, columns, *components.shape[1:])
  axes = fig.subplots()
  if colour:
    sheet = np.nan_to_num(sheet / limit / 2 + 0.5, nan=1.0)
    show_tiles(axes, sheet, [''] * columns, _firsts(rows, columns))
    axes.set_xlabel(
      'red, green and blue on one scale, mid-grey is zero', labelpad=10
    )
  else:
    shown = show_tiles(
      axes,
      sheet,
      [''] * columns,
      _firsts(rows, columns),
      fill=np.nan,
      cmap='gray',
      vmin=-limit,
      vmax=limit,
    )
    bar = fig.colorbar(shown, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label('weight')
  axes.set_ylabel('component')
  axes.xaxis.set_label_position('bottom')
  return fig


def _firsts(rows, columns):
  """Returns labels of rows: the number of the first picture of each, from 1."""
  return [str(1 + row * columns) for row in range(rows)]


@styled
def position_similarity(similarity):
  """Draws the similarity of position embeddings (figure 7, centre).

  Draws one map per patch, or for large grids one for every n-th patch.

  Args:
    similarity: [h, w, h, w], see attention.position_similarity.

  Returns:
    A Figure.
  """
  height, width = similarity.shape[:2]
  step = -(-max(height, width) // _MOST_MAPS)
  rows, columns = _every(height, step), _every(width, step)
  shown = similarity[np.ix_(rows, columns)]
  every = f', a map for every {_ordinal(step)} one' if step > 1 else ''
  ratio = height / width
  cell = min(9.8 / len(columns), 6.2 / (len(rows) * ratio))
  fig = new_figure(
    1.8 + cell * len(rows) * ratio,
    f'Similarity of position embeddings\n{height} x {width} patches{every}',
    width=max(7.0, 2.6 + cell * len(columns)),
  )
  axes = fig.subplots()
  image = show_tiles(
    axes,
    shown,
    [str(1 + j) for j in columns],
    [str(1 + i) for i in rows],
    gap=0.1,
    fill=np.nan,
    cmap='viridis',
    vmin=min(0.0, float(similarity.min())),
    vmax=1,
    interpolation='nearest',
  )
  axes.set_xlabel('column of the patch')
  axes.set_ylabel('row of the patch')
  bar = fig.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
  bar.set_label('cosine similarity')
  bar.outline.set_visible(False)
  return fig


def _every(count, step):
  return np.arange(count)[(count - 1) % step // 2 :: step]


def _ordinal(number):
  return {2: '2nd', 3: '3rd'}.get(number, f'{number}th')


@styled
def attention_maps(images, maps, labels: Sequence[str], title: str):
  """Draws the attention of each layer over the images (as figure 14, by layer).

  Draws at most 12 layers, evenly spaced.

  Args:
    images: float32 [B, H, W, C] in [-1, 1].
    maps: [L, B, h, w], see attention.maps.
    labels: a label per image, such as the predicted class.
    title: title of the labels.

  Returns:
    A Figure.
  """
  layers = len(maps)
  chosen = np.unique(
    np.linspace(0, layers - 1, min(layers, _MOST_LAYERS)).round().astype(int)
  )
  pixels = as_pixels(images)
  overlays = [
    np.stack([overlay(p, m) for p, m in zip(pixels, maps[layer])])
    for layer in chosen
  ]
  pictures = np.stack([pixels, *overlays])  # [1 + layers, B, H, W, 3]
  names = ['image', *(str(1 + layer) for layer in chosen)]
  some = '' if len(chosen) == layers else f' ({len(chosen)} of {layers})'
  heading = f'Attention of each layer{some}, mean over the heads'
  ratio = pixels.shape[1] / pixels.shape[2]
  if _cell(len(names), len(labels), ratio) > _cell(
    len(labels), len(names), ratio
  ):
    pictures, names, labels = pictures.swapaxes(0, 1), labels, names
    return _over_pictures(heading, pictures, labels, names, 'layer', title)
  return _over_pictures(heading, pictures, labels, names, title, 'layer')


@styled
def rollout(images, maps, labels: Sequence[str], title: str):
  """Draws images, and below them attention rollout (figures 6 and 14).

  Args:
    images: float32 [B, H, W, C] in [-1, 1].
    maps: [B, h, w], see attention.rollout_maps.
    labels: a label per image, such as the predicted class.
    title: title of the labels.

  Returns:
    A Figure.
  """
  pixels = as_pixels(images)
  pictures = np.stack(
    [pixels, np.stack([overlay(p, m) for p, m in zip(pixels, maps)])]
  )
  return _over_pictures(
    'Attention rollout', pictures, labels, ['image', 'rollout'], title, ''
  )


def _cell(columns: int, rows: int, ratio: float) -> float:
  """Returns the width of each picture in inches so that all fit on a slide.

  Args:
    columns: number of columns of pictures.
    rows: number of rows of pictures.
    ratio: height of a picture divided by its width.
  """
  return min(10.3 / columns, 7.2 / (rows * ratio))


def _over_pictures(heading, pictures, columns, rows, across, down):
  """Draws pictures [rows, columns, H, W, 3] with labels and a colour bar."""
  ratio = pictures.shape[2] / pictures.shape[3]
  cell = _cell(len(columns), len(rows), ratio)
  lines = 1 + max(label.count('\n') for label in columns) + bool(across)
  fig = new_figure(
    max(3.2, 0.75 + 0.27 * lines + 1.06 * cell * len(rows) * ratio),
    heading,
    width=max(8.0, 2.6 + 1.05 * cell * len(columns)),
  )
  axes = fig.subplots()
  points = STYLE['xtick.labelsize']
  columns = [fitting(label, cell, points) for label in columns]
  rows = [fitting(label, _ROW_LABEL, points) for label in rows]
  show_tiles(axes, pictures, columns, rows)
  axes.set_xlabel(across, labelpad=8)
  axes.set_ylabel(down)
  _colour_bar(fig, axes)
  return fig
