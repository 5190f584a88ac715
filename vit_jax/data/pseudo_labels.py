"""Pseudo-labels as a data set: labels that a model has given to images.

A folder with these two files is a data set to train on (config.dataset):

pseudo_labels.json  `dataset`, `split` and `images` (a fingerprint): the source of
                    the images; `class_names`; `soft`, `exclusive`; and `digest`
                    of these values and the arrays
pseudo_labels.npz   images int64 [m], numbers of images within that split;
                    classes int32 [m, k], the k most probable classes of each;
                    probabilities float32 [m, k] of these classes;
                    rows int64 [n]: example i has the image and the label of row
                    rows[i], so that an image can be repeated at no cost

vit_jax/studies/labelling.py writes them. The images are not copied.
"""

from collections.abc import Mapping, Sequence
import io
import json
from typing import Any

from etils import epath
import msgspec
import numpy as np

from vit_jax.data import records, typed_json
from vit_jax.data.lazy import tf
from vit_jax.distributed import files

JSON, ARRAYS = 'pseudo_labels.json', 'pseudo_labels.npz'
ARRAY_NAMES = ('images', 'classes', 'probabilities', 'rows')
_AGAIN = 'label the images again, into another folder'


class _Facts(msgspec.Struct):
  """Required values of the JSON file and their types."""

  dataset: str
  split: str
  images: dict
  class_names: list[str]
  soft: bool
  exclusive: bool
  digest: str


def exists(root: str) -> bool:
  """Returns whether a folder holds complete pseudo-labels."""
  return (epath.Path(root) / JSON).exists()


def write(root: str, arrays: Mapping[str, np.ndarray], facts: Mapping) -> None:
  """Writes pseudo-labels into a new folder, see the top.

  `facts` are the values of the JSON file without `digest`. It is written last, so
  that the labels exist once they are complete.
  """
  path = epath.Path(root)
  path.mkdir(parents=True, exist_ok=True)
  with files.replacing(path / ARRAYS) as file:
    np.savez(file, **arrays)
  facts = {**facts, 'digest': _digest(facts, arrays)}
  files.write(path / JSON, json.dumps(facts, indent=1))


def read_facts(root: str) -> dict:
  """Reads the JSON file of pseudo-labels; ValueError if it is damaged."""
  path = epath.Path(root) / JSON
  content = files.read(path)
  try:
    typed_json.decode(content, _Facts)  # Has the required values.
    return typed_json.decode(content)
  except ValueError as e:
    raise ValueError(f"'{path}' is damaged: {e}; {_AGAIN}") from e


def _read_arrays(path: epath.Path) -> dict[str, np.ndarray]:
  """Reads the arrays; ValueError if the file is damaged."""
  try:
    content = io.BytesIO(files.read(path))
    with np.load(content, allow_pickle=False) as file:
      return {name: file[name] for name in ARRAY_NAMES}
  except OSError:
    raise
  except Exception as e:  # NumPy does not document the errors for damaged files.
    raise ValueError(f"'{path}' is damaged: {e!r}; {_AGAIN}") from e


def open_folder(
  root: str,
  features: Sequence[str],
  class_names: Sequence[str] | None,
  images: records.Source,
) -> 'PseudoSource':
  """Opens a folder of pseudo-labels, see sources.open_split.

  `images` has the data set and the split that `read_facts` names, without labels.
  """
  facts = read_facts(root)
  names = tuple(facts['class_names'])
  if class_names is not None and tuple(class_names) != names:
    raise ValueError(
      f"the pseudo-labels in '{root}' have {len(names)} classes, "
      f'{list(names[:5])}, and the training data {len(class_names)}, '
      f'{list(class_names[:5])}: label the images with a teacher of the same '
      'classes (config.dataset)'
    )
  if images.fingerprint() != facts['images']:
    raise ValueError(
      f"the images of '{facts['dataset']}', split '{facts['split']}', have changed "
      f"since the pseudo-labels in '{root}' were made: restore them, or {_AGAIN}"
    )
  path = epath.Path(root) / ARRAYS
  arrays = _read_arrays(path)
  if _digest(facts, arrays) != facts['digest']:
    raise ValueError(
      f"'{path}' or {JSON} is damaged: they do not belong together; {_AGAIN}"
    )
  return PseudoSource(images, arrays, facts, features, root)


def _digest(facts: Mapping, arrays: Mapping[str, np.ndarray]) -> str:
  """Returns a hash of the arrays and of the values of the JSON file but `digest`."""
  values = {name: value for name, value in facts.items() if name != 'digest'}
  contents = [json.dumps(values, sort_keys=True).encode()]
  for name in ARRAY_NAMES:
    contents.append(str(arrays[name].shape).encode())
    contents.append(arrays[name])
  return files.digest(contents)


class PseudoSource(records.Subset):
  """Images with the labels that a model has given them; see the top.

  Its records have 'label', int64 [1], the most probable class; and, unless the
  labels are hard, 'soft_label', float32 [classes], the probability of each class.
  The remainder, 1 minus the k known probabilities, is spread evenly over the others.
  """

  def __init__(
    self,
    images: records.Source,
    arrays: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
    features: Sequence[str],
    root: str,
  ) -> None:
    super().__init__(images, arrays['images'][arrays['rows']])
    available = ['image', 'label']
    if facts['soft']:
      available.append('soft_label')
    where = f"folder '{root}' of pseudo-labels"
    self.features = records.resolve(features, available, where)
    self.names = {'label': tuple(facts['class_names'])}
    self.origin = {'pseudo_labels': facts['digest'], 'images': facts['images']}
    self._exclusive = facts['exclusive']
    self._rows = tf.constant(arrays['rows'])
    self._classes = tf.constant(arrays['classes'])
    self._probabilities = tf.constant(arrays['probabilities'])
    most = records.chunk(self.num_examples, 4 * len(self.class_names))
    self.chunk = min(most, self.chunk or most)

  def lookup(self, indices: 'tf.Tensor') -> records.Record:
    record = super().lookup(indices) if 'image' in self.features else {}
    rows = tf.gather(self._rows, indices)
    classes = tf.gather(self._classes, rows)  # [b, k]
    if 'label' in self.features:
      record['label'] = tf.cast(classes[:, :1], tf.int64)
    if 'soft_label' in self.features:
      probabilities = tf.gather(self._probabilities, rows)
      record['soft_label'] = self._spread(classes, probabilities)
    return record

  def _spread(self, classes: 'tf.Tensor', probabilities: 'tf.Tensor') -> 'tf.Tensor':
    """Returns the probabilities of all classes, float32 [b, classes]."""
    count = len(self.class_names)
    # Probability of each class that is not stored, [b, 1].
    other = tf.zeros_like(probabilities[:, :1])
    if self._exclusive and classes.shape[1] < count:
      remaining = 1 - tf.reduce_sum(probabilities, 1, keepdims=True)
      other = tf.maximum(remaining, 0) / (count - classes.shape[1])
    size = tf.shape(classes)[0]
    num_known = classes.shape[1]
    places = tf.stack(
      [tf.repeat(tf.range(size), num_known), tf.reshape(classes, [-1])], 1
    )
    dense = tf.tensor_scatter_nd_update(
      tf.tile(other, [1, count]), places, tf.reshape(probabilities, [-1])
    )
    return tf.ensure_shape(dense, [None, count])
