"""The files beside a classifier's weights, of timm and of Hugging Face."""

import copy
import math

import flax.traverse_util

from vit_jax.layouts import vit
from vit_jax.weights import identify

# Description of a hybrid's sizes -> timm's name for it.
_TIMM_HYBRIDS = {
  'R+ViT-Ti_16': 'vit_tiny_r_s16_p8_224',
  'R26+ViT-S_32': 'vit_small_r26_s32_224',
  'R26+ViT-B_32': 'vit_base_r26_s32_224',
  'R50+ViT-B_16': 'vit_base_r50_s16_224',
  'R50+ViT-L_32': 'vit_large_r50_s32_224',
}


# Units per stage of a BiT ResNet -> timm's name for one, and its width factor.
_TIMM_BITS = {
  (3, 4, 6, 3): ('resnetv2_50x1_bit', 1),
  (3, 4, 23, 3): ('resnetv2_101x1_bit', 1),
  (3, 8, 36, 3): ('resnetv2_152x2_bit', 2),
}
# Fields that change what a model computes, but no shapes, and their defaults.
_COMPUTES = {
  'transformer.gelu': 'tanh',
  'transformer.norm_eps': 1e-6,
  'resnet.eps': 'published',
  'eps': 'published',
}


def differences(config, other):
  """Yields (key, value, other value) where two models compute differently."""
  for key, default in _COMPUTES.items():
    group, _, name = key.rpartition('.')
    ours, theirs = (c.get(group) if group else c for c in (config, other))
    if group and (ours is None or theirs is None):
      continue
    here, there = ours.get(name, default), theirs.get(name, default)
    if here != there:
      yield f'model.{key}', here, there


def timm(model) -> tuple[dict[str, dict], list[str]]:
  """Returns timm's JSON files of a model by name, and notes for the user.

  Raises:
    ValueError: if timm has no such model.
  """
  config = model.config
  flat = flax.traverse_util.flatten_dict(model.params, sep='/')
  bit = vit.is_bit(flat)
  width = flat['norm-pre-head/scale'].size if bit else config.hidden_size
  architecture, args = (_timm_bit if bit else _timm_vit)(model)
  resizing, notes = _timm_resizing(model)
  fields = dict(
    architecture=architecture,
    num_classes=model.num_classes,
    num_features=width,
    global_pool=args['global_pool'],
    model_args=args,
    pretrained_cfg=dict(
      num_classes=model.num_classes,
      input_size=(identify.channels(model.params), *model.image_size),
      **resizing,
      interpolation='bilinear',
      first_conv=None,
      classifier='head.fc' if bit else 'head',
      **_pixels(model.params),
    ),
    **({'label_names': model.class_names} if model.class_names else {}),
  )
  computes = copy.deepcopy(config)
  if bit:
    computes.eps = 'timm'
  else:
    computes.transformer.norm_eps = 1e-6
  if config.get('resnet') is not None:
    computes.resnet.eps = 'timm'
  notes += [
    f'timm computes with {key}={there}, but these weights were made for {here}: '
    'logits differ a little'
    for key, here, there in differences(config, computes)
  ]
  if 'pre_logits' in model.params and model.num_classes:
    notes.append(
      'timm ignores the pre-logits layer, though it is in the file: its logits '
      'are not those of this model'
    )
  return {'config.json': fields}, notes


def _timm_resizing(model):
  """Returns timm's fields for the resizing of images, and notes.

  timm divides the sides of the crop by `crop_pct`, rounds down, and resizes
  both sides ('squash') or the shorter one ('center') to the result.
  """
  crop, resize = model.image_size, model.resize
  if resize is None:
    return dict(crop_mode='squash', crop_pct=1.0), []
  shortest = isinstance(resize, int)
  sides = (resize, resize) if shortest else tuple(resize)
  # A little less, so that rounding in the division does not cost a pixel.
  share = math.nextafter(crop[0] / sides[0], 0.0)
  fits = [math.floor(side / share) for side in crop] == list(sides)
  if not fits:
    return dict(crop_mode='squash', crop_pct=1.0), [
      f'timm cannot resize to {resize} before cropping {crop}: it will resize '
      'the whole image, and its predictions will differ a little'
    ]
  mode = 'center' if shortest else 'squash'
  return dict(crop_mode=mode, crop_pct=share), []


