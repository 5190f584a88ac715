"""Draws what a detector attends to, and where the boxes of its queries lie.

Like figures 3, 6 and 7 of arXiv 2005.12872, from the arrays of attention_figures.py.
Each function returns a matplotlib Figure, see vit_jax/figures/drawing.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.distributed import sharding
from vit_jax.figures import colors, drawing, gallery
from vit_jax.tasks.detection import attention_figures, boxes as boxes_lib, detectors

MOST = 4  # Maximum number of images, points and objects of a figure.
_ROWS, _PANELS = 5, 20  # Largest numbers in the figure of the queries.
_KINDS = (
  (attention_figures.SMALL, 'small', colors.GREEN),
  (attention_figures.WIDE, 'large, wide', colors.VERMILION),
  (attention_figures.TALL, 'large, tall', colors.BLUE),
)
_MARK = dict(marker='o', markersize=11, color='white', mec='black', mew=1.5)


def _best(attention: attention_figures.Attention) -> list[np.ndarray]:
  """Returns the queries of each image that detect an object, the best first."""
  return [
    attention_figures.best_queries(scores, detectors.THRESHOLD, MOST)
    for scores in attention.scores
  ]


def _select(
  attention: attention_figures.Attention, rows: slice
) -> attention_figures.Attention:
  """Returns the attention of some of the images."""
  return attention_figures.Attention(*(x[rows] for x in attention))


@drawing.styled
def encoder_attention(
  images: np.ndarray,
  attention: attention_figures.Attention,
  names: Sequence[str],
  points: np.ndarray | None = None,
) -> Any:
  """Draws the encoder's self-attention of points over images (figure 3).

  There is a row for each image.

  Args:
    images: [B, H, W, 3] in [-1, 1].
    attention: their attention.
    names: their names.
    points: float [P, 2], x and y as shares of each image; by default the centres of
      the best boxes.
  """
  if points is None:
    points_of_images = []
    for boxes, best in zip(attention.boxes, _best(attention)):
      corners = boxes[best].clip(0, 1).reshape(-1, 2, 2)
      points_of_images.append(corners.mean(axis=1))
  else:
    points_of_images = [np.asarray(points)] * len(images)
  title = 'Self-attention of the encoder'
  columns = 1 + max(map(len, points_of_images))
  fig, grid, pictures = _grid(images, attention, names, columns, title)
  for i, (panels, picture, points) in enumerate(zip(grid, pictures, points_of_images)):
    image_attention = _select(attention, slice(i, i + 1))
    [maps] = attention_figures.at_points(image_attention, points[None])  # [P, h, w]
    height, width = picture.shape[:2]
    positions = points * (width, height) - 0.5
    whole_panel, *map_panels = panels
    for number, (axes, (x, y), weights) in enumerate(
      zip(map_panels, positions, maps), 1
    ):
      axes.imshow(drawing.overlay(picture, weights, attention.filled[i]))
      axes.plot(x, y, **_MARK)
      axes.set_title(f'point {number}')
      whole_panel.plot(x, y, **_MARK)
      whole_panel.annotate(str(number), (x, y), ha='center', va='center', fontsize=8)
  return fig


@drawing.styled
def query_attention(
  images: np.ndarray,
  attention: attention_figures.Attention,
  names: Sequence[str],
  class_names: Sequence[str],
) -> Any:
  """Draws the decoder's attention of the best queries (figure 6).

  A row for each image: the image with the boxes, and the attention of the query
  of each box.
  """
  best = _best(attention)
  title = 'Attention of the queries'
  columns = 1 + max(map(len, best))
  fig, grid, pictures = _grid(images, attention, names, columns, title)
  for i, (panels, picture, queries) in enumerate(zip(grid, pictures, best)):
    for number, (axes, query) in enumerate(zip(panels[1:], queries)):
      colour = colors.of_line(number)
      weights = attention.decoder[i, query]
      axes.imshow(drawing.overlay(picture, weights, attention.filled[i]))
      for panel in (panels[0], axes):
        _draw_box(panel, attention.boxes[i, query], picture, colour)
      name = drawing.shorten(class_names[attention.labels[i, query]], 14)
      score = attention.scores[i, query]
      axes.set_title(f'{name}, {100 * score:.0f} %', color=colour)
  return fig


@drawing.styled
def query_boxes(boxes: np.ndarray) -> Any:
  """Draws the centres of the boxes of queries over a data set (figure 7).

  A panel for each of the first 20 queries, the unit square that stands for all
  images. For the boxes [n, Q, 4] see attention_figures.query_boxes.
  """
  count, queries = boxes.shape[:2]
  num_panels = min(queries, _PANELS)
  rows = min(_ROWS, -(-num_panels // 5))
  columns = -(-num_panels // rows)
  fig = drawing.new_figure(
    1.3 + 1.75 * rows,
    f'Boxes of {num_panels} of {queries} queries in {count:,} images',
    width=max(8.0, 1.75 * columns),
  )
  kinds = attention_figures.kinds(boxes)
  grid = fig.subplots(rows, columns, squeeze=False)
  size = float(np.clip(4_000 / max(1, count), 1, 16))
  for query, axes in enumerate(grid.flat):
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], aspect='equal')
    if query >= num_panels:
      axes.set_visible(False)
      continue
    axes.set_title(f'query {query}', fontsize=11, pad=3)
    axes.spines[:].set_visible(True)
    for kind, _, colour in _KINDS:
      x, y = boxes[kinds[:, query] == kind, query, :2].T
      axes.scatter(x, y, s=size, color=colour, linewidths=0)
  lines = [
    grid.flat[0].scatter([], [], s=60, color=colour, label=name)
    for _, name, colour in _KINDS
  ]
  fig.legend(handles=lines, loc='outside lower center', ncols=3, frameon=False)
  return fig


def _grid(
  images: np.ndarray,
  attention: attention_figures.Attention,
  names: Sequence[str],
  columns: int,
  title: str,
) -> tuple[Any, Any, list[np.ndarray]]:
  """Returns a figure, its Axes [B, columns] and B pictures.

  The first column shows the images without padding, which are the pictures.
  """
  rows, height, width = images.shape[:3]
  down, across = attention.filled.T
  ratio = float((height * down / (width * across)).mean())  # Height / width.
  cell = min(3.2, 12.0 / columns, 9.0 / (rows * ratio))
  fig = drawing.new_figure(
    0.7 + rows * (0.35 + cell * ratio), title, width=max(5.5, columns * cell)
  )
  grid = fig.subplots(rows, columns, squeeze=False)
  for axes in grid.flat:
    axes.set_axis_off()
    axes.title.set_fontsize(12)
  pictures = []
  for axes, image, filled, name in zip(grid[:, 0], images, attention.filled, names):
    height, width = boxes_lib.shown_size(image.shape[:2], filled)
    pictures.append(drawing.as_pixels(image[:height, :width]))
    axes.imshow(pictures[-1])
    axes.set_title(drawing.shorten(name, 22))
  return fig, grid, pictures


def _draw_box(axes: Any, box: np.ndarray, picture: np.ndarray, colour: str) -> None:
  """Draws a box, corners as shares of the image."""
  from matplotlib import patches

  box = boxes_lib.to_pixels(box.clip(0, 1), picture.shape[:2]) - 0.5
  frame = dict(fill=False, color=colour, linewidth=2.5)
  axes.add_patch(patches.Rectangle(box[:2], *(box[2:] - box[:2]), **frame))


# --- The figures in the gallery; `subject` is a vit_jax.figures.results.Subject ---


def _attention(subject: Any) -> attention_figures.Attention:
  model = subject.model
  return attention_figures.compute(model.task, model.params, model.extra, subject.batch)


def _draw_query_boxes(subject: Any) -> list[Any]:
  model = subject.model
  mesh = sharding.mesh_of(model.params)
  boxes = attention_figures.query_boxes(
    model.task, mesh, subject.source, model.params, model.extra
  )
  return [query_boxes(boxes)]


def _pages(
  subject: Any,
) -> Iterator[tuple[np.ndarray, attention_figures.Attention, Sequence[str]]]:
  """Yields images, their attention and names, for each figure."""
  attention = subject.once(_attention)
  for part in gallery.pages(subject, MOST):
    yield (
      subject.batch['image'][part],
      _select(attention, part),
      subject.names[part],
    )


def _draw_encoder_attention(subject: Any) -> list[Any]:
  figures = []
  for images, attention, names in _pages(subject):
    figures.append(encoder_attention(images, attention, names, subject.points))
  return figures


def _draw_query_attention(subject: Any) -> list[Any]:
  figures = []
  for images, attention, names in _pages(subject):
    class_names = subject.model.class_names
    figures.append(query_attention(images, attention, names, class_names))
  return figures


def _needs_split(subject: Any) -> str | None:
  if subject.source is None:
    return subject.lacking or 'there is no data set'
  return gallery.needs_images(subject)


FIGURES = (
  gallery.Entry(
    'encoder_attention',
    'Self-attention of the encoder',
    'Each map shows how much the cell of the image at the white point attends to '
    'every other cell in the last layer of the encoder, averaged over the heads. '
    'In a trained detector the maps separate the objects from each other. The '
    'points are the centres of the best boxes, or the ones of --points.',
    'arXiv 2005.12872, section 4.3 and figure 3',
    gallery.needs_images,
    _draw_encoder_attention,
    ('--points',),
  ),
  gallery.Entry(
    'query_attention',
    'Attention of the queries',
    'Each map shows where the query of a detected object attends to in the last '
    'layer of the decoder, averaged over the heads, with its box. In a trained '
    'detector these are often the edges of the object, such as heads and legs. '
    'Of an image without a detection, the most probable object is shown.',
    'arXiv 2005.12872, section 4.3 and figure 6',
    gallery.needs_images,
    _draw_query_attention,
  ),
  gallery.Entry(
    'query_boxes',
    'Boxes of the queries',
    'Each panel is a query, and each dot the centre of the box that the query '
    'predicts for an image of the split, with or without an object. Green '
    'boxes are small, less than a tenth of the image; red ones are large and '
    'wide, blue ones large and tall. Queries specialise on places and sizes.',
    'arXiv 2005.12872, section 4.3 and figure 7',
    _needs_split,
    _draw_query_boxes,
  ),
)
