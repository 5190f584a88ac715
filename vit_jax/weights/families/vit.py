"""Classifiers (ViT, hybrid, Mixer, BiT) in other libraries: their names and sizes.

The state dicts are timm's and Hugging Face's; vit_jax.weights.families.vit_files
reads and writes the files next to them. The tree is the published one.
"""

from collections.abc import Callable, Iterable, Mapping
import math
import re
import typing
from typing import Any, NamedTuple

from etils import epath
import numpy as np

from vit_jax.configs import models as model_configs, schema
from vit_jax.layers import position_kinds
from vit_jax.weights import descriptions
from vit_jax.weights.families import base, dino, eva, leaves, torchvision, vit_files

_POSEMB = 'Transformer/posembed_input/pos_embedding'
_BIAS = 'Transformer/posembed_input/relative_bias'
_BLOCK = 'Transformer/encoderblock_{0}/'
_ATTENTION = 'MultiHeadDotProductAttention_0'
_MAP = 'MAPHead_0/'
# Leaves that tell fields of a model.
_POOLING = f'{_MAP}probe'
_POOL_NORM = 'pool_norm/scale'
_FIRST_NORM = 'Transformer/first_norm/scale'
# Parts of names, here and elsewhere, that tell the variant of a model.
_GATES = re.compile(r'MlpBlock_0/gate/|\.mlp\.(gate|gate_proj|weights_in|fc1_g|w12)\.')
_LAYER_SCALE = re.compile('LayerScale|layer_scale')
_LEARNED_POSITIONS = re.compile('pos_embedding|position_embeddings')
# By `classifier`, see `Classifiers.describe`.
_POOLING_PHRASES = {
  'gap': ', mean pooling',
  'map': ', attention pooling',
  'token_gap': ', class token, mean pooling',
  'token_map': ', class token, attention pooling',
}
_DEFAULTS = dict(schema.defaults(model_configs.Transformer))
# Fields of an encoder that the original lacks.
VARIATIONS = (
  'norm',
  'qkv_bias',
  'qk_norm',
  'parallel',
  'mlp',
  'layer_scale',
  'attention_pattern',
  'mlp_norm',
  'attention_norm',
)
_POSITIONS = typing.get_args(model_configs.PositionEmbedding)
_POOLINGS = typing.get_args(model_configs.Classifier)
_ONE_POOLING = tuple(x for x in _POOLINGS if x != 'token_with_gap')
_PLAIN_POSITIONS = tuple(
  x for x in _POSITIONS if x not in (*position_kinds.ROPES, 'relative_bias')
)


class _Program(NamedTuple):
  """What the models of a program, or of a format, can have."""

  fields: tuple[str, ...] = VARIATIONS  # Fields of VARIATIONS.
  positions: tuple[str, ...] = _POSITIONS
  poolings: tuple[str, ...] = _POOLINGS
  lacks: tuple[str, ...] = ()  # Fields of a model that must have no value.
  needs: tuple[str, ...] = ()  # Fields of an encoder that must have a value.


