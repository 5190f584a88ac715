"""Reads examples of a source by index."""

import numpy as np
import tensorflow as tf


def features(source, numbers=None):
  """Returns the features of examples (default: all) as lists by name."""
  numbers = range(source.num_examples) if numbers is None else numbers
  data = tf.data.Dataset.from_tensor_slices(np.asarray(numbers, np.int64))
  data = data.batch(1024).map(source.lookup).unbatch().map(source.read)
  rows = list(data.as_numpy_iterator())
  return {name: [row[name] for row in rows] for name in rows[0]}
