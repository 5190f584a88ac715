"""Converts DETR's weights between this package and PyTorch's state dicts.

One table pairs each leaf of a model with its names elsewhere. There are two
namings of a detector, and one of a backbone alone:

  hf            `DetrForObjectDetection`, `DetrForSegmentation`
  pth           the files released with the paper, {'model': state dict}
  resnet        a ResNet alone, without a detector

and two of its backbone, see vit_jax.weights.families.resnet.

"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import re
from typing import Any
from typing import NamedTuple

import numpy as np

from vit_jax.layers import resnet
from vit_jax.weights.families import leaves
from vit_jax.weights.families import resnet as resnet_names

MASK_HEAD = 'segmentation/'


class Layout(NamedTuple):
  """A naming of arrays: 'hf', 'pth' or 'resnet', and that of the backbone."""

  names: str
  backbone: str = 'timm'


# Beginning of the backbone's names.
_BACKBONE = {
  'hf': 'model.backbone.conv_encoder.model.',
  'pth': 'backbone.0.body.',
  'resnet': '',
}
# A leaf that a model of each naming has.
_SIGNS = {
  'hf': 'model.query_position_embeddings.weight',
  'pth': 'query_embed.weight',
}
# Parts of the names of a mask head, which all namings share.
_MASKS = ('mask_head.', 'bbox_attention.')
# Module names of transformers 5 -> names in its files, which the table uses.
_HF_NEW = (
  (r'^model\.backbone\.model\.', _BACKBONE['hf']),
  (r'_attn\.o_proj\.', '_attn.out_proj.'),
  (r'(layers\.\d+)\.mlp\.fc', r'\1.fc'),
  (r'^bbox_attention\.([qk])_proj', r'bbox_attention.\1_linear'),
  (r'^mask_head\.conv(\d)\.conv', r'mask_head.lay\1'),
  (r'^mask_head\.conv(\d)\.norm', r'mask_head.gn\1'),
  (r'^mask_head\.output_conv', 'mask_head.out_lay'),
  *(
    (rf'^mask_head\.fpn_stages\.{i}\.{new}', f'mask_head.{old}')
    for i in range(3)
    for new, old in (
      (r'fpn_adapter', f'adapter{i + 1}'),
      (r'refine\.conv', f'lay{i + 3}'),
      (r'refine\.norm', f'gn{i + 3}'),
    )
  ),
)
# Width and heads of the published models.
_PUBLISHED = 256, 8
# Projections of queries, keys and values, which the released files join.
_JOINED = '.in_proj_', ('.q_proj_', '.k_proj_', '.v_proj_')


class _Leaf(NamedTuple):
  """One array: path here, kind of layout, names elsewhere."""

  path: str
  kind: str
  hf: str
  pth: str
  resnet: str = ''


def _affine(path, kind, hf, pth):
  """Yields kernel (or scale) and bias of a layer."""
  first, kind = ('scale', 'same') if kind == 'norm' else ('kernel', kind)
  yield _Leaf(f'{path}/{first}', kind, f'{hf}.weight', f'{pth}.weight')
  yield _Leaf(f'{path}/bias', 'same', f'{hf}.bias', f'{pth}.bias')


def _attention(path, hf, pth):
  for ours, theirs in (('query', 'q'), ('key', 'k'), ('value', 'v')):
    for end, kind, name in (('kernel', 'heads', 'weight'), ('bias',) * 3):
      yield _Leaf(
        f'{path}/{ours}/{end}',
        kind,
        f'{hf}.{theirs}_proj.{name}',
        f'{pth}.{theirs}_proj_{name}',
      )
  yield from _affine(f'{path}/out', 'out', f'{hf}.out_proj', f'{pth}.out_proj')


def _backbone(units: Iterable[int], style: str) -> Iterator[_Leaf]:
  """Yields the leaves of the backbone, see `resnet_names.table`."""
  for path, kind, name in resnet_names.table(units, style):
    yield _Leaf(path, kind, *(start + name for start in _BACKBONE.values()))


def _transformer(encoder_layers: int, decoder_layers: int) -> Iterator[_Leaf]:
  """Yields the leaves of everything but the backbone."""
  query = _SIGNS['hf'], _SIGNS['pth']
  yield _Leaf('query_embedding', 'same', *query)
  projection = 'model.input_projection', 'input_proj'
  yield from _affine('input_proj', 'conv', *projection)
  for i in range(encoder_layers):
    here = f'encoder_layer_{i}'
    hf, pth = f'model.encoder.layers.{i}', f'transformer.encoder.layers.{i}'
    norms = 'self_attn_layer_norm', 'final_layer_norm'
    yield from _attention(
      f'{here}/self_attention', f'{hf}.self_attn', f'{pth}.self_attn'
    )
    yield from _rest(here, hf, pth, norms)
  for i in range(decoder_layers):
    here = f'decoder_layer_{i}'
    hf, pth = f'model.decoder.layers.{i}', f'transformer.decoder.layers.{i}'
    norms = (
      'self_attn_layer_norm', 'encoder_attn_layer_norm', 'final_layer_norm'
    )  # fmt: skip
    yield from _attention(
      f'{here}/self_attention', f'{hf}.self_attn', f'{pth}.self_attn'
    )
    yield from _attention(
      f'{here}/cross_attention', f'{hf}.encoder_attn', f'{pth}.multihead_attn'
    )
    yield from _rest(here, hf, pth, norms)
  norm = 'model.decoder.layernorm', 'transformer.decoder.norm'
  yield from _affine('decoder_norm', 'norm', *norm)
  heads = 'class_labels_classifier', 'class_embed'
  yield from _affine('class_head', 'dense', *heads)
  for i in range(3):
    names = f'bbox_predictor.layers.{i}', f'bbox_embed.layers.{i}'
    yield from _affine(f'box_head/Dense_{i}', 'dense', *names)
  yield from _mask_head()


def _mask_head() -> Iterator[_Leaf]:
  """Yields the leaves of a mask head, whose names are those of all namings."""
  for part in ('query', 'key'):
    name = f'bbox_attention.{part[0]}_linear'
    for end, kind, their_end in (('kernel', 'heads', 'weight'), ('bias',) * 3):
      names = (f'{name}.{their_end}',) * 2
      yield _Leaf(f'{MASK_HEAD}attention/{part}/{end}', kind, *names)
  parts = [(f'adapter_{i}', 'conv', f'adapter{i + 1}') for i in range(3)]
  for i in range(5):
    path = f'convolutions/conv_{i}' if i else 'conv_0'
    parts.append((path, 'conv', f'lay{i + 1}'))
    parts.append((f'convolutions/norm_{i}', 'norm', f'gn{i + 1}'))
  parts.append(('convolutions/output', 'conv', 'out_lay'))
  for path, kind, name in parts:
    names = (f'mask_head.{name}',) * 2
    yield from _affine(MASK_HEAD + path, kind, *names)


def _rest(path, hf, pth, norms):
  """Yields norms and MLP of a layer."""
  for i, norm in enumerate(norms):
    yield from _affine(
      f'{path}/LayerNorm_{i}', 'norm', f'{hf}.{norm}', f'{pth}.norm{i + 1}'
    )
  for i in (0, 1):
    names = f'{hf}.fc{i + 1}', f'{pth}.linear{i + 1}'
    yield from _affine(f'{path}/Dense_{i}', 'dense', *names)


def detect(names: Iterable[str]) -> Layout | None:
  """Returns the layout of a state dict's names, or None."""
  names = {_plain_name(name) for name in names}
  naming = next((k for k, sign in _SIGNS.items() if sign in names), 'resnet')
  for style, root in resnet_names.ROOTS.items():
    if f'{_BACKBONE[naming]}{root}.weight' in names:
      return Layout(naming, style)
  return None if naming == 'resnet' else Layout(naming)


