"""Tests of the pre-training recipes against the published tables."""

import math

import jax
import jax.numpy as jnp
import ml_collections
from PIL import Image
import pytest

from vit_jax import models as models_lib
from vit_jax.configs import (
  augreg_pretrain,
  common,
  detr,
  detr_panoptic,
  models,
  pretrain,
  segment_ade20k,
  vit_i1k,
  vit_s16_i1k,
)
from vit_jax.data.augmentation import canvases
from vit_jax.learning import optim, schedules
from vit_jax.run import config as run_config, evaluators as run_evaluators
from vit_jax.tasks.detection import boxes

# arXiv 2010.11929, T3: models, data, epochs, base learning rate, decay, weight
# decay, dropout.
TABLE_3 = [
  ('b16 b32', 'jft300m', '7', 8e-4, 'linear', 0.1, 0),
  ('l32', 'jft300m', '7', 6e-4, 'linear', 0.1, 0),
  ('l16', 'jft300m', '7 14', 4e-4, 'linear', 0.1, 0),
  ('h14', 'jft300m', '14', 3e-4, 'linear', 0.1, 0),
  ('bit_r50x1 bit_r50x2', 'jft300m', '7', 1e-3, 'linear', 0.1, None),
  ('bit_r101x1', 'jft300m', '7', 8e-4, 'linear', 0.1, None),
  ('bit_r152x1 bit_r152x2', 'jft300m', '7', 6e-4, 'linear', 0.1, None),
  ('r50_b16 r50_b32', 'jft300m', '7', 8e-4, 'linear', 0.1, 0),
  ('r50_l32', 'jft300m', '7', 2e-4, 'linear', 0.1, 0),
  ('r50_l16', 'jft300m', '7 14', 4e-4, 'linear', 0.1, 0),
  ('b16 b32', 'imagenet21k', '90', 1e-3, 'linear', 0.03, 0.1),
  ('l16 l32', 'imagenet21k', '30 90', 1e-3, 'linear', 0.03, 0.1),
  ('b16 b32 l16 l32', 'imagenet2012', '300', 3e-3, 'cosine', 0.3, 0.1),
]
ROWS = [
  (model, data, int(epochs), lr, decay, weight_decay, dropout)
  for names, data, lengths, lr, decay, weight_decay, dropout in TABLE_3
  for model in names.split()
  for epochs in lengths.split()
]


# arXiv 2106.10270: RandAugment's layers and magnitude, mixup's p.
AUGMENTATIONS = {
  'none': ((), 0.0),
  'light1': ((2, 0), 0.0),
  'light2': ((2, 10), 0.2),
  'medium1': ((2, 15), 0.2),
  'medium2': ((2, 15), 0.5),
  'strong1': ((2, 20), 0.5),
  'strong2': ((2, 20), 0.8),
}


def augmentation(config):
  """Returns RandAugment and mixup of a config."""
  return config.pp.randaugment, config.task_options.mixup


def transformer_field(config, name):
  """Returns a field of the encoder; None where there is no encoder."""
  return config.model.get('transformer', {}).get(name)


@pytest.mark.parametrize('row', ROWS, ids=lambda row: ','.join(map(str, row[:3])))
def test_pre_training_matches_table_3(row):
  model, data, epochs, *_ = row
  config = pretrain.get_config(f'{model},{data},{epochs}ep')
  assert row == (
    models.short_name(config.model.model_name), config.dataset,
    config.total_epochs, config.base_lr, config.decay_type,
    config.weight_decay, transformer_field(config, 'dropout_rate'),
  )  # fmt: skip
  assert (config.batch, config.warmup_steps) == (4096, 10_000)
  assert (config.total_steps, config.warmup_epochs) == (None, None)
  assert (config.pp.crop, config.pp.flip) == (224, True)
  assert (config.pp.crop_area, config.pp.randaugment) == ((0.05, 1.0), ())
  assert (config.optimizer, config.b1, config.b2) == ('adam', 0.9, 0.999)
  assert not config.independent_weight_decay
  assert transformer_field(config, 'attention_dropout_rate') in (0, None)
  # B.1: stated for ImageNet only.
  assert config.grad_norm_clip == (1 if data == 'imagenet2012' else 0)
  assert config.label_smoothing == 0
  if data == 'imagenet2012':
    assert config.loss == 'softmax'
    assert config.model.representation_size is None
    return
  assert config.loss == 'sigmoid'  # Issue #34 of the original; #2 for the head.
  assert config.model.head_bias_init == -10
  if 'transformer' in config.model:
    assert config.model.representation_size == config.model.hidden_size
  run_evaluators.check(run_config.complete(config))


