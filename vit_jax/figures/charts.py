"""Draws curves, confusion matrices, mistakes and reconstructions.

Each function takes arrays and returns a matplotlib Figure; for the style and
`path` see vit_jax/figures/drawing.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax import console
from vit_jax.figures import colors, drawing, results

# Prefixes of the logged values that are not drawn.
_NOT_DRAWN = ('grad_norm', 'img_sec_core', 'num_examples')
# Maximum number of classes for which a confusion matrix shows names; counts.
_MOST_NAMED, _MOST_COUNTED = 25, 12
# Maximum number of rows of a confusion matrix; more classes share rows.
_MOST_CELLS = 100
_MOST_TARGETS = 9  # Maximum number of targets of a regression.
_PAIRS = 10  # Maximum number of pairs of confused classes.
_LEGEND = dict(loc='outside lower center', ncols=3, frameon=False)


@drawing.styled
def attention_distances(distances: np.ndarray, uniform: float, count: int) -> Any:
  """Draws mean attention distances, one dot per head (figures 7 right and 11).

  Distances [layers, heads] and the distance of uniform attention are in pixels;
  `count` is the number of images averaged over.
  """
  layers, heads = distances.shape
  fig = drawing.new_figure(
    7.2,
    f'Mean attention distance of {heads} heads per layer, over {console.pluralize(count, "image")}',
  )
  axes = fig.subplots()
  x = np.arange(1, layers + 1)
  axes.scatter(
    np.repeat(x, heads),
    distances.reshape(-1),
    s=70,
    color=colors.BLUE,
    alpha=0.7,
    linewidths=0,
    label='one head',
    zorder=3,
  )
  means = distances.mean(axis=1)
  axes.plot(x, means, color=colors.VERMILION, label='mean of the layer')
  label = f'uniform attention: {uniform:.1f} pixels'
  axes.axhline(uniform, color=colors.GREY, linestyle='--', label=label)
  axes.set_xlabel('layer')
  axes.set_ylabel('mean attention distance (pixels)')
  axes.set_xlim(0.5, layers + 0.5)
  axes.set_xticks(x if layers <= 16 else x[1::2])
  axes.set_ylim(0, 1.05 * max(uniform, float(distances.max())))
  fig.legend(**_LEGEND)
  return fig


@drawing.styled
def learning_curves(curves: Mapping[str, results.Curve]) -> Any:
  """Draws what a run has logged, see results.learning_curves."""
  panels = curve_panels(curves)
  fig = drawing.new_figure(5.2 if len(panels) < 4 else 8.0, 'Learning curves')
  grid = fig.subplots(
    -(-len(panels) // 3), min(3, len(panels)), squeeze=False, sharex=True
  )
  splits = {'train': None}  # In the order of the curves.
  for names in panels.values():
    for name in names:
      if name != 'lr':
        splits[_split_of(name)] = None
  colours = {split: colors.of_line(i) for i, split in enumerate(splits)}
  colours['lr'] = colors.BLACK
  for axes, (label, names) in zip(grid.flat, panels.items()):
    for name in names:
      steps, values, kind = curves[name]
      split = _split_of(name)
      values = kind.factor * values
      [line] = axes.plot(steps, values, color=colours[split], label=split)
      if len(steps) < 40:
        line.set(marker='o', markersize=5)
    axes.set_xlabel('step')
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(curves[names[0]].kind.title(label))
    if label == 'learning rate':
      axes.ticklabel_format(axis='y', style='sci', scilimits=(-2, 3))
      axes.set_ylim(bottom=0)
    else:
      axes.legend(frameon=False)
    axes.grid(alpha=0.25)
  for axes in grid.flat[len(panels) :]:
    axes.set_visible(False)
  return fig


def curve_panels(curves: Mapping) -> dict[str, list[str]]:
  """Groups curves into panels: names of curves by title of the panel."""
  panels: dict[str, list[str]] = {'loss': [], 'accuracy': []}
  for name in curves:
    if name == 'lr' or name.startswith(_NOT_DRAWN):
      continue
    measure = name.removeprefix('train_')
    if measure == name:
      measure = name.rpartition('_')[0] or name
    panels.setdefault(measure, []).append(name)
  if 'lr' in curves:
    panels['learning rate'] = ['lr']
  return {title: names for title, names in panels.items() if names}


def _split_of(name: str) -> str:
  """Returns the split of a logged value: 'train', 'test', ..."""
  return 'train' if name.startswith('train_') else name.rpartition('_')[2]


@drawing.styled
def confusion(
  predictions: results.Results, class_names: Sequence[str], split: str
) -> Any:
  """Draws a confusion matrix, and the pairs of classes confused most often."""
  from matplotlib import colors as scales

  matrix = np.asarray(predictions.confusion)
  total = matrix.sum()
  correct = np.trace(matrix)
  fig = drawing.new_figure(
    7.2,
    f"Confusion matrix of split '{split}': {correct:,} of {total:,} correct "
    f'({100 * correct / max(1, total):.2f} %)',
  )
  axes, right = fig.subplots(1, 2, width_ratios=(1.7, 1))
  fractions = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
  count = len(class_names)
  block = -(-count // _MOST_CELLS)
  starts = range(0, count, block)
  # The largest fraction of each block of classes.
  cells = np.maximum.reduceat(np.maximum.reduceat(fractions, starts), starts, 1)
  end = len(cells) * block - 0.5
  image = axes.imshow(
    100 * cells,
    cmap='cividis',
    norm=scales.PowerNorm(0.5, 0, 100),  # Makes rare mistakes visible.
    extent=(-0.5, end, end, -0.5),
    interpolation='nearest',
  )
  if count <= _MOST_NAMED:
    names = [drawing.shorten(name, 12) for name in class_names]
    long = max(map(len, names)) > 3
    axes.set_xticks(range(count), names, rotation=90 if long else 0)
    axes.set_yticks(range(count), names)
  if count <= _MOST_COUNTED:
    for i, j in np.argwhere(matrix):
      colour = 'black' if fractions[i, j] > 0.3 else 'white'
      axes.text(j, i, matrix[i, j], ha='center', va='center', color=colour, fontsize=12)
  axes.spines[:].set_visible(False)
  axes.set_xlabel('predicted class')
  axes.set_ylabel('true class')
  bar = fig.colorbar(image, ax=axes, shrink=0.8, ticks=(0, 1, 10, 25, 50, 100))
  if block == 1:
    bar.set_label('share of the true class (%)')
  else:
    bar.set_label(f'largest share of {block} x {block} classes (%)')
  _draw_pairs(right, results.most_confused(matrix, _PAIRS), class_names)
  return fig


@drawing.styled
def reliability(accuracy: np.ndarray, counts: np.ndarray, error: float) -> Any:
  """Draws the accuracy of predictions by their confidence (arXiv 1706.04599).

  `accuracy` and `counts` [bins] are of bins of equal width, `error` is the expected
  calibration error.
  """
  fig = drawing.new_figure(
    5.4, f'Expected calibration error: {100 * error:.2f} %', width=7.2
  )
  upper, lower = fig.subplots(2, 1, sharex=True, height_ratios=(3, 1))
  num_bins = len(counts)
  centres = 100 * (np.arange(num_bins) + 0.5) / num_bins
  width = 100 / num_bins
  upper.bar(centres, np.nan_to_num(100 * accuracy), 0.92 * width, color=colors.BLUE)
  upper.plot([0, 100], [0, 100], color=colors.GREY, linestyle='--', label='calibrated')
  upper.set_ylabel('accuracy (%)')
  upper.set_ylim(0, 100)
  upper.legend(frameon=False, loc='upper left')
  lower.bar(centres, counts, 0.92 * width, color=colors.GREY)
  lower.set_ylabel('images')
  lower.set_xlabel('confidence (%)')
  lower.set_xlim(0, 100)
  return fig


@drawing.styled
def regression(
  true: np.ndarray, predicted: np.ndarray, names: Sequence[str], split: str
) -> Any:
  """Draws predicted against true values, float [n, K], of the first targets."""
  names = names[:_MOST_TARGETS]
  columns = min(3, len(names))
  rows = -(-len(names) // columns)
  width = 7.2 if len(names) == 1 else drawing.WIDTH
  fig = drawing.new_figure(
    0.6 + rows * width / columns, f"Predictions on split '{split}'", width=width
  )
  grid = fig.subplots(rows, columns, squeeze=False)
  for i, (axes, name) in enumerate(zip(grid.flat, names)):
    axes.scatter(
      true[:, i], predicted[:, i], s=12, color=colors.BLUE, alpha=0.5, linewidths=0
    )
    ends = [true[:, i].min(), true[:, i].max()]
    axes.plot(ends, ends, color=colors.GREY, linestyle='--')
    axes.set_title(drawing.shorten(name, 30))
    axes.set_xlabel('true')
    axes.set_ylabel('predicted')
  for axes in grid.flat[len(names) :]:
    axes.set_visible(False)
  return fig


def _draw_pairs(
  axes: Any, pairs: Sequence[tuple[int, int, int]], class_names: Sequence[str]
) -> None:
  """Draws the number of images of each pair of confused classes."""
  if not pairs:
    axes.set_axis_off()
    return
  axes.set_title('confused most often\n(true → predicted class)')
  for row, (true, predicted, count) in enumerate(pairs):
    axes.barh(row + 0.2, count, height=0.32, color=colors.BLUE)
    true_name = drawing.shorten(class_names[true], 16)
    predicted_name = drawing.shorten(class_names[predicted], 16)
    label = f'{true_name} → {predicted_name}: {count:,}'
    axes.text(0, row - 0.06, label, fontsize=13)
  axes.set_ylim(_PAIRS - 0.4, -0.7)  # The first on top.
  axes.set_yticks([])
  axes.set_xlabel('images')
  axes.xaxis.get_major_locator().set_params(integer=True)


@drawing.styled
def mistakes(
  predictions: results.Results, class_names: Sequence[str], split: str
) -> Any:
  """Draws the most confident mistakes."""
  wrong = predictions.mistakes
  if not wrong:
    title = f"All images of split '{split}' are predicted correctly"
    return drawing.new_figure(2.0, title)
  columns = min(4, len(wrong))
  rows = -(-len(wrong) // columns)
  ratio = wrong[0].image.shape[0] / wrong[0].image.shape[1]
  width = drawing.WIDTH / columns - 0.3  # Width of an image's text in inches.
  points = drawing.STYLE['font.size']
  small = 12
  titles, names = [], []
  for mistake in wrong:
    titles.append(
      f'predicted with {100 * mistake.probability:.0f} %:\n'
      f'{class_names[mistake.predicted]}\ntrue: {class_names[mistake.true]}'
    )
    names.append(mistake.name.rpartition('/')[2])
  titles, above = drawing.wrapped_all(titles, width, points)
  names, below = drawing.wrapped_all(names, width, small, 2)
  lines = above + below
  fig = drawing.new_figure(
    0.7 + rows * (0.25 * lines + min(3.2, drawing.WIDTH / columns * ratio)),
    f"The most confident mistakes on split '{split}'",
  )
  grid = fig.subplots(rows, columns, squeeze=False)
  for axes in grid.flat:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
  for axes, mistake, title, name in zip(grid.flat, wrong, titles, names):
    axes.imshow(drawing.as_pixels(mistake.image))
    axes.set_title(title, fontsize=points)
    axes.set_xlabel(name, fontsize=small, color=colors.GREY)
  return fig


@drawing.styled
def reconstructions(pictures: np.ndarray, titles: Sequence[str]) -> Any:
  """Draws images, masked images and predictions, float32 [B, rows, H, W, C]."""
  pixels = drawing.as_pixels(pictures).swapaxes(0, 1)  # [rows, B, H, W, 3]
  rows, columns, height, width = pixels.shape[:4]
  cell = min(11.2 / columns, 2.2 * width / height)
  fig = drawing.new_figure(
    0.6 + rows * cell * 1.07 * height / width, 'Masked patches, predicted'
  )
  drawing.show_tiles(fig.subplots(), pixels, [''] * columns, titles)
  return fig
