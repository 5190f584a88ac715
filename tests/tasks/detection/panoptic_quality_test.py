"""Tests of panoptic quality and of the segments it compares."""

import numpy as np
import pytest

from tests import processes
from vit_jax.tasks.detection import panoptic_quality as pq, segments

IS_THING = (True, True, False)


def made(numbers, labels):
  """Segments from a map of their numbers."""
  return segments.Segments(
    np.array(numbers), np.array(labels, int), np.ones(len(labels))
  )


def quality(true, labels, found, found_labels, crowd=None):
  crowd = np.zeros(len(labels)) if crowd is None else np.array(crowd)
  counts = pq.compare(
    np.array(true), np.array(labels), crowd, made(found, found_labels), 3
  )
  return pq.panoptic_quality(counts, IS_THING)


def test_a_small_example_by_hand():
  # Class 0: segment 1 has an IoU of 3 / 4 with the prediction. Class 1: segment 2
  # is missed, since the prediction is too small. Stuff: 12 of 15 pixels; void does
  # not count.
  true = [[1, 1, 1, 1, 0], [2, 2, 2, 2, 0], *[[3] * 5] * 3]
  found = [[1, 1, 1, 0, 0], [2, 2, 0, 0, 3], *[[3] * 4 + [0]] * 3]
  got = quality(true, [0, 1, 2], found, [0, 1, 2])
  want = {
    'PQ': (3 / 4 + 0 + 12 / 15) / 3,
    'SQ': (3 / 4 + 0 + 12 / 15) / 3,
    'RQ': 2 / 3,
    'PQ_things': 3 / 8,
    'SQ_things': 3 / 8,
    'RQ_things': 1 / 2,
    'PQ_stuff': 12 / 15,
    'SQ_stuff': 12 / 15,
    'RQ_stuff': 1,
  }
  assert got.keys() == set(pq.NAMES)
  assert got == pytest.approx(want)


def test_segments_in_void_or_a_crowd_are_not_mistakes():
  true = [[0, 0, 0, 2], [1, 1, 1, 1]]
  found = [[1, 1, 1, 1], [2, 2, 3, 3]]
  kwargs = dict(labels=[0, 1], found=found)
  # Segment 1 is a crowd of class 0: the two predicted halves are neither right nor
  # wrong, and a predicted segment of class 0 in void does not count either.
  got = quality(true, found_labels=[0, 0, 0], crowd=[1, 0], **kwargs)
  assert got['RQ'] == 0  # Segment 2, of class 1, is missed.
  assert np.isnan(got['PQ_stuff'])
  # As class 1, they are two mistakes and one match, whose IoU ignores void.
  got = quality(true, found_labels=[1, 1, 1], crowd=[1, 0], **kwargs)
  assert got['SQ'] == 1
  assert got['RQ'] == pytest.approx(1 / (1 + 2 / 2))


def by_definition(images, num_classes=3):
  """Panoptic quality from its definition, with sets of pixels."""
  tallies = {c: [0.0, 0, 0, 0] for c in range(num_classes)}
  for true, labels, crowd, found, found_labels in images:
    pixels = {
      name: [set(map(tuple, np.argwhere(array == k + 1))) for k in range(size)]
      for name, array, size in (
        ('true', true, len(labels)), ('found', found, len(found_labels))
      )
    }  # fmt: skip
    void = set(map(tuple, np.argwhere(true == 0)))
    missed = {k for k in range(len(labels)) if not crowd[k]}
    for j, area in enumerate(pixels['found']):
      label = found_labels[j]
      hidden = set(void)
      for k, other in enumerate(pixels['true']):
        if labels[k] != label:
          continue
        if crowd[k]:
          hidden |= other
          continue
        iou = len(area & other) / len((area | other) - (void - other))
        if iou > 0.5:
          tallies[label][0] += iou
          tallies[label][1] += 1
          missed.remove(k)
          break
      else:
        tallies[label][2] += len(area & hidden) <= len(area) / 2
    for k in missed:
      tallies[labels[k]][3] += bool(pixels['true'][k])
  return {
    label: overlap / (matches + (extra + absent) / 2)
    for label, (overlap, matches, extra, absent) in tallies.items()
  }


def test_random_maps_match_the_definition():
  rng = np.random.RandomState(0)
  images, counts = [], []
  for _ in range(40):
    # Blocks, with some pixels changed, so that many segments match.
    true = rng.randint(0, 5, (3, 3)).repeat(4, 0).repeat(4, 1)
    found = np.where(rng.rand(12, 12) < 0.8, true, rng.randint(0, 5, (12, 12)))
    labels, crowd = rng.randint(0, 3, 4), rng.rand(4) < 0.2
    found_labels = np.where(rng.rand(4) < 0.8, labels, rng.randint(0, 3, 4))
    images.append((true, labels, crowd, found, found_labels))
    counts.append(pq.compare(true, labels, crowd, made(found, found_labels), 3))
  want = by_definition(images)
  got = pq.panoptic_quality(sum(counts), IS_THING)
  assert 0.2 < got['PQ'] < 0.9
  assert got['PQ'] == pytest.approx(np.mean(list(want.values())))
  assert got['PQ_things'] == pytest.approx((want[0] + want[1]) / 2)
  assert got['PQ_stuff'] == pytest.approx(want[2])
  assert sum(counts)[2:].min() > 0  # Both kinds of mistakes occur.


