"""The JSON files of a classifier in timm and Hugging Face."""

from collections.abc import Container, Mapping, Sequence
import math
import re
from typing import Any, Literal

import flax.traverse_util
import ml_collections
import numpy as np

from vit_jax import models
from vit_jax.configs import schema
from vit_jax.layers import positions
from vit_jax.weights import descriptions, preparation
from vit_jax.weights.families import eva, leaves

_POSEMB = 'Transformer/posembed_input/pos_embedding'
# Image size of most pre-training, in pixels.
_USUAL_SIZE = 224
# Units per stage, width and side of a patch of a hybrid -> timm's name for it.
_TIMM_HYBRIDS = {
  ((), 192, 8): 'vit_tiny_r_s16_p8_224',
  ((2, 2, 2, 2), 384, 1): 'vit_small_r26_s32_224',
  ((2, 2, 2, 2), 768, 1): 'vit_base_r26_s32_224',
  ((3, 4, 9), 768, 1): 'vit_base_r50_s16_224',
  ((3, 4, 6, 3), 1024, 1): 'vit_large_r50_s32_224',
}
# Units per stage of a BiT ResNet -> timm's name for one, and its width factor.
_TIMM_BITS = {
  (3, 4, 6, 3): ('resnetv2_50x1_bit', 1),
  (3, 4, 23, 3): ('resnetv2_101x1_bit', 1),
  (3, 8, 36, 3): ('resnetv2_152x2_bit', 2),
}
# timm's names of ViTs, whose size determines the number of heads.
_TIMM_USUAL = re.compile(
  r'(?:vit|deit3?|flexivit|eva(?:02)?|beit(?:v2|3)?)_'
  r'((?:huge|small)_plus|7b|intern300m|[a-z]+\d*m?2?)'
  r'(?:_(?:patch\d+|r\d*|[sp]?\d+|in21k|clip|quickgelu|siglip|distilled|reg\d|gap|map'
  r'|miil|dinov[23]|qkvb|lingbot|rope|ape|tipsv2|radio|v\d|36x1))*'
)
# Parts of these names -> their GELU, if it is not the exact one.
_TIMM_NAMED_GELUS = (
  ('_quickgelu', 'quick_gelu'),
  (
    r'_(base_patch32|(giantopt|so400m)_patch16)_siglip|_large_patch16_siglip(_gap)?_512',
    'gelu_tanh',
  ),
)
_Shape = tuple[schema.Count, schema.Count, schema.Count]  # Channels, height, width.
_TIMM_HEADS = {
  'tiny': 3, 'xsmall': 4, 'wee': 4, 'little': 5, 'small': 6, 'medium': 8, 'mediumd': 8,
  'betwixt': 10, 'base': 12, 'so150m2': 13, 'so150m': 14, 'large': 16, 'so400m': 16,
  'huge': 16, 'giant': 16, 'giantopt': 16, 'gigantic': 16, 'intern300m': 16,
  'small_plus': 6, 'huge_plus': 20, '7b': 32,
  'vit_base_patch16_plus_clip_240': 14, 'vit_base_patch16_plus_240': 14,
  'vit_base_patch32_plus_256': 14, 'vit_base_patch16_gap_224': 16,
  'vit_giant_patch14_dinov2': 24, 'vit_giant_patch14_reg4_dinov2': 24,
  'vit_giant_patch14_reg1_tipsv2': 24, 'vit_giant_patch16_radio_v3': 24,
  'vit_giant_patch16_lingbot': 24,
  'test_vit': 2, 'test_vit2': 2, 'test_vit4': 3,
}  # fmt: skip
# Their names of GELUs -> ours.
GELUS = {
  'gelu': 'erf',
  'gelu_python': 'erf',
  'gelu_new': 'tanh',
  'gelu_pytorch_tanh': 'tanh',
  'gelu_fast': 'tanh',
  'gelu_tanh': 'tanh',
  'quick_gelu': 'quick',
}
# Type of a model of Hugging Face -> its classes, without and with a classifier.
_HF_CLASSES = {
  'vit': ('ViTModel', 'ViTForImageClassification'),
  'deit': ('DeiTModel', 'DeiTForImageClassificationWithTeacher'),
  'ijepa': ('IJepaModel', 'IJepaForImageClassification'),
}
# Ours -> theirs, in timm and in Hugging Face.
_TIMM_GELUS = {'erf': 'gelu', 'tanh': 'gelu_tanh', 'quick': 'quick_gelu'}
# Our classifiers -> timm's `global_pool`; 'avg' for others.
_TIMM_POOLINGS = {'token': 'token', 'map': 'map', 'token_map': 'map'}
_HF_GELUS = {**_TIMM_GELUS, 'tanh': 'gelu_pytorch_tanh'}


