"""Converts between the published parameter tree and PyTorch state dicts.

The state dicts are those of timm and of Hugging Face. One table pairs each leaf
of the published tree with its names in both.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import re
from typing import NamedTuple

import numpy as np

from vit_jax.weights.families import leaves
from vit_jax.weights.families import sizes as sizes_lib

sizes, defaults, describe = (
  sizes_lib.sizes,
  sizes_lib.defaults,
  sizes_lib.describe,
)


class Layout(NamedTuple):
  """A naming of arrays: 'timm' or 'hf'."""

  names: str


_BLOCK = 'Transformer/encoderblock_{}/'
_ATTENTION = 'MultiHeadDotProductAttention_0/'


class _Leaf(NamedTuple):
  path: str
  kind: str
  timm: str
  hf: str


def _affine(path, kind, timm, hf):
  """Returns the leaves of a layer: kernel (or scale) and bias."""
  first = 'scale' if kind == 'norm' else 'kernel'
  bias = 'bias' if kind == 'heads' else 'same'
  return [
    _Leaf(f'{path}/{first}', 'same' if kind == 'norm' else kind, f'{timm}.weight', f'{hf}.weight'),
    _Leaf(f'{path}/bias', bias, f'{timm}.bias', f'{hf}.bias'),
  ]  # fmt: skip


_STEM = (
  _Leaf('cls', 'same', 'cls_token', 'embeddings.cls_token'),
  _Leaf(
    'Transformer/posembed_input/pos_embedding',
    'same',
    'pos_embed',
    'embeddings.position_embeddings',
  ),
  *_affine(
    'embedding',
    'conv',
    'patch_embed.proj',
    'embeddings.patch_embeddings.projection',
  ),
  *_affine('Transformer/encoder_norm', 'norm', 'norm', 'layernorm'),
  *_affine('pre_logits', 'dense', 'pre_logits.fc', 'pooler.dense'),
  *_affine('head', 'dense', 'head', 'classifier'),
)
_LAYER = (
  *_affine('LayerNorm_0', 'norm', 'norm1', 'layernorm_before'),
  *_affine(
    f'{_ATTENTION}query', 'heads', 'attn.q', 'attention.attention.query'
  ),
  *_affine(f'{_ATTENTION}key', 'heads', 'attn.k', 'attention.attention.key'),
  *_affine(
    f'{_ATTENTION}value', 'heads', 'attn.v', 'attention.attention.value'
  ),
  *_affine(f'{_ATTENTION}out', 'out', 'attn.proj', 'attention.output.dense'),
  *_affine('LayerNorm_1', 'norm', 'norm2', 'layernorm_after'),
  *_affine('MlpBlock_0/Dense_0', 'dense', 'mlp.fc1', 'intermediate.dense'),
  *_affine('MlpBlock_0/Dense_1', 'dense', 'mlp.fc2', 'output.dense'),
)
_UNIT = (
  ('conv1', 'gn1', 'conv1', 'norm1'),
  ('conv2', 'gn2', 'conv2', 'norm2'),
  ('conv3', 'gn3', 'conv3', 'norm3'),
  ('conv_proj', 'gn_proj', 'downsample.conv', 'downsample.norm'),
)
# BiT ResNets, which only timm has.
_BIT_STEM = (
  _Leaf('root_block/conv_root/kernel', 'conv', 'stem.conv.weight', ''),
  *_affine('norm-pre-head', 'norm', 'norm', ''),
  *_affine('head', 'pixel', 'head.fc', ''),
)
_BIT_UNIT = (
  *_affine('gn1', 'norm', 'norm1', ''),
  *_affine('gn2', 'norm', 'norm2', ''),
  *_affine('gn3', 'norm', 'norm3', ''),
  _Leaf('conv1/kernel', 'conv', 'conv1.weight', ''),
  _Leaf('conv2/kernel', 'conv', 'conv2.weight', ''),
  _Leaf('conv3/kernel', 'conv', 'conv3.weight', ''),
  _Leaf('conv_proj/kernel', 'conv', 'downsample.conv.weight', ''),
)

_TIMM_BACKBONE = 'patch_embed.backbone.'
# timm's joined projections of queries, keys and values.
_TIMM_JOINED = '.attn.qkv.', ('.attn.q.', '.attn.k.', '.attn.v.')
# Module names of transformers 5 -> names in its files, which the table uses.
_HF_NEW = (
  (r'^layers\.', 'encoder.layer.'),
  (r'\.attention\.q_proj\.', '.attention.attention.query.'),
  (r'\.attention\.k_proj\.', '.attention.attention.key.'),
  (r'\.attention\.v_proj\.', '.attention.attention.value.'),
  (r'\.attention\.o_proj\.', '.attention.output.dense.'),
  (r'\.mlp\.fc1\.', '.intermediate.dense.'),
  (r'\.mlp\.fc2\.', '.output.dense.'),
)


def _table(num_layers: int, units: Iterable[int] | None) -> list[_Leaf]:
  """Lists all leaves that a model may have.

  Args:
    num_layers: number of layers of the encoder.
    units: number of units in each stage of a hybrid's ResNet; None: no ResNet.
  """
  table = list(_STEM)
  for i in range(num_layers):
    block = _BLOCK.format(i)
    table += [
      leaf._replace(
        path=block + leaf.path,
        timm=f'blocks.{i}.{leaf.timm}',
        hf=f'encoder.layer.{i}.{leaf.hf}',
      )
      for leaf in _LAYER
    ]
  if units is None:
    return table
  root = _TIMM_BACKBONE + ('stem.' if units else '')
  convolutions = [('', 'conv_root', 'gn_root', f'{root}conv', f'{root}norm')]
  for i, count in enumerate(units):
    for j in range(count):
      for conv, norm, timm_conv, timm_norm in _UNIT:
        there = f'{_TIMM_BACKBONE}stages.{i}.blocks.{j}.'
        convolutions.append(
          (f'block{i + 1}/unit{j + 1}/', conv, norm, there + timm_conv, there + timm_norm)
        )  # fmt: skip
  for path, conv, norm, timm_conv, timm_norm in convolutions:
    table.append(_affine(path + conv, 'conv', timm_conv, '')[0])
    table += _affine(path + norm, 'norm', timm_norm, '')
  return table


def _bit_table(units: Iterable[int]) -> list[_Leaf]:
  """Lists all leaves of a BiT ResNet with these numbers of units."""
  table = list(_BIT_STEM)
  for i, count in enumerate(units):
    for j in range(count):
      here, there = f'block{i + 1}/unit{j + 1:02d}/', f'stages.{i}.blocks.{j}.'
      table += [
        leaf._replace(path=here + leaf.path, timm=there + leaf.timm)
        for leaf in _BIT_UNIT
      ]
  return table


def is_bit(names: Iterable[str]) -> bool:
  """Returns whether the names are those of a BiT ResNet, here or in timm."""
  return not {_BIT_STEM[0].path, _BIT_STEM[0].timm}.isdisjoint(names)


def is_hybrid(names: Iterable[str]) -> bool:
  """Returns whether timm's names are those of a hybrid."""
  return any(name.startswith(_TIMM_BACKBONE) for name in names)


