"""Images of six channels, from the files to predictions, tables, figures and exports."""

import copy
import io
import json
import pathlib
import re
import shutil

import jax
import numpy as np
from PIL import Image
import pytest
from sklearn import decomposition
import tifffile
import torch

from tests import tiny_models
from vit_jax import checkpoint, predict, preprocess, train
from vit_jax.commands import index as index_command
from vit_jax.configs import common, pretrain
from vit_jax.data import pixel_statistics
from vit_jax.data.images import false_colours
from vit_jax.figures import visualize
from vit_jax.inference import export, serving
from vit_jax.run import config as run_config, workdir as workdir_lib
from vit_jax.tasks.detection import detect
from vit_jax.tasks.regression import regress
from vit_jax.weights import convert

CLASSES = {'dry': 0, 'wet': 3000}


def npy(values):
  file = io.BytesIO()
  np.save(file, values)
  return file.getvalue()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """TIFF files of six pages of 16 bits, whose last channel tells the class."""
  root = tmp_path_factory.mktemp('six')
  rng = np.random.RandomState(0)
  for split, count in (('train', 8), ('test', 3)):
    for name, shift in CLASSES.items():
      (root / split / name).mkdir(parents=True)
      for i in range(count):
        planes = rng.randint(0, 2000, (6, 8, 8)).astype(np.uint16)
        planes[5] += shift
        path = root / split / name / f'{i}.tif'
        tifffile.imwrite(path, planes, photometric='minisblack')
  return root


@pytest.fixture(scope='module')
def config(folder):
  config = pretrain.get_config(f'testing,{folder}')
  config.model = tiny_models.config()
  config.model.patches.size = (4, 4)
  with config.ignore_type():
    config.pp.update(
      crop=8, channels=6, range='percentile', mean='measured', std='measured',
      random_erasing=0.2, rotate=10.0,
    )  # fmt: skip
  config.task_options = {'mixup': 0.2}
  config.update(
    batch=16, batch_eval=8, total_epochs=40.0, warmup_epochs=5.0, base_lr=1e-2,
    optimizer='adam', checkpoint_every=40, eval_every=40, log_images=2,
  )  # fmt: skip
  return config


@pytest.fixture(scope='module')
def statistics(folder):
  """The statistics that `vit_jax index --statistics` writes."""
  assert index_command.main([str(folder), 'train', '--statistics']) == 0
  return pixel_statistics.read(f'{folder}/train.statistics.json')


@pytest.fixture(scope='module')
def run(config, statistics, tmp_path_factory):
  """The folder of a run, and its metrics."""
  workdir = tmp_path_factory.mktemp('run')
  _, metrics = train.train_and_evaluate(copy.deepcopy(config), str(workdir))
  return workdir, metrics


@pytest.fixture(scope='module')
def model(run):
  return predict.load(str(run[0]))


@pytest.fixture(scope='module')
def paths(folder):
  return sorted(map(str, folder.glob('test/*/*.tif')))


def read(path):
  return np.moveaxis(tifffile.imread(path), 0, -1)  # [H, W, C]


def test_statistics_are_those_of_all_pixels(folder, statistics):
  pixels = [read(path).reshape(-1, 6) for path in folder.glob('train/*/*.tif')]
  pixels = np.concatenate(pixels)
  assert statistics.num_images == 16
  np.testing.assert_array_equal(statistics.lowest, pixels.min(axis=0))
  np.testing.assert_array_equal(statistics.highest, pixels.max(axis=0))
  np.testing.assert_allclose(statistics.mean, pixels.mean(axis=0))
  np.testing.assert_allclose(statistics.std, pixels.std(axis=0))
  bounds = [statistics.low_percentile, statistics.high_percentile]
  np.testing.assert_allclose(bounds, np.percentile(pixels, (0.5, 99.5), axis=0))


def test_a_run_learns_from_the_last_channel_and_stores_the_statistics(
  run, folder, config, statistics
):
  workdir, metrics = run
  assert metrics['accuracy_test'] == 1
  stored, _ = workdir_lib.load(workdir)
  assert tuple(map(tuple, stored.pp.range)) == statistics.fields()['range']
  assert tuple(stored.pp.mean) == tuple(statistics.mean)
  assert Image.open(pathlib.Path(workdir) / 'test_images.png').mode == 'RGB'
  # The stored numbers are used when the run resumes.
  path = folder / 'train.statistics.json'
  content = path.read_text()
  path.write_text('{}')
  try:
    train.train_and_evaluate(copy.deepcopy(config), str(workdir))
    with pytest.raises(
      ValueError, match=r"statistics\.json' is damaged.*vit_jax index"
    ):
      pixel_statistics.resolve(run_config.complete(config))
  finally:
    path.write_text(content)