def from_hf(config: Mapping[str, Any]) -> descriptions.Description:
  """Returns what config.json of Hugging Face says."""
  descriptions.check_supported(config, pooler_act='tanh')
  gelu = 'gelu' if config else None
  return descriptions.Description(
    dict(transformer=from_hf_encoder(config, gelu, 1e-12)),
    descriptions.labels(config),
    pair(descriptions.field(config, 'image_size', schema.Size)),
    num_heads=descriptions.field(config, 'num_attention_heads', schema.Count),
  )


def from_hf_encoder(config: Mapping[str, Any], gelu: str | None, eps: float) -> dict:
  """Returns GELU and epsilon of an encoder, with Hugging Face's defaults."""
  gelu = descriptions.field(config, 'hidden_act', Literal[*GELUS], gelu)
  eps = descriptions.field(config, 'layer_norm_eps', schema.Epsilon, eps)
  return dict(gelu=GELUS.get(gelu), norm_eps=float(eps))


def hf_encoder(encoder: ml_collections.ConfigDict, width: int) -> dict:
  """Returns Hugging Face's fields of an encoder."""
  return dict(
    hidden_size=width,
    num_hidden_layers=encoder.num_layers,
    num_attention_heads=encoder.num_heads,
    intermediate_size=encoder.mlp_dim,
    hidden_act=_HF_GELUS[encoder.get('gelu', 'tanh')],
    layer_norm_eps=encoder.get('norm_eps', 1e-6),
  )


def from_timm(
  config: Mapping[str, Any], flat: dict[str, np.ndarray], has_eva_names: bool = False
) -> descriptions.Description:
  """Returns what config.json of timm says about weights.

  GELU and heads are None unless a field or the model's name gives them.

  Args:
    config: config.json.
    flat: arrays by name; see eva.from_timm, which may change them.
    has_eva_names: see eva.from_timm.

  Raises:
    ValueError: if no model of this package pools as its `global_pool` says.
  """
  field = descriptions.field
  args = field(config, 'model_args', dict, {})
  pretrained = field(config, 'pretrained_cfg', dict, {})
  name = eva.architecture(config)
  heads = _usual_heads(name)
  gelu = None if heads is None else _usual_gelu(name)
  gelu = field(args, 'act_layer', Literal[*GELUS], gelu)
  num_heads = field(args, 'num_heads', schema.Count, heads)
  encoder = {
    'gelu': GELUS.get(gelu),
    'norm_eps': eva.eps(name),
    **eva.from_timm(config, flat, has_eva_names, num_heads),
  }
  class_names = field(config, 'label_names', tuple[str, ...])
  if not class_names:
    class_names = field(pretrained, 'label_names', tuple[str, ...])
  input_size = field(pretrained, 'input_size', _Shape)
  size = field(args, 'img_size', schema.Size, input_size and input_size[1:])
  return descriptions.Description(
    model={'transformer': encoder, **_timm_pooling({**config, **args}, flat)},
    class_names=tuple(class_names) if class_names else None,
    image_size=pair(size),
    num_heads=num_heads,
  )


