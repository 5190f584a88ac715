"""Learning rates by step: linear warm-up, then decay (arXiv 2010.11929, T3, T4)."""

from collections.abc import Mapping, Sequence
import functools
import inspect
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import optax

from vit_jax.configs import common, schema
from vit_jax.learning import named_functions

_STAIR = 0.1  # Factor of each drop of a staircase.
_CHECKED_STEPS = 2**31 - 1  # Length of the schedules that `check` makes.


def create_learning_rate_schedule(
  total_steps: int,
  base: float,
  decay_type: str,
  warmup_steps: int | None,
  linear_end: float = 1e-5,
  decay_at: Sequence[float] = (),
  decay_args: Mapping[str, Any] | None = None,
) -> optax.Schedule:
  """Returns a schedule of linear warm-up, then decay to the last step.

  Args:
    total_steps: number of updates.
    base: learning rate at the end of the warm-up.
    decay_type: 'cosine' (to 0), 'linear' (to `linear_end`), 'constant',
      'staircase' (to a tenth at each of `decay_at`), 'rsqrt' (see `rsqrt_decay`), or
      'MODULE:NAME', a schedule of optax or of the user, which is multiplied by `base`.
    warmup_steps: number of warm-up updates; the first has the learning rate
      base / warmup_steps, not 0. None: common.default_warmup. Logs a warning if it
      is not below `total_steps`: the learning rate then only rises.
    linear_end: last learning rate of the linear decay (1e-5; issue #2).
    decay_at: when a staircase drops, as increasing fractions of `total_steps`.
    decay_args: keyword arguments of `rsqrt_decay` or of the schedule 'MODULE:NAME'.

  Returns:
    A function from the step (0 for the first update) to the learning rate.
  """
  schema.check('decay_type', decay_type, common.DecayType)
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
  decay_steps = max(1, total_steps - warmup_steps)
  peak = base
  if decay_type == 'cosine':
    decay = optax.cosine_decay_schedule(base, decay_steps)
  elif decay_type == 'linear':
    decay = optax.linear_schedule(base, linear_end, decay_steps)
  elif decay_type == 'constant':
    decay = optax.constant_schedule(base)
  elif decay_type == 'staircase':
    decay = _staircase(base, total_steps, warmup_steps, decay_at)
  else:
    decay = _decay_with_arguments(decay_type, base, decay_steps, decay_args or {})
    peak = float(decay(0))
  if not warmup_steps:
    return decay
  warmup = optax.linear_schedule(peak / warmup_steps, peak, warmup_steps - 1)
  if warmup_steps == 1:
    warmup = optax.constant_schedule(peak)
  return optax.join_schedules([warmup, decay], [warmup_steps])


def rsqrt_decay(
  base: float,
  steps: int,
  timescale: schema.Positive = 10_000,
  shift: schema.NonNegative = 0,
  cooldown: schema.Natural = 0,
) -> optax.Schedule:
  """Returns a decay by the reciprocal square root, as in big_vision.

  Step t has the learning rate base / sqrt(1 + (t + shift) / timescale). It does not
  depend on the length of the run, so that a run can be made longer (arXiv 2106.04560,
  section 3.5).

  Args:
    base: learning rate of step 0 without a shift.
    steps: number of updates, for the cooldown.
    timescale: steps after which the rate has fallen to base / sqrt(2).
    shift: number of steps to begin at.
    cooldown: number of last updates whose rate also falls to 0 linearly.

  ValueError if the cooldown is longer than the run.
  """
  if cooldown > steps:
    raise ValueError(
      f'cooldown={cooldown:,} is longer than the {steps:,} updates after the warm-up, '
      'whose rate would begin near 0: lower it, or train longer (config.total_steps)'
    )

  def schedule(step: jax.Array) -> Any:
    rate = base / jnp.sqrt(1 + (step + shift) / timescale)
    if cooldown:
      rate *= jnp.minimum(1.0, (steps - step) / cooldown)
    return rate

  return schedule


def check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError unless a config's decay can be made, before any data are read."""
  if config.decay_type == 'rsqrt' or common.is_named_function(config.decay_type):
    _decay_with_arguments(
      config.decay_type, 1.0, _CHECKED_STEPS, config.decay_args.to_dict()
    )


def _decay_with_arguments(
  decay_type: str, base: float, steps: int, arguments: Mapping[str, Any]
) -> optax.Schedule:
  """Returns a decay that has `decay_args`."""
  setting = named_functions.Setting('decay_type', decay_type, 'decay_args', arguments)
  if decay_type == 'rsqrt':
    make = functools.partial(rsqrt_decay, base, steps)
    for name, parameter in inspect.signature(make).parameters.items():
      if name in arguments:
        schema.check(f'decay_args.{name}', arguments[name], parameter.annotation)
    return setting.call(make, {})
  make = setting.function()
  defaults = {'init_value': 1.0, 'decay_steps': steps, 'transition_steps': steps}
  for name in defaults.keys() - inspect.signature(make).parameters.keys():
    del defaults[name]
  factor = setting.call(make, defaults)
  try:
    shape = jax.eval_shape(factor, 0).shape
  except Exception as e:
    raise ValueError(f'{setting} is not a schedule: {e} (config.decay_type)') from e
  if shape:
    raise ValueError(
      f'{setting} returns an array of shape {shape}, not a number: use a schedule '
      '(config.decay_type)'
    )
  return lambda step: base * factor(step)


def _staircase(
  base: float, total_steps: int, warmup_steps: int, decay_at: Sequence[float]
) -> optax.Schedule:
  """Returns a schedule, from the end of the warm-up, that drops at shares of the run."""
  steps = [round(share * total_steps) for share in decay_at]
  if steps and steps[0] <= warmup_steps:
    raise ValueError(
      f'decay_at={tuple(decay_at)} of total_steps={total_steps} drops the '
      f'learning rate at step {steps[0]}, before the end of the warm-up of '
      f'{warmup_steps} steps: train longer, or lower --config.warmup_steps'
    )
  drops = {step - warmup_steps: _STAIR for step in steps}
  return optax.piecewise_constant_schedule(base, drops)
