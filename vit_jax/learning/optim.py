"""Schedules, optimisers and weight-decay masks (arXiv 2010.11929, T3, T4, B.1).

Builds optax transformations from a config. docs/train.md compares the optimisers.
"""

from collections.abc import Callable, Sequence
import re
from typing import Any, Literal, NamedTuple

from absl import logging
import jax
import jax.numpy as jnp
import optax
import optax.contrib

from vit_jax.configs import common, schema
from vit_jax.distributed import sharding

DECAY_TYPES = ('cosine', 'linear', 'constant', 'staircase')
# Parameters that weight decay applies to.
DECAYING = ('kernels', 'all')
# Factor of each drop of a staircase.
_DROP = 0.1
# Adafactor factors the second moment of arrays with two dimensions of at least this
# size, such as the width of a head (big_vision's default).
_FACTORED = 32
# Root mean square of Muon's updates, about that of Adam's (arXiv 2502.16982, 2.2).
_MUON_RMS = 0.2
# Kernels of embeddings and heads, which Muon leaves to Adam.
_OUTER = re.compile('embed|stem|head|logits|pooler')


def create_learning_rate_schedule(
  total_steps: int,
  base: float,
  decay_type: str,
  warmup_steps: int | None,
  linear_end: float = 1e-5,
  decay_at: Sequence[float] = (),
) -> optax.Schedule:
  """Returns a schedule of linear warm-up, then decay to the last step.

  Args:
    total_steps: number of updates.
    base: learning rate at the end of the warm-up.
    decay_type: 'cosine' (to 0), 'linear' (to `linear_end`), 'constant' or
      'staircase' (to a tenth at each of `decay_at`).
    warmup_steps: number of warm-up updates; the first has the learning rate
      base / warmup_steps, not 0. None: common.default_warmup. Logs a warning if it
      is not below `total_steps`: the learning rate then only rises.
    linear_end: last learning rate of the linear decay (1e-5; issue #2).
    decay_at: when a staircase drops, as increasing fractions of `total_steps`.

  Returns a function from the step (0 for the first update) to the learning rate.
  """
  schema.check('decay_type', decay_type, Literal[DECAY_TYPES])
  schema.check('total_steps', total_steps, schema.Count)
  if warmup_steps is None:
    warmup_steps = common.default_warmup(total_steps)
  schema.check('warmup_steps', warmup_steps, schema.Natural)
  if warmup_steps >= total_steps:
    logging.warning(
      'warmup_steps=%d is as long as total_steps=%d or longer: the learning rate '
      'rises to the end and does not decay',
      warmup_steps,
      total_steps,
    )
  steps = max(1, total_steps - warmup_steps)
  decay = {
    'cosine': optax.cosine_decay_schedule(base, steps),
    'linear': optax.linear_schedule(base, linear_end, steps),
    'constant': optax.constant_schedule(base),
    'staircase': _staircase(base, total_steps, warmup_steps, decay_at),
  }[decay_type]
  if not warmup_steps:
    return decay
  warmup = optax.linear_schedule(base / warmup_steps, base, warmup_steps - 1)
  if warmup_steps == 1:
    warmup = optax.constant_schedule(base)
  return optax.join_schedules([warmup, decay], [warmup_steps])


def _staircase(base, total_steps, warmup_steps, decay_at):
  """Returns a schedule, from the end of the warm-up, that drops at times."""
  steps = [round(share * total_steps) for share in decay_at]
  if steps and steps[0] <= warmup_steps:
    raise ValueError(
      f'decay_at={tuple(decay_at)} of total_steps={total_steps} drops the '
      f'learning rate at step {steps[0]}, before the end of the warm-up of '
      f'{warmup_steps} steps: train longer, or lower --config.warmup_steps'
    )
  return optax.piecewise_constant_schedule(
    base, {step - warmup_steps: _DROP for step in steps}
  )


def accumulate(compute: Callable, batch, steps: int):
  """Sums a function over the micro-batches of a batch, arrays [B, ...].

  `compute` is (rows, number of the micro-batch) -> tree of sums over rows; the
  number of micro-batches `steps` must divide B.
  """
  size = jax.tree.leaves(batch)[0].shape[0]
  if steps < 1 or size % steps:
    raise ValueError(
      f'accum_steps={steps} does not divide the batch of {size}: choose a divisor'
    )
  if steps == 1:
    return compute(batch, 0)
  # Row r goes to micro-batch r mod `steps`. Each micro-batch then lies on all
  # devices, and no row moves between devices.
  micro_batches = jax.tree.map(
    lambda x: x.reshape(-1, steps, *x.shape[1:]).swapaxes(0, 1), batch
  )

  def add(total, numbered):
    number, rows = numbered
    rows = jax.tree.map(sharding.constrain_batch, rows)
    return jax.tree.map(jnp.add, total, compute(rows, number)), None

  first = jax.tree.map(lambda x: x[0], micro_batches)
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, first, 0)
  )
  total, _ = jax.lax.scan(add, zeros, (jnp.arange(steps), micro_batches))
  return total


