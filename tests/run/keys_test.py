"""Tests of what each key of a config may be; nothing here is compiled."""

import subprocess
import sys

import flax.traverse_util
import pytest

from vit_jax.commands import train
from vit_jax.configs import common
from vit_jax.configs import models as model_configs
from vit_jax.configs import vit
from vit_jax.run import config as run_config
from vit_jax.run import keys
from vit_jax.tasks import classify
from vit_jax.tasks import masked_patches
from vit_jax.tasks.detection import detect

NAN, INF = float('nan'), float('inf')
WHOLE = 'must be a whole number of at least 1'
RATE = 'must be a finite number from 0 to below 1'

# Key, value, what is said of it.
WRONG = [
  ('seed', 2**63, 'must be a whole number from 0 to 9223372036854775807'),
  ('seed', -1, 'must be a whole number from 0'),
  ('batch', 0, WHOLE),
  ('batch', 16.0, WHOLE),
  ('batch', True, WHOLE),
  ('batch_eval', -8, WHOLE),
  ('prefetch', 10**9, 'must be a whole number from 0 to 1000'),
  ('broken_images', 'foo', "is unknown: use one of 'error', 'skip', 'trust'"),
  ('broken_boxes', 'drop', "is unknown: use one of 'refuse', 'skip', 'clip'"),
  ('dataset', 5, 'must be the name of a data set, a folder, or several'),
  ('dataset', (('a', 0.0),), 'with weights above 0'),
  ('dataset', (('a', NAN), ('b', 1.0)), 'with weights above 0'),
  ('trainer', 'tune', 'is unknown: use one of'),
  ('task', 7, 'must be a text'),
  ('task', '../x', "is unknown: use one of .*'classify'"),
  ('task', 'no_such_package.task', "there is no module 'no_such_package'"),
  ('task_options', {'any': NAN}, 'task_options.any=nan must be a number'),
  ('pp', 'train', 'must be a group of keys'),
  ('pp.train', 'train[abc', 'must be a split in the notation'),
  ('pp.train', 'train[::2]', 'must be a split'),
  ('pp.test', 'test[5]', 'must be a split'),
  ('pp.test', '', 'must be a split'),
  ('pp.crop', 0, 'must be a whole number of at least 1, or two'),
  ('pp.crop', (3, 4, 5), 'must be a whole number'),
  ('pp.crop', 'abc', 'must be a whole number'),
  ('pp.resize', 200, 'resize=200 is smaller than crop=384'),
  ('pp.resize', (448, 380), r'use at least \(448, 384\) or None'),
  ('pp.resize', NAN, WHOLE + ', or two, or None'),
  ('pp.channels', 2, 'is unknown: use one of 1, 3'),
  ('pp.crop_area', (0.5, 1.5), 'must be .smallest, largest.*at most 1.0'),
  ('pp.crop_area', (0.0, 1.0), 'finite numbers above 0'),
  ('pp.crop_ratio', (2.0, 1.0), 'must be .smallest, largest'),
  ('pp.crop_ratio', (1.0, INF), 'finite numbers above 0'),
  ('pp.flip', 1, 'must be True or False'),
  ('pp.sides', (0, 5), 'must be a tuple of different whole numbers of at lea'),
  ('pp.sides', 480, 'must be a tuple of different whole numbers'),
  ('pp.eval_side', 0, WHOLE),
  ('pp.longest_side', 0.5, WHOLE),
  ('pp.crop_sides', (4, 4), 'must be a tuple of different whole numbers'),
  ('pp.crop_range', (600, 384), 'must be .smallest, largest., two whole'),
  ('pp.canvases', 0, WHOLE),
  ('pp.canvas_multiple', 0, WHOLE),
  ('pp.rotate', INF, 'must be a finite number from 0 to 360'),
  ('pp.rotate', -10.0, 'must be a finite number from 0'),
  ('pp.randaugment', (2,), 'must be .layers, magnitude'),
  ('pp.randaugment', (0, 15), 'at least 1 layer'),
  ('pp.randaugment', (2, 31), 'a magnitude from 0 to 30'),
  ('pp.randaugment', (2, -1), 'a magnitude from 0 to 30'),
  ('pp.randaugment', (2, 1.5), 'whole numbers'),
  ('pp.randaugment', 'strong', r'or \(\) for none'),
  ('pp.randaugment', None, r'or \(\) for none'),
  ('pp.color_jitter', 1.5, 'must be a finite number from 0 to 1'),
  ('pp.color_jitter', NAN, 'must be a finite number from 0 to 1'),
  ('pp.random_erasing', '1', 'must be a finite number from 0 to 1'),
  ('fewshot', 5, 'must be a group of keys'),
  ('fewshot.shots', (1, 0), 'must be a tuple of different whole numbers of at'),
  ('fewshot.shots', (5, 5), 'must be a tuple of different whole numbers of at'),
  ('fewshot.seeds', (0.5,), 'must be a tuple of different whole numbers of at'),
  ('fewshot.l2', 0.0, 'must be a finite number above 0'),
  ('fewshot.squeeze', 0.9, 'must be a finite number from 1 to 8'),
  ('fewshot.train', 'train[abc', 'must be a split in the notation'),
  ('pretrained_grid', (0, 0), 'must be .height, width., two whole numbers'),
  ('pretrained', '', 'must be a path, or a table of paths .*, or None'),
  ('pretrained', {'backbone': 3}, 'must be a path, or a table of paths'),
  ('loss', 'hinge', "is unknown: use one of 'softmax', 'sigmoid'"),
  ('label_smoothing', 1.0, RATE),
  ('total_steps', 0, 'must be a whole number from 1 to 2147483647, or None'),
  ('total_steps', 2**31, 'must be a whole number from 1 to 2147483647'),
  ('total_epochs', NAN, 'must be a finite number above 0, or None'),
  ('total_epochs', INF, 'must be a finite number above 0'),
  ('total_epochs', 5.0, 'total_steps=10000 and total_epochs=5.0 are both'),
  ('warmup_epochs', 5.0, 'warmup_steps=500 and warmup_epochs=5.0 are both'),
  ('warmup_epochs', -1.0, 'must be a finite number of at least 0, or None'),
  ('warmup_steps', -1, 'must be a whole number from 0'),
  ('optimizer', 'lamb', "is unknown: use one of 'adam', 'sgd'"),
  ('momentum', 1.0, RATE),
  ('b1', NAN, RATE),
  ('b2', -0.1, RATE),
  ('optim_dtype', 'int8', "is unknown: use one of 'float32', 'bfloat16'"),
  ('base_lr', -1.0, 'must be a finite number of at least 0'),
  ('base_lr', NAN, 'must be a finite number of at least 0'),
  ('base_lr', INF, 'must be a finite number of at least 0'),
  ('decay_type', 'step', "is unknown: use one of 'cosine', 'linear'"),
  ('decay_type', 'staircase', r"decay_type='staircase' and decay_at=\(\): a stair"),
  ('decay_at', (0.3,), r"'cosine' and decay_at=\(0.3,\): .* other decays take none"),
  ('decay_at', (0.6, 0.3), 'must be increasing shares of the run'),
  ('decay_at', (0.3, 1.0), 'must be increasing shares of the run'),
  ('decay_at', 0.3, 'must be increasing shares of the run'),
  ('l2_decay', -1.0, 'must be a finite number of at least 0'),
  ('weight_decay', INF, 'must be a finite number of at least 0, or None'),
  ('independent_weight_decay', 1, 'must be True or False'),
  ('lr_multipliers', (('(', 1.0),), "holds '.', which is no regular expr"),
  ('lr_multipliers', ('head/', -1.0), 'must be pairs of a regular'),
  ('lr_multipliers', (('head/', NAN),), 'a finite factor of at least 0'),
  ('lr_multipliers', ('head/',), 'must be pairs of a regular'),
  ('grad_norm_clip', NAN, 'must be a finite number of at least 0, or None'),
  ('accum_steps', -1, WHOLE),
  ('ema_decay', 1.0, RATE),
  ('mesh', {'data': 0}, 'must be whole numbers of at least 1 by axis'),
  ('mesh', {'data': 'all'}, 'must be whole numbers of at least 1 by axis'),
  ('sharding_rules', (('[', (None,)),), r"holds '\[', which is no regular"),
  ('sharding_rules', (('head', 3),), 'must be pairs of a regular expression'),
  ('sharding_rules', ('head', ('model',)), 'must be pairs of a regular'),
  ('evals', 'test', 'must be a tuple'),
  ('evals', (('val', 'train[abc'),), "evals='train.abc' must be a split"),
  ('progress_every', -1, 'must be a whole number of at least 0'),
  ('eval_every', NAN, 'must be a whole number of at least 0'),
  ('checkpoint_every', -5, 'must be a whole number of at least 0'),
  ('keep_checkpoints', 0, WHOLE),
  ('keep_checkpoints', 10**400, WHOLE),
  ('best_metric', None, 'must be a text'),
  ('profile_steps', -1, 'must be a whole number of at least 0'),
  ('log_images', -1, 'must be a whole number from 0 to 1000'),
  ('log_images', True, 'must be a whole number from 0'),
  ('log_attention', 1, 'must be True or False'),
  ('model', None, 'model is not set: take a config file'),
  ('model', 'b16', 'must be a group of keys'),
  ('model.patches', 16, 'must be a group of keys'),
  ('model.patches.size', (0, 0), 'must be .height, width., two whole numbers'),
  ('model.patches.size', (-4, -4), 'must be .height, width.'),
  ('model.hidden_size', 0, WHOLE),
  ('model.hidden_size', -16, WHOLE),
  ('model.representation_size', -1, WHOLE + ', or None'),
  ('model.classifier', 'mean', "is unknown: use one of 'token', 'gap'"),
  ('model.head_bias_init', INF, 'must be a finite number'),
  ('model.dtype', 'int32', "is unknown: use one of 'auto', 'float32', 'bfl"),
  ('model.transformer.num_layers', 0, WHOLE),
  ('model.transformer.num_layers', -1, WHOLE),
  ('model.transformer.mlp_dim', 0, WHOLE),
  ('model.transformer.num_heads', 0, WHOLE),
  ('model.transformer.num_heads', -2, WHOLE),
  ('model.transformer.num_heads', 5, 'num_heads=5 does not divide .*=768'),
  ('model.transformer.dropout_rate', 2.0, RATE),
  ('model.transformer.dropout_rate', -0.5, RATE),
  ('model.transformer.attention_dropout_rate', NAN, RATE),
  ('model.transformer.stochastic_depth', 1.0, RATE),
  ('model.transformer.attention', 'fast', "is unknown: use one of 'auto'"),
  ('model.transformer.gelu', 'sigmoid', "is unknown: use one of 'tanh', 'erf'"),
  ('model.transformer.norm_eps', 0.0, 'must be a finite number above 0'),
  ('model.transformer.remat', 'all', "is unknown: use one of '', 'full'"),
  ('model.transformer.position_embedding', '3d', "unknown: use one of 'learned"),
  ('model.transformer',
   {'add_position_embedding': False, 'position_embedding': 'sincos2d'},
   "False contradicts position_embedding='sincos2d': leave out"),
  ('model', {'hidden_size': 38, 'transformer':
             {'num_heads': 2, 'position_embedding': 'sincos2d'}},
   'needs a width that is a multiple of 4, at least 8, not 38'),
  ('model.transformer.own', NAN, 'must be a number'),
  ('model.resnet', {'num_layers': (3, 0)}, 'must be the units of each stage'),
  ('model.resnet', {'width_factor': 0.3}, 'must be a multiple of 0.5 above 0'),
  ('model.resnet', {'eps': 'torch'}, "is unknown: use one of 'published'"),
  ('model', {'tokens_mlp_dim': 0}, f'tokens_mlp_dim=0 {WHOLE}'),
  ('model', {'kind': 'mixer', 'num_blocks': -1}, f'num_blocks=-1 {WHOLE}'),
  ('model', {'kind': 'bit', 'num_layers': (3, 0)}, 'must be the units of each st'),
  ('model', {'kind': 'bit', 'width_factor': 0.25}, 'must be a multiple of 0.5'),
  ('model', {'kind': 'bit', 'eps': 'torch'}, "unknown: use one of 'published'"),
  ('model', {'kind': 'bit', 'remat': 'dots'}, "unknown: use one of '', 'full'"),
  ('model', {'kind': 'detr', 'norm': 'batch'}, 'is unknown: use one of'),
  ('model', {'kind': 'detr', 'vit': {'hidden_size': 0}}, f'hidden_size=0 {WHOLE}'),
  ('model', {'kind': 'igpt', 'num_layers': 0}, f'num_layers=0 {WHOLE}'),
]  # fmt: skip


