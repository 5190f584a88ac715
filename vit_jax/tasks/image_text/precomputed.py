"""Embeddings of training images that a locked tower computes once for a run.

They are a file in the workdir, float16 [n, E], which each process maps into memory.
A run that resumes reads the file, and computes it again if it is damaged, or if the
tower, its images or their preparation have changed: a second file has a hash of what
the embeddings were made of, and their checksum.
"""

from collections.abc import Callable
import functools
import json
import os
from typing import Any

from etils import epath
import google_crc32c
import jax
import ml_collections
import numpy as np

from vit_jax import console, input_pipeline
from vit_jax.data import records
from vit_jax.distributed import files, processes, sharding
from vit_jax.inference import engine

NAME = 'image_embeddings.npy'
_HASH = 'image_embeddings.hash'


def check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if the images of a config change from epoch to epoch."""
  off = {
    'crop_area': None,
    'flip': False,
    'rotate': 0.0,
    'randaugment': (),
    'color_jitter': 0.0,
    'random_erasing': 0.0,
  }
  flags = [f'--config.pp.{key}={value}' for key, value in off.items() if config.pp[key]]
  if flags:
    raise ValueError(
      'precompute=True computes the embedding of each image once, but these images '
      f'change from epoch to epoch: set {" ".join(flags)}, or leave out '
      '--config.task_options.precompute'
    )
  if not isinstance(config.dataset, str):
    raise ValueError(
      f'precompute=True is for one data set, but dataset={config.dataset} is a '
      'mixture: leave out --config.task_options.precompute'
    )


def make(
  task: Any,
  params: Any,
  extra: Any,
  source: records.Source,
  mesh: jax.sharding.Mesh,
  workdir: epath.PathLike,
  stop: Callable[[], bool],
) -> np.ndarray:
  """Returns the embeddings of all images of a source, float16 [n, E].

  All processes must call it; the first one writes the file. `stop` is called
  between batches; once it returns True, Stopped is raised.
  """
  if files.is_remote(workdir):
    raise ValueError(
      f"precompute=True maps a file of the workdir into memory, but '{workdir}' is "
      'not a local folder: use one that all processes share (--workdir), or leave '
      'out --config.task_options.precompute'
    )
  path = os.path.join(workdir, NAME)
  hash_file = epath.Path(workdir) / _HASH
  tower = sharding.digest((params['img'], extra))
  inputs_hash = processes.from_first(
    'hashing the images', lambda: _inputs_hash(task.config, tower, source)
  )

  def is_current() -> bool:
    if not hash_file.exists():
      return False
    return files.read(hash_file) == f'{inputs_hash} {_checksum(path)}'.encode()

  if not processes.from_first('reading the embeddings', is_current):
    hash_file.unlink(missing_ok=True)
    _write(task, params, extra, source, mesh, path, stop)
    processes.from_first(
      'writing a hash',
      lambda: files.write(hash_file, f'{inputs_hash} {_checksum(path)}'),
    )
  return np.load(path, mmap_mode='r')


def _inputs_hash(
  config: ml_collections.ConfigDict, tower: str, source: records.Source
) -> str:
  """Returns a hash of what embeddings depend on: the tower and the images."""
  facts = [tower, config.model.to_dict(), config.pp.to_dict(), source.fingerprint()]
  count = source.num_examples
  if not files.is_remote(source.name(0)):  # Remote, each would be a request.
    blocks = [range(i, min(i + 4096, count)) for i in range(0, count, 4096)]
    facts.append(records.stamps(source, blocks))
  return files.digest([json.dumps(facts, sort_keys=True).encode()])


def _checksum(path: str) -> str:
  """Returns the CRC32C of a file; of nothing if it does not exist."""
  checksum = google_crc32c.Checksum()
  if os.path.exists(path):
    with files.open_input(path) as file:
      for _ in checksum.consume(file, 2**18):
        pass
  return checksum.hexdigest().decode()


def _write(
  task: Any,
  params: Any,
  extra: Any,
  source: records.Source,
  mesh: jax.sharding.Mesh,
  path: str,
  stop: Callable[[], bool],
) -> None:
  """Computes the embeddings, which process 0 writes."""

  def outputs(
    params: Any, extra: Any, batch: input_pipeline.Batch
  ) -> dict[str, jax.Array]:
    return {'zimg': task.outputs(params, extra, batch)}

  def inputs(record: records.Record, seed: Any) -> dict[str, Any]:
    return task.inputs(record)

  embed = functools.partial(engine.on_all_hosts(mesh, outputs), params, extra)
  batches = input_pipeline.eval_batches(task.config, source, inputs, mesh)
  total = source.num_examples
  label = 'Embedding the training images'
  partial_path = f'{path}.begun'
  table: Any = None
  for results in engine.run(embed, batches, mesh, stop, label, total):
    if jax.process_index() != 0:
      continue
    if table is None:
      shape = (total, results['zimg'].shape[1])
      table = np.lib.format.open_memmap(partial_path, 'w+', np.float16, shape)
    mask = results['mask'] > 0
    table[results['index'][mask]] = results['zimg'][mask]

  def finish() -> None:
    table.flush()
    os.replace(partial_path, path)

  processes.from_first('writing the embeddings', finish)
  size = console.size(os.path.getsize(path))
  images = console.pluralize(total, 'image')
  console.log(f'Wrote the embeddings of {images} to {path} ({size}).')
