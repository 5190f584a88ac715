"""timm's `Eva` and `Beit`: names of their arrays, and their fields in config.json.

`Eva` computes DINOv3 (arXiv 2508.10104), EVA (2211.07636), EVA-02 (2303.11331) and
RoPE-ViT (2403.13298), `Beit` computes BEiT (2106.08254) and BEiT v2 (2208.06366).
Rotary embeddings have no parameters: the architecture in config.json determines them.
Where they turn pairs of neighbouring channels, or by the column first, the channels of
queries and keys are reordered, which changes no result.
"""

from collections.abc import Iterable, Mapping
import math
import re
from typing import Any, Literal

import ml_collections
import numpy as np

from vit_jax.configs import schema
from vit_jax.layers import position_kinds
from vit_jax.weights import descriptions
from vit_jax.weights.families import leaves

# From their names to the names of timm's other Vision Transformers, and back.
OLD_NAMES = (
  (r'\.attn\.([qkv])_(?:proj\.)?(weight|bias)$', r'.attn.\1.\2'),
  (r'\.gamma_(\d)$', r'.ls\1.gamma'),
  (r'\.mlp\.fc1_g\.', '.mlp.gate.'),
  (r'\.mlp\.fc1_x\.', '.mlp.up.'),
)
_NEW_NAMES = (
  (r'\.ls(\d)\.gamma$', r'.gamma_\1'),
  (r'\.mlp\.gate\.', '.mlp.fc1_g.'),
  (r'\.mlp\.up\.', '.mlp.fc1_x.'),
)
BIAS = (
  'Transformer/posembed_{0}/',
  'blocks.{0}.attn.',
  (('relative_bias', 'table', 'relative_position_bias_table'),),
)
# Names that no other Vision Transformer of timm has.
_OWN = re.compile(r'blocks\.0\.(gamma_1|attn\.([qkv]_(proj|bias)|relative))')
_DINO_3 = {'rope_type': 'dinov3', 'rope_temperature': 100.0, 'rope_rotate_half': True}
# Architectures -> arguments of their rotary embeddings; None: they have none.
_ARCHITECTURES: dict[str, dict[str, Any] | None] = {
  r'vit_\w+_(dinov3|lingbot)\w*': _DINO_3,
  r'eva02_(?!enormous)\w+|vit_\w+_rope_reg\d_gap_\d+': {'ref_feat_shape': (16, 16)},
  r'vit_\w+_rope(_ape)?_\d+': {'rope_temperature': 100.0, 'rope_grid_indexing': 'xy'},
  r'(eva_giant|beit(v2)?)_\w+': None,
}
# Others -> why no model here computes the same.
_REJECTED = {
  r'.*_rpn_.*': 'whose layers end with their norms',
  r'eva02_enormous\w*': 'whose layers end with their norms',
  r'vit_\w+_sapiens2': 'with LayerScale of attention only',
  r'vit_pe_core_\w+': 'whose attention pooling has its own number of heads',
  r'vit_(pe|intern300m|\w+_radio)_\w+': 'with no norm after its layers',
  r'test_vit3': 'whose attention pooling reads registers too',
}
# Arguments of `VisionTransformer` that `Eva` or `Beit` lacks, or has by another name.
_RENAMED_ARGUMENTS = {
  'act_layer',
  'reg_tokens',
  'class_token',
  'fc_norm',
  'pre_norm',
  'qk_norm',
}
_KINDS = {'dinov3': 'rope', 'cat': 'axial_rope'}


def architecture(config: Mapping[str, Any]) -> str:
  """Returns the architecture in config.json of timm; '' if it has none."""
  return descriptions.field(config, 'architecture', str, '').partition('.')[0]


def eps(name: str) -> float:
  """Returns the epsilon of the norms of an architecture."""
  return 1e-5 if re.match(r'vit_.*_(clip|dinov3|lingbot)|beit3_', name) else 1e-6


def is_eva(names: Iterable[str]) -> bool:
  """Returns whether a state dict has names that only these models have."""
  return any(map(_OWN.match, names))


def from_timm(
  config: Mapping[str, Any],
  flat: dict[str, np.ndarray],
  has_eva_names: bool,
  num_heads: int | None,
) -> dict[str, Any]:
  """Returns the fields of rotary embeddings; reorders channels in `flat`.

  Args:
    config: config.json of timm.
    flat: arrays, which are already renamed.
    has_eva_names: `is_eva` of their names before that.
    num_heads: number of attention heads; None if unknown.

  Raises:
    ValueError: if the architecture is unknown, or no model of this package computes
      the same.
  """
  name = architecture(config)
  for pattern, reason in _REJECTED.items():
    if re.fullmatch(pattern, name):
      raise ValueError(
        f"architecture is '{name}', {reason}, unlike models of this package"
      )
  for pattern, usual_args in _ARCHITECTURES.items():
    if re.fullmatch(pattern, name):
      return _rope_fields(config, flat, num_heads, usual_args)
  if has_eva_names:
    raise ValueError(
      "its names are of timm's Eva or Beit, whose rotary embeddings depend on the "
      f'architecture ({name!r} is unknown): put the config.json of timm next to it'
    )
  return {}


