"""Optional hooks of a task, with the defaults that vit_jax/tasks/base.py inherits.

An objective overrides the hooks that it has a use for: a codebook to learn before
training, pictures for TensorBoard, predictions with boxes, further figures.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from etils import epath
import flax.traverse_util
import jax
import ml_collections
import numpy as np

from vit_jax import checkpoint, input_pipeline
from vit_jax.data import records
from vit_jax.data.images import false_colours
from vit_jax.distributed import sharding
from vit_jax.evaluators import features
from vit_jax.figures import grids
from vit_jax.inference import predictor as predictor_lib
from vit_jax.learning import lora
from vit_jax.run import workdir as workdir_lib

Batch = input_pipeline.Batch


class Hooks:
  """The optional hooks.

  Attributes:
    LEARNED: names in METADATA of the values that `learn` returns.
    CANVASES: whether `example` reads `config.pp.sides`, and the predictor takes an
      `image_size`.
    MULTICHANNEL: whether images may be other than of 8-bit colour (`config.pp.range`).
    CLASS_WEIGHTS: whether `loss` reads `config.class_weights`.
    NEW_PARAMS: prefixes of the paths of parameters that do not come from
      `config.pretrained`; see also `new_params`.
    OWN_PARAMS: prefixes of the paths of parameters that only this objective uses:
      they are left out when a run starts from a run of this task, and when weights
      are converted.
    REPORT: class of the evaluator whose report `vit_jax evaluate --report` writes, a
      vit_jax.evaluators.base.Reporter; None for no report.
    FIGURES: further figures of `vit_jax visualize`, vit_jax.figures.gallery.Entry.
    DRAWS: whether the predictor's `report` can write a picture.
    PRINTS: whether `report` is of use without a picture.
    FLAGS: flags of `vit_jax predict` for this task, name -> arguments of argparse's
      `add_argument`. Those that are set are arguments of the predictor's `report`, or
      of `columns` for a table.
    IMAGELESS: names in FLAGS that `report` can work from without images.
    NEEDS: name in FLAGS -> names of which it needs one; 'images' are the image files.
  """

  LEARNED: ClassVar[tuple[str, ...]] = ()
  CANVASES: ClassVar[bool] = False
  MULTICHANNEL: ClassVar[bool] = False
  CLASS_WEIGHTS: ClassVar[bool] = False
  NEW_PARAMS: ClassVar[tuple[str, ...]] = ('head',)
  OWN_PARAMS: ClassVar[tuple[str, ...]] = ()
  REPORT: ClassVar[type | None] = None
  FIGURES: ClassVar[tuple] = ()
  DRAWS: ClassVar[bool] = False
  PRINTS: ClassVar[bool] = True
  FLAGS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
  IMAGELESS: ClassVar[tuple[str, ...]] = ()
  NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {}

  # Defined by vit_jax.tasks.base.Task.
  FEATURES: ClassVar[tuple[str, ...]]
  config: ml_collections.ConfigDict
  model: Any
  example: Callable[..., dict[str, Any]]
  outputs: Callable[..., Any]

  # --- Before the first update ---

  @classmethod
  def record_features(cls, config: ml_collections.ConfigDict) -> tuple[str, ...]:
    """Returns the names of the features that a record must have; by default FEATURES."""
    return cls.FEATURES

  @classmethod
  def class_names_of(cls, source: records.Source) -> tuple[str, ...]:
    """Returns the classes of a data.sources.Source; () if it has none."""
    return source.class_names

  @classmethod
  def needs_class_counts(cls, config: ml_collections.ConfigDict) -> bool:
    """Returns whether `loss` needs the number of training examples of each class.

    The metadata of a training then have `class_counts`, which are not stored.
    """
    return False

  @classmethod
  def learn(
    cls, config: ml_collections.ConfigDict, source: records.Source
  ) -> dict[str, Any]:
    """Returns the values of LEARNED, which take long to compute, for JSON.

    They are the same on all processes; a run that resumes reads them.
    """
    return {}

  @classmethod
  def planned_metadata(
    cls, config: ml_collections.ConfigDict, num_classes: int | None
  ) -> dict[str, Any]:
    """Returns metadata for a plan, which reads no data.

    The number of classes is None if it is unknown.
    """
    return {}

  def parts(self, source: records.Source) -> list[input_pipeline.Part]:
    """Divides a split for evaluation, if its examples have several shapes.

    All processes must call it and get the same parts; the functions of parts replace
    `example`.
    """
    return [input_pipeline.Part(None, self.example)]

  def begin(
    self,
    params: Any,
    extra: Any,
    source: records.Source,
    mesh: jax.sharding.Mesh,
    workdir: epath.PathLike,
    stop: Callable[[], bool],
  ) -> None:
    """Prepares a training before its first batch; all processes call it.

    Args:
      params: initial parameters.
      extra: initial extra state.
      source: the training data.
      mesh: the mesh.
      workdir: the folder of the run.
      stop: see `Task.evaluators`.
    """

  def describe(self) -> str:
    """Describes the objective at the start of a run; '' for no description."""
    return ''

  # --- Starting from weights ---

  def adapt_weights(self, weights: Any) -> Any:
    """Changes the weights.reading.Weights from which a run starts."""
    return weights

  def new_params(
    self,
    weights: Mapping[str, Any],
    shapes: Mapping[str, Any],
    class_names: Sequence[str] | None,
  ) -> Sequence[str]:
    """Returns what keeps its initial values when a run starts from weights.

    Args:
      weights: arrays or shapes of the weights by path.
      shapes: shapes of the parameters and the extra state by path.
      class_names: names of the classes of the weights, or None if unknown.

    Returns:
      Prefixes of paths; by default NEW_PARAMS.
    """
    return self.NEW_PARAMS

  def merged(
    self, stored: Any, shapes: Any, extra: Any, workdir: epath.PathLike
  ) -> Any:
    """Returns the model's parameters of a run.

    With adapters, the frozen parameters come from `config.pretrained`.

    Args:
      stored: parameters in the checkpoint of the run.
      shapes: shapes of all parameters.
      extra: shapes of the extra state.
      workdir: the folder of the run.
    """
    if not self.config.lora.rank:
      return stored
    lora.check_stored(stored, shapes, self.config)
    plain = lora.without_adapters(shapes)
    try:
      weights = checkpoint.pretrained_weights(self.config, self, plain, extra)
    except FileNotFoundError as e:
      raise FileNotFoundError(
        f'{e}; adapters (config.lora) need the weights that they were trained on in '
        'their place (config.pretrained)'
      ) from e
    frozen = lora.base(weights, shapes, self.config)
    workdir_lib.check_data(workdir, lora.fingerprint(frozen))
    return lora.merged(lora.whole(stored, frozen, shapes), self.config)

  def check_weights(self, weights: Mapping[str, Any], params: Any) -> None:
    """Raises ValueError if weights do not suffice, before a run is compiled.

    Args:
      weights: arrays by path that the run starts from; {} for none.
      params: shapes of the parameters.
    """

  # --- Before and after the loss ---

  def augment(self, batch: dict, rng: jax.Array) -> dict:
    """Changes a whole global batch on the devices, before it is split.

    B is `config.batch`, over all devices and hosts; `rng` is the step's key.
    """
    return batch

  def update_extra(self, extra: Any, params: Any, metrics: dict[str, Any]) -> Any:
    """Returns the extra state after an update; for `step` see `Task.loss`.

    Args:
      extra: the extra state before the update.
      params: the parameters after it.
      metrics: the quotients of the results of `loss`.
    """
    return extra

  # --- Features, for probes and tables of embeddings ---

  def intermediates(
    self, params: Any, extra: Any, batch: dict, capture: Any = False
  ) -> dict:
    """Computes what the model sows while it reads the whole, unchanged images.

    Returns tuples of arrays by path, such as 'features', which are [B, D]. `capture`
    is `capture_intermediates` of flax.linen.Module.apply.
    """
    return self._intermediates(params, batch, capture)

  def _intermediates(
    self,
    params: Any,
    batch: Batch,
    capture: Any,
    model: Any = None,
  ) -> dict[str, Any]:
    """Returns what a model, by default the task's, sows."""
    _, sown = (model or self.model).apply(
      {'params': params},
      batch['image'],
      train=False,
      mutable='intermediates',
      capture_intermediates=capture,
    )
    return flax.traverse_util.flatten_dict(sown.get('intermediates', {}), sep='/')

  def features(self, layer: str) -> Callable:
    """Returns a function (params, extra, batch) -> features, float32 [B, D].

    For the layer see vit_jax.evaluators.features.Extractor; 'patches' are
    vit_jax.evaluators.features.patches, [B, h, w, D]. ValueError if the layer does not
    exist.
    """
    if layer == features.PATCHES:
      return features.patches(self)
    mesh = sharding.make_mesh({'data': 1}, jax.local_devices()[:1])
    return features.Extractor(self, mesh, layer).compute

  # --- Pictures, for TensorBoard ---

  def draw_training(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """Draws rows of a training batch, after `augment`, as the model sees them.

    Args:
      batch: NumPy arrays [b, ...] of at most `config.log_images` rows.

    Returns:
      uint8 [height, width, 3] by name; {} if there are no images to draw.
    """
    return self._draw('training_images', batch)

  def drawn_outputs(self, params: Any, extra: Any, batch: dict) -> Any:
    """Computes what `draw_evaluation` draws; see `Task.outputs`."""
    return self.outputs(params, extra, batch)

  def draw_evaluation(self, batch: dict, outputs: Any) -> dict[str, np.ndarray]:
    """Draws the first test images with the predictions; see `draw_training`.

    `outputs` are the `drawn_outputs` as NumPy arrays. The pictures of a run's last
    evaluation are also written to the workdir, as NAME.png.
    """
    return self._draw('test_images', batch, outputs)

  def captions_of(self, batch: dict, outputs: Any = None) -> Sequence[grids.Caption]:
    """Returns the captions of images to draw; () for none.

    For `outputs` see `draw_evaluation`; None in training.
    """
    return ()

  def _draw(
    self, name: str, batch: Batch, outputs: Any = None
  ) -> dict[str, np.ndarray]:
    images = batch.get('image')
    if images is None or images.ndim != 4:
      return {}
    images = false_colours.of_inputs(images, self.config.pp)
    if images.shape[-1] not in (1, 3):
      return {}
    captions = self.captions_of(batch, outputs)
    return {name: grids.grid(grids.to_pixels(images), captions, most=grids.MOST)}

  # --- Figures of `vit_jax visualize` ---

  def labels_of(self, outputs: Any, labels: np.ndarray | None = None) -> list[str]:
    """Returns what is predicted for images, a few words for each, or [].

    Args:
      outputs: see `Task.outputs`, NumPy arrays [B, ...].
      labels: `label` of the images, or None if unknown.
    """
    return []

  def check_points(self, points: Any) -> np.ndarray:
    """Returns points in images, whose attention the task's figures draw.

    Points are (x, y), as shares of an image's width and height; ValueError if one lies
    outside of the image, or if the task's figures take none.
    """
    raise ValueError(
      f'points={points} are for the attention of a detector, and this model is not '
      'one: leave them out (--points)'
    )

  # --- Prediction and export ---

  def exported(self, params: Any, extra: Any, batch: dict) -> dict[str, jax.Array]:
    """Computes what an exported model returns, arrays [B, ...] by name.

    ValueError if models of this task cannot be exported, see
    vit_jax/inference/export.py.
    """
    return {'outputs': self.outputs(params, extra, batch)}

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    """Returns the object that `vit_jax.predict.load` returns."""
    return predictor_lib.Predictor(self, params, extra, step)

  def flags_to_predict(self) -> str:
    """Returns further flags of the `predict` command that a run ends with."""
    return '--out=picture.png' if self.DRAWS else ''
