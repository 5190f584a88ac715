r"""ImageNet ReaL: accuracy by reassessed labels (arXiv 2006.07159).

Experts have reassessed the 50,000 validation images of ImageNet: an image has a set of
right classes. A prediction is right if it is in the set; images with an empty set do
not count, so 46,837 are scored.

The labels are `real.json` of github.com/google-research/reassessed-imagenet: a list
with a list of classes per image, in the order of the files
ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_00050000.JPEG. Classes are numbered by
their sorted WordNet ids, as in TFDS and in folders of such names. Images are matched
by the number in the name of their file.

  vit_jax evaluate --workdir=/tmp/run --split=validation --real=real.json

`config.real_labels` adds it to the evaluations of a run.
"""

from collections.abc import Callable
import json
import re

import jax.numpy as jnp
import numpy as np

from vit_jax.data import slices
from vit_jax.data.images import image_files
from vit_jax.data.lazy import tf
from vit_jax.distributed import processes
from vit_jax.inference import engine

FILE_NAME = 'file_name?'  # A feature that the source may lack.
_NUMBER = r'ILSVRC2012_val_(\d{8})\.\w+'


class Real:
  """Measures ReaL accuracy of a classifier on a split or a slice of it.

  `open_split` maps a split and the names of further features to its source; `path` is
  the file of the labels, local or at gs://.
  """

  def __init__(self, task, mesh, open_split: Callable, split: str, path: str):
    self._right = labels = []
    processes.attempt(
      'reading the ReaL labels',
      lambda: labels.extend(_read(path, len(task.class_names))),
    )
    whole = '+'.join(dict.fromkeys(slices.bases(split)))
    total = open_split(whole, (FILE_NAME,)).evaluated.num_examples
    if len(labels) != total:
      raise ValueError(
        f"real='{path}' has labels of {len(labels):,} images, and split '{whole}' "
        f'has {total:,} images: pass the labels of this split (--real)'
      )
    self._task, self._mesh = task, mesh
    self._source = open_split(split, (FILE_NAME,)).evaluated
    self._numbers = None
    if 'file_name' not in self._source.features:
      names = map(self._source.name, range(self._source.num_examples))
      found = [re.fullmatch(_NUMBER, name.rpartition('/')[2]) for name in names]
      self._numbers = np.array([int(m[1]) if m else 0 for m in found])
      self._check(self._numbers)

    def best(params, extra, batch):
      logits = task.outputs(params, extra, batch)
      found = logits.argmax(axis=-1).astype(jnp.int32)
      return {'best': found, 'number': batch['number']}

    self._best = engine.everywhere(mesh, best)

  def run(self, params, extra, stop=engine.never):
    """Returns `accuracy_real` and `num_real`, see `score`."""
    found = engine.collect(
      self._task.config, self._mesh, self._source, self._example,
      lambda batch: self._best(params, extra, batch), stop,
      'Evaluating by ReaL labels',
    )  # fmt: skip
    numbers = self._numbers
    if numbers is None:
      numbers = found['number']
      self._check(numbers)
    return score(found['best'], [self._right[i - 1] for i in numbers])

  def _example(self, record, seed):
    number = tf.constant(0)
    if 'file_name' in record:
      name = record['file_name']
      number = tf.cond(
        tf.strings.regex_full_match(name, _NUMBER),
        lambda: tf.strings.to_number(
          tf.strings.regex_replace(name, _NUMBER, r'\1'), tf.int32
        ),
        lambda: 0,
      )
    return {**self._task.inputs(record, seed), 'number': number}

  def _check(self, numbers):
    """Raises ValueError if an image cannot be matched."""
    wrong = np.flatnonzero((numbers < 1) | (numbers > len(self._right)))
    if len(wrong):
      raise ValueError(
        f'{self._source.name(int(wrong[0]))!r} and {len(wrong) - 1:,} more images '
        'cannot be matched with ReaL labels: their files must be named '
        'ILSVRC2012_val_00000001.JPEG to '
        f'ILSVRC2012_val_{len(self._right):08}.JPEG, or TFDS data must have the '
        "feature 'file_name' (--real)"
      )


def score(best: np.ndarray, right: list[list[int]]) -> dict[str, float]:
  """Scores predicted classes [n] by the right classes of each image.

  `num_real` is the number of images with a right class; without any,
  `accuracy_real` is nan.
  """
  counted = [int(b) in r for b, r in zip(best, right, strict=True) if r]
  share = sum(counted) / len(counted) if counted else float('nan')
  return {'accuracy_real': share, 'num_real': len(counted)}


def _read(path, num_classes) -> list[list[int]]:
  try:
    labels = [list(classes) for classes in json.loads(image_files.read_file(path))]
    known = {c for classes in labels for c in classes} <= {*range(num_classes)}
  except (ValueError, TypeError, RecursionError) as e:
    raise ValueError(
      f"real='{path}' is not a list of lists of class numbers, one per image: "
      f'{e}; pass real.json of github.com/google-research/reassessed-imagenet '
      '(--real)'
    ) from e
  if not known:
    raise ValueError(
      f"real='{path}' has classes other than the model's 0 to {num_classes - 1}: "
      'evaluate a model of the same classes (--real)'
    )
  return labels
