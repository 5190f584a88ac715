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

# Naming -> name of the first convolution, and of its norm.
ROOTS = {
  'timm': ('conv1', 'bn1'),
  'transformers': (
    'embedder.embedder.convolution',
    'embedder.embedder.normalization',
  ),
}
# Naming -> beginning of a unit's names, and number of the first stage.
_UNITS = {
  'timm': ('layer{}.{}.', 1),
  'transformers': ('encoder.stages.{}.layers.{}.', 0),
}
# Convolution and norm of a unit here, in timm, and where both are in transformers.
_LAYERS = (
  ('conv1', 'bn1', 'conv1', 'bn1', 'layer.0.'),
  ('conv2', 'bn2', 'conv2', 'bn2', 'layer.1.'),
  ('conv3', 'bn3', 'conv3', 'bn3', 'layer.2.'),
  ('conv_proj', 'bn_proj', 'downsample.0', 'downsample.1', 'shortcut.'),
)


def table(units: Iterable[int], style: str) -> Iterator[leaves.Leaf]:
  """Yields the leaves of a ResNet with these numbers of units per stage.

  Args:
    units: bottlenecks per stage.
    style: the naming.
  """
  rows = [('conv_root', 'bn_root', *ROOTS[style])]
  start, first = _UNITS[style]
  for stage, count in enumerate(units):
    for unit in range(count):
      here = f'block{stage + 1}/unit{unit + 1}/'
      there = start.format(stage + first, unit)
      for conv, norm, their_conv, their_norm, other in _LAYERS:
        if style == 'transformers':
          names = f'{other}convolution', f'{other}normalization'
        else:
          names = their_conv, their_norm
        rows.append((here + conv, here + norm, *(there + x for x in names)))
  for conv, norm, their_conv, their_norm in rows:
    yield from leaves.layer(f'backbone/{conv}', 'conv', their_conv)
    yield from leaves.layer(f'frozen/backbone/{norm}', 'frozen', their_norm)


def units(names: Iterable[str], start: str, style: str) -> tuple[int, ...]:
  """Returns the number of bottlenecks in each stage.

  Args:
    names: names of arrays.
    start: beginning of the names of the ResNet.
    style: the naming.
  """
  unit, first = _UNITS[style]
  number = r'(\d+)'
  pattern = re.escape(start) + unit.format(number, number)
  return leaves.units(names, pattern, first, first_unit=0)
