"""Embeddings of training images that a locked tower computes once for a run.

They are a file in the workdir, float16 [n, E], which each process maps into memory.
A run that resumes reads the file, and computes it again if it is damaged, or if the
tower, its images or their preparation have changed: a second file has a hash of what
the embeddings were made of, and their checksum.
"""

import json
import os

from etils import epath
import google_crc32c
import jax
import numpy as np

from vit_jax import console, input_pipeline
from vit_jax.data import records
from vit_jax.distributed import files, processes, sharding
from vit_jax.inference import engine

NAME = 'image_embeddings.npy'
_MADE_OF = 'image_embeddings.hash'


def check(config):
  """Raises ValueError if the images of a config change from epoch to epoch."""
  changing = {
    'crop_area': None, 'flip': False, 'rotate': 0.0, 'randaugment': (),
    'color_jitter': 0.0, 'random_erasing': 0.0,
  }  # fmt: skip
  given = [f'--config.pp.{k}={off}' for k, off in changing.items() if config.pp[k]]
  if given:
    raise ValueError(
      'precompute=True computes the embedding of each image once, but these images '
      f'change from epoch to epoch: set {" ".join(given)}, or leave out '
      '--config.task_options.precompute'
    )
  if not isinstance(config.dataset, str):
    raise ValueError(
      f'precompute=True is for one data set, but dataset={config.dataset} is a '
      'mixture: leave out --config.task_options.precompute'
    )


def make(task, params, extra, source, mesh, workdir, stop) -> np.ndarray:
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
  tower = sharding.digest((params['img'], extra))
  made_of = processes.from_first(
    'hashing the images', lambda: _made_of(task.config, tower, source)
  )
  note = epath.Path(workdir) / _MADE_OF
  is_current = processes.from_first(
    'reading the embeddings',
    lambda: (
      note.exists() and files.read(note) == f'{made_of} {_checksum(path)}'.encode()
    ),
  )
  if not is_current:
    note.unlink(missing_ok=True)
    _write(task, params, extra, source, mesh, path, stop)
    processes.from_first(
      'writing a hash', lambda: files.write(note, f'{made_of} {_checksum(path)}')
    )
  return np.load(path, mmap_mode='r')


def _made_of(config, tower: str, source) -> str:
  """Returns a hash of what embeddings depend on: the tower and the images."""
  facts = [tower, config.model.to_dict(), config.pp.to_dict(), source.fingerprint()]
  count = source.num_examples
  if not files.is_remote(source.name(0)):  # Remote, each would be a request.
    blocks = [range(i, min(i + 4096, count)) for i in range(0, count, 4096)]
    facts.append(records.stamps(source, blocks))
  return files.digest([json.dumps(facts, sort_keys=True).encode()])


def _checksum(path: str) -> str:
  checksum = google_crc32c.Checksum()
  if os.path.exists(path):
    with files.open_input(path) as file:
      for _ in checksum.consume(file, 2**18):
        pass
  return checksum.hexdigest().decode()


def _write(task, params, extra, source, mesh, path, stop):
  """Computes the embeddings, which process 0 writes."""

  compute = engine.everywhere(mesh, lambda *args: {'zimg': task.outputs(*args)})
  example = lambda record, seed: task.inputs(record)
  batches = input_pipeline.eval_batches(task.config, source, example, mesh)
  total, table, begun = source.num_examples, None, f'{path}.begun'
  first = jax.process_index() == 0
  for batch in engine.run(
    lambda batch: compute(params, extra, batch), batches, mesh, stop,
    'Embedding the training images', total,
  ):  # fmt: skip
    if not first:
      continue
    if table is None:
      shape = (total, batch['zimg'].shape[1])
      table = np.lib.format.open_memmap(begun, 'w+', np.float16, shape)
    real = batch['mask'] > 0
    table[batch['index'][real]] = batch['zimg'][real]

  def finish():
    table.flush()
    os.replace(begun, path)
    return True

  processes.from_first('writing the embeddings', finish)
  size = console.size(os.path.getsize(path))
  images = console.counted(total, 'image')
  console.say(f'Wrote the embeddings of {images} to {path} ({size}).')