def test_linear_decay_ends_at_the_stated_value():
  """Issue #2, and 14 x 303e6 / 4096 = 1.036M steps of H/14."""
  config = run_config.resolve_steps(pretrain.get_config('h14,jft300m'), 303_000_000)
  assert config.total_steps == 1_035_645
  schedule = schedules.create_learning_rate_schedule(
    config.total_steps, config.base_lr, config.decay_type, config.warmup_steps
  )
  assert float(schedule(config.total_steps)) == pytest.approx(1e-5)
  assert float(schedule(9_999)) == pytest.approx(3e-4)


@pytest.mark.parametrize(
  'arg, epochs',
  [('l16,jft300m', 14), ('ti16,imagenet21k', 90), ('ViT-L_16,imagenet21k', 90)],
)
def test_recipe_defaults_to_the_longest_training(arg, epochs):
  assert pretrain.get_config(arg).total_epochs == epochs


@pytest.mark.parametrize('data', ['imagenet21k', '/some/folder'])
def test_recipes_apply_to_models_without_an_encoder(data):
  config = pretrain.get_config(f'mixer_b16,{data}')
  run_evaluators.check(run_config.complete(config))


@pytest.mark.parametrize('name', AUGMENTATIONS)
def test_augmentation_matches_augreg(name):
  config = common.get_config()
  config.pp.randaugment = (9, 9)
  config.task_options = {'other': 3}
  common.set_augmentation(config, name)
  assert augmentation(config) == AUGMENTATIONS[name]
  assert config.task_options.other == 3
  run_config.check_preprocessing(config.pp)


def test_recipe_is_independent_of_the_data_set():
  default = pretrain.get_config('b16,imagenet21k')
  config = pretrain.get_config('b16,/some/folder,imagenet21k')
  assert config.dataset == '/some/folder'
  assert (config.pp.train, config.pp.test) == ('train', 'test')
  config.dataset, config.pp = default.dataset, default.pp
  assert config.to_dict() == default.to_dict()
  other = pretrain.get_config('b16,imagenet2012,other,medium1')
  assert other.total_epochs == pretrain.OTHER['total_epochs']
  assert other.batch == pretrain.OTHER['batch']
  assert other.pp.randaugment == (2, 15)
  jft = pretrain.get_config('l16,/some/folder,7ep,jft300m')
  assert (jft.total_epochs, jft.base_lr) == (7, 4e-4)
  # JFT-300M has no settings for S/16.
  assert pretrain.get_config('s16,jft300m').loss == 'softmax'


@pytest.mark.parametrize(
  'arg, message',
  [
    ('heavy', "'heavy' is unknown: use recipe imagenet2012, imagenet21k, jft3"),
    ('light1,light2', "'light1' and 'light2': .*one augmentation"),
    ('jft300m', "'jft300m' has no settings for the model 's16': use one of b16"),
    ('imagenet21k,30ep', "'s16' for 90 epochs, not '30ep': .*total_epochs=30"),
    ('30ep', "the recipe here is 'other': set --config.total_epochs=30"),
  ],
)  # fmt: skip
def test_wrong_recipes_are_named(arg, message):
  with pytest.raises(ValueError, match=message):
    pretrain.get_config(f's16,cifar10,{arg}')


def test_wrong_arguments_are_named():
  for module in (pretrain, augreg_pretrain):
    with pytest.raises(ValueError, match='must be MODEL,DATA'):
      module.get_config('b16')
    with pytest.raises(ValueError, match="model 'b17' is unknown"):
      module.get_config('b17,cifar10')


def check_big_vision(config):
  """Checks what the recipes of big_vision share."""
  assert (config.optimizer, config.b1, config.b2) == ('adam', 0.9, 0.999)
  assert (config.base_lr, config.decay_type) == (1e-3, 'cosine')
  assert (config.warmup_steps, config.total_steps) == (10_000, None)
  assert (config.grad_norm_clip, config.optim_dtype) == (1, 'bfloat16')
  assert (config.pp.crop, config.pp.resize) == (224, 256)
  assert (config.pp.crop_area, config.pp.flip) == ((0.05, 1.0), True)
  assert (config.label_smoothing, config.ema_decay) == (0, 0)
  assert config.model.transformer.attention_dropout_rate == 0
  run_evaluators.check(run_config.complete(config))