def detect(names: Iterable[str]) -> Layout | None:
  """Returns the layout of a state dict's names, or None."""
  names = set(names)
  if 'patch_embed.proj.weight' in names or is_bit(names):
    return Layout('timm')
  if any(
    re.fullmatch(r'(\w+\.)?embeddings\.patch_embeddings\.projection\.weight', n)
    for n in names
  ):
    return Layout('hf')
  return None


def load(
  flat: Mapping[str, np.ndarray], layout: Layout, num_heads: int | None
) -> dict[str, np.ndarray]:
  """Converts a state dict to the published tree.

  Args:
    flat: arrays by name.
    layout: result of `detect`.
    num_heads: number of attention heads, which the shapes do not tell; None for
      a BiT ResNet.

  Returns:
    Arrays by '/'-joined path, with Linen's names.

  Raises:
    ValueError: if there are arrays that a plain ViT, or a BiT ResNet, does not
      have (the message lists them), or if `num_heads` does not divide the
      width.
  """
  what = 'plain Vision Transformer'
  if is_bit(flat):
    what, flat = 'BiT ResNet', dict(flat)
    table = _bit_table(_timm_units(flat, ''))
  elif layout.names == 'timm':
    flat = leaves.split(flat, *_TIMM_JOINED)
    table = _table(
      leaves.count(flat, r'blocks\.(\d+)\.'),
      _timm_units(flat, re.escape(_TIMM_BACKBONE)) if is_hybrid(flat) else None,
    )
  else:
    flat = {_old_hf_name(name): value for name, value in flat.items()}
    table = _table(leaves.count(flat, r'encoder\.layer\.(\d+)\.'), None)
  params = {}
  for leaf in table:
    value = flat.pop(getattr(leaf, layout.names), None)
    if value is not None:
      params[leaf.path] = leaves.from_torch(
        value, leaf.path, leaf.kind, num_heads
      )
  leaves.fail_for_unknown(flat, what, _hint(flat))
  return params


