"""Classifiers (ViT, hybrid, Mixer, BiT) elsewhere: their names, their sizes.

The state dicts are those of timm and of Hugging Face; the files beside them are
in vit_jax.weights.families.vit_files. The tree is the published one.
"""

from collections.abc import Iterable, Iterator
import functools
import math
import re
import types

from vit_jax.configs import models as model_configs
from vit_jax.weights import arrays, descriptions
from vit_jax.weights.families import base, leaves, vit_files

_POSEMB = 'Transformer/posembed_input/pos_embedding'
_ATTENTION = 'MultiHeadDotProductAttention_0/'
# Leaves of what this package alone writes.
_POOLING, _FIRST_NORM = 'MAPHead_0/probe', 'Transformer/first_norm/scale'
# Rows of vit_jax.weights.families.leaves, with the names of timm and of Hugging
# Face.
_STEM = (
  ('cls', 'leaf', 'cls_token', 'embeddings.cls_token'),
  (_POSEMB, 'leaf', 'pos_embed', 'embeddings.position_embeddings'),
  ('embedding', 'conv', 'patch_embed.proj', 'embeddings.patch_embeddings.projection'),
  ('Transformer/encoder_norm', 'norm', 'norm', 'layernorm'),
  ('pre_logits', 'dense', 'pre_logits.fc', 'pooler.dense'),
  ('head', 'dense', 'head', 'classifier'),
)  # fmt: skip
_LAYER = (
  ('LayerNorm_0', 'norm', 'norm1', 'layernorm_before'),
  (f'{_ATTENTION}query', 'heads', 'attn.q', 'attention.attention.query'),
  (f'{_ATTENTION}key', 'heads', 'attn.k', 'attention.attention.key'),
  (f'{_ATTENTION}value', 'heads', 'attn.v', 'attention.attention.value'),
  (f'{_ATTENTION}out', 'out', 'attn.proj', 'attention.output.dense'),
  ('LayerNorm_1', 'norm', 'norm2', 'layernorm_after'),
  ('MlpBlock_0/Dense_0', 'dense', 'mlp.fc1', 'intermediate.dense'),
  ('MlpBlock_0/Dense_1', 'dense', 'mlp.fc2', 'output.dense'),
)
# A hybrid's ResNet and BiT, which only timm has.
_ROOT = ('conv_root', 'conv', 'conv'), ('gn_root', 'norm', 'norm')
_UNIT = (
  *((f'conv{i}', 'conv', f'conv{i}') for i in (1, 2, 3)),
  *((f'gn{i}', 'norm', f'norm{i}') for i in (1, 2, 3)),
  ('conv_proj', 'conv', 'downsample.conv'),
  ('gn_proj', 'norm', 'downsample.norm'),
)
_BIT_STEM = (
  ('root_block/conv_root', 'conv', 'stem.conv'),
  ('norm-pre-head', 'norm', 'norm'),
  ('head', 'pixel', 'head.fc'),
)
_BIT_ROOTS = 'root_block/conv_root/kernel', 'stem.conv.weight'
_TIMM_RESNET = 'patch_embed.backbone.'
_TIMM_UNITS = r'stages\.(\d+)\.blocks\.(\d+)\.'
_OUR_UNITS = r'block(\d+)/unit(\d+)/'
# timm's joined projections of queries, keys and values.
_TIMM_JOINED = '.attn.qkv.', ('.attn.q.', '.attn.k.', '.attn.v.')
# Module names of transformers 5 -> names in its files, which the table uses.
_OLD_NAMES = (
  (r'^(vit|deit)\.', ''),
  (r'^layers\.', 'encoder.layer.'),
  (r'\.attention\.q_proj\.', '.attention.attention.query.'),
  (r'\.attention\.k_proj\.', '.attention.attention.key.'),
  (r'\.attention\.v_proj\.', '.attention.attention.value.'),
  (r'\.attention\.o_proj\.', '.attention.output.dense.'),
  (r'\.mlp\.fc1\.', '.intermediate.dense.'),
  (r'\.mlp\.fc2\.', '.output.dense.'),
)
_PROGRAMS = {'timm': 'timm', 'hf': "Hugging Face's transformers"}
# Parts of names -> the feature of other models that they belong to.
_FEATURES = {
  'norm_pre': 'a norm before the first layer, as in CLIP',
  'fc_norm': 'timm pools in this model before the last norm, not after it',
  'reg_token': 'register tokens',
  'gamma': 'layer scale',
  'dist': 'a distillation token',
  'q_norm': 'norms of queries and keys',
  'mask_token': 'a model for masked images',
}


def _table(naming, num_layers, units) -> Iterator[leaves.Leaf]:
  """Yields the leaves of a ViT, or of a hybrid of so many units per stage."""
  column = 2 + ('timm', 'hf').index(naming)
  block = {'timm': 'blocks.{}.', 'hf': 'encoder.layer.{}.'}[naming]
  yield from leaves.layers(_STEM, column)
  for i in range(num_layers):
    here, there = f'Transformer/encoderblock_{i}/', block.format(i)
    yield from leaves.layers(_LAYER, column, here, there)
  if units is not None:
    root = _TIMM_RESNET + ('stem.' if units else '')
    yield from leaves.layers(_ROOT, there=root)
    yield from _unit_table(units, 'unit{}/', _TIMM_RESNET)