@pytest.mark.parametrize(
  'arg, name',
  [
    ('ti16', 'light1'), ('s32', 'medium1'), ('s16', 'medium2'),
    ('h14,imagenet2012,strong1', 'strong1'), ('b16,/some/folder', 'medium2'),
  ],
)  # fmt: skip
def test_vit_i1k_matches_big_vision(arg, name):
  config = vit_i1k.get_config(arg)
  check_big_vision(config)
  assert (config.weight_decay, config.independent_weight_decay) == (1e-4, True)
  assert (config.batch, config.total_epochs) == (4096, 300)
  assert (config.loss, config.model.head_bias_init) == ('sigmoid', -6.9)
  assert config.model.head_bias_init == pytest.approx(-math.log(1000), abs=0.01)
  assert config.model.classifier == 'token'
  assert config.model.representation_size == config.model.hidden_size
  assert config.model.transformer.dropout_rate == 0
  assert augmentation(config) == AUGMENTATIONS[name]
  if '/' in arg:
    assert (config.dataset, config.pp.train) == ('/some/folder', 'train')
  else:
    assert (config.pp.train, config.pp.test) == ('train[:99%]', 'validation')


def test_vit_s16_i1k_matches_big_vision():
  config = vit_s16_i1k.get_config()
  check_big_vision(config)
  assert (config.weight_decay, config.independent_weight_decay) == (1e-4, True)
  assert (config.batch, config.total_epochs) == (1024, 90)
  assert config.loss == 'softmax'
  assert augmentation(config) == ((2, 10), 0.2)
  assert (config.pp.train, config.pp.test) == ('train[:99%]', 'validation')
  model = config.model
  assert (model.hidden_size, model.transformer.num_layers) == (384, 12)
  assert (model.patches.size, model.classifier) == ((16, 16), 'gap')
  assert model.transformer.position_embedding == 'sincos2d'
  assert (model.representation_size, model.transformer.dropout_rate) == (384, 0)
  assert vit_s16_i1k.get_config('/some/folder').dataset == '/some/folder'


@pytest.mark.parametrize(
  'model, name',
  [('ti16', 'none'), ('s32', 'none'), ('s16', 'light1'), ('b32', 'light2'),
   ('b16', 'light2'), ('l16', 'medium2')],
)  # fmt: skip
def test_augreg_on_imagenet21k(model, name):
  config = augreg_pretrain.get_config(f'{model},imagenet21k')
  check_big_vision(config)
  assert (config.batch, config.total_epochs) == (4096, 300)
  assert (config.loss, config.model.head_bias_init) == ('sigmoid', -10)
  # As in big_vision: 1e-4, independent of the learning rate.
  assert not config.independent_weight_decay
  assert config.weight_decay * config.base_lr == pytest.approx(1e-4)
  assert config.model.representation_size is None
  assert config.model.transformer.dropout_rate == 0
  assert config.model.transformer.stochastic_depth == 0
  assert augmentation(config) == AUGMENTATIONS[name]
  explicit = augreg_pretrain.get_config(
    f'{model},imagenet21k,do_0.0,{name},300ep,wd_0.1'
  )
  assert explicit.to_dict() == config.to_dict()


def test_augreg_on_imagenet():
  config = augreg_pretrain.get_config('b16,imagenet2012,wd_0.03,do_0.1')
  check_big_vision(config)
  assert (config.loss, config.model.head_bias_init) == ('sigmoid', -6.9)
  assert config.weight_decay == 0.03
  assert config.model.transformer.dropout_rate == 0.1
  assert config.model.transformer.stochastic_depth == 0.1
  assert augmentation(config) == AUGMENTATIONS['medium2']
  short = augreg_pretrain.get_config('b16,imagenet21k,30ep')
  assert short.total_epochs == 30


def test_grid_of_augreg():
  """Seven augmentations, two weight decays, with and without dropout."""
  args = list(augreg_pretrain.grid('r26_s32', 'imagenet21k'))
  configs = [augreg_pretrain.get_config(arg) for arg in args]
  settings = {
    (
      augmentation(config), config.weight_decay,
      config.model.transformer.dropout_rate,
      config.model.transformer.stochastic_depth,
    )
    for config in configs
  }  # fmt: skip
  assert len(args) == 28
  assert settings == {
    (setting, weight_decay, rate, rate)
    for setting in AUGMENTATIONS.values()
    for weight_decay in (0.03, 0.1)
    for rate in (0.0, 0.1)
  }