def _timm_units(flat, prefix):
  """Returns the number of units in each stage of timm's ResNet."""
  stage = rf'{prefix}stages\.'
  return [
    leaves.count(flat, rf'{stage}{i}\.blocks\.(\d+)\.')
    for i in range(leaves.count(flat, rf'{stage}(\d+)\.'))
  ]


def _hint(names):
  """Names the feature of other models that some leaves belong to."""
  for part, what in (
    ('fc_norm', 'timm pools in this model before the last norm, not after it'),
    ('reg_token', 'register tokens'),
    ('gamma', 'layer scale'),
    ('dist', 'a distillation token'),
    ('q_norm', 'norms of queries and keys'),
    ('mask_token', 'a model for masked images'),
  ):
    if any(part in name for name in names):
      return f' ({what})'
  return ''


def _old_hf_name(name):
  name = re.sub(r'^(vit|deit)\.', '', name)
  for new, old in _HF_NEW:
    name = re.sub(new, old, name)
  return name


def dump(
  flat: Mapping[str, np.ndarray], layout: Layout
) -> dict[str, np.ndarray]:
  """Converts parameters by path to a state dict.

  Raises:
    ValueError: if the layout has no such model.
  """
  flat, layout = dict(flat), layout.names
  _check_exists(flat, layout)
  num_layers = leaves.count(flat, r'Transformer/encoderblock_(\d+)/')
  hybrid = 'conv_root/kernel' in flat
  if is_bit(flat):
    table = _bit_table(leaves.units(flat))
  else:
    table = _table(num_layers, leaves.units(flat) if hybrid else None)
  state = {}
  for leaf in table:
    value = flat.pop(leaf.path, None)
    if value is not None:
      name = getattr(leaf, layout)
      # transformers puts all names but those of the head under 'vit.'.
      if layout == 'hf' and not name.startswith('classifier.'):
        name = f'vit.{name}'
      state[name] = leaves.to_torch(np.asarray(value), leaf.kind)
  if flat:
    raise ValueError(
      f'{sorted(flat)[:10]} have no counterpart in {_NAMES[layout]}'
    )
  if layout == 'timm':
    state = leaves.join(state, *_TIMM_JOINED)
  return state


_NAMES = {'timm': 'timm', 'hf': "Hugging Face's transformers"}


def _check_exists(flat, layout):
  name = _NAMES[layout]
  if any(path.startswith('MixerBlock') for path in flat):
    raise ValueError(f'an MLP-Mixer cannot be written for {name} (--to)')
  if layout == 'hf' and is_bit(flat):
    raise ValueError(
      f'a BiT ResNet cannot be written for {name}: write it for timm (--to=timm)'
    )
  if layout == 'hf' and 'conv_root/kernel' in flat:
    raise ValueError(
      f'{name} no longer has hybrids of ResNet and ViT: write this one for timm '
      '(--to=timm)'
    )
  if layout == 'hf' and 'cls' not in flat:
    raise ValueError(
      f'{name} has no ViT without a class token (mean pooling): write this one '
      'for timm (--to=timm)'
    )