def _usual_heads(name: str) -> int | None:
  """Returns the number of heads of timm's model of this name, if it determines it."""
  if name in _TIMM_HEADS:
    return _TIMM_HEADS[name]
  usual = _TIMM_USUAL.fullmatch(name)
  return _TIMM_HEADS.get(usual[1]) if usual else None


def _usual_gelu(name: str) -> str:
  for pattern, gelu in _TIMM_NAMED_GELUS:
    if re.search(pattern, name):
      return gelu
  return 'gelu'


def _timm_pooling(config: Mapping[str, Any], names: Container[str]) -> dict[str, str]:
  """Returns the field of a model that pools as `global_pool`, unless it is usual."""
  if 'stem.conv.weight' in names:  # BiT.
    descriptions.check_supported(config, global_pool='avg')
    return {}
  descriptions.check_supported(config, pool_include_prefix=False)
  has_cls = 'cls_token' in names
  if 'attn_pool.latent' in names:
    classifiers = {'map': 'token_map' if has_cls else 'map'}
  elif has_cls:
    classifiers = {'token': 'token', 'avg': 'token_gap'}
  else:
    classifiers = {'avg': 'gap'}
  # The one that vit_jax.weights.identify infers.
  usual = next(iter(classifiers))
  if 'fc_norm.weight' in names and 'avg' in classifiers:
    usual = 'avg'
  pool = descriptions.field(config, 'global_pool', Literal[*classifiers], usual)
  return {} if pool == usual else {'classifier': classifiers[pool]}


def scaled(model: Any, part: str | None = None) -> Any:
  """Returns a model whose patch embedding absorbs the scaling of pixels.

  `part` names the tower with the patch embedding in a model of several towers.
  """
  if not model.preparation.is_scaled:
    return model
  # (x / 2 + 0.5 - mean) / std for pixels x from -1 to 1.
  tower = model.params[part] if part else model.params
  embedding = tower['embedding']
  kernel = np.asarray(embedding['kernel'], np.float64)  # [p, q, C, D].
  values = model.preparation.by_channel(kernel.shape[2])
  mean, std = np.asarray(values['mean']), np.asarray(values['std'])
  shift = np.einsum('pqcd,c->d', kernel, (0.5 - mean) / std)
  scaled_kernel = kernel * (0.5 / std)[:, None]
  bias = embedding['bias'] + shift
  params = {
    **tower,
    'embedding': {
      'kernel': scaled_kernel.astype(embedding['kernel'].dtype),
      'bias': bias.astype(embedding['bias'].dtype),
    },
  }
  if part:
    params = {**model.params, part: params}
  return model._replace(params=params, preparation=model.preparation.unscaled())


def pair(size: int | Sequence[int] | None) -> tuple[int, int] | None:
  """Returns (height, width) for one number or two; None for None."""
  if size is None:
    return None
  if isinstance(size, int):
    return size, size
  height, width = size
  return height, width


def image_size(
  config: ml_collections.ConfigDict,
  params: Mapping[str, Any],
  file_size: tuple[int, int] | None,
) -> tuple[int, int]:
  """Returns (height, width) of a model's images, by default a square."""
  tokens = _tokens(params)
  size = file_size or square(tokens, config)
  grid = models.patch_grid(config, size)
  if tokens is not None and grid is not None and math.prod(grid) != tokens:
    raise ValueError(
      f'image_size={size[0]},{size[1]} makes {grid[0]} x {grid[1]} patches, but '
      f'the weights are for {tokens}: pass the size of the images '
      '(--image_size=HEIGHT,WIDTH)'
    )
  return size


def square(tokens: int | None, config: ml_collections.ConfigDict) -> tuple[int, int]:
  """Returns the size of square images of so many patches, or the usual size."""
  if config.get('patches') is None:  # A model for images of any size.
    return (_USUAL_SIZE, _USUAL_SIZE)
  side = 14 if tokens is None else math.isqrt(tokens)
  # Many patches, so that all strides divide the image.
  height, width = (2**10 * size for size in config.patches.size)
  down, across = models.count_patches(config, (height, width))
  return side * height // down, side * width // across


