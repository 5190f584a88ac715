"""Describes how many images of each class a run trains and is tested on.

Labels are int [n, L], classes of n images, padded with -1, see records.Source.labels.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vit_jax import console

_FEW = 10  # Test images of a class of which one changes its accuracy by 10 %.
_SHOWN = 12  # Classes that a description lists by name.


def count(labels: np.ndarray, num_classes: int) -> np.ndarray:
  """Returns the number of images of each class, int64 [num_classes]."""
  return np.bincount(labels[labels >= 0], minlength=num_classes)


def describe(
  train_labels: np.ndarray | None,
  test_labels: Mapping[str, np.ndarray],
  class_names: Sequence[str],
) -> Iterator[str]:
  """Yields a line on the images of each class in training and in evaluations.

  `test_labels` are by the name of the evaluation. Labels that are unknown are left out.
  """
  num_classes = len(class_names)
  counts = {}
  if train_labels is not None:
    counts['train'] = count(train_labels, num_classes)
  for name, labels in test_labels.items():
    counts[f"evaluation '{name}'"] = count(labels, num_classes)
  if not counts:
    return
  if num_classes > _SHOWN:
    texts = [f'{x.min():,} to {x.max():,} ({name})' for name, x in counts.items()]
    yield f'Images of each of {num_classes:,} classes: {", ".join(texts)}.'
    return
  texts = []
  for number, class_name in enumerate(class_names):
    numbers = ' + '.join(f'{totals[number]:,}' for totals in counts.values())
    texts.append(f'{class_name} {numbers}')
  yield f'Images of each class, {" + ".join(counts)}: {", ".join(texts)}.'


def warnings(
  train_labels: np.ndarray | None,
  test_labels: Mapping[str, np.ndarray],
  class_names: Sequence[str],
  loss: str,
) -> Iterator[str]:
  """Yields remarks on several labels per image, and on classes with few test images."""
  num_multiple = num_images = 0
  if train_labels is not None:
    num_images = len(train_labels)
    num_multiple = int(((train_labels >= 0).sum(axis=1) > 1).sum())
  if num_multiple and loss == 'softmax':
    yield (
      f'{num_multiple:,} of {console.pluralize(num_images, "training image")} '
      "have several labels, but loss='softmax' is for classes that exclude each other: "
      'set --config.loss=sigmoid.'
    )
  for name, labels in test_labels.items():
    totals = count(labels, len(class_names))
    rare = np.argsort(totals, kind='stable')[: int((totals < _FEW).sum())]
    if len(rare):
      texts = [f'{class_names[i]} {totals[i]}' for i in rare[:_SHOWN]]
      ellipsis = ', ...' if len(rare) > _SHOWN else ''
      yield (
        f"Evaluation '{name}' has fewer than {_FEW} images of {len(rare)} of "
        f'{console.pluralize(len(class_names), "class")} ({", ".join(texts)}{ellipsis}), '
        'so what it measures of them is left to chance: test on more images, or on all '
        'of them by cross-validation (--folds=5; not with TFDS).'
      )
