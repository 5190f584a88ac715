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

from collections.abc import Mapping, Sequence
import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.configs import schema
from vit_jax.data import slices
from vit_jax.data.images import image_files
from vit_jax.data.lazy import tf
from vit_jax.distributed import processes
from vit_jax.evaluators import base
from vit_jax.inference import engine
from vit_jax.run import metrics as metrics_lib

FILE_NAME = 'file_name?'  # A feature that the source may lack.
METRICS = {'accuracy_real': metrics_lib.SHARE}
_NUMBER = r'ILSVRC2012_val_(\d{8})\.\w+'


class Real(base.BatchEvaluator):
  """Measures ReaL accuracy of a classifier on a split or a slice of it.

  `path` is the file of the labels, local or at gs://.
  """

  metrics = METRICS

  def __init__(self, evaluation: base.Evaluation, path: schema.Text):
    task, split = evaluation.task, evaluation.split
    read = functools.partial(read_labels, path, len(task.class_names))
    self._labels = processes.attempt_local('reading the ReaL labels', read)
    whole_split = '+'.join(dict.fromkeys(slices.bases(split)))
    total = evaluation.open_split(whole_split, (FILE_NAME,)).evaluated.num_examples
    if len(self._labels) != total:
      raise ValueError(
        f"real='{path}' has labels of {len(self._labels):,} images, and split '{whole_split}' "
        f'has {total:,} images: pass the labels of this split (--real)'
      )
    super().__init__(evaluation)
    self._source = evaluation.open_split(split, (FILE_NAME,)).evaluated
    if 'file_name' in self._source.features:
      self._file_numbers = self._read_file_numbers()
    else:
      names = map(self._source.name, range(self._source.num_examples))
      self._file_numbers = np.array([_file_number(name) for name in names])
    self._check()

  def _read_file_numbers(self) -> np.ndarray:
    """Reads the feature 'file_name' of all images, without decoding them."""
    mesh = self.evaluation.mesh
    columns = engine.collect(
      self.evaluation.task.config,
      mesh,
      self._source,
      _file_number_example,
      engine.on_all_hosts(mesh, lambda batch: {'number': batch['number']}),
      label='Reading the names of files',
    )
    return columns['number']

  def compute(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns the predicted classes of a batch."""
    logits = self.evaluation.task.outputs(params, extra, batch)  # [B, classes]
    best = logits.argmax(axis=-1).astype(jnp.int32)  # [B]
    return {'best': best, **engine.positions(batch)}

  def finish(self, results: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Returns `accuracy_real` and `num_real`, see `score`."""
    labels = [self._labels[number - 1] for number in self._file_numbers]
    return score(engine.in_order(results)['best'], labels)

  def _check(self) -> None:
    """Raises ValueError if an image cannot be matched."""
    numbers = self._file_numbers
    rows = np.flatnonzero((numbers < 1) | (numbers > len(self._labels)))
    if len(rows):
      raise ValueError(
        f'{self._source.name(int(rows[0]))!r} and {len(rows) - 1:,} more images '
        'cannot be matched with ReaL labels: their files must be named '
        'ILSVRC2012_val_00000001.JPEG to '
        f'ILSVRC2012_val_{len(self._labels):08}.JPEG, or TFDS data must have the '
        "feature 'file_name' (--real)"
      )


def _file_number_example(record: Mapping[str, Any], seed: Any) -> dict[str, Any]:
  """Returns `number`, that of an image of ImageNet, or 0."""
  name = record['file_name']
  number = tf.cond(
    tf.strings.regex_full_match(name, _NUMBER),
    lambda: tf.strings.to_number(
      tf.strings.regex_replace(name, _NUMBER, r'\1'), tf.int32
    ),
    lambda: 0,
  )
  return {'number': number}


def _file_number(name: str) -> int:
  """Returns the number in the path of an image of ImageNet, or 0."""
  match = re.fullmatch(_NUMBER, name.rpartition('/')[2])
  return int(match[1]) if match else 0


def score(best: np.ndarray, labels: Sequence[Sequence[int]]) -> dict[str, float]:
  """Scores predicted classes [n] by the right classes of each image.

  `num_real` is the number of images with a right class; without any,
  `accuracy_real` is nan.
  """
  scores = []
  for predicted, classes in zip(best, labels, strict=True):
    if classes:
      scores.append(int(predicted) in classes)
  accuracy = sum(scores) / len(scores) if scores else float('nan')
  return {'accuracy_real': accuracy, 'num_real': len(scores)}


def read_labels(path: str, num_classes: int) -> list[list[int]]:
  """Reads the classes of each image, lists of numbers below `num_classes`.

  The list of an image without a class is empty. ValueError if the file holds anything
  else.
  """
  try:
    labels = [list(classes) for classes in json.loads(image_files.read_file(path))]
    is_known = set().union(*labels) <= set(range(num_classes))
  except (ValueError, TypeError, RecursionError) as e:
    raise ValueError(
      f"real='{path}' is not a list of lists of class numbers, one per image: "
      f'{e}; pass real.json of github.com/google-research/reassessed-imagenet '
      '(--real)'
    ) from e
  if not is_known:
    raise ValueError(
      f"real='{path}' has classes other than the model's 0 to {num_classes - 1}: "
      'evaluate a model of the same classes (--real)'
    )
  return labels