def _timm_vit(model):
  """Returns timm's name of a ViT or hybrid, and its arguments there."""
  config, encoder = model.config, model.config.transformer
  architecture = 'vit_base_patch16_224'
  if config.get('resnet') is not None:
    name = identify.describe(model.params)
    if name not in _TIMM_HYBRIDS:
      raise ValueError(
        f'timm has no hybrid like {name}: it has {sorted(_TIMM_HYBRIDS)} (--to)'
      )
    architecture = _TIMM_HYBRIDS[name]
  return architecture, dict(
    img_size=model.image_size,
    patch_size=_one(config.patches.size),
    embed_dim=config.hidden_size,
    depth=encoder.num_layers,
    num_heads=encoder.num_heads,
    # timm truncates this product to an integer.
    mlp_ratio=math.nextafter(encoder.mlp_dim / config.hidden_size, math.inf),
    in_chans=identify.channels(model.params),
    class_token=config.classifier == 'token',
    global_pool='token' if config.classifier == 'token' else 'avg',
    fc_norm=False,
    act_layer='gelu_tanh' if encoder.get('gelu', 'tanh') == 'tanh' else 'gelu',
  )


def _timm_bit(model):
  """Returns timm's name of a BiT ResNet, and its arguments there."""
  config = model.config
  units, width = tuple(config.num_layers), config.width_factor
  if units not in _TIMM_BITS:
    raise ValueError(
      f'timm has no BiT ResNet of {units} units: it has {list(_TIMM_BITS)} (--to)'
    )
  architecture, factor = _TIMM_BITS[units]
  # timm multiplies these by the width factor of the architecture.
  channels = [int(256 * 2**i * width) // factor for i in range(len(units))]
  return architecture, dict(
    in_chans=identify.channels(model.params),
    stem_chs=int(64 * width) // factor,
    channels=channels,
    global_pool='avg',
  )


def hf(model) -> tuple[dict[str, dict], list[str]]:
  """Returns Hugging Face's JSON files of a ViT by name, and notes."""
  config = model.config
  encoder = config.transformer
  pooled = 'pre_logits' in model.params
  whole = model.num_classes and not pooled
  names = model.class_names or [f'LABEL_{i}' for i in range(model.num_classes)]
  height, width = model.image_size
  fields = dict(
    model_type='vit',
    architectures=['ViTForImageClassification' if whole else 'ViTModel'],
    hidden_size=config.hidden_size,
    num_hidden_layers=encoder.num_layers,
    num_attention_heads=encoder.num_heads,
    intermediate_size=encoder.mlp_dim,
    hidden_act='gelu_pytorch_tanh'
    if encoder.get('gelu', 'tanh') == 'tanh'
    else 'gelu',
    layer_norm_eps=encoder.get('norm_eps', 1e-6),
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    qkv_bias=True,
    image_size=_one(model.image_size),
    patch_size=_one(config.patches.size),
    num_channels=identify.channels(model.params),
    pooler_act='tanh',
    pooler_output_size=config.get('representation_size') or config.hidden_size,
    id2label={str(i): name for i, name in enumerate(names)},
    label2id={name: i for i, name in enumerate(names)},
  )
  resize = model.image_size if model.resize is None else model.resize
  processor = dict(
    image_processor_type='ViTImageProcessor',
    do_resize=True,
    size=dict(shortest_edge=resize)
    if isinstance(resize, int)
    else dict(height=resize[0], width=resize[1]),
    resample=2,
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    image_mean=_pixels(model.params)['mean'],
    image_std=_pixels(model.params)['std'],
  )
  if model.resize is not None:
    # ViT's own processor does not crop in all versions.
    processor.update(
      image_processor_type='CLIPImageProcessor',
      do_center_crop=True,
      crop_size=dict(height=height, width=width),
    )
  notes = []
  if pooled and model.num_classes:
    notes.append(
      'ViTForImageClassification has no pre-logits layer: load it as ViTModel, '
      'whose pooler_output is the pre-logits; the head is in the file'
    )
  elif not whole:
    notes.append('load it as ViTModel(Config): the model has no classifier')
  return {'config.json': fields, 'preprocessor_config.json': processor}, notes


def _one(pair):
  """Returns one number for a square, else a list of two."""
  return pair[0] if pair[0] == pair[1] else list(pair)


def _pixels(params):
  """Returns the mean and deviation that map pixels in [0, 1] to [-1, 1]."""
  half = (0.5,) * identify.channels(params)
  return dict(mean=half, std=half)
