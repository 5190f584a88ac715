"""Tests of semantic, instance and panoptic results against Hugging Face's."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests import torch_models
from vit_jax.tasks.segmentation import class_maps, eomt, postprocess, views

SIZE = 12, 12
SCALE = {'shortest_edge': 12, 'longest_edge': 12}


def test_results_match_hugging_face():
  rng = np.random.RandomState(0)
  logits = (4 * rng.randn(1, 30, 4)).astype(np.float32)
  blocks = 4 * rng.randn(1, 30, 3, 3)
  masks = np.kron(blocks, np.ones((4, 4))) + rng.randn(1, 30, *SIZE)
  masks = masks.astype(np.float32)
  processor = torch_models.transformers.EomtImageProcessor(size=SCALE)
  outputs = types.SimpleNamespace(
    masks_queries_logits=torch.tensor(masks),
    class_queries_logits=torch.tensor(logits),
    patch_offsets=None,
  )
  [expected] = processor.post_process_semantic_segmentation(outputs, [SIZE])
  scores = jax.jit(postprocess.class_scores)(logits, masks)
  np.testing.assert_array_equal(np.argmax(scores[0], axis=-1), expected)

  [expected] = processor.post_process_instance_segmentation(
    outputs, [SIZE], threshold=0.5
  )
  regions, labels, scores = postprocess.instances(logits[0], masks[0], threshold=0.5)
  info = expected['segments_info']
  assert len(info) > 2
  assert labels.tolist() == [x['label_id'] for x in info]
  np.testing.assert_allclose(scores, [x['score'] for x in info], atol=2e-6)
  numbers = np.full(SIZE, -1)
  for i, region in enumerate(regions):
    numbers[region] = i
  np.testing.assert_array_equal(numbers, expected['segmentation'])

  [expected] = processor.post_process_panoptic_segmentation(
    outputs, [SIZE], threshold=0.5, stuff_classes=[0], overlap_mask_area_threshold=0.1
  )
  segments = postprocess.panoptic(logits[0], masks[0], (0,), 0.5, 0.1)
  info = expected['segments_info']
  assert len(info) > 1
  assert segments.labels.tolist() == [x['label_id'] for x in info]
  np.testing.assert_allclose(segments.scores, [x['score'] for x in info], atol=2e-6)
  np.testing.assert_array_equal(segments.numbers - 1, expected['segmentation'])
  nothing = postprocess.panoptic(logits[0], masks[0], threshold=1.0)
  assert not nothing.numbers.any()
  assert not len(nothing.labels)


@pytest.mark.parametrize('size, resized', [((20, 44), (12, 26)), ((30, 20), (18, 12))])
def test_windows_and_maps_match_hugging_face(size, resized):
  """Masks of 4 x 4 cells, windows of 12 pixels."""
  rng = np.random.RandomState(0)
  processor = torch_models.transformers.EomtImageProcessor(
    size={'shortest_edge': 12, 'longest_edge': None}, do_split_image=True
  )
  image = torch.tensor(rng.randint(0, 255, (1, 3, *resized), np.uint8))
  _, offsets = processor._split_image(image, processor.size, [0])
  count = len(offsets)
  assert count == -(-max(resized) // 12)
  logits = (4 * rng.randn(count, 30, 4)).astype(np.float32)
  masks = (4 * rng.randn(count, 30, 4, 4)).astype(np.float32)
  expected_outputs = types.SimpleNamespace(
    masks_queries_logits=torch.tensor(masks),
    class_queries_logits=torch.tensor(logits),
    patch_offsets=offsets,
  )
  [expected] = processor.post_process_semantic_segmentation(
    expected_outputs, [size], {'shortest_edge': 12, 'longest_edge': None}
  )

  view = views.View((12, 12), (12, 12), None, False)
  axis = int(resized[1] > resized[0])
  starts, is_used = view.starts(axis, jnp.int32(max(resized)), count)
  assert is_used.all()
  assert starts.tolist() == [start for _, start, _ in offsets]
  head = types.SimpleNamespace(scores=functools.partial(eomt.Eomt.scores, None))
  shape = (1, 1, count) if axis else (1, count, 1)
  outputs = {'logits': logits, 'masks': masks}
  outputs = {k: x.reshape(*shape, *x.shape[1:]) for k, x in outputs.items()}
  view_outputs = class_maps.ViewOutputs(outputs, jnp.array([resized]), view, False)
  maps = jax.jit(
    lambda: class_maps.class_maps(head, [view_outputs], jnp.array([size]), (32, 48))
  )()
  np.testing.assert_array_equal(maps[0, : size[0], : size[1]], expected)
