"""Tests of the models by name: published counts, configs, kinds."""

import json
import re

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import pytest

from tests import tiny_models
from vit_jax import (
  models,
  models_bit,
  models_detr,
  models_eomt,
  models_igpt,
  models_lit,
)
from vit_jax.configs import models as model_configs
from vit_jax.layers import encoder
from vit_jax.weights import identify

KINDS = tiny_models.of_every_kind()

# arXiv 2010.11929, 2106.10270 and 2105.01601, 1000 classes, no pre-logits layer.
COUNTS = {
  'testing': 21_390,
  'testing-unpooled': 21_370,
  'ViT-Ti_16': 5_717_416,
  'ViT-S_16': 22_050_664,
  'ViT-S_32': 22_878_952,
  'ViT-B_8': 86_576_872,
  'ViT-B_16': 86_567_656,
  'ViT-B_32': 88_224_232,
  'ViT-L_16': 304_326_632,
  'ViT-L_32': 306_535_400,
  'ViT-H_14': 632_045_800,
  'ViT-G_14': 1_844_440_680,
  'ViT-22B_14': 21_756_703_720,
  'ViT-S_16-gap-norep': 22_049_896,
  'ViT-S_32-gap-norep': 22_878_184,
  'ViT-B_16-gap-norep': 86_566_120,
  'ViT-B_32-gap-norep': 88_222_696,
  'R+ViT-Ti_16': 6_337_704,
  'R26+ViT-S_32': 36_431_912,
  'R26+ViT-B_32': 101_383_976,
  'R50+ViT-B_16': 98_659_112,
  'R50+ViT-L_32': 328_994_856,
  'R50+ViT-B_32': 110_945_832,
  'R50+ViT-L_16': 316_483_624,
  'Mixer-B_16': 59_880_472,
  'Mixer-B_32': 60_293_428,
  'Mixer-L_16': 208_196_168,
  # As in timm (images of 518 px, no classes), with the positions of 224 px, 1000 classes,
  # and a position of the class token where there are registers.
  'DINOv2-S_14': 22_056_192 - 1113 * 384 + 1000 * 385,
  'DINOv2-B_14': 86_579_712 - 1113 * 768 + 1000 * 769,
  'DINOv2-L_14': 304_367_616 - 1113 * 1024 + 1000 * 1025,
  'DINOv2-g_14': 1_136_479_232 - 1113 * 1536 + 1000 * 1537,
  'DINOv2-S_14-reg4': 22_057_344 - 1112 * 384 + 1000 * 385,
  'DINOv2-B_14-reg4': 86_582_016 - 1112 * 768 + 1000 * 769,
  'DINOv2-L_14-reg4': 304_370_688 - 1112 * 1024 + 1000 * 1025,
  'DINOv2-g_14-reg4': 1_136_483_840 - 1112 * 1536 + 1000 * 1537,
  # As in transformers: DINOv3 without its mask token, with 1000 classes; EoMT with 200
  # queries, 1000 classes, and a position of the class token. Biases of keys are added to
  # DINOv3's.
  'DINOv3-S_16': 21_596_544 - 384 + 12 * 384 + 1000 * 385,
  'DINOv3-B_16': 85_660_416 - 768 + 12 * 768 + 1000 * 769,
  'DINOv3-L_16': 303_129_600 - 1024 + 24 * 1024 + 1000 * 1025,
  'EoMT-S_16': 23_770_601 + 384,
  'EoMT-B_16': 93_251_561 + 768,
  'EoMT-L_16': 316_146_665 + 1024,
  'EoMT-g_16': 1_162_798_057 + 1536,
  'EoMT-DINOv3-S_16': 23_690_729 + 12 * 384,
  'EoMT-DINOv3-B_16': 93_091_817 + 12 * 768,
  'EoMT-DINOv3-L_16': 315_921_385 + 24 * 1024,
  # arXiv 1912.11370, 1000 classes.
  'BiT-R50x1': 25_549_352,
  'BiT-R50x2': 97_988_712,
  'BiT-R50x3': 217_319_080,
  'BiT-R101x1': 44_541_480,
  'BiT-R101x3': 387_934_888,
  'BiT-R152x1': 60_185_128,
  'BiT-R152x2': 236_335_208,
  'BiT-R152x4': 936_533_224,
  'BiT-R200x3': 568_633_000,
}


