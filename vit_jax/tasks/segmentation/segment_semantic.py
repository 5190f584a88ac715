r"""Semantic segmentation: the class of each pixel.

  vit_jax train --config=configs/vit.py:b16,/path/to/folder \
    --config.pretrained=ViT-B_16.npz --config.task=segment_semantic \
    --workdir=/tmp/segmentation

The data have images and masks, see vit_jax/data/masks.py. The kind of the model decides on
the head: heads.HEADS. Measures are of the masks at their height and width.

Shapes: B images of H x W pixels, scores on a grid of h x w cells, C classes.
"""

from collections.abc import Mapping
import copy
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import console, input_pipeline, models, preprocess
from vit_jax.configs import task_options
from vit_jax.data import masks, records
from vit_jax.data.augmentation import canvases, geometry
from vit_jax.data.images import false_colours, images as images_lib
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.figures import grids
from vit_jax.inference import predictor as predictor_lib
from vit_jax.layers import position_kinds
from vit_jax.learning import losses as losses_lib
from vit_jax.tasks import base
from vit_jax.tasks.segmentation import (
  class_maps,
  encoders,
  figures,
  heads,
  losses,
  predicting,
  scores as scores_lib,
  views,
)


class _Canvas(NamedTuple):
  """Sizes on which images are padded, (height, width)."""

  size: tuple[int, int]  # The mask.
  views: tuple[tuple[int, int], ...]


