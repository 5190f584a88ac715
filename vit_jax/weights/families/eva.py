"""timm's `Eva` and `Beit`: names of their arrays, and their fields in config.json.

`Eva` computes DINOv3 (arXiv 2508.10104), EVA (2211.07636), EVA-02 (2303.11331) and
RoPE-ViT (2403.13298), `Beit` computes BEiT (2106.08254) and BEiT v2 (2208.06366).
Rotary embeddings are no parameters: the architecture in config.json determines them.
Their pairs of channels are neighbours in some models; channels of queries and keys are
reordered here, which changes no product. Keys mostly have no biases; they are zero here.
"""

import math
import re

import numpy as np

from vit_jax.configs import schema
from vit_jax.layers import positions
from vit_jax.weights import descriptions
from vit_jax.weights.families import leaves

# From their names to those of timm's other Vision Transformers.
OLD_NAMES = (
  (r'\.attn\.([qkv])_(?:proj\.)?(weight|bias)$', r'.attn.\1.\2'),
  (r'\.gamma_(\d)$', r'.ls\1.gamma'),
  (r'\.mlp\.fc1_g\.', '.mlp.gate.'),
  (r'\.mlp\.fc1_x\.', '.mlp.up.'),
)
# And back, as far as these models have no other name.
_NEW_NAMES = (
  (r'\.ls(\d)\.gamma$', r'.gamma_\1'),
  (r'\.mlp\.gate\.', '.mlp.fc1_g.'),
  (r'\.mlp\.up\.', '.mlp.fc1_x.'),
)
BIAS = 'Transformer/posembed_{0}/', 'blocks.{0}.attn.', (
  ('relative_bias', 'table', 'relative_position_bias_table'),
)  # fmt: skip
# Beginnings of names that show that embeddings are rotated, or that keys lack biases.
_NAMED = re.compile(r'blocks\.0\.(gamma_1|attn\.([qkv]_(proj\.)?(weight|bias)|rel))')
_DINO = {'rope_type': 'dinov3', 'rope_temperature': 100.0, 'rope_rotate_half': True}
# Architectures -> their arguments that determine rotary embeddings; None: no rotation.
_ARCHITECTURES = (
  (r'vit_\w+_(dinov3|lingbot)\w*', _DINO),
  (r'eva02_(?!enormous)\w+|vit_\w+_rope_reg\d_gap_\d+', {'ref_feat_shape': (16, 16)}),
  (
    r'vit_\w+_rope(_ape)?_\d+',
    {'rope_temperature': 100.0, 'rope_grid_indexing': 'xy'},
  ),
  (r'(eva_giant|beit(v2)?)_\w+', None),
)  # fmt: skip
# Others -> why they have no model here.
_REJECTED = (
  (r'eva02_enormous\w*', 'whose layers end with their norms'),
  (
    r'vit_\w+_sapiens2',
    'with LayerScale of attention only',
  ),
  (r'vit_pe_core_\w+', 'whose attention pooling has its own number of heads'),
  (r'vit_pe_\w+', 'with no norm after its layers'),
)


def architecture(config) -> str:
  """Returns the architecture that config.json of timm names, '' if it names none."""
  return descriptions.field(config, 'architecture', str, '').partition('.')[0]


def eps(name: str) -> float:
  """Returns the epsilon of the norms of an architecture."""
  return 1e-5 if re.search('^vit.*_(clip|dinov3|lingbot)', name) else 1e-6


def is_named(names) -> bool:
  """Returns whether a state dict has names of these models only."""
  return any(map(_NAMED.match, names))


def from_timm(config, flat, named: bool, num_heads: int | None) -> dict:
  """Returns fields of the encoder of a model, whose arrays have their new names.

  Reorders channels of queries and keys in `flat`. ValueError if the model, which has
  names of these models only if it is `named`, is not known here.
  """
  name = architecture(config)
  for pattern, why in _REJECTED:
    if re.fullmatch(pattern, name):
      raise ValueError(
        f"architecture is '{name}', {why}, unlike models of this package"
      )
  known = [args for pattern, args in _ARCHITECTURES if re.fullmatch(pattern, name)]
  args = descriptions.field(config, 'model_args', dict, {})
  if not known:
    if named:
      raise ValueError(
        "its names are of timm's Eva or Beit, whose rotary embeddings depend on the "
        f'architecture, which is {name!r}: put the config.json of timm next to it'
      )
    return {}
  descriptions.only(
    args, rope_grid_offset=0.0, use_post_norm=False, attn_only_layer_scale=False
  )
  rotates = descriptions.field(args, 'use_rot_pos_emb', bool, known[0] is not None)
  if not rotates:
    return {}
  args = {'rope_type': 'cat', 'rope_temperature': 1e4, **(known[0] or {}), **args}
  kinds = {'dinov3': 'rope', 'cat': 'axial_rope'}
  kind = kinds.get(args['rope_type'])
  if 'pos_embed' in flat and kind == 'axial_rope':
    kind = 'learned_axial_rope'
  if kind is None or ('pos_embed' in flat and kind == 'rope'):
    raise ValueError(
      f'rope_type is {args["rope_type"]!r}, but this package has only models with '
      f'{" or ".join(map(repr, kinds))}, the former without learned positions'
    )
  grid = descriptions.field(args, 'ref_feat_shape', schema.Size)
  _reorder(flat, num_heads, args)
  fields = {
    'add_position_embedding': True,
    'position_embedding': kind,
    'rope_temperature': float(args['rope_temperature']),
  }
  if grid is not None and kind != 'rope':
    fields['rope_grid'] = (grid, grid) if isinstance(grid, int) else tuple(grid)
  return fields


