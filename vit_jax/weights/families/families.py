"""The families of models other than classifiers: what their weights need.

`weights` and `convert` know no other family than that of the classifiers (ViT,
hybrids, Mixer, BiT); they ask this table for all others.
"""

from collections.abc import Iterable
import types
from typing import Any
from typing import NamedTuple

from vit_jax.weights.families import detr
from vit_jax.weights.families import detr_files
from vit_jax.weights.families import igpt
from vit_jax.weights.families import igpt_files


class Family(NamedTuple):
  """The code of a family.

  Attributes:
    layout: module of the names of arrays: `detect`, `load`, `dump`, `sizes`,
      `describe`.
    files: module of what is beside the arrays, and of the run: `FORMATS`,
      `run`, `metadata`, `image_size`, `describe`, `check`, `layout`, `files`, `notes`.
  """

  layout: types.ModuleType
  files: types.ModuleType


# Kind of the model (config.model.kind) -> its family.
FAMILIES = {
  'detr': Family(detr, detr_files),
  'igpt': Family(igpt, igpt_files),
}
# A leaf that only one kind of model has -> the kind.
LEAVES = {'query_embedding': 'detr', 'color_embedding': 'igpt'}
_WORDS = {'detr': 'a detector', 'igpt': 'an iGPT'}
_BACKBONE = 'a ResNet without a detector'
# (weights, model) in the words of `describe`: models that can start from weights
# of something else.
STARTS = ((_BACKBONE, _WORDS['detr']),)


def of_names(names: Iterable[str]) -> tuple[Family | None, Any]:
  """Returns the family and layout of a state dict's names; (None, None)."""
  for family in FAMILIES.values():
    found = family.layout.detect(names)
    if found is not None:
      return family, found
  return None, None


def of_tree(paths: Iterable[str]) -> Family | None:
  """Returns the family of a model's leaves; None for a classifier."""
  for leaf, kind in LEAVES.items():
    if leaf in paths:
      return FAMILIES[kind]
  return None


def describe(paths: Iterable[str]) -> str:
  """Returns what has these leaves, in words: 'a classifier', 'a detector'."""
  for leaf, kind in LEAVES.items():
    if leaf in paths:
      return _WORDS[kind]
  return _BACKBONE if 'backbone/conv_root/kernel' in paths else 'a classifier'
