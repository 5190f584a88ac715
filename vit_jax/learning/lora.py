"""Low-rank adapters, LoRA (arXiv 2106.09685): few trained parameters per kernel.

A kernel W that `config.lora.on` selects gets two arrays next to it in the tree,
`kernel_lora_a` [*inputs, r] and `kernel_lora_b` [r, *outputs]. The model computes with
W + alpha / r * A B, so that it needs no layers of its own: any kernel of any model can
be adapted. A starts with random numbers and B with zeros, so the first update starts
from W. Only adapters and heads are trained, stored and have an optimiser state; the
heads of EoMT include its queries.
"""

from collections.abc import Callable, Mapping
import re
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax.distributed import sharding
from vit_jax.learning import optim

A, B = '_lora_a', '_lora_b'  # Ends of their paths.
# Heads of classifiers, detectors and segmenters, and the queries and masks of EoMT.
_HEAD = '(^|[/_])head(_norm)?/|^queries$|^(mask_mlp|upscale_[0-9]+)/'
# Uniform in 1 / sqrt(inputs), as torch.nn.Linear and PEFT.
_INIT = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')


def rules(config: ml_collections.ConfigDict) -> tuple[tuple[str, float], ...]:
  """Returns `config.lr_multipliers`; with adapters, what they omit is frozen or 1."""
  pairs = optim.as_pairs(config.lr_multipliers)
  if not config.lora.rank:
    return pairs
  return (*pairs, (f'{_HEAD}|({A}|{B})$', 1.0), ('', 0.0))


Init = Callable[[jax.Array], tuple[Any, Any]]


def adapted(init: Init, config: ml_collections.ConfigDict) -> Init:
  """Returns `init` of a task, with adapters among its parameters.

  ValueError if `config.lora.on` selects no kernel, or only frozen ones.
  """
  if not config.lora.rank:
    return init

  def init_adapted(rng: jax.Array) -> tuple[Any, Any]:
    params, extra = init(rng)
    flat = flax.traverse_util.flatten_dict(params, sep='/')
    kernels = [path for path in sorted(flat) if _is_adapted(path, flat[path], config)]
    if not kernels:
      paths = [path for path in flat if path.endswith('/kernel')]
      names = sorted({path.split('/')[-2] for path in paths})
      raise ValueError(
        f"lora.on='{config.lora.on}' selects no kernel of this model: use a regular "
        f'expression for paths that end in one of {", ".join(names)} (config.lora.on)'
      )
    for number, path in enumerate(kernels):
      key = jax.random.fold_in(rng, number)
      a, b = _new_adapter(key, path, flat[path], config.lora.rank)
      flat[path + A] = a
      flat[path + B] = b
    frozen = optim.frozen_sizes(rules(config), flat)
    if stopped := [path for path in kernels if path + A in frozen]:
      raise ValueError(
        f"lora.on='{config.lora.on}' adapts '{stopped[0]}', which lr_multipliers "
        'freeze: select other kernels (config.lora.on), or leave out that rule '
        '(config.lr_multipliers)'
      )
    return flax.traverse_util.unflatten_dict(flat, sep='/'), extra

  return init_adapted


def _new_adapter(
  key: jax.Array, path: str, kernel: jax.Array, rank: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the initial A [*inputs, r] and B [r, *outputs] of a kernel."""
  split = optim.num_inputs(path, kernel.ndim)
  inputs, outputs = kernel.shape[:split], kernel.shape[split:]
  a = _INIT(key, (np.prod(inputs), rank), kernel.dtype)
  return a.reshape(*inputs, rank), jnp.zeros((rank, *outputs), kernel.dtype)


def _is_adapted(path: str, x: Any, config: ml_collections.ConfigDict) -> bool:
  if not path.endswith('/kernel') or x.ndim < 2 or re.search(_HEAD, path):
    return False
  return re.search(config.lora.on, path) is not None


def without_adapters(params: Any) -> Any:
  """Returns parameters, or shapes, without the adapters."""
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  flat = {path: x for path, x in flat.items() if not path.endswith((A, B))}
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def split_name(path: str) -> tuple[str, str]:
  """Returns the path of an adapted kernel, and A or B; '' for other parameters."""
  for end in (A, B):
    if path.endswith(end):
      return path.removesuffix(end), end
  return path, ''


def merged(params: Any, config: ml_collections.ConfigDict) -> Any:
  """Adds the adapters to their kernels; returns the parameters of the model."""
  if not config.lora.rank:
    return params
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  scale = (config.lora.alpha or config.lora.rank) / config.lora.rank
  for path in [path for path in flat if path.endswith(A)]:
    name = path.removesuffix(A)
    a = flat.pop(path)
    b = flat.pop(name + B)
    flat[name] += scale * jnp.tensordot(a, b, 1, precision='highest')
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def trained(params: Any, config: ml_collections.ConfigDict) -> Any:
  """Returns the parameters that are stored: without the frozen ones of adapters."""
  if not config.lora.rank:
    return params
  frozen = optim.frozen_sizes(rules(config), params)
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  for path in frozen:
    del flat[path]
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def base(
  weights: Mapping[str, Any], params: Any, config: ml_collections.ConfigDict
) -> dict[str, Any]:
  """Returns the frozen parameters among weights by path; {} without adapters.

  `params` are shapes. ValueError if the weights lack one of them.
  """
  if not config.lora.rank:
    return {}
  frozen = sorted(optim.frozen_sizes(rules(config), params))
  if missing := [path for path in frozen if path not in weights]:
    raise ValueError(
      f'lora.rank={config.lora.rank} freezes the weights of config.pretrained='
      f"{config.pretrained!r}, which lack {len(missing)}, such as '{missing[0]}': use "
      'weights that have them (--config.pretrained), or train these parameters, as in '
      f'--config.lr_multipliers="(\'{missing[0]}\', 1.0)"'
    )
  return {path: weights[path] for path in frozen}


def check_stored(params: Any, shapes: Any, config: ml_collections.ConfigDict) -> None:
  """Raises ValueError unless stored parameters are the `trained` ones of a model."""
  stored = _shapes_by_path(params)
  expected = _shapes_by_path(trained(shapes, config))
  for path in sorted(stored.keys() | expected.keys()):
    if stored.get(path) != expected.get(path):
      raise ValueError(
        f"the checkpoint's '{path}' is of shape {stored.get(path)}, but "
        f'lora.rank={config.lora.rank} and lora.on={config.lora.on!r} need '
        f'{expected.get(path)}: restore the config.json of the run'
      )


def _shapes_by_path(params: Any) -> dict[str, tuple[int, ...]]:
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  return {path: tuple(x.shape) for path, x in flat.items()}


def whole(params: Any, frozen: Mapping[str, Any], shapes: Any) -> Any:
  """Returns stored parameters with the frozen ones, which are placed as `shapes`."""
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  flat_shapes = flax.traverse_util.flatten_dict(shapes, sep='/')
  for path, x in frozen.items():
    shape = flat_shapes[path]
    flat[path] = jax.device_put(x.astype(shape.dtype), shape.sharding)
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def fingerprint(frozen: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a workdir keeps of the frozen parameters; {} for none."""
  if not frozen:
    return {}
  return {'base': {'hash': sharding.digest(dict(frozen))}}
