"""Tests of the plan search, on made-up plans."""

import pytest

from vit_jax.configs import bit_pretrain, pretrain
from vit_jax.planning import search


def config_of(arg, **fields):
  config = pretrain.get_config(arg)
  config.update(fields)
  return config


class Plans:
  """Makes up plans from the memory per image and for all parameters.

  More images at once are faster; with `remat` they need a tenth of the memory and
  take twice as long.
  """

  def __init__(self, per_image=10, params=100, peak=1.0):
    self.per_image, self.params, self.peak = per_image, params, peak
    self.seen = []

  def __call__(self, config):
    mesh, model = config.mesh, config.model
    remat = model.get('transformer', model).remat
    self.seen.append((mesh.fsdp, mesh.model, remat, config.accum_steps))
    devices = mesh.data * mesh.fsdp * mesh.model
    images = config.batch // devices // config.accum_steps
    memory = images * self.per_image * (0.1 if remat else 1)
    memory += self.params / mesh.fsdp
    share = images / (images + 1) * (0.5 if remat else 1) * self.peak
    return {
      'fits': memory <= 64,
      'memory_per_core_bytes': memory,
      'memory_of_core_bytes': 64,
      'share_of_peak': share,
      'images_per_second_per_core': 100 * share,
      # Sums over split heads cross the network.
      'images_per_second_per_core_with_network': 100 * share / mesh.model,
    }


def steps(plans, *key):
  """Numbers of micro-batches tried, in order."""
  return [a for *found, a in plans.seen if tuple(found) == key]


def test_meshes():
  tried = list(search.meshes(config_of('b16,imagenet2012'), 32))
  assert tried == [
    {'data': 1, 'fsdp': 32, 'model': 1},
    {'data': 4, 'fsdp': 8, 'model': 1},
    {'data': 32, 'fsdp': 1, 'model': 1},
    {'data': 1, 'fsdp': 16, 'model': 2},
  ]
  # 3 heads cannot be split over 2 devices.
  config = config_of('ti16,imagenet2012')
  assert all(m['model'] == 1 for m in search.meshes(config, 32))
  assert list(search.meshes(config, 1)) == [{'data': 1, 'fsdp': 1, 'model': 1}]


def test_fewest_micro_batches_that_fit_best_plan_first(capsys):
  plans = Plans()
  config = config_of('b16,imagenet2012', batch=1024)
  best = search.search(config, 32, plans)
  assert all(p['fits'] for p in best)
  speeds = [p['images_per_second_per_core_with_network'] for p in best]
  assert speeds == sorted(speeds, reverse=True)
  assert best[0]['accum_steps'] == 8
  assert best[0]['flags'] == (
    '--config.mesh.data=1 --config.mesh.fsdp=32 --config.mesh.model=1 '
    '--config.model.transformer.remat= --config.accum_steps=8'
  )
  # 32 images at 10 each need five times the memory: tries 4, then 8.
  assert steps(plans, 32, 1, '') == [1, 4, 8]
  # Starts from there and goes down as long as it fits.
  assert steps(plans, 8, 1, '') == [8, 4]
  # Unsharded parameters (100) never fit, however few the images.
  assert steps(plans, 1, 1, '')[-1] == 32
  assert not any('--config.mesh.data=32' in p['flags'] for p in best)
  # At 4/5 of the peak, recomputation cannot win.
  assert not any(remat for _, _, remat, _ in plans.seen)
  assert config.mesh.fsdp == 1  # The caller's config is unchanged.
  out = capsys.readouterr().out
  assert out.index(f'The best of {len(plans.seen)}, with') > out.index('not fit')
  assert '80.0 images/s a device' in out.rpartition('The best')[2]


def test_tries_recomputation_where_it_could_win():
  # Without it only one image fits: half of the peak.
  plans = Plans(per_image=50)
  config = config_of('b16,imagenet2012', batch=1024)
  search.search(config, 32, plans)
  assert steps(plans, 32, 1, '')[-1] == 32
  assert steps(plans, 32, 1, 'dots') == [32, 16, 8, 4, 2]
  assert steps(plans, 32, 1, 'full') == [4, 2]


def test_no_micro_batches_if_the_whole_batch_fits():
  plans = Plans(per_image=1, params=1, peak=0.1)
  search.search(config_of('b16,imagenet2012', batch=256), 8, plans)
  assert {key[2:] for key in plans.seen} == {('', 1)}
  assert len(plans.seen) == 3


def test_returns_all_plans_if_none_fits(capsys):
  plans = Plans(params=10_000)
  got = search.search(config_of('b16,imagenet2012', batch=256), 8, plans)
  assert len(got) == len(plans.seen) > 0
  assert not any(p['fits'] for p in got)
  assert {remat for _, _, remat, _ in plans.seen} == {'', 'dots', 'full'}
  assert 'No plan fits: use more devices' in capsys.readouterr().out


def test_a_bit_resnet_recomputes_everything_or_nothing():
  plans = Plans(params=10_000)
  config = bit_pretrain.get_config('bit_r50x1,imagenet2012')
  config.batch = 256
  search.search(config, 8, plans)
  assert {(model, remat) for _, model, remat, _ in plans.seen} == {
    (1, ''), (1, 'full'),
  }  # fmt: skip


def test_doubles_micro_batches_if_the_memory_is_unknown():
  known = Plans()

  def plan(config):
    result = known(config)
    if not result['fits']:
      result['memory_per_core_bytes'] = None
    return result

  best = search.search(config_of('b16,imagenet2012', batch=1024), 32, plan)
  assert steps(known, 32, 1, '') == [1, 2, 4, 8]
  assert best[0]['accum_steps'] == 8


def test_a_batch_that_cannot_be_split_is_named():
  config = config_of('b16,imagenet2012', batch=13)
  with pytest.raises(ValueError, match='batch=13 is not a mult.*batch=16'):
    search.search(config, 8, Plans())