def put(config, path, value):
  """Sets a key, of whatever type."""
  *parts, key = path.split('.')
  for part in parts:
    config = config[part]
  with config.unlocked(), config.ignore_type():
    config[key] = value


@pytest.mark.parametrize('key, value, message', WRONG)
def test_a_wrong_value_is_named(key, value, message):
  config = vit.get_config('b16,cifar10')
  put(config, key, value)
  with pytest.raises(ValueError, match=message) as error:
    run_config.check_values(config)
  assert key.split('.')[-1] in str(error.value)
  assert len(str(error.value).splitlines()) == 1


def test_independent_weight_decay_needs_a_learning_rate():
  config = vit.get_config('b16,cifar10')
  config.update(independent_weight_decay=True, base_lr=0.0)
  with pytest.raises(
    ValueError, match='base_lr, which is 0: set --config.base'
  ):
    run_config.check_values(config)


@pytest.mark.parametrize(
  'key, value',
  [
    ('seed', 2**63 - 1),
    ('dataset', (('cifar10', 0.7), ('/data/photos', 0.3))),
    ('pp.train', 'train[:9_000]+test[-5%:]+val[2shard]'),
    ('pp.test', '.[:5]'),
    ('pp.crop', (224, 384)),
    ('pp.crop_area', None),
    ('pp.crop_ratio', None),
    ('pp.randaugment', [2, 15]),
    ('pp.randaugment', (1, 0)),
    ('pretrained_grid', (14, 24)),
    ('base_lr', 0),
    ('grad_norm_clip', None),
    ('accum_steps', 0),
    ('lr_multipliers', ('^head/', 1)),
    ('sharding_rules', (('head/kernel', (None, ('fsdp', 'model'))),)),
    ('mesh', {'data': -1, 'fsdp': None, 'expert': 2}),
    ('evals', (('val', 'train[90%:]', 'cifar10'),)),
    ('model.own_field', 3),
    ('model', {'kind': 'mine', 'hidden_size': None, 'patches': 4}),
    ('model.resnet', {'num_layers': (), 'width_factor': 0.5}),
  ],
)
def test_a_right_value_passes(key, value):
  config = vit.get_config('b16,cifar10')
  put(config, key, value)
  run_config.check_values(config)


