"""Tests of the commands with a detector trained on a folder in COCO's format."""

import jax
import numpy as np
from PIL import Image
import pytest

from tests.data.coco import detect_test, drawn
from vit_jax import predict, train
from vit_jax.commands import (
  evaluate as evaluate_command,
  predict as predict_command,
  visualize,
)
from vit_jax.evaluators import evaluation
from vit_jax.figures import drawing
from vit_jax.planning import plan
from vit_jax.run import (
  checkpoints as checkpoints_lib,
  config as run_config,
  workdir as workdir_lib,
)

THINGS = [drawn.thing(i, i % 4, (i, 0, 20, 20), 7) for i in range(6)]


def numbers(like):
  return np.random.RandomState(like.size).normal(0, 0.1, like.shape).astype(like.dtype)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run with random parameters: its workdir, its data and its evaluation metrics.

  It resumes after the last update, so neither updates nor initialisation are compiled.
  """
  root = drawn.make(tmp_path_factory.mktemp('data') / 'own', 4, THINGS, grey=(2,))
  workdir = str(tmp_path_factory.mktemp('run'))
  config = detect_test.on_canvases(root)
  config.update(eval_every=2)
  prepared = train.prepare(config, workdir)
  state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), prepared.program.abstract)
  params = jax.tree.map(numbers, state.params)
  state = state.replace(step=np.int32(2), params=params)
  data = train.fingerprints(prepared)
  workdir_lib.create(workdir, prepared.config, prepared.metadata, data)
  with checkpoints_lib.Checkpoints(workdir) as checkpoints:
    checkpoints.save(2, state)
  _, metrics = train.train_and_evaluate(config, workdir)
  return workdir, root, metrics


def test_evaluate_command_matches_training_on_other_data(run, capsys):
  """The same images, with classes in another order."""
  workdir, root, metrics = run
  other = drawn.content(4, THINGS, drawn.CATEGORIES[::-1])
  drawn.write(root / 'annotations' / 'instances_test2017.json', other)
  drawn.draw(root / 'test2017', other, grey=(2,))
  flags = [f'--workdir={workdir}', '--split=test', '--option=tight=8']
  assert evaluate_command.main([*flags, '--nodistributed']) == 0
  output = capsys.readouterr().out
  assert f"split 'test' of {root}" in output
  for name in ('loss', 'AP', 'AP50', 'AR100'):
    assert f'{name} {metrics[f"{name}_test"]:.4g}' in output


def test_data_with_other_classes_are_rejected(run, tmp_path):
  found = drawn.content(2, THINGS[:2], drawn.CATEGORIES[:1])
  drawn.write(tmp_path / 'annotations' / 'instances_val.json', found)
  drawn.draw(tmp_path / 'val', found)
  with pytest.raises(ValueError, match="lacks \\['cat', 'cup'\\]"):
    evaluation.evaluate(predict.load(run[0]), 'val', str(tmp_path))


def test_wrong_options_are_reported(run):
  for option, message in (
    ('tihgt=1', "did you mean 'task_options.tight'"),
    ('tight', '--option=tight must be NAME=VALUE'),
  ):
    flags = [f'--workdir={run[0]}', '--split=val', f'--option={option}']
    with pytest.raises(ValueError, match=message):
      evaluate_command.main([*flags, '--nodistributed'])


def test_predict_command_draws_boxes(run, tmp_path, capsys):
  workdir, root, _ = run
  image = next(iter((root / 'val2017').iterdir()))
  out = tmp_path / 'boxes.png'
  flags = [f'--workdir={workdir}', str(image), f'--out={out}', '--threshold=0']
  predict_command.main(flags)
  output = capsys.readouterr().out
  assert any(name in output for name in ('cat', 'dog', 'cup'))
  with Image.open(out) as picture:
    assert min(picture.size) > 30


def test_visualize_command(run, tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(drawing.STYLE, 'savefig.dpi', 40)
  out = tmp_path / 'figures'
  flags = [f'--workdir={run[0]}', f'--out={out}', '--num_images=1']
  visualize.main(flags)
  assert {'query_boxes.png', 'encoder_attention.png', 'index.html'} <= {
    path.name for path in out.iterdir()
  }
  output = capsys.readouterr().out
  assert 'confusion' not in output
  assert 'no classes' not in output


def test_plan_knows_the_classes_of_a_folder(run):
  config = run_config.complete(detect_test.on_canvases(run[1]))
  assert plan.data_size(config) == (4, 3)
