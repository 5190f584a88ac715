"""The families of models: what reading and writing their weights needs.

`weights` and `convert` know no kind of model; they ask this table.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import types
from typing import Any
from typing import NamedTuple

from vit_jax.weights.families import detr
from vit_jax.weights.families import detr_files
from vit_jax.weights.families import igpt
from vit_jax.weights.families import igpt_files
from vit_jax.weights.families import vit
from vit_jax.weights.families import vit_files


class Family(NamedTuple):
  """The code of a family.

  Attributes:
    words: one of its models, in words.
    layout: module of the names of arrays: `detect`, `load`, `dump`, `sizes`,
      `defaults`, `describe`.
    files: module of what is beside the arrays, and of the run: `FORMATS`,
      `describe`, `check`, `image_size`, `inputs`, `run`, `metadata`, `layout`,
      `files`, `notes`.
    leaf: a leaf of a model's parameters that no other family has; None for the
      family of all other models.
  """

  words: str
  layout: types.ModuleType
  files: types.ModuleType
  leaf: str | None


# ViT, hybrids, Mixer and BiT.
_CLASSIFIERS = Family('a classifier', vit, vit_files, None)
# Kind of the model (config.model.kind) -> its family; all others are classifiers.
_OTHERS = {
  'detr': Family('a detector', detr, detr_files, 'query_embedding'),
  'igpt': Family('an iGPT', igpt, igpt_files, 'color_embedding'),
}
_BACKBONE = 'a ResNet without a detector'
# (weights, model) in the words of `describe`: models that can start from weights
# of something else.
STARTS = ((_BACKBONE, _OTHERS['detr'].words),)


def of(config: Mapping[str, Any]) -> Family:
  """Returns the family of a model by its config."""
  return _OTHERS.get(config.get('kind'), _CLASSIFIERS)


def of_names(names: Iterable[str]) -> tuple[Family, Any]:
  """Returns the family and layout of a state dict's names.

  Raises:
    ValueError: if they are those of no family.
  """
  for family in (*_OTHERS.values(), _CLASSIFIERS):
    found = family.layout.detect(names)
    if found is not None:
      return family, found
  raise ValueError(
    "it holds no Vision Transformer by timm's or Hugging Face's names, no BiT "
    f'ResNet, DETR or iGPT; its names are {sorted(names)[:4]} ...'
  )


def of_tree(paths: Iterable[str]) -> Family:
  """Returns the family of a model by the paths of its parameters."""
  for family in _OTHERS.values():
    if family.leaf in paths:
      return family
  return _CLASSIFIERS


def describe(paths: Iterable[str]) -> str:
  """Returns what has these leaves, in words: 'a classifier', 'a detector'."""
  family = of_tree(paths)
  alone = family is _CLASSIFIERS and 'backbone/conv_root/kernel' in paths
  return _BACKBONE if alone else family.words
