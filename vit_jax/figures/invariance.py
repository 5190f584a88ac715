"""Measures how features change when images are shifted or patches are permuted.

A Vision Transformer uses the two-dimensional structure of images only in its
patches and its position embeddings (arXiv 2010.11929, section 3.1, "Inductive
bias"). Untrained models show the effect:

  from vit_jax.figures import invariance
  found = invariance.compare(images)  # Models with random parameters.
  found = invariance.compare(
    images, extra={'mine': invariance.features(model, params)}
  )

Shifts are circular: columns that leave the image on the right enter it on the
left. No content is lost, so two statements hold up to rounding. If images are
shifted by whole patches, the tokens of the patch embedding are shifted by as
many. Without position embeddings, permuting the patches (a shift by whole
patches is a permutation) changes neither the class token nor the mean of the
tokens.

Shapes: B images, H x W pixels, C channels, D width of the features, M models, S
shifts.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import math
from typing import Any
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np

from vit_jax import models
from vit_jax.layers import patches as patches_lib

# A function from images [B, H, W, C] to features [B, D].
Features = Callable[[Any], Any]

# Sides of a patch in pixels; at least 4, by which the root of a ResNet divides.
_PATCHES = (16, 8, 4)
_ORDERS = 8  # Number of permutations that `compare` averages over.


class Comparison(NamedTuple):
  """Changes of the features of models, see `relative_change`."""

  names: tuple[str, ...]  # Of the M models.
  shifts: np.ndarray  # Lengths of the shifts to the right in pixels, int [S].
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
  """Permutes the patches of images [B, H, W, C].

  Args:
    images: the images.
    patch: side of a patch in pixels; must divide H and W.
    order: int [N], a permutation: index of the patch that moves to each place;
      patches are counted in rows.
  """
  grid = (images.shape[1] // patch, images.shape[2] // patch)
  return patches_lib.paste(patches_lib.cut(images, grid)[:, order], grid)


def changes(functions: Sequence[Features], images, changed) -> np.ndarray:
  """Computes how much features change from images to changed images.

  Args:
    functions: M functions from images to features, one per model.
    images: [B, H, W, C].
    changed: n times such images.

  Returns:
    Relative change, float32 [M, n].
  """
  before = [apply(images) for apply in functions]
  rows = [
    [relative_change(x, apply(other)) for apply, x in zip(functions, before)]
    for other in changed
  ]
  return np.array(rows, np.float32).T


def features(model: nn.Module, params: Any) -> Features:
  """Returns a function that computes the inputs of the head, which is left out."""
  headless = model.clone(num_classes=0)
  return jax.jit(
    lambda images: headless.apply({'params': params}, images, train=False)
  )


def compare(
  images: np.ndarray, seed: int = 0, extra: Mapping[str, Features] | None = None
) -> Comparison:
  """Compares how the features of small, random models change with the images.

  Position embeddings have the standard deviation 1: with the 0.02 of a model
  before training they would have hardly any effect.

  Args:
    images: float32 [B, H, W, C] in [-1, 1]; H and W are multiples of 4 and at
      least 8.
    seed: seed of the parameters and of the permutations.
    extra: functions from images to features [B, D] of further models, by name;
      each is called up to 42 times.

  Raises:
    ValueError: if the images cannot be cut into patches, or an extra model has
      the name of a standard model.
  """
  images = np.asarray(images)
  patch = patch_side(images)
  standard = standard_models(patch)
  if taken := sorted(standard.keys() & (extra or {}).keys()):
    raise ValueError(
      f'extra has names of standard models, {taken}: rename them'
    )
  applied = {
    name: features(model, _random_parameters(model, images, seed))
    for name, model in standard.items()
  } | dict(extra or {})
  pixels = np.arange(min(2 * patch + 1, images.shape[2]))
  shifted = (np.roll(images, count, axis=2) for count in pixels)
  rng = np.random.RandomState(seed)
  count = (images.shape[1] // patch) * (images.shape[2] // patch)
  shuffled = (
    shuffle_patches(images, patch, rng.permutation(count))
    for _ in range(_ORDERS)
  )
  functions = list(applied.values())
  return Comparison(
    names=tuple(applied),
    shifts=pixels,
    shifted=changes(functions, images, shifted),
    shuffled=changes(functions, images, shuffled).mean(axis=1),
    patch=patch,
  )


def patch_side(images: np.ndarray) -> int:
  """Returns the side in pixels of the patches that `compare` uses.

  It is the largest of 16, 8 and 4 that gives at least 4 patches along each side,
  or else at least 2. Raises ValueError if there is none.
  """
  sides = images.shape[1:3] if images.ndim == 4 else (0, 0)
  for least in (4, 2):
    for patch in _PATCHES:
      if all(side % patch == 0 and side // patch >= least for side in sides):
        return patch
  raise ValueError(
    f'images have the shape {images.shape}: they must be [images, height, width, '
    'channels], with sides that are multiples of 4 and at least 8 pixels; resize '
    'them'
  )


def standard_models(patch: int) -> dict[str, nn.Module]:
  """Returns the small models that `compare` compares, by name."""
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
    'ViT without positions, mean pooling': vit(
      transformer=blind, classifier='gap'
    ),
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


def _random_parameters(model, images, seed):
  """Draws random parameters of a model.

  Kernels are normal with variance 1 / inputs, the class token and the position
  embeddings standard normal; scales are 1 and biases 0.
  """
  rng = np.random.RandomState(seed)
  init = functools.partial(model.init, train=False)
  shapes = jax.eval_shape(init, jax.random.key(0), images[:1])['params']

  def draw(path, leaf):
    *_, module, name = ('', *(key.key for key in path))
    if name in ('scale', 'bias'):
      return np.full(leaf.shape, name == 'scale', np.float32)
    inputs = leaf.shape[:-1] if name == 'kernel' else ()
    if module in ('query', 'key', 'value'):  # [D, K, E]
      inputs = leaf.shape[:1]
    numbers = rng.standard_normal(leaf.shape) / math.sqrt(math.prod(inputs))
    return numbers.astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)
