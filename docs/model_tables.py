"""Writes the tables of models in README.md, docs/models.md and docs/train.md.

  python docs/model_tables.py

The models and their names come from configs/models.py. Counting takes minutes: every
model is traced, but none is computed.
"""

from collections.abc import Iterable
import math
import pathlib
import re

import jax
import jax.numpy as jnp

from vit_jax import models
from vit_jax.configs import models as model_configs
from vit_jax.planning import flops

DOCS = pathlib.Path(__file__).parent
README = DOCS.parent / 'README.md'
FEW = ('ViT-S_16', 'ViT-B_16', 'ViT-L_16', 'ViT-H_14', 'BiT-R50x1')
_SIZE = 224  # Pixels.
_NUM_CLASSES = 1000
# Of ADE20K, for the segmenters: pixels and classes.
_SEGMENTED_SIZE, _NUM_PIXEL_CLASSES = 512, 150
# Published accuracies after pre-training on JFT-300M, on ImageNet-21k, and from scratch.
PUBLISHED = {
  'ViT-B_32': ('', '', '69.19 % ²'),
  'ViT-B_16': ('', '84.61 % (384 px) ³', '74.79 % ²'),
  'ViT-L_32': ('', '', '66.90 % ²'),
  'ViT-L_16': ('87.76 % (512 px) ¹', '85.30 % (512 px) ¹', '72.59 % ²'),
  'ViT-H_14': ('88.55 % (518 px) ¹', '', ''),
}
# Kind of classifiers, in the order of the tables.
KINDS = (
  'Vision Transformer',
  'with mean pooling',
  'DINOv2',
  'DINOv3',
  'hybrids',
  'MLP-Mixer',
  'BiT ResNet',
)


def kind_of(name: str) -> str | None:
  """Returns the kind of a classifier; None for other models and test models."""
  config = model_configs.MODEL_CONFIGS[name]
  kind = model_configs.kind_of(config)
  if name in model_configs.TESTING or kind not in ('vit', 'mixer', 'bit'):
    return None
  if kind != 'vit':
    return {'mixer': 'MLP-Mixer', 'bit': 'BiT ResNet'}[kind]
  if 'resnet' in config:
    return 'hybrids'
  if name.startswith('DINO'):
    return name.partition('-')[0]
  return 'with mean pooling' if config.classifier == 'gap' else 'Vision Transformer'


def classifiers() -> list[str]:
  """Returns the names of all classifiers, kind by kind."""
  names = filter(kind_of, model_configs.MODEL_CONFIGS)
  return sorted(names, key=lambda name: KINDS.index(kind_of(name)))


def count_parameters(
  name: str, size: int = _SIZE, num_classes: int = _NUM_CLASSES
) -> int:
  """Counts the parameters of a model for images of size x size pixels."""
  model = models.get_model(name, num_classes=num_classes)
  images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  variables = jax.eval_shape(
    lambda x: model.init(jax.random.key(0), x, train=False), images
  )
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables['params']))


def gigaflops(name: str, size: int = _SIZE, num_classes: int = _NUM_CLASSES) -> float:
  """Counts the GFLOPs of one forward pass over all tokens of one image."""
  model = models.get_model(name, num_classes=num_classes)
  return 1e-9 * flops.forward_flops(model, (size, size), whole=True)


def names_of(name: str) -> list[str]:
  """Returns the cells of a model before its numbers."""
  return [name.replace('_', '/'), f'`{model_configs.short_name(name)}`']


def _row(cells: Iterable[str]) -> str:
  return f'| {" | ".join(cells)} |'


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
  header = list(header)
  return '\n'.join([_row(header), f'|{"---|" * len(header)}', *map(_row, rows)])


def kinds_table() -> str:
  """Returns the names of classifiers by kind."""
  rows = []
  for kind in KINDS:
    names = [name for name in classifiers() if kind_of(name) == kind]
    rows.append((kind, f'`{" ".join(map(model_configs.short_name, names))}`'))
  return _table(('kind', 'names'), rows)


def models_tables() -> tuple[str, str]:
  """Returns a table of some models, and one of all models with published accuracies."""
  header = ['model', 'name', 'parameters', 'GFLOPs']
  rows = {}
  for name in classifiers():
    numbers = [f'{count_parameters(name):,}', f'{gigaflops(name):,.2f}']
    rows[name] = [*names_of(name), *numbers]
  few = _table(header, [rows[name] for name in FEW])
  published = ['JFT-300M', 'ImageNet-21k', 'only ImageNet, 224 px']
  rows_of_all = [
    [*row, *PUBLISHED.get(name, ('', '', ''))] for name, row in rows.items()
  ]
  return few, _table([*header, *published], rows_of_all)


def segmenters_table() -> str:
  """Returns a table of the EoMTs."""
  rows = []
  for name, config in model_configs.MODEL_CONFIGS.items():
    if model_configs.kind_of(config) != 'eomt':
      continue
    size = {'size': _SEGMENTED_SIZE, 'num_classes': _NUM_PIXEL_CLASSES}
    numbers = [f'{count_parameters(name, **size):,}', f'{gigaflops(name, **size):,.2f}']
    rows.append([*names_of(name), *numbers, str(config.num_query_layers)])
  header = ('segmenter', 'name', 'parameters', 'GFLOPs', 'layers with queries')
  return _table(header, rows)


def replace(page: pathlib.Path, header: str, table: str) -> None:
  """Replaces the table of a page whose header begins with a text."""
  old = re.compile(rf'^\| {re.escape(header)}.*\n(\|.*\n)+', re.MULTILINE)
  text, count = old.subn(lambda _: f'{table}\n', page.read_text())
  if count != 1:
    raise ValueError(f"{page} has {count} tables of '{header}', not one")
  page.write_text(text)


if __name__ == '__main__':
  few, all_models = models_tables()
  replace(README, 'model | name', few)
  replace(DOCS / 'models.md', 'model | name', all_models)
  replace(DOCS / 'models.md', 'segmenter | name', segmenters_table())
  replace(DOCS / 'train.md', 'kind | names', kinds_table())
