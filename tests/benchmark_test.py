"""Tests that the benchmark runs and reports what it should; not how fast."""

import json
import types

import pytest

from tests import processes
from vit_jax import models_igpt
from vit_jax.benchmarks import pipeline
from vit_jax.benchmarks import sampling
from vit_jax.benchmarks import start
from vit_jax.benchmarks import timing
from vit_jax.commands import benchmark as benchmark_command


def run(monkeypatch, tmp_path, *flags):
  path = tmp_path / 'out' / 'benchmark.json'
  benchmark_command.main([f'--json={path}', '--repeats=1', *flags])
  return json.loads(path.read_text())


def test_steps_are_reported_with_their_share_of_the_peak(
  monkeypatch, tmp_path, capsys
):
  monkeypatch.setattr(timing, 'PRODUCT_SIZE', 512)
  got = run(
    monkeypatch, tmp_path, '--only', 'train', 'inference', '--model=testing',
    '--image_size=32',
  )  # fmt: skip
  assert got['machine']['platform'] == 'cpu'
  for section in ('train', 'inference'):
    step, ratio, product = got['results'][section]
    assert ratio['name'] == 'ratio to attention=xla'
    assert ratio['median'] > 0
    assert step['unit'] == 'img/s'
    assert 0 < step['min'] <= step['median'] <= step['max']
    assert 0 < step['share_of_peak'] < 1
    assert product['unit'] == 'GFLOP/s'
  assert '% of peak' in capsys.readouterr().out


def test_sampling_is_compared(monkeypatch, tmp_path):
  tiny = models_igpt.ImageGPT(16, 1, 2, num_colors=8, num_positions=24)
  monkeypatch.setattr(sampling.models, 'get_model', lambda name: tiny)
  monkeypatch.setattr(sampling, 'STEPS', 2)
  got = run(monkeypatch, tmp_path, '--only', 'sampling', '--batch=2')
  ours, other, ratio = got['results']['sampling']
  assert other['name'] == 'without, beside it'
  assert ours['unit'] == other['unit'] == 'pixel/s'
  assert ratio['median'] == pytest.approx(ours['median'] / other['median'])


def test_pipelines_take_turns(monkeypatch, tmp_path):
  few = {'BATCH': 8, 'BATCHES': 2}

  def check_output(command, text):
    *_, code = command
    values = ''.join(f'pipeline.{k} = {v}\n' for k, v in few.items())
    before = 'from vit_jax.benchmarks import pipeline\n' + values
    assert text
    return processes.run_code(before + code).splitlines()[-1]

  for name, value in few.items():
    monkeypatch.setattr(pipeline, name, value)
  forked = types.SimpleNamespace(check_output=check_output)
  monkeypatch.setattr(pipeline, 'subprocess', forked)
  got = run(monkeypatch, tmp_path, '--only', 'pipeline')
  ours, plain, ratio = got['results']['pipeline']
  assert ratio['median'] == pytest.approx(ours['median'] / plain['median'])


def test_imports_are_compared(monkeypatch, tmp_path):
  got = run(monkeypatch, tmp_path, '--only', 'import')
  ours, theirs, ratio = got['results']['import']
  assert ratio['median'] == pytest.approx(ours['median'] / theirs['median'])
  assert ours['unit'] == 's'


def test_weights_are_loaded_beside_plain_numpy(monkeypatch, tmp_path):
  monkeypatch.setattr(start, 'WEIGHTS_MODEL', 'ViT-Ti_16')
  got = run(monkeypatch, tmp_path, '--only', 'weights')
  ours, plain, ratio = got['results']['weights']
  assert ratio['median'] == pytest.approx(ours['median'] / plain['median'])
  assert ours['name'] == 'load_pretrained, ViT-Ti_16.npz'


def test_turns_alternate_and_a_function_may_time_itself():
  calls = []
  first, second = timing.measure(
    lambda: calls.append('a'), lambda: calls.append('b') or 7.0, repeats=2
  )
  assert calls == list('ababab')
  assert second == [7.0, 7.0]
  assert len(first) == 2
  assert timing.row('x', [3.0, 1.0, 2.0], 's')['median'] == 2.0