def published_shapes(name):
  """Returns shapes by path; layers and units that are alike are traced only once."""
  config = model_configs.get_config(name)
  depth, units = 0, ()
  if 'transformer' in config:
    depth, config.transformer.num_layers = config.transformer.num_layers, 1
    if 'num_query_layers' in config:
      config.num_query_layers = 1
  elif 'num_blocks' in config:
    depth, config.num_blocks = config.num_blocks, 1
  stages = config if 'num_layers' in config else config.get('resnet')
  if stages:
    units = stages.num_layers
    stages.num_layers = tuple(min(2, count) for count in units)
  result = {}
  for path, leaf in tiny_models.shapes(
    models.make_model(config, num_classes=1000)
  ).items():
    layer = re.search(r'(encoderblock|MixerBlock)_(0)/', path)
    unit = re.search(r'block(\d)/unit(0?2)/', path)
    match = layer or unit
    numbers = [0]
    if layer:
      numbers = range(depth)
    elif unit:
      numbers = range(2, 1 + units[int(unit[1]) - 1])
    for i in numbers:
      start, end = match.span(2) if match else (0, 0)
      number = f'{i:0{end - start}d}' if match else ''
      result[path[:start] + number + path[end:]] = leaf
  return result


@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts_match_published_ones(name):
  leaves = published_shapes(name)
  params = flax.traverse_util.unflatten_dict(leaves, sep='/')
  if name not in model_configs.TESTING:
    assert identify.describe(params) == name
  assert sum(leaf.size for leaf in leaves.values()) == COUNTS[name]


def test_large_models_have_the_published_size():
  """arXiv 2106.04560, table 2, and 2302.05442, table 1, in millions."""
  for name, published in (('ViT-G_14', 1843), ('ViT-22B_14', 21743)):
    assert COUNTS[name] == pytest.approx(published * 1e6, rel=1e-3)


def test_gigantic_is_not_giant():
  assert model_configs.get_config('gigantic14').model_name == 'ViT-G_14'
  with pytest.raises(ValueError, match="'g14' is unknown.*gigantic14"):
    model_configs.get_config('g14')


def test_functions_and_short_names_give_the_same_config():
  for short, name in model_configs.SHORT_NAMES.items():
    config = getattr(model_configs, f'get_{short}_config')()
    assert config == model_configs.MODEL_CONFIGS[name]
    assert config.model_name == name
  assert model_configs.SHORT_NAMES['r50_l32'] == 'R50+ViT-L_32'
  assert model_configs.SHORT_NAMES['b16'] == 'ViT-B_16'


# Keys of the original's MODEL_CONFIGS and AUGREG_CONFIGS, except LiT's.
NAMES = (
  'testing', 'testing-unpooled', 'ViT-Ti_16', 'ViT-S_16', 'ViT-B_16', 'ViT-L_16',
  'ViT-H_14', 'ViT-S_16-gap-norep', 'ViT-B_16-gap-norep', 'ViT-B_8', 'ViT-S_32',
  'ViT-B_32', 'ViT-L_32', 'ViT-S_32-gap-norep', 'ViT-B_32-gap-norep', 'R+ViT-Ti_16',
  'R50+ViT-B_16', 'R26+ViT-B_32', 'R26+ViT-S_32', 'R50+ViT-L_32', 'Mixer-B_16',
  'Mixer-B_32', 'Mixer-L_16',
)  # fmt: skip
AUGREG = (
  'Ti_16', 'S_16', 'B_16', 'L_16', 'S_16-gap-norep', 'B_16-gap-norep', 'B_8',
  'S_32', 'B_32', 'S_32-gap-norep', 'B_32-gap-norep', 'R_Ti_16', 'R26_B_32',
  'R26_S_32', 'R50_L_32',
)  # fmt: skip