def test_predictions_are_of_the_standardised_values(model, paths, statistics):
  values = np.stack([read(path) for path in paths]).astype(np.float64)
  clipped = values.clip(statistics.low_percentile, statistics.high_percentile)
  inputs = (clipped - statistics.mean) / statistics.std
  apply = jax.jit(
    lambda params, x: model.model.apply({'params': params}, x, train=False)
  )
  expected = apply(model.params, inputs.astype(np.float32))
  np.testing.assert_allclose(model.logits(paths), expected, atol=1e-4)
  arrays = [value.astype(np.uint16) for value in values]
  tensor = torch.tensor(values[3].transpose(2, 0, 1))  # float64 [C, H, W]
  forms = [arrays[0], npy(arrays[1]), io.BytesIO(npy(values[2])), tensor]
  np.testing.assert_allclose(model.logits(forms), expected[:4], atol=1e-4)
  names = [predictions[0][0] for predictions in model.predict(paths)]
  assert names == [pathlib.Path(path).parent.name for path in paths]
  with pytest.raises(ValueError, match=r'5 channels, and pp\.channels=6'):
    model.logits([arrays[0][..., :5]])


def test_tables_name_images_of_other_channels(model, paths, tmp_path):
  path = tmp_path / 'grey.npy'
  np.save(path, np.zeros((8, 8)))
  table = model.table([*paths, str(path)])
  assert table['class'].to_pylist()[:-1] == 3 * ['dry'] + 3 * ['wet']
  assert '1 channel, and pp.channels=6' in table['error'].to_pylist()[-1]


def test_an_exported_model_predicts_the_same_with_numpy(model, paths, tmp_path):
  model.export(tmp_path / 'out', 'stablehlo')
  facts = serving.read_facts(tmp_path / 'out')
  exported = export.FORMATS['stablehlo'].load(tmp_path / 'out')
  contents = [pathlib.Path(path).read_bytes() for path in paths[:2]]
  contents.append(npy(read(paths[2])))
  images = np.stack([serving.prepare(x, facts['preprocessing']) for x in contents])
  got = exported({'image': images})['logits']
  np.testing.assert_allclose(got, model.logits(paths[:3]), atol=1e-4)
  with pytest.raises(ValueError, match='uint8=True is for images of 8-bit colour'):
    model.export(tmp_path / 'bytes', 'stablehlo', uint8=True)
  with pytest.raises(ValueError, match='1 channels, and the model reads 6'):
    serving.prepare(npy(np.zeros((8, 8))), facts['preprocessing'])


def test_weights_keep_the_range_of_the_values(model, run, paths, tmp_path):
  weights = str(tmp_path / 'six.npz')
  convert.convert(str(run[0]), weights)
  loaded = predict.load_weights(weights)
  np.testing.assert_allclose(
    loaded.probabilities(paths), model.probabilities(paths), atol=1e-6
  )
  _, notes = convert.convert(str(run[0]), str(tmp_path / 'hf'), 'hf')
  assert any('range of the values' in note for note in notes)
  config = copy.deepcopy(model.config)
  config.update(pretrained=weights, pretrained_dir=None)
  config.pp = common.get_config().pp
  config.pp.update(crop=8, channels=6, match_pretrained=True)
  matched = checkpoint.with_preparation(config).pp
  for name in ('range', 'mean', 'std'):
    np.testing.assert_array_equal(matched[name], model.config.pp[name])


