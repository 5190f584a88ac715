"""Semantic, instance and panoptic segmentation from the classes and masks of queries.

As in the released code of EoMT (arXiv 2503.19108). One model has all three results; what
its training data have decides which are useful.

Shapes: B images, Q queries, C classes, h x w cells of a mask, H x W pixels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.tasks.detection import segments as segments_lib

# Panoptic segmentation: least score of a query, and least share of a query's mask that
# is left to its segment where masks overlap.
THRESHOLD, OVERLAP = 0.8, 0.8


def class_scores(logits: jax.Array, masks: jax.Array) -> jax.Array:
  """Returns the scores of the classes on the grid of the masks, float32 [B, h, w, C].

  A score is the sum over queries of the probability of the class times that of the mask.
  Takes logits [B, Q, C + 1] and masks, logits [B, Q, h, w].
  """
  probabilities = jax.nn.softmax(logits.astype(jnp.float32))[..., :-1]
  return jnp.einsum('bqc,bqhw->bhwc', probabilities, jax.nn.sigmoid(masks))