def _plain_name(name):
  """Returns the name that the table uses."""
  name = re.sub(r'^(detr|resnet)\.', '', name)
  for new, old in _HF_NEW:
    name = re.sub(new, old, name)
  return name


def load(
  flat: Mapping[str, np.ndarray], layout: Layout, num_heads: int | None
) -> dict[str, np.ndarray]:
  """Converts a state dict.

  Args:
    flat: arrays by name.
    layout: result of `detect`.
    num_heads: number of attention heads, which the shapes do not tell; None:
      that of the published models, if their width is that of these.

  Returns:
    Arrays by path: parameters, and at 'frozen/' the constants. Of a ResNet
    alone only those of the backbone; its head is left out.

  Raises:
    ValueError: if there are arrays that a DETR does not have (the message lists
      them), or if `num_heads` does not divide the width, or is missing.
  """
  flat = {_plain_name(name): value for name, value in flat.items()}
  flat = leaves.split(flat, *_JOINED)
  alone = layout.names == 'resnet'
  units = resnet_names.units(flat, _BACKBONE[layout.names], layout.backbone)
  table = [*_backbone(units, layout.backbone)]
  if alone:
    head = ('fc.', 'classifier.')
    flat = {k: v for k, v in flat.items() if not k.startswith(head)}
  else:
    sides = {'hf': 'model.', 'pth': 'transformer.'}[layout.names]
    table += _transformer(
      *(
        leaves.count(flat, rf'{re.escape(sides)}{part}\.layers\.(\d+)\.')
        for part in ('encoder', 'decoder')
      )
    )
    num_heads = num_heads or _heads(flat[_SIGNS[layout.names]])
  found = {}
  for leaf in table:
    value = flat.pop(getattr(leaf, layout.names), None)
    if value is not None:
      found[leaf.path] = leaves.from_torch(
        value, leaf.path, leaf.kind, num_heads
      )
  leaves.fail_for_unknown(flat, 'ResNet of bottlenecks' if alone else 'DETR')
  return found


