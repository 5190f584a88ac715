"""Tests of the matching against SciPy."""

import re

import jax
import numpy as np
import pytest
from scipy import optimize

from vit_jax.distributed import sharding
from vit_jax.tasks.detection import matching


def test_cost_is_minimal_for_a_thousand_problems():
  rng = np.random.RandomState(0)
  cost = rng.randn(1_000, 20, 30).astype(np.float32)
  cost[:200] = rng.randint(0, 3, (200, 20, 30))  # Many ties.
  cost[200:220] = 0
  cost[220:240] = cost[220:240, :, :1]  # All predictions cost the same.
  counts = rng.randint(0, 21, 1_000)
  got = np.asarray(jax.jit(matching.match)(cost, counts))
  for problem, found, count in zip(cost, got, counts):
    assert (found[count:] == -1).all()
    chosen = found[:count]
    assert len(set(chosen)) == count
    assert ((chosen >= 0) & (chosen < 30)).all()
    rows, columns = optimize.linear_sum_assignment(problem[:count])
    np.testing.assert_allclose(
      problem[np.arange(count), chosen].sum(dtype=np.float64),
      problem[rows, columns].sum(dtype=np.float64),
      rtol=1e-5,
      atol=1e-4,
    )


def test_devices_do_not_wait_for_each_other():
  """Each matches its own images: the compiled program has no collectives."""
  rng = np.random.RandomState(0)
  cost = rng.randn(2, 8, 3, 5).astype(np.float32)
  counts = rng.randint(0, 4, 8)
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2, 'model': 2})
  rows = jax.NamedSharding(mesh, jax.P(None, ('data', 'fsdp')))
  split = (
    jax.device_put(cost, rows),
    jax.device_put(counts, sharding.batch_sharding(mesh)),
  )
  with jax.set_mesh(mesh):
    program = jax.jit(matching.match).lower(*split).compile()
    got = program(*split)
  assert not re.findall('all-(?:reduce|gather|to-all)', program.as_text())
  for found, problems in zip(np.asarray(got), cost):
    for chosen, problem, count in zip(found, problems, counts):
      rows, columns = optimize.linear_sum_assignment(problem[:count])
      assert chosen[:count].tolist() == columns.tolist()


def test_non_finite_costs_are_chosen_last():
  nan, inf = np.nan, np.inf
  costs = np.float32(
    [[[nan, 1.0, 5.0], [inf, 2.0, nan]], [[nan, nan, nan], [nan, nan, nan]]]
  )
  first, second = jax.jit(matching.match)(costs, np.array([2, 2])).tolist()
  assert first == [2, 1]
  assert len(set(second)) == 2


def test_tpu_program_has_no_custom_calls():
  traced = jax.jit(matching.match).trace(np.zeros((2, 3, 5)), np.zeros(2, int))
  text = traced.lower(lowering_platforms=('tpu',)).as_text()
  assert 'stablehlo.while' in text
  assert 'custom_call' not in text


def test_more_targets_than_predictions_are_rejected():
  with pytest.raises(ValueError, match='3 targets cannot each have one of 2'):
    matching.match(np.zeros((3, 2)), 1)
