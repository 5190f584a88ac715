"""Tests of the configs against the tables of the papers."""

import importlib
import inspect
import pathlib

import numpy as np
import pytest

from tests import commands, models_test, stored_runs
from vit_jax import models_bit, models_mixer, models_resnet, models_vit
from vit_jax.commands import train as train_command
from vit_jax.configs import (
  augreg,
  bit_hyperrule,
  bit_pretrain,
  common,
  models,
  pretrain,
  schema,
  vit,
)
from vit_jax.run import config as run_config, evaluators as run_evaluators, workdir

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs'
LIBRARY = ('common', 'models', 'schema', 'studies', 'synonyms', 'task_options')


def test_every_config_starts_with_its_command_and_is_valid():
  for path in CONFIGS.glob('*.py'):
    module = importlib.import_module(f'vit_jax.configs.{path.stem}')
    if path.stem in LIBRARY:
      continue
    assert f'--config=configs/{path.name}' in module.__doc__
    runs = list(commands.runs_in(module.get_config()))
    assert runs or path.stem == 'inference_time'
    for run in runs:
      run_evaluators.check(run_config.complete(run))


@pytest.mark.parametrize(
  'arg, epochs, drops, loss',
  [
    # arXiv 1912.11370, section 3.2: BiT-S, BiT-M and BiT-L.
    ('bit_r50x1,imagenet2012', 90, (30, 60, 80), 'softmax'),
    ('bit_r101x3,/some/folder,imagenet21k', 90, (30, 60, 80), 'sigmoid'),
    ('bit_r152x4,jft300m', 40, (10, 23, 30, 37), 'sigmoid'),
  ],
)
def test_bit_pre_training_matches_the_paper(arg, epochs, drops, loss):
  config = bit_pretrain.get_config(arg)
  assert (config.total_epochs, config.decay_type) == (epochs, 'staircase')
  np.testing.assert_allclose(np.multiply(config.decay_at, epochs), drops)
  assert (config.batch, config.warmup_steps) == (4096, 5_000)
  assert (config.optimizer, config.momentum) == ('sgd', 0.9)
  assert config.base_lr == 0.03 * 4096 / 256
  # Weight decay of SGD, through the momentum.
  assert (config.l2_decay, config.weight_decay) == (1e-4, 0)
  assert (config.grad_norm_clip, config.optim_dtype) == (0, 'float32')
  assert (config.loss, config.pp.crop) == (loss, 224)
  assert config.pretrained_dir is None


def test_bit_pre_training_names_wrong_arguments():
  for arg, message in (
    ('bit_r50x1', 'must be MODEL,DATA or MODEL,DATA,RECIPE'),
    ('bit_r50x1,/some/folder', "recipe '/some/folder' is unknown: use one of"),
  ):
    with pytest.raises(ValueError, match=message):
      bit_pretrain.get_config(arg)


@pytest.mark.parametrize(
  'data, steps, warmup, mixup, resized, crop',
  [
    # bit_hyperrule.py of github.com/google-research/big_transfer.
    ('oxford_flowers102', 500, 100, None, 512, 480),
    ('oxford_iiit_pet', 500, 100, None, 512, 480),
    ('cifar10', 10_000, 500, 0.1, 160, 128),
    ('imagenet2012', 20_000, 500, 0.1, 512, 480),
    ('/some/folder,19999,95', 500, 100, None, 160, 128),
    ('/some/folder,20000,96', 10_000, 500, 0.1, 512, 480),
    ('/some/folder,499999,500', 10_000, 500, 0.1, 512, 480),
    ('/some/folder,500000,500', 20_000, 500, 0.1, 512, 480),
    # arXiv 1912.11370, section 3.3.
    ('imagenet2012,paper', 20_000, 500, 0.1, 448, 384),
    ('cifar10,paper', 10_000, 500, 0.1, 160, 128),
    ('/some/folder,20000,96,paper', 10_000, 500, 0.1, 448, 384),
  ],
)
def test_bit_fine_tuning_matches_hyperrule(data, steps, warmup, mixup, resized, crop):
  config = bit_hyperrule.get_config(f'bit_r50x1,{data}')
  assert config.dataset == data.split(',')[0]
  assert (config.total_steps, config.warmup_steps) == (steps, warmup)
  assert (config.decay_type, config.decay_at) == ('staircase', (0.3, 0.6, 0.9))
  assert (config.base_lr, config.batch, config.momentum) == (0.003, 512, 0.9)
  assert config.weight_decay == config.l2_decay == config.grad_norm_clip == 0
  assert config.task_options.get('mixup') == mixup
  # Crops a fraction crop / resized of the height and of the width.
  assert (config.pp.crop, config.pp.crop_ratio) == (crop, None)
  np.testing.assert_allclose(np.sqrt(config.pp.crop_area), crop / resized)
  assert (config.pp.flip, config.pp.resize) == (True, None)


