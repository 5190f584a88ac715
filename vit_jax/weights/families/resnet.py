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


def table(
  units: Iterable[int], style: str, start: str = ''
) -> Iterator[leaves.Leaf]:
  """Yields the leaves of a ResNet with these numbers of bottlenecks per stage.

  Its names elsewhere, in the naming `style`, begin with `start`.
  """
  rows = [('conv_root', 'bn_root', *ROOTS[style])]
  unit, first = _UNITS[style]
  for i, count in enumerate(units):
    for j in range(count):
      here, there = f'block{i + 1}/unit{j + 1}/', unit.format(i + first, j)
      for conv, norm, their_conv, their_norm, other in _LAYERS:
        if style == 'transformers':
          their_conv, their_norm = (
            f'{other}convolution',
            f'{other}normalization',
          )
        rows.append(
          (here + conv, here + norm, there + their_conv, there + their_norm)
        )
  for conv, norm, their_conv, their_norm in rows:
    yield from leaves.layer(f'backbone/{conv}', 'conv', start + their_conv)
    name = start + their_norm
    yield from leaves.layer(f'frozen/backbone/{norm}', 'frozen', name)


def units(names: Iterable[str], start: str, style: str) -> tuple[int, ...]:
  """Returns the number of bottlenecks in each stage; names begin with `start`."""
  unit, first = _UNITS[style]
  number = r'(\d+)'
  pattern = re.escape(start) + unit.format(number, number)
  return leaves.units(names, pattern, first, first_unit=0)
