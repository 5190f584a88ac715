"""Tests that the benchmarks run and report the right fields, not how fast they are."""

import itertools
import json
import os
import sys
import threading
import types

import jax
import numpy as np
import pytest
import torch

from benchmarks import (
  __main__ as program,
  alone,
  engines,
  explanations,
  patterns,
  pipeline,
  predicting,
  sampling,
  start,
  timing,
  timm_steps,
  track,
)
from tests import models_test, torch_models
from vit_jax import models_igpt
from vit_jax.configs import models as model_configs


def run(tmp_path, *flags):
  path = tmp_path / 'benchmark.json'
  program.main([f'--json={path}', '--repeats=1', *flags])
  return json.loads(path.read_text())


def test_step_reports_fraction_of_peak(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(timing, 'PRODUCT_SIZE', 512)
  monkeypatch.setattr(timing, 'TURN_SECONDS', 0.0)
  flags = ('--only=inference', '--model=testing', '--image_size=32')
  got = run(tmp_path, *flags)
  assert got['machine']['platform'] == 'cpu'
  step, xla, ratio, product = got['results']['inference']
  assert xla['name'] == 'attention=xla'
  assert ratio['median'] > 0
  assert step['unit'] == 'img/s'
  assert 0 < step['min'] <= step['median'] <= step['max']
  assert 0 < step['share_of_peak'] < 1
  assert product['unit'] == 'GFLOP/s'
  assert '% of peak' in capsys.readouterr().out


class Thread:
  """Runs timm in a thread of this process, with the interface of Popen."""

  def __init__(self, command, **kwargs):
    assert command == [sys.executable, '-m', 'benchmarks.timm_steps']
    requests, self.stdin = (os.fdopen(x, m) for x, m in zip(os.pipe(), 'rw'))
    self.stdout, answers = (os.fdopen(x, m) for x, m in zip(os.pipe(), 'rw'))
    self._thread = threading.Thread(
      target=timm_steps.main, args=(requests, answers), daemon=True
    )
    self._thread.start()

  def kill(self):
    self.stdin.close()

  def communicate(self):
    self._thread.join()


def test_updates_compared_with_timm(monkeypatch, tmp_path, capsys):
  threads = types.SimpleNamespace(Popen=Thread, PIPE=None)
  monkeypatch.setattr(timm_steps, 'subprocess', threads)
  monkeypatch.setattr(timing, 'PRODUCT_SIZE', 128)
  monkeypatch.setattr(timing, 'TURN_SECONDS', 0.0)
  got = run(
    tmp_path, '--only=train', '--config=configs/digits.py', '--image_size=8',
    '--config.model.transformer.num_layers=1', '--batch=8', '--beside=timm_eager',
    '--dtype=bfloat16',
  )  # fmt: skip
  ours, theirs, ratio, product = got['results']['train']
  assert ours['name'].endswith('ViT-digits, batch 8, bfloat16')
  assert theirs['name'] == 'timm_eager'
  assert ratio['median'] == pytest.approx(ours['median'] / theirs['median'])
  assert min(ours['first_call_seconds'], theirs['first_call_seconds']) > 0
  assert product['name'] == 'matrix product, bfloat16'
  assert capsys.readouterr().out.count('compiled in') == 2


@pytest.mark.parametrize('name', ['Ti_16', 'S_32', 'B_16', 'L_16', 'H_14'])
def test_timm_has_the_same_number_of_parameters(name):
  config = model_configs.MODEL_CONFIGS[f'ViT-{name}']
  with torch.device('meta'):
    net = torch_models.timm.models.vision_transformer.VisionTransformer(
      **timm_steps.arguments(config, channels=3)
    )
  # models_test checks this count against our model.
  count = models_test.COUNTS[f'ViT-{name}']
  assert count == sum(x.numel() for x in net.parameters())


@pytest.mark.parametrize(
  'flags, problem',
  [
    (['--model=r50_b16'], 'lack resnet of'),
    (['--model=mixer_b16'], 'lack .*tokens_mlp_dim'),
    (
      ['--config=configs/digits.py', '--config.model.transformer.mlp=swiglu'],
      'lack transformer.mlp',
    ),
    (
      ['--config=configs/digits.py', '--config.model.classifier=gap'],
      'lack classifier',
    ),
    (['--config=configs/digits.py', '--config.model.registers=4'], 'lack registers'),
  ],
)
def test_models_timm_lacks_are_rejected(flags, problem):
  with pytest.raises(ValueError, match=problem):
    program.main(['--beside=timm', *flags])


def test_weights_and_checkpoints(monkeypatch, tmp_path):
  monkeypatch.setattr(start, 'WEIGHTS_MODEL', 'ViT-Ti_16')
  flags = ('--model=testing', '--image_size=32')
  got = run(tmp_path, '--only', 'weights', 'checkpoints', *flags)
  loaded, plain, ratio = got['results']['weights']
  assert loaded['name'] == 'load_pretrained, ViT-Ti_16.npz'
  assert ratio['median'] == pytest.approx(loaded['median'] / plain['median'])
  waits, saved, plain, ratio, restored = got['results']['checkpoints']
  assert 0 < waits['median'] <= saved['median']
  assert ratio['median'] == pytest.approx(saved['median'] / plain['median'])
  assert restored['name'].startswith('checkpoint, testing, ')
  assert restored['median'] > 0


def test_engines_take_turns(monkeypatch, tmp_path):
  def openvino(path, images, dtype):  # It is not among the packages of the tests.
    assert dtype in ('f32', 'bf16')
    return engines._onnx_runtime(path, images)

  monkeypatch.setitem(sys.modules, 'openvino', types.ModuleType('openvino'))
  monkeypatch.setattr(engines, '_openvino', openvino)
  flags = ('--only=engines', '--model=testing', '--image_size=32', '--batch=2')
  rows = run(tmp_path, *flags)['results']['engines']
  assert [row['name'].removeprefix('testing, batch 2, ') for row in rows] == [
    'JAX, float32', 'JAX, bfloat16', 'ONNX Runtime, float32', 'OpenVINO, float32',
    'OpenVINO, bfloat16', 'JAX, int8', 'ONNX Runtime, int8',
  ]  # fmt: skip
  assert all(row['median'] > 0 for row in rows)


def test_predictions_of_photographs(monkeypatch, tmp_path, capsys):
  def check_output(command, text):
    exec(command[2])
    return capsys.readouterr().out

  monkeypatch.setattr(predicting, '_COUNTS', {(64, 48): 3})
  monkeypatch.setattr(predicting, '_WORKERS', 0)
  monkeypatch.setattr(predicting.subprocess, 'check_output', check_output)
  flags = ('--only=predict', '--model=testing', '--image_size=32')
  ours, timms, ratio = run(tmp_path, *flags)['results']['predict']
  assert ours['name'] == 'testing, 64x48 JPEG: model.predict'
  assert timms['name'] == 'timm'
  assert ratio['median'] == pytest.approx(ours['median'] / timms['median'])


def test_engines_are_timed_only_on_request(monkeypatch, tmp_path):
  assert {*program.SECTIONS} - {*program.DEFAULT_SECTIONS} == {'predict', 'engines'}
  monkeypatch.setitem(sys.modules, 'openvino', None)  # Not installed.
  with pytest.raises(ImportError, match='pip install openvino.*--only'):
    run(tmp_path, '--only=engines', '--model=testing')


def test_sampling_comparison(monkeypatch, tmp_path):
  tiny = models_igpt.ImageGPT(16, 1, 2, num_colors=8, num_positions=24)
  monkeypatch.setattr(sampling.models, 'get_model', lambda name: tiny)
  monkeypatch.setattr(sampling, 'STEPS', 2)
  got = run(tmp_path, '--only', 'sampling', '--batch=2')
  ours, other, ratio = got['results']['sampling']
  assert other['name'] == 'without'
  assert ours['unit'] == other['unit'] == 'pixel/s'
  assert ratio['median'] == pytest.approx(ours['median'] / other['median'])


@pytest.mark.parametrize('name', ['ours', 'timm'])
@pytest.mark.parametrize('mode', ['train', 'infer'])
def test_a_program_is_timed_in_its_process(name, mode, capsys):
  sizes = {'width': 32, 'layers': 1, 'patch': 14, 'image_size': 28}
  alone.measure_one(name, mode, 'float32', batch=8, seconds=0.0, **sizes)
  assert json.loads(capsys.readouterr().out) > 0


def test_programs_take_turns_as_processes(monkeypatch, capsys):
  calls = []

  def speed(program, batch, **arguments):
    calls.append(program)
    return 1000.0 * batch + len(calls)

  monkeypatch.setattr(alone, '_in_a_process', speed)
  programs = ('--programs', 'ours', 'timm')
  alone.main(['--rounds=2', '--modes', 'train', '--batch', '2', '3', *programs])
  assert calls == 4 * ['ours', 'timm']
  *_, first, second = capsys.readouterr().out.splitlines()
  assert first.endswith('batch 2, float32 | 2,001, 2,003 | 2,002, 2,004 |')
  assert second.endswith('batch 3, float32 | 3,005, 3,007 | 3,006, 3,008 |')


@pytest.mark.parametrize('name', pipeline.installed())
def test_pipelines_are_timed(name, monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(pipeline, 'BATCH', 8)
  pipeline.photographs(tmp_path, count=8)
  pipeline.measure_one(name, str(tmp_path), batches=2)
  elapsed, processor_seconds = json.loads(capsys.readouterr().out)
  assert elapsed > 0
  assert processor_seconds > 0


def test_tracked_runs_are_compared_with_the_previous_one(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(timing, 'PRODUCT_SIZE', 64)
  jobs = iter([{'value': 10.0, 'unit': 'img/s', 'loss_test': 0.5},
               {'value': 20.0, 'unit': 'img/s', 'loss_test': 0.25}])  # fmt: skip
  monkeypatch.setitem(track.JOBS, 'digits', lambda folder: next(jobs))
  path = tmp_path / 'track.jsonl'
  track.main([str(path), '--only', 'digits'])
  with path.open('a') as file:
    file.write('{"prod')  # As if a write had been cut.
  track.main([str(path), '--only', 'digits'])
  first, _, second = path.read_text().splitlines()
  first, second = json.loads(first), json.loads(second)
  assert first['jobs']['digits']['value'] == 10
  assert second['versions']['jax'] == jax.__version__
  output = capsys.readouterr().out
  assert 'line 2 is not a result' in output
  product = second['product'] / first['product']
  assert f'2.00 x as fast ({2 / product:.2f} x relative' in output
  assert 'loss_test 0.5 -> 0.25' in output
  slow = {'value': 3.0, 'unit': 's'}
  assert '0.50 x' in track.compare('start', slow, {'value': 1.5, 'unit': 's'}, 1.0)
  path.write_text('{')
  with pytest.raises(ValueError, match='track.jsonl'):
    track.main([str(path)])


@pytest.mark.parametrize('side', [2, 5])
def test_pairs_of_local_attention(side):
  places = list(itertools.product(range(side), repeat=2))
  near = [max(abs(a - c), abs(b - d)) <= 3 for a, b in places for c, d in places]
  assert patterns.pairs(side) == sum(near)


def test_curves_of_deletion_change_the_most_relevant_patches_first():
  relevance = np.array([[[0.1, 0.9], [0.5, 0.2]]])
  ranks = explanations.ranks(relevance, np.random.default_rng(0))
  assert ranks.tolist() == [[[3, 0], [1, 2]]]
  # The probability of class 1 is the sum of the patches, which have 2 x 3 pixels.
  image = np.array([[0.1, 0.4], [0.3, 0.2]]).repeat(2, axis=0).repeat(3, axis=1)
  image = image[None, ..., None]

  def probabilities(x):
    total = x.sum(axis=(1, 2, 3)) / 6
    return jax.numpy.stack([1 - total, total], axis=-1)

  classes = np.array([1])
  blank = np.zeros_like(image)
  deleted = explanations.curve(probabilities, image, blank, ranks, classes)
  np.testing.assert_allclose(deleted[:, 0], [1.0, 0.6, 0.3, 0.1, 0.0], atol=1e-6)
  # Trapezia of width 1/4: (1 / 2 + 0.6 + 0.3 + 0.1 + 0 / 2) / 4.
  assert explanations.area(deleted) == pytest.approx(0.375)
  inserted = explanations.curve(probabilities, blank, image, ranks, classes)
  np.testing.assert_allclose(inserted[:, 0], [0.0, 0.4, 0.7, 0.9, 1.0], atol=1e-6)


def test_patches_of_equal_relevance_come_in_random_order():
  order = explanations.ranks(np.zeros((40, 2, 2)), np.random.default_rng(0))
  assert np.sort(order.reshape(40, 4)).tolist() == [[0, 1, 2, 3]] * 40
  assert len({tuple(x) for x in order.reshape(40, 4).tolist()}) > 10


def test_table_of_explanations_has_mean_and_deviation_over_models():
  measured = [{'legrad': (0.1, 0.8), 'random': (0.5, 0.5)} for _ in range(2)]
  measured[1]['legrad'] = (0.3, 0.8)
  assert explanations.table(measured).splitlines()[2:] == [
    '| LeGrad | 0.200 ± 0.141 | 0.800 ± 0.000 |',
    '| random | 0.500 ± 0.000 | 0.500 ± 0.000 |',
  ]
