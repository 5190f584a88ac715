"""Tests of the command that draws figures, on a run of a few steps."""

import shutil
import sys

import jax
import numpy as np
from PIL import Image
import pytest

from tests import conftest, tiny_models
from vit_jax import checkpoint, models, predict
from vit_jax.commands import visualize as visualize_command
from vit_jax.configs import pretrain
from vit_jax.figures import drawing, gallery, visualize
from vit_jax.run import config as run_config
from vit_jax.tasks import classify, masked_patches


def tiny_config(folder, task='classify'):
  """Returns the config of a run of two steps on a folder of images."""
  config = pretrain.get_config(f'testing,{folder}')
  config.task = task
  config.pp.crop = 8
  config.model = tiny_models.config()
  config.model.patches.size = (4, 4)
  config.model.registers = 2
  config.update(batch=8, batch_eval=8, total_epochs=None, warmup_epochs=None)
  config.update(total_steps=2, warmup_steps=1)
  return run_config.complete(config)


def random_numbers(task):
  """Returns parameters of a task, without compiling its model."""
  shapes, _ = jax.eval_shape(task.init, jax.random.key(0))
  rng = np.random.RandomState(0)
  return jax.tree.map(lambda x: rng.randn(*x.shape).astype(x.dtype), shapes)


@pytest.fixture(scope='module')
def run(image_folder, tmp_path_factory):
  """The workdir of a finished run on a folder of images."""
  workdir = tmp_path_factory.mktemp('run')
  config = tiny_config(image_folder)
  metadata = {'class_names': ['ant', 'bee', 'cow']}
  params = random_numbers(classify.Task(config, metadata))
  conftest.write_run(workdir, config, metadata, params, step=2)
  (workdir / 'metrics.jsonl').write_text('{"step": 2, "train_loss": 1.5}\n')
  return workdir


def save(model, path, size=(8, 8)):
  """Writes random weights; returns their path."""
  params = tiny_models.numbers(model, size)
  checkpoint.save(params, str(path))
  return str(path)


@pytest.fixture(scope='module')
def mixer(tmp_path_factory):
  """A weight file of a Mixer."""
  model = models.MlpMixer(
    patches={'size': (4, 4)}, num_classes=3, num_blocks=1, hidden_dim=8,
    tokens_mlp_dim=4, channels_mlp_dim=8,
  )  # fmt: skip
  return save(model, tmp_path_factory.mktemp('mixer') / 'mixer.npz')


@pytest.fixture
def photo(tmp_path):
  path = tmp_path / 'photo.png'
  Image.new('RGB', (20, 30), 'orange').save(path)
  return str(path)


def call(*args):
  visualize_command.main([*map(str, args)])


def test_command_draws_all_figures_of_a_run(run, tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(drawing.STYLE, 'savefig.dpi', 40)
  out = tmp_path / 'figures'
  flags = '--num_images=2', '--explain=grad_cam'
  call(f'--workdir={run}', f'--out={out}', *flags)
  names = {path.name for path in out.iterdir()}
  without = {entry.name for entry in gallery.entries_of(classify.Task)}
  assert names == {f'{name}.png' for name in without} | {'index.html'}
  for name in without:
    with Image.open(out / f'{name}.png') as image:
      assert min(image.size) > 60
  page = (out / 'index.html').read_text()
  assert page.count('<img src="') == len(without)
  assert f'{run.name}, step 2' in page
  assert str(run) not in page
  count = sum(x.size for x in jax.tree.leaves(predict.load(str(run)).params))
  assert f'{count:,}' in page
  output = capsys.readouterr().out
  assert f'{len(without)} figures' in output
  with pytest.raises(FileExistsError, match='pass another folder'):
    call(f'--workdir={run}', f'--out={out}')


def test_notebooks_get_figures_of_named_images(run, photo):
  model = predict.load(str(run))
  found = visualize.figures(model, [photo] * 9, names=['attention_rollout', 'filters'])
  # More images than a figure takes.
  assert sorted(found) == ['attention_rollout', 'attention_rollout_2', 'filters']
  [label] = found['attention_rollout_2'].axes[0].get_xticklabels()
  [[(name, probability)]] = model.predict([photo], top=1)
  assert label.get_text() == f'{name}\n{100 * probability:.0f} %'


def test_weights_without_a_head_for_non_square_images(tmp_path, photo):
  model = tiny_models.tiny(num_classes=0, classifier='gap')
  path = save(model, tmp_path / 'weights.npz', (8, 16))
  loaded = predict.load_weights(path, image_size=(8, 16))
  without = visualize.figures(loaded)
  assert sorted(without) == ['filters', 'position_similarity']
  assert without['position_similarity'].axes[0].get_xlabel() == ('column of the patch')
  assert '2 x 4 patches' in without['position_similarity'].get_suptitle()
  found = visualize.figures(loaded, [photo])
  assert sorted(set(found) - set(without)) == [
    'attention_distance', 'attention_maps', 'attention_rollout', 'patch_components',
  ]  # fmt: skip
  [label] = found['attention_rollout'].axes[0].get_xticklabels()
  assert label.get_text() == 'photo.png'  # There are no classes.


def test_hybrids_show_their_root_convolution_and_feature_grid(tmp_path):
  model = tiny_models.tiny(
    patches={'size': (1, 1)}, resnet={'num_layers': (), 'width_factor': 1}
  )
  loaded = predict.load_weights(save(model, tmp_path / 'r.npz', (16, 16)))
  found = visualize.figures(loaded)
  assert found['filters'].axes[0].get_images()[0].get_array().shape[2] == 3
  assert '28 principal' in found['filters'].get_suptitle()  # Of 7 x 7 x 3.
  assert '4 x 4 patches' in found['position_similarity'].get_suptitle()


def test_errors_of_undrawable_figures(run, mixer, photo, tmp_path, monkeypatch):
  out = tmp_path / 'out'
  named = f'--out={out}', f'--images={photo}'
  attention = '--figures', 'attention_maps'
  with pytest.raises(ValueError, match="'attention_maps' cannot be drawn: .*MlpMixer"):
    call(f'--weights={mixer}', *named, *attention)
  path = save(tiny_models.tiny(), tmp_path / 'weights.npz')
  with pytest.raises(ValueError, match='no images.*--images a.jpg b.png'):
    call(f'--weights={path}', f'--out={out}', *attention)
  with pytest.raises(ValueError, match=r"\['attenton'\] are not among"):
    call(f'--workdir={run}', *named, '--figures', 'attenton')
  with pytest.raises(FileNotFoundError, match="no image file '/no/such.png'"):
    call(f'--workdir={run}', f'--out={out}', '--images=/no/such.png')
  with pytest.raises(FileNotFoundError, match="no split 'nowhere'"):
    call(f'--workdir={run}', f'--out={out}', '--split=nowhere')
  assert not out.exists()


def test_rejects_incompatible_flags(run, mixer, tmp_path, monkeypatch, capsys):
  out = f'--out={tmp_path / "out"}'
  for args, words in (
    ([], '--workdir --weights is required'),
    ([f'--weights={mixer}', '--step=3'], '--step=3 selects a checkpoint of a run'),
    ([f'--workdir={run}', '--num_images=0'], '--num_images=0 must be from 1'),
    ([f'--workdir={run}', '--out=/proc/x'], "out='/proc/x' cannot be written"),
    (
      [f'--workdir={run}', '--foreground=positive', '--figures', 'filters'],
      '--foreground changes none of the figures filters: leave it out',
    ),
    (
      [f'--workdir={run}', '--num_images=2', '--images', 'a.png'],
      '--num_images=2 takes images from a split',
    ),
  ):
    with pytest.raises((ValueError, OSError), match=words):
      call(out, *args)
  with pytest.raises(ValueError, match='not allowed with argument --workdir'):
    call(out, f'--workdir={run}', f'--weights={mixer}')
  assert not (tmp_path / 'out').exists()


def test_missing_checkpoint_and_missing_matplotlib(run, tmp_path, monkeypatch):
  out = tmp_path / 'out'
  copied = tmp_path / 'copy'
  shutil.copytree(run, copied)
  shutil.rmtree(copied / 'checkpoints')
  with pytest.raises(FileNotFoundError, match='has no complete checkpoint'):
    call(f'--workdir={copied}', f'--out={out}')
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ImportError, match=r'\[plots\]'):
    call(f'--workdir={run}', f'--out={out}')
  assert not out.exists()


