"""TPU versions, GPUs and their topologies, for planning without them."""

from collections.abc import Iterator, Sequence
import contextlib
import math
import os
import re
from typing import Any, NamedTuple

from vit_jax import console
from vit_jax.planning import gpus

GIB = 2**30


class Chip(NamedTuple):
  """A device as the compiler counts them: a core on v2 and v3, else a chip."""

  memory: int  # Bytes.
  peak: float  # bfloat16 FLOPs per second.
  bandwidth: float  # Bytes per second to and from main memory (HBM).
  network: float  # Bytes per second over all links of the chip, one way.
  per_chip: int  # Devices on a chip.
  example: str  # A topology of this version.
  largest: str  # The largest slice.
  config: str | None = None  # Configuration of the chip, for versions with several.
  # By which factors runs took longer than the estimate, from the tables of docs/plan.md.
  slowdown: tuple[float, float] = (1.7, 2.5)
  is_gpu: bool = False


# From Google Cloud's documentation of each version (cloud.google.com/tpu/docs/v5e and so
# on), but for v2's bandwidth, which is from JAX's pallas.mosaic.tpu_info. The largest slices of v2 and v3 have 512 and 2,048 cores. Pods of v4, v5e and v6e
# have 4,096, 256 and 256 chips; a job gets at most 6,144 of the 8,960 chips of v5p's
# pod. On v4 and v5p the two cores of a chip work as one device. GPUs, of the SXM form: XLA's
# descriptions (see gpus.py; the peak is 132 cores x 4 units x 512 products and sums at
# 1.83 GHz), and half of NVLink's 900 GB/s in both directions, as in MLCommons' descriptions
# of systems.
_ONE = 'megacore'
_H100 = Chip(
  memory=84_942_979_072,
  peak=989e12,
  bandwidth=3352e9,
  network=450e9,
  per_chip=1,
  example='h100:1',
  largest='h100:8',
  slowdown=(1.2, 1.35),
  is_gpu=True,
)
CHIPS = {
  'v2': Chip(8 * GIB, 45e12 / 2, 716e9 / 2, 248e9, 2, 'v2:2x2', 'v2:16x16'),
  'v3': Chip(16 * GIB, 123e12 / 2, 900e9 / 2, 328e9, 2, 'v3:4x4', 'v3:32x32'),
  'v4': Chip(32 * GIB, 275e12, 1200e9, 300e9, 1, 'v4:2x2x1', 'v4:16x16x16', _ONE),
  'v5e': Chip(16 * GIB, 197e12, 819e9, 200e9, 1, 'v5e:4x4', 'v5e:16x16'),
  'v5p': Chip(95 * GIB, 459e12, 2765e9, 600e9, 1, 'v5p:2x2x1', 'v5p:16x16x24', _ONE),
  'v6e': Chip(32 * GIB, 918e12, 1638e9, 400e9, 1, 'v6e:4x4', 'v6e:16x16'),
  'h100': _H100,
  'h200': _H100._replace(
    memory=151_397_597_184, bandwidth=4800e9, example='h200:1', largest='h200:8'
  ),
}
_OF_OTHERS = re.compile('--xla_(cpu|gpu|force_host|backend|llvm)_')
_EXAMPLES = ', '.join(chip.example for chip in CHIPS.values())


def parse(name: str) -> tuple[Chip, int, str]:
  """Returns the kind of device, the number of slices, and the topology of a slice.

  'v3:4x4' is one slice, and '2xv5e:4x4' two slices 'v5e:4x4'; 'h100:8' are eight GPUs of
  a host. ValueError if the name has another form, or no slice of the version has so many
  chips.
  """
  # The compiler ends the process with 0 chips along an axis.
  number = '[1-9][0-9]{0,3}'
  match = re.fullmatch(f'(?:({number})x)?(([a-z]\\w+):{number}(?:x{number})*)', name)
  chip = CHIPS.get(match[3]) if match else None
  if (
    match is None
    or chip is None
    or name.count('x', name.find(':')) != chip.example.count('x')
  ):
    raise ValueError(
      f"topology='{name}' is unknown: pass a version and the chips along each axis, or a "
      'GPU and their number, '
      f'for example {_EXAMPLES}, or 2xv5e:4x4 for two slices (--topology)'
    )
  is_larger = _num_chips(match[2]) > _num_chips(chip.largest)
  if chip.is_gpu and (match[1] or is_larger):
    raise ValueError(
      f"topology='{name}': only the GPUs of one host are planned, at most {chip.largest} "
      '(--topology)'
    )
  if is_larger:
    raise ValueError(
      f"topology='{name}': a slice of {_num_chips(match[2]):,} chips does not exist, the "
      f'largest is {chip.largest}, {_num_chips(chip.largest):,} chips: pass at most that, '
      f'or several slices, such as 2x{chip.largest} (--topology)'
    )
  return chip, int(match[1] or 1), match[2]


def _num_chips(shape: str) -> int:
  """Returns the number of chips of a slice such as 'v3:4x4'."""
  return math.prod(map(int, shape.partition(':')[2].split('x')))


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
  """Hides libtpu's output in a `with` block, and XLA_FLAGS of other backends from it.

  libtpu silently ends the process at an unknown flag.
  """
  flags = os.environ.get('XLA_FLAGS', '')
  kept_flags = [flag for flag in flags.split() if not _OF_OTHERS.match(flag)]
  os.environ['XLA_FLAGS'] = ' '.join(kept_flags)
  try:
    with console.hidden_stderr():
      yield
  finally:
    os.environ['XLA_FLAGS'] = flags


def _gpus(name: str, chip: Chip) -> Sequence[Any]:
  # JAX would look for a driver.
  os.environ.setdefault('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', '1')
  from jax.experimental import topologies

  version, _, count = name.partition(':')
  description = gpus.describe(version, chip.memory, chip.bandwidth)
  try:
    return topologies.get_topology_desc(
      '', 'cuda', target_config=description, topology=f'1x1x{count}'
    ).devices
  except NotImplementedError as e:
    raise ImportError(
      f"topology='{name}' needs JAX for CUDA, without a GPU too: run "
      "`pip install -e '.[cuda]'`"
    ) from e


def get_topology(name: str) -> Sequence[Any]:
  """Returns the devices of a topology, see `parse`.

  Raises ValueError if there is no such topology, ImportError if libtpu or JAX for CUDA is
  missing, OSError if another process uses libtpu.
  """
  chip, slices, shape = parse(name)
  if chip.is_gpu:
    return _gpus(name, chip)
  console.require('libtpu', 'plan', 'planning')
  from jax.experimental import topologies

  # libtpu looks for a TPU's metadata server, and warns if it finds none.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v3-8')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  options: dict[str, Any] = {'chip_config_name': chip.config} if chip.config else {}
  if slices > 1:
    options['num_slices'] = slices
  try:
    with quiet_compiler():
      return topologies.get_topology_desc(shape, 'tpu', **options).devices
  except Exception as e:
    text = ' '.join(str(e).split())
    if 'already in use' in text or 'lockfile' in text:
      raise OSError(
        'libtpu is in use by another process: wait until that process ends, or '
        'set ALLOW_MULTIPLE_LIBTPU_LOAD=1 to run both'
      ) from e
    raise ValueError(
      f"topology='{name}' is not available: {text[:200]}; use for example "
      f'{_EXAMPLES} (--topology)'
    ) from e
