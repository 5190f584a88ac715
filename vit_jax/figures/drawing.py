"""Draws filters, position embeddings and attention from arrays.

Each function takes arrays and returns a matplotlib Figure for a slide; `path`, if
given, is a PNG to write. None uses pyplot, so all of them work in notebooks, in
threads and without a screen.
"""

from collections.abc import Callable, Sequence
import functools
import io
import textwrap
from typing import Any
import warnings

from etils import epath
import jax
import numpy as np
from PIL import Image

from vit_jax import console

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
# Small pictures are enlarged to at least this shorter side in pixels, so that maps
# over them are smooth, but not beyond this longer side.
_LEAST, _LARGEST = 128, 2048
_TILE = 32  # Least side of pictures side by side, so that the gaps are narrow.
_MOST_LAYERS = 12  # Maximum number of layers in a figure of attention maps.
_ROW_LABEL = 1.6  # Greatest width of the label of a row, in inches.
_MOST_MAPS = 8  # Maximum number of maps per row in a figure of similarity.
_MOST_LINES = 3  # Maximum number of lines of a wrapped name.
_DPI = 64  # A power of 2: sizes in pixels divided by it are exact.


def require_matplotlib() -> None:
  """Raises ImportError, which names the extra, if matplotlib is missing."""
  console.require('matplotlib', 'plots', 'drawing figures')


def styled(function: Callable) -> Callable:
  """Decorates a function to draw with STYLE; it then also takes `path`, of a PNG."""

  @functools.wraps(function)
  def draw(*args: Any, path: epath.PathLike | None = None, **kwargs: Any) -> Any:
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context(STYLE):
      figure = function(*args, **kwargs)
      if path is not None:
        epath.Path(path).write_bytes(png(figure))
    return figure

  return draw


def to_file(make: Callable, *args: Any, path: epath.PathLike, **kwargs: Any) -> None:
  """Calls a `styled` function on process 0; without matplotlib, says so."""
  if jax.process_index():
    return
  try:
    make(*args, path=path, **kwargs)
    console.log(f'  plot   {path}')
  except ImportError as e:
    console.log(f'No plot was drawn: {e}')


def png(figure: Any) -> bytes:
  """Renders a matplotlib Figure, and returns the bytes of a PNG file."""
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=STYLE['savefig.dpi'])
  return buffer.getvalue()


def write(
  pixels: np.ndarray, texts: Sequence[tuple[float, float, str, str]], size: float
) -> np.ndarray:
  """Writes texts on a picture, uint8 [H, W, 3], and returns the result.

  Texts are (x, y, text, colour) with the left end of the baseline in pixels;
  `size` is the font size of DejaVu Sans Mono in pixels.
  """
  require_matplotlib()
  from matplotlib import figure
  from matplotlib.backends import backend_agg

  height, width = pixels.shape[:2]
  fig = figure.Figure((width / _DPI, height / _DPI), dpi=_DPI)
  fig.figimage(pixels, origin='upper')
  font = dict(family='DejaVu Sans Mono', fontsize=72 / _DPI * size, parse_math=False)
  for x, y, text, color in texts:
    fig.text(x / width, 1 - y / height, text, color=color, **font)
  canvas = backend_agg.FigureCanvasAgg(fig)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # Letters that the font lacks become boxes.
    canvas.draw()
  return np.array(canvas.buffer_rgba())[..., :3]


def new_figure(height: float, title: str, width: float = WIDTH) -> Any:
  """Returns a figure with a title; `height` and `width` are in inches."""
  from matplotlib import figure

  fig = figure.Figure((width, height), layout='constrained')
  fig.suptitle(title, fontsize=STYLE['axes.titlesize'], fontweight='bold')
  return fig


# --- Pictures ---


def as_pixels(images: np.ndarray) -> np.ndarray:
  """Converts images, float32 [..., H, W, C] in [-1, 1], to enlarged RGB in [0, 1]."""
  pixels = (np.asarray(images, np.float32).clip(-1, 1) + 1) / 2
  if pixels.shape[-1] not in (1, 3):
    pixels = pixels.mean(axis=-1, keepdims=True)
  pixels = enlarged(pixels, _LEAST)
  return np.broadcast_to(pixels, (*pixels.shape[:-1], 3))


