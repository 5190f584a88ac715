"""Tests of config files, and of flags that set their keys."""

import os
import pathlib
import re

import ml_collections
import pytest

from vit_jax.commands import train
from vit_jax.configs import synonyms
from vit_jax.run import overrides

ROOT = pathlib.Path(__file__).parents[2]


def parse(*flags, config='configs/digits.py'):
  """Returns the config for a command line."""
  return train.parse([f'--config={config}', '--workdir=/w', *flags]).config


@pytest.mark.parametrize(
  'path, name',
  [
    ('digits', 'digits'),
    ('/home/me/vision_transformer/vit_jax/configs/vit.py', 'vit'),
  ],
)
def test_names_of_installed_configs(path, name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert overrides.find(path) == str(ROOT / 'configs' / f'{name}.py')


def test_user_file_takes_precedence(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path('configs').mkdir()
  pathlib.Path('configs/digits.py').write_text(
    'import ml_collections\n'
    'def get_config(arg="none"):\n'
    '  return ml_collections.ConfigDict({"seen": arg})\n'
  )
  config, path = overrides.load('configs/digits.py:a,b:c')
  assert (config.seen, path) == ('a,b:c', 'configs/digits.py')
  assert config.is_locked
  assert overrides.load('configs/digits.py')[0].seen == 'none'
  assert overrides.load('configs/digits.py:')[0].seen == ''


@pytest.mark.parametrize(
  'path, message',
  [
    ('my_exp/pretrain.py', 'did you mean the installed configs/pretrain.py'),
    ('vit_jax/configs/pretrian.py:b16,x', 'the installed configs/pretrain.py'),
    ('zzz.py', 'installed are .*augreg.py, '),
  ],
)
def test_missing_config(path, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'configs').mkdir()
  name = path.partition(':')[0]
  with pytest.raises(FileNotFoundError, match=f"^config='{name}' is not a file: "):
    overrides.load(path)
  with pytest.raises(FileNotFoundError, match=message):
    overrides.load(path)


FILES = {
  'def get_config():\n  return 5': 'get_config returns int, not a ConfigDict',
  'x = 5': 'the file has no function get_config',
  'def get_config(arg):\n  pass': 'needs an argument: .*FILE.py:ARGUMENT',
  'import os\nimport no_such_module': 'ModuleNotFoundError in line 2: No modul',
  'import ml_collections\n\ndef get_config():\n'
  '  c = ml_collections.ConfigDict()\n  return c.batch': 'AttributeError in line 5',
}


@pytest.mark.parametrize('text', FILES)
def test_errors_in_a_config_file_are_one_line(text, tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(text)
  with pytest.raises(ValueError, match=FILES[text]) as error:
    overrides.load(str(path))
  assert 'Traceback' not in str(error.value)
  assert str(path) in str(error.value)


@pytest.mark.parametrize('name', ['mine.yaml', 'config.json'])
def test_config_files_are_python(name, tmp_path):
  (tmp_path / name).write_text('{}')
  with pytest.raises(ValueError, match=f"{name}' must be a Python file.*--config"):
    overrides.load(str(tmp_path / name))


def test_config_without_argument():
  with pytest.raises(ValueError, match='takes no argument.*:b16'):
    overrides.load('configs/digits.py:b16')


def test_configs_may_be_dicts_and_use_dataclasses(tmp_path):
  (tmp_path / 'mine.py').write_text(
    'from __future__ import annotations\n'
    'import dataclasses\n'
    '@dataclasses.dataclass\n'
    'class Size:\n'
    '  side: int = 4\n'
    'def get_config():\n'
    '  return {"side": Size().side, "pp": {"crop": 3}}\n'
  )
  config, _ = overrides.load(os.fspath(tmp_path / 'mine.py'))
  assert isinstance(config.pp, ml_collections.ConfigDict)
  assert (config.side, config.pp.crop) == (4, 3)


@pytest.mark.parametrize(
  'flags, key, value',
  [
    (['--config.batch=64', '--config.batch=32'], 'batch', 32),
    (['--config.base_lr=1'], 'base_lr', 1.0),
    (['--config.pp.flip', '--config.batch=8'], 'pp.flip', True),
    (['--config.pp.flip', 'false'], 'pp.flip', False),
    (['--noconfig.pp.flip'], 'pp.flip', False),
    (['--config.pp.crop=(32,48)'], 'pp.crop', (32, 48)),
    (['--config.fewshot.shots=5'], 'fewshot.shots', (5,)),
    # A string that is also a Python literal.
    (['--config.dataset=2012'], 'dataset', '2012'),
    (['--config.tfds_data_dir=None'], 'tfds_data_dir', None),
    (['--config.dataset', '/data/my photos'], 'dataset', '/data/my photos'),
    (['--config.mesh.data', '-1'], 'mesh.data', -1),
    # 0 and None mean 1 in the original.
    (['--config.accum_steps=0'], 'accum_steps', 0),
    (['--config.task_options.mixup=0.2'], 'task_options.mixup', '0.2'),
  ],
)
def test_flag_values(flags, key, value):
  found = parse(*flags)
  for name in key.split('.'):
    found = found[name]
  assert (type(found), found) == (type(value), value)


def test_keys_missing_from_the_file(tmp_path):
  """Configs of the original lack the keys that this package added."""
  (tmp_path / 'old.py').write_text(
    'import ml_collections\n'
    'def get_config():\n'
    '  return ml_collections.ConfigDict({"model": {"hidden_size": 3,\n'
    '    "transformer": {"num_layers": 1}}, "batch": 8, "mine": 5})\n'
  )
  config = parse(
    '--config.ema_decay=.9', '--config.pp.crop=32', '--config.mesh.fsdp=2',
    '--config.model.transformer.scan', '--config.task_options.mixup=.1',
    '--config.mine=6', config=tmp_path / 'old.py',
  )  # fmt: skip
  assert (config.ema_decay, config.pp.crop, config.mesh.fsdp) == (0.9, 32, 2)
  assert (config.model.transformer.scan, config.mine) == (True, 6)
  assert config.task_options.mixup == '.1'


def test_configs_for_several_runs():
  config = parse(
    '--config.seeds=3', '--config.finetune.pp.train=few_{seed}[:50%]',
    '--config.finetune.task_options.mixup=.1', '--config.pretrain.total_steps=9',
    config='configs/digits_transfer.py',
  )  # fmt: skip
  assert (config.seeds, config.pretrain.total_epochs) == ((3,), None)
  assert config.finetune.pp.train == 'few_{seed}[:50%]'
  assert config.finetune.task_options.mixup == '.1'
  config = parse(
    '--config.tasks=svhn,clevr_count', '--config.download',
    config='configs/vtab.py:b16',
  )  # fmt: skip
  assert config.tasks == ('svhn', 'clevr_count')
  assert config.download is True


@pytest.mark.parametrize(
  'flag, message',
  [
    ('--config.total_steps=abc', "^total_steps='abc' .*integer"),
    ('--config.base_lr=nan', r'^base_lr=nan .*finite.*base_lr\)'),
    ('--config.optimizer=adm', "optimizer='adm' .*'adam', 'sgd'"),
    ('--config.batch', 'config.batch needs a value'),
    ('--config.pp=3', 'config.pp is a group of keys'),
    ('--config.base_lr.task_options.x=3', "no key 'base_lr.task_options.x'"),
    ('--config.lr=3', "no key 'lr': use --config.base_lr"),
    ('--config.resume=True', "no key 'resume': the same command resumes"),
    ('--learning-rate=3', 'no flag --learning-rate: use --config.base_lr'),
    ('--weight-decay=3', 'no flag --weight-decay: did you mean --config.weight_decay'),
    ('--config.remat=full', "no key 'remat': did you mean 'model.transformer."),
    ('--confg.batch=16', 'no flag --confg.batch: did you mean --config.batch'),
    ('--batch=16', r'no flag --batch: did you mean --config.batch\?'),
    ('--process_id=x', "--process_id: invalid int value: 'x'"),
    ('batch=16', r"unknown arguments \['batch=16'\]: flags begin with --"),
  ],
)
def test_wrong_flags_are_reported(flag, message):
  with pytest.raises(ValueError, match=message):
    parse(flag)


def test_the_kind_of_a_model_determines_its_keys():
  flags = '--config.model.num_queries=7', '--config.model.kind=eomt'
  config = parse(*flags, config='configs/vit.py:b16,cifar10')
  assert (config.model.kind, config.model.num_queries) == ('eomt', 7)
  assert config.model.hidden_size == 768
  config = parse(*flags, config='configs/vit.py:pretrained,cifar10')
  assert config.model.to_dict() == {'kind': 'eomt', 'num_queries': 7}
  with pytest.raises(ValueError, match=r"kind='detr' has other .*\['vit', 'eomt'\]"):
    parse('--config.model.kind=detr', config='configs/vit.py:b16,cifar10')


def test_synonyms_name_keys_that_exist():
  flags = re.findall(r'--config\.([a-z0-9_.]+)', ' '.join(synonyms.SYNONYMS.values()))
  unchecked = {'best_metric', 'dataset', 'pretrained'}  # Any string is accepted.
  unchecked |= {'task_options.mixup', 'task_options.cutmix'}  # Checked by the task.
  for key in {*flags} - unchecked:
    with pytest.raises(ValueError, match=r'^(?!.*has no key)'):
      parse(f'--config.{key}=@')


def test_key_without_a_config():
  with pytest.raises(ValueError, match=r'config.batch sets a key .*--config=F'):
    train.parse(['--workdir=/w', '--config.batch=3'])
