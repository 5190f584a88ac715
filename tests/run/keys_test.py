"""Tests of the valid values of config keys; nothing here is compiled."""

import dataclasses
import subprocess
import sys
from typing import Annotated

import pytest

from tests import tiny_models
from vit_jax import models_bit, models_resnet
from vit_jax.configs import common, models as model_configs, schema, task_options, vit
from vit_jax.layers import (
  attention,
  decoder,
  encoder,
  layer_stack,
  patches,
  text_towers,
)
from vit_jax.learning import losses
from vit_jax.run import config as run_config

# A wrong value for each kind of key, and a pattern that the message matches.
WRONG = [
  ('class_weights', {'cat': 0.0}, "class_weights={'cat': 0.0} .*weights above 0"),
  ('class_weights', {'cat': -1}, 'weights above 0 by class name'),
  ('class_weights', 'balance', "one of 'balanced' or weights above 0"),
  ('sampling', 'balance', "one of 'uniform', 'balanced'"),
  ('batch', 0, 'integer of at least 1'),
  ('broken_images', 'foo', "'error', 'skip', 'trust'"),
  ('dataset', 5, 'data sets with weights above 0'),
  ('pp', 'train', 'group of keys'),
  ('pp.train', 'train[::2]', 'notation of TFDS'),
  ('pp.crop', (3, 4, 5), 'height, width'),
  ('pp.resize', 200, 'smaller than crop=384'),
  ('pp.flip', 1, 'True or False'),
  ('pretrained', {'backbone': 3}, 'paths by part'),
  ('total_epochs', 5.0, 'total_steps=10000 and total_epochs=5.0'),
  ('momentum', 1.0, 'below 1'),
  ('b1', 0.5, "not an argument of optimizer='sgd'.*adam, lion.*b1=0.9"),
  ('base_lr', float('nan'), 'finite'),
  ('lora.alpha', 1e39, 'alpha=1e.39 must be a finite float32 number above 0'),
  ('decay_type', 'staircase', r'decay_at=\(\)'),
  ('decay_type', 'optax:', "'rsqrt' or 'MODULE:NAME'"),
  ('decay_type', 'nowhere:stairs', "no module 'nowhere'.*config.decay_type"),
  ('optimizer', 'nowhere:lion', "no module 'nowhere'.*such as 'optax:lamb'"),
  (
    'decay_args',
    {'timescale': 5},
    "decay_type='rsqrt' or a schedule 'MODULE:NAME', not",
  ),
  ('optimizer_args', {'b1': 0.8}, "such as 'optax:sgd'"),
  ('lr_multipliers', (('(', 1.0),), 'regular expression'),
  ('trackers', ('wandb', 'wanb'), "different names of 'wandb', 'mlflow'"),
  ('mesh', {'data': 0}, 'axis'),
  ('model.transformer.num_heads', 5, r'does not divide .*=768'),
  ('model.transformer.attention', 'fast', "'auto'"),
  (
    'model.transformer',
    {'add_position_embedding': False, 'position_embedding': 'sincos2d'},
    'contradicts',
  ),
  (
    'model.transformer',
    {
      'position_embedding': 'relative',
      'position_layers': 'every',
      'position_grid': (2, 2),
    },
    r"position_grid=\(2, 2\) has no effect .*'relative', only with learned_1d or",
  ),
  (
    'model.transformer',
    {'position_embedding': 'rope', 'position_layers': 'every'},
    "position_layers=every has no effect .*'rope', only with learned_1d or",
  ),
  ('model.transformer.attention_window', 3, "no effect .*'global'.*pattern=local"),
  ('model.resnet', {'width_factor': 0.3}, 'multiple of 0.5'),
  ('model', {'kind': 'detr', 'vit': {'hidden_size': 0}}, 'hidden_size=0'),
]


@pytest.mark.parametrize('key, value, words', WRONG)
def test_wrong_value_is_reported(key, value, words):
  config = vit.get_config('b16,cifar10')
  tiny_models.put(config, key, value)
  with pytest.raises(ValueError, match=words) as error:
    run_config.check_values(config)
  assert key.split('.')[-1] in str(error.value)
  assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
  'key, value',
  [
    ('dataset', (('cifar10', 0.7), ('/data/photos', 0.3))),
    ('pp.train', 'train[:9_000]+test[-5%:]+val[2shard]'),
    ('pp.crop', (224, 384)),
    ('class_weights', {'cat': 2}),
    ('lr_multipliers', ('^head/', 1)),
    ('sharding_rules', (('head/kernel', (None, ('fsdp', 'model'))),)),
    ('evals', (('val', 'train[90%:]', 'cifar10'),)),
    ('model', {'kind': 'mine', 'hidden_size': None, 'patches': 4}),
  ],
)
def test_valid_value_is_accepted(key, value):
  config = vit.get_config('b16,cifar10')
  tiny_models.put(config, key, value)
  run_config.check_values(config)