@pytest.mark.parametrize('antialias', [False, True])
def test_servers_resize_like_predictions(antialias):
  pp = common.get_config().pp
  with pp.ignore_type():
    pp.update(
      crop=(8, 10), resize=12, channels=6, range=(0, (9, 8, 9, 8, 9, 8)), mean=3.0,
      std=2.0, antialias=antialias, interpolation='bicubic' if antialias else 'bilinear',
    )  # fmt: skip
  facts = {
    'size': [8, 10], 'resize': 12, 'channels': 6, 'range': [-1, 1],
    'value_range': [0, [9, 8, 9, 8, 9, 8]], 'value_mean': 3.0, 'value_std': 2.0,
    'jpeg_shrink': False, 'resize_mode': 'squash', 'antialias': antialias,
    'interpolation': pp.interpolation, 'crop_rounding': 'down',
  }  # fmt: skip
  content = npy(np.random.RandomState(0).uniform(0, 9, (31, 47, 6)))
  expected = preprocess.prepare(content, None, pp)
  got = serving.prepare(content, json.loads(json.dumps(facts)))
  np.testing.assert_allclose(got, expected, atol=2e-3)


def test_figures_show_components_or_chosen_channels(model, paths):
  pp = copy.deepcopy(model.config.pp)
  scaled = np.random.RandomState(0).uniform(-1, 1, (2, 9, 9, 6)) ** 3
  scaled[..., 4] *= 3
  shown = false_colours.of_scaled(scaled, pp)
  assert shown.shape == (2, 9, 9, 3)
  components = decomposition.PCA(3).fit_transform(scaled.reshape(-1, 6))
  for got, expected in zip(shown.reshape(-1, 3).T, components.T):
    low, high = np.percentile(expected, (1, 99))
    is_inside = (expected > low) & (expected < high)  # The others are clipped.
    correlation = np.corrcoef(got[is_inside], expected[is_inside])[0, 1]
    assert abs(correlation) == pytest.approx(1)
  pp.shown_channels = (5, 0, 2)
  np.testing.assert_array_equal(
    false_colours.of_scaled(scaled, pp), scaled[..., [5, 0, 2]]
  )
  inputs = model.inputs(paths[:1])['image']
  expected = (read(paths[0]) - np.array(pp.range[0])) / np.subtract(*pp.range[::-1])
  np.testing.assert_allclose(
    false_colours.of_inputs(inputs, pp)[0],
    (2 * expected - 1).clip(-1, 1)[..., [5, 0, 2]],
    atol=1e-4,
  )
  names = ['attention_rollout', 'filters', 'mistakes']
  drawn = visualize.figures(model, paths[:2], names=names[:2])
  assert set(names[:2]) <= {*drawn}


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(range='percentile', channels=5), 'channels=5, and the images have 6'),
    (
      dict(range='percentile', train='test'),
      "test.statistics.json' is missing: run vit",
    ),
    (dict(range='percentile', train='train+test'), 'several splits'),
  ],
)
def test_statistics_that_do_not_fit_are_named(config, statistics, changes, message):
  changed = run_config.complete(config)
  with changed.pp.ignore_type():
    changed.pp.update(mean=None, std=None, **changes)
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    pixel_statistics.resolve(changed)


def test_statistics_of_another_number_of_images_are_reported(
  config, statistics, folder, capsys
):
  pixel_statistics.resolve(run_config.complete(config))
  assert 'had 16 images' not in capsys.readouterr().err
  added = folder / 'train' / 'dry' / 'added.tif'
  shutil.copy(folder / 'train' / 'dry' / '0.tif', added)
  pixel_statistics.resolve(run_config.complete(config))
  added.unlink()
  message = r"when 'train' had 16 images, and it has 17: .* run vit_jax index \S+ train"
  assert re.search(message, capsys.readouterr().err)


def test_regression_reads_other_channels(config, statistics, paths, tmp_path):
  lines = []
  for path in paths:
    lines.append(json.dumps({'image': path, 'moisture': float(read(path).mean())}))
  for split in ('train', 'test'):
    (tmp_path / f'{split}.jsonl').write_text('\n'.join(lines))
  changed = run_config.complete(config)
  changed.update(
    dataset=str(tmp_path), task='regress', best_metric='mae_test', label_smoothing=0
  )
  changed.task_options = {'targets': ('moisture',)}
  with changed.pp.ignore_type():
    changed.pp.update(statistics.fields())
  prepared = train.prepare(changed)
  assert isinstance(prepared.program.task, regress.Task)
  assert prepared.program.abstract.params['embedding']['kernel'].shape[2] == 6


def test_other_tasks_refuse_a_range(config):
  changed = run_config.complete(config)
  changed.task = 'detect'
  changed.task_options = {}
  with pytest.raises(ValueError, match="pp.range=.*'detect' is for images of 8-bit"):
    detect.Task(run_config.complete(changed), {'class_names': ['a']})
