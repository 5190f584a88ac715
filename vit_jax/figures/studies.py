"""Draws comparisons of runs: bars and curves, with their spread.

Each function takes arrays and returns a matplotlib Figure; for the style and
`path` see vit_jax/figures/drawing.py.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.figures import colors, drawing
from vit_jax.run import metrics as metrics_lib

Values = Sequence[float]
_MARKERS = 'osD^vPX*'
_MOST_UPRIGHT = 60  # Characters of all labels that fit below an axis.


@drawing.styled
def bars(values: Mapping[str, Values], ylabel: str, title: str) -> Any:
  """Draws means as bars, standard deviations as lines and values as dots.

  `values` are {label: values of one or several runs}.
  """
  fig, axes = _new(title, ylabel=ylabel)
  for x, runs in enumerate(values.values()):
    if not len(runs):
      continue
    mean, std = metrics_lib.mean_std(runs)
    axes.bar(x, mean, 0.72, color=colors.BLUE, alpha=0.75)
    if len(runs) > 1:
      axes.errorbar(x, mean, std, color=colors.BLACK, capsize=5, zorder=3)
      axes.scatter([x] * len(runs), runs, s=18, color=colors.GREY, zorder=4)
  crowded = sum(map(len, values)) > _MOST_UPRIGHT
  rotation = {'rotation': 30, 'ha': 'right'} if crowded else {}
  axes.set_xticks(range(len(values)), list(values), **rotation)
  axes.set_xlim(-0.6, len(values) - 0.4)
  axes.set_ylim(*_limits(values.values()))
  axes.grid(False, axis='x')
  axes.set_axisbelow(True)
  return fig


@drawing.styled
def curves(
  lines: Mapping[str, tuple[Values, Sequence[Values]]],
  xlabel: str,
  ylabel: str,
  title: str,
  log_x: bool = False,
) -> Any:
  """Draws lines through means, with bands of their standard deviations.

  Lines are {label: (x [n], values of one or several runs at each x)}.
  """
  fig, axes = _new(title, xlabel, ylabel, log_x)
  for number, (label, (x, values)) in enumerate(lines.items()):
    points = []
    for place, runs in zip(x, values, strict=True):
      if len(runs):
        points.append((place, list(runs)))
    points.sort()
    if not points:
      continue
    at = np.array([place for place, _ in points], np.float64)
    mean, std = np.array([metrics_lib.mean_std(runs) for _, runs in points]).T
    colour = colors.of_line(number)
    marker = _MARKERS[number % 8]
    axes.plot(at, mean, color=colour, label=label, zorder=3, marker=marker)
    if std.any():
      axes.fill_between(at, mean - std, mean + std, color=colour, alpha=0.15, lw=0)
    for place, runs in points:
      if len(runs) > 1:
        axes.scatter([place] * len(runs), runs, s=14, alpha=0.6, color=colour)
  places = np.concatenate([np.asarray(x, float) for x, _ in lines.values()])
  if not log_x and (places == places.round()).all():
    axes.xaxis.get_major_locator().set_params(integer=True)
  if len(axes.get_legend_handles_labels()[1]) > 1:
    fig.legend(loc='outside lower center', ncols=4, frameon=False)
  return fig


def _limits(values: Collection[Values]) -> tuple[float | None, float | None]:
  """Returns limits of the y axis: from 0, or closer if all bars are similar."""
  numbers = np.concatenate([np.asarray(v, np.float64) for v in values] or [[]])
  if not len(numbers):
    return None, None
  low, high = numbers.min(), numbers.max()
  margin = max(high - low, abs(high) * 0.01)
  if low > 0 and low > 0.7 * high:
    return low - margin, high + 0.5 * margin
  lowest = min(0.0, low)
  return min(0.0, 1.1 * low), max(0.0, high + 0.1 * (high - lowest))


def _new(
  title: str, xlabel: str | None = None, ylabel: str | None = None, log_x: bool = False
) -> tuple[Any, Any]:
  """Returns a figure and its only Axes."""
  fig = drawing.new_figure(7.2, title)
  axes = fig.subplots()
  axes.set(xlabel=xlabel, ylabel=ylabel, xscale='log' if log_x else 'linear')
  axes.grid(alpha=0.25)
  return fig, axes
