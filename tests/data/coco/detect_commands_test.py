"""Tests of the commands on a detector of a folder in COCO's format."""

from PIL import Image
import pytest

from tests import processes
from tests.data.coco import detect_test, drawn
from vit_jax import predict, train
from vit_jax.commands import predict as predict_command, visualize
from vit_jax.evaluators import evaluation
from vit_jax.planning import plan
from vit_jax.run import config as run_config

THINGS = [drawn.thing(i, i % 4, (i, 0, 20, 20), 7) for i in range(6)]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run of two updates: its folder, its data, and the last metrics."""
  root = drawn.make(tmp_path_factory.mktemp('data') / 'own', 4, THINGS, turned=(1,))
  config = detect_test.on_canvases(root)
  config.update(eval_every=2, checkpoint_every=2)
  workdir = str(tmp_path_factory.mktemp('run'))
  _, metrics = train.train_and_evaluate(config, workdir)
  return workdir, root, metrics


def test_the_evaluation_of_a_run_is_that_of_its_training(run):
  workdir, root, metrics = run
  found = evaluation.evaluate(predict.load(workdir), 'val')
  assert found['num_examples'] == 4
  for name in ('loss', 'AP', 'AP50', 'AR100'):
    assert found[name] == pytest.approx(metrics[f'{name}_test'], rel=1e-5)
  # Another folder of the same classes, in another order.
  other = drawn.content(4, THINGS, drawn.CATEGORIES[::-1])
  drawn.write(root / 'annotations' / 'instances_test2017.json', other)
  drawn.draw(root / 'test2017', other)
  assert evaluation.evaluate(predict.load(workdir), 'test')['num_examples'] == 4


def test_data_of_other_classes_are_refused(run, tmp_path):
  found = drawn.content(2, THINGS[:2], drawn.CATEGORIES[:1])
  drawn.write(tmp_path / 'annotations' / 'instances_val.json', found)
  drawn.draw(tmp_path / 'val', found)
  with pytest.raises(ValueError, match="lacks \\['cat', 'cup'\\]"):
    evaluation.evaluate(predict.load(run[0]), 'val', str(tmp_path))


def test_the_modes_of_evaluation(run):
  """Without padding, on small canvases and on one square."""
  losses = [
    evaluation.evaluate(predict.load(run[0]), 'val', options={'tight': tight})['loss']
    for tight in (1, 0)
  ]
  losses.append(run[2]['loss_test'])  # The run's own: tight=8.
  assert losses == pytest.approx([losses[0]] * 3, rel=0.1)
  assert len(set(losses)) > 1  # A ResNet sees where its padding begins.


@pytest.mark.parametrize(
  'option, said',
  [
    ('tight=-1', 'tight=-1 must be'),
    ('tihgt=1', "did you mean 'task_options.tight'"),
    ('tight=all', "tight='all' must be"),
    ('tight', '--option=tight must be NAME=VALUE'),
  ],
)
def test_wrong_options_are_named(run, option, said):
  def call():
    found = evaluation.parse_options([option])
    evaluation.evaluate(predict.load(run[0]), 'val', options=found)

  with pytest.raises(ValueError, match=said):
    call()


def test_the_command_evaluates(run, tmp_path):
  workdir, root, metrics = run
  config = tmp_path / 'config.py'
  config.write_text('from vit_jax.configs.common import get_config\n')
  status, output = processes.finish(
    config, workdir, '--evaluate=val', '--option=tight=8', data_dir=tmp_path
  )
  assert status == 0, output
  assert f"split 'val' of {root}" in output
  assert f'loss {metrics["loss_test"]:.4g}' in output


def test_the_command_predicts_and_draws(run, tmp_path, capsys):
  workdir, root, _ = run
  image = next(iter((root / 'val2017').iterdir()))
  out = tmp_path / 'boxes.png'
  flags = [f'--workdir={workdir}', str(image), f'--out={out}', '--threshold=0']
  predict_command.main(flags)
  said = capsys.readouterr().out
  assert any(name in said for name in ('cat', 'dog', 'cup'))
  with Image.open(out) as picture:
    assert min(picture.size) > 30


def test_the_command_visualizes(run, tmp_path, capsys):
  out = tmp_path / 'figures'
  flags = [f'--workdir={run[0]}', f'--out={out}', '--num_images=2']
  visualize.main(flags)
  assert {'query_boxes.png', 'encoder_attention.png', 'index.html'} <= {
    path.name for path in out.iterdir()
  }
  said = capsys.readouterr().out
  assert 'confusion' not in said
  assert 'no classes' not in said


def test_a_plan_knows_the_classes_of_a_folder(run):
  config = run_config.complete(detect_test.on_canvases(run[1]))
  assert plan.data_size(config) == (4, 3)
