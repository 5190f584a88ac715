"""Draws comparisons of runs: bars, curves and points, with their spread.

Each function takes arrays, and returns a matplotlib Figure; with `path` it also
writes a PNG. For the style see vit_jax/figures/drawing.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools

from etils import epath
import numpy as np

from vit_jax.figures import drawing
from vit_jax.figures import page

Values = Sequence[float]
_MARKERS = 'osD^vPX*'
_MOST_TICKS = 25  # Names of layers below an axis.
_MOST_UPRIGHT = 60  # Characters of all labels that fit below an axis.


@drawing.styled
def bars(
  groups: Mapping[str, Mapping[str, Values]], ylabel: str, title: str, path=None
):
  """Draws a bar for each mean, a line for its standard deviation, dots for values.

  Args:
    groups: values, of one or several runs each: {group: {label: values}}. A
      label has one colour in all groups. A single group needs no name.
    ylabel: label of the axis, with its unit.
    title: title of the figure.
    path: path of a PNG to write.

  Returns:
    A Figure.
  """
  labels = list(dict.fromkeys(itertools.chain(*groups.values())))
  alone = len(groups) == 1
  fig = drawing.new_figure(7.2, title)
  axes = fig.subplots()
  width = 0.8 if alone else 0.8 / max(1, len(labels))
  for number, label in enumerate(labels):
    colour = drawing.BLUE if alone else _colour(number)
    named = {} if alone else {'label': label}
    for place, values in enumerate(groups.values()):
      if not len(values.get(label, ())):
        continue
      x = number if alone else place + (number - (len(labels) - 1) / 2) * width
      found = np.asarray(values[label], np.float64)
      axes.bar(x, found.mean(), 0.9 * width, color=colour, alpha=0.75, **named)
      named = {}
      _spread(axes, x, found)
  names = labels if alone else list(groups)
  crowded = sum(map(len, names)) > _MOST_UPRIGHT
  axes.set_xticks(
    range(len(names)),
    names,
    **({'rotation': 30, 'ha': 'right'} if crowded else {}),
  )
  axes.set_xlim(-0.6, len(names) - 0.4)
  axes.set_ylim(
    *_limits([v for group in groups.values() for v in group.values()])
  )
  axes.set_ylabel(ylabel)
  axes.grid(axis='y', alpha=0.25)
  axes.set_axisbelow(True)
  return _finish(fig, axes, not alone, path)


@drawing.styled
def curves(
  lines: Mapping[str, tuple[Values, Sequence[Values]]],
  xlabel: str,
  ylabel: str,
  title: str,
  log_x: bool = False,
  log_y: bool = False,
  path=None,
):
  """Draws lines through means, with bands of their standard deviations.

  Args:
    lines: {label: (x [n], values of one or several runs at each x)}.
    xlabel: label of the x axis, with its unit.
    ylabel: label of the y axis, with its unit.
    title: title of the figure.
    log_x: whether the x axis is logarithmic; likewise log_y.
    log_y: see log_x.
    path: path of a PNG to write.

  Returns:
    A Figure.
  """
  fig = drawing.new_figure(7.2, title)
  axes = fig.subplots()
  for number, (label, (x, values)) in enumerate(lines.items()):
    points = sorted(
      (place, np.asarray(found, np.float64))
      for place, found in zip(x, values, strict=True)
      if len(found)
    )
    if not points:
      continue
    at = np.array([place for place, _ in points], np.float64)
    means = np.array([found.mean() for _, found in points])
    stds = np.array([_std(found) for _, found in points])
    colour = _colour(number)
    axes.plot(
      at,
      means,
      color=colour,
      marker=_MARKERS[number % 8],
      label=label,
      zorder=3,
    )
    if stds.any():
      axes.fill_between(
        at, means - stds, means + stds, color=colour, alpha=0.15, linewidth=0
      )
    for place, found in points:
      if len(found) > 1:
        axes.scatter(
          np.full(len(found), place), found, s=14, color=colour, alpha=0.6
        )
  _axes(axes, xlabel, ylabel, log_x, log_y)
  places = np.concatenate([np.asarray(x, float) for x, _ in lines.values()])
  if not log_x and (places == places.round()).all():
    axes.xaxis.get_major_locator().set_params(integer=True)
  return _finish(fig, axes, len(lines) > 1, path)


@drawing.styled
def depth(
  layers: Mapping[str, tuple[float, float]],
  baseline: tuple[float, float] | None,
  title: str,
  path=None,
):
  """Draws the accuracy of linear probes over the depth of a model.

  Args:
    layers: (mean, standard deviation) of the accuracy, from 0 to 1, by the name
      of the layer, from the input to the output.
    baseline: the same of raw pixels, drawn as a line across; None for no line.
    title: title of the figure.
    path: path of a PNG to write.

  Returns:
    A Figure.
  """
  fig = drawing.new_figure(7.2, title)
  axes = fig.subplots()
  places = np.arange(len(layers))
  lines = [(places, np.array(list(layers.values())), 'layers', 'o-')]
  if baseline is not None:
    ends = np.array([-0.5, len(layers) - 0.5])
    lines.append((ends, np.array([baseline] * 2), 'raw pixels', '--'))
  for number, (x, values, label, style) in enumerate(lines):
    mean, std = 100 * values.T
    axes.plot(x, mean, style, color=_colour(number), label=label, zorder=3)
    if std.any():
      axes.fill_between(
        x, mean - std, mean + std, color=_colour(number), alpha=0.15, lw=0
      )
  _axes(axes, 'layer', 'accuracy (%)', False, False)
  step = -(-len(layers) // _MOST_TICKS)
  names = [name.removeprefix('layer_') for name in layers][::step]
  axes.set_xticks(places[::step], names)
  axes.set_xlim(-0.5, len(layers) - 0.5)
  return _finish(fig, axes, baseline is not None, path)


@drawing.styled
def scatter(
  points: Mapping[str, tuple[Values, Values]],
  xlabel: str,
  ylabel: str,
  title: str,
  log_x: bool = False,
  log_y: bool = False,
  names: Mapping[str, Sequence[str]] | None = None,
  path=None,
):
  """Draws points, those of one label in one colour.

  Args:
    points: {label: (x [n], y [n])}.
    xlabel: see curves.
    ylabel: see curves.
    title: see curves.
    log_x: see curves.
    log_y: see curves.
    names: texts beside the points, {label: [n]}.
    path: path of a PNG to write.

  Returns:
    A Figure.
  """
  fig = drawing.new_figure(7.2, title)
  axes = fig.subplots()
  for number, (label, (x, y)) in enumerate(points.items()):
    axes.scatter(
      x,
      y,
      s=80,
      color=_colour(number),
      marker=_MARKERS[number % 8],
      linewidths=0,
      label=label,
      zorder=3,
    )
    for name, *place in zip((names or {}).get(label, ()), x, y):
      axes.annotate(
        name, place, (7, 5), textcoords='offset points', fontsize=11
      )
  _axes(axes, xlabel, ylabel, log_x, log_y)
  return _finish(fig, axes, len(points) > 1, path)


def _colour(number):
  return drawing.LINES[number % len(drawing.LINES)]


def _std(values) -> float:
  return values.std(ddof=1) if len(values) > 1 else 0.0


def _spread(axes, x, values):
  """Draws the standard deviation of several values, and the values as dots."""
  if len(values) < 2:
    return
  axes.errorbar(
    x, values.mean(), _std(values), color=drawing.BLACK, capsize=5, zorder=3
  )
  axes.scatter(
    np.full(len(values), x), values, s=18, color=drawing.GREY, zorder=4
  )


def _limits(values) -> tuple[float | None, float | None]:
  """Returns limits of bars: from 0, or from nearer if all bars are as long."""
  found = np.concatenate([np.asarray(v, np.float64) for v in values] or [[]])
  if not len(found):
    return None, None
  low, high = found.min(), found.max()
  margin = max(high - low, abs(high) * 0.01)
  if low > 0 and low > 0.7 * high:
    return low - margin, high + 0.5 * margin
  return min(0.0, 1.1 * low), max(0.0, high + 0.1 * (high - min(0.0, low)))


def _axes(axes, xlabel, ylabel, log_x, log_y):
  axes.set_xlabel(xlabel)
  axes.set_ylabel(ylabel)
  axes.set_xscale('log' if log_x else 'linear')
  axes.set_yscale('log' if log_y else 'linear')
  axes.grid(alpha=0.25)


def _finish(fig, axes, legend, path):
  """Adds the legend, and writes the PNG."""
  if legend and axes.get_legend_handles_labels()[1]:
    fig.legend(loc='outside lower center', ncols=4, frameon=False)
  if path is not None:
    epath.Path(path).write_bytes(page.png(fig))
  return fig