def test_there_is_a_rule_for_every_key():
  flat = flax.traverse_util.flatten_dict(common.get_config().to_dict(), sep='.')
  nested = ('mesh', 'task_options', 'model')
  own = {key for key in flat if key.split('.')[0] not in nested}
  assert own <= set(keys.KEYS)
  for config in model_configs.MODEL_CONFIGS.values():
    config = model_configs.with_options(config).to_dict()
    fields = set(flax.traverse_util.flatten_dict(config, sep='.'))
    assert fields - {'resnet.num_layers'} <= set(
      keys.MODELS[model_configs.kind_of(config)]
    )
  for task in (classify.Task, detect.Task, masked_patches.Task):
    assert set(task.OPTION_RULES) == set(task.OPTIONS)


def test_every_default_and_every_model_is_right():
  for name in model_configs.MODEL_CONFIGS:
    config = common.get_config()
    config.model = model_configs.get_config(name)
    run_config.check_values(config)


@pytest.mark.parametrize(
  'options, message',
  [
    ({'mixup': NAN}, 'task_options.mixup=nan must be a finite number of at le'),
    ({'cutmix': -1.0}, 'task_options.cutmix=-1.0 must be a finite number'),
    ({'mixup': 'None'}, 'task_options.mixup=None must be float'),
  ],
)
def test_a_wrong_option_of_a_task_is_named(options, message):
  config = vit.get_config('b16,cifar10')
  config.task_options = options
  with pytest.raises(ValueError, match=message):
    run_config.complete(config)


def test_flags_of_any_config_can_be_none():
  args = train.parse(
    [
      '--workdir=/tmp/vit', '--config=configs/vit.py:b16,cifar10',
      '--config.total_steps=None', '--config.total_epochs', '3',
      '--config.pretrained_dir=None', '--config.pp.crop_area=None',
      '--config.pp.resize=None', '--config.pp.resize=512',
    ]
  )  # fmt: skip
  config = args.config
  assert (config.total_steps, config.total_epochs) == (None, 3.0)
  assert (config.pretrained_dir, config.pp.crop_area) == (None, None)
  assert config.pp.resize == 512
  with pytest.raises(ValueError, match="no key 'total_epoch': did you mean"):
    train.parse(['--config=configs/vit.py', '--config.total_epoch=None'])


def test_a_wrong_value_is_answered_before_tensorflow_is_loaded(tmp_path):
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
  assert 'base_lr=nan must be a finite number' in done.stdout, done.stderr
  assert done.stdout.endswith('False\n')
  assert not (tmp_path / 'run').exists()