def test_every_name_of_the_original_is_a_model():
  assert set(NAMES) <= set(model_configs.MODEL_CONFIGS)
  assert set(AUGREG) == set(model_configs.AUGREG_CONFIGS)
  for name in NAMES + AUGREG:
    models.get_model(name, num_classes=3)


@pytest.mark.parametrize(
  'name, short',
  [
    ('vit_base_patch16_224', 'b16'),  # timm.
    ('vit_large_patch14_dinov2.lvd142m', 'dinov2_l14'),
    ('vit_small_patch14_reg4_dinov2.lvd142m', 'dinov2_s14_reg4'),
    ('vit_b_16', 'b16'),  # torchvision.
    ('google/vit-huge-patch14-224-in21k', 'h14'),  # Hugging Face.
    ('facebook/dinov2-giant', 'dinov2_g14'),
    ('facebook/dinov2-with-registers-base', 'dinov2_b14_reg4'),
    ('facebook/dinov3-vitl16-pretrain-lvd1689m', 'dinov3_l16'),
    ('vit_base_patch16_dinov3.lvd1689m', 'dinov3_b16'),
    ('dinov2_vits14', 'dinov2_s14'),  # PyTorch's hub.
  ],
)
def test_names_of_other_libraries_are_translated(name, short):
  with pytest.raises(ValueError, match=f"is unknown: did you mean '{short}'"):
    models.get_model(name, num_classes=3)


def test_models_are_listed():
  assert models.list_models('*DINO*reg4') == [
    'dinov2_s14_reg4', 'dinov2_b14_reg4', 'dinov2_l14_reg4', 'dinov2_g14_reg4',
  ]  # fmt: skip
  assert models.list_models('BiT-R50*') == ['bit_r50x1', 'bit_r50x2', 'bit_r50x3']
  assert models.list_models() == list(model_configs.SHORT_NAMES)


def test_unknown_models_and_fields_are_named():
  with pytest.raises(
    ValueError, match="model 'b17' is unknown: did you mean 'b1[46]'.* use one of.*b16"
  ):
    models.get_model('b17', num_classes=3)
  with pytest.raises(ValueError, match=r"unknown fields \['hiden_size'\]"):
    models.get_model('b16', num_classes=3, hiden_size=3)
  config = model_configs.get_b16_config()
  config.transformer.num_layer = 3
  with pytest.raises(ValueError, match=r"unknown fields \['num_layer'\]"):
    models.make_model(config, num_classes=3)


def test_every_config_has_a_kind():
  for name, config in model_configs.MODEL_CONFIGS.items():
    kind, cls = {
      'Mixer': ('mixer', models.MlpMixer),
      'BiT': ('bit', models_bit.BitResNet),
      'DETR': ('detr', models_detr.Detr),
      'EoMT': ('eomt', models_eomt.Eomt),
      'iGPT': ('igpt', models_igpt.ImageGPT),
      'LiT': ('lit', models_lit.LitModel),
    }.get(name.split('-')[0], ('vit', models.VisionTransformer))
    # Other implementations of the original's models take no field `kind`.
    assert ('kind' in config) == (kind not in ('vit', 'mixer'))
    assert models.kind_of(config) == kind
    classes = {} if kind == 'lit' else {'num_classes': 3}
    assert type(models.make_model(config, **classes)) is cls


def test_config_may_name_its_kind():
  config = model_configs.get_config('mixer_b16')
  with config.unlocked():
    config.kind = 'mixer'
  assert models.make_model(config, num_classes=3).num_blocks == 12
  config.kind = 'vit'
  with pytest.raises(ValueError, match=r"unknown fields \['channels_mlp_dim'"):
    models.make_model(config, num_classes=3)
  config.kind = 'rnn'
  with pytest.raises(ValueError, match="kind='rnn' is unknown: use one of vit, mixer"):
    models.make_model(config, num_classes=3)