def test_largest_bit_model_uses_larger_images():
  assert bit_hyperrule.get_config('bit_r152x4,imagenet2012,paper').pp.crop == 480


def test_bit_hyperrule_needs_the_data_set_size():
  for arg, message in (
    ('bit_r50x1', 'must be MODEL,DATA or MODEL,DATA,EXAMPLES,PIXELS'),
    ('bit_r50x1,/some/folder,many,5', 'must be MODEL,DATA or MODEL,DATA,EX'),
    ('bit_r50x1,/some/folder', "'/some/folder' is not among .*,5000,500"),
  ):
    with pytest.raises(ValueError, match=message):
      bit_hyperrule.get_config(arg)


def test_defaults_match_the_originals_fine_tuning():
  config = common.get_config()
  assert (config.optimizer, config.momentum) == ('sgd', 0.9)
  assert (config.batch, config.batch_eval, config.base_lr) == (512, 512, 0.03)
  assert (config.grad_norm_clip, config.optim_dtype) == (1, 'bfloat16')
  assert config.weight_decay == 0
  assert config.pp.crop_area == (0.05, 1.0)
  assert ('config.pp.crop', 224) in common.flatten(config)


def test_splits_of_known_data_sets():
  config = common.set_dataset(common.get_config(), 'cifar10')
  assert (config.pp.train, config.pp.test) == ('train[:98%]', 'test')
  config = common.set_dataset(common.get_config(), '/some/folder')
  assert (config.pp.train, config.pp.test) == ('train', 'test')


@pytest.mark.parametrize(
  'dataset, steps, warmup, train, test, rates',
  [
    # arXiv 2010.11929, T4 and B.1.1: steps, held-out data, learning rates to try.
    ('imagenet2012', 20_000, 500, '99%', 'validation', [0.003, 0.01, 0.03, 0.06]),
    ('cifar10', 10_000, 500, '98%', 'test', [0.001, 0.003, 0.01, 0.03]),
    ('cifar100', 10_000, 500, '98%', 'test', [0.001, 0.003, 0.01, 0.03]),
    ('oxford_iiit_pet', 500, 100, '90%', 'test', [0.001, 0.003, 0.01, 0.03]),
    ('oxford_flowers102', 500, 100, '90%', 'test', [0.001, 0.003, 0.01, 0.03]),
  ],
)  # fmt: skip
def test_fine_tuning_matches_table_4(dataset, steps, warmup, train, test, rates):
  config = vit.get_config(f'l16,{dataset}')
  assert (config.total_steps, config.warmup_steps) == (steps, warmup)
  assert (config.pp.train, config.pp.test) == (f'train[:{train}]', test)
  assert list(common.FINE_TUNING[dataset][1]) == rates
  assert config.base_lr in rates
  assert (config.optimizer, config.momentum, config.batch) == ('sgd', 0.9, 512)
  assert (config.decay_type, config.grad_norm_clip) == ('cosine', 1.0)
  assert (config.weight_decay, config.ema_decay) == (0, 0)
  assert (config.pp.crop, config.pp.resize) == (384, None)
  assert config.model.representation_size is None
  preset = common.DATASET_PRESETS[dataset]
  assert (preset.total_steps, preset.pp.crop) == (steps, 384)


def test_fine_tuning_image_sizes():
  # T2: 512 px for L/16, 518 px for H/14, with Polyak averaging of .9999.
  for arg, crop, ema in (
    ('b16,cifar10', 384, 0),
    ('h14,imagenet2012', 378, 0),
    ('l16,imagenet2012,512', 512, 0.9999),
    ('h14,imagenet2012,518', 518, 0.9999),
    ('b32,/some/folder,224', 224, 0),
  ):
    config = vit.get_config(arg)
    assert (config.pp.crop, config.ema_decay) == (crop, ema)
  assert vit.get_config('b16,cifar10').base_lr == 0.01
  config = vit.get_config('b16,/some/folder')
  assert (config.dataset, config.pp.train) == ('/some/folder', 'train')
  with pytest.raises(ValueError, match='must be MODEL,DATA or MODEL,DATA,S'):
    vit.get_config('b16')
  with pytest.raises(ValueError, match="size 'big' must be pixels, as in"):
    vit.get_config('b16,cifar10,big')
  for name in 'a,b', 'a,b,c':
    with pytest.raises(ValueError, match='with a comma in its name, pass a link'):
      vit.get_config(f'b16,/data/{name}')


def test_augreg():
  config = augreg.get_config('B_16-i21k-300ep-lr_0.001')
  assert config.model.model_name == 'ViT-B_16'
  assert config.pretrained_dir == 'gs://vit_models/augreg'
  assert (config.total_steps, config.warmup_steps) == (500, 100)
  assert augreg.get_config('L_16').model.transformer.dropout_rate == 0
  with pytest.raises(ValueError, match="AugReg model 'B_17' is unknown"):
    augreg.get_config('B_17')


# --- Model options, which the configs of named models leave out ---


