"""Tests of schedules and optimisers against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from vit_jax import utils
from vit_jax.configs import common
from vit_jax.learning import optim


def config(**kwargs):
  result = common.get_config()
  result.update(kwargs)
  return result


def values(schedule, steps):
  return [float(schedule(s)) for s in steps]


def test_warm_up_is_linear_and_does_not_start_at_zero():
  schedule = optim.create_learning_rate_schedule(100, 0.5, 'cosine', 5)
  np.testing.assert_allclose(
    values(schedule, range(6)), [0.1, 0.2, 0.3, 0.4, 0.5, 0.5], rtol=1e-6
  )


def test_cosine_and_linear_end_where_the_paper_says():
  cosine = optim.create_learning_rate_schedule(110, 2.0, 'cosine', 10)
  np.testing.assert_allclose(values(cosine, [10, 60, 110]), [2.0, 1.0, 0.0], atol=1e-6)
  linear = optim.create_learning_rate_schedule(110, 2.0, 'linear', 10)
  np.testing.assert_allclose(
    values(linear, [10, 60, 110]), [2.0, 1.000005, 1e-5], rtol=1e-5
  )
  constant = optim.create_learning_rate_schedule(110, 2.0, 'constant', 1)
  assert values(constant, [0, 1, 109]) == [2.0, 2.0, 2.0]


def test_a_staircase_drops_to_a_tenth_at_each_share_of_the_run():
  # arXiv 1912.11370: 90 epochs, a tenth after 30, 60 and 80; here 10 steps each.
  schedule = optim.create_learning_rate_schedule(
    900, 0.48, 'staircase', 4, decay_at=(30 / 90, 60 / 90, 80 / 90)
  )
  np.testing.assert_allclose(
    values(schedule, [0, 3, 4, 299, 300, 599, 600, 799, 800, 899]),
    [0.12, 0.48, 0.48, 0.48, 0.048, 0.048, 0.0048, 0.0048, 0.00048, 0.00048],
    rtol=1e-5,
  )
  with pytest.raises(ValueError, match='decay_at=.*step 3.*4 steps'):
    optim.create_learning_rate_schedule(10, 1.0, 'staircase', 4, decay_at=(0.3, 0.6))


@pytest.mark.parametrize(
  'args, message',
  [
    ((10, 1.0, 'step', 2), "decay_type='step' .*cosine"),
    ((10, 1.0, 'cosine', -1), 'warmup_steps=-1 .*integer'),
    ((0, 1.0, 'cosine', 0), 'total_steps=0 .*integer'),
  ],
)
def test_wrong_schedules_are_named(args, message):
  with pytest.raises(ValueError, match=message):
    optim.create_learning_rate_schedule(*args)


@pytest.mark.parametrize('total_steps, warmup', [(10_000, 500), (100, 10), (5, 0)])
def test_a_config_of_the_original_gives_a_schedule(total_steps, warmup):
  """`utils.create_learning_rate_schedule(config.total_steps, ...)`, verbatim."""
  cfg = common.get_config()
  schedule = utils.create_learning_rate_schedule(
    total_steps, cfg.base_lr, cfg.decay_type, cfg.warmup_steps
  )
  rates = values(schedule, [0, warmup, total_steps])
  assert rates == pytest.approx([0.03 / max(1, warmup), 0.03, 0.0], rel=1e-6, abs=1e-9)


def test_a_warm_up_longer_than_the_run_rises_with_a_warning(caplog):
  schedule = optim.create_learning_rate_schedule(3, 1.0, 'cosine', 20)
  assert values(schedule, range(3)) == pytest.approx([0.05, 0.1, 0.15])
  assert 'is as long as total_steps=3' in caplog.text


PARAMS = {
  'dense': {'kernel': jnp.array([1.0, -2.0]), 'bias': jnp.array([3.0])},
  'cls': jnp.array([4.0]),
}
GRADS = {
  'dense': {'kernel': jnp.array([0.3, 0.0]), 'bias': jnp.array([-0.4])},
  'cls': jnp.array([0.0]),
}


def run(cfg, steps=1):
  """Makes some updates; returns the parameters and the state."""
  params, tx = PARAMS, optim.get_optimizer(cfg, optax.constant_schedule(0.1))
  state = tx.init(params)
  for _ in range(steps):
    updates, state = tx.update(GRADS, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def test_sgd_with_momentum():
  cfg = config(optimizer='sgd', grad_norm_clip=0.0, optim_dtype='float32')
  got, _ = run(cfg, steps=2)
  # Velocity g, then 1.9 g: in all 2.9 g.
  np.testing.assert_allclose(got['dense']['kernel'], [1 - 0.29 * 0.3, -2.0], rtol=1e-6)


def test_l2_decay_goes_through_the_momentum_and_acts_on_kernels_alone():
  cfg = config(optimizer='sgd', grad_norm_clip=0.0, optim_dtype='float32', l2_decay=0.5)
  got, _ = run(cfg, steps=2)
  # Of the second weight the gradient is 0. Velocity -1: the weight becomes
  # -1.9; velocity 0.9 * -1 + 0.5 * -1.9 = -1.85: it becomes -1.715.
  np.testing.assert_allclose(got['dense']['kernel'][1], -1.715, rtol=1e-6)
  np.testing.assert_allclose(got['dense']['bias'], [3 + 0.1 * 2.9 * 0.4], rtol=1e-6)
  np.testing.assert_array_equal(got['cls'], PARAMS['cls'])


def test_clipping_is_by_the_global_norm():
  got, _ = run(config(optimizer='sgd', grad_norm_clip=0.1, optim_dtype='float32'))
  # The norm of all gradients together is .5: each is divided by 5.
  np.testing.assert_allclose(got['dense']['bias'], [3 + 0.1 * 0.4 / 5], rtol=1e-6)


def test_adams_first_step_is_the_sign_and_decay_acts_on_kernels_alone():
  cfg = config(optimizer='adam', weight_decay=0.5, grad_norm_clip=0.0)
  got, _ = run(cfg)
  np.testing.assert_allclose(
    got['dense']['kernel'],
    [1 - 0.1 * (1 + 0.5 * 1.0), -2 - 0.1 * (0 + 0.5 * -2.0)],
    rtol=1e-5,
  )
  np.testing.assert_allclose(got['dense']['bias'], [3 + 0.1], rtol=1e-5)
  np.testing.assert_allclose(got['cls'], [4.0])


def adamw(x, g, rates, decays, b1=0.9, b2=0.999, eps=1e-8):
  """Adam's updates of a parameter in float64, each with its own decay."""
  mu = nu = 0.0
  for t, (rate, decay) in enumerate(zip(rates, decays), 1):
    mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g**2
    step = mu / (1 - b1**t) / (np.sqrt(nu / (1 - b2**t)) + eps)
    x = x - rate * step - decay * x
  return x


