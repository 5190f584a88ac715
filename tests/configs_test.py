"""Tests of the configs against the tables of the paper."""

import importlib
import pathlib

import pytest

from vit_jax import resolve
from vit_jax.configs import common
from vit_jax.configs import pretrain

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs'


def test_every_config_opens_with_its_command_and_passes_the_check():
  for path in CONFIGS.glob('*.py'):
    module = importlib.import_module(f'vit_jax.configs.{path.stem}')
    if path.stem in ('common', 'models'):
      continue
    assert f'--config=configs/{path.name}' in module.__doc__
    resolve.check(module.get_config())


@pytest.mark.parametrize(
  'arg, fields',
  [
    # arXiv 2010.11929, T3: data, epochs, base lr, decay, weight decay, dropout.
    ('b16,imagenet2012', (300, 3e-3, 'cosine', 0.3, 0.1, 'softmax')),
    ('l32,imagenet2012', (300, 3e-3, 'cosine', 0.3, 0.1, 'softmax')),
    ('b32,imagenet21k', (90, 1e-3, 'linear', 0.03, 0.1, 'sigmoid')),
    ('l16,imagenet21k', (90, 1e-3, 'linear', 0.03, 0.1, 'sigmoid')),
  ],
)
def test_pre_training_is_that_of_table_3(arg, fields):
  config = pretrain.get_config(arg)
  got = (
    config.total_epochs,
    config.base_lr,
    config.decay_type,
    config.weight_decay,
    config.model.transformer.dropout_rate,
    config.loss,
  )
  assert got == fields
  assert (config.batch, config.warmup_steps, config.pp.crop) == (
    4096,
    10_000,
    224,
  )
  assert (config.optimizer, config.b1, config.b2) == ('adam', 0.9, 0.999)
  assert config.grad_norm_clip == 1
  assert config.model.transformer.attention_dropout_rate == 0
  if 'imagenet21k' in arg:  # Issue #2 of the original.
    assert config.model.representation_size == config.model.hidden_size
    assert config.model.head_bias_init == -10
  else:
    assert config.model.representation_size is None


def test_defaults_are_the_fine_tuning_of_the_original():
  config = common.get_config()
  assert (config.optimizer, config.momentum) == ('sgd', 0.9)
  assert (config.batch, config.batch_eval, config.base_lr) == (512, 512, 0.03)
  assert (config.grad_norm_clip, config.optim_dtype) == (1, 'bfloat16')
  assert config.weight_decay == 0
  assert config.pp.crop_area == (0.05, 1.0)


def test_splits_of_known_data():
  config = common.set_dataset(common.get_config(), 'cifar10')
  assert (config.pp.train, config.pp.test) == ('train[:98%]', 'test')
  config = common.set_dataset(common.get_config(), '/some/folder')
  assert (config.pp.train, config.pp.test) == ('train', 'test')


@pytest.mark.parametrize('arg', ['b16', 'b16,', ''])
def test_a_wrong_argument_is_named(arg):
  with pytest.raises(ValueError, match='must be MODEL,DATA'):
    pretrain.get_config(arg)
  with pytest.raises(ValueError, match="model 'b17' is unknown"):
    pretrain.get_config('b17,cifar10')