def _tokens(params: Mapping[str, Any]) -> int | None:
  """Returns the number of patches that parameters are for; None for any number."""
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  mixing = 'MixerBlock_0/token_mixing/Dense_0/kernel'
  if mixing in flat:
    return flat[mixing].shape[0]
  posemb = flat.get(_POSEMB)
  return None if posemb is None else posemb.shape[1] - positions.class_tokens(flat)


def timm_description(model: Any) -> tuple[dict[str, dict], list[str]]:
  """Returns timm's JSON files of a model by name, and notes for the user."""
  config = model.config
  if config.get('kind') == 'bit':
    architecture, args = timm_bit(model)
    num_features = model.params['norm-pre-head']['scale'].size
    classifier: str | list[str] = 'head.fc'
  else:
    architecture, args = _timm_vit(model)
    num_features = config.hidden_size
    classifier = ['head', 'head_dist'] if 'head_dist' in model.params else 'head'
  channels = leaves.channels(model.params)
  prepared, notes = preparation.to_timm(model.preparation, model.image_size, channels)
  fields = dict(
    architecture=architecture,
    num_classes=model.num_classes,
    num_features=num_features,
    global_pool=args['global_pool'],
    model_args=args,
    pretrained_cfg=dict(
      num_classes=model.num_classes,
      **prepared,
      first_conv=None,
      classifier=classifier,
    ),
  )
  if model.class_names:
    fields['label_names'] = model.class_names
  if 'pre_logits' in model.params and model.num_classes:
    notes.append(
      'timm ignores the pre-logits layer, though it is in the file: its logits '
      'are not those of this model'
    )
  return {'config.json': fields}, notes


def _timm_vit(model: Any) -> tuple[str, dict[str, Any]]:
  """Returns timm's name of a ViT or hybrid, and its arguments there."""
  config = model.config
  encoder = model.config.transformer
  is_gated = encoder.get('mlp') == 'swiglu'
  hidden = 2 * encoder.mlp_dim if is_gated else encoder.mlp_dim
  args = dict(
    img_size=model.image_size,
    patch_size=_one_if_equal(config.patches.size),
    embed_dim=config.hidden_size,
    depth=encoder.num_layers,
    num_heads=encoder.num_heads,
    # timm truncates this product to an integer.
    mlp_ratio=math.nextafter(hidden / config.hidden_size, math.inf),
    in_chans=leaves.channels(model.params),
    class_token='cls' in model.params,
    global_pool=_TIMM_POOLINGS.get(config.classifier, 'avg'),
    fc_norm=bool(config.get('pool_norm')),
    pre_norm=bool(encoder.get('first_norm')),
    qkv_bias=encoder.get('qkv_bias', True),
    qk_norm=bool(encoder.get('qk_norm')),
  )
  if not is_gated:
    args['act_layer'] = _TIMM_GELUS[encoder.get('gelu', 'tanh')]
  if is_gated or encoder.get('layer_scale'):
    args['init_values'] = encoder.get('layer_scale')
  if registers := config.get('registers'):
    args['reg_tokens'] = registers
    args['no_embed_class'] = True
  if eva.class_in_timm(config) is not None:
    return eva.timm_arguments(config, args)
  return _timm_architecture(config), args


def _timm_architecture(config: ml_collections.ConfigDict) -> str:
  """Returns a name in timm that says what is not an argument: MLP, epsilon, ResNet."""
  encoder = config.transformer
  if encoder.get('mlp') == 'swiglu':
    return 'vit_giant_patch14_dinov2'
  if config.get('resnet') is not None:
    units = tuple(config.resnet.num_layers or ())
    sizes = (units, config.hidden_size, _one_if_equal(config.patches.size))
    if sizes not in _TIMM_HYBRIDS:
      raise ValueError(
        f'timm has no hybrid of {units} units, width {sizes[1]} and patches '
        f'{sizes[2]}: it has {sorted(_TIMM_HYBRIDS.values())} (--to)'
      )
    return _TIMM_HYBRIDS[sizes]
  if config.get('distilled'):
    return 'deit_base_distilled_patch16_224'
  if encoder.get('norm_eps') == 1e-5:
    return 'vit_base_patch16_clip_224'
  return 'vit_base_patch16_224'


