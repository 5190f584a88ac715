"""The kinds of position embeddings, and which fields of a model they allow."""

from collections.abc import Mapping
from typing import Any

ROPES = ('rope', 'axial_rope', 'learned_axial_rope')
RELATIVE = ('relative', 'relative_bias')
# Those with a table that is added to the tokens.
TABLES = ('learned_1d', 'learned_2d', 'sincos2d', 'learned_axial_rope')
_ON_GRID = ('learned_2d', 'sincos2d', 'relative_bias', *ROPES)


def kind_of(transformer: Mapping[str, Any]) -> str:
  """Returns the kind of embeddings that the fields of an encoder select.

  Raises ValueError if the fields contradict each other.
  """
  kind = transformer.get('position_embedding', 'learned_1d')
  if kind in RELATIVE and transformer.get('position_layers', 'stem') == 'stem':
    raise ValueError(
      f"position_embedding='{kind}' is part of the attention of every layer, which "
      "position_layers='stem' excludes: use 'every' or 'shared' "
      '(config.model.transformer.position_layers)'
    )
  if transformer.get('add_position_embedding', True):
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


def needs_grid(kind: str | None, table_grid: tuple[int, int] | None = None) -> bool:
  """Returns whether an embedding of this kind and `position_grid` needs a grid."""
  return kind in _ON_GRID or (kind == 'learned_1d' and table_grid is not None)


def check_width(kind: str, width: int) -> None:
  """Raises ValueError if an embedding cannot have the width D."""
  divisor = {'learned_2d': 2, 'sincos2d': 4}.get(kind, 1)
  minimum = ', at least 8' if kind == 'sincos2d' else ''
  if width % divisor or (minimum and width < 8):
    raise ValueError(
      f"position_embedding='{kind}' needs a width that is a multiple of {divisor}"
      f'{minimum}, not {width} '
      '(config.model.hidden_size)'
    )