def _reorder(flat, num_heads, args):
  """Puts channels of queries and keys into the order of layers/positions.py."""
  half = args.get('rope_rotate_half', False)
  swapped = args.get('rope_grid_indexing', 'ij') == 'xy'  # Columns come first.
  if half and not swapped:
    return
  if num_heads is None:
    raise ValueError('model_args lacks num_heads: give the number of attention heads')
  for name in flat:
    if found := re.search(r'blocks\.\d+\.attn\.[qk](_norm)?\.(weight|bias)$', name):
      x = flat[name]
      size = len(x) if found[1] else len(x) // num_heads
      pairs = np.arange(size)
      pairs = pairs.reshape(2, -1) if half else pairs.reshape(-1, 2).T  # [2, E/2]
      order = (np.roll(pairs, size // 4, axis=1) if swapped else pairs).ravel()
      flat[name] = x.reshape(-1, size, *x.shape[1:])[:, order].reshape(x.shape)


def holds(config) -> str | None:
  """Returns the class of timm that computes a model: 'beit', 'eva', or neither."""
  encoder = config.get('transformer') or {}
  kind = encoder.get('position_embedding')
  if kind == 'relative_bias':
    return 'beit'
  norms = encoder.get('mlp_norm') or encoder.get('attention_norm')
  return 'eva' if kind in positions.ROPES or norms else None


def has_fields(config) -> bool:
  """Returns whether that class has what a model has beside its layers."""
  if holds(config) == 'beit' and (
    config.classifier not in ('token', 'token_gap')
    or config.get('registers')
    or config.transformer.get('first_norm')
  ):
    return False
  return not (config.get('resnet') or config.get('distilled'))


def of_state(state, naming: str):
  """Gives a state dict with the names of other Vision Transformers their own."""
  leaves.rename(state, _NEW_NAMES)
  if naming == 'beit':  # A bias of keys adds the same to all logits of a query.
    for name in [name for name in state if name.endswith('.attn.qkv.bias')]:
      query, _, value = np.split(state.pop(name), 3)
      start = name.removesuffix('qkv.bias')
      state |= {f'{start}q_bias': query, f'{start}v_bias': value}
  return state


def of_timm(config, args) -> tuple[str, dict]:
  """Returns name and arguments of a model, from those of a plain Vision Transformer."""
  encoder, kind = config.transformer, holds(config)
  gated = encoder.get('mlp') == 'swiglu'
  if not gated and encoder.get('gelu', 'tanh') != 'erf':
    raise ValueError(
      f"gelu='{encoder.get('gelu', 'tanh')}', but timm's {kind.title()} computes the "
      'exact function: write this model as a run (--to=workdir)'
    )
  kept = (
    'img_size', 'patch_size', 'embed_dim', 'depth', 'num_heads', 'in_chans',
    'global_pool', 'qkv_bias',
  )  # fmt: skip
  args = {key: args[key] for key in kept} | dict(
    mlp_ratio=math.nextafter(encoder.mlp_dim / config.hidden_size, math.inf),
    init_values=encoder.get('layer_scale'),
    swiglu_mlp=gated,
    scale_mlp=encoder.get('mlp_norm', False),
    use_fc_norm=bool(config.get('pool_norm')),
  )
  if kind == 'beit':
    shared = encoder.position_layers == 'shared'
    return 'beit_base_patch16_224', dict(
      **args, use_rel_pos_bias=not shared, use_shared_rel_pos_bias=shared
    )
  position = encoder.get('position_embedding', 'learned_1d')
  rope = {'rope': _DINO, 'learned_1d': {}}.get(position, {'rope_type': 'cat'})
  if grid := encoder.get('rope_grid'):
    rope = {**rope, 'ref_feat_shape': tuple(grid)}
  low = encoder.get('norm_eps') == 1e-5
  registers = config.get('registers', 0)
  return 'vit_small_patch16_dinov3' if low else 'eva_giant_patch14_224', dict(
    **args,
    **{'rope_rotate_half': True, **rope}
    | {'rope_temperature': encoder.get('rope_temperature', 100.0)},
    attn_type='rope',  # Keys can have biases.
    use_rot_pos_emb=position in positions.ROPES,
    use_abs_pos_emb=position in ('learned_1d', 'learned_axial_rope'),
    class_token=config.classifier.startswith('token'),
    num_reg_tokens=registers,
    no_embed_class=registers > 0,
    swiglu_align_to=1,  # The gate is a layer of its own.
    scale_attn_inner=encoder.get('attention_norm', False),
    use_pre_transformer_norm=encoder.get('first_norm', False),
    qk_norm=encoder.get('qk_norm', False),
  )
