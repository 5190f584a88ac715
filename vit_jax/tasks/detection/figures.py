"""Draws what a detector attends to, and where the boxes of its queries lie.

As figures 3, 6 and 7 of arXiv 2005.12872; the arrays come from
vit_jax/tasks/detection/attention_figures.py. Each function returns a matplotlib Figure, see
vit_jax/figures/drawing.py.
"""

from collections.abc import Sequence

import numpy as np

from vit_jax.distributed import sharding
from vit_jax.figures import colors, drawing, gallery
from vit_jax.tasks.detection import attention_figures, detectors

MOST = 4  # Maximum number of images, points and objects of a figure.
_ROWS = 5  # Panels below each other in the figure of the queries.
_PANELS = 20
_KINDS = (
  (attention_figures.SMALL, 'small', colors.GREEN),
  (attention_figures.WIDE, 'large, wide', colors.VERMILION),
  (attention_figures.TALL, 'large, tall', colors.BLUE),
)
_MARK = dict(marker='o', markersize=11, color='white', mec='black', mew=1.5)


def _best(seen: attention_figures.Seen) -> list[np.ndarray]:
  """Returns the queries of each image that detect an object, the best first."""
  return [
    attention_figures.best_queries(seen, i, detectors.THRESHOLD, MOST)
    for i in range(len(seen.boxes))
  ]


def _centres(seen: attention_figures.Seen) -> list[np.ndarray]:
  """Returns the centres of the best boxes of each image, float [P, 2]."""
  return [
    boxes[best].clip(0, 1).reshape(-1, 2, 2).mean(axis=1)
    for boxes, best in zip(seen.boxes, _best(seen))
  ]


@drawing.styled
def encoder_attention(
  images, seen: attention_figures.Seen, names: Sequence[str], points=None
):
  """Draws the encoder's self-attention of points over images (figure 3).

  A row for each image [H, W, 3] in [-1, 1]. Points are float [P, 2], x and y as
  shares of each image; by default the centres of the best boxes.
  """
  given = _centres(seen) if points is None else [points] * len(images)
  columns = 1 + max(map(len, given))
  fig, grid = _grid(images, seen, columns, 'Self-attention of the encoder')
  for i, (row, marks) in enumerate(zip(grid, given)):
    one = attention_figures.Seen(*(x[i : i + 1] for x in seen))
    maps = attention_figures.at_points(one, np.asarray(marks)[None])[0]  # [P, h, w]
    picture = _picture(images[i], seen.filled[i])
    size = picture.shape[1::-1]
    row[0].imshow(picture)
    row[0].set_title(drawing.shorten(names[i], 22))
    for number, (axes, weights, mark) in enumerate(zip(row[1:], maps, marks), 1):
      axes.imshow(drawing.overlay(picture, weights, seen.filled[i]))
      axes.plot(*(mark * size - 0.5), **_MARK)
      axes.set_title(f'point {number}')
      row[0].plot(*(mark * size - 0.5), **_MARK)
      row[0].annotate(
        str(number), mark * size - 0.5, ha='center', va='center', fontsize=8
      )
  return fig


@drawing.styled
def query_attention(
  images,
  seen: attention_figures.Seen,
  names: Sequence[str],
  class_names: Sequence[str],
):
  """Draws the decoder's attention of the best queries (figure 6).

  A row for each image: the image with the boxes, and the attention of the query
  of each box.
  """
  best = _best(seen)
  columns = 1 + max(map(len, best))
  fig, grid = _grid(images, seen, columns, 'Attention of the queries')
  for i, (row, queries) in enumerate(zip(grid, best)):
    picture = _picture(images[i], seen.filled[i])
    row[0].imshow(picture)
    row[0].set_title(drawing.shorten(names[i], 22))
    for number, (axes, query) in enumerate(zip(row[1:], queries)):
      colour = colors.of_line(number)
      weights = seen.decoder[i, query]
      axes.imshow(drawing.overlay(picture, weights, seen.filled[i]))
      box = seen.boxes[i, query]
      _draw_box(row[0], box, picture, colour)
      _draw_box(axes, box, picture, colour)
      name = drawing.shorten(class_names[seen.labels[i, query]], 14)
      axes.set_title(f'{name}, {100 * seen.scores[i, query]:.0f} %', color=colour)
  return fig


