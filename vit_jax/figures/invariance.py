"""Measures how features change when images are shifted or patches are permuted.

A Vision Transformer uses the two-dimensional structure of images only in its
patches and its position embeddings (arXiv 2010.11929, section 3.1, "Inductive
bias"). Untrained models show the effect.

Shifts are circular, so two statements hold up to rounding. Shifting images by whole
patches shifts the tokens of the patch embedding equally. Without position embeddings,
permuting the patches (a shift by whole patches is a permutation) changes neither the
class token nor the mean of the tokens.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from vit_jax import models
from vit_jax.layers import patches as patches_lib

_ORDERS = 8  # Number of permutations that `compare` averages over.


class Comparison(NamedTuple):
  """Changes of the features of models, see `relative_change`."""

  names: tuple[str, ...]  # Names of M models.
  shifts: np.ndarray  # S lengths of shifts to the right in pixels, int [S].
  shifted: np.ndarray  # Change by each shift, float32 [M, S].
  shuffled: np.ndarray  # Mean change by permutations of patches, float32 [M].
  patch: int  # Side of a patch in pixels.


def relative_change(before: Any, after: Any) -> np.float32:
  """Computes the mean over B of |after - before| / |before|; arrays [B, ...]."""
  before = np.asarray(before, np.float32).reshape(len(before), -1)
  after = np.asarray(after, np.float32).reshape(len(after), -1)
  lengths = np.linalg.norm(before, axis=1)
  lengths = np.maximum(lengths, np.finfo(np.float32).tiny)
  return np.mean(np.linalg.norm(after - before, axis=1) / lengths)


def shuffle_patches(images: np.ndarray, patch: int, order: Any) -> np.ndarray:
  """Permutes patches of images [B, H, W, C]; order[i] is the patch that moves to i."""
  grid = (images.shape[1] // patch, images.shape[2] // patch)
  return patches_lib.paste(patches_lib.cut(images, grid)[:, order], grid)


def compare(images: np.ndarray, patch: int = 16, seed: int = 0) -> Comparison:
  """Compares how the features of small, random models change with the images.

  Position embeddings have standard deviation 1: with the usual 0.02 at initialisation
  they would have hardly any effect. Images are float32 [B, H, W, C] in [-1, 1]; the
  side of a patch, 16, 8 or 4 pixels, divides H and W.
  """
  standard = standard_models(patch)
  pixels = np.arange(min(2 * patch + 1, images.shape[2]))
  shifted = [np.roll(images, count, axis=2) for count in pixels]
  rng = np.random.RandomState(seed)
  count = (images.shape[1] // patch) * (images.shape[2] // patch)
  shuffled = []
  for _ in range(_ORDERS):
    shuffled.append(shuffle_patches(images, patch, rng.permutation(count)))
  changes = []
  for model in standard.values():
    params = _random_parameters(model, images, seed)
    apply = jax.jit(functools.partial(model.apply, train=False))
    before = apply({'params': params}, images)
    model_changes = []
    for changed in (*shifted, *shuffled):
      after = apply({'params': params}, changed)
      model_changes.append(relative_change(before, after))
    changes.append(model_changes)
  shifts, orders = np.split(np.array(changes, np.float32), [len(pixels)], axis=1)
  return Comparison(tuple(standard), pixels, shifts, orders.mean(axis=1), patch)


def standard_models(patch: int) -> dict[str, nn.Module]:
  """Returns the small models without a head that `compare` compares."""
  transformer = dict(num_layers=2, mlp_dim=128, num_heads=4, dropout_rate=0.0)
  blind = dict(transformer, add_position_embedding=False)
  vit = functools.partial(
    models.VisionTransformer,
    num_classes=0,
    patches={'size': (patch, patch)},
    hidden_size=64,
    transformer=transformer,
  )
  # The root of the ResNet divides by 4, and each stage but the first by 2.
  stages = int(math.log2(patch)) - 1
  return {
    'ViT': vit(),
    'ViT, mean pooling': vit(classifier='gap'),
    'ViT without positions': vit(transformer=blind),
    'ViT without positions, mean pooling': vit(transformer=blind, classifier='gap'),
    'Hybrid of ResNet and ViT': vit(
      patches={'size': (1, 1)},
      resnet=dict(num_layers=(1,) * stages, width_factor=0.5),
    ),
    'MLP-Mixer': models.MlpMixer(
      patches={'size': (patch, patch)},
      num_classes=0,
      num_blocks=2,
      hidden_dim=64,
      tokens_mlp_dim=64,
      channels_mlp_dim=128,
    ),
  }


def _random_parameters(model: nn.Module, images: np.ndarray, seed: int) -> Any:
  """Draws parameters: kernels with variance 1 / inputs, embeddings standard normal."""
  rng = np.random.RandomState(seed)
  init = functools.partial(model.init, train=False)
  shapes = jax.eval_shape(init, jax.random.key(0), images[:1])['params']

  def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    *_, module, name = ('', *(key.key for key in path))
    if name in ('scale', 'bias'):
      return np.full(leaf.shape, name == 'scale', np.float32)
    inputs = leaf.shape[:-1] if name == 'kernel' else ()
    if module in ('query', 'key', 'value'):  # [D, K, E]
      inputs = leaf.shape[:1]
    numbers = rng.standard_normal(leaf.shape) / math.sqrt(math.prod(inputs))
    return numbers.astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)