_TIMM_FIELDS = (
  'qkv_bias',
  'qk_norm',
  'mlp',
  'layer_scale',
  'mlp_norm',
  'attention_norm',
)
# A format, or a class of a library, or a part that restricts the whole model there.
_PROGRAMS = {
  'npz': _Program(positions=_PLAIN_POSITIONS),
  'timm': _Program(_TIMM_FIELDS, poolings=_ONE_POOLING),
  'timm, attention pooling': _Program(('layer_scale',)),
  'timm, registers': _Program(lacks=('distilled',)),
  'timm, hybrid': _Program(tuple(x for x in _TIMM_FIELDS if x != 'mlp')),
  'eva': _Program(_TIMM_FIELDS, poolings=_ONE_POOLING, lacks=('resnet', 'distilled')),
  'beit': _Program(
    ('qkv_bias', 'mlp', 'layer_scale', 'mlp_norm'),
    poolings=('token', 'token_gap'),
    lacks=('resnet', 'distilled', 'registers', 'transformer.first_norm'),
  ),
  'hf': _Program(('qkv_bias',), _PLAIN_POSITIONS),
  'hf, DINOv2': _Program(
    ('mlp', 'layer_scale'),
    _PLAIN_POSITIONS,
    lacks=('distilled',),
    needs=('layer_scale',),
  ),
  'hf, DINOv3': _Program(
    ('mlp', 'layer_scale', 'qkv_bias'),
    ('rope',),
    _ONE_POOLING,
    needs=('layer_scale',),
  ),
  'workdir': _Program(),
}
_HF_REGISTERS = 'embeddings.register_tokens'  # As in DINOv2.
# Decoders of masked images, which affect neither logits nor features.
_IGNORED = r'decoder|(embeddings\.)?mask_token|module\.'
# Names of PyTorch's DistributedDataParallel, and of MoCo v3 (arXiv 2104.02057), whose
# projections, predictor and momentum encoder are not read.
_PARALLEL = (
  r'^module\.(base_encoder\.(?!head\.)|(?!(base|momentum)_encoder\.|predictor\.))', ''
)  # fmt: skip
# Rows of vit_jax.weights.families.leaves: names of timm and of Hugging Face.
_STEM = (
  ('cls', 'same', 'cls_token', 'embeddings.cls_token'),
  ('dist', 'same', 'dist_token', 'embeddings.distillation_token'),
  (_POSEMB, 'same', 'pos_embed', 'embeddings.position_embeddings'),
  ('embedding', 'conv', 'patch_embed.proj', 'embeddings.patch_embeddings.projection'),
  ('Transformer/encoder_norm', 'norm', 'norm', 'layernorm'),
  ('pre_logits', 'dense', 'pre_logits.fc', 'pooler.dense'),
  ('head', 'dense', 'head', 'classifier'),
  ('head_dist', 'dense', 'head_dist', 'distillation_classifier'),
)  # fmt: skip
_MLP = ('mlp.fc1', 'mlp.fc2'), ('intermediate.dense', 'output.dense')
_LAYER = (
  ('LayerNorm_0', 'norm', 'norm1', 'layernorm_before'),
  (f'{_ATTENTION}/query', 'heads', 'attn.q', 'attention.attention.query'),
  (f'{_ATTENTION}/key', 'heads', 'attn.k', 'attention.attention.key'),
  (f'{_ATTENTION}/value', 'heads', 'attn.v', 'attention.attention.value'),
  (f'{_ATTENTION}/out', 'out', 'attn.proj', 'attention.output.dense'),
  ('LayerNorm_1', 'norm', 'norm2', 'layernorm_after'),
)
# Parts that only timm has in a plain Vision Transformer (registers, LayerScale, norms,
# attention pooling), the ResNet of a hybrid, and BiT.
_TIMM_STEM = (
  ('register_tokens', 'same', 'reg_token'),
  ('Transformer/first_norm', 'norm', 'norm_pre'),
  ('pool_norm', 'norm', 'fc_norm'),
  (_POOLING, 'same', 'attn_pool.latent'),
  *leaves.attention(f'{_MAP}{_ATTENTION}', 'attn_pool', ends=('q', 'k', 'v', 'proj')),
  (f'{_MAP}LayerNorm_0', 'norm', 'attn_pool.norm'),
  (f'{_MAP}MlpBlock_0/Dense_0', 'dense', 'attn_pool.mlp.fc1'),
  (f'{_MAP}MlpBlock_0/Dense_1', 'dense', 'attn_pool.mlp.fc2'),
  (_BIAS, 'table', 'rel_pos_bias.relative_position_bias_table'),
)
_TIMM_LAYER = (
  (f'{_ATTENTION}/query_ln', 'norm', 'attn.q_norm'),
  (f'{_ATTENTION}/key_ln', 'norm', 'attn.k_norm'),
  (f'{_ATTENTION}/out_ln', 'norm', 'attn.norm'),
  ('MlpBlock_0/LayerNorm_0', 'norm', 'mlp.norm'),
  ('LayerScale_0/gamma', 'same', 'ls1.gamma'),
  ('LayerScale_1/gamma', 'same', 'ls2.gamma'),
)
_ROOT = ('conv_root', 'conv', 'conv'), ('gn_root', 'norm', 'norm')
_UNIT = (
  ('conv1', 'conv', 'conv1'),
  ('conv2', 'conv', 'conv2'),
  ('conv3', 'conv', 'conv3'),
  ('gn1', 'norm', 'norm1'),
  ('gn2', 'norm', 'norm2'),
  ('gn3', 'norm', 'norm3'),
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
_UNITS, _TIMM_UNITS = 'block{1}/unit{1}/', 'stages.{0}.blocks.{0}.'


def _timm_naming(
  root: str = f'{_TIMM_RESNET}stem.', gated: bool = False
) -> leaves.Naming:
  """Returns timm's naming; `root`: prefix of a hybrid's first convolution."""
  layer = (*leaves.column(_LAYER, 0), *dino.mlp(*_MLP[0], gated), *_TIMM_LAYER)
  joined = {
    '.attn.qkv.': ('.attn.q.', '.attn.k.', '.attn.v.'),
    'attn_pool.kv.': ('attn_pool.k.', 'attn_pool.v.'),
  }
  if gated:
    joined['.mlp.fc1.'] = dino.JOINED
  return leaves.Naming(
    'timm',
    'plain Vision Transformer',
    (
      ('', '', (*leaves.column(_STEM, 0), *_TIMM_STEM)),
      (_BLOCK, 'blocks.{0}.', layer),
      eva.BIAS,
      ('', root, _ROOT),
      (_UNITS, _TIMM_RESNET + _TIMM_UNITS, _UNIT),
    ),
    marks=('patch_embed.proj.weight',),
    old_names=(_PARALLEL, *eva.OLD_NAMES, *dino.OLD_NAMES, *torchvision.OLD_NAMES),
    joined=joined,
    ignored=_IGNORED,
    program='timm',
    features={
      'rope.freqs': 'frequencies of rotary embeddings, which are fixed here',
      'rel_pos.': 'relative positions of another form',
      'patch_embed.backbone.conv1': 'a ResNet of another form',
      'patch_embed.norm': 'a norm of the patches',
      'lambda_': 'differential attention',
      'in_proj': 'one projection for attention and MLP',
      'attns.': 'parallel branches',
      'storage_tokens': "the names of DINOv3's authors: use the files of timm",
    },
  )


_TIMM = _timm_naming()
_TIMM_GATED = _timm_naming(gated=True)
# timm's Eva and Beit have gates in layers of their own.
_EVA_GATED = _TIMM_GATED._replace(joined=_TIMM.joined)
_HF = leaves.Naming(
  'hf',
  _TIMM.model_name,
  (
    ('', '', (*leaves.column(_STEM, 1), ('register_tokens', 'same', _HF_REGISTERS))),
    (
      _BLOCK,
      'encoder.layer.{0}.',
      (*leaves.column(_LAYER, 1), *dino.mlp(*_MLP[1], gated=False)),
    ),
  ),
  marks=('embeddings.patch_embeddings.projection.weight',),
  old_names=(
    (r'^(vit|deit|ijepa)\.', ''),
    (r'^cls_classifier\.', 'classifier.'),
    # Models of transformers 5 in memory.
    (r'^layers\.', 'encoder.layer.'),
    *dino.MEMORY_ATTENTION,
    (r'^(encoder\.layer\.\d+)\.mlp\.fc1\.', r'\1.intermediate.dense.'),
    (r'^(encoder\.layer\.\d+)\.mlp\.fc2\.', r'\1.output.dense.'),
  ),
  ignored=_IGNORED,
  program="Hugging Face's transformers",
)
_BIT = leaves.Naming(
  'timm',
  'BiT ResNet',
  (('', '', _BIT_STEM), ('block{1}/unit{01}/', _TIMM_UNITS, _UNIT)),
  marks=_BIT_ROOTS[1:],
  program='timm',
)


def varied(encoder: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of VARIATIONS in which an encoder differs from the original's."""
  fields = {key: encoder.get(key, _DEFAULTS[key]) for key in VARIATIONS}
  return {key: x for key, x in fields.items() if x != _DEFAULTS[key]}


def _programs(config: Mapping[str, Any], to: str) -> list[_Program]:
  """Returns what has to hold a model in a format."""
  encoder = config.get('transformer') or {}
  registers = config.get('registers')
  names = [to]
  if to == 'hf':
    has_dino_fields = not {'mlp', 'layer_scale'}.isdisjoint(varied(encoder))
    if encoder.get('position_embedding') == 'rope':
      names = ['hf, DINOv3']
    elif registers or has_dino_fields:
      names = ['hf, DINOv2']
  elif to == 'timm':
    names = [eva.class_in_timm(config) or 'timm']
    if config.get('classifier') in ('map', 'token_map'):
      names.append('timm, attention pooling')
    if config.get('resnet'):
      names.append('timm, hybrid')
    if registers:
      names.append('timm, registers')
  return [_PROGRAMS[name] for name in names]


def is_bit(names: Iterable[str]) -> bool:
  """Returns whether the names are of a BiT ResNet, here or in timm."""
  return not set(_BIT_ROOTS).isdisjoint(names)


class Classifiers(base.Family):
  """ViT, hybrids, Mixer and BiT."""

  noun = 'a classifier'
  groups: tuple[type, ...] = (model_configs.Vit, model_configs.Mixer, model_configs.Bit)
  formats: tuple[str, ...] = ('npz', 'timm', 'hf', 'workdir')
  modules: tuple[tuple[str, str], ...] = (  # Since transformers 5.
    (r'encoder\.layer\.', 'layers.'),
    (r'attention\.attention\.(q|k|v)(uery|ey|alue)', r'attention.\1_proj'),
    (r'attention\.output\.dense', 'attention.o_proj'),
    (r'intermediate\.dense', 'mlp.fc1'),
    (r'output\.dense', 'mlp.fc2'),
  )
  hf_types: tuple[str, ...] = (
    'vit',
    'deit',
    'vit_mae',
    'vit_msn',
    'ijepa',
    *dino.HF_TYPES,
  )
  computes = {  # noqa: RUF012
    'transformer.gelu': _DEFAULTS['gelu'],
    'transformer.norm_eps': _DEFAULTS['norm_eps'],
    'transformer.norm': None,
    'transformer.position_embedding': None,
    'transformer.attention_pattern': _DEFAULTS['attention_pattern'],
    'transformer.attention_window': _DEFAULTS['attention_window'],
    'transformer.rope_temperature': _DEFAULTS['rope_temperature'],
    'transformer.rope_grid': _DEFAULTS['rope_grid'],
    'classifier': None,
    'resnet.eps': 'published',
    'eps': 'published',
  }
  namings = {  # noqa: RUF012
    'timm': _TIMM,
    'bare root': _timm_naming(_TIMM_RESNET),
    'hf': _HF,
    'bit': _BIT,
    'timm, gated': _TIMM_GATED,
    'eva': _TIMM,
    'beit': _TIMM,
    'eva, gated': _EVA_GATED,
    'beit, gated': _EVA_GATED,
    'dino': dino.naming(gated=False),
    'dino, gated': dino.naming(gated=True),
    'dino 3': dino.NAMING_3,
  }

  def naming(self, naming: str, names: Mapping[str, Any]) -> leaves.Naming:
    """Returns the naming of BiT, DINOv2, DINOv3 or a gated MLP if the names tell it."""
    if is_bit(names):
      return self.namings['bit']
    has_gates = is_gated(names)
    if naming == 'hf' and _has_layer_scale(names):
      if not has_learned_positions(names):
        return self.namings['dino 3']
      return self.namings['dino, gated' if has_gates else 'dino']
    if has_gates:
      return self.namings[f'{naming}, gated']
    if naming == 'timm' and _has_bare_root(names):
      return self.namings['bare root']
    return self.namings[naming]

  def missing(self, config: Mapping[str, Any], to: str) -> list[str]:
    encoder = config.get('transformer') or {}
    fields = {**config, **{f'transformer.{key}': x for key, x in encoder.items()}}
    position = encoder.get('position_embedding', 'learned_1d')
    classifier = config.get('classifier', 'token')
    missing = {}
    for program in _programs(config, to):
      for key, value in varied(encoder).items():
        if key not in program.fields:
          missing[f'transformer.{key}'] = value
      for key in program.needs:
        if encoder.get(key) is None:
          missing[f'transformer.{key}'] = None
      for key in program.lacks:
        if fields.get(key):
          missing[key] = fields[key]
      if position not in program.positions:
        missing['transformer.position_embedding'] = position
      if classifier not in program.poolings:
        missing['classifier'] = classifier
    return [f'{key}={value}' for key, value in missing.items()]

  def naming_of(self, config: Mapping[str, Any], to: str) -> str:
    timm_class = eva.class_in_timm(config) if to == 'timm' else None
    return timm_class or to

  def load(
    self, flat: dict[str, np.ndarray], naming: str, num_heads: base.NumHeads
  ) -> dict[str, np.ndarray]:
    params = dino.with_key_biases(super().load(flat, naming, num_heads))
    if _FIRST_NORM in params and 'embedding/kernel' in params:
      kernel = params['embedding/kernel']
      params.setdefault('embedding/bias', np.zeros(kernel.shape[-1], kernel.dtype))
    return params

  def dump(self, flat: Mapping[str, np.ndarray], naming: str) -> dict[str, np.ndarray]:
    """Returns the arrays by the names of timm, or of a model of transformers."""
    if naming == 'timm':
      return super().dump(_for_timm(flat), naming)
    if naming in ('eva', 'beit'):
      return eva.rename_for_timm(super().dump(_for_timm(flat), naming), naming)
    if _has_layer_scale(flat):
      state = super().dump(flat, naming)
      table = self.naming(naming, flat)
      return dino.with_placeholders(state, table, 'register_tokens' in flat)
    kind = vit_files.hf_type(flat)
    state = super().dump(flat, naming)
    if kind == 'deit':
      leaves.rename(state, ((r'^classifier\.', 'cls_classifier.'),))
    # transformers puts all names except the heads' under the model's type.
    leaves.rename(state, ((r'^(?!\w*classifier\.)', f'{kind}.'),))
    return state

  def sizes(self, flat: leaves.Shapes, fields: Mapping[str, Any]) -> dict[str, Any]:
    if is_bit(flat):
      return {
        'num_layers': leaves.units(flat, _UNITS),
        'width_factor': flat['root_block/conv_root/kernel'][-1] / 64,
      }
    if 'stem/kernel' in flat:
      return _mixer_sizes(flat)
    return _vit_sizes(flat)

  def defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    name = 'mixer_b16' if 'num_blocks' in fields else 'b16'
    return model_configs.get_config(name if 'patches' in fields else 'bit_r50x1')

  def describe(self, fields: Mapping[str, Any]) -> str:
    if 'patches' not in fields:
      form = 'BiT ResNet of {num_layers} units, {width_factor:g} times the width'
      return form.format(**fields)
    patch = 'x'.join(str(size) for size in fields['patches']['size'])
    if 'num_blocks' in fields:
      form = 'Mixer of {num_blocks} blocks, width {hidden_dim}, patches {patch}'
      return form.format(**fields, patch=patch)
    form = (
      'ViT of {num_layers} layers, width {width}, MLP {mlp_dim}, {num_heads} heads, '
      'patches {patch}'
    )
    encoder = fields['transformer']
    text = form.format(**encoder, width=fields['hidden_size'], patch=patch)
    if 'resnet' in fields:
      text = f'R{fields["resnet"]["num_layers"]}+{text}'
    all_fields = {**encoder, **fields}
    for key in (*VARIATIONS, 'first_norm', 'pool_norm', 'distilled'):
      if key in all_fields:
        text += f', {key}={all_fields[key]}'
    if 'registers' in fields:
      text += f', {fields["registers"]} registers'
    return text + _POOLING_PHRASES.get(fields['classifier'], '')

  def read_description(
    self,
    sibling: Callable[[str], epath.Path],
    file: epath.Path,
    flat: dict[str, np.ndarray],
    naming: str,
  ) -> descriptions.Description:
    table = self.naming(naming, flat)
    has_eva_names = eva.is_eva(flat)
    has_torchvision_names = torchvision.is_torchvision(flat)
    leaves.prepare(flat, table)

    def describe(config: Mapping[str, Any]) -> descriptions.Description:
      if naming != 'hf':
        return vit_files.from_timm(config, flat, has_eva_names)
      if table is _HF:
        return vit_files.from_hf(config)
      if table is dino.NAMING_3:
        return dino.from_hf_3(config)
      return dino.from_hf(config)

    if table is _HF:
      _read_first_token(flat)
    description = descriptions.read(sibling('config.json'), describe)
    if has_torchvision_names:
      description = torchvision.complete(description, flat)
    _add_positions(flat, description.image_size)
    if is_bit(flat):
      return description._replace(model={'eps': 'timm'})
    if _is_hybrid(flat):
      description.model['resnet'] = {'eps': 'timm'}
    return description

  def scaled_channels(self, flat: Mapping[str, np.ndarray]) -> int:
    """A convolution with padding, as of hybrids, cannot absorb the scaling."""
    kernel = flat.get('embedding/kernel')
    is_hybrid = any(path.endswith('conv_root/kernel') for path in flat)
    return 0 if kernel is None or is_hybrid else kernel.shape[2]

  def scaled(self, model: Any) -> Any:
    return vit_files.scaled(model)

  def image_size(
    self,
    config: Mapping[str, Any],
    params: Mapping[str, Any],
    file_size: tuple[int, int] | None,
  ) -> tuple[int, int]:
    return vit_files.image_size(config, params, file_size)

  def run(self, model: Any) -> dict[str, Any]:
    return {'pp': {'channels': leaves.channels(model.params)}}

  def files(self, model: Any, to: str) -> tuple[dict[str, dict], list[str]]:
    if to == 'hf':
      is_dino = model.config.transformer.get('layer_scale') is not None
      describe = dino.hf_description if is_dino else vit_files.hf_description
      return describe(model)
    fields, notes = vit_files.timm_description(model)
    timm_config: dict[str, Any] = {'eps': 'timm'}  # For a BiT ResNet.
    if 'transformer' in model.config:
      eps = eva.eps(eva.architecture(fields['config.json']))
      encoder = {**model.config.transformer, 'norm_eps': eps}
      timm_config = {'transformer': encoder, 'resnet': timm_config}
    notes += self.difference_notes('timm computes', model.config, timm_config)
    return fields, notes


def _read_first_token(flat: dict[str, np.ndarray]) -> None:
  """Makes a register of a distillation token if only the class token is read."""
  if 'distillation_classifier.weight' in flat:
    return
  readers = ('pooler.dense.weight', 'classifier.weight')
  table, token = 'embeddings.position_embeddings', 'embeddings.distillation_token'
  if token in flat and not flat.keys().isdisjoint(readers):
    flat[_HF_REGISTERS] = flat.pop(token) + flat[table][:, 1:2]
    flat[table] = np.delete(flat[table], 1, axis=1)
  elif 'embeddings.cls_token' not in flat and readers[0] in flat:
    raise ValueError(
      f"its '{readers[0]}' reads the first token only, unlike models of this package "
      'without a class token'
    )


def _add_positions(
  flat: dict[str, np.ndarray], image_size: tuple[int, int] | None
) -> None:
  """Adds zero positions of a timm model's first tokens; registers absorb theirs."""
  table = flat.get('pos_embed')
  if table is None or table.ndim != 3 or _is_hybrid(flat):
    return
  patches = None
  if image_size is not None:
    sides = flat['patch_embed.proj.weight'].shape[2:]
    patches = math.prod(n // side for n, side in zip(image_size, sides))
  rows = table.shape[1]
  num_first = sum(f'{name}_token' in flat for name in ('cls', 'dist'))
  if 'reg_token' not in flat:
    if rows != patches:
      return
  elif not _is_grid(rows, patches):
    num_tokens = num_first + flat['reg_token'].shape[1]
    if _is_grid(rows - num_first, patches):  # As DINOv2's authors have them.
      return
    if _is_grid(rows - num_tokens, patches):
      flat['reg_token'] = flat['reg_token'] + table[:, num_first:num_tokens]
      flat['pos_embed'] = np.delete(table, slice(num_first, num_tokens), axis=1)
      return
  flat['pos_embed'] = np.pad(table, ((0, 0), (num_first, 0), (0, 0)))


def _is_grid(rows: int, patches: int | None) -> bool:
  """Returns whether there is a row per patch, or a square of rows if unknown."""
  if patches is not None:
    return rows == patches
  return rows > 0 and math.isqrt(rows) ** 2 == rows


def _for_timm(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns arrays that compute the same in timm, which lacks some of them."""
  flat = dict(flat)
  if {'cls', 'register_tokens', _POSEMB} <= flat.keys():
    # timm adds no position to the class token where there are registers.
    first, table = np.split(flat[_POSEMB], [1], axis=1)
    flat['cls'] = flat['cls'] + first
    flat[_POSEMB] = table
  if _FIRST_NORM in flat and flat.pop('embedding/bias').any():
    raise ValueError(
      "'embedding/bias' is not zero, and timm has no bias there in models with a "
      'norm before the first layer: write this model as a run (--to)'
    )
  return flat


def _has_layer_scale(names: Iterable[str]) -> bool:
  return any(_LAYER_SCALE.search(name) for name in names)


def _has_bare_root(names: Iterable[str]) -> bool:
  """Returns whether a hybrid's ResNet is only a convolution, without 'stem.' in timm."""
  if 'conv_root/kernel' in names:
    return not any(name.startswith('block1/') for name in names)
  return f'{_TIMM_RESNET}conv.weight' in names


def has_learned_positions(names: Iterable[str]) -> bool:
  """Returns whether names, here or elsewhere, include a table of positions."""
  return any(_LEARNED_POSITIONS.search(name) for name in names)


def is_gated(names: Mapping[str, Any]) -> bool:
  """Returns whether the MLPs have gates; timm's shapes tell, if not the names."""
  if any(_GATES.search(name) for name in names):
    return True
  first, last = 'blocks.0.mlp.fc1.weight', 'blocks.0.mlp.fc2.weight'
  if first not in names or last not in names:
    return False
  hidden = names[last].shape[-1:]
  return names[first].shape[:1] == tuple(2 * n for n in hidden)


def _is_hybrid(names: Iterable[str]) -> bool:
  return any(name.startswith(_TIMM_RESNET) for name in names)


def _vit_sizes(flat: leaves.Shapes) -> dict[str, Any]:
  down, across, _, width = flat['embedding/kernel']
  num_layers = leaves.count(flat, _BLOCK)
  block = f'Transformer/encoderblock_{num_layers - 1}/'
  if f'{block}row/LayerNorm_0/scale' in flat:
    block += 'row/'
  encoder = {
    'num_layers': num_layers,
    'mlp_dim': flat[f'{block}MlpBlock_0/Dense_0/kernel'][1],
    'num_heads': flat[f'{block}{_ATTENTION}/query/kernel'][1],
    **_position_fields(flat),
    **_variations(flat),
  }
  if _FIRST_NORM in flat:
    encoder['first_norm'] = True
  sizes = {
    'patches': {'size': (down, across)},
    'hidden_size': width,
    'transformer': encoder,
    'classifier': _classifier(flat, width),
  }
  if _POOL_NORM in flat:
    sizes['pool_norm'] = True
  if 'dist' in flat:
    sizes['distilled'] = True
  if 'register_tokens' in flat:
    sizes['registers'] = flat['register_tokens'][1]
  if 'pre_logits/kernel' in flat:
    sizes['representation_size'] = flat['pre_logits/kernel'][1]
  if 'conv_root/kernel' in flat:
    sizes['resnet'] = {
      'num_layers': leaves.units(flat, _UNITS),
      'width_factor': flat['conv_root/kernel'][-1] // 64,
    }
  return sizes


def _classifier(flat: leaves.Shapes, width: int) -> str:
  """Returns the `classifier` of a ViT for tokens of a width."""
  has_cls = 'cls' in flat
  if _POOLING in flat:
    return 'token_map' if has_cls else 'map'
  if not has_cls:
    return 'gap'
  if _POOL_NORM in flat and 'dist' not in flat:
    return 'token_gap'
  # The first layer after pooling.
  kernel = flat.get('pre_logits/kernel', flat.get('head/kernel', ()))
  return 'token_with_gap' if kernel[:1] == (2 * width,) else 'token'


def _variations(flat: leaves.Shapes) -> dict[str, Any]:
  """Returns the fields of VARIATIONS that differ from their defaults.

  Parameters cannot distinguish 'rms' from 'layer_no_bias', nor 'local' from 'global'.
  """
  inner = {path.partition('/encoderblock_')[2].partition('/')[2] for path in flat}
  axial = any(path.startswith('row/') for path in inner)
  inner = {path.removeprefix('row/') for path in inner}
  attention = f'{_ATTENTION}/query'
  fields: dict[str, Any] = {
    'qkv_bias': f'{attention}/bias' in inner,
    'qk_norm': f'{attention}_ln/scale' in inner,
    'parallel': 'LayerNorm_1/scale' not in inner,
    'mlp_norm': 'MlpBlock_0/LayerNorm_0/scale' in inner,
    'attention_norm': f'{_ATTENTION}/out_ln/scale' in inner,
  }
  if 'LayerNorm_0/bias' not in inner:
    fields['norm'] = 'rms'
  if 'MlpBlock_0/gate/bias' in inner:
    fields['mlp'] = 'swiglu'
  if 'LayerScale_0/gamma' in inner:
    fields['layer_scale'] = 1e-5  # As in DINOv2.
  if axial:
    fields['attention_pattern'] = 'axial'
  return varied(fields)


def _position_fields(flat: leaves.Shapes) -> dict[str, Any]:
  """Returns the fields of position embeddings, see layers/positions.py.

  Parameters cannot distinguish 'stem' from 'shared', nor 'sincos2d' from 'none'.
  """
  if _POSEMB in flat:
    return {}
  for leaf, kind, layers in (
    ('pos_embedding', 'learned_1d', 'stem'),
    ('x_embedding', 'learned_2d', 'stem'),
    ('relative_embedding', 'relative', 'shared'),
    ('relative_bias', 'relative_bias', 'shared'),
  ):
    if f'Transformer/posembed_input/{leaf}' in flat:
      return {'position_embedding': kind, 'position_layers': layers}
    if f'Transformer/posembed_0/{leaf}' in flat:
      return {'position_embedding': kind, 'position_layers': 'every'}
  return {'add_position_embedding': False}


def _mixer_sizes(flat: leaves.Shapes) -> dict[str, Any]:
  down, across, _, width = flat['stem/kernel']
  return {
    'patches': {'size': (down, across)},
    'hidden_dim': width,
    'num_blocks': leaves.count(flat, 'MixerBlock_{0}/'),
    'tokens_mlp_dim': flat['MixerBlock_0/token_mixing/Dense_0/kernel'][1],
    'channels_mlp_dim': flat['MixerBlock_0/channel_mixing/Dense_0/kernel'][1],
  }