class Linear(nn.Module):
  """A user's model, with an additional field."""

  num_classes: int
  shift: float = 0.0
  dtype: str = 'float32'

  @nn.compact
  def __call__(self, x, *, train):
    del train
    x = x.reshape(len(x), -1) + self.shift
    return nn.Dense(self.num_classes, dtype=self.dtype)(x)


def test_users_can_register_kinds(monkeypatch):
  monkeypatch.setattr(models, 'KINDS', dict(models.KINDS))
  models.register('linear', Linear)
  models.register('linear', Linear)  # As when a notebook cell is run twice.
  config = {'kind': 'linear', 'shift': 2.0, 'dtype': 'bfloat16'}
  model = models.make_model(config, num_classes=3)
  assert model == Linear(num_classes=3, shift=2.0, dtype='bfloat16')
  with pytest.raises(ValueError, match=r"fields \['shaft'\]: Linear takes"):
    models.make_model(config, num_classes=3, shaft=1.0)
  with pytest.raises(ValueError, match="kind='vit' is taken by .*Transformer"):
    models.register('vit', Linear)


@pytest.mark.parametrize(
  'name', ['b16', 'r50_b16', 'mixer_b16', 'bit_r50x1', 'detr_r50', 'igpt_s', 'lit_b16b']
)
def test_models_are_static_arguments_of_jit(name):
  config = model_configs.get_config(name)
  fields = {} if name == 'lit_b16b' else {'num_classes': 3}
  model = models.make_model(config, **fields)
  stored = json.loads(config.to_json())  # Lists for tuples, dicts for ConfigDicts.
  same = models.make_model(stored, **fields)
  other = models.make_model(config, dtype='bfloat16', **fields)
  assert (model == same, model == other) == (True, False)
  traced = []

  def trace(model, x):
    traced.append(model)
    return x

  function = jax.jit(trace, static_argnums=0)
  for argument in (model, same, other):
    function(argument, 1)
  assert traced == [model, other]


@pytest.mark.parametrize('name', KINDS)
def test_models_of_every_kind_are_hashable(name):
  model, same = KINDS[name][0], tiny_models.of_every_kind()[name][0]
  assert model == same
  assert hash(model) == hash(same)
  assert model != model.copy(dtype='bfloat16')


class Wide(encoder.Encoder):
  """An encoder with an additional field."""

  wide: bool = True


class Task(models.VisionTransformer):
  """A task's own model."""

  encoder: type[nn.Module] = Wide
  patches_hidden: int = 0


def test_task_may_provide_its_own_class():
  config = model_configs.get_config('testing')
  model = models.make_model(config, Task, num_classes=3, patches_hidden=2)
  assert isinstance(model, Task)
  assert (model.patches_hidden, model.num_classes) == (2, 3)
  by_name = models.get_model('testing', cls=Task, num_classes=3, kind='own')
  assert isinstance(by_name, Task)
  with pytest.raises(ValueError, match=r"\['patches_hiden'\]: Task takes"):
    models.make_model(config, Task, num_classes=3, patches_hiden=2)
  # The fields of `transformer` are the fields of its encoder.
  config.transformer.wide = False
  models.make_model(config, Task, num_classes=3)
  with pytest.raises(ValueError, match=r"\['wide'\]: Encoder takes"):
    models.make_model(config, num_classes=3)


@pytest.mark.parametrize('name', ['testing', 'mixer_b16', 'bit_r50x1'])
@pytest.mark.parametrize(
  'shape, dtype, message',
  [
    ((2, 32, 32, 3), jnp.uint8, r'images are uint8: pass floats.*127\.5 - 1'),
    ((2, 3, 32, 32), jnp.float32, r'batch, channels, height.*transpose\(0, 2, 3, 1\)'),
  ],
)
@pytest.mark.usefixtures('unchecked_shapes')
def test_images_of_other_libraries_are_named(name, shape, dtype, message):
  model = models.get_model(name, num_classes=3)
  images = jax.ShapeDtypeStruct(shape, dtype)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), images)
