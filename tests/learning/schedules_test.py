"""Tests of schedules against closed forms."""

import functools

import numpy as np
import pytest

from vit_jax import utils
from vit_jax.configs import common
from vit_jax.learning import schedules


def values(schedule, steps):
  return [float(schedule(s)) for s in steps]


def test_warm_up_is_linear_and_does_not_start_at_zero():
  schedule = schedules.create_learning_rate_schedule(100, 0.5, 'cosine', 5)
  np.testing.assert_allclose(
    values(schedule, range(6)), [0.1, 0.2, 0.3, 0.4, 0.5, 0.5], rtol=1e-6
  )


def test_cosine_and_linear_end_at_the_papers_values():
  cosine = schedules.create_learning_rate_schedule(110, 2.0, 'cosine', 10)
  np.testing.assert_allclose(values(cosine, [10, 60, 110]), [2.0, 1.0, 0.0], atol=1e-6)
  linear = schedules.create_learning_rate_schedule(110, 2.0, 'linear', 10)
  np.testing.assert_allclose(
    values(linear, [10, 60, 110]), [2.0, 1.000005, 1e-5], rtol=1e-5
  )
  constant = schedules.create_learning_rate_schedule(110, 2.0, 'constant', 1)
  assert values(constant, [0, 1, 109]) == [2.0, 2.0, 2.0]


def test_staircase_drops_to_a_tenth_at_each_boundary():
  # arXiv 1912.11370: 90 epochs, drops after 30, 60 and 80; here 10 steps per epoch.
  schedule = schedules.create_learning_rate_schedule(
    900, 0.48, 'staircase', 4, decay_at=(30 / 90, 60 / 90, 80 / 90)
  )
  np.testing.assert_allclose(
    values(schedule, [0, 3, 4, 299, 300, 599, 600, 799, 800, 899]),
    [0.12, 0.48, 0.48, 0.48, 0.048, 0.048, 0.0048, 0.0048, 0.00048, 0.00048],
    rtol=1e-5,
  )
  with pytest.raises(ValueError, match='decay_at=.*step 3.*4 steps'):
    schedules.create_learning_rate_schedule(
      10, 1.0, 'staircase', 4, decay_at=(0.3, 0.6)
    )


def test_rejects_unknown_schedules():
  with pytest.raises(ValueError, match="decay_type='step' .*cosine"):
    schedules.create_learning_rate_schedule(10, 1.0, 'step', 2)


def test_rsqrt_falls_by_the_root_of_two_in_a_timescale():
  """arXiv 2106.04560, section 3.5, and rsqrt of big_vision."""
  schedule = schedules.create_learning_rate_schedule(
    100, 2.0, 'rsqrt', 4, decay_args={'timescale': 10}
  )
  np.testing.assert_allclose(
    values(schedule, [0, 3, 4, 14, 34, 84]),
    [0.5, 2.0, 2.0, 2 / np.sqrt(2), 2 / 2, 2 / 3],
    rtol=1e-6,
  )
  # Shifted by three timescales it begins at half of the rate; 20 updates of cooldown.
  schedule = schedules.create_learning_rate_schedule(
    100, 2.0, 'rsqrt', 4, decay_args={'timescale': 10, 'shift': 30, 'cooldown': 20}
  )
  np.testing.assert_allclose(
    values(schedule, [0, 3, 4, 54, 90, 100]),
    [0.25, 1.0, 1.0, 2 / 3, 2 / np.sqrt(12.6) / 2, 0.0],
    rtol=1e-6,
  )


def test_schedules_of_optax_follow_the_warm_up():
  schedule = schedules.create_learning_rate_schedule(
    24, 0.5, 'optax:exponential_decay', 4, decay_args={'decay_rate': 0.01}
  )
  np.testing.assert_allclose(
    values(schedule, [0, 3, 4, 14, 24]), [0.125, 0.5, 0.5, 0.05, 0.005], rtol=1e-5
  )
  schedule = schedules.create_learning_rate_schedule(
    20, 0.5, 'optax:sgdr_schedule', 0,
    decay_args={
      'cosine_kwargs': [
        dict(init_value=0.0, peak_value=x, decay_steps=10, warmup_steps=5)
        for x in (1.0, 0.5)
      ]
    },
  )  # fmt: skip
  np.testing.assert_allclose(values(schedule, [5, 15]), [0.5, 0.25], rtol=1e-6)


@pytest.mark.parametrize(
  'keys, message',
  [
    ({'decay_type': 'optax:exponental_decay'}, "'optax:exponential_decay'"),
    ({'decay_type': 'optax:exponential_decay'}, 'missing .*decay_rate'),
    ({'decay_type': 'optax:l2_loss', 'decay_args': {'predictions': 1.0}}, 'schedule'),
    ({'decay_type': 'rsqrt', 'decay_args': {'timescale': 0}}, 'timescale=0 must be'),
    (
      {'decay_type': 'rsqrt', 'decay_args': {'cooldown': 2**40}},
      'cooldown=.* is longer',
    ),
    ({'decay_type': 'rsqrt', 'decay_args': {'time': 5}}, "'time'.*timescale, shift"),
  ],
)
def test_decay_that_cannot_be_made_is_named(keys, message):
  config = common.get_config()
  config.update(keys)
  with pytest.raises(ValueError, match=message) as error:
    schedules.check(config)
  assert 'config.' in str(error.value)


def test_a_cooldown_is_not_longer_than_the_run():
  make = functools.partial(schedules.create_learning_rate_schedule, 100, 1.0, 'rsqrt')
  make(20, decay_args={'cooldown': 80})
  with pytest.raises(ValueError, match='cooldown=81 is longer than the 80 updates'):
    make(20, decay_args={'cooldown': 81})


@pytest.mark.parametrize('total_steps, warmup', [(10_000, 500), (100, 10)])
def test_schedule_from_a_config_of_the_original(total_steps, warmup):
  """`utils.create_learning_rate_schedule(config.total_steps, ...)`, verbatim."""
  cfg = common.get_config()
  schedule = utils.create_learning_rate_schedule(
    total_steps, cfg.base_lr, cfg.decay_type, cfg.warmup_steps
  )
  rates = values(schedule, [0, warmup, total_steps])
  assert rates == pytest.approx([0.03 / max(1, warmup), 0.03, 0.0], rel=1e-6, abs=1e-9)


def test_warns_if_warm_up_is_longer_than_the_run(caplog):
  schedule = schedules.create_learning_rate_schedule(3, 1.0, 'cosine', 20)
  assert values(schedule, range(3)) == pytest.approx([0.05, 0.1, 0.15])
  assert 'is as long as total_steps=3' in caplog.text
