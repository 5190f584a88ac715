"""Names of the ResNet of vit_jax.layers.resnet in other programs.

There are two namings:

  timm          that of timm, torchvision and the released files of DETR
  transformers  that of Hugging Face's own ResNet

The constants of frozen batch norm are at 'frozen/' in the tree, beside the
parameters.
"""

from collections.abc import Iterable
from collections.abc import Iterator
import re

from vit_jax.weights.families import leaves

FROZEN = 'frozen/'
# Naming -> name of the first convolution.
ROOTS = {'timm': 'conv1', 'transformers': 'embedder.embedder.convolution'}
_NORM = (
  ('scale', 'weight'),
  ('bias', 'bias'),
  ('mean', 'running_mean'),
  ('var', 'running_var'),
)


def _convolution(path, conv, norm, their_conv, their_norm):
  """Yields the kernel of a convolution, and its norm."""
  yield f'{path}{conv}/kernel', 'conv', f'{their_conv}.weight'
  for ours, theirs in _NORM:
    yield f'{FROZEN}{path}{norm}/{ours}', 'same', f'{their_norm}.{theirs}'


def table(units: Iterable[int], style: str) -> Iterator[tuple[str, str, str]]:
  """Yields path, kind of layout and name of each leaf.

  Args:
    units: bottlenecks per stage.
    style: the naming.
  """
  timm = style == 'timm'
  norm = 'bn1' if timm else 'embedder.embedder.normalization'
  yield from _convolution(
    'backbone/', 'conv_root', 'bn_root', ROOTS[style], norm
  )
  for stage, count in enumerate(units, start=1):
    for unit in range(count):
      here = f'backbone/block{stage}/unit{unit + 1}/'
      there = (
        f'layer{stage}.{unit}.'
        if timm
        else f'encoder.stages.{stage - 1}.layers.{unit}.'
      )
      for conv, norm, *theirs in _unit(timm, first=unit == 0):
        names = (there + name for name in theirs)
        yield from _convolution(here, conv, norm, *names)


def _unit(timm, first):
  """Yields names of a convolution and its norm: ours, then theirs."""
  for i in (1, 2, 3):
    layer = f'layer.{i - 1}.'
    names = f'{layer}convolution', f'{layer}normalization'
    yield f'conv{i}', f'bn{i}', *((f'conv{i}', f'bn{i}') if timm else names)
  if first:
    names = 'shortcut.convolution', 'shortcut.normalization'
    timm_names = 'downsample.0', 'downsample.1'
    yield 'conv_proj', 'bn_proj', *(timm_names if timm else names)


def units(names: Iterable[str], start: str, style: str) -> list[int]:
  """Returns the number of bottlenecks in each stage.

  Args:
    names: names of arrays.
    start: beginning of the names of the ResNet.
    style: the naming.

  Raises:
    ValueError: if a number is missing.
  """
  start = re.escape(start)
  if style == 'timm':
    stage, unit, first = rf'{start}layer', r'\.', 1
  else:
    stage, unit, first = rf'{start}encoder\.stages\.', r'\.layers\.', 0
  stages = leaves.count(names, rf'{stage}(\d+)\.', first)
  return [
    leaves.count(names, rf'{stage}{first + i}{unit}(\d+)\.')
    for i in range(stages)
  ]