def enlarged(pictures: np.ndarray, least: int) -> np.ndarray:
  """Repeats pixels of pictures [..., H, W, C] up to `least`, the longer side to 2,048."""
  short, long = sorted(pictures.shape[-3:-1])
  times = max(1, min(-(-least // short), _LARGEST // long))
  return pictures.repeat(times, axis=-3).repeat(times, axis=-2)


def overlay(
  pixels: np.ndarray, weights: np.ndarray, filled: Sequence[float] = (1, 1)
) -> np.ndarray:
  """Draws a map in colours over a picture in grey, both in [0, 1].

  Takes float32 [H, W, 3] and [h, w], which is scaled by its largest value; and the part
  of the map, down and across, that belongs to the picture.
  """
  import matplotlib

  weights = np.asarray(weights, np.float32)
  weights = weights / max(float(weights.max()), np.finfo(np.float32).tiny)
  bottom, right = np.multiply(weights.shape, filled)
  large = Image.fromarray(weights).resize(
    pixels.shape[1::-1], Image.Resampling.BILINEAR, (0, 0, right, bottom)
  )
  large = np.asarray(large)[..., None].clip(0, 1)  # [H, W, 1]
  colours = matplotlib.colormaps['viridis'](large[..., 0])[..., :3]
  grey = pixels.mean(axis=-1, keepdims=True)
  opacity = 0.4 + 0.4 * large  # Patches of low weight stay visible.
  return ((1 - opacity) * grey + opacity * colours).astype(np.float32)


def show_tiles(
  axes: Any,
  pictures: np.ndarray,
  columns: Sequence,
  rows: Sequence,
  gap: float = 0.06,
  fill: float = 1.0,
  **kwargs: Any,
) -> Any:
  """Draws pictures [rows, columns, H, W, ...] with labels; enlarges small ones.

  The gaps have the value `fill` and a width of `gap` times the shorter side of a
  picture. Other arguments go to `imshow`, whose AxesImage is returned.
  """
  times = -(-_TILE // min(pictures.shape[2:4]))
  pictures = pictures.repeat(times, axis=2).repeat(times, axis=3)
  height, width = pictures.shape[2:4]
  space = max(1, round(gap * min(height, width)))
  padding = [(0, 0)] * pictures.ndim
  padding[2] = padding[3] = (0, space)
  padded = np.pad(pictures, padding, constant_values=fill)
  down, across = padded.shape[2:4]
  sheet = padded.swapaxes(1, 2).reshape(
    len(rows) * down, len(columns) * across, *pictures.shape[4:]
  )
  image = axes.imshow(sheet[:-space, :-space], **kwargs)
  axes.set_xticks(np.arange(len(columns)) * across + (width - 1) / 2, columns)
  axes.set_yticks(np.arange(len(rows)) * down + (height - 1) / 2, rows)
  axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
  axes.xaxis.set_label_position('top')
  axes.spines[:].set_visible(False)
  return image


def shorten(text: str, length: int = 18) -> str:
  """Shortens text to at most `length` characters, with … in the middle.

  In the result '$' does not begin a formula of Matplotlib.
  """
  if len(text) > length:
    half = (length - 1) // 2
    text = f'{text[: length - 1 - half]}…{text[-half:]}'
  return text.replace('$', r'\$')


def wrapped(text: str, letters: int, most: int = _MOST_LINES) -> str:
  """Wraps each line of a text to lines of at most `letters`.

  A line that takes more than `most` lines loses its middle, not its end, which may
  be a probability.
  """
  wrapped_lines = []
  for line in text.replace(' %', '\xa0%').split('\n'):
    lines = textwrap.wrap(line, max(2, letters)) or ['']
    if len(lines) > most:
      lines[most - 2 : -1] = [lines[most - 2][: letters - 1] + '…']
    wrapped_lines += lines
  return '\n'.join(wrapped_lines).replace('\xa0%', ' %')


def wrapped_all(
  texts: Sequence[str], width: float, points: float, most: int = _MOST_LINES
) -> tuple[list[str], int]:
  """Wraps texts of a font of `points` to a width in inches; also counts the lines."""
  letters = int(72 * width / (0.7 * points))  # Average width in DejaVu Sans.
  wrapped_texts = [wrapped(text, letters, most) for text in texts]
  return wrapped_texts, 1 + max(text.count('\n') for text in wrapped_texts)


# --- Figures ---


@styled
def filters(components: np.ndarray, explained: np.ndarray) -> Any:
  """Draws the principal components of filters (figure 7, left).

  For components [n, p, q, C] and explained variances [n] see internals.principal_filters.
  """
  count, height, width, channels = components.shape
  columns = min(7, count)
  rows = -(-count // columns)
  ratio = height / width
  cell = min(1.6, 6.0 / (rows * ratio))
  fig = new_figure(
    1.4 + 1.06 * cell * rows * ratio,
    f'The first {count} principal components of the filters '
    f'explain {100 * explained.sum():.0f} % of the variance',
    width=max(10.0, 2.2 + 1.06 * cell * columns),
  )
  in_colour = channels == 3
  if not in_colour:
    components = components.mean(axis=-1, keepdims=True)
  sheet = np.ones((rows * columns, height, width, 3), np.float32)
  sheet[:count] = components / np.abs(components).max() / 2 + 0.5
  axes = fig.subplots()
  sheet = sheet.reshape(rows, columns, *sheet.shape[1:])
  show_tiles(axes, sheet, [''] * columns, range(1, count + 1, columns))
  scale = 'red, green and blue on one scale' if in_colour else 'on one scale'
  axes.set_xlabel(f'{scale}, mid-grey is zero', labelpad=10)
  axes.set_ylabel('component')
  axes.xaxis.set_label_position('bottom')
  return fig


@styled
def position_similarity(similarity: np.ndarray) -> Any:
  """Draws position similarities [h, w, h, w] (figure 7, centre), of every n-th patch."""
  height, width = similarity.shape[:2]
  step = -(-max(height, width) // _MOST_MAPS)
  rows = np.arange((height - 1) % step // 2, height, step)
  columns = np.arange((width - 1) % step // 2, width, step)
  every = f', a map for every {step} x {step} of them' if step > 1 else ''
  ratio = height / width
  cell = min(9.8 / len(columns), 6.2 / (len(rows) * ratio))
  fig = new_figure(
    1.8 + cell * len(rows) * ratio,
    f'Similarity of position embeddings\n{height} x {width} patches{every}',
    width=max(7.0, 2.6 + cell * len(columns)),
  )
  axes = fig.subplots()
  maps = similarity[np.ix_(rows, columns)]
  image = show_tiles(
    axes,
    maps,
    columns + 1,
    rows + 1,
    gap=0.1,
    fill=np.nan,
    cmap='viridis',
    vmin=min(0.0, float(similarity.min())),
    vmax=1,
    interpolation='nearest',
  )
  axes.set_xlabel('column of the patch')
  axes.set_ylabel('row of the patch')
  _colour_bar(fig, axes, image, 'cosine similarity')
  return fig


@styled
def attention_maps(
  images: np.ndarray, maps: np.ndarray, labels: Sequence[str], title: str
) -> Any:
  """Draws the attention of each layer over images (as figure 14, by layer).

  Draws at most 12 layers, evenly spaced. Takes images, float32 [B, H, W, C] in
  [-1, 1]; maps [L, B, h, w]; a label per image; and the title of the labels.
  """
  layers = len(maps)
  shown_layers = np.unique(
    np.linspace(0, layers - 1, min(layers, _MOST_LAYERS)).round().astype(int)
  )
  subset = '' if len(shown_layers) == layers else f' ({len(shown_layers)} of {layers})'
  heading = f'Attention of each layer{subset}, mean over the heads'
  names = ['image', *(str(1 + layer) for layer in shown_layers)]
  pictures = _over(images, maps[shown_layers])  # [1 + layers, B, H, W, 3]
  ratio = images.shape[1] / images.shape[2]
  across = _cell(len(names), len(labels), ratio)
  down = _cell(len(labels), len(names), ratio)
  if across > down:
    pictures = pictures.swapaxes(0, 1)
    return _over_pictures(heading, pictures, names, labels, 'layer', title)
  return _over_pictures(heading, pictures, labels, names, title, 'layer')


def rollout(
  images: np.ndarray, maps: np.ndarray, labels: Sequence[str], title: str
) -> Any:
  """Draws images, and below them attention rollout (figures 6 and 14).

  For the arguments see `attention_maps`; maps are [B, h, w].
  """
  return named_maps('Attention rollout', ['rollout'], images, maps[None], labels, title)


@styled
def named_maps(
  heading: str,
  names: Sequence[str],
  images: np.ndarray,
  maps: np.ndarray,
  labels: Sequence[str],
  title: str,
  bar: str = 'relative attention',
) -> Any:
  """Draws images, and below them a row of maps for each name.

  For the other arguments see `attention_maps`; maps are [len(names), B, h, w], and
  `bar` is the label of the colour bar.
  """
  pictures = _over(images, maps)
  return _over_pictures(heading, pictures, labels, ['image', *names], title, bar=bar)


@styled
def class_explanations(
  method: str,
  classes: Sequence[Sequence[str]],
  images: np.ndarray,
  maps: np.ndarray,
  labels: Sequence[str],
) -> Any:
  """Draws images, and below them the explanations of their most probable classes.

  Takes the name of the method, the names of classes [n][B], images as
  `attention_maps`, maps [n, B, h, w] and a name per image.
  """
  pictures = _over(images, maps)
  rows = ['image', *(f'{rank}.' for rank in range(1, 1 + len(maps)))]
  heading = f'{method} of the most probable classes'
  fig = _over_pictures(heading, pictures, labels, rows, down='class', bar='relevance')
  axes = fig.axes[0]
  columns, heights = axes.get_xticks(), axes.get_yticks()
  for row, texts in enumerate(classes, 1):
    for column, text in enumerate(texts):
      axes.text(
        columns[column],
        heights[row] + heights[0],  # The lower edge of the picture.
        shorten(text),
        size=9,
        color='white',
        ha='center',
        va='bottom',
        bbox=dict(facecolor='black', alpha=0.6, linewidth=0, pad=1.5),
      )
  return fig


@styled
def patch_components(
  images: np.ndarray, colours: np.ndarray, explained: np.ndarray, labels: Sequence[str]
) -> Any:
  """Draws images, and below them the principal components of their patches.

  Takes images as `attention_maps`; for the colours of these images and the explained
  variances see internals.patch_colours.
  """
  pixels = as_pixels(images)
  height, width = pixels.shape[1:3]
  rows = np.arange(height) * colours.shape[1] // height
  columns = np.arange(width) * colours.shape[2] // width
  percentages = ' + '.join(f'{100 * fraction:.0f}' for fraction in explained)
  return _over_pictures(
    'Principal components of patches',
    np.stack([pixels, colours[:, rows][:, :, columns]]),
    labels,
    ['image', 'patches'],
    f'red, green, blue: {percentages} % of the variance',
    bar='',
  )


def _over(images: np.ndarray, maps: np.ndarray) -> np.ndarray:
  """Returns images, and below them maps [n, B, h, w] over them."""
  pixels = as_pixels(images)
  rows = [pixels]
  for layer in maps:
    overlays = [overlay(image, weights) for image, weights in zip(pixels, layer)]
    rows.append(np.stack(overlays))
  return np.stack(rows)  # [1 + n, B, H, W, 3]


def _cell(columns: int, rows: int, ratio: float) -> float:
  """Returns the width of a picture in inches so that all fit on a slide."""
  return min(10.3 / columns, 7.2 / (rows * ratio))


def _over_pictures(
  heading: str,
  pictures: np.ndarray,
  columns: Sequence,
  rows: Sequence,
  across: str = '',
  down: str = '',
  bar: str = 'relative attention',
) -> Any:
  """Draws pictures [rows, columns, H, W, 3] with labels and perhaps a colour bar.

  `bar` is the label of the colour bar; '' for none.
  """
  from matplotlib import cm, colors

  ratio = pictures.shape[2] / pictures.shape[3]
  cell = _cell(len(columns), len(rows), ratio)
  points = STYLE['xtick.labelsize']
  columns, lines = wrapped_all(columns, cell, points)
  rows, _ = wrapped_all(rows, _ROW_LABEL, points)
  fig = new_figure(
    max(3.2, 0.85 + 0.27 * (lines + bool(across)) + 1.06 * cell * len(rows) * ratio),
    heading,
    width=max(8.0, 2.6 + 1.05 * cell * len(columns)),
  )
  axes = fig.subplots()
  show_tiles(axes, pictures, columns, rows)
  axes.set_xlabel(across, labelpad=8)
  axes.set_ylabel(down)
  if bar:
    values = cm.ScalarMappable(colors.Normalize(0, 1), 'viridis')
    _colour_bar(fig, axes, values, bar, ticks=(0, 0.5, 1))
  return fig


def _colour_bar(fig: Any, axes: Any, values: Any, label: str, **kwargs: Any) -> None:
  bar = fig.colorbar(values, ax=axes, shrink=0.9, pad=0.01, label=label, **kwargs)
  bar.outline.set_visible(False)