def _unit_table(units, name, start) -> Iterator[leaves.Leaf]:
  """Yields the leaves of a ResNet's units."""
  for i, count in enumerate(units):
    for j in range(count):
      here = f'block{i + 1}/{name.format(j + 1)}'
      there = f'{start}stages.{i}.blocks.{j}.'
      yield from leaves.layers(_UNIT, here=here, there=there)


def _bit_table(units) -> Iterator[leaves.Leaf]:
  yield from leaves.layers(_BIT_STEM)
  yield from _unit_table(units, 'unit{:02d}/', '')


def _table_of(flat, naming) -> list[leaves.Leaf]:
  """Returns the leaves of a state dict, whose names become those of the table."""
  if is_bit(flat):
    return [*_bit_table(leaves.units(flat, _TIMM_UNITS, 0, 0))]
  if naming == 'hf':
    leaves.rename(flat, _OLD_NAMES)
    num_layers = leaves.count(flat, r'encoder\.layer\.(\d+)\.')
    return [*_table('hf', num_layers, None)]
  leaves.split(flat, *_TIMM_JOINED)
  units = None
  if _is_hybrid(flat):
    units = leaves.units(flat, re.escape(_TIMM_RESNET) + _TIMM_UNITS, 0, 0)
  num_layers = leaves.count(flat, r'blocks\.(\d+)\.')
  return [*_table('timm', num_layers, units)]


def _words(names) -> str:
  return 'BiT ResNet' if is_bit(names) else 'plain Vision Transformer'


def is_bit(names: Iterable[str]) -> bool:
  """Returns whether the names are those of a BiT ResNet, here or in timm."""
  return not set(_BIT_ROOTS).isdisjoint(names)


class Classifiers(base.Family):
  """ViT, hybrids, Mixer and BiT."""

  words = 'a classifier'
  formats = ('npz', 'timm', 'hf', 'workdir')
  hf_types = ('vit', 'deit', 'vit_mae', 'vit_msn', 'ijepa')
  computes = types.MappingProxyType(
    {
      'transformer.gelu': 'tanh',
      'transformer.norm_eps': 1e-6,
      'resnet.eps': 'published',
      'eps': 'published',
    }
  )

  def detect(self, names):
    names = set(names)
    if 'patch_embed.proj.weight' in names or is_bit(names):
      return 'timm'
    patches = r'(\w+\.)?embeddings\.patch_embeddings\.projection\.weight'
    return 'hf' if any(re.fullmatch(patches, name) for name in names) else None

  def load(self, flat, naming, num_heads):
    table = _table_of(flat, naming)
    return leaves.load(flat, table, num_heads, _words(flat))

  def dump(self, flat, naming):
    in_timm, units = naming == 'timm', None
    if not in_timm and 'cls' not in flat:
      raise ValueError(
        f'{_PROGRAMS[naming]} has no ViT without a class token, no Mixer and no '
        'ResNet: write this model for timm, or as a run (--to)'
      )
    if in_timm and (is_bit(flat) or 'conv_root/kernel' in flat):
      units = leaves.units(flat, _OUR_UNITS)
    num_layers = leaves.count(flat, r'Transformer/encoderblock_(\d+)/')
    table = _table(naming, num_layers, units)
    if is_bit(flat):
      table = _bit_table(units)
    state = leaves.dump(flat, table, _PROGRAMS[naming])
    if naming == 'timm':
      return leaves.join(state, *_TIMM_JOINED)
    # transformers puts all names but those of the head under 'vit.'.
    return {
      name if name.startswith('classifier.') else f'vit.{name}': value
      for name, value in state.items()
    }

  def sizes(self, flat, told):
    """Of what shapes do not tell, nothing is a size."""
    if 'root_block/conv_root/kernel' in flat:
      return {
        'num_layers': leaves.units(flat, _OUR_UNITS),
        'width_factor': flat['root_block/conv_root/kernel'][-1] / 64,
      }
    return (_mixer_sizes if 'stem/kernel' in flat else _vit_sizes)(flat)

  def defaults(self, fields):
    name = 'mixer_b16' if 'num_blocks' in fields else 'b16'
    return model_configs.get_config(name if 'patches' in fields else 'bit_r50x1')

  def describe(self, fields):
    if 'patches' not in fields:
      return (
        f'BiT ResNet of {fields["num_layers"]} units, '
        f'{fields["width_factor"]:g} times the width'
      )
    patch = 'x'.join(str(size) for size in fields['patches']['size'])
    if 'num_blocks' in fields:
      return (
        f'Mixer of {fields["num_blocks"]} blocks, width {fields["hidden_dim"]}, '
        f'patches {patch}'
      )
    encoder = fields['transformer']
    resnet = f'R{fields["resnet"]["num_layers"]}+' if 'resnet' in fields else ''
    pooling = {'gap': ', mean pooling', 'map': ', attention pooling'}
    return (
      f'{resnet}ViT of {encoder["num_layers"]} layers, width '
      f'{fields["hidden_size"]}, MLP {encoder["mlp_dim"]}, '
      f'{encoder["num_heads"]} heads, patches {patch}'
      + pooling.get(fields['classifier'], '')
    )

  def read_beside(self, beside, file, flat, naming):
    with arrays.naming(file, 'cannot be used'):
      leaves.check(flat, _table_of(flat, naming), _words(flat), _FEATURES)
    pooling = 'token' if 'cls_token' in flat else 'avg'
    describe = {
      'timm': functools.partial(vit_files.from_timm, pooling=pooling),
      'hf': vit_files.from_hf,
    }[naming]
    found = descriptions.read(beside('config.json'), describe)
    with arrays.naming(file, 'cannot be used'):
      _check_positions(flat, found.image_size)
    vit_files.warn_of_scaling(beside, file, naming)
    if is_bit(flat):
      return found._replace(model={'eps': 'timm'})
    resnet = {'resnet': {'eps': 'timm'}} if _is_hybrid(flat) else {}
    return found._replace(model={**found.model, **resnet})

  def image_size(self, config, params, given):
    return vit_files.image_size(config, params, given)

  def run(self, model):
    return {'pp': {'channels': vit_files.channels(model)}}

  def files(self, model, to):
    if to == 'hf':
      return vit_files.of_hf(model)
    fields, notes = vit_files.of_timm(model)
    there = vit_files.as_in_timm(model.config)
    notes += [
      f'timm computes with model.{key}={theirs}, but these weights were made for '
      f'{ours}: logits differ a little'
      for key, ours, theirs in self.differences(model.config, there)
    ]
    return fields, notes