def timm_bit(model: Any) -> tuple[str, dict[str, Any]]:
  """Returns timm's name of a BiT ResNet, and its arguments there."""
  config = model.config
  units = tuple(config.num_layers)
  width = config.width_factor
  if units not in _TIMM_BITS:
    raise ValueError(
      f'timm has no BiT ResNet of {units} units: it has {list(_TIMM_BITS)} (--to)'
    )
  architecture, factor = _TIMM_BITS[units]
  # timm multiplies these by the width factor of the architecture.
  widths = []
  for i in range(len(units)):
    widths.append(int(256 * 2**i * width) // factor)
  return architecture, dict(
    in_chans=leaves.channels(model.params),
    stem_chs=int(64 * width) // factor,
    channels=widths,
    global_pool='avg',
  )


def hf_type(paths: Container[str]) -> str:
  """Returns the `model_type` in Hugging Face of a model by its paths."""
  for leaf, kind in (('dist', 'deit'), ('cls', 'vit'), (_POSEMB, 'ijepa')):
    if leaf in paths:
      return kind
  raise ValueError(
    "Hugging Face's transformers has no ViT without class token and position "
    'embeddings, no Mixer and no ResNet: write this model for timm, or as a run (--to)'
  )


def hf_description(model: Any) -> tuple[dict[str, dict], list[str]]:
  """Returns Hugging Face's JSON files of a ViT by name, and notes."""
  config = model.config
  kind = hf_type(flax.traverse_util.flatten_dict(model.params, sep='/'))
  has_pre_logits = 'pre_logits' in model.params
  if config.classifier not in ('token', 'gap') or (has_pre_logits and kind != 'vit'):
    layer = ' and a pre-logits layer' if has_pre_logits else ''
    raise ValueError(
      f"Hugging Face's transformers have no {kind} with classifier="
      f"'{config.classifier}'{layer}: write this model for timm, or as a run (--to)"
    )
  has_classifier = model.num_classes and not has_pre_logits
  bare_class, classifier_class = _HF_CLASSES[kind]
  architecture = classifier_class if has_classifier else bare_class
  files = hf_files(
    model,
    model_type=kind,
    architectures=[architecture],
    pooler_act='tanh',
    pooler_output_size=config.get('representation_size') or config.hidden_size,
    **descriptions.label_fields(model),
  )
  notes = []
  if has_pre_logits and model.num_classes:
    notes.append(
      'ViTForImageClassification has no pre-logits layer: load it as ViTModel, '
      'whose pooler_output is the pre-logits; the head is in the file'
    )
  elif not has_classifier:
    notes.append(f'load it as {bare_class}(Config): the model has no classifier')
  return files, notes


def hf_files(model: Any, **fields: Any) -> dict[str, dict]:
  """Returns Hugging Face's JSON files of a ViT by name; `fields` are its own."""
  config = model.config
  channels = leaves.channels(model.params)
  fields = dict(
    **hf_encoder(config.transformer, config.hidden_size),
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    qkv_bias=config.transformer.get('qkv_bias', True),
    image_size=_one_if_equal(model.image_size),
    patch_size=_one_if_equal(config.patches.size),
    num_channels=channels,
    **fields,
  )
  processor = preparation.to_hf(model.preparation, model.image_size, channels)
  return {'config.json': fields, 'preprocessor_config.json': processor}


def _one_if_equal(pair: Sequence[int]) -> int | list[int]:
  """Returns one number for a square, else a list of two."""
  return pair[0] if pair[0] == pair[1] else list(pair)