def decay_mask(params):
  """Marks kernels with True: weight decay applies to kernels only."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: getattr(path[-1], 'key', None) == 'kernel', params
  )


class EmaState(NamedTuple):
  ema: Any  # Exponential average of the parameters: a tree like them, in float32.


def track_ema(decay: float) -> optax.GradientTransformationExtraArgs:
  """Keeps an exponential average of the parameters; must come last in a chain.

  The decay of update t, counted from 0, is min(decay, (1 + t) / (10 + t)): with
  a constant decay, the random initial parameters would dominate for long. The
  average is in float32 whatever the type of the parameters, since it adds very
  small differences.

  `decay` is .9999 in T2, "Polyak averaging". The transformation does not change
  the updates, and its `update` takes the argument `step`, t above; `get_ema`
  reads the average from the optimiser state.
  """

  def init(params):
    return EmaState(
      jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    )

  def update(updates, state, params, *, step, **_):
    new = optax.apply_updates(params, updates)
    share = jnp.maximum(1.0 - decay, 9.0 / (10.0 + step))  # 1 - decay.
    # In this form constant parameters equal their average bit for bit.
    ema = jax.tree.map(lambda old, x: old + share * (x - old), state.ema, new)
    return updates, EmaState(ema)

  return optax.GradientTransformationExtraArgs(init, update)


def get_ema(opt_state):
  """Returns the averaged parameters in `opt_state`, or None if not kept."""
  found = optax.tree.get(opt_state, EmaState.__name__)
  return None if found is None else found.ema


def as_pairs(rules: Sequence) -> tuple:
  """Returns `lr_multipliers` as pairs; one may be written without a trailing comma."""
  single = len(rules) == 2 and isinstance(rules[0], str)
  return (rules,) if single else tuple(rules)


def multipliers(rules: Sequence[tuple[str, float]], params):
  """Returns the factors on the learning rate of parameters, a tree of floats.

  `rules` is `config.lr_multipliers`: ordered (regex, factor) pairs, or a single one.
  The first regex found in the '/'-joined path of the parameter gives its factor, by
  default 1; 0 freezes the parameter. Raises ValueError if a rule applies to no
  parameter, or all are frozen.
  """
  rules = as_pairs(rules)
  numbers = sharding.first_matches('lr_multipliers', rules, params)
  factors = [float(factor) for _, factor in rules] + [1.0]  # -1 is the last.
  factors = jax.tree.map(lambda number: factors[number], numbers)
  if not any(jax.tree.leaves(factors)):
    raise ValueError(
      'lr_multipliers freeze all parameters: nothing is left to train '
      '(config.lr_multipliers)'
    )
  return factors


def frozen_sizes(rules, params) -> dict[str, int]:
  """Returns the numbers of values of the frozen parameters, by path."""
  if not rules:
    return {}
  factors = multipliers(rules, params)
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {
    sharding.path_name(path): x.size
    for (path, x), factor in zip(leaves, jax.tree.leaves(factors))
    if not factor
  }


def stop_frozen(params, factors):
  """Stops the gradient of parameters whose factor is 0."""
  if factors is None:
    return params
  return jax.tree.map(
    lambda x, factor: x if factor else jax.lax.stop_gradient(x), params, factors
  )


def _with_factors(tx, factors):
  """Multiplies the updates of `tx` by factors; a factor of 0 freezes."""
  labels = jax.tree.map(lambda x: 'trained' if x else 'frozen', factors)
  parts = {'trained': tx, 'frozen': optax.set_to_zero()}
  times = lambda x, factor: x * jnp.asarray(factor, x.dtype)
  return optax.chain(
    optax.partition(parts, param_labels=labels),
    optax.stateless(lambda updates, _: jax.tree.map(times, updates, factors)),
  )


def _adafactor(b1, b2, dtype):
  """Adafactor of arXiv 2106.04560, 3.4: with momentum, b2 of at most 0.999."""
  return optax.chain(
    optax.scale_by_factored_rms(
      min_dim_size_to_factor=_FACTORED,
      decay_rate_fn=lambda step, power: jnp.minimum(b2, 1 - (step + 1.0) ** -power),
    ),
    # Not optax.ema, whose state has the name of the average of the weights.
    optax.scale(1 - b1),
    optax.trace(b1, accumulator_dtype=dtype),
  )


def num_inputs(name: str, ndim: int) -> int:
  """Returns how many of a kernel's dimensions are inputs; the others are outputs.

  An attention kernel is [D, K, E] or, of `out`, [K, E, D].
  """
  return 1 if ndim == 3 and not name.endswith('/out/kernel') else ndim - 1


def _matrix(path, x):
  """Returns Muon's view of a parameter as a matrix; None if Adam updates it."""
  name = sharding.path_name(path)
  if not name.endswith('/kernel') or _OUTER.search(name) or x.ndim not in (2, 3):
    return None
  inputs = num_inputs(name, x.ndim)
  axes = tuple(range(x.ndim))
  return optax.contrib.MuonDimensionNumbers(axes[:inputs], axes[inputs:])