def _check_positions(flat, image_size):
  """Raises ValueError if the class token of a timm model has no position."""
  table = flat.get('pos_embed')
  if image_size is None or table is None or 'cls_token' not in flat:
    return
  sides = flat['patch_embed.proj.weight'].shape[2:]
  patches = math.prod(n // side for n, side in zip(image_size, sides))
  if table.shape[1:-1] == (patches,) and not _is_hybrid(flat):
    raise ValueError(
      f'its {patches} position embeddings are those of the patches, without one '
      'for the class token (no_embed_class in timm, as in FlexiViT), which this '
      'package adds'
    )


def _is_hybrid(names):
  return any(name.startswith(_TIMM_RESNET) for name in names)


def _vit_sizes(flat):
  down, across, _, width = flat['embedding/kernel']
  num_layers = leaves.count(flat, r'Transformer/encoderblock_(\d+)/')
  block = f'Transformer/encoderblock_{num_layers - 1}/'
  sizes = {
    'patches': {'size': (down, across)},
    'hidden_size': width,
    'transformer': {
      'num_layers': num_layers,
      'mlp_dim': flat[f'{block}MlpBlock_0/Dense_0/kernel'][1],
      'num_heads': flat[f'{block}{_ATTENTION}query/kernel'][1],
      **_position_fields(flat),
      **({'first_norm': True} if _FIRST_NORM in flat else {}),
    },
    'classifier': _classifier(flat),
  }
  if 'pre_logits/kernel' in flat:
    sizes['representation_size'] = flat['pre_logits/kernel'][1]
  if 'conv_root/kernel' in flat:
    sizes['resnet'] = {
      'num_layers': leaves.units(flat, _OUR_UNITS),
      'width_factor': flat['conv_root/kernel'][-1] // 64,
    }
  return sizes


def _classifier(flat):
  if 'cls' in flat:
    return 'token'
  return 'map' if _POOLING in flat else 'gap'


def _position_fields(flat):
  """Returns the fields of position embeddings, see layers/positions.py.

  Parameters do not tell 'stem' from 'shared', nor 'sincos2d' from 'none'.
  """
  if _POSEMB in flat:
    if len(flat[_POSEMB]) != 3:
      raise ValueError(f'{_POSEMB} has the shape {flat[_POSEMB]}')
    return {}
  for leaf, kind in (
    ('pos_embedding', 'learned_1d'),
    ('x_embedding', 'learned_2d'),
    ('relative_embedding', 'relative'),
  ):
    one = 'shared' if kind == 'relative' else 'stem'
    for name, layers in (('posembed_input', one), ('posembed_0', 'every')):
      if f'Transformer/{name}/{leaf}' in flat:
        return {'position_embedding': kind, 'position_layers': layers}
  return {'add_position_embedding': False}


def _mixer_sizes(flat):
  down, across, _, width = flat['stem/kernel']
  tokens_mlp, channels_mlp = (
    f'MixerBlock_0/{part}_mixing/Dense_0/kernel' for part in ('token', 'channel')
  )
  return {
    'patches': {'size': (down, across)},
    'hidden_dim': width,
    'num_blocks': leaves.count(flat, r'MixerBlock_(\d+)/'),
    'tokens_mlp_dim': flat[tokens_mlp][1],
    'channels_mlp_dim': flat[channels_mlp][1],
  }
