"""DETR: object detection as the prediction of a set (arXiv 2005.12872).

A backbone, a ResNet or a Vision Transformer, makes a feature map of an image, a
Transformer encoder relates its cells to each other, and a decoder turns a fixed
number of learned queries into one class and one box each. Images of a batch may
have padding below and to the right; a mask marks the real pixels.

Shapes in the comments:
  B images    H, W image height and width    h, w cells of the feature map
  S = h*w     Q object queries    D width of a token    L layers of the decoder
  F channels of the feature map
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from vit_jax import models_vit
from vit_jax.configs import models as model_configs, schema
from vit_jax.distributed import sharding
from vit_jax.layers import detection, detr_masks, dtypes, patches, resnet
from vit_jax.layers.dtypes import Array

# Mean and standard deviation of ImageNet's pixels in [0, 1], by channel, with
# which the published backbones were trained.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalise(
  images: Float[Array, 'B H W 3'], mask: Bool[Array, 'B H W']
) -> Float[Array, 'B H W 3']:
  """Standardises images in [-1, 1] by ImageNet's statistics.

  Padding, where the mask is False, becomes 0.
  """
  dtype = images.dtype
  images = (images.astype(jnp.float32) + 1) / 2
  images = (images - jnp.array(MEAN)) / jnp.array(STD)
  return (images * mask[..., None]).astype(dtype)


def shrink_mask(
  mask: Bool[Array, 'B H W'], size: tuple[int, int]
) -> Bool[Array, 'B h w']:
  """Takes a mask at the nearest pixel before each of h x w cells."""
  for axis, cells in enumerate(size, start=1):
    pixels = jnp.arange(cells) * mask.shape[axis] // cells
    mask = jnp.take(mask, pixels, axis=axis)
  return mask


class BoxHead(nn.Module):
  """An MLP of three layers to a box (section 3.2), which is float32."""

  hidden_size: int  # Width of the two hidden layers.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, '*axes D']) -> Float[Array, '*axes 4']:
    """Maps states to boxes in [0, 1]: centre x, y, width, height."""
    types = dtypes.of(self)
    x = nn.relu(nn.Dense(self.hidden_size, **types)(x))
    x = nn.relu(nn.Dense(self.hidden_size, **types)(x))
    x = nn.Dense(4, dtype=jnp.float32, param_dtype=self.param_dtype)(x)
    return nn.sigmoid(x)


class VitBackbone(models_vit.VisionTransformer):
  """A Vision Transformer that returns its tokens as a feature map.

  The class token, if there is one, takes part in the attention, as in the
  published weights, and is left out of the map.
  """

  def __call__(
    self,
    images: Float[Array, 'B H W 3'],
    mask: Bool[Array, 'B H W'] | None = None,
    *,
    train: bool,
  ) -> Float[Array, 'B h w F']:
    """Maps images, float [B, H, W, 3] in [-1, 1], to [B, h, w, F].

    The mask, bool [B, H, W], is True for real pixels, and None without
    padding. Patches that begin in the padding are not attended to.
    """
    if mask is not None:
      images = images * mask[..., None]
    x = self.embed(images, flat=False)  # [B, h, w, F]
    grid = x.shape[1:3]
    tokens = grid[0] * grid[1]
    if mask is not None:
      mask = shrink_mask(mask, grid).reshape(-1, 1, 1, tokens)
      first = int(self.has_class_token) + self.distilled + self.registers
      ends = ((0, 0), (0, 0), (0, 0), (first, 0))
      mask = jnp.pad(mask, ends, constant_values=True)
    x = self.encode(x, train=train, mask=mask)[:, -tokens:]
    return x.reshape(x.shape[0], *grid, -1)


class Detr(patches.ImageModel):
  """DETR with a ResNet or a Vision Transformer as the backbone.

  Logits and boxes are always float32.
  """

  num_classes: int  # Without "no object", which is the last one.
  backbone: str = 'resnet'
  # Fields of vit_jax.models_vit.VisionTransformer, for backbone='vit'. With
  # `transformer.position_grid` images may have several sizes.
  vit: Mapping[str, Any] | None = None
  # Fields of vit_jax.layers.resnet.ResNet, for backbone='resnet'.
  units: Sequence[int] = resnet.UNITS['r50']
  backbone_width: int = 64
  dilate_last: bool = False
  norm: str = 'frozen_batch'
  hidden_size: int = 256  # D.
  num_queries: int = 100  # Q.
  num_encoder_layers: int = 6
  num_decoder_layers: int = 6
  num_heads: int = 8
  mlp_dim: int = 2048  # Width of the hidden layers of the MLPs.
  dropout_rate: float = 0.1  # After attention and dense layers.
  attention_dropout_rate: float = 0.1  # Dropout of the attention weights.
  mask_head: bool = False  # Whether to compute a mask for each query (section 4.4).
  masks_at_a_time: int = 10  # Computed together, to save memory; 0: all.
  model_name: str | None = None  # Name in the table of configs; has no effect.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  def setup(self) -> None:
    """Creates the mask head if the model has one."""
    if self.mask_head:
      self.segmentation = detr_masks.MaskHead(
        self.hidden_size, self.num_heads, self.masks_at_a_time, **dtypes.of(self)
      )

  @nn.compact
  def __call__(
    self,
    images: Float[Array, 'B H W 3'],
    mask: Bool[Array, 'B H W'] | None = None,
    *,
    train: bool,
    draw: bool = True,
  ) -> dict[str, Any]:
    """Detects objects.

    Takes images, float [B, H, W, 3] in [-1, 1], and a mask, bool [B, H, W], True for
    real pixels, or None without padding. `train` turns dropout on, which needs the rng
    'dropout'.

    Returns a dict with the outputs after each layer of the decoder, the last layer's
    last: `logits`, float32 [L, B, Q, num_classes + 1], and `boxes`, float32 [L, B, Q,
    4]: centre x, centre y, width and height, as shares of width and height of the image
    without its padding. With a mask head also `masks`, the logits of the last layer's
    masks, float32 [B, Q, H / 4, W / 4]; or, if not `draw`, `features`, from which
    `draw_masks` computes some of them.
    """
    types = dtypes.of(self)
    stages = self._stages(images.astype(types['dtype']), mask, train)
    if mask is None:
      mask = jnp.ones(images.shape[:3], bool)
    projected, memory, positions, cells = self._encode(stages[-1], mask, train)
    states = self._decode(memory, positions, cells, train)  # [L, B, Q, D]
    exact = {**types, 'dtype': jnp.float32}
    head = nn.Dense(self.num_classes + 1, name='class_head', **exact)
    boxes = BoxHead(self.hidden_size, name='box_head', **types)
    outputs = {'logits': head(states), 'boxes': boxes(states)}
    if not self.mask_head:
      return outputs
    features = detr_masks.Features(
      queries=states[-1],
      memory=memory.reshape(projected.shape),
      mask=cells.reshape(projected.shape[:3]),
      projected=projected,
      stages=stages[-2::-1],
    )
    if draw:
      return {**outputs, 'masks': self.segmentation(features)}
    return {**outputs, 'features': features}

  def draw_masks(
    self, features: detr_masks.Features, queries: Int[Array, 'B N']
  ) -> Float[Array, 'B N _ _']:
    """Computes the masks of queries by number.

    Returns the logits, float32 [B, N, H / 4, W / 4].
    """
    queries = queries[..., None]
    segment_queries = jnp.take_along_axis(
      features.queries, queries, axis=1
    )  # [B, N, D]
    return self.segmentation(features._replace(queries=segment_queries))

  def _stages(
    self,
    images: Float[Array, 'B H W 3'],
    mask: Bool[Array, 'B H W'] | None,
    train: bool,
  ) -> list[Float[Array, 'B _ _ _']]:
    """Returns the feature maps of the backbone; the last is [B, h, w, F]."""
    schema.check('backbone', self.backbone, model_configs.Backbone, 'config.model.')
    types = dtypes.of(self)
    if self.backbone == 'vit':
      if self.mask_head:
        raise ValueError(
          "backbone='vit' has one feature map, but mask_head=True needs the maps "
          "of four stages: use backbone='resnet' (config.model.backbone)"
        )
      fields = {**(self.vit or {}), **types, 'num_classes': None}
      try:
        backbone = VitBackbone(name='backbone', **fields)
      except TypeError as e:
        raise ValueError(
          f"backbone='vit' takes the fields of a Vision Transformer, as "
          f'vit_jax.configs.models.get_config returns them: {e} (config.model.vit)'
        ) from e
      return [backbone(images, mask, train=train)]
    if mask is None:
      mask = jnp.ones(images.shape[:3], bool)
    sizes = (self.units, self.backbone_width, self.dilate_last, self.norm)
    stages = resnet.ResNet(*sizes, name='backbone', **types)
    return stages(normalise(images, mask))

  def _layers(self, cls: type[nn.Module], count: int, name: str) -> list[Any]:
    rates = ('dropout_rate', 'attention_dropout_rate')
    fields = dtypes.of(self, 'num_heads', 'mlp_dim', *rates)
    return [cls(**fields, name=f'{name}_{i}') for i in range(count)]

  def _encode(
    self, features: Float[Array, 'B h w F'], mask: Bool[Array, 'B H W'], train: bool
  ) -> tuple[
    Float[Array, 'B h w D'],
    Float[Array, 'B S D'],
    Float[Array, 'B S D'],
    Bool[Array, 'B 1 1 S'],
  ]:
    """Returns the projected map, the memory, positions and mask of its cells."""
    types = dtypes.of(self)
    mask = shrink_mask(mask, features.shape[1:3])  # [B, h, w]
    positions = detection.sine_positions(mask, self.hidden_size)
    projected = nn.Conv(self.hidden_size, (1, 1), name='input_proj', **types)(features)
    flat = (mask.shape[0], -1, self.hidden_size)
    x = projected.reshape(flat)
    positions = positions.reshape(flat).astype(x.dtype)
    cells = mask.reshape(mask.shape[0], 1, 1, -1)
    cls, count = detection.EncoderLayer, self.num_encoder_layers
    for layer in self._layers(cls, count, 'encoder_layer'):
      x = layer(x, positions, cells, train=train)
    return projected, x, positions, cells

  def _decode(
    self,
    memory: Float[Array, 'B S D'],
    positions: Float[Array, 'B S D'],
    cells: Bool[Array, 'B 1 1 S'],
    train: bool,
  ) -> Float[Array, 'L B Q D']:
    """Returns the normalised state after each layer."""
    types = dtypes.of(self)
    init = nn.initializers.normal(1.0)
    shape = (self.num_queries, self.hidden_size)
    queries = self.param('query_embedding', init, shape, types['param_dtype'])
    queries = queries.astype(types['dtype'])
    queries = jnp.broadcast_to(queries, (memory.shape[0], *queries.shape))
    queries = sharding.constrain_batch(queries)
    norm = nn.LayerNorm(1e-5, name='decoder_norm', **types)
    x = jnp.zeros_like(queries)
    states = []
    cls, count = detection.DecoderLayer, self.num_decoder_layers
    for layer in self._layers(cls, count, 'decoder_layer'):
      x = layer(x, queries, memory, positions, cells, train=train)
      states.append(norm(x))
    return jnp.stack(states)