def test_every_model_has_only_fields_of_its_kind():
  for name in model_configs.MODEL_CONFIGS:
    config = common.get_config()
    config.model = model_configs.get_config(name)
    run_config.check_values(config)
    model = model_configs.with_options(config.model)
    kind = model_configs.FIELDS[model_configs.kind_of(model)]
    schema.check_group(model, kind, 'model.')


@pytest.mark.parametrize(
  'group, key, known',
  [
    (common.Config, 'loss', losses.LOSSES),
    (model_configs.Vit, 'transformer.attention', ('auto', *attention.IMPLEMENTATIONS)),
    (model_configs.Vit, 'transformer.gelu', encoder.GELUS),
    (model_configs.Vit, 'transformer.remat', ('', *layer_stack.REMAT_POLICIES)),
    (model_configs.Vit, 'resnet.eps', models_resnet.EPSILONS),
    (model_configs.Vit, 'head_init', patches.HEAD_INITS),
    (model_configs.Bit, 'eps', models_bit.EPSILONS),
    (model_configs.Igpt, 'attention_scale', decoder.SCALES),
    (model_configs.Lit, 'text_model', text_towers.TEXT_MODELS),
    (model_configs.Lit, 'pp.tokenizer_name', text_towers.TOKENIZERS),
  ],
)
def test_choices_match_the_code(group, key, known):
  words = schema.describe(schema.flat(group)[key])
  assert words == f'one of {", ".join(map(repr, known))}'


# Groups of keys by the prefix of their names, some with the same prefix.
GROUPS = [
  ('', common.Config),
  *(('model.', group) for group in model_configs.FIELDS.values()),
  *(('task_options.', group) for group in task_options.OPTIONS.values()),
]


def test_marks_do_not_contradict_each_other():
  marks = {}
  for prefix, group in GROUPS:
    for key, marks_of_key in schema.marks(group, prefix).items():
      assert len(marks_of_key - {schema.SWEPT}) <= 1, key
      assert marks.setdefault(key, marks_of_key) == marks_of_key, key
    # A mark inside a union would have no effect.
    assert not [key for key, kind in schema.flat(group).items() if 'Mark.' in str(kind)]
  assert marks['model.vit.transformer.remat'] == {schema.FREE}
  assert marks['fewshot.shots'] == {schema.MEASURED}
  assert marks['base_lr'] == frozenset()


def test_contradicting_marks_are_seen():
  @dataclasses.dataclass
  class Group:
    twice: Annotated[int, schema.FREE, schema.LENGTH] = 0
    inside: Annotated[common.Lora, schema.FREE] = None

  assert schema.marks(Group)['twice'] == {schema.FREE, schema.LENGTH}
  assert schema.marks(Group)['inside.rank'] == {schema.FREE}
  assert schema.fields(Group)['twice'] is int


def test_keys_that_optax_does_not_read_are_named_together():
  config = vit.get_config('b16,cifar10')
  config.update(optimizer='optax:lamb', b2=0.95, weight_decay=0.1)
  with pytest.raises(
    ValueError, match='b2=0.95, weight_decay=0.1: set --config.b2=0.999 --config.weight'
  ):
    run_config.check_values(config)


@pytest.mark.parametrize('value', ['None', -1.0])
def test_wrong_task_option_is_reported(value):
  config = vit.get_config('b16,cifar10')
  config.task_options = {'mixup': value}
  with pytest.raises(ValueError, match=rf'task_options.mixup={value} .*at least 0'):
    run_config.complete(config)


def test_contradicting_task_options_are_reported():
  config = vit.get_config('b16,cifar10')
  config.task = 'masked_patches'
  config.task_options = {'masked': 0.9, 'swapped': 0.2}
  with pytest.raises(ValueError, match='must not sum to more than 1'):
    run_config.check_values(config)


def test_rules_of_a_group_and_of_the_groups_inside_are_checked():
  def check_low(config):
    if config.low > 1:
      raise ValueError(f'low={config.low}')

  @dataclasses.dataclass
  class Inner:
    low: int = 0
    RULES = (check_low,)

  @dataclasses.dataclass
  class Outer:
    low: int = 0
    inner: Inner = dataclasses.field(default_factory=Inner)
    RULES = (check_low,)

  config = schema.make(Outer)
  schema.run_checks(schema.rules(config, Outer))
  config.low, config.inner.low = 2, 3
  with pytest.raises(schema.Errors, match=r'2 errors:\n  low=2\n  low=3'):
    schema.run_checks(schema.rules(config, Outer))


def test_wrong_value_is_reported_before_loading_tensorflow(tmp_path):
  code = (
    'import sys\n'
    'from vit_jax.commands import train\n'
    'try:\n'
    '  train.main(sys.argv[1:])\n'
    'except ValueError as e:\n'
    '  print(e, "tensorflow" in sys.modules)\n'
  )
  done = subprocess.run(
    [
      sys.executable, '-c', code, f'--workdir={tmp_path}/run',
      '--config=configs/vit.py:b16,cifar10', '--config.base_lr=nan',
    ],
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert 'base_lr=nan' in done.stdout, done.stderr
  assert done.stdout.endswith('False\n')
  assert not (tmp_path / 'run').exists()