@pytest.mark.parametrize(
  'base, independent, weight_decay',
  [
    (0.01, True, 0.04),
    (0.05, True, 0.04),  # Another rate, the same decay.
    (0.01, False, 4.0),  # The same decay as the first.
  ],
)
def test_independent_weight_decay_follows_the_schedule_alone(
  base, independent, weight_decay
):
  x, g = np.array([1.0, -2.0]), np.array([0.3, 0.1])
  shares = np.array([0.5, 1.0, 0.6, 0.2])
  cfg = config(
    optimizer='adam', optim_dtype='float32', grad_norm_clip=0.0, base_lr=base,
    weight_decay=weight_decay, independent_weight_decay=independent,
  )  # fmt: skip
  tx = optim.get_optimizer(cfg, lambda step: jnp.array(base * shares)[step])
  got = {'kernel': jnp.asarray(x), 'bias': jnp.asarray(x)}
  grads = {'kernel': jnp.asarray(g), 'bias': jnp.asarray(g)}
  state = tx.init(got)
  for _ in shares:
    updates, state = tx.update(grads, state, got)
    got = optax.apply_updates(got, updates)
  for name, decay in (('kernel', 0.04), ('bias', 0.0)):
    want = adamw(x, g, base * shares, decay * shares)
    np.testing.assert_allclose(got[name], want, rtol=1e-5)


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_the_accumulator_has_the_type_of_the_config(optimizer, dtype):
  _, state = run(config(optimizer=optimizer, optim_dtype=dtype))
  name = 'mu' if optimizer == 'adam' else 'trace'
  accumulator = optax.tree.get(state, name)
  assert {x.dtype for x in jax.tree.leaves(accumulator)} == {jnp.dtype(dtype)}


def averages(decay, steps, dtype='float32'):
  """The average after some updates of different size, and one in float64."""
  params = {'kernel': jnp.array([1.0, -3.0, 0.0], dtype)}
  tx = optax.with_extra_args_support(optim.track_ema(decay))
  state = tx.init(params)
  update = jax.jit(tx.update)
  want = np.asarray(params['kernel'], np.float64)
  for t in range(steps):
    changes = {'kernel': jnp.array([(-1) ** t, 1.0, 0.0], dtype)}
    _, state = update(changes, state, params, step=jnp.int32(t))
    params = optax.apply_updates(params, changes)
    d = min(decay, (1 + t) / (10 + t))
    want = d * want + (1 - d) * np.asarray(params['kernel'], np.float64)
  return optim.get_ema(state)['kernel'], want


@pytest.mark.parametrize('decay', [0.9, 0.9999])
def test_the_average_of_the_weights_warms_up(decay):
  got, want = averages(decay, 200)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  # Of the weights at first, 1, -3 and 0, nothing is left: -3 + 200 is near.
  assert got[1] > 100
  assert got[2] == 0
  assert optim.get_ema(run(config())[1]) is None


