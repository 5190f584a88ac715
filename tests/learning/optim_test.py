"""Tests of schedules and optimisers against closed forms."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from tests import trees
from vit_jax.configs import common
from vit_jax.distributed import sharding
from vit_jax.learning import optim, state as state_lib
from vit_jax.run import checkpoints as checkpoints_lib


def config(**kwargs):
  result = common.get_config()
  result.update(kwargs)
  return result


@pytest.mark.parametrize(
  'keys, message',
  [
    ({'optimizer': 'optax:lamp'}, "optimizer='optax:lamp'.*'optax:lamb'"),
    ({'optimizer': 'optax.contrib:prodigi'}, "'optax.contrib:prodigy'"),
    ({'optimizer': 'optacks:lamb'}, "optimizer='optacks:lamb'.*no module 'optacks'"),
    ({'optimizer': 'optax:scale_by_adam'}, 'no argument learning_rate'),
    ({'optimizer': 'optax:lamb', 'optimizer_args': {'b3': 0.5}}, "'b3'.*b1, b2, eps"),
    ({'optimizer': 'optax:lamb', 'optimizer_args': {'learning_rate': 1.0}}, 'multiple'),
    ({'optimizer': 'optax:lamb', 'optimizer_args': {'b1': 'x'}}, 'cannot update'),
    ({'optimizer': 'optax:lbfgs'}, 'cannot update .* by their gradient alone'),
    (
      {'optimizer': 'optax.contrib:schedule_free_adamw', 'ema_decay': 0.9},
      'other parameters.*ema_decay=0.9',
    ),
    (
      {'optimizer': 'optax.contrib:sam', 'lr_multipliers': (('cls', 0.1),)},
      'other parameters.*lr_multipliers',
    ),
    (
      {'optimizer': 'optax.contrib:sam', 'optimizer_args': {'optimizer': 'optax:sdg'}},
      "'optax:sdg' is not .* 'optax:sgd'",
    ),
  ],
)
def test_what_optax_cannot_do_is_named(keys, message):
  with pytest.raises(ValueError, match=rf'(?s){message}') as error:
    optim.check(config(**keys))
  assert 'config.' in str(error.value)


PARAMS = {
  'dense': {'kernel': jnp.array([1.0, -2.0]), 'bias': jnp.array([3.0])},
  'cls': jnp.array([4.0]),
}
GRADS = {
  'dense': {'kernel': jnp.array([0.3, 0.0]), 'bias': jnp.array([-0.4])},
  'cls': jnp.array([0.0]),
}


def run(cfg, steps=1):
  """Applies some updates; returns the parameters and the state."""
  params, tx = PARAMS, optim.get_optimizer(cfg, optax.constant_schedule(0.1))
  state = tx.init(params)
  for _ in range(steps):
    updates, state = tx.update(GRADS, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def test_l2_decay_enters_the_momentum_of_kernels_only():
  cfg = config(optimizer='sgd', grad_norm_clip=0.0, optim_dtype='float32', l2_decay=0.5)
  got, _ = run(cfg, steps=2)
  # The gradient of the second weight is 0. With velocity -1 it becomes -1.9,
  # with velocity 0.9 * -1 + 0.5 * -1.9 = -1.85 it becomes -1.715.
  np.testing.assert_allclose(got['dense']['kernel'][1], -1.715, rtol=1e-6)
  np.testing.assert_allclose(got['dense']['bias'], [3 + 0.1 * 2.9 * 0.4], rtol=1e-6)
  np.testing.assert_array_equal(got['cls'], PARAMS['cls'])


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
  [(0.05, True, 0.04), (0.01, False, 4.0)],  # The same decay.
)
def test_independent_weight_decay_follows_only_the_schedule(
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


@pytest.mark.parametrize('optimizer', ['sgd', 'adam', 'lion', 'adafactor'])
def test_accumulator_has_the_dtype_of_the_config(optimizer):
  _, state = run(config(optimizer=optimizer, optim_dtype='bfloat16'))
  name = 'mu' if optimizer in ('adam', 'lion') else 'trace'
  accumulator = optax.tree.get(state, name)
  assert {x.dtype for x in jax.tree.leaves(accumulator)} == {jnp.dtype('bfloat16')}


def averages(decay, steps, dtype):
  """The average after updates of different sizes, and the expected one in float64."""
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


@pytest.mark.parametrize('decay, dtype', [(0.9, 'float32'), (0.9999, 'bfloat16')])
def test_average_of_the_weights_warms_up(decay, dtype):
  got, want = averages(decay, 200, dtype)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=1e-6)
  # Nothing is left of the initial weights 1, -3 and 0: got[1] is near -3 + 200.
  assert got[1] > 100
  assert got[2] == 0
  assert optim.get_ema(run(config())[1]) is None


MODEL = {
  'Transformer': {
    f'encoderblock_{i}': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}
    for i in range(2)
  },
  'head': {'kernel': jnp.ones((2, 3))},
}


def test_first_matching_multiplier_wins():
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
  # Only trained parameters have moments; the average covers all parameters.
  moments = optax.tree.get(state, 'mu')
  assert sum(x.size for x in jax.tree.leaves(moments)) == 12
  average = optim.get_ema(state)
  assert jax.tree.structure(average) == jax.tree.structure(MODEL)


def test_no_gradient_is_computed_for_frozen_parameters():
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
    ((('', 0.5), ('head', 1.0)), r"\['head'\] match nothing, or only what"),
    ((('', 0),), 'freeze all parameters: nothing is left'),
  ],
)
def test_rejects_wrong_multipliers(rules, message):
  with pytest.raises(ValueError, match=message):
    optim.multipliers(rules, MODEL)


def test_adam_with_decay_on_all_parameters_matches_pytorch():
  """With clipping and a tenth of the learning rate for one parameter (DETR)."""
  cfg = config(
    optimizer='adam', optim_dtype='float32', grad_norm_clip=0.1,
    weight_decay=0.5, weight_decay_on='all',
  )  # fmt: skip
  params = {
    'head': {'bias': np.array([3.0], 'f'), 'kernel': np.array([1.0, -2.0], 'f')},
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
    lambda a, b: np.testing.assert_allclose(a, b.detach(), rtol=1e-6), params, theirs
  )


def lion(grads, b1, b2):
  """Updates by arXiv 2302.06675, algorithm 2."""
  momentum = 0.0
  for g in grads:
    yield np.sign(b1 * momentum + (1 - b1) * g)
    momentum = b2 * momentum + (1 - b2) * g


def adafactor(grads, b1, b2):
  """Updates by arXiv 1804.04235, algorithm 4, changed as in 2106.04560, 3.4."""
  # Largest and second largest dimension, if both are at least 32.
  sizes = np.array(grads[0].shape)
  large = [int(i) for i in sizes.argsort()[::-1][:2] if sizes[i] >= 32]
  rows = columns = second = momentum = 0.0
  for t, g in enumerate(grads, 1):
    decay = min(b2, 1 - t**-0.8)
    if len(large) == 2:
      row, column = (np.mean(g**2, axis=i, keepdims=True) for i in large)
      rows = decay * rows + (1 - decay) * row
      columns = decay * columns + (1 - decay) * column
      second = rows * columns / np.mean(rows, axis=large[1], keepdims=True)
    else:
      second = decay * second + (1 - decay) * g**2
    momentum = b1 * momentum + (1 - b1) * g / np.sqrt(second)
    yield momentum


def adam(grads, b1, b2):
  first = second = 0.0
  for t, g in enumerate(grads, 1):
    first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g**2
    yield first / (1 - b1**t) / (np.sqrt(second / (1 - b2**t)) + 1e-8)


def muon(grads, beta, rows):
  """Updates by kellerjordan.github.io/posts/muon, scaled as in arXiv 2502.16982."""
  momentum = 0.0
  for t, g in enumerate(grads, 1):
    momentum = beta * momentum + (1 - beta) * g
    # Nesterov momentum with bias correction, as in Adam.
    ahead = beta * momentum / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
    x = ahead.reshape(rows, -1)
    scale = 0.2 * np.sqrt(max(x.shape))
    x = x / np.linalg.norm(x)
    for _ in range(5):
      a = x @ x.T
      x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    yield scale * x.reshape(g.shape)


# Large arrays are factored by Adafactor and split by `fsdp`.
SHAPES = {
  'embedding': {'kernel': (2, 2, 1, 64)},
  'block': {
    'attention': {
      'query': {'kernel': (64, 2, 32), 'bias': (2, 32)},
      'out': {'kernel': (2, 32, 64)},
    },
    'MlpBlock_0': {'Dense_0': {'kernel': (64, 96)}},
  },
  'head': {'kernel': (64, 4), 'bias': (4,)},
}
# Rows of the matrices that Muon orthogonalises: the inputs of the layer.
ROWS = {
  'block/attention/query/kernel': 64,
  'block/attention/out/kernel': 64,
  'block/MlpBlock_0/Dense_0/kernel': 64,
}
ORACLES = {
  'lion': lambda name, grads: lion(grads, 0.8, 0.5),
  'adafactor': lambda name, grads: adafactor(grads, 0.8, 0.5),
  'muon': lambda name, grads: (
    muon(grads, 0.95, ROWS[name]) if name in ROWS else adam(grads, 0.8, 0.5)
  ),
}
RATES = (0.1, 0.3, 0.2)


def drawn(seed):
  rng = np.random.RandomState(seed)
  draw = lambda shape: rng.randn(*shape).astype('f')
  return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


@pytest.fixture(scope='module', params=ORACLES)
def trained(request, tmp_path_factory):
  """Three updates on eight devices, with a checkpoint after the second.

  Returns the name, the initial state, the last state, and the last state after a
  restore.
  """
  cfg = config(
    optimizer=request.param, b1=0.8, b2=0.5, momentum=0.95, optim_dtype='float32',
    grad_norm_clip=0.0, weight_decay=0.25,
  )  # fmt: skip
  factors = jax.tree.map(lambda _: 1.0, drawn(0))
  factors['block']['attention']['out']['kernel'], factors['head']['bias'] = 0.5, 0.0
  tx = optim.get_optimizer(cfg, lambda step: jnp.array(RATES)[step], factors)
  mesh = sharding.make_mesh({'data': 1, 'fsdp': 4, 'model': 2})
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'FSDP_MIN_SIZE', 4096)
    create, abstract = state_lib.abstract_state(
      lambda rng: (jax.tree.map(jnp.asarray, drawn(0)), {}),
      tx, jax.random.key(0), mesh, (),
    )  # fmt: skip
  shardings = jax.tree.map(lambda x: x.sharding, abstract)

  def update(state, grads):
    changes, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)
    return state_lib.TrainState(state.step + 1, params, opt_state)

  update = jax.jit(update, out_shardings=shardings)
  start = create({})
  second = update(update(start, drawn(1)), drawn(2))
  workdir = tmp_path_factory.mktemp('optimizer')
  with checkpoints_lib.Checkpoints(workdir) as checkpoints:
    checkpoints.save(2, second)
  with checkpoints_lib.Checkpoints(workdir) as checkpoints:
    restored, _ = checkpoints.restore(abstract)
  return request.param, start, update(second, drawn(3)), update(restored, drawn(3))


def test_updates_match_the_published_algorithms_on_a_mesh(trained):
  """With decay on kernels, a schedule, one halved rate and a frozen bias."""
  name, start, last, _ = trained
  grads = [jax.tree.leaves(drawn(seed)) for seed in (1, 2, 3)]
  got = jax.tree.leaves(last.params)
  for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(start.params)):
    path, want = sharding.path_name(path), np.asarray(x, np.float64)
    factor = {'block/attention/out/kernel': 0.5, 'head/bias': 0.0}.get(path, 1.0)
    decay = 0.25 if path.endswith('kernel') else 0.0
    gradients = [np.asarray(g[i], np.float64) for g in grads]
    for rate, change in zip(RATES, ORACLES[name](path, gradients)):
      want = want - factor * rate * (change + decay * want)
    np.testing.assert_allclose(got[i], want, rtol=1e-4, atol=1e-4, err_msg=path)


def test_restored_state_continues_bit_for_bit(trained):
  _, _, last, restored = trained
  trees.assert_same(restored, last)


def test_state_is_sharded_like_its_parameters(trained):
  name, start, _, _ = trained
  P = jax.P
  split = {
    sharding.path_name(path): x.sharding.spec
    for path, x in jax.tree_util.tree_leaves_with_path(start.opt_state)
  }
  params = {
    'block/attention/query/kernel': P(None, 'model', 'fsdp'),
    'block/attention/out/kernel': P('model', 'fsdp', None),
    'block/MlpBlock_0/Dense_0/kernel': P('fsdp', 'model'),
  }
  # Of the two larger dimensions, rows lack the largest and columns the other.
  factors = {
    'block/attention/query/kernel': (P('model', 'fsdp'), P(None, 'model')),
    'block/attention/out/kernel': (P('model', 'fsdp'), P('model', None)),
    'block/MlpBlock_0/Dense_0/kernel': (P('fsdp'), P('model')),
  }
  found = {key for key in split if re.search('(mu|trace)/block', key)}
  assert len(found) == (3 if name == 'muon' else 4) + (name == 'muon')
  for path, spec in params.items():
    [key] = [key for key in found if key.endswith(path)]
    assert split[key] == spec
    for part, want in zip(('v_row', 'v_col'), factors[path]):
      if name == 'adafactor':
        [key] = [key for key in split if key.endswith(f'{part}/{path}')]
        assert split[key] == want
  assert not [key for key in split if 'head/bias' in key]  # Frozen.
  assert optim.get_ema(start.opt_state) is None


def test_muon_needs_matrices_of_hidden_layers():
  cfg = config(optimizer='muon')
  with pytest.raises(ValueError, match="optimizer='muon' .*matrices.*adam"):
    optim.get_optimizer(cfg, lambda _: 0.1).init({'head': {'kernel': np.ones((2, 2))}})


# Two updates of a kernel and a bias, whose gradients differ.
TREE = {
  'dense': {
    'kernel': jnp.arange(1.0, 7.0).reshape(2, 3) / 4,
    'bias': jnp.array([0.5, -1.0, 2.0]),
  }
}
SLOPES = [jax.tree.map(lambda x, i=i: jnp.sin(x + i), TREE) for i in range(3)]


def updated(tx, params=None):
  """Returns parameters after an update with each of SLOPES."""
  params = TREE if params is None else params
  state, tx = tx.init(params), optax.with_extra_args_support(tx)
  for step, grads in enumerate(SLOPES):
    updates, state = tx.update(grads, state, params, step=jnp.int32(step))
    params = optax.apply_updates(params, updates)
  return params


def bare(name, **arguments):
  """Returns the config of an optimiser 'MODULE:NAME' without anything else."""
  return config(optimizer=name, optimizer_args=arguments, grad_norm_clip=0.0)


@pytest.mark.parametrize(
  'name, function, arguments',
  [
    ('optax:lamb', optax.lamb, {'weight_decay': 0.1}),
    ('optax:lars', optax.lars, {'weight_decay': 0.1, 'momentum': 0.8}),
    ('optax:adafactor', optax.adafactor, {'weight_decay_rate': 1e-3}),
    ('optax.contrib:ademamix', optax.contrib.ademamix, {'weight_decay': 0.1}),
  ],
)
def test_an_optimiser_of_optax_keeps_its_own_order(name, function, arguments):
  """LAMB scales an update after weight decay has been added to it."""
  schedule = lambda step: jnp.array([0.1, 0.2, 0.05])[step]
  cfg = bare(name, **arguments)
  optim.check(cfg)
  got = updated(optim.get_optimizer(cfg, schedule))
  trees.assert_same(got, updated(function(schedule, **arguments)))


def by_hand(tx):
  """Returns parameters and state after each update with one of SLOPES."""
  params, state = TREE, tx.init(TREE)
  tx = optax.with_extra_args_support(tx)
  for step, grads in enumerate(SLOPES):
    updates, state = tx.update(grads, state, params, step=jnp.int32(step))
    params = optax.apply_updates(params, updates)
    yield params, state


def by_config(cfg, schedule):
  """Returns parameters and parameters to evaluate after each update."""
  optim.check(cfg)
  for params, state in by_hand(optim.get_optimizer(cfg, schedule)):
    train_state = state_lib.TrainState(0, params, state)
    yield params, state_lib.best_params(train_state)


def test_prodigy_is_optax_s():
  rows = by_config(bare('optax.contrib:prodigy', weight_decay=0.1), lambda _: 0.5)
  tx = optax.contrib.prodigy(lambda _: 0.5, weight_decay=0.1)
  for (params, evaluated), (expected, _) in zip(rows, by_hand(tx), strict=True):
    trees.assert_same(params, expected)
    assert evaluated is params


def test_schedule_free_optimisers_evaluate_their_average():
  rows = by_config(bare('optax.contrib:schedule_free_adamw', b1=0.8), lambda _: 0.1)
  tx = optax.contrib.schedule_free_adamw(lambda _: 0.1, b1=0.8)
  for (params, evaluated), (expected, state) in zip(rows, by_hand(tx), strict=True):
    trees.assert_same(params, expected)
    average = optax.contrib.schedule_free_eval_params(state, expected)
    trees.assert_same(evaluated, average)


def test_checkpoints_hold_the_parameters_to_evaluate(tmp_path):
  """Prediction, export and the best checkpoint read them as they read averages."""
  cfg = bare('optax.contrib:schedule_free_sgd')
  params, state = list(by_hand(optim.get_optimizer(cfg, lambda _: 0.1)))[-1]
  train_state = state_lib.TrainState(jnp.int32(3), params, state)
  (tmp_path / 'config.json').touch()
  checkpoints = checkpoints_lib.Checkpoints(tmp_path)
  checkpoints.save(3, train_state)
  checkpoints.close()
  weights = checkpoints_lib.load_weights(tmp_path)
  trees.assert_same(weights.params, state_lib.best_params(train_state))
  assert not np.array_equal(
    weights.params['dense']['kernel'], params['dense']['kernel']
  )


def test_sam_evaluates_the_parameters_without_adversarial_steps():
  """Its optimiser runs at every other step, with the learning rate of that step."""
  schedule = lambda step: jnp.array([0.1, 0.2, 0.05])[step]
  cfg = bare('optax.contrib:sam', optimizer='optax:adam', rho=0.1, b1=0.8)
  adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
  tx = optax.contrib.sam(
    optax.adam(lambda count: schedule(2 * count + 1), 0.8), adversary
  )
  expected = list(by_hand(optax.GradientTransformation(tx.init, tx.update)))
  synced = expected[1][0]
  rows = list(by_config(cfg, schedule))
  for (params, _), (expected_params, _) in zip(rows, expected, strict=True):
    trees.assert_same(params, expected_params)
  for (_, evaluated), truth in zip(rows, (TREE, synced, synced), strict=True):
    trees.assert_same(evaluated, truth)


def test_weight_decay_of_optax_can_be_limited_to_kernels():
  cfg = bare('optax:adamw', weight_decay=0.1, mask='kernels')
  got = updated(optim.get_optimizer(cfg, lambda _: 0.1))
  mask = {'dense': {'kernel': True, 'bias': False}}
  want = updated(optax.adamw(lambda _: 0.1, weight_decay=0.1, mask=mask))
  trees.assert_same(got, want)


def test_clipping_factors_and_averages_wrap_an_optimiser_of_optax():
  cfg = bare('optax:lamb', weight_decay=0.1)
  cfg.update(grad_norm_clip=0.5, ema_decay=0.5)
  factors = {'dense': {'kernel': 0.5, 'bias': 0.0}}
  tx = optim.get_optimizer(cfg, lambda _: 0.1, factors)
  got = updated(tx)
  trees.assert_same(got['dense']['bias'], TREE['dense']['bias'])
  # Only the trained parameters are clipped, and the factor halves what LAMB computes.
  lamb = optax.chain(
    optax.clip_by_global_norm(0.5), optax.lamb(lambda _: 0.1, weight_decay=0.1),
    optax.scale(0.5),
  )  # fmt: skip
  kernel = TREE['dense']['kernel']
  state, want = lamb.init(kernel), kernel
  for grads in SLOPES:
    updates, state = lamb.update(grads['dense']['kernel'], state, want)
    want = want + updates
  np.testing.assert_array_equal(got['dense']['kernel'], want)
  assert optim.get_ema(tx.init(TREE)) is not None