@pytest.mark.parametrize(
  'module, arg, message',
  [
    (detr_panoptic, 'r50,x', "'r50,x' must be MODEL,DATA,PART"),
    (detr, 'r50', "'r50' must be MODEL,DATA or MODEL,DATA,LENGTH"),
    (detr, 'r18,coco/2017', "model 'r18' is unknown: use one of r50, r50_dc5, r101"),
    (detr, 'r50,x,9ep', "'9ep' is unknown: use one of 300ep, 500ep"),
    (vit_i1k, 'h14', "no augmentation is published for the model 'h14', only"),
    (vit_i1k, 'b16,x,light1,30ep', 'must be MODEL,DATA or'),
    (vit_i1k, 'b16,x,heavy', "augmentation 'heavy' is unknown: use one of none"),
    (vit_i1k, 'mixer_b16', "'mixer_b16' is not a Vision Transformer"),
    (augreg_pretrain, 'b16,x,wd_0.2', "'wd_0.2' is unknown.*wd_0.1, wd_0.03"),
    (augreg_pretrain, 'b16,x,do_0.1,do_0.0', "'do_0.0': .*one regularisat"),
  ],
)  # fmt: skip
def test_wrong_settings_are_named(module, arg, message):
  with pytest.raises(ValueError, match=message):
    module.get_config(arg)


# arXiv 2005.12872, section 4: units of the backbone, parameters, and trained
# parameters: the root and the first stage are frozen.
DETRS = {
  'r50': ((3, 4, 6, 3), False, 41_524_768, 41_302_368),
  'r50_dc5': ((3, 4, 6, 3), True, 41_524_768, 41_302_368),
  'r101': ((3, 4, 23, 3), False, 60_464_672, 60_242_272),
  'r101_dc5': ((3, 4, 23, 3), True, 60_464_672, 60_242_272),
}


