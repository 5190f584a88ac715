"""The families of models: what reading and writing their weights needs.

The rest of vit_jax.weights does not depend on kinds of models; it uses this table.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from vit_jax.weights import descriptions
from vit_jax.weights.families import base, detr, eomt, igpt, lit, text, vit

# The last one takes all models that belong to no other family.
_FAMILIES: tuple[base.Family, ...] = (
  detr.Detrs(),
  eomt.Eomts(),
  igpt.ImageGPTs(),
  lit.ImageTexts(),
  text.Berts(),
  text.TextTransformers(),
  vit.Classifiers(),
)
_BACKBONE = 'a ResNet without a detector'
# (weights, model) in the words of `describe`: models that can start from other
# weights than their own.
STARTS = (
  (_BACKBONE, detr.Detrs.noun),
  (vit.Classifiers.noun, eomt.Eomts.noun),
)


def from_config(config: Mapping[str, Any]) -> base.Family:
  """Returns the family of a model by its config."""
  kinds = config.get('kind'), None
  return next(family for family in _FAMILIES if family.kind in kinds)


def knows(names: Iterable[str]) -> bool:
  """Returns whether a state dict with these names is of a model of this package."""
  return any(family.detect(names) for family in _FAMILIES)


def from_names(names: Iterable[str]) -> tuple[base.Family, str]:
  """Returns family and naming of a state dict; ValueError if it has none."""
  for family in _FAMILIES:
    naming = family.detect(names)
    if naming is not None:
      return family, naming
  raise ValueError(
    "it holds no Vision Transformer with timm's or Hugging Face's names, BiT "
    f'ResNet, DETR, EoMT, iGPT, CLIP, SigLIP or BERT; its names are {sorted(names)[:4]} ...'
  )


def check_type(config: Mapping[str, Any]) -> None:
  """Raises ValueError if config.json is of another model of Hugging Face."""
  types: list[str] = []
  for family in _FAMILIES:
    types += family.hf_types
  descriptions.field(config, 'model_type', Literal[*types])


def from_tree(paths: Iterable[str]) -> base.Family:
  """Returns the family of a model by the paths of its parameters."""
  return next(f for f in _FAMILIES if f.leaf is None or f.leaf in paths)


def describe(paths: Iterable[str]) -> str:
  """Returns in words what has these leaves: 'a classifier', 'a detector'."""
  family = from_tree(paths)
  only_backbone = family.leaf is None and 'backbone/conv_root/kernel' in paths
  return _BACKBONE if only_backbone else family.noun
