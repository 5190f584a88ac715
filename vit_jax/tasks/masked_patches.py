"""Masked patch prediction (arXiv 2010.11929, B.1.2 and section 4.6).

Corrupts a part of the patches of each image: most become a learned mask token,
some become another patch of the image, and some stay as they are. The encoder
reads the result, and a linear head on every token predicts the original
patches. The loss counts only the corrupted patches.

Shapes: B images, h x w = N patches of p x q pixels, C channels, tokens of width
D.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, ClassVar

from etils import epath
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import console, models, models_vit
from vit_jax.configs import task_options
from vit_jax.data.images import images as images_lib
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.figures import charts, gallery, grids
from vit_jax.inference import predictor as predictor_lib
from vit_jax.layers import patches as patches_lib
from vit_jax.run import metrics as metrics_lib
from vit_jax.tasks import base

# The fate of a patch: not corrupted, or corrupted in one of three ways.
KEPT, MASKED, SWAPPED, UNCHANGED = range(4)

BITS = 3  # Bits of each channel of a predicted colour.
_VERSIONS = ('image', 'masked', 'predicted')  # Their order in Task.pictures.
_CELLS = 4  # Cells along each side of a patch, for the target '4x4'.
# Separates the random numbers of the corruption from the augmentation's.
_FOLD = 1_914_201
_EVALUATION = 2_011_929  # First half of the seed in evaluation.


class MaskedViT(models_vit.VisionTransformer):
  """A Vision Transformer that can corrupt tokens before it encodes them."""

  def setup(self) -> None:
    """Creates the mask token, [1, 1, D], in addition."""
    super().setup()
    self.mask_token = self.param(
      'mask_token',
      nn.initializers.normal(stddev=0.02),
      (1, 1, self.hidden_size),
      jnp.dtype(self.param_dtype),
    )

  def predict_patches(
    self, images: jax.Array, fate: jax.Array, replacement: jax.Array, *, train: bool
  ) -> jax.Array:
    """Predicts every patch from the corrupted tokens, float32 [B, N, outputs].

    Args:
      images: float [B, H, W, C] in [-1, 1].
      fate: of their patches, int32 [B, N]: KEPT, MASKED, SWAPPED, or UNCHANGED.
      replacement: index of the patch that replaces a SWAPPED one, int32 [B, N].
      train: whether there is dropout.
    """
    grid = self.embed(images, flat=False)  # [B, h, w, D]
    tokens = grid.reshape(grid.shape[0], -1, grid.shape[-1])  # [B, N, D]
    swapped = jnp.take_along_axis(tokens, replacement[..., None], axis=1)
    fate = fate[..., None]
    tokens = jnp.where(fate == SWAPPED, swapped, tokens)
    tokens = jnp.where(fate == MASKED, self.mask_token.astype(tokens.dtype), tokens)
    encoded = self.encode(tokens.reshape(grid.shape), train=train)
    return self.head(encoded[:, -fate.shape[1] :])  # Without the class token.


def _reconstructions(subject: Any) -> list:
  """Draws images, masked images and predictions, see gallery.Entry."""
  model = subject.model
  task = subject.model.task
  outputs = jax.jit(task.outputs)(model.params, model.extra, subject.batch)
  pictures = task.pictures(subject.batch, outputs)
  return [
    charts.reconstructions(pictures[part], _VERSIONS) for part in gallery.pages(subject)
  ]


class Task(base.Task):
  """Learns to predict what corrupted patches look like."""

  Options = task_options.MaskedPatches
  METRICS: ClassVar = {'accuracy': metrics_lib.SHARE, 'loss': metrics_lib.LOSS}
  NEW_PARAMS = ('head', 'mask_token')
  OWN_PARAMS = ('head', 'mask_token')
  DRAWS, PRINTS = True, False
  FIGURES = (
    gallery.Entry(
      'reconstructions',
      'Masked patches, predicted',
      'The top row shows the images, the middle row the images with corrupted '
      'patches in grey. The bottom row shows what the model predicts for those '
      'patches.',
      'arXiv 2010.11929, section 4.6 and appendix B.1.2',
      gallery.needs_images,
      _reconstructions,
    ),
  )

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    if models.kind_of(config.model) != 'vit':
      raise ValueError(
        f'model={config.model.get("model_name")} has no tokens to mask: use a Vision '
        "Transformer, such as 'b16' (config.model)"
      )
    self.grid = models.count_patches(config.model, self.image_size)  # (h, w)
    self.patch = tuple(size // count for size, count in zip(self.image_size, self.grid))
    if self.options.target == '4x4' and any(p % _CELLS for p in self.patch):
      raise ValueError(
        f"target='4x4' needs patches whose sides are multiples of {_CELLS}, not "
        f"{self.patch}: use 'mean' or 'l2' (config.task_options.target)"
      )
    self.num_patches = math.prod(self.grid)
    channels = config.pp.channels
    self.num_colors = 2 ** (BITS * channels)  # 512; 8 for grey images.
    self._cells = _CELLS if self.options.target == '4x4' else 1
    outputs = self._cells**2 * self.num_colors
    if self.options.target == 'l2':
      outputs = math.prod(self.patch) * channels
    self.model = models.make_model(config.model, cls=MaskedViT, num_classes=outputs)

  @no_autograph
  def inputs(
    self, record: dict[str, 'tf.Tensor'], seed: 'tf.Tensor | None' = None
  ) -> dict[str, 'tf.Tensor']:
    """Returns `image`, and `fate` and `replacement` of its patches, see `corrupt`.

    In evaluation the index of the image in its split determines the corruption.
    """
    example = super().inputs(record, seed)
    if seed is None:
      seed = tf.stack(
        [tf.constant(_EVALUATION, tf.int64), tf.cast(record['index'], tf.int64)]
      )
    seeds = tf.random.experimental.stateless_split(
      tf.random.experimental.stateless_fold_in(seed, _FOLD), 2
    )
    fate, replacement = corrupt(seeds, self.num_patches, self.options)
    return {**example, 'fate': fate, 'other': replacement}

  def input_spec(
    self,
    image_size: tuple[int, int] | None = None,
    batch: Any = 1,
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `image`, and `fate` and `other` of each patch, int32 [batch, N]."""
    grid = models.count_patches(self.config.model, image_size or self.image_size)
    patches = jax.ShapeDtypeStruct((batch, math.prod(grid)), jnp.int32)
    image = self.image_spec(batch, image_size)
    return {'image': image, 'fate': patches, 'other': patches}

  def init(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns the parameters, and no extra state."""
    batch = jax.tree.map(jnp.zeros_like, self.batch_spec(1))
    variables = self.model.init(
      rng, *_arguments(batch), train=False, method='predict_patches'
    )
    return variables['params'], {}

  def _apply(self, params: Any, batch: base.Batch, **kwargs: Any) -> jax.Array:
    variables = {'params': params}
    arguments = _arguments(batch)
    return self.model.apply(variables, *arguments, method='predict_patches', **kwargs)

  def _losses(self, outputs: Any, batch: base.Batch) -> tuple[jax.Array, jax.Array]:
    """Computes the loss, and the share of correct colours, of patches, [B, N]."""
    outputs = outputs.astype(jnp.float32)
    patches = patches_lib.cut(batch['image'], self.grid)  # [B, N, p, q, C]
    if self.options.target == 'l2':
      error = outputs - patches.reshape(outputs.shape)
      means = outputs.reshape(patches.shape).mean(axis=(2, 3))  # [B, N, C]
      correct = colors(means) == mean_colors(patches)[..., 0]
      return (error**2).mean(axis=-1), correct.astype(jnp.float32)
    target = mean_colors(patches, self._cells)  # [B, N, cells**2]
    logits = outputs.reshape(*target.shape, self.num_colors)
    logs = jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(logs, target[..., None], axis=-1)[..., 0]
    correct = logits.argmax(axis=-1) == target
    return loss.mean(axis=-1), correct.astype(jnp.float32).mean(axis=-1)

  def _sums(self, outputs: Any, batch: base.Batch) -> base.WeightedSums:
    loss, correct = self._losses(outputs, batch)
    weights = (batch['fate'] != KEPT).astype(jnp.float32)  # [B, N]
    if 'mask' in batch:
      weights *= batch['mask'][:, None]
    total_weight = weights.sum()
    return {
      'accuracy': ((correct * weights).sum(), total_weight),
      'loss': ((loss * weights).sum(), total_weight),
    }

  def loss(
    self, params: Any, extra: Any, batch: base.Batch, rng: jax.Array
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the loss of the corrupted patches, and the accuracy as a metric."""
    outputs = self._apply(params, batch, train=True, rngs={'dropout': rng})
    sums = self._sums(outputs, batch)
    return sums['loss'], {'accuracy': sums['accuracy']}

  def outputs(self, params: Any, extra: Any, batch: base.Batch) -> Any:
    """Returns logits of colours, or pixels, per patch: float32 [B, N, ...]."""
    return self._apply(params, batch, train=False)

  def measure(self, params: Any, extra: Any, batch: base.Batch) -> base.WeightedSums:
    """Returns loss and accuracy of the corrupted patches."""
    return self._sums(self.outputs(params, extra, batch), batch)

  def describe(self) -> str:
    colors = f'(of {self.num_colors})'
    targets = {
      'mean': f'the mean colour {colors}',
      '4x4': f'4 x 4 colours {colors}',
      'l2': 'the pixels',
    }
    return (
      f'to predict {targets[self.options.target]} of corrupted patches: '
      f'{self.options.corruption:.0%} of the {self.num_patches} of an image'
    )

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return Predictor(self, params, extra, step)

  def draw_evaluation(self, batch: base.Batch, outputs: Any) -> dict[str, np.ndarray]:
    """Draws test images next to the masked images and the predictions."""
    return {'masked_patches': _draw(self.pictures(batch, outputs), grids.MOST)}

  def pictures(self, batch: base.Batch, outputs: Any) -> np.ndarray:
    """Returns each image, the masked image and the prediction.

    float32 [B, 3, H, W, C] in [-1, 1]; masked patches are grey.
    """
    images = np.asarray(batch['image'])
    patches = patches_lib.cut(images, self.grid)  # [B, N, p, q, C]
    corrupted = (np.asarray(batch['fate']) != KEPT)[..., None, None, None]
    masked = np.where(corrupted, 0.0, patches)
    predicted = self._predicted_patches(outputs, patches.shape)
    predicted = np.where(corrupted, predicted.clip(-1, 1), patches)
    versions = [
      images,
      patches_lib.paste(masked, self.grid),
      patches_lib.paste(predicted, self.grid),
    ]
    return np.stack(versions, axis=1)

  def _predicted_patches(self, outputs: Any, shape: Sequence[int]) -> np.ndarray:
    """Returns the pixels that outputs stand for, float32 of a shape [B, N, p, q, C]."""
    if self.options.target == 'l2':
      return np.asarray(outputs, np.float32).reshape(shape)
    logits = np.asarray(outputs).reshape(
      (*shape[:2], self._cells, self._cells, self.num_colors)
    )
    pixels = middle(logits.argmax(-1), shape[-1])  # One per cell.
    for axis, size in enumerate(self.patch, 2):
      pixels = pixels.repeat(size // self._cells, axis)
    return pixels


class Predictor(base.Predictor):
  """Predicts masked patches of images."""

  def predict(self, images: Sequence[Any], **options: Any) -> list[np.ndarray]:
    """Returns float32 [3, H, W, C] for each image; see Task.pictures."""
    self._refuse(options)
    inputs, outputs = self.run(images)
    return list(self.task.pictures(inputs, outputs))

  def report(
    self,
    images: Sequence[str],
    *,
    out: epath.PathLike | None = None,
  ) -> list[str]:
    """Writes a PNG of the predictions."""
    pictures = np.stack(self.predict(images))
    epath.Path(out).write_bytes(images_lib.encode_png(_draw(pictures)))
    count = console.pluralize(len(pictures), 'image')
    return [f'Wrote {count}, masked and predicted, to {out}']

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Shows an image, the masked image and the prediction."""
    from vit_jax.inference import demo

    picture = demo.picture('Masked patches')

    def show(photo: Any) -> dict:
      return {picture: _draw(np.stack(self.predict([photo.path])))}

    return show, [], [picture]


def _draw(pictures: np.ndarray, most: int | None = None) -> np.ndarray:
  """Draws a row for each of Task.pictures; for `most` see grids.grid."""
  return grids.side_by_side(dict(zip(_VERSIONS, pictures.swapaxes(0, 1))), most)


def _arguments(batch: base.Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the arguments of MaskedViT.predict_patches from a batch of the task."""
  return batch['image'], batch['fate'], batch['other']


def corrupt(
  seeds: 'tf.Tensor', num_patches: int, options: Any
) -> tuple['tf.Tensor', 'tf.Tensor']:
  """Draws the fate of each patch at random, independently of the others.

  Args:
    seeds: two seeds of stateless random numbers, int64 [2, 2].
    num_patches: N.
    options: Task.options.

  Returns:
    The fates, int32 [N], and for each patch the index of another one that replaces it
    if it is SWAPPED, int32 [N].
  """
  uniform = tf.random.stateless_uniform([num_patches], seeds[0])
  limits = np.cumsum([options.masked, options.swapped, 1.0])
  limits = options.corruption * np.minimum(limits, 1.0)
  fate = tf.fill([num_patches], KEPT)
  for limit, kind in zip(limits[::-1], (UNCHANGED, SWAPPED, MASKED)):
    fate = tf.where(uniform < limit, kind, fate)
  step = tf.random.stateless_uniform([num_patches], seeds[1], 1, num_patches, tf.int32)
  replacement = (tf.range(num_patches) + step) % num_patches
  return tf.cast(fate, tf.int32), replacement


def colors(values: jax.Array) -> jax.Array:
  """Quantises colours [..., C] in [-1, 1] to numbers, int32 [...].

  BITS bits per channel, the first channel highest: from 0 to 2**(BITS * C) - 1.
  """
  levels = 2**BITS
  bins = jnp.floor((values + 1) / 2 * levels).astype(jnp.int32)
  bins = bins.clip(0, levels - 1)
  places = levels ** jnp.arange(values.shape[-1])[::-1]
  return (bins * places).sum(axis=-1)


def mean_colors(patches: jax.Array, k: int = 1) -> jax.Array:
  """Quantises the mean colours of the k x k cells of patches, int32 [B, N, k * k].

  Patches are float [B, N, p, q, C] in [-1, 1].
  """
  b, n, p, q, c = patches.shape
  x = patches.astype(jnp.float32).reshape(b, n, k, p // k, k, q // k, c)
  return colors(x.mean(axis=(3, 5))).reshape(b, n, k * k)


def middle(numbers: Any, channels: int) -> np.ndarray:
  """Returns the centres of quantised colours [..., C]; inverts `colors`."""
  levels = 2**BITS
  place_values = levels ** np.arange(channels)[::-1]
  bins = (np.asarray(numbers)[..., None] // place_values) % levels
  return ((bins + 0.5) / levels * 2 - 1).astype(np.float32)