class Task(base.Task):
  """Learns the class of each pixel."""

  FEATURES: ClassVar[tuple[str, ...]] = ('image', masks.FEATURE)
  METRICS: ClassVar = {'loss': scores_lib.METRICS['loss']}
  METADATA: ClassVar[tuple[str, ...]] = ('class_names', 'mask_classes')
  Options = task_options.SegmentSemantic
  MULTICHANNEL = True
  CLASS_WEIGHTS = True
  OWN_PARAMS = ('head',)
  REPORT = scores_lib.Iou
  FIGURES = figures.FIGURES
  DRAWS = True
  FLAGS = predicting.FLAGS

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    self._mask_classes = masks.from_json(metadata['mask_classes'])
    self.classes = masks.learned(self._mask_classes)
    self._reader = masks.reader(config, self._mask_classes)
    self.ids = self._reader.ids  # Numbers of the classes in masks.
    _check_keys(config)
    class_weights = None
    if config.class_weights is not None:
      class_weights = losses_lib.named_weights(
        config.class_weights.to_dict(), self.class_names
      )
    head_class = heads.class_of(config)
    grid = models.count_patches(config.model, self.image_size)
    patch = self.image_size[0] // grid[0], self.image_size[1] // grid[1]
    self.views = views.make(self.options, self.image_size, patch)
    if any(view.window != self.image_size for view in self.views):
      config = _at_any_size(config, grid)
    self.head = head_class(config, len(self.classes), class_weights)
    self._check_sizes()

  @property
  def model(self) -> Any:
    """The Flax module, which is the head's."""
    return self.head.model

  @model.setter
  def model(self, model: Any) -> None:
    self.head = copy.copy(self.head)
    self.head.model = model

  def _check_sizes(self) -> None:
    """Raises ValueError if the parameters do not fit windows of other sizes."""
    sizes = {view.window for view in self.views} - {self.image_size}
    if not sizes:
      return
    shapes = jax.eval_shape(self.init, jax.random.key(0))
    for size in sorted(sizes):
      try:
        sized = jax.eval_shape(
          self.head.init, jax.random.key(0), self.image_spec(1, size)
        )
        reason = '' if sized == shapes else 'its parameters have other shapes'
      except ValueError as e:
        reason = str(e)
      if reason:
        raise ValueError(
          f'the model, which learns images of {self.image_size}, cannot read windows of '
          f'{size} ({reason}): change --config.task_options.window or '
          '--config.task_options.scales'
        )

  # --- Data ---

  @classmethod
  def class_names_of(cls, source: records.Source) -> tuple[str, ...]:
    return source.names.get(masks.FEATURE, ())

  @classmethod
  def make_metadata(
    cls, config: ml_collections.ConfigDict, source: records.Source
  ) -> dict[str, Any]:
    """Returns the classes of masks, and the names of those that are learned."""
    return _metadata(masks.classes_of(source))

  @classmethod
  def planned_metadata(
    cls, config: ml_collections.ConfigDict, num_classes: int | None
  ) -> dict[str, Any]:
    return _metadata(masks.numbered([str(i) for i in range(num_classes or 150)]))

  @no_autograph
  def example(
    self, record: records.Record, seed: 'tf.Tensor | None'
  ) -> dict[str, 'tf.Tensor']:
    """Returns an image and the classes of its pixels.

    Returns `image`, and `segmentation`, int32 [H, W], IGNORED for pixels that do not count.
    """
    shape = _shape(record, upright=False)
    classes = self._reader.read(record[masks.FEATURE], shape)
    pp, max_share = self.config.pp, self.options.max_class_share
    if seed is None:
      image = preprocess.prepare(record['image'], None, pp, upright=False)
      transform = geometry.whole(shape, self.image_size)
    else:
      sample = geometry.sample
      if max_share < 1:
        sample = functools.partial(
          geometry.sample_varied, classes=classes, max_share=max_share
        )
      image, transform = preprocess.decode_with_geometry(
        record['image'], seed, pp, sample=sample
      )
    # Rotation brings in zeros.
    segmentation = geometry.to_masks(classes[None] + 1, transform)[0] - 1
    return {
      'image': image,
      'segmentation': tf.ensure_shape(segmentation, self.image_size),
    }

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `image`, and `segmentation`, int32 [size, H, W]."""
    segmentation = jax.ShapeDtypeStruct((size, *self.image_size), jnp.int32)
    return {'image': self.image_spec(size), 'segmentation': segmentation}

  def parts(self, source: records.Source) -> list[input_pipeline.Part]:
    """Returns the images of each canvas, see `tight` of the options.

    Raises ValueError if the masks have other classes, numbers or colours than those that
    the model has learned.
    """
    if masks.classes_of(source) != self._mask_classes:
      raise ValueError(
        f"the masks have other classes, numbers or colours ('{masks.CLASSES}') than those "
        'of the training data: evaluate on masks of the same classes'
      )

    def example(
      record: records.Record, seed: 'tf.Tensor | None', canvas: _Canvas
    ) -> dict[str, 'tf.Tensor']:
      shape = _shape(record, upright=False)
      classes = self._reader.read(record[masks.FEATURE], shape)
      truth = canvases.pad(classes + 1, canvas.size) - 1
      return {
        **self._view_inputs(record, canvas, shape, upright=False),
        'size': shape,
        'truth': tf.ensure_shape(truth, canvas.size),
      }

    return self._by_canvas(input_pipeline.image_shapes(source), example)

  def parts_to_predict(self, source: records.Source) -> list[input_pipeline.Part]:
    """Returns parts of images without masks, with `image` as in `inputs`.

    They have the views, and `size`, and `canvas`, bool [*canvas], whose shape is the canvas.
    """

    def example(
      record: records.Record, seed: 'tf.Tensor | None', canvas: _Canvas
    ) -> dict[str, 'tf.Tensor']:
      shape = _shape(record, upright=True)
      inputs = self._view_inputs(record, canvas, shape, upright=True)
      if 'image' not in inputs:
        inputs |= self.inputs(record)
      return {**inputs, 'size': shape, 'canvas': tf.zeros(canvas.size, tf.bool)}

    shapes = input_pipeline.image_shapes(source, upright=True)
    return self._by_canvas(shapes, example)

  def _by_canvas(self, shapes: np.ndarray, example: Any) -> list[input_pipeline.Part]:
    """Groups images by canvases, the largest first; `example` takes a `canvas`."""
    sizes = canvases.round_up(shapes, self.options.tight)
    parts = []
    for size, numbers in canvases.by_size(sizes):
      view_sizes = []
      for view in self.views:
        view_sizes.append(view.canvas(view.counts(shapes[numbers])))
      canvas = _Canvas(size, tuple(view_sizes))
      on_canvas = no_autograph(functools.partial(example, canvas=canvas))
      parts.append(input_pipeline.Part(numbers, on_canvas, canvas.size))
    return parts

  def _view_inputs(
    self,
    record: records.Record,
    canvas: _Canvas,
    shape: 'tf.Tensor',
    upright: bool,
  ) -> dict[str, 'tf.Tensor']:
    """Returns images of the views, float32 [*canvas, C], and extents, int32 [2]."""
    extents = [view.extent(shape) for view in self.views]
    images = preprocess.at_sizes(record['image'], extents, self.config.pp, upright)
    inputs = {}
    for i, (image, size) in enumerate(zip(images, canvas.views)):
      padded = canvases.pad(image, size)
      shape_on_canvas = [*size, self.config.pp.channels]
      inputs[self._view_name(i)] = tf.ensure_shape(padded, shape_on_canvas)
      inputs[f'extent_{i}'] = extents[i]
    return inputs

  def _view_name(self, number: int) -> str:
    """Returns the name of the images of a view; 'image' if they are as in `inputs`."""
    view = self.views[number]
    is_input = view.is_whole and view.side == self.image_size
    return 'image' if is_input else f'view_{number}'

  def read_mask(self, encoded: bytes) -> np.ndarray:
    """Returns the class of each pixel of a mask, see masks.Reader.decode."""
    return self._reader.decode(encoded)

  # --- Training ---

  def init(self, rng: jax.Array) -> tuple[Any, Any]:
    return self.head.init(rng, jnp.zeros(self.image_spec(1).shape))

  def new_params(
    self,
    weights: Mapping[str, Any],
    shapes: Mapping[str, Any],
    class_names: Any,
  ) -> tuple[str, ...]:
    return self.head.new_params(weights, shapes)

  def check_weights(self, weights: Mapping[str, Any], params: Any) -> None:
    encoders.check_frozen(self.config, weights, params)

  def augment(self, batch: base.Batch, rng: jax.Array) -> base.Batch:
    return self.head.augment(batch)

  def loss(  # type: ignore[override]
    self,
    params: Any,
    extra: Any,
    batch: base.Batch,
    rng: jax.Array,
    step: jax.Array,
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    return self.head.loss(params, extra, batch, rng, step)

  def update_extra(self, extra: Any, params: Any, metrics: dict[str, Any]) -> Any:
    return self.head.update_extra(extra, metrics)

  # --- Evaluation and prediction ---

  def outputs(self, params: Any, extra: Any, batch: base.Batch) -> jax.Array:
    """Returns scores of the classes of whole images, float32 [B, h, w, C]."""
    outputs = self.head.outputs(params, extra, batch['image'])
    return self.head.scores(outputs, batch['image'].shape[1:3])

  def view_outputs(
    self, params: Any, extra: Any, batch: base.Batch
  ) -> list[class_maps.ViewOutputs]:
    """Computes the model on the views of images, see `parts`."""
    model = functools.partial(self.head.outputs, params, extra)
    results = []
    for i, view in enumerate(self.views):
      extent = batch[f'extent_{i}']
      images = batch[self._view_name(i)]
      outputs = views.outputs(model, images, extent, view, self.options.flips)
      for flip, x in enumerate(outputs):
        results.append(class_maps.ViewOutputs(x, extent, view, bool(flip)))
    return results

  def measure(self, params: Any, extra: Any, batch: base.Batch) -> base.WeightedSums:
    """Returns the mean cross-entropy of the pixels, without padding images."""
    logits = self.head.logits(self.outputs(params, extra, batch))
    is_real = batch['mask'][:, None, None] > 0
    segmentation = jnp.where(is_real, batch['segmentation'], masks.IGNORED)
    return {'loss': losses.cross_entropy(logits, segmentation)}

  @classmethod
  def evaluators(cls, config: ml_collections.ConfigDict) -> list[type]:
    return [scores_lib.Iou]

  def exported(
    self, params: Any, extra: Any, batch: base.Batch
  ) -> dict[str, jax.Array]:
    """Returns `scores`, float32 [B, H, W, C], the scores of the classes of each pixel."""
    scores = self.outputs(params, extra, batch)
    return {'scores': losses.resized(scores, batch['image'].shape[1:3])}

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return predicting.Predictor(self, params, extra, step)

  def draw_training(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    images = self._pixels(batch)
    if images is None:
      return {}
    return {
      'training_images': figures.side_by_side(images, [batch['segmentation']], self)
    }

  def drawn_outputs(self, params: Any, extra: Any, batch: base.Batch) -> jax.Array:
    """Returns the class of each pixel of whole images, int32 [B, H, W]."""
    scores = self.outputs(params, extra, batch)
    return losses.resized(scores, batch['image'].shape[1:3]).argmax(axis=-1)

  def draw_evaluation(
    self, batch: dict[str, Any], outputs: Any
  ) -> dict[str, np.ndarray]:
    """Draws test images with the true classes, the predicted ones, and the errors."""
    images = self._pixels(batch)
    if images is None:
      return {}
    maps = [np.asarray(batch['segmentation']), outputs]
    return {'segmentation': figures.side_by_side(images, maps, self)}

  def _pixels(self, batch: dict[str, Any]) -> np.ndarray | None:
    """Returns the images of a batch, uint8 [B, H, W, 3]; None if they have no colours."""
    images = false_colours.of_inputs(batch['image'], self.config.pp)
    return grids.to_pixels(images) if images.shape[-1] in (1, 3) else None

  def describe(self) -> str:
    return f'{console.pluralize(len(self.classes), "class")} of pixels'


def _at_any_size(
  config: ml_collections.ConfigDict, grid: tuple[int, int]
) -> ml_collections.ConfigDict:
  """Returns a config whose model interpolates its positions from a grid of patches."""
  config = config.copy_and_resolve_references()
  transformer = config.model.transformer
  kind = position_kinds.table_kind(position_kinds.kind_of(transformer))
  is_learned = kind in ('learned_1d', 'learned_2d')
  if is_learned and transformer.get('position_grid') is None:
    with config.unlocked(), config.ignore_type():
      transformer.position_grid = grid
  return config


def _check_keys(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if keys are set that have no effect on pixels."""
  if config.pp.resize is not None:
    remedy = '--config.pp.resize=None'
    if config.pp.match_pretrained:
      # None is the default, which the weights replace.
      remedy = (
        "--config.pp.match_pretrained=False, or a size in the config's argument, as in "
        'configs/vit.py:pretrained,DATA,518'
      )
    raise ValueError(
      f'resize={config.pp.resize} crops the centre of images in evaluation, and every '
      f"pixel counts with task='{config.task}': set {remedy}"
    )
  if config.pp.randaugment:
    raise ValueError(
      f'randaugment={config.pp.randaugment} moves the pixels of images, and not those of '
      'masks: use --config.pp.color_jitter, --config.pp.rotate or --config.pp.flip'
    )
  if config.task_options.max_class_share < 1 and config.pp.crop_area is None:
    raise ValueError(
      f'max_class_share={config.task_options.max_class_share} is for random crops: set '
      '--config.pp.crop_area, or leave out --config.task_options.max_class_share'
    )
  for key, default in (('loss', 'softmax'), ('label_smoothing', 0)):
    if config[key] != default:
      raise ValueError(
        f"{key}={config[key]} is for classes of images, not for task='{config.task}': set "
        f'--config.{key}={default}'
      )
  if config.class_weights == 'balanced':
    raise ValueError(
      "class_weights='balanced' counts the images of each class, and "
      f"task='{config.task}' has classes of pixels: set weights by name, as in "
      '--config.class_weights="{\'road\': 0.5}"'
    )


def _metadata(classes: tuple[masks.MaskClass, ...]) -> dict[str, Any]:
  """Returns METADATA of the classes of masks."""
  names = [x.name for x in masks.learned(classes)]
  return {'class_names': names, 'mask_classes': masks.to_json(classes)}


def _shape(record: records.Record, upright: bool) -> 'tf.Tensor':
  """Returns height and width of the image of a record, int32 [2]."""
  shape_of = images_lib.upright_shape_of if upright else images_lib.shape_of
  return tf.cast(shape_of(record['image']), tf.int32)
