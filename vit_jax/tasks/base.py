"""The interface of a task: everything that the commands need of an objective.

A task is a subclass of `Task`, named `Task`, in its own module, with a line in
`vit_jax.run.config.TASKS`. Research code outside of this package gives its
module's name, `config.task = 'my_package.my_task'`. Training, evaluation,
prediction, planning and conversion call the task; no code outside of its file
knows what a label is.

Methods, in the order in which a run calls them:

  metrics         names of what the evaluators measure
  class_names_of  names of the classes of data
  make_metadata   metadata of the training data, such as class names
  learn           metadata that take long to compute, such as a palette
  Task(config, metadata)
  example         turns a record of the data into an example
  parts           examples of a split that share a shape, in evaluation
  input_spec      shapes of what inference reads
  batch_spec      shapes of a training batch
  init            initial parameters and extra state
  begin           what a training needs before its first batch
  augment         changes a whole batch on the devices, for example mixes it
  draw_training   pictures of a training batch
  loss            sum and weight over a part of a batch
  update_extra    extra state after an update
  evaluators      evaluators of a split
  exported        what an exported model returns
  intermediates   features of images, for probes
  drawn_outputs   what draw_evaluation draws, computed on the devices
  draw_evaluation pictures of test images and predictions
  predictor       the object that `vit_jax.predict` loads
  flags_to_predict  flags of the command that the end of a run suggests

In all of them, `params` are the parameters, `extra` is the tree that `init`
returns beside them, and `batch` is a dict of arrays [B, ...].
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, ClassVar

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import input_pipeline, preprocess
from vit_jax.distributed import sharding
from vit_jax.evaluators import features, means
from vit_jax.figures import grids
from vit_jax.inference import predictor as predictor_lib
from vit_jax.run import config as run_config

Predictor = predictor_lib.Predictor


class Task(abc.ABC):
  """The base class of objectives.

  Attributes:
    FEATURES: names of the features that a record must have, see
      vit_jax.data.sources.open_split: 'image', 'label', 'objects/bbox', ...
    Options: dataclass of `config.task_options`, see configs/schema.py.
    METRICS: what `metrics` returns, unless it depends on the config.
    LOW: those metrics whose lowest value is the best.
    METADATA: names of the values that `make_metadata` and `learn` return; each is
      a JSON file in the workdir.
    LEARNED: names of those values that `learn` returns.
    NEW_PARAMS: prefixes of the paths of parameters that do not come from
      `config.pretrained`; see also `new_params`.
    OWN_PARAMS: prefixes of the paths of parameters that only this objective
      uses: they are left out when a run starts from a run of this task, and
      when weights are converted.
    DRAWS: whether the predictor's `report` can write a picture.
    PRINTS: whether `report` is of use without a picture.
    CANVASES: whether `example` reads `config.pp.sides`.
    FIGURES: further figures, each a vit_jax.figures.gallery.Entry.
    config: the complete config of the run.
    metadata: result of `make_metadata`.
    options: `config.task_options`, complete.
    image_sizes: (height, width) of the images of training batches, the largest
      last, which is `image_size`; the update is compiled for each.
    model: the Flax module, used by `init`, `outputs` and `loss` of this class,
      and by plans.
  """

  FEATURES: ClassVar[tuple[str, ...]] = ('image',)
  METRICS: ClassVar[tuple[str, ...]] = ('loss',)
  LOW: ClassVar[tuple[str, ...]] = ('loss',)
  METADATA: ClassVar[tuple[str, ...]] = ()
  LEARNED: ClassVar[tuple[str, ...]] = ()
  NEW_PARAMS: ClassVar[tuple[str, ...]] = ('head/',)
  OWN_PARAMS: ClassVar[tuple[str, ...]] = ()
  DRAWS: ClassVar[bool] = False
  PRINTS: ClassVar[bool] = True
  CANVASES: ClassVar[bool] = False
  FIGURES: ClassVar[tuple] = ()

  model: Any = None

  @dataclasses.dataclass
  class Options:
    pass

  def __init__(self, config, metadata: dict[str, Any]):
    """Builds the model and checks the options; computes nothing."""
    self.config = config
    self.metadata = metadata
    self.options = run_config.task_options(config)
    if config.pp.sides and not self.CANVASES:
      raise ValueError(
        f"pp.sides={config.pp.sides}: the task '{config.task}' resizes images to "
        '`pp.crop`; leave out --config.pp.sides'
      )
    self.image_sizes = preprocess.image_sizes(config.pp)
    self.image_size = self.image_sizes[-1]

  @classmethod
  def metrics(cls, config) -> Sequence[str]:
    """Returns the names of the metrics of the evaluators of a run.

    A metric and the name of an evaluation, 'accuracy_test', can be
    `config.best_metric`.
    """
    return cls.METRICS

  # --- Data ---

  @classmethod
  def class_names_of(cls, source) -> tuple[str, ...]:
    """Returns the classes of a data.sources.Source; () if it has none."""
    return source.class_names

  @classmethod
  def make_metadata(cls, config, source) -> dict[str, Any]:
    """Returns metadata of the training split that the run stores, for JSON."""
    return {}

  @classmethod
  def learn(cls, config, source) -> dict[str, Any]:
    """Returns the values of LEARNED, which take long to compute, for JSON.

    They are the same on all processes; a run that resumes reads them.
    """
    return {}

  @classmethod
  def planned_metadata(cls, config, num_classes: int | None) -> dict[str, Any]:
    """Returns metadata for a plan, which reads no data.

    The number of classes is None if it is unknown.
    """
    return {}

  @property
  def class_names(self) -> tuple[str, ...]:
    """Names of the classes in the order of the logits; () if there are none."""
    return tuple(self.metadata.get('class_names', ()))

  def example(self, record: dict, seed) -> dict:
    """Turns a record into an example, a dict of tensors, as a TensorFlow graph.

    Their shapes are static. Evaluation adds `mask`, float32, which is 0 for
    rows that pad the last batch.

    Args:
      record: the features in FEATURES by name (images encoded), and `index`,
        int64, the number of the record in its split.
      seed: int64 [2], determines all random numbers; None in evaluation.
    """
    return self.inputs(record, seed)

  def parts(self, source) -> list[input_pipeline.Part]:
    """Divides a split for evaluation, if its examples have several shapes.

    All processes must call it, and get the same parts, or pairs of their first
    two fields; the functions of parts take the place of `example`.
    """
    return [input_pipeline.Part(None, self.example)]

  def inputs(self, record: dict, seed=None) -> dict:
    """Returns the part of `example` that prediction needs."""
    return {'image': preprocess.prepare(record['image'], seed, self.config.pp)}

  def input_spec(
    self, image_size: tuple[int, int] | None = None, batch=1
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and types of a batch of `inputs`, what `outputs` reads.

    Images are (height, width) pixels, by default as in evaluation; `batch`,
    the number of rows, may be a symbol of jax.export.
    """
    return {'image': self.image_spec(batch, image_size)}

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and types of a training batch of `size` rows."""
    return self.input_spec(batch=size)

  def image_spec(
    self, size: int, image_size: tuple[int, int] | None = None
  ) -> jax.ShapeDtypeStruct:
    """Returns shape and type of a batch of images."""
    height, width = image_size or self.image_size
    shape = (size, height, width, self.config.pp.channels)
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  # --- Training ---

  def init(self, rng) -> tuple[Any, Any]:
    """Returns (parameters, extra) for a random key.

    `extra` is a tree of arrays in the state beside the parameters, such as a
    teacher, a codebook or statistics; {} for most tasks. It is saved, restored
    and sharded like the parameters.
    """
    zeros = jnp.zeros(self.image_spec(1).shape)
    return self.model.init(rng, zeros, train=False)['params'], {}

  def adapt_weights(self, weights):
    """Changes the weights.reading.Weights from which a run starts."""
    return weights

  def new_params(
    self, have: dict, want: dict, class_names: Sequence[str] | None
  ) -> Sequence[str]:
    """Returns what keeps its initial values when a run starts from weights.

    Args:
      have: arrays or shapes of the weights by path.
      want: shapes of the parameters and the extra state by path.
      class_names: names of the classes of the weights, or None if unknown.

    Returns:
      Prefixes of paths; by default NEW_PARAMS.
    """
    return self.NEW_PARAMS

  def check_weights(self, weights: dict, params):
    """Raises ValueError if weights do not suffice, before a run is compiled.

    Takes the arrays by path that the run starts from, {} for none, and the
    shapes of the parameters.
    """
    del weights, params

  def augment(self, batch: dict, rng) -> dict:
    """Changes a whole global batch on the devices, before it is split.

    B is `config.batch`, over all devices and hosts; `rng` is the step's key.
    """
    return batch

  def begin(self, params, extra, source, mesh, workdir, stop):
    """Prepares a training, before its first batch: all processes call it.

    Takes the state to begin with, the training data, the folder of the run, and a
    function that tells whether a signal asks the run to stop; see `evaluators`.
    """
    del params, extra, source, mesh, workdir, stop

  @abc.abstractmethod
  def loss(self, params, extra, batch: dict, rng):
    """Computes the loss of a batch or of a part of it.

    The random key `rng` is for dropout. A method with a further argument `step`
    is given the number of updates before this one, int32 scalar, for schedules
    of its own.

    Returns:
      ((sum, weight), metrics). The loss is the sum divided by the weight, both
      float32 scalars, after adding up all parts. The weight is the number of
      examples, boxes or masked patches; it must not depend on the parameters.
      `metrics` has more such pairs by name, whose quotients are logged as
      `train_<name>`; quotients that are not scalars are only passed to
      `update_extra`.
    """

  def update_extra(self, extra, params, metrics: dict):
    """Returns the extra state after an update; `step` is as in `loss`.

    Takes the extra state before the update, the parameters after it, and the
    quotients of the results of `loss`.
    """
    return extra

  # --- Evaluation and prediction ---

  def outputs(self, params, extra, batch: dict):
    """Computes the model's outputs for a batch, a tree of arrays [B, ...]."""
    return self.model.apply({'params': params}, batch['image'], train=False)

  def exported(self, params, extra, batch: dict) -> dict[str, jax.Array]:
    """Computes what an exported model returns, arrays [B, ...] by name.

    ValueError if models of this task cannot be exported, see
    vit_jax/inference/export.py.
    """
    return {'outputs': self.outputs(params, extra, batch)}

  def intermediates(self, params, extra, batch: dict, capture=False) -> dict:
    """Computes what lies inside of the model, for probes.

    Returns what the model sows while it reads the whole, unchanged images:
    tuples of arrays by path, such as 'features', which are [B, D]. `capture`
    is `capture_intermediates` of flax.linen.Module.apply.
    """
    return self._intermediates(params, batch, capture)

  def _intermediates(self, params, batch, capture, model=None, **kwargs):
    """Returns what a model sows; `kwargs` are further ones of its `apply`."""
    _, seen = (model or self.model).apply(
      {'params': params},
      batch['image'],
      train=False,
      mutable='intermediates',
      capture_intermediates=capture,
      **kwargs,
    )
    seen = seen.get('intermediates', {})
    return flax.traverse_util.flatten_dict(seen, sep='/')

  def features(self, layer: str) -> Callable:
    """Returns a function (params, extra, batch) -> features, float32 [B, D].

    For the layer see vit_jax.evaluators.features.Extractor; ValueError if
    there is no such one.
    """
    mesh = sharding.make_mesh({'data': 1}, jax.local_devices()[:1])
    return features.Extractor(self, mesh, layer).compute

  @abc.abstractmethod
  def measure(self, params, extra, batch: dict) -> dict:
    """Returns {metric: (sum, weight)} over an evaluation batch.

    A row whose `mask` is 0 must not count.
    """

  def evaluators(self, mesh, split: str, open_split: Callable) -> list:
    """Returns the evaluators of a split.

    Args:
      mesh: the mesh.
      split: name of the split in `config.evals`.
      open_split: function (split, further features, data set) -> source; without
        a data set, that of the evaluation, with the run's classes; another one
        has its own classes. An evaluator may open further splits, such as the
        training data for a probe.

    Returns:
      Objects with `run(params, extra, stop)`, which returns metrics by name.
      `stop` is called between batches; once it returns True, `run` raises
      vit_jax.inference.engine.Stopped. The loop adds the name of the evaluation.
      An evaluator with the attribute `final = True` runs after the last update
      alone. The attribute `metrics` has the names of its metrics, if the data
      decide which of METRICS there are.
    """
    return [means.Means(self, mesh, open_split(split))]

  # --- Pictures, for TensorBoard ---

  def draw_training(self, batch: dict) -> dict[str, np.ndarray]:
    """Draws rows of a training batch, after `augment`, as the model sees them.

    The batch has NumPy arrays [b, ...]; b is at most `config.log_images`.
    Returns uint8 [height, width, 3] by name; {} if there are no images to
    draw.
    """
    return self._draw('training_images', batch)

  def drawn_outputs(self, params, extra, batch: dict):
    """Computes what `draw_evaluation` draws; see `outputs`."""
    return self.outputs(params, extra, batch)

  def draw_evaluation(self, batch: dict, outputs) -> dict[str, np.ndarray]:
    """Draws the first `config.log_images` test images with the predictions.

    The pictures of a run's last evaluation are also written to the workdir, as
    NAME.png. Takes NumPy arrays [b, ...] of a batch and of its
    `drawn_outputs`; returns pictures as `draw_training`.
    """
    return self._draw('test_images', batch, outputs)

  def captions_of(self, batch: dict, outputs=None) -> Sequence[grids.Caption]:
    """Returns the captions of images to draw; () for none.

    For `outputs` see `draw_evaluation`; None in training.
    """
    return ()

  def _draw(self, name, batch, outputs=None):
    images = batch.get('image')
    if images is None or images.ndim != 4 or images.shape[-1] not in (1, 3):
      return {}
    pixels, words = grids.to_pixels(images), self.captions_of(batch, outputs)
    return {name: grids.grid(pixels, words, most=grids.MOST)}

  # --- Figures, for `vit_jax.figures.visualize` ---

  def labels_of(self, outputs, labels=None) -> list[str]:
    """Returns what is predicted for images, a few words for each, or [].

    Takes `outputs`, NumPy arrays [B, ...], and the images' `label` in a batch
    [B, ...], or None if unknown.
    """
    return []

  def check_points(self, points) -> np.ndarray:
    """Returns points in images, whose attention the task's figures draw.

    Points are (x, y), as shares of an image's width and height; ValueError if
    one lies outside of the image, or if the task's figures take none.
    """
    raise ValueError(
      f'points={points} are for the attention of a detector, and this model is '
      'none: leave them out (--points)'
    )

  # --- Prediction ---

  def predictor(self, params, extra, step: int) -> predictor_lib.Predictor:
    """Returns the object that `vit_jax.predict.load` returns."""
    return predictor_lib.Predictor(self, params, extra, step)

  def flags_to_predict(self) -> str:
    """Returns the flags that the command which a run suggests at its end has."""
    return '--out=picture.png' if self.DRAWS else ''

  # --- Words ---

  def describe(self) -> str:
    """Describes the objective at the start of a run; '' for no description."""
    return ''
