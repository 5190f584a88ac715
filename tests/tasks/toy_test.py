"""Tests of a task outside the package, using only the public commands."""

import contextlib
import io
import json
import re
import shutil

import pytest

from tests import processes, toy_task
from tests.planning import plan_test
from vit_jax import train
from vit_jax.commands import predict, train as train_command
from vit_jax.run import metrics as metrics_lib

CONFIG = processes.ROOT / 'tests' / 'toy_config.py'
FLAGS = (  # Forty steps.
  '--config.total_epochs=3.57', '--config.warmup_epochs=0.4',
  '--config.model.transformer.num_layers=1', '--config.progress_every=5',
  '--config.task_options.power=1.5', '--config.log_images=0',
)  # fmt: skip


@pytest.fixture(scope='module')
def trained(data_dir, tmp_path_factory):
  """A finished run of the task: workdir and output."""
  workdir = tmp_path_factory.mktemp('toy')
  flags = (f'--workdir={workdir}', f'--config.tfds_data_dir={data_dir}', *FLAGS)
  with contextlib.redirect_stdout(io.StringIO()) as output:
    train_command.main([f'--config={CONFIG}', *flags, '--nodistributed'])
  return workdir, output.getvalue()


def test_it_trains(trained):
  workdir, output = trained
  assert 'Done in' in output
  assert 'vit_jax predict ' in output
  lines = metrics_lib.read(workdir)
  losses, begun = (
    [line[name] for line in lines if name in line]
    for name in ('loss_test', 'train_loss')
  )
  # The grey of digits varies little: a constant guess costs about 0.3.
  assert losses[-1] < 0.05 < begun[0]
  config = json.loads((workdir / 'config.json').read_text())
  assert config['task_options'] == {'power': 1.5}
  assert not (workdir / 'class_names.json').exists()


def test_it_evaluates_and_predicts(trained, capsys):
  workdir, _ = trained
  task = '--task=tests.toy_task'
  flags = [f'--workdir={workdir}', task, '--nodistributed']
  train_command.main([*flags, '--evaluate=train[:100]'])
  output = capsys.readouterr().out
  assert re.search(r"split 'train\[:100\]' of digits: loss \d", output)
  assert 'num_examples 100' in output
  flags.append(str(workdir / 'example.png'))
  predict.main(flags)
  [value] = re.findall(r'\[(-?[\d.]+)\]', capsys.readouterr().out)
  assert -1 < float(value) < 0  # White strokes on black.
  # In a new process the task only runs if --task names it.
  flags.remove(task)
  status, output = processes.finish_module('vit_jax', 'predict', *flags)
  assert status == 1
  assert task in output


# Like the console script, it has no current folder on the path.
_CONSOLE = """
import os, sys
folder, *sys.argv[1:] = sys.argv[1:]
os.chdir(folder)
sys.path = [path for path in sys.path if path not in ('', folder)]
from vit_jax import __main__
__main__.main()
"""


def test_a_task_in_the_current_folder(data_dir, tmp_path):
  shutil.copy(toy_task.__file__, tmp_path / 'bright.py')

  def console(*args):
    return processes.run_code(_CONSOLE, tmp_path, *args)

  output = console(
    'train', f'--config={CONFIG}', '--config.task=bright', '--workdir=run',
    f'--config.tfds_data_dir={data_dir}', *FLAGS[2:],
    '--config.total_epochs=0.2', '--config.warmup_epochs=0',
  )  # fmt: skip
  # The command printed by a run works unchanged.
  _, command = output.split('vit_jax predict ')
  assert 'example.png\n  [' in console('predict', *command.split())


def test_a_missing_batch_spec_is_named(tiny_config, tmp_path, monkeypatch):
  monkeypatch.delattr(toy_task.Task, 'batch_spec')
  tiny_config.task = 'tests.toy_task'
  with pytest.raises(ValueError, match="toy_task.*'color'.*batch_spec"):
    train.train_and_evaluate(tiny_config, tmp_path / 'run')


def test_it_can_be_planned():
  lowered, kind = plan_test.lower(str(CONFIG), {'model.transformer.num_layers': 1})
  assert kind == 'vit'
  assert lowered.flops > 0
