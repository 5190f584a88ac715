"""Searches for the fastest settings that fit (`vit_jax plan --search`).

The settings are the mesh, the number of micro-batches and rematerialisation.
"""

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
import copy
import math
from typing import Any

import ml_collections

from vit_jax import console
from vit_jax.configs import models as model_configs

_SHOWN = 5  # Number of plans to print.
# (remat, share of the peak). A kind of rematerialisation is tried only while the best
# plan so far is below this share. 'dots' recomputes little, since dense layers do most
# of the arithmetic; 'full' recomputes a quarter of it.
REMATS = (('', math.inf), ('dots', 0.75), ('full', 0.6))


def meshes(config: ml_collections.ConfigDict, devices: int) -> Iterator[dict[str, int]]:
  """Yields the meshes to try.

  Parameters are split over all devices, over 8, or over none; the last mesh
  splits them over half of the devices, and heads and hidden layers over 2.
  """
  fields = config.model.get('transformer') or config.model
  num_heads = fields.get('num_heads', 1)
  sizes = [(devices, 1), (min(8, devices), 1), (1, 1)]
  if devices % 2 == 0 and num_heads % 2 == 0:
    sizes.append((devices // 2, 2))
  for fsdp, model in dict.fromkeys(sizes):
    if devices % (fsdp * model) == 0:
      yield {'data': devices // (fsdp * model), 'fsdp': fsdp, 'model': model}


def search(
  config: ml_collections.ConfigDict, devices: int, plan: Callable[[Any], dict]
) -> list[dict]:
  """Plans a run with many settings; prints the best plans and their flags.

  For each mesh the search looks for the fewest micro-batches that fit, starting from
  the number of the best plan so far. Rematerialisation makes room for larger
  micro-batches; it is tried unless the best plan is too fast for recomputation to win.

  `plan` is a function from a config to the result of plan.make_plan. Returns the plans
  that fit, the fastest first, or all plans if none fits. The order assumes that
  communication does not overlap with computation. Each plan has its `flags`.
  """
  config = copy.deepcopy(config)
  devices //= config.mesh.get('sequence') or 1  # The axis stays as it is.
  config.model = model_configs.with_options(config.model)
  remats, remat_key = _remats(config.model)
  plans: list[dict] = []
  best: list[dict] = []
  for mesh in meshes(config, devices):
    start = best[0]['accum_steps'] if best else 1
    for remat, enough in remats:
      if best and _share_of_peak(best[0]) >= enough:
        continue
      settings: dict[str, Any] = {f'mesh.{axis}': size for axis, size in mesh.items()}
      if remat_key:
        settings[remat_key] = remat
      shards = devices // mesh['model']
      new_plans = list(_fewest_that_fit(config, settings, plan, shards, start))
      plans += new_plans
      fit = [result for result in new_plans if result['fits']]
      if fit:
        start = min(result['accum_steps'] for result in fit)
      best = sorted([*best, *fit], key=_images_per_second, reverse=True)
      if fit and start == 1:
        break  # The whole batch fits: recomputation would only be slower.
  if not plans:
    raise ValueError(
      f'batch={config.batch} is not a multiple of the {devices} devices, nor of '
      'half of them: use '
      f'--config.batch={max(1, round(config.batch / devices)) * devices}'
    )
  if not best:
    console.log('No plan fits: use more devices or a smaller batch.')
    return plans
  console.log(f'\nThe best of {len(plans)}, with the network (estimates):')
  for result in best[:_SHOWN]:
    console.log(f'  {_speed(result)}  {result["flags"]}')
  return best


def _remats(
  model: ml_collections.ConfigDict,
) -> tuple[Sequence[tuple[str, float]], str | None]:
  """Returns the kinds of rematerialisation to try, and their key or None."""
  if 'remat' not in model_configs.layers_of(model):
    return REMATS[:1], None
  # A BiT ResNet has no 'dots'.
  kinds = (REMATS[0], REMATS[-1]) if model.get('kind') == 'bit' else REMATS
  return kinds, f'{model_configs.place_of_layers(model)}.remat'


def _fewest_that_fit(
  config: ml_collections.ConfigDict,
  settings: Mapping[str, Any],
  plan: Callable[[Any], dict],
  shards: int,
  start: int,
) -> Iterator[dict]:
  """Yields the plans of a search for the fewest micro-batches that fit."""
  numbers = []
  for i in range(config.batch.bit_length()):
    if config.batch % (shards * 2**i) == 0:
      numbers.append(2**i)
  i = bisect.bisect_right(numbers, start) - 1
  tried = set()
  while 0 <= i < len(numbers) and i not in tried:
    tried.add(i)
    trial = copy.deepcopy(config)
    overrides = {**settings, 'accum_steps': numbers[i]}
    trial.update_from_flattened_dict(overrides)
    text = ' '.join(f'--config.{k}={v}' for k, v in overrides.items())
    console.log(text)
    result = {**plan(trial), 'accum_steps': numbers[i], 'flags': text}
    console.log(f'  {_speed(result)}')
    yield result
    if result['fits']:
      i -= 1
    else:  # Twice as many micro-batches save half of the memory at most.
      needed = result['memory_per_core_bytes'] or 0
      excess = max(1, needed / result['memory_of_core_bytes'])
      i += max(1, int(math.log2(excess)))


def _images_per_second(plan: Mapping[str, Any]) -> float:
  """Images per second and device, network time added."""
  return plan['images_per_second_per_core_with_network']


def _share_of_peak(plan: Mapping[str, Any]) -> float:
  """Share of the peak that a plan reaches, network time added."""
  alone = plan['images_per_second_per_core']
  return plan['share_of_peak'] * _images_per_second(plan) / alone


def _speed(plan: Mapping[str, Any]) -> str:
  """Describes the speed and the memory of a plan in one line."""
  memory = console.size(plan['memory_per_core_bytes'])
  if not plan['fits']:
    return f'does not fit: {memory}'
  return f'{_images_per_second(plan):,.1f} images/s a device, {memory}'
