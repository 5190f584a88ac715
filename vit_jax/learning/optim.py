"""Optimisers and weight-decay masks (arXiv 2010.11929, T3, T4, B.1).

Builds optax transformations from a config. docs/train.md compares the optimisers.
"""

from collections.abc import Callable, Sequence
import functools
import inspect
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import optax
import optax.contrib

from vit_jax.configs import common
from vit_jax.distributed import sharding
from vit_jax.learning import named_functions

# Adafactor factors the second moment of arrays with two dimensions of at least this
# size, such as the width of a head (big_vision's default).
_FACTORED = 32
# Root mean square of Muon's updates, about the same as Adam's (arXiv 2502.16982, 2.2).
_MUON_RMS = 0.2
# Kernels of embeddings and heads, which Muon leaves to Adam.
_OUTER = re.compile('embed|stem|head|logits|pooler')


def accumulate(compute: Callable[[Any, Any], Any], batch: Any, steps: int) -> Any:
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

  def add(total: Any, micro_batch: Any) -> tuple[Any, None]:
    number, rows = micro_batch
    rows = jax.tree.map(sharding.constrain_batch, rows)
    return jax.tree.map(jnp.add, total, compute(rows, number)), None

  first = jax.tree.map(lambda x: x[0], micro_batches)
  shapes = jax.eval_shape(compute, first, 0)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  total, _ = jax.lax.scan(add, zeros, (jnp.arange(steps), micro_batches))
  return total


def decay_mask(params: optax.Params) -> Any:
  """Marks kernels with True: weight decay applies to kernels only."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: getattr(path[-1], 'key', None) == 'kernel', params
  )


class EmaState(NamedTuple):
  """State of `track_ema`."""

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

  def init(params: Any) -> EmaState:
    return EmaState(_copied(params))

  def update(
    updates: Any, state: Any, params: Any, *, step: jax.Array, **_
  ) -> tuple[Any, EmaState]:
    new = optax.apply_updates(params, updates)
    step_size = jnp.maximum(1.0 - decay, 9.0 / (10.0 + step))
    # In this form constant parameters equal their average bit for bit.
    ema = jax.tree.map(lambda old, x: old + step_size * (x - old), state.ema, new)
    return updates, EmaState(ema)

  return optax.GradientTransformationExtraArgs(init, update)


def get_ema(opt_state: optax.OptState) -> optax.Params | None:
  """Returns the averaged parameters in `opt_state`, or None if not kept."""
  state = optax.tree.get(opt_state, EmaState.__name__)
  return None if state is None else state.ema


def _keep_evaluated(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Keeps the parameters to evaluate where `track_ema` keeps its average."""
  tx = optax.with_extra_args_support(tx)

  def init(params: optax.Params) -> tuple[Any, ...]:
    return *tx.init(params), EmaState(_copied(params))

  def update(
    updates: optax.Updates, state: Any, params: optax.Params, **extra: Any
  ) -> tuple[optax.Updates, tuple[Any, ...]]:
    updates, inner = tx.update(updates, state[:-1], params, **extra)
    new_params = optax.apply_updates(params, updates)
    evaluated = _copied(_evaluated(inner, new_params))
    return updates, (*inner, EmaState(evaluated))

  return optax.GradientTransformationExtraArgs(init, update)


def _copied(params: optax.Params) -> optax.Params:
  return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)


def _evaluated(state: optax.OptState, params: optax.Params) -> optax.Params:
  """Returns the parameters to evaluate of a schedule-free optimiser or SAM."""
  schedule_free = optax.tree.get(state, optax.contrib.ScheduleFreeState.__name__)
  if schedule_free is not None:
    return optax.contrib.schedule_free_eval_params(schedule_free, params)
  state = optax.tree.get(state, optax.contrib.SAMState.__name__)
  is_adversarial = state.steps_since_sync > 0
  return jax.tree.map(
    lambda x, original: jnp.where(is_adversarial, original, x), params, state.cache
  )


def as_pairs(rules: Sequence[Any]) -> tuple[tuple[str, float], ...]:
  """Returns `lr_multipliers` as pairs; one may be written without a trailing comma."""
  is_single = len(rules) == 2 and isinstance(rules[0], str)
  return (tuple(rules),) if is_single else tuple(rules)


def multipliers(rules: Sequence[Any], params: optax.Params) -> Any:
  """Returns the factors on the learning rate of parameters, a tree of floats.

  `rules` is `config.lr_multipliers`: ordered (regex, factor) pairs, or a single one.
  The first regex found in the '/'-joined path of the parameter gives its factor, by
  default 1; 0 freezes the parameter. Raises ValueError if a rule applies to no
  parameter, or all are frozen.
  """
  rules = as_pairs(rules)
  numbers = sharding.first_matches('lr_multipliers', rules, params)
  values = [float(factor) for _, factor in rules] + [1.0]  # -1 is the last.
  factors = jax.tree.map(lambda number: values[number], numbers)
  if not any(jax.tree.leaves(factors)):
    raise ValueError(
      'lr_multipliers freeze all parameters: nothing is left to train '
      '(config.lr_multipliers)'
    )
  return factors


