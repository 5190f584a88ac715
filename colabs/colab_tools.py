"""Sets up the runtime for the notebooks of this folder, and shows images.

`ready` installs what vit_jax lacks and changes nothing that the runtime brings:
Colab's TensorFlow, and its JAX for the accelerator, keep their versions.
"""

from collections.abc import Sequence
import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

from packaging import requirements, utils

# Packages whose names begin like this keep the version of the runtime.
HELD = ('jax', 'keras', 'libtpu', 'numpy', 'nvidia', 'protobuf', 'tensorflow')
DRIVE = '/content/drive'


def ready(checkout, extras: Sequence[str] = ('colab',), folders=()):
  """Installs what is missing of vit_jax, and prints which devices JAX sees.

  Args:
    checkout: folder of vit_jax's source code; used only if vit_jax cannot be
      imported yet.
    extras: names of optional requirements in setup.py.
    folders: paths that the notebook reads and writes; Google Drive is mounted
      if one of them lies there.

  Raises:
    ImportError: if a package of HELD is too old, or pip fails.
  """
  if importlib.util.find_spec('vit_jax') is None:
    pip('--no-deps', str(pathlib.Path(checkout).resolve()))
  lacking = missing(importlib.metadata.requires('vit_jax'), extras)
  if lacking:
    with tempfile.TemporaryDirectory() as folder:
      held = pathlib.Path(folder) / 'held.txt'
      held.write_text('\n'.join(constraints()))
      pip('-c', str(held), *lacking)
  if any(str(folder).startswith(DRIVE) for folder in folders):
    from google.colab import drive

    drive.mount(DRIVE)
  from vit_jax import console

  console.quiet()
  console.avoid_absent_gpus()
  from IPython import get_ipython
  import jax

  # Lets the notebook show figures that pyplot did not make.
  get_ipython().run_line_magic('matplotlib', 'inline')
  devices = jax.devices()
  print(
    f'vit_jax is ready. JAX {jax.__version__} sees {len(devices)} device(s): '
    f'{devices[0].device_kind} ({devices[0].platform}).'
  )


def missing(wanted: Sequence[str], extras: Sequence[str] = ()) -> list[str]:
  """Returns the requirements that the installed packages do not meet.

  Any package that provides the module tensorflow meets 'tensorflow' and
  'tensorflow-cpu'.

  Args:
    wanted: requirements as a package declares them, with markers.
    extras: names of optional requirements.

  Raises:
    ImportError: if a package of HELD is too old.
  """
  lacking = []
  for text in wanted:
    need = requirements.Requirement(text)
    name = utils.canonicalize_name(need.name)
    if need.marker and not any(
      need.marker.evaluate({'extra': extra}) for extra in ('', *extras)
    ):
      continue
    need.marker = None  # It holds, and pip would not know the extras.
    if name in ('tensorflow', 'tensorflow-cpu'):
      if importlib.util.find_spec('tensorflow') is None:
        lacking.append(str(need))
      continue
    try:
      version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      lacking.append(str(need))
      continue
    if need.specifier.contains(version, prereleases=True):
      continue
    if name.startswith(HELD):
      raise ImportError(
        f'vit_jax needs {need.name}{need.specifier}, and this runtime has '
        f'{version}, which this function does not change: choose a newer runtime '
        '(in Colab: Runtime > Change runtime type > Runtime version), or update '
        f'{need.name} yourself and restart the runtime'
      )
    lacking.append(str(need))
  return lacking


def constraints() -> list[str]:
  """Returns lines for `pip -c` that keep the versions of packages of HELD."""
  installed = {
    utils.canonicalize_name(found.name): found.version
    for found in importlib.metadata.distributions()
    if found.name
  }
  return sorted(
    f'{name}=={version}' for name, version in installed.items() if name.startswith(HELD)
  )


def pip(*args: str):
  """Runs `pip install`; raises ImportError with pip's message if it fails."""
  done = subprocess.run(
    [sys.executable, '-m', 'pip', 'install', '--quiet', *args],
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise ImportError(f'pip install {" ".join(args)} failed: {done.stderr}')
  importlib.invalidate_caches()


def show(images, titles: Sequence[str] = (), columns: int = 8, size=1.5):
  """Draws images side by side.

  Args:
    images: uint8 [n, height, width(, channels)], or a list of such arrays.
    titles: a title for each image, or none at all.
    columns: images per row.
    size: width of an image in inches.
  """
  import matplotlib.pyplot as plt

  columns = min(columns, len(images))
  rows = -(-len(images) // columns)
  height = size * (1.2 if titles else 1.03)
  _, grid = plt.subplots(
    rows, columns, figsize=(size * columns, height * rows), squeeze=False,
    layout='constrained',
  )  # fmt: skip
  for axes in grid.flat:
    axes.set_axis_off()
  for i, (axes, image) in enumerate(zip(grid.flat, images)):
    axes.imshow(image.squeeze(), cmap='gray', vmin=0, vmax=255)
    if titles:
      axes.set_title(titles[i], fontsize=9)
  plt.show()


def to_pixels(images):
  """Converts a model's input images, float [..., C] in [-1, 1], to uint8."""
  return (127.5 * (images + 1)).round().clip(0, 255).astype('uint8')
