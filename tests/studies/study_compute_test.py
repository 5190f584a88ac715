"""Tests of studies over the compute of their runs."""

import json

import pytest

from tests import commands, tiny_models
from tests.planning import flops_test
from vit_jax import models
from vit_jax.configs import (
  compute_transfer,
  data_scaling,
  fashion_mnist,
  masked_patches_transfer,
  noisy_student_digits,
)
from vit_jax.planning import flops
from vit_jax.studies import runs, study


def config_of(data_dir):
  config = compute_transfer.get_config()
  config.base.tfds_data_dir = data_dir
  return config


def test_compute_of_runs_matches_the_closed_form(
  data_dir, tmp_path, monkeypatch, capsys
):
  config = config_of(data_dir)
  config.variants = config.variants[:3]
  config.x = config.x[:3]
  done = {
    f'ViT_{steps}_updates_{seed}': {'fewshot_5_test': steps / 1000 + seed / 100}
    for steps in (60, 180, 540)
    for seed in (0, 1, 2)
  }
  outcome = runs.Outcome(tmp_path, done, {}, {})
  monkeypatch.setattr(runs, 'train_all', lambda *args: outcome)
  study.study(config, str(tmp_path))
  count = flops_test.multiply_adds(
    data_scaling.families()['ViT'], (32, 32), 5, channels=1, as_run=False
  )
  rows = json.loads((tmp_path / 'study.json').read_text())
  for row, steps in zip(rows, (60, 180, 540), strict=True):
    assert row['line'] == 'ViT'
    # 5 classes; 32 images per update.
    assert row['x'] == pytest.approx(6 * count * 32 * steps / 1e18)
    assert row['mean'] == pytest.approx(steps / 1000 + 0.01)
  out = capsys.readouterr().out
  assert all(f'{row["x"]:.4g}' in out for row in rows)


def test_a_wrong_x_value_is_named(data_dir, tmp_path):
  config = config_of(data_dir)
  config.x = (('ViT', 'flops'), *config.x[1:])
  with pytest.raises(ValueError, match="x=.*'flops'.*config.x"):
    study.study(config, str(tmp_path))


@pytest.mark.parametrize('dataset', data_scaling.SUBSETS)
def test_small_models_have_similar_compute(dataset):
  config = data_scaling.get_config(dataset)
  assert config.base.dataset == dataset
  assert [x for _, x in config.x] == 3 * [*data_scaling.SUBSETS[dataset]]
  configs = {line: run[1]['model'] for (line, _), run in zip(config.x, config.variants)}
  counts = {
    line: flops.forward_flops(models.make_model(model, num_classes=10), (32, 32), 1)
    for line, model in configs.items()
  }
  assert list(counts) == ['ViT', 'BiT', 'hybrid']
  assert max(counts.values()) < 1.2 * min(counts.values())


@pytest.mark.parametrize(
  'module',
  [compute_transfer, data_scaling, masked_patches_transfer, noisy_student_digits],
)
def test_studies_of_fashion_mnist(module):
  config = module.get_config('fashion_mnist')
  commands.check_config(config)
  datasets = {run.dataset for run in commands.runs_in(config)}
  assert datasets == {'fashion_mnist'}
  name = module.__name__.rpartition('.')[2]
  with pytest.raises(ValueError, match=f'{name}.py:mnist .* digits, fashion_mnist'):
    module.get_config('mnist')


@pytest.mark.parametrize(
  'name, path, shape',
  [
    ('vit', 'Transformer/posembed_input/pos_embedding', (1, 50, 96)),
    ('hybrid', 'Transformer/posembed_input/pos_embedding', (1, 50, 96)),
    ('mixer', 'MixerBlock_3/token_mixing/Dense_0/kernel', (49, 48)),
    ('bit', 'head/kernel', (512, 10)),
  ],
)
def test_small_models_for_28_pixels(name, path, shape):
  for dataset, flip in (('fashion_mnist', True), ('mnist', False)):
    config = fashion_mnist.get_config(f'{name},{dataset}')
    assert (config.dataset, config.pp.flip) == (dataset, flip)
    commands.check_config(config)
  model = models.make_model(config.model, num_classes=10)
  found = tiny_models.shapes(model, config.pp.crop, channels=1)
  assert found[path].shape == shape


def test_unknown_small_models_are_rejected():
  with pytest.raises(ValueError, match="'vti'.*fashion_mnist.py:"):
    fashion_mnist.get_config('vti')