def frozen_sizes(rules: Sequence[Any], params: optax.Params) -> dict[str, int]:
  """Returns the numbers of values of the frozen parameters, by path."""
  if not rules:
    return {}
  factors = multipliers(rules, params)
  leaves = jax.tree_util.tree_leaves_with_path(params)
  sizes = {}
  for (path, x), factor in zip(leaves, jax.tree.leaves(factors)):
    if not factor:
      sizes[sharding.path_name(path)] = x.size
  return sizes


def stop_frozen(params: optax.Params, factors: Any) -> optax.Params:
  """Stops the gradient of parameters whose factor is 0."""
  if factors is None:
    return params

  def stop(x: Any, factor: float) -> Any:
    return x if factor else jax.lax.stop_gradient(x)

  return jax.tree.map(stop, params, factors)


def _with_factors(
  tx: optax.GradientTransformation, factors: Any
) -> optax.GradientTransformation:
  """Multiplies the updates of `tx` by factors; a factor of 0 freezes."""

  def label(factor: float) -> str:
    return 'trained' if factor else 'frozen'

  def scale(update: jax.Array, factor: float) -> jax.Array:
    return update * jnp.asarray(factor, update.dtype)

  def scale_all(updates: Any, params: Any) -> Any:
    del params
    return jax.tree.map(scale, updates, factors)

  transforms = {'trained': tx, 'frozen': optax.set_to_zero()}
  return optax.chain(
    optax.partition(transforms, param_labels=jax.tree.map(label, factors)),
    optax.stateless(scale_all),
  )


def _adafactor(b1: float, b2: float, dtype: jnp.dtype) -> optax.GradientTransformation:
  """Adafactor of arXiv 2106.04560, 3.4: with momentum, b2 of at most 0.999."""

  def decay_rate(step: jax.Array, power: float) -> jax.Array:
    return jnp.minimum(b2, 1 - (step + 1.0) ** -power)

  return optax.chain(
    optax.scale_by_factored_rms(
      min_dim_size_to_factor=_FACTORED, decay_rate_fn=decay_rate
    ),
    # Not optax.ema, whose state has the name of the average of the weights.
    optax.scale(1 - b1),
    optax.trace(b1, accumulator_dtype=dtype),
  )


def num_inputs(name: str, ndim: int) -> int:
  """Returns how many of a kernel's dimensions are inputs; the others are outputs.

  An attention kernel is [D, K, E] or, of `out`, [K, E, D].
  """
  is_query_key_or_value = ndim == 3 and not name.endswith('/out/kernel')
  return 1 if is_query_key_or_value else ndim - 1