def _heads(queries):
  """Returns the number of heads of the published models; checks the width."""
  width, heads = _PUBLISHED
  if queries.shape[-1:] != (width,):
    raise ValueError(
      f'it does not say how many attention heads its model has: give num_heads, '
      f'or put its config.json beside it (the published models, of width {width}, '
      f'have {heads})'
    )
  return heads


def dump(
  flat: Mapping[str, np.ndarray], layout: Layout
) -> dict[str, np.ndarray]:
  """Converts a tree to a state dict.

  Args:
    flat: arrays by path, see `load`.
    layout: naming of the result.

  Raises:
    ValueError: if there are arrays that other programs' DETR does not have.
  """
  found = sizes(flat)
  table = [
    *_backbone(found['units'], layout.backbone),
    *_transformer(found['num_encoder_layers'], found['num_decoder_layers']),
  ]
  flat, state = dict(flat), {}
  masks = any(path.startswith(MASK_HEAD) for path in flat)
  for leaf in table:
    value = flat.pop(leaf.path, None)
    if value is not None:
      name = getattr(leaf, layout.names)
      if masks and not name.startswith(_MASKS):
        name = f'detr.{name}'
      state[name] = leaves.to_torch(np.asarray(value), leaf.kind)
  if flat:
    raise ValueError(
      f'{sorted(flat)[:10]} have no counterpart in the DETR of other programs: '
      'write this model as a run (--to=workdir)'
    )
  return leaves.join(state, *_JOINED) if layout.names == 'pth' else state


def sizes(
  flat: Mapping[str, Any], told: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns the fields of the model that has these leaves.

  Args:
    flat: arrays or shapes by path.
    told: further fields of the model, which shapes do not tell.

  Raises:
    KeyError, ValueError: if leaves are missing.
  """
  shapes = {
    path: tuple(getattr(x, 'shape', x)) for path, x in flat.items()
  }  # fmt: skip
  stages = leaves.count(shapes, r'backbone/block(\d+)/', first=1)
  encoder, decoder = (
    leaves.count(shapes, rf'{part}_layer_(\d+)/')
    for part in ('encoder', 'decoder')
  )
  layer = 'decoder_layer_0'
  masks = any(path.startswith(MASK_HEAD) for path in shapes)
  fields = dict(
    kind='detr',
    units=tuple(
      leaves.count(shapes, rf'backbone/block{i + 1}/unit(\d+)/', first=1)
      for i in range(stages)
    ),
    backbone_width=shapes['backbone/conv_root/kernel'][-1],
    norm='group' if 'backbone/bn_root/scale' in shapes else 'frozen_batch',
    hidden_size=shapes['query_embedding'][1],
    num_queries=shapes['query_embedding'][0],
    num_encoder_layers=encoder,
    num_decoder_layers=decoder,
    num_heads=shapes[f'{layer}/self_attention/query/kernel'][1],
    mlp_dim=shapes[f'{layer}/Dense_0/kernel'][1],
    **({'mask_head': True} if masks else {}),
  )
  return {**fields, **(told or {})}


def defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns further fields of a model that is in no table of sizes."""
  del fields
  return {}


def describe(fields: Mapping[str, Any]) -> str:
  """Names a model by its fields, see `sizes`."""
  backbone = next(
    (name.upper() for name, units in resnet.UNITS.items() if units == fields['units']),
    f'ResNet of {fields["units"]} units',
  )  # fmt: skip
  layers = f'{fields["num_encoder_layers"]}+{fields["num_decoder_layers"]}'
  return (
    f'DETR of {layers} layers, width {fields["hidden_size"]}, '
    f'{fields["num_queries"]} queries, backbone {backbone}'
    + (', mask head' if fields.get('mask_head') else '')
  )
