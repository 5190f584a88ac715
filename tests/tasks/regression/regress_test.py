"""Tests of regression, from a manifest with an age and two coordinates to the report."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from PIL import Image
import pyarrow as pa
from pyarrow import parquet
import pytest
from scipy import stats
from sklearn import metrics

from tests import conftest
from vit_jax import predict, train
from vit_jax.commands import evaluate as command, predict as predict_command
from vit_jax.data import sources
from vit_jax.data.images import images
from vit_jax.run import config as run_config, metrics as metrics_lib
from vit_jax.tasks.regression import scores, targets as targets_lib

COLUMNS = ('age', 'corner')
NAMES = ['age', 'corner[0]', 'corner[1]']


def write_data(root, counts=(24, 13)):
  """Writes manifests of grey images; targets depend on the grey value."""
  rng = np.random.default_rng(0)
  for split, count in zip(('train', 'test'), counts):
    (root / split).mkdir(parents=True)
    lines = []
    for i in range(count):
      grey = int(rng.integers(0, 256))
      Image.fromarray(np.full((8, 8), grey, np.uint8)).save(root / split / f'{i}.png')
      # The offset would lose digits in float32 without care.
      corner = [1e6 + rng.normal(), round(rng.normal(), 3)]
      lines.append(
        json.dumps(
          {'image': f'{split}/{i}.png', 'age': 20 + grey // 4, 'corner': corner}
        )
      )
    (root / f'{split}.jsonl').write_text('\n'.join(lines))
  return root


def make_config(root, **options):
  config = conftest.make_tiny_config(None)
  config.update(task='regress', dataset=str(root), best_metric='mae_age_test')
  config.task_options = {'targets': COLUMNS, **options}
  config.batch_eval = 8  # The last batch is padded.
  return config


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  return write_data(tmp_path_factory.mktemp('ages') / 'data')


@pytest.fixture(scope='module')
def workdir(data):
  """A finished run."""
  folder = data.parent / 'run'
  train.train_and_evaluate(make_config(data), str(folder))
  return folder


def read_targets(path):
  """Reads the targets in a manifest, float64 [n, 3]."""
  rows = map(json.loads, path.read_text().splitlines())
  return np.array([[row['age'], *row['corner']] for row in rows])


def test_a_run_stores_the_scales_of_its_targets(workdir, data):
  stored = json.loads((workdir / 'targets.json').read_text())
  assert [x['name'] for x in stored] == NAMES
  true = read_targets(data / 'train.jsonl')
  # Lists of numbers are float32.
  np.testing.assert_allclose([x['mean'] for x in stored], true.mean(0), rtol=1e-7)
  np.testing.assert_allclose([x['std'] for x in stored], true.std(0), rtol=0.05)
  last = metrics_lib.read(workdir)[-1]
  assert {'loss_test', 'rmse_test', 'mae_age_test', 'mae_corner_test'} < last.keys()
  assert last['num_examples_test'] == 13


def test_report_and_predictions_agree_with_scikit_learn(workdir, data, capsys):
  table = workdir.parent / 'rows.csv'
  command.main(
    [
      f'--workdir={workdir}', '--split=test', '--report', f'--predictions={table}',
      '--nodistributed',
    ]
  )  # fmt: skip
  printed = capsys.readouterr().out
  assert '| corner[1] |' in printed
  rows = pd.read_csv(table)
  assert list(rows)[:3] == ['image', 'age', 'predicted age']
  numbers = [int(path.split('/')[-1].removesuffix('.png')) for path in rows.image]
  want = read_targets(data / 'test.jsonl')[numbers]
  np.testing.assert_allclose(rows[NAMES], want, rtol=1e-6, atol=1e-5)
  report = json.loads((workdir / 'report' / 'report.json').read_text())
  assert report['num_examples'] == len(set(numbers)) == 13
  for name in ('age', 'corner[1]'):  # float32 has few digits of the other.
    true, predicted = rows[name], rows[f'predicted {name}']
    found = report['targets'][name]
    oracle = {
      'mae': metrics.mean_absolute_error(true, predicted),
      'rmse': np.sqrt(metrics.mean_squared_error(true, predicted)),
      'r2': metrics.r2_score(true, predicted),
      'pearson': np.corrcoef(true, predicted)[0, 1],
      'spearman': stats.spearmanr(true, predicted).statistic,
    }
    assert found == pytest.approx(oracle, rel=1e-6, abs=1e-6)
  lines = (workdir / 'report' / 'report.csv').read_text().splitlines()
  assert lines[0] == 'target,mae,rmse,r2,pearson,spearman'
  assert [line.split(',')[0] for line in lines[1:]] == [*NAMES, 'mean']
  picture = workdir / 'report' / 'predictions.png'
  assert picture.read_bytes().startswith(b'\x89PNG')


def test_predictions_tables_and_exports_have_the_units_of_the_data(workdir, data):
  model = predict.load(str(workdir))
  paths = [str(data / 'test' / f'{i}.png') for i in range(3)]
  values = model.values(paths)
  means = read_targets(data / 'train.jsonl').mean(0)
  assert (abs(values - means) < [40, 5, 5]).all()
  rows = model.predict(paths)
  assert [list(row) for row in rows] == [NAMES] * 3
  np.testing.assert_allclose([[*row.values()] for row in rows], values)
  table = model.table(paths).to_pandas()
  np.testing.assert_allclose(table[NAMES], values, rtol=1e-6)
  batch = jax.tree.map(jnp.asarray, model.inputs(paths))
  exported = model.task.exported(model.params, model.extra, batch)
  np.testing.assert_allclose(exported['values'], values, rtol=1e-5)
  assert model.task.output_names == tuple(NAMES)
  [line, *_] = model.report(paths)
  assert line.splitlines()[1] == f'  age  {values[0, 0]:.6g}'


def test_predict_refuses_flags_of_classes(workdir, data):
  image = str(data / 'test' / '0.png')
  with pytest.raises(ValueError, match="'regress' has no --top: leave it out"):
    predict_command.main([f'--workdir={workdir}', image, '--top=3'])


def test_captions_have_the_units_of_the_data(workdir):
  task = predict.load(str(workdir)).task
  age = task.targets[0]
  batch = {'target': np.array([[2.0, 0.0, 0.0]])}
  [caption] = task.captions_of(batch)
  assert caption.text.startswith(f'age {age.mean + 2 * age.std:.4g}\ncorner[0] ')
  [caption] = task.captions_of(batch, np.zeros((1, 3)))
  assert caption.text.startswith(f'age {age.mean:.4g}\n')
  assert 'true: age ' in caption.text


def test_a_run_does_not_resume_with_other_targets(workdir, data):
  path = data / 'train.jsonl'
  content = path.read_text()
  path.write_text(content.replace('"age": ', '"age": 1', 1))
  with pytest.raises(ValueError, match=r"targets.json' differs.*'age'"):
    train.train_and_evaluate(make_config(data), str(workdir))
  path.write_text(content)


@pytest.mark.parametrize(
  'options, expected',
  [
    ({}, [(0.25 + 4 + 9) / 3, 0]),
    ({'loss': 'absolute'}, [(0.5 + 2 + 3) / 3, 0]),
    ({'loss': 'huber'}, [(0.125 + 1.5 + 2.5) / 3, 0]),
    ({'loss': 'huber', 'huber_delta': 2.0}, [(0.125 + 2 + 4) / 3, 0]),
  ],
)
def test_losses_match_literals(options, expected, data):
  config = run_config.complete(make_config(data, **options))
  fields = [targets_lib.Target(name, name, 0.0, 1.0)._asdict() for name in NAMES]
  task = run_config.get_task('regress')(config, {'targets': fields})
  outputs = jnp.array([[0.5, -2, 3], [0, 0, 0]])
  task.model = types.SimpleNamespace(apply=lambda *args, **kwargs: outputs)
  batch = {'image': None, 'target': jnp.zeros((2, 3))}
  (total, weight), _ = task.loss({}, {}, batch, None)
  assert float(weight) == 2
  np.testing.assert_allclose(total, sum(expected), rtol=1e-6)
  batch['mask'] = jnp.array([0.0, 1.0])
  assert tuple(map(float, task.measure({}, {}, batch)['loss'])) == (0, 1)


def test_measures_match_their_definitions():
  true, predicted = np.array([1.0, 2, 2, 4, 9]), np.array([2.0, 1, 3, 3, 7])
  error = predicted - true
  ranks = np.array([1, 2.5, 2.5, 4, 5]), np.array([2, 1, 3.5, 3.5, 5])
  expected = {
    'mae': 6 / 5,
    'rmse': np.sqrt(8 / 5),
    'r2': 1 - (error @ error) / ((true - true.mean()) ** 2).sum(),
    'pearson': np.cov(true, predicted)[0, 1] / true.std(ddof=1) / predicted.std(ddof=1),
    'spearman': np.corrcoef(*ranks)[0, 1],
  }
  assert scores.measure(true, predicted) == pytest.approx(expected, abs=1e-12)
  constant = scores.measure(true, np.full(5, 3.6))
  assert constant['r2'] == pytest.approx(0)
  assert np.isnan([constant['pearson'], constant['spearman']]).all()
  assert np.isnan(scores.measure(np.ones(5), predicted)['r2'])


# --- Targets in files ---


def write_parquet(root, **columns):
  """Writes rows with an image each; returns a config."""
  [count] = {len(values) for values in columns.values()}
  photo = images.encode_png(np.zeros((8, 8, 3), np.uint8))
  root.mkdir(exist_ok=True)
  table = pa.table({'image': [{'bytes': photo}] * count, **columns})
  parquet.write_table(table, root / 'train.parquet', row_group_size=2)
  return run_config.complete(make_config(root))


def measured(config, names):
  source = sources.open_split(config, 'train', ('image', *names))
  return targets_lib.measure(config, source, names)


def test_targets_of_parquet_and_of_mixtures(tmp_path, data):
  ages, corners = [3, 8, 4, 4, 6], [[i / 3, -i] for i in range(5)]
  config = write_parquet(tmp_path, age=ages, corner=corners)
  found = measured(config, COLUMNS)
  assert [x['name'] for x in found] == NAMES
  want = np.c_[ages, corners]
  np.testing.assert_allclose([x['mean'] for x in found], want.mean(0), rtol=1e-6)
  np.testing.assert_allclose([x['std'] for x in found], want.std(0), rtol=1e-6)
  config.dataset = ((str(tmp_path), 0.5), (str(data), 0.5))
  both = [*ages, *read_targets(data / 'train.jsonl')[:, 0]]
  [age] = measured(config, ('age',))
  assert age['mean'] == pytest.approx(np.mean(both))


def test_targets_of_metadata_csv(tmp_path):
  ages = ['3', '8.5', '4']
  lines = ['file_name,age']
  (tmp_path / 'train').mkdir()
  for i, age in enumerate(ages):
    Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / 'train' / f'{i}.png')
    lines.append(f'{i}.png,{age}')
  table = tmp_path / 'train' / 'metadata.csv'
  table.write_text('\n'.join(lines))
  config = run_config.complete(make_config(tmp_path))
  [age] = measured(config, ('age',))
  assert (age['mean'], age['std']) == pytest.approx((31 / 6, np.std([3, 8.5, 4])))
  table.write_text('\n'.join([*lines, '0.png,']))
  with pytest.raises(ValueError, match="metadata.csv:5: there is no 'age'"):
    measured(config, ('age',))


@pytest.mark.parametrize(
  'column, message',
  [
    ([1.0, 2.0, np.nan], r"row 2 .*'age' is \[nan\].*not finite"),
    ([[1.0], [1.0, 2.0], [2.0]], "row 1 .*'age' has 2 values, not 1"),
    ([5, 5, 5], "'age' is 5 in all training examples"),
    (['1', '2', '3'], "'age' is text"),
  ],
)
def test_wrong_targets_are_named(column, message, tmp_path):
  config = write_parquet(tmp_path, age=column)
  with pytest.raises(ValueError, match=message):
    measured(config, ('age',))


@pytest.mark.parametrize(
  'keys, options, message',
  [
    ({'loss': 'sigmoid'}, {}, "loss='sigmoid' is for classes.*task_options.loss"),
    ({'label_smoothing': 0.1}, {}, 'label_smoothing=0.1 .*classes'),
    ({}, {'targets': ('path',)}, "targets=.'path'.*rename"),
    ({}, {'targets': ()}, 'targets=.. names no column'),
    ({}, {'targets': ('height',)}, "has no column 'height': it has .*'age'"),
  ],
)
def test_wrong_configs_are_rejected(keys, options, message, data, tmp_path):
  config = make_config(data, **options)
  config.update(best_metric='loss_test', **keys)
  with pytest.raises(ValueError, match=message):
    train.train_and_evaluate(config, str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


def test_a_plan_reads_no_data(data):
  config = run_config.complete(make_config(data))
  cls = run_config.get_task('regress')
  task = cls(config, cls.planned_metadata(config, None))
  assert task.batch_spec(4)['target'].shape == (4, 2)