def _matrix(path: Any, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
  """Returns Muon's view of a parameter as a matrix; None if Adam updates it."""
  name = sharding.path_name(path)
  if not name.endswith('/kernel') or _OUTER.search(name) or x.ndim not in (2, 3):
    return None
  inputs = num_inputs(name, x.ndim)
  axes = tuple(range(x.ndim))
  return optax.contrib.MuonDimensionNumbers(axes[:inputs], axes[inputs:])


def _muon(
  beta: float, adam: optax.GradientTransformation, dtype: jnp.dtype
) -> optax.GradientTransformation:
  """Muon for the matrices of hidden layers, `adam` for all other parameters."""

  def matrices(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(_matrix, params)

  def label(path: Any, x: Any) -> str:
    return 'adam' if _matrix(path, x) is None else 'muon'

  def labels(params: Any) -> Any:
    by_param = jax.tree_util.tree_map_with_path(label, params)
    if 'muon' not in jax.tree.leaves(by_param):
      raise ValueError(
        "optimizer='muon' updates the matrices of hidden layers, and this model has "
        'none to train: use --config.optimizer=adam'
      )
    return by_param

  # The rate of -1 cancels the sign; the chain of get_optimizer has the schedule.
  muon = optax.contrib.muon(
    -1.0,
    beta=beta,
    mu_dtype=dtype,
    consistent_rms=_MUON_RMS,
    muon_weight_dimension_numbers=matrices,
  )
  return optax.partition({'muon': muon, 'adam': adam}, labels)


def _precondition(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
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
  if config.optimizer == 'adam':
    return adam
  return _muon(config.momentum, adam, dtype)


def _weight_decay(
  config: ml_collections.ConfigDict,
) -> list[optax.GradientTransformation]:
  """Returns decoupled weight decay, which the learning rate multiplies."""
  if not config.weight_decay:
    return []
  # The learning rate multiplies independent weight decay too: `base_lr` cancels.
  unit = config.base_lr if config.independent_weight_decay else 1.0
  mask = decay_mask if config.weight_decay_on == 'kernels' else None
  return [optax.add_decayed_weights(config.weight_decay / unit, mask)]


def _setting(config: ml_collections.ConfigDict) -> named_functions.Setting:
  return named_functions.Setting(
    'optimizer', config.optimizer, 'optimizer_args', config.optimizer_args.to_dict()
  )


def sam(
  learning_rate: optax.Schedule,
  optimizer: str = 'optax:sgd',
  rho: float = 0.05,
  sync_period: int = 2,
  **arguments: Any,
) -> optax.GradientTransformation:
  """Sharpness-aware minimisation (arXiv 2010.01412) around an optimiser of optax.

  The updates before every `sync_period`-th one are adversarial steps of length `rho`.
  `optimizer` makes the others, with `arguments` and the learning rate of their step.
  """
  setting = named_functions.Setting('optimizer', optimizer, 'optimizer_args', arguments)

  def schedule(count: jax.Array) -> jax.Array:
    return learning_rate(count * sync_period + sync_period - 1)

  make = functools.partial(setting.function(), schedule)
  adversary = optax.chain(optax.contrib.normalize(), optax.sgd(rho))
  tx = optax.contrib.sam(setting.call(make, {}), adversary, sync_period)
  # It rejects other arguments, such as the step, which this type does not get.
  return optax.GradientTransformation(tx.init, tx.update)


_SAM = 'optax.contrib:sam'
_SCHEDULE_FREE = 'optax.contrib:schedule_free_'


def _evaluates_others(config: ml_collections.ConfigDict) -> bool:
  """Returns whether an optimiser evaluates other parameters than it trains."""
  return config.optimizer.startswith((_SAM, _SCHEDULE_FREE))


def _named_optimizer(
  config: ml_collections.ConfigDict, schedule: optax.Schedule
) -> optax.GradientTransformation:
  """Returns an optimiser 'MODULE:NAME', which applies weight decay in its own order."""
  setting = _setting(config)
  arguments = dict(setting.arguments)
  for name, value in arguments.items():
    if name.endswith('mask') and value == 'kernels':
      arguments[name] = decay_mask
  make = sam if setting.name == _SAM else setting.function()
  if 'learning_rate' not in inspect.signature(make).parameters:
    raise ValueError(
      f"optimizer='{config.optimizer}' has no argument learning_rate: use an optimiser, "
      "such as 'optax:adamw' (config.optimizer)"
    )
  make = functools.partial(make, schedule)
  return setting._replace(arguments=arguments).call(make, {})


def check(config: ml_collections.ConfigDict) -> None:
  """Checks an optimiser 'MODULE:NAME', before any data are read.

  Raises ValueError if the module does not have it with these arguments, or if it needs
  more than the gradient.
  """
  if not common.is_named_function(config.optimizer):
    return
  setting = _setting(config)
  constant = optax.constant_schedule(0.1)
  tx = optax.with_extra_args_support(_named_optimizer(config, constant))
  params = {
    'kernel': jax.ShapeDtypeStruct((256, 256), jnp.float32),
    'bias': jax.ShapeDtypeStruct((256,), jnp.float32),
  }
  try:
    state = jax.eval_shape(tx.init, params)
    jax.eval_shape(tx.update, params, state, params)
  except Exception as e:
    raise ValueError(
      f'{setting} cannot update parameters by their gradient alone: {e}; correct its '
      'arguments (config.optimizer_args), or use another optimiser (config.optimizer)'
    ) from e
  if not _evaluates_others(config):
    return
  for key in ('lr_multipliers', 'ema_decay'):
    if config[key]:
      raise ValueError(
        f"optimizer='{config.optimizer}' evaluates other parameters than it trains, "
        f'which {key}={config[key]} would change: leave out one of them '
        f'(config.{key})'
      )


def get_optimizer(
  config: ml_collections.ConfigDict, schedule: optax.Schedule, factors: Any = None
) -> optax.GradientTransformation:
  """Builds the optimiser of a checked config, see configs/common.py.

  In order: clip the gradient by its global norm, add `l2_decay` times the
  kernels, precondition it by `optimizer`, add decoupled weight decay (on
  the kernels, or on all parameters), multiply by the learning rate and by the
  parameter's factor, and average the parameters. Weight decay is thus
  multiplied by the learning rate, as in AdamW: T3's 0.1 with lr 1e-3 takes
  1e-4 off at the peak. Independent weight decay is multiplied by lr / base_lr
  instead. Frozen parameters have no optimiser state. An optimiser 'MODULE:NAME'
  replaces the steps from preconditioning to the learning rate.

  `factors` are the result of `multipliers`; None: 1 for all parameters. With
  `ema_decay`, `update` of the optax.GradientTransformation takes the argument
  `step`, the number of updates so far. `get_ema` also reads what schedule-free optimisers
  and SAM evaluate.
  """
  chain = []
  if config.grad_norm_clip:
    chain.append(optax.clip_by_global_norm(config.grad_norm_clip))
  if config.l2_decay:
    chain.append(optax.add_decayed_weights(config.l2_decay, decay_mask))
  if common.is_named_function(config.optimizer):
    chain.append(_named_optimizer(config, schedule))
  else:
    chain += [_precondition(config), *_weight_decay(config)]
    chain.append(optax.scale_by_learning_rate(schedule))
  if factors is not None:
    chain = [_with_factors(optax.chain(*chain), factors)]
  if config.ema_decay:
    chain.append(track_ema(config.ema_decay))
  tx = optax.chain(*chain)
  return _keep_evaluated(tx) if _evaluates_others(config) else tx
