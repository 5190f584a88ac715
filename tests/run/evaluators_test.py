"""Tests of the evaluators that a config adds; nothing here is compiled."""

import sys
import types

import ml_collections
import pytest

from vit_jax import user_code
from vit_jax.commands import train as train_command
from vit_jax.run import (
  config as run_config,
  evaluators,
  metrics,
  workdir as workdir_lib,
)

MODULE = """
from vit_jax.configs import schema
from vit_jax.evaluators import base
from vit_jax.run import metrics

class Calibration:
  metrics = {'ece': metrics.Metric('%', low=True)}

  def __init__(self, evaluation, bins: schema.Count = 15, name: str = ''):
    self.bins = bins

  def run(self, params, extra, stop):
    return {'ece': 0.125}

class Last(Calibration):
  final = True

class NoRun:
  metrics = {}

class NoStop(Calibration):
  def run(self, params):
    return {'ece': 0.125}

class Reserved(Calibration):
  metrics = {'num_examples': metrics.Metric()}

class OfBatches(base.BatchEvaluator):
  metrics = {'ece': metrics.Metric('%', low=True)}

  def compute(self, params, batch):
    return batch['mask'].sum()

class Unfinished(OfBatches):
  def compute(self, params, extra, batch):
    return batch['mask'].sum()

class WithoutBatch(OfBatches):
  def finish(self, results):
    return {'ece': 0.125}

class Names(Calibration):
  metrics = ('ece',)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
  """A module of a user, on the path."""
  (tmp_path / 'measures.py').write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)
  yield 'measures'
  sys.modules.pop('measures', None)


@pytest.fixture
def config(tiny_config):
  return run_config.complete(tiny_config)


def add(config, **entries):
  config.evaluators = ml_collections.ConfigDict(entries)
  return config


@pytest.mark.parametrize(
  'task, metric',
  [('classify', 'accuracy'), ('regress', 'mae'), ('tests.toy_task', 'loss')],
)
def test_best_metric_is_the_main_one_of_the_first_evaluation(task, metric, tiny_config):
  tiny_config.update(task=task, evals=(('val', 'test'), ('train', 'train')))
  config = run_config.complete(tiny_config)
  assert config.best_metric == f'{metric}_val'
  tiny_config.best_metric = f'{metric}_train'
  assert run_config.complete(tiny_config).best_metric == f'{metric}_train'


@pytest.mark.parametrize(
  'evals, message',
  [(5, 'evals=5 must be a tuple'), (((5, 5),), r'evals: \(5, 5\) must')],
)
def test_wrong_evaluations_are_named(evals, message, tiny_config):
  with tiny_config.ignore_type():
    tiny_config.evals = evals
  with pytest.raises(ValueError, match=message):
    run_config.complete(tiny_config)


def test_an_entry_is_a_metric_of_every_evaluation(config, module):
  config.evals = (('test', 'test'), ('val', 'train[:50]'))
  entry = {'type': 'measures:Calibration', 'bins': 10}
  add(config, ece=entry).best_metric = 'ece_val'
  evaluators.check(config)
  assert evaluators.is_low(config)
  config.evaluators.ece.evals = ['val']  # As stored in JSON.
  evaluators.check(config)
  assert [*evaluators.metrics_of(config)] == [
    'accuracy_test', 'loss_test', 'accuracy_val', 'loss_val', 'ece_val'
  ]  # fmt: skip
  [made] = (x.make(None) for x in evaluators.config_entries(config))
  assert made.bins == 10
  values = {'ece_val': made.run(None, None, None)['ece'], 'num_val': 3}
  kinds = evaluators.metrics_of(config)
  assert metrics.format_metrics(values, kinds) == 'ece_val 12.50 %, num_val 3'


def test_keys_of_probes_are_entries_too(config):
  config.fewshot.update(shots=(1, 5), knn=(20,))
  config.update(layer_probe=10, real_labels='real.json')
  entries = evaluators.run_entries(config)
  assert [x.cls.__name__ for x in entries] == ['Means', 'FewShot', 'LayerProbe', 'Real']
  measured = {
    name: kind.unit
    for x in entries[1:]
    for name, kind in x.metrics(config).items()
  }  # fmt: skip
  assert measured == dict.fromkeys(
    ('fewshot_1', 'fewshot_5', 'knn_20', 'probe_best', 'probe_pixels', 'accuracy_real'),
    '%',
  )  # fmt: skip
  config.fewshot.update(shots=(), knn=())
  few = {'type': 'vit_jax.evaluators.probes:FewShot', 'shots': (2,)}
  add(config, few=few).best_metric = 'fewshot_2_test'
  evaluators.check(config)
  few['shotz'] = 2
  with pytest.raises(
    ValueError, match=r'evaluators.few: .*fewshot.shotz.*fewshot.shots'
  ):
    evaluators.check(add(config, few=few))


@pytest.mark.parametrize(
  'entry, message',
  [
    ({'type': 'meazures:A'}, r"evaluators.e.type='meazures:A'.*no module 'meazures'"),
    ({'type': 'measures.x:A'}, r'evaluators.e.type=.*measures.x'),
    ({'type': 'measures'}, r"evaluators.e.type='measures'.*'MODULE:CLASS'"),
    ({'type': 'measures:Ece'}, r'evaluators.e.type=.*no class Ece'),
    ({'type': 'measures:NoRun'}, r'evaluators.e.type=.*lacks run'),
    ({'type': 'measures:Unfinished'}, r'lacks finish: .*BatchEvaluator'),
    ({'type': 'measures:WithoutBatch'}, r'must be compute\(self, params, extra, batch'),
    ({'type': 'measures:Reserved'}, r"evaluators.e .*'num_examples'.*another name"),
    (
      {'type': 'measures:NoStop'},
      r'evaluators.e.type=.*run\(self, params, extra, stop',
    ),
    ({'type': 'measures:Names'}, r"evaluators.e: metrics=\('ece',\).*must be a dict"),
    ({'bins': 0}, r'evaluators.e.bins=0 must be an integer of at least 1'),
    ({'bin': 5}, r"evaluators.e.type=.*'bin'.*bins, name"),
    ({'evals': ('val',)}, r"evaluators.e.evals=.*no evaluation 'val', use test"),
    ({'type': 'vit_jax.evaluators.means:Means'}, r"evaluators.e measure.*'accuracy'"),
  ],
)
def test_wrong_entry_is_named(config, module, entry, message):
  add(config, e={'type': 'measures:Calibration', **entry})
  with pytest.raises(ValueError, match=message):
    evaluators.check(config)


@pytest.mark.parametrize(
  'values, message',
  [
    (0.5, r"run=0.5, the result of SimpleNamespace.run: return a dict.*'ece'"),
    (None, 'run=None.*return a dict'),
    ({'ece': [0.5, 0.5]}, 'run=.*return a dict with a number'),
    ({'ecc': 0.5}, r"run=\['ecc'\].*lacks \['ece'\].*`measure`"),
  ],
)
def test_wrong_results_of_an_evaluator_are_named(values, message):
  evaluator = types.SimpleNamespace(
    metrics={'ece': metrics.SHARE}, run=lambda params, extra, stop: values
  )
  with pytest.raises(ValueError, match=message):
    evaluators.run(evaluator, {}, {}, None)


def test_metrics_of_the_last_step_do_not_compare_checkpoints(config, module):
  add(config, e={'type': 'measures:Last'}).best_metric = 'ece_test'
  with pytest.raises(ValueError, match=r"best_metric='ece_test' .*accuracy_test"):
    evaluators.check(config)


def test_the_command_line_takes_a_dict_and_names_a_wrong_module(module, tmp_path):
  args = ['--config=configs/digits.py', f'--workdir={tmp_path}/run']
  text = "{'ece': {'type': 'measures:Calibration', 'bins': 10}}"
  config = train_command.parse([*args, f'--config.evaluators={text}']).config
  evaluators.check(run_config.complete(config))
  assert config.evaluators.ece.bins == 10
  with pytest.raises(ValueError, match='evaluators=.* must be evaluators by name'):
    train_command.parse([*args, "--config.evaluators={'ece': 'measures'}"])
  with pytest.raises(ValueError, match="no module 'meazures'"):
    train_command.main(
      [*args, "--config.evaluators={'ece': {'type': 'meazures:Calibration'}}"]
    )


def test_stored_evaluators_run_only_if_their_modules_are_trusted(
  config, module, tmp_path
):
  add(config, ece={'type': 'measures:Calibration'})
  workdir_lib.create(tmp_path / 'run', config, {'class_names': ['a', 'b']}, {})
  stored, _ = workdir_lib.load(tmp_path / 'run')
  with pytest.raises(
    user_code.ForeignModuleError, match="evaluator 'ece'.*--task=measures"
  ):
    evaluators.check_trusted(stored.evaluators)
  assert evaluators.config_entries(stored, trusted=False) == []
  assert 'measures' not in sys.modules