@pytest.mark.parametrize('name', DETRS)
def test_detr_matches_the_paper(name):
  config = detr.get_config(f'{name},coco/2017')
  run_evaluators.check(run_config.complete(config))
  assert (config.task, config.batch, config.total_epochs) == ('detect', 64, 300)
  assert (config.optimizer, config.b1, config.b2) == ('adam', 0.9, 0.999)
  assert (config.base_lr, config.warmup_steps) == (1e-4, 0)
  assert (config.weight_decay, config.weight_decay_on) == (1e-4, 'all')
  assert not config.independent_weight_decay
  assert (config.grad_norm_clip, config.optim_dtype) == (0.1, 'float32')
  assert (config.ema_decay, config.label_smoothing) == (0, 0)
  assert (config.pp.train, config.pp.test) == ('train', 'validation')
  options = dict(max_objects=100, class_weight=1.0, no_object_weight=0.1)
  options['tight'] = 64  # Evaluation only.
  assert run_config.options_of_task(config) == ml_collections.ConfigDict(options)
  assert (boxes.L1, boxes.GIOU) == (5.0, 2.0)
  # Appendix A.4.
  pp = config.pp
  assert pp.sides == (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
  assert (pp.eval_side, pp.longest_side, pp.flip) == (800, 1333, True)
  assert (pp.crop_sides, pp.crop_range) == ((400, 500, 600), (384, 600))
  assert (pp.randaugment, pp.color_jitter, pp.random_erasing) == ((), 0, 0)
  units, dilate_last, *_ = DETRS[name]
  model = models_lib.make_model(config.model, num_classes=91)
  assert models_lib.get_model(f'detr_{name}', num_classes=91) == model
  expected = dict(
    units=units, dilate_last=dilate_last, backbone_width=64,
    norm='frozen_batch', hidden_size=256, num_queries=100, num_encoder_layers=6,
    num_decoder_layers=6, num_heads=8, mlp_dim=2048, dropout_rate=0.1,
    attention_dropout_rate=0.1,
  )  # fmt: skip
  assert {key: getattr(model, key) for key in expected} == expected


def test_detr_scales_small_images_like_coco(tmp_path):
  def lengths(folder):
    return detr.get_config(f'vit_ti16,{folder}').pp

  for i, size in enumerate([(640, 480)] * 2 + [(640, 427)] * 8):
    Image.new('RGB', size).save(tmp_path / f'{i}.jpg')
  pp, published = lengths(tmp_path), lengths('coco/2017')
  for key in ('sides', 'eval_side', 'longest_side', 'crop_sides', 'crop_range'):
    assert pp[key] == published[key]
  inner = tmp_path / 'small' / 'train'
  inner.mkdir(parents=True)
  (inner / 'broken.png').write_text('no image')
  for i in range(9):
    Image.new('RGB', (96, 128)).save(inner / f'{i}.png')
  pp = lengths(inner.parent)
  # A shorter side of 96 pixels instead of 480.
  assert (min(pp.sides), max(pp.sides), pp.eval_side) == (96, 160, 160)
  assert (pp.crop_sides, pp.crop_range) == ((80, 100, 120), (77, 120))
  assert pp.longest_side == 267
  assert max(group.canvas for group in canvases.groups(pp)) == (288, 288)


@pytest.mark.parametrize('name', ['r50', 'r101'])
def test_detr_freezes_the_root_and_first_stage(name):
  *_, count, trained = DETRS[name]
  config = detr.get_config(f'{name},coco/2017')
  model = models_lib.make_model(config.model, num_classes=91)
  shapes = jax.eval_shape(
    lambda: model.init(jax.random.key(0), jnp.zeros((1, 64, 64, 3)), train=False)
  )['params']
  assert sum(x.size for x in jax.tree.leaves(shapes)) == count
  factors = optim.multipliers(config.lr_multipliers, shapes)
  assert (
    count - sum(optim.frozen_sizes(config.lr_multipliers, shapes).values()) == trained
  )
  assert factors['backbone']['block2']['unit1']['conv1']['kernel'] == 0.1
  others = {key: x for key, x in factors.items() if key != 'backbone'}
  assert set(jax.tree.leaves(others)) == {1.0}


@pytest.mark.parametrize('length, drop', [('300ep', 200), ('500ep', 400)])
def test_detr_learning_rate_drop(length, drop):
  config = detr.get_config(f'r50,coco/2017,{length}')
  assert config.decay_type == 'staircase'
  assert config.decay_at == (pytest.approx(drop / config.total_epochs),)


def test_detr_for_segmentation_matches_the_paper():
  """Section 4.4: the mask head takes 25 epochs, with the detector frozen."""
  data = 'r50,coco/2017_panoptic'
  boxes, masks, both = (
    detr_panoptic.get_config(f'{data},{part}') for part in detr_panoptic.PARTS
  )
  for config in (boxes, masks, both):
    run_evaluators.check(run_config.complete(config))
    assert (config.task, config.base_lr) == ('segment', 1e-4)
  assert not boxes.model.get('mask_head')
  assert masks.model.mask_head
  assert both.model.mask_head
  assert (boxes.total_epochs, both.total_epochs) == (300, 300)
  assert (masks.total_epochs, masks.decay_at) == (25, (0.6,))
  model = models_lib.make_model(masks.model, num_classes=133)
  shapes = jax.eval_shape(
    lambda: model.init(jax.random.key(0), jnp.zeros((1, 64, 64, 3)), train=False)
  )['params']
  head = sum(x.size for x in jax.tree.leaves(shapes['segmentation']))
  assert head == 1_333_657
  everything = sum(x.size for x in jax.tree.leaves(shapes))
  frozen = sum(optim.frozen_sizes(masks.lr_multipliers, shapes).values())
  assert everything - frozen == head


# The released configs of EoMT: layers that read queries.
EOMT_LAYERS = {
  'eomt_s16': 3, 'eomt_b16': 3, 'eomt_l16': 4, 'eomt_g16': 5, 'eomt_dinov3_l16': 4
}  # fmt: skip


@pytest.mark.parametrize('model', [*EOMT_LAYERS, 'dinov2_s14', 'dinov3_l16'])
def test_ade20k_matches_the_released_configs(model):
  """Of github.com/tue-mps/eomt and of DINOv2; 40,000 updates of 16 as in both."""
  config = run_config.complete(segment_ade20k.get_config(f'{model},/data'))
  run_evaluators.check(config)
  assert (config.batch, config.total_steps) == (16, 40_000)
  options, is_eomt = config.task_options, model in EOMT_LAYERS
  assert options.reduce_zero_label
  rate = schedules.create_learning_rate_schedule(
    config.total_steps,
    config.base_lr,
    config.decay_type,
    config.warmup_steps,
    decay_args=config.decay_args,
  )
  if is_eomt:
    assert config.model.num_queries == 100
    assert config.model.num_query_layers == EOMT_LAYERS[model]
    assert (options.num_points, options.class_weight) == (12_544, 2.0)
    assert (config.layer_decay, config.weight_decay) == (0.8, 0.05)
    middle = 1_000 + 39_000 // 2
    assert rate(middle) == pytest.approx(1e-4 * 0.5**0.9, rel=1e-3)
    assert (options.window, options.stride) == (512, None)
  else:
    assert config.lr_multipliers == (('head', 1.0), ('', 0.0))
    size = 518 if model == 'dinov2_s14' else 512
    assert (options.window, options.stride) == (size, 341)
    assert options.max_class_share == 0.75
    assert rate(1_500) == pytest.approx(1e-3)
  task_class = run_config.get_task(config.task)
  task = task_class(config, task_class.planned_metadata(config, 150))
  assert len(task.classes) == 150