def test_the_average_of_bfloat16_weights_is_float32_and_moves():
  got, want = averages(0.9999, 200, 'bfloat16')
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=1e-6)
  assert got[1] > 100


MODEL = {
  'Transformer': {
    f'encoderblock_{i}': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}
    for i in range(2)
  },
  'head': {'kernel': jnp.ones((2, 3))},
}


def test_the_first_multiplier_that_is_found_decides():
  rules = (('bias$', 0.5), ('encoderblock_0/', 0.0))
  assert optim.multipliers(rules, MODEL) == {
    'Transformer': {
      'encoderblock_0': {'kernel': 0.0, 'bias': 0.5},
      'encoderblock_1': {'kernel': 1.0, 'bias': 0.5},
    },
    'head': {'kernel': 1.0},
  }
  assert optim.frozen_sizes(rules, MODEL) == {'Transformer/encoderblock_0/kernel': 4}
  assert not optim.frozen_sizes((), MODEL)


def test_multipliers_scale_updates_and_freeze_without_a_state():
  factors = optim.multipliers(
    (('head', 1.0), ('encoderblock_1', 0.25), ('', 0.0)), MODEL
  )
  cfg = config(
    optimizer='adam', weight_decay=0.1, grad_norm_clip=0.0, ema_decay=0.5,
    optim_dtype='float32',
  )  # fmt: skip
  grads = jax.tree.map(lambda x: 0.5 * jnp.ones_like(x), MODEL)

  def updates(factors):
    tx = optim.get_optimizer(cfg, optax.constant_schedule(0.1), factors)
    state = tx.init(MODEL)
    return (*tx.update(grads, state, MODEL, step=0), state)

  got, state, _ = updates(factors)
  want, _, _ = updates(None)
  jax.tree.map(
    lambda a, b, factor: np.testing.assert_allclose(a, b * factor, rtol=1e-6),
    got,
    want,
    factors,
  )
  # Moments of the trained parameters alone; the average is of all.
  moments = optax.tree.get(state, 'mu')
  assert sum(x.size for x in jax.tree.leaves(moments)) == 12
  average = optim.get_ema(state)
  assert jax.tree.structure(average) == jax.tree.structure(MODEL)


def test_no_gradient_is_computed_of_what_is_frozen():
  factors = optim.multipliers((('head', 1.0), ('', 0.0)), MODEL)

  def loss(params):
    params = optim.stop_frozen(params, factors)
    return sum((x**2).sum() for x in jax.tree.leaves(params))

  grads = jax.grad(loss)(MODEL)
  np.testing.assert_array_equal(grads['head']['kernel'], 2 * np.ones((2, 3)))
  assert not any(x.any() for x in jax.tree.leaves(jax.device_get(grads['Transformer'])))


@pytest.mark.parametrize(
  'rules, message',
  [
    ((('hed/', 1.0),), r"\['hed/'\] match nothing.*Transformer/, head/"),
    (
      (('', 0.5), ('head', 1.0)),
      r"\['head'\] match nothing, or only what",
    ),
    ((('', 0),), 'freeze all parameters: nothing is left'),
  ],
)
def test_wrong_multipliers_are_named(rules, message):
  with pytest.raises(ValueError, match=message):
    optim.multipliers(rules, MODEL)


def test_adam_with_decay_on_all_parameters_is_pytorchs_adamw():
  """With clipping and a tenth of the learning rate for one parameter (DETR)."""
  cfg = config(
    optimizer='adam', optim_dtype='float32', grad_norm_clip=0.1,
    weight_decay=0.5, weight_decay_on='all',
  )  # fmt: skip
  params = {
    'head': {
      'bias': np.array([3.0], 'f'),
      'kernel': np.array([1.0, -2.0], 'f'),
    },
    'slow': np.array([4.0, 5.0], 'f'),
  }
  factors = {'head': {'kernel': 1.0, 'bias': 1.0}, 'slow': 0.1}
  tx = optim.get_optimizer(cfg, optax.constant_schedule(0.01), factors)
  state = tx.init(params)
  theirs = jax.tree.map(lambda x: torch.nn.Parameter(torch.tensor(x)), params)
  head, slow = list(theirs['head'].values()), [theirs['slow']]
  adamw = torch.optim.AdamW(
    [{'params': head}, {'params': slow, 'lr': 0.001}],
    lr=0.01, weight_decay=0.5,
  )  # fmt: skip
  rng = np.random.RandomState(0)
  for _ in range(3):
    grads = jax.tree.map(lambda x: rng.randn(*x.shape).astype('f'), params)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    for p, g in zip(jax.tree.leaves(theirs), jax.tree.leaves(grads)):
      p.grad = torch.tensor(g)
    torch.nn.utils.clip_grad_norm_([*head, *slow], 0.1)
    adamw.step()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b.detach(), rtol=1e-6),
    params,
    theirs,
  )