def assemble(masks, labels, scores, size=(6, 8), **kwargs):
  return segments.assemble(
    np.array(masks, np.float32),
    np.array(labels),
    np.array(scores),
    IS_THING,
    size,
    **kwargs,
  )


def test_largest_logit_wins_the_pixel_and_stuff_is_merged():
  masks = np.full((5, 6, 8), -5.0)
  masks[0, :, :4] = 1  # Stuff, left.
  masks[1, :, 4:] = 1  # Stuff, right.
  masks[2, 1:4, 1:4] = 2  # A thing in front.
  masks[3] = 9  # The score is too low.
  masks[4, 5, 4:] = 3  # Four pixels are too few: the stuff gets them back.
  got = assemble(masks, [2, 2, 0, 1, 1], [0.9, 0.95, 0.99, 0.8, 1.0])
  want = np.full((6, 8), 2)
  want[1:4, 1:4] = 1
  np.testing.assert_array_equal(got.numbers, want)
  assert list(got.labels) == [0, 2]
  assert list(got.scores) == [0.99, 0.95]


def released(masks, labels, scores, size):
  """The steps of the released DETR's PostProcessPanoptic, in PyTorch.

  Returns the class of each pixel, and the number of segments.
  """
  import torch

  keep = torch.tensor(scores) > 0.85
  x, labels = torch.tensor(masks)[keep], np.array(labels)[keep.numpy()]
  x = torch.nn.functional.interpolate(x[None], size, mode='bilinear')[0]
  merge = True
  while True:
    owner = x.argmax(0)
    if merge:
      for label in set(labels[~np.array(IS_THING)[labels]].tolist()):
        same = np.flatnonzero(labels == label).tolist()
        owner[torch.isin(owner, torch.tensor(same))] = same[0]
    areas = torch.bincount(owner.flatten(), minlength=len(x))
    if (areas > 4).all():
      return labels[owner.numpy()], len(x)
    x, labels, merge = x[areas > 4], labels[(areas > 4).numpy()], False


def test_released_variant_drops_repeated_stuff():
  rng = np.random.RandomState(0)
  differ = 0
  for _ in range(60):
    masks = rng.randn(9, 6, 5).astype(np.float32)
    labels, scores = rng.randint(0, 3, 9), rng.uniform(0.8, 1, 9)
    labels[:3], scores[:3] = 2, 0.95
    want, count = released(masks, labels, scores, (24, 20))
    got = assemble(masks, labels, scores, (24, 20), merge_stuff=False)
    assert len(got.labels) == count
    # PyTorch and Pillow round differently when interpolating.
    assert (got.labels[got.numbers - 1] == want).mean() > 0.995
    ours = assemble(masks, labels, scores, (24, 20))
    differ += (ours.labels[ours.numbers - 1] != want).mean() > 0.1
  assert differ > 30


def test_padding_is_cropped_and_masks_are_enlarged():
  masks = np.full((1, 4, 4), 1.0)
  masks[:, 2:], masks[:, :, 3:] = -1, -1
  got = assemble(masks, [0], [1.0], (4, 6), extent=(0.5, 0.75))
  assert (got.numbers == 1).all()
  got = assemble(masks, [0], [1.0], (4, 6), threshold=1.1)
  assert not got.numbers.any()
  assert got.labels.shape == (0,)


def image(i):
  return np.full((4, 2), [[i / 3], [1], [0], [i % 2]])


SHARES = """
import json, sys
import jax
from vit_jax.distributed import processes
me = int(sys.argv[2])
processes.initialize(sys.argv[1], 2, me)
from tests.tasks.detection import panoptic_quality_test as test
from vit_jax.tasks.detection import panoptic_quality as pq
# Unequal, in no order, with images that both have; one has none; both have none.
cases = [([7, 1, 4], [*range(8, 40), 4, 1]), ([], [2, 0, 1]), ([], [])]
sums = [
  pq.add_up({i: test.image(i) for i in shares[me]}, 2) for shares in cases
]
print('SAID ' + json.dumps([total.tolist() for total in sums]))
from vit_jax.distributed import sharding
assert sharding.gather_bytes([b'', b'abc'][me]) == [b'', b'abc']
"""


def test_two_processes_count_each_image_once():
  statuses, outputs = processes.run_two(SHARES)
  assert statuses == [0, 0], outputs
  first, second = processes.said(outputs)
  assert first == second
  for total, images in zip(first, [(1, 4, 7, *range(8, 40)), range(3), ()]):
    want = sum(map(image, images), np.zeros((4, 2)))
    np.testing.assert_allclose(total, want, rtol=1e-12)
