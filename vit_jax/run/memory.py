"""Checks that an update fits the memory of the devices."""

from collections.abc import Iterator, Mapping
import contextlib
import time
from typing import Any

import jax
import ml_collections

from vit_jax import console
from vit_jax.configs import models as model_configs
from vit_jax.distributed import processes, sharding


def check(
  config: ml_collections.ConfigDict, program: Any, mesh: jax.sharding.Mesh
) -> None:
  """Compiles the update; raises ValueError if it does not fit the devices' memory.

  Compiles it for the largest images. The run does not compile it again, since JAX
  keeps compiled programs.

  Args:
    config: the complete config.
    program: the vit_jax.train.Program of the config.
    mesh: the mesh of the run. The device of all processes with the least memory counts.
  """
  batch = sharding.abstract_batch(program.task.batch_spec(config.batch), mesh)
  image_size = program.task.image_size
  with jax.set_mesh(mesh):
    try:
      lowered = program.jit_update().lower(program.abstract, batch)
    except KeyError as e:
      if e.args[0] in batch:
        raise
      raise ValueError(
        f"task='{config.task}' reads {e} of a batch, which its method batch_spec "
        'does not have: add its shape and type there (config.task)'
      ) from e
    with (
      compiling(batch, 1, program.task.image_sizes),
      suggesting_remedy(config, image_size),
    ):
      compiled = lowered.compile()
  needed = peak_bytes(compiled)
  limit = min(processes.gather('comparing memory', _device_memory()))
  if needed > limit:
    raise ValueError(
      f'batch={config.batch}: an update takes {console.size(needed)} of memory on a '
      f'device, which has {console.size(limit)}: {remedy(config, image_size)}'
    )


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the memory of a compiled program on a device, in bytes."""
  usage = compiled.memory_analysis()
  return (
    usage.argument_size_in_bytes
    + usage.output_size_in_bytes
    - usage.alias_size_in_bytes
    + usage.temp_size_in_bytes
  )


def _device_memory() -> float:
  """Returns the bytes that this process may use on each of its devices."""
  devices = jax.local_devices()
  statistics = devices[0].memory_stats() or {}
  return statistics.get('bytes_limit') or console.machine_memory() / len(devices)


@contextlib.contextmanager
def compiling(
  batch: Mapping[str, Any], number: int, sizes: list[tuple[int, int]]
) -> Iterator[None]:
  """Announces that an update is compiled, and says how long it took.

  Args:
    batch: arrays of the batch by name, or their shapes.
    number: number of the size of its images among the `sizes`, from 1.
    sizes: (height, width) of all images of the run.
  """
  description = ''
  if len(sizes) > 1:
    height, width = batch['image'].shape[1:3]
    description = f' for {height}x{width} pixels, {number} of {len(sizes)} sizes'
  console.log(f'Compiling{description} ...')
  start_time = time.perf_counter()
  yield
  seconds = time.perf_counter() - start_time
  console.log(f'Compiled in {console.duration(seconds)}{description}.')


@contextlib.contextmanager
def suggesting_remedy(
  config: ml_collections.ConfigDict, image_size: tuple[int, int]
) -> Iterator[None]:
  """Turns a device's RESOURCE_EXHAUSTED into a ValueError with a remedy."""
  try:
    yield
  except jax.errors.JaxRuntimeError as e:
    if 'RESOURCE_EXHAUSTED' not in str(e):
      raise
    raise ValueError(
      f'batch={config.batch}: a device has too little memory for an update: '
      + remedy(config, image_size)
    ) from e


def remedy(config: ml_collections.ConfigDict, image_size: tuple[int, int]) -> str:
  """Returns which keys reduce the memory of an update, for a message."""
  crop = 'pp.sides and --config.pp.longest_side' if config.pp.sides else 'pp.crop'
  height, width = image_size
  advice = (
    f'lower --config.batch, raise --config.accum_steps, or '
    f'lower --config.{crop} (images of {height}x{width} pixels)'
  )
  if not model_configs.layers_of(config.model).get('remat', 'full'):
    place = model_configs.place_of_layers(config.model)
    advice += f', or set --config.{place}.remat=full'
  return advice