def _rope_fields(
  config: Mapping[str, Any],
  flat: dict[str, np.ndarray],
  num_heads: int | None,
  usual_args: Mapping[str, Any] | None,
) -> dict[str, Any]:
  """Returns the fields of rotary embeddings, see `from_timm`.

  `usual_args` are arguments of the architecture's; None if it has none by default.
  """
  field, check_supported = descriptions.field, descriptions.check_supported
  stated = field(config, 'model_args', dict, {})
  field(stated, 'rope_rotate_half', bool)
  field(stated, 'rope_grid_indexing', Literal['ij', 'xy'])
  check_supported(
    stated, rope_grid_offset=0.0, use_post_norm=False, attn_only_layer_scale=False
  )
  if not field(stated, 'use_rot_pos_emb', bool, usual_args is not None):
    return {}
  args = {'rope_type': 'cat', 'rope_temperature': 1e4, **(usual_args or {}), **stated}
  kind = _KINDS[field(args, 'rope_type', Literal[*_KINDS])]
  if 'pos_embed' in flat:
    kind = f'learned_{kind}'
  if num_heads is None:
    raise ValueError('model_args lacks num_heads, the number of attention heads')
  _reorder(flat, num_heads, args)
  fields = {
    'add_position_embedding': True,
    'position_embedding': kind,
    'rope_temperature': float(field(args, 'rope_temperature', schema.Positive)),
  }
  grid = field(args, 'ref_feat_shape', schema.Size)
  if grid and kind in position_kinds.ROPES[1:]:
    fields['rope_grid'] = (grid, grid) if isinstance(grid, int) else tuple(grid)
  return fields


def _reorder(
  flat: dict[str, np.ndarray], num_heads: int, args: Mapping[str, Any]
) -> None:
  """Puts channels of queries and keys into the order of layers/positions.py."""
  half = args.get('rope_rotate_half', False)
  columns_first = args.get('rope_grid_indexing', 'ij') == 'xy'
  for name, x in flat.items():
    match = re.search(r'\.attn\.[qk](_norm)?\.(weight|bias)$', name)
    if match is None:
      continue
    size = len(x) if match[1] else len(x) // num_heads
    if not size or len(x) % size or size % 4:
      continue  # No model has such heads.
    channels = np.arange(size)
    pairs = channels.reshape(2, -1) if half else channels.reshape(-1, 2).T  # [2, E/2]
    order = np.roll(pairs, size // 4 if columns_first else 0, axis=1).ravel()
    heads = x.reshape(-1, size, *x.shape[1:])
    flat[name] = heads[:, order].reshape(x.shape)


def class_in_timm(config: Mapping[str, Any]) -> str | None:
  """Returns 'eva' or 'beit' if only this class of timm computes a model."""
  encoder = config.get('transformer') or {}
  kind = encoder.get('position_embedding')
  if kind == 'relative_bias':
    return 'beit'
  if encoder.get('mlp_norm') or encoder.get('attention_norm'):
    return 'eva'
  return 'eva' if kind in position_kinds.ROPES else None


def rename_for_timm(state: dict[str, np.ndarray], naming: str) -> dict[str, np.ndarray]:
  """Returns a state dict with the names of 'eva' or 'beit', not of other models."""
  leaves.rename(state, _NEW_NAMES)
  if naming != 'beit':
    return state
  # BEiT has no bias of keys: it adds the same number to all logits of a query.
  for name in list(state):
    if name.endswith('.qkv.bias'):
      query, _, value = np.split(state.pop(name), 3)
      state[name.replace('qkv.', 'q_')] = query
      state[name.replace('qkv.', 'v_')] = value
  return state


def timm_arguments(
  config: ml_collections.ConfigDict, vit_args: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
  """Returns name and arguments of a model in timm.

  Args:
    config: fields of the model.
    vit_args: arguments that timm's `VisionTransformer` would have.

  Raises:
    ValueError: if neither Eva nor Beit has its GELU.
  """
  encoder = config.transformer
  kind = class_in_timm(config)
  is_gated = encoder.get('mlp') == 'swiglu'
  gelu = encoder.get('gelu', 'tanh')
  if not is_gated and gelu != 'erf':
    raise ValueError(
      f"gelu='{gelu}', but timm's {str(kind).title()} computes the exact function: "
      'write this model as a run (--to=workdir)'
    )
  args = {key: x for key, x in vit_args.items() if key not in _RENAMED_ARGUMENTS}
  args['mlp_ratio'] = math.nextafter(encoder.mlp_dim / config.hidden_size, math.inf)
  args['init_values'] = encoder.get('layer_scale')
  args['swiglu_mlp'] = is_gated
  args['scale_mlp'] = encoder.get('mlp_norm', False)
  args['use_fc_norm'] = vit_args['fc_norm']
  if kind == 'beit':
    is_shared = encoder.position_layers == 'shared'
    args['use_rel_pos_bias'] = not is_shared
    args['use_shared_rel_pos_bias'] = is_shared
    return 'beit_base_patch16_224', args
  position = encoder.get('position_embedding', 'learned_1d')
  args |= dict(
    attn_type='rope',  # Keys can have biases.
    use_abs_pos_emb=position.startswith('learned'),
    use_rot_pos_emb=position in position_kinds.ROPES,
    rope_type='dinov3' if position == 'rope' else 'cat',
    rope_rotate_half=True,
    rope_temperature=encoder.get('rope_temperature', 100.0),
    ref_feat_shape=encoder.get('rope_grid'),
    num_reg_tokens=config.get('registers', 0),
    swiglu_align_to=1,  # The gate is a layer of its own.
    scale_attn_inner=encoder.get('attention_norm', False),
    use_pre_transformer_norm=vit_args['pre_norm'],
    class_token=vit_args['class_token'],
    qk_norm=vit_args['qk_norm'],
  )
  # The name determines the epsilon of the norms.
  if encoder.get('norm_eps') == 1e-5:
    return 'vit_7b_patch16_dinov3', args
  return 'eva_giant_patch14_224', args