@drawing.styled
def query_boxes(boxes: np.ndarray):
  """Draws the centres of the boxes of queries over a data set (figure 7).

  A panel for each of the first 20 queries, the unit square that stands for all
  images. For the boxes [n, Q, 4] see attention_figures.query_boxes.
  """
  count, queries = boxes.shape[:2]
  shown = min(queries, _PANELS)
  rows = min(_ROWS, -(-shown // 5))
  columns = -(-shown // rows)
  fig = drawing.new_figure(
    1.3 + 1.75 * rows,
    f'Boxes of {shown} of {queries} queries in {count:,} images',
    width=max(8.0, 1.75 * columns),
  )
  kinds = attention_figures.kinds(boxes)
  grid = fig.subplots(rows, columns, squeeze=False)
  size = float(np.clip(4_000 / max(1, count), 1, 16))
  for axes in grid.flat:
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], aspect='equal')
  for query, axes in enumerate(grid.flat):
    if query >= shown:
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


def _grid(images, seen, columns, title):
  """Returns a figure and its Axes [B, columns], without ticks."""
  rows, height, width = images.shape[:3]
  down, across = seen.filled.T
  ratio = float((height * down / (width * across)).mean())  # Of the pictures.
  cell = min(3.2, 12.0 / columns, 9.0 / (rows * ratio))
  fig = drawing.new_figure(
    0.7 + rows * (0.35 + cell * ratio), title, width=max(5.5, columns * cell)
  )
  grid = fig.subplots(rows, columns, squeeze=False)
  for axes in grid.flat:
    axes.set_axis_off()
    axes.title.set_fontsize(12)
  return fig, grid


def _picture(image, filled) -> np.ndarray:
  """Returns an image without padding, float32 [H, W, 3] in [0, 1]."""
  height, width = np.multiply(image.shape[:2], filled).round().astype(int)
  return drawing.as_pixels(image[: max(1, height), : max(1, width)])


def _draw_box(axes, box, picture, colour):
  """Draws a box, corners as shares of the image."""
  from matplotlib import patches

  size = np.array(picture.shape[1::-1])
  (x0, y0), (x1, y1) = box.clip(0, 1).reshape(2, 2) * size - 0.5
  axes.add_patch(
    patches.Rectangle(
      (x0, y0), x1 - x0, y1 - y0, fill=False, color=colour, linewidth=2.5
    )
  )


# --- The figures in the gallery; `subject` is a vit_jax.figures.results.Subject ---


def _look(subject) -> attention_figures.Seen:
  model = subject.model
  return attention_figures.look(model.task, model.params, model.extra, subject.batch)


def _draw_boxes(subject):
  model = subject.model
  mesh = sharding.mesh_of(model.params)
  state = model.params, model.extra
  found = attention_figures.query_boxes(model.task, mesh, subject.source, *state)
  return [query_boxes(found)]


def _pages(subject):
  """Yields images, what the detector sees in them and names, for each figure."""
  seen = subject.once(_look)
  for part in gallery.pages(subject, MOST):
    yield (
      subject.batch['image'][part],
      attention_figures.Seen(*(x[part] for x in seen)),
      subject.names[part],
    )


def _needs_split(subject):
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
    'points are the centres of the best boxes, or those of --points.',
    'arXiv 2005.12872, section 4.3 and figure 3',
    gallery.needs_images,
    lambda subject: [
      encoder_attention(*page, subject.points) for page in _pages(subject)
    ],
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
    lambda subject: [
      query_attention(*page, subject.model.class_names) for page in _pages(subject)
    ],
  ),
  gallery.Entry(
    'query_boxes',
    'Boxes of the queries',
    'Each panel is a query, and each dot the centre of the box that the query '
    'predicts for an image of the split, whether it sees an object or none. Green '
    'boxes are small, less than a tenth of the image; red ones are large and '
    'wide, blue ones large and tall. Queries specialise on places and sizes.',
    'arXiv 2005.12872, section 4.3 and figure 7',
    _needs_split,
    _draw_boxes,
  ),
)