def model_flags(*flag, config='pretrain.py:r_ti16,x'):
  """Returns the config of a command line."""
  argv = [f'--config=configs/{config}', '--workdir=/tmp/run', *flag]
  return train_command.parse(argv).config


def test_models_of_the_original_have_only_its_keys():
  """Its classes and forks of them accept no other fields."""
  vit_keys = {
    'model_name', 'patches', 'hidden_size', 'transformer', 'classifier',
    'representation_size',
  }  # fmt: skip
  mixer_keys = {
    'model_name', 'patches', 'hidden_dim', 'num_blocks', 'tokens_mlp_dim',
    'channels_mlp_dim',
  }  # fmt: skip
  encoder = {
    'mlp_dim', 'num_heads', 'num_layers', 'attention_dropout_rate', 'dropout_rate'
  }  # fmt: skip
  for name in models_test.NAMES:
    config = models.MODEL_CONFIGS[name]
    if name.startswith('Mixer'):
      assert set(config) == mixer_keys
    else:
      assert set(config) == vit_keys | ({'resnet'} if 'R' in name else set())
      assert set(config.transformer) == encoder


def test_options_match_the_defaults_of_the_modules():
  resnet = inspect.signature(models_resnet.make_resnet).parameters
  assert resnet['eps'].default == models._ResNet.eps
  for group, cls in (
    (models.Vit, models_vit.VisionTransformer),
    (models.Mixer, models_mixer.MlpMixer),
    (models.Bit, models_bit.BitResNet),
  ):
    for key, default in schema.defaults(group):
      field = getattr(cls, key)
      is_type = key in ('dtype', 'param_dtype')
      assert (np.dtype(field).name if is_type else field) == default, key


def test_model_options_are_flags():
  model = model_flags(
    '--config.model.dtype=bfloat16', '--config.model.hidden_size=24',
    '--config.model.transformer.norm_eps', '1e-5', '--config.model.resnet.eps=timm',
    '--noconfig.model.transformer.causal',
  ).model  # fmt: skip
  assert (model.dtype, model.hidden_size, model.resnet.eps) == ('bfloat16', 24, 'timm')
  assert (model.transformer.norm_eps, model.transformer.causal) == (1e-5, False)
  assert 'gelu' not in model.transformer
  flag = '--config.model.num_layers=(1, 2)'
  assert model_flags(flag, config='bit_hyperrule.py').model.num_layers == (1, 2)
  flag = '--config.finetune.model.dtype=bfloat16'
  config = model_flags(flag, config='digits_transfer.py')
  assert config.finetune.model.dtype == 'bfloat16'
  assert 'dtype' not in config.scratch.model


def test_length_flags_replace_the_length_in_the_config():
  flags = ['--config.total_steps=50', '--config.warmup_steps=0']
  config = model_flags(*flags, config='digits.py')
  assert (config.total_steps, config.total_epochs) == (50, None)
  assert (config.warmup_steps, config.warmup_epochs) == (0, None)
  config = model_flags('--config.pretrain.total_steps=9', config='digits_transfer.py')
  assert config.pretrain.total_epochs is None
  assert config.pretrain.warmup_epochs == 5.0
  config = model_flags(*flags, '--config.total_epochs=2', config='digits.py')
  assert (config.total_steps, config.total_epochs) == (50, 2.0)


@pytest.mark.parametrize(
  'flag, message',
  [
    ('scan=maybe', "scan='maybe' .*True or False or None"),
    ('remta=full', "no key 'model.transformer.remta': did you mean '.*remat'"),
  ],
)
def test_wrong_model_flags_are_named(flag, message):
  with pytest.raises(ValueError, match=message):
    model_flags(f'--config.model.transformer.{flag}')


@pytest.mark.parametrize('key', ['dtype', 'param_dtype'])
def test_float64_is_rejected(key):
  """Without JAX_ENABLE_X64, JAX would compute in float32 under that name."""
  with pytest.raises(ValueError, match=f"{key}='float64' must be .*bfloat16"):
    model_flags(f'--config.model.{key}=float64')


def test_dtype_flag_replaces_auto(tmp_path):
  config = run_config.complete(pretrain.get_config('r_ti16,x'))
  assert config.model.transformer.gelu == 'tanh'
  assert config.model.resnet.eps == 'published'
  assert config.model.dtype == 'auto'
  workdir.create(tmp_path, config, {}, data={})
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  model = config.model.to_dict()
  stored_runs.change_config(tmp_path, model={**model, 'dtype': 'float32'})
  workdir.keep_dtype(workdir.stored_config(tmp_path), config)
  assert config.model.dtype == 'float32'
  workdir.check_config(tmp_path, config)
  workdir.create(tmp_path, config, {}, data={})
  stored_runs.change_config(tmp_path, model={**model, 'dtype': 'bfloat16'})
  with pytest.raises(ValueError, match='model.dtype.*bfloat16.*float32'):
    workdir.check_config(tmp_path, config)