def _muon(beta, adam, dtype):
  """Muon for the matrices of hidden layers, `adam` for all other parameters."""
  matrices = lambda params: jax.tree_util.tree_map_with_path(_matrix, params)

  def label(path, x):
    return 'adam' if _matrix(path, x) is None else 'muon'

  def labels(params):
    found = jax.tree_util.tree_map_with_path(label, params)
    if 'muon' not in jax.tree.leaves(found):
      raise ValueError(
        "optimizer='muon' updates the matrices of hidden layers, and this model has "
        'none to train: use --config.optimizer=adam'
      )
    return found

  # The rate of -1 cancels the sign; the chain of get_optimizer has the schedule.
  muon = optax.contrib.muon(
    -1.0, beta=beta, mu_dtype=dtype, consistent_rms=_MUON_RMS,
    muon_weight_dimension_numbers=matrices,
  )  # fmt: skip
  return optax.partition({'muon': muon, 'adam': adam}, labels)


def _precondition(config):
  """Returns the transformation of the gradient by `config.optimizer`."""
  dtype = jnp.dtype(config.optim_dtype)
  b1, b2 = config.b1, config.b2
  if config.optimizer == 'sgd':
    return optax.trace(config.momentum, accumulator_dtype=dtype)
  if config.optimizer == 'lion':
    return optax.scale_by_lion(b1, b2, mu_dtype=dtype)
  if config.optimizer == 'adafactor':
    return _adafactor(b1, b2, dtype)
  adam = optax.scale_by_adam(b1=b1, b2=b2, mu_dtype=dtype)
  return adam if config.optimizer == 'adam' else _muon(config.momentum, adam, dtype)


def get_optimizer(config, schedule: optax.Schedule, factors=None):
  """Builds the optimiser of a checked config, see configs/common.py.

  In order: clip the gradient by its global norm, add `l2_decay` times the
  kernels, precondition it by `optimizer`, add decoupled weight decay (on
  the kernels, or on all parameters), multiply by the learning rate and by the
  parameter's factor, and average the parameters. Weight decay is thus
  multiplied by the learning rate, as in AdamW: T3's 0.1 with lr 1e-3 takes
  1e-4 off at the peak. Independent weight decay is multiplied by lr / base_lr
  instead. Frozen parameters have no optimiser state.

  `factors` are the result of `multipliers`; None: 1 for all parameters. With
  `ema_decay`, `update` of the optax.GradientTransformation takes the argument
  `step`, the number of updates so far.
  """
  chain = []
  if config.grad_norm_clip:
    chain.append(optax.clip_by_global_norm(config.grad_norm_clip))
  if config.l2_decay:
    chain.append(optax.add_decayed_weights(config.l2_decay, decay_mask))
  chain.append(_precondition(config))
  if config.weight_decay:
    # The learning rate multiplies weight decay below: `base_lr` cancels.
    unit = config.base_lr if config.independent_weight_decay else 1.0
    decay = config.weight_decay / unit
    mask = decay_mask if config.weight_decay_on == 'kernels' else None
    chain.append(optax.add_decayed_weights(decay, mask))
  chain.append(optax.scale_by_learning_rate(schedule))
  if factors is not None:
    chain = [_with_factors(optax.chain(*chain), factors)]
  if config.ema_decay:
    chain.append(track_ema(config.ema_decay))
  return optax.chain(*chain)