def test_missing_data_skips_only_figures_that_need_it(run, photo):
  model = predict.load(str(run))
  model.config.dataset = '/no/such/folder'
  subject = visualize.subject(model, [photo])
  _, missing = gallery.choose(subject)
  assert set(missing) == {'confusion', 'mistakes'}
  assert 'the data of the run cannot be opened' in missing['confusion']
  assert '/no/such/folder' in missing['confusion']


def test_masked_patches_are_reconstructed(image_folder):
  config = tiny_config(image_folder, 'masked_patches')
  task = masked_patches.Task(config, {})
  model = task.predictor(random_numbers(task), {}, 0)
  model.workdir = 'given'
  subject = visualize.subject(model, num_images=3)
  [entry], _ = gallery.choose(subject, ['reconstructions'])
  [figure] = gallery.draw(entry, subject).values()
  axes = figure.axes[0]
  assert len(axes.get_xticks()) == 3
  shown = axes.get_images()[0].get_array()
  seen = drawing.as_pixels(subject.batch['image'])
  np.testing.assert_array_equal(shown[:128, :128], seen[0])


def test_explanations_of_named_and_of_the_most_probable_classes(run, photo):
  model = predict.load(str(run))
  names = ['explanations', 'class_explanations']
  methods = ['rollout', 'grad_cam']
  found = visualize.figures(
    model, [photo] * 2, names=names, methods=methods, class_name='bee'
  )
  axes = found['explanations'].axes[0]
  rows = [label.get_text().replace('\n', ' ') for label in axes.get_yticklabels()]
  assert rows == ['image', 'Attention rollout', 'Grad-CAM']
  assert axes.get_xlabel().endswith('explained: bee')
  figure = found['class_explanations']
  assert figure.get_suptitle().startswith('Grad-CAM')
  [classes] = model.predict([photo], top=3)
  texts = [text.get_text() for text in figure.axes[0].texts]
  assert texts[::2] == [f'{name} {100 * p:.0f} %' for name, p in classes]


def test_explanations_need_a_class_and_a_method_of_the_model(run, mixer, photo):
  model = predict.load(str(run))
  with pytest.raises(ValueError, match="class_name='bear' .* ant, bee, cow .*--class"):
    visualize.subject(model, [photo], class_name='bear')
  with pytest.raises(ValueError, match="method='lime' is unknown.*--explain"):
    visualize.subject(model, [photo], methods=['lime'])
  subject = visualize.subject(model, [photo], methods=['rollout'])
  with pytest.raises(ValueError, match="method='rollout' is the same for every class"):
    gallery.choose(subject, ['class_explanations'])
  weights = predict.load_weights(mixer, image_size=(8, 8))
  subject = visualize.subject(weights, [photo], methods=['legrad'])
  with pytest.raises(ValueError, match='explanations.*MlpMixer.*grad_cam'):
    gallery.choose(subject, ['explanations'])
