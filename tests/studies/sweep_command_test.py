"""Tests of the flags of `vit_jax sweep`."""

import shlex

import pytest

from vit_jax.commands import sweep

CONFIG = ['--config=configs/digits.py', '--workdir=/tmp/w']


@pytest.mark.parametrize(
  'text, values',
  [
    ('config.base_lr=.001,.01', {'base_lr': [0.001, 0.01]}),
    ('--config.base_lr = 1e-3', {'base_lr': [0.001]}),
    ('optimizer=sgd,adam', {'optimizer': ['sgd', 'adam']}),
    ('pp.crop_area=(.05, 1.0),None', {'pp.crop_area': [(0.05, 1.0), None]}),
  ],
)
def test_values_are_python_literals_or_words(text, values):
  assert sweep.parse_values([text]) == values


def test_several_keys_keep_their_order():
  found = sweep.parse_values(['batch=8,16', 'base_lr=.1'])
  assert list(found.items()) == [('batch', [8, 16]), ('base_lr', [0.1])]
  with pytest.raises(ValueError, match="'base_lr' is given twice"):
    sweep.parse_values(['config.base_lr=1', 'base_lr=2'])


@pytest.mark.parametrize('text', ['base_lr', 'base_lr='])
def test_wrong_values_are_named(text):
  with pytest.raises(ValueError, match=f"values='{text}' must be KEY=VALUE"):
    sweep.parse_values([text])


def test_configs_of_other_programs_are_rejected(monkeypatch):
  monkeypatch.setattr(sweep.hosts, 'run', lambda args, work: work())
  words = ['--config=configs/digits_transfer.py', '--workdir=/w', '--values=batch=1']
  with pytest.raises(ValueError, match="trainer='transfer': a sweep needs the"):
    sweep.main(words)


def test_prints_a_command_for_each_run(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(sweep.hosts, 'run', lambda args, work: work())
  words = [
    CONFIG[0], f'--workdir={tmp_path}/w', '--held_out=10%',
    "--values=pp.crop_area=(.5, 1.0),None",
  ]  # fmt: skip
  sweep.main([*words, '--print'])
  lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
  assert lines == [
    ['vit_jax', 'sweep', *words, f'--run=crop_area={name}']
    for name in ('_0.5,_1.0_', 'None')
  ]
  assert not (tmp_path / 'w').exists()


def test_flags():
  found = sweep.parse(
    [*CONFIG, '--values=base_lr=1', '--values=batch=8', '--config.batch=64',
     '--held_out=10%', '--seeds=5', '--refit=part', '--run=a']
  )  # fmt: skip
  assert found.tried == {'base_lr': [1], 'batch': [8]}
  assert found.config.batch == 64
  assert (found.held_out, found.seeds, found.refit) == ('10%', 5, 'part')
  assert (found.run, found.print) == ('a', False)


@pytest.mark.parametrize('args, message', [
  ([*CONFIG, '--valeus=base_lr=1'], 'no flag --valeus: did you mean --values'),
  (CONFIG[:1], '--workdir=FOLDER'),
  (CONFIG[1:], '--config=FILE'),
])  # fmt: skip
def test_wrong_flags_are_named(args, message):
  with pytest.raises(ValueError, match=message):
    sweep.parse(args)
