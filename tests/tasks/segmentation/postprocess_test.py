"""Tests of semantic, instance and panoptic results against Hugging Face's."""

import types

import numpy as np
import torch

from tests import torch_models
from vit_jax.tasks.segmentation import postprocess

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
  scores = postprocess.class_scores(logits, masks)
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
