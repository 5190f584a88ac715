"""Contrastive losses over all pairs of the images and texts of a batch.

  softmax  cross-entropy of each image over the texts, and of each text over the
           images, averaged (CLIP; LiT, arXiv 2111.07991, section 3.1)
  sigmoid  binary cross-entropy of each pair of an image and a text: do they belong
           together? (SigLIP, arXiv 2303.15343, section 3.2)

The batch is global, over all devices and hosts. Each device has the rows of the
matrix of logits that belong to its images, so that none has all of it.

Shapes: B images and their texts, E width of an embedding.
"""

import jax
import jax.numpy as jnp

from vit_jax import models_lit
from vit_jax.distributed import sharding


def logits_of(zimg: jax.Array, ztxt: jax.Array, out: dict[str, jax.Array]) -> jax.Array:
  """Returns the logits of all pairs, float32 [B, B], see models_lit.similarity."""
  zimg = sharding.constrain_batch(zimg)
  return sharding.constrain_batch(models_lit.similarity(zimg, ztxt, out))


def softmax(logits: jax.Array) -> jax.Array:
  """Returns the loss of each pair, float32 [B]."""
  positives = jnp.diagonal(logits)
  of_images = jax.nn.logsumexp(logits, axis=1) - positives
  of_texts = jax.nn.logsumexp(logits, axis=0) - positives
  return (of_images + of_texts) / 2


def sigmoid(logits: jax.Array) -> jax.Array:
  """Returns the loss of each image, summed over all texts, float32 [B]."""
  signs = 2 * jnp.eye(len(logits), dtype=logits.dtype) - 1
  return -jax.nn.log_sigmoid(signs * logits).sum(axis=1)


# By `config.loss`.
LOSSES = {'softmax': softmax, 'sigmoid': sigmoid}
