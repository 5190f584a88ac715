"""Semantic, instance and panoptic segmentation from the classes and masks of queries.

As in the released code of EoMT (arXiv 2503.19108). One model yields all three results;
which are useful depends on its training data.

Shapes: B images, Q queries, C classes, h x w cells of a mask, H x W pixels.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.tasks.detection import segments as segments_lib

# Least score of a query, and least share of a query's mask that is left to its segment
# where masks overlap.
THRESHOLD, OVERLAP = 0.8, 0.8


def class_scores(logits: jax.Array, masks: jax.Array) -> jax.Array:
  """Returns the scores of the classes on the grid of the masks, float32 [B, h, w, C].

  A score is the sum over queries of the probability of the class times that of the mask.
  Takes logits [B, Q, C + 1] and masks, logits [B, Q, h, w].
  """
  probabilities = jax.nn.softmax(logits.astype(jnp.float32))[..., :-1]
  return jnp.einsum('bqc,bqhw->bhwc', probabilities, jax.nn.sigmoid(masks))


def instances(
  logits: np.ndarray, masks: np.ndarray, threshold: float = THRESHOLD
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the instances of an image, whose masks may overlap.

  Args:
    logits: of the classes of queries, float [Q, C + 1], the last one of no object.
    masks: logits at the size of the image, float [Q, H, W].
    threshold: least score, the probability of the class times the mean probability of
      the pixels in the mask.

  Returns:
    Masks bool [n, H, W], classes int [n] and scores float [n], in the order of queries.
  """
  probabilities = softmax(logits)[:, :-1]
  labels = probabilities.argmax(axis=-1)
  scores = probabilities.max(axis=-1) * np.array([quality(mask) for mask in masks])
  is_instance = (scores > 0) & (scores >= threshold)
  return masks[is_instance] > 0, labels[is_instance], scores[is_instance]


def quality(mask: np.ndarray) -> float:
  """Returns the mean probability of the pixels inside a mask of logits; 0 for none."""
  inside = mask[mask > 0]
  return float(_sigmoid(inside).sum() / (len(inside) + 1e-6))


def best_pairs(
  logits: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the most probable pairs of a query and a class, the best first.

  Takes logits [Q, C + 1], the last one of no object. Returns the queries and classes, int
  [n], and the probabilities, float [n].
  """
  probabilities = softmax(logits)[:, :-1]
  flat = probabilities.ravel()
  order = np.argsort(-flat, kind='stable')[:most]
  queries, labels = np.unravel_index(order, probabilities.shape)
  return queries, labels, flat[order]


def confident(logits: np.ndarray, threshold: float) -> np.ndarray:
  """Returns the queries, int [n], with a class of a greater probability.

  Takes logits [Q, C + 1], the last one of no object.
  """
  probabilities = softmax(logits)
  is_object = probabilities.argmax(axis=-1) < logits.shape[1] - 1
  return np.flatnonzero(is_object & (probabilities.max(axis=-1) > threshold))


def panoptic(
  logits: np.ndarray,
  masks: np.ndarray,
  stuff: Collection[int] = (),
  threshold: float = THRESHOLD,
  overlap: float = OVERLAP,
) -> segments_lib.Segments:
  """Gives each pixel to one query, or to none; the queries of a class of stuff share one.

  Args:
    logits: of the classes of queries, float [Q, C + 1], the last one of no object.
    masks: logits at the size of the image, float [Q, H, W].
    stuff: classes whose segments are merged.
    threshold: queries need a greater probability of their class.
    overlap: queries need a greater share of their mask that no other query takes.
  """
  probabilities = softmax(logits)
  scores, labels = probabilities.max(axis=-1), probabilities.argmax(axis=-1)
  queries = confident(logits, threshold)
  numbers = np.zeros(masks.shape[1:], np.int32)
  query_of_segment: list[int] = []
  segment_of_stuff: dict[int, int] = {}  # By class.
  if not len(queries):
    return segments_lib.Segments(numbers, labels[:0], scores[:0])
  mask_probabilities = _sigmoid(masks[queries])
  weighted = scores[queries, None, None] * mask_probabilities
  query_of_pixel = queries[weighted.argmax(axis=0)]  # [H, W]
  for query, mask in zip(queries, mask_probabilities):
    is_winner = query_of_pixel == query
    is_inside = mask >= 0.5
    segment = is_winner & is_inside
    if not segment.any() or is_winner.sum() / is_inside.sum() <= overlap:
      continue
    label = int(labels[query])
    if label in segment_of_stuff:
      numbers[segment] = segment_of_stuff[label]
      continue
    query_of_segment.append(query)
    numbers[segment] = len(query_of_segment)
    if label in stuff:
      segment_of_stuff[label] = len(query_of_segment)
  labels, scores = labels[query_of_segment], scores[query_of_segment]
  return segments_lib.Segments(numbers, labels, scores)


def softmax(logits: np.ndarray) -> np.ndarray:
  """Returns the probabilities of logits [..., C + 1]."""
  exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
  return 0.5 * (1 + np.tanh(0.5 * logits))
