"""Embeddings of training images that a locked tower computes once for a run.

They are a file of the workdir, float16 [n, E], which each process maps into its
memory. A run that resumes reads the file; one that was killed while it wrote it
begins it anew.
"""

import os

import jax
import numpy as np

from vit_jax import cli
from vit_jax import input_pipeline
from vit_jax.distributed import files
from vit_jax.distributed import processes
from vit_jax.inference import engine

NAME = 'image_embeddings.npy'


def check(config):
  """Raises ValueError if the images of a config change from epoch to epoch."""
  changing = {
    'crop_area': None, 'flip': False, 'rotate': 0.0, 'randaugment': (),
    'color_jitter': 0.0, 'random_erasing': 0.0,
  }  # fmt: skip
  given = [
    f'--config.pp.{name}={default}'
    for name, default in changing.items()
    if config.pp[name] and config.pp[name] != default
  ]
  if given:
    raise ValueError(
      'precompute=True computes the embedding of each image once, and these images '
      f'change from epoch to epoch: set {" ".join(given)}, or leave out '
      '--config.task_options.precompute'
    )
  if not isinstance(config.dataset, str):
    raise ValueError(
      f'precompute=True is for one data set, and dataset={config.dataset} is a '
      'mixture: leave out --config.task_options.precompute'
    )


def make(task, params, extra, source, mesh, workdir, stop) -> np.ndarray:
  """Returns the embeddings of all images of a source, float16 [n, E].

  All processes must call it; the first one writes the file. `stop` is called
  between batches; once it returns True, Stopped is raised.
  """
  if files.is_remote(workdir):
    raise ValueError(
      f"precompute=True maps a file of the workdir into memory, and '{workdir}' is "
      'no local folder: give one that all processes share (--workdir), or leave '
      'out --config.task_options.precompute'
    )
  path = os.path.join(workdir, NAME)
  there = processes.from_first(
    'looking for embeddings', lambda: os.path.exists(path)
  )
  if not there:
    _write(task, params, extra, source, mesh, path, stop)
  found = np.load(path, mmap_mode='r')
  if len(found) != source.num_examples:
    raise ValueError(
      f"'{path}' has the embeddings of {len(found):,} images, and the data "
      f'{source.num_examples:,}: delete the file'
    )
  return found


def _write(task, params, extra, source, mesh, path, stop):
  """Computes the embeddings, and writes them by process 0."""

  def compute(params, extra, batch):
    return {'zimg': task.outputs(params, extra, batch)}

  compute = engine.everywhere(mesh, compute)
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
  size = cli.size(os.path.getsize(path))
  cli.say(f'The embeddings of {total:,} images are in {path} ({size}).')
