"""The kinds of position embeddings, and which fields of a model they allow."""

from typing import Literal

from vit_jax.configs import schema

KINDS = (
  'learned_1d', 'learned_2d', 'sincos2d', 'relative', 'rope', 'axial_rope',
  'learned_axial_rope', 'relative_bias', 'none',
)  # fmt: skip
ROPES = ('rope', 'axial_rope', 'learned_axial_rope')
RELATIVE = ('relative', 'relative_bias')
LAYERS = ('stem', 'every', 'shared')
_ON_GRID = ('learned_2d', 'sincos2d', 'relative_bias', *ROPES)


def kind_of(add: bool, kind: str, layers: str, table_grid=None) -> str:
  """Returns the kind of embeddings that the fields of an encoder select.

  `add` is `add_position_embedding`, which the original has; False means 'none'.
  Raises ValueError if fields are unknown, or contradict each other.
  """
  place = 'config.model.transformer.'
  schema.check('position_embedding', kind, Literal[KINDS], place)
  schema.check('position_layers', layers, Literal[LAYERS], place)
  if kind in RELATIVE and layers == 'stem':
    raise ValueError(
      f"position_embedding='{kind}' is part of the attention of every layer, which "
      "position_layers='stem' excludes: use 'every' or 'shared' "
      '(config.model.transformer.position_layers)'
    )
  if kind in RELATIVE and table_grid is not None:
    raise ValueError(
      f"position_embedding='{kind}' cannot be resized to the grid of the images, as "
      f'position_grid={tuple(table_grid)} requires: leave out one of them '
      '(config.model.transformer.position_grid)'
    )
  if kind in ('rope', 'axial_rope') and (layers != 'stem' or table_grid is not None):
    raise ValueError(
      f"position_embedding='{kind}' has no table for layers or a grid: leave out "
      f'position_layers={layers!r} and position_grid={table_grid} '
      '(config.model.transformer.position_embedding)'
    )
  if add:
    return kind
  if kind not in ('learned_1d', 'none'):
    raise ValueError(
      f"add_position_embedding=False contradicts position_embedding='{kind}': "
      'leave out one of them (config.model.transformer.add_position_embedding)'
    )
  return 'none'


def table_kind(kind: str) -> str:
  """Returns the kind of the tables of a kind of embeddings; 'none' without tables."""
  if kind in ROPES:
    return 'learned_1d' if kind == 'learned_axial_rope' else 'none'
  return kind


def needs_grid(kind: str | None, table_grid=None) -> bool:
  """Returns whether an embedding of this kind and `position_grid` needs a grid."""
  return kind in _ON_GRID or (kind == 'learned_1d' and table_grid is not None)


def check_width(kind: str, width: int) -> None:
  """Raises ValueError if an embedding cannot have the width D."""
  parts = {'learned_2d': 2, 'sincos2d': 4}.get(kind, 1)
  if width % parts or (kind == 'sincos2d' and width < 8):
    raise ValueError(
      f"position_embedding='{kind}' needs a width that is a multiple of {parts}"
      f'{", at least 8" if parts == 4 else ""}, not {width} '
      '(config.model.hidden_size)'
    )
