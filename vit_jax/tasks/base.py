"""The interface of a task: what training needs from an objective.

A task is a subclass of `Task`, named `Task`, in its own module, with a line in
`vit_jax.run.config.TASKS`. Research code outside of this package sets the name of
its module, `config.task = 'my_package.my_task'`. Training, evaluation, prediction,
planning and conversion call the task; only its own module knows what a label is.

An objective defines, in the order in which a run calls them:

  FEATURES, METRICS  what it reads of a record, and what `measure` measures
  make_metadata      facts about the training data, such as class names
  __init__           builds the model
  example            turns a record into an example
  batch_spec         shapes of a training batch
  init               initial parameters and extra state
  loss               sum and weight over a part of a batch
  outputs            what the model computes from a batch
  measure            sums and weights of metrics over an evaluation batch
  evaluators         classes of its evaluators, if `measure` is not enough

vit_jax/tasks/parts.py has the optional hooks with their defaults: preparing,
starting from weights, drawing, exporting, probing and predicting.

Throughout, `params` are the parameters, `extra` is the second result of `init`, and
`batch` is a dict of arrays [B, ...].
"""

import abc
from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_collections

from vit_jax import preprocess
from vit_jax.data import records
from vit_jax.data.lazy import tf
from vit_jax.evaluators import means
from vit_jax.inference import predictor as predictor_lib
from vit_jax.run import config as run_config, metrics as metrics_lib
from vit_jax.tasks import parts

Predictor = predictor_lib.Predictor
Batch = parts.Batch
WeightedSum = tuple[jax.Array, jax.Array]  # float32 scalars: a sum, and its weight.
WeightedSums = dict[str, WeightedSum]  # By the name of the metric.


class Task(parts.Hooks, abc.ABC):
  """The base class of objectives.

  Attributes:
    FEATURES: names of the features that a record must have, see
      vit_jax.data.sources.open_split: 'image', 'label', 'objects/bbox', ... If they
      depend on the config, `record_features` returns them.
    METRICS: the metrics that `measure` returns, by name. A metric and the name of an
      evaluation, 'accuracy_test', can be `config.best_metric`.
    METADATA: names of the values that `make_metadata` and `learn` return; each is
      a JSON file in the workdir.
    Options: dataclass of `config.task_options`, see configs/task_options.py.
    config: the complete config of the run.
    metadata: result of `make_metadata`.
    options: `config.task_options`, complete.
    image_sizes: (height, width) of the images of training batches, the largest
      last, which is `image_size`; the update is compiled for each.
    model: the Flax module, used by `init`, `outputs` and plans.
  """

  FEATURES: ClassVar[tuple[str, ...]] = ('image',)
  METRICS: ClassVar[Mapping[str, metrics_lib.Metric]] = {'loss': metrics_lib.LOSS}
  METADATA: ClassVar[tuple[str, ...]] = ()

  model: Any = None

  @dataclasses.dataclass
  class Options:
    """The keys of `config.task_options`: none."""

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    """Builds the model and checks the options; computes nothing."""
    self.config = config
    self.metadata = metadata
    self.options = run_config.options_of_task(config)
    if config.pp.sides and not self.CANVASES:
      raise ValueError(
        f"pp.sides={config.pp.sides}: the task '{config.task}' resizes images to "
        '`pp.crop`; leave out --config.pp.sides'
      )
    if config.pp.range is not None and not self.MULTICHANNEL:
      raise ValueError(
        f"pp.range={config.pp.range}: the task '{config.task}' is for images of 8-bit "
        'colour; leave out --config.pp.range'
      )
    if config.class_weights is not None and not self.CLASS_WEIGHTS:
      raise ValueError(
        f"class_weights is set, and the task '{config.task}' does not weight classes: leave "
        'out --config.class_weights'
      )
    self.image_sizes = preprocess.image_sizes(config.pp)
    self.image_size = self.image_sizes[-1]

  # --- Data ---

  @classmethod
  def make_metadata(
    cls, config: ml_collections.ConfigDict, source: records.Source
  ) -> dict[str, Any]:
    """Returns metadata of the training split that the run stores, for JSON."""
    return {}

  @property
  def class_names(self) -> tuple[str, ...]:
    """Names of the classes in the order of the logits; () if there are none."""
    return tuple(self.metadata.get('class_names', ()))

  @property
  def output_names(self) -> tuple[str, ...]:
    """What the columns of an exported output stand for; by default the classes."""
    return self.class_names

  def example(self, record: dict, seed: 'tf.Tensor | None') -> dict:
    """Turns a record into an example, a dict of tensors, as a TensorFlow graph.

    Their shapes are static. Evaluation adds `mask`, float32, which is 0 for
    rows that pad the last batch.

    Args:
      record: the features in FEATURES by name (images encoded), and `index`,
        int64, the number of the record in its split.
      seed: int64 [2], determines all random numbers; None in evaluation.
    """
    return self.inputs(record, seed)

  def inputs(self, record: dict, seed: 'tf.Tensor | None' = None) -> dict:
    """Returns the part of `example` that prediction needs."""
    return {'image': preprocess.prepare(record['image'], seed, self.config.pp)}

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and types of a training batch of `size` rows."""
    return self.input_spec(batch=size)

  def input_spec(
    self, image_size: tuple[int, int] | None = None, batch: Any = 1
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and types of a batch of `inputs`, which `outputs` reads.

    Images are (height, width) pixels, by default as in evaluation; `batch`,
    the number of rows, may be a symbol of jax.export.
    """
    return {'image': self.image_spec(batch, image_size)}

  def image_spec(
    self, size: Any, image_size: tuple[int, int] | None = None
  ) -> jax.ShapeDtypeStruct:
    """Returns shape and type of a batch of images."""
    height, width = image_size or self.image_size
    shape = (size, height, width, self.config.pp.channels)
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  # --- Training ---

  def init(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns (parameters, extra) for a random key.

    `extra` is a tree of arrays in the state in addition to the parameters, such as
    a teacher, a codebook or statistics; {} for most tasks. It is saved, restored
    and sharded like the parameters.
    """
    zeros = jnp.zeros(self.image_spec(1).shape)
    return self.model.init(rng, zeros, train=False)['params'], {}

  @abc.abstractmethod
  def loss(
    self, params: Any, extra: Any, batch: dict, rng: jax.Array
  ) -> tuple[WeightedSum, WeightedSums]:
    """Computes the loss of a batch or of a part of it.

    `rng` is for dropout. A method with a further argument `step` gets the number of
    updates before this one, int32 scalar, for its own schedules.

    Returns:
      ((sum, weight), metrics). The loss is the sum divided by the weight, both
      float32 scalars, after adding up all parts. The weight is the number of
      examples, boxes or masked patches; it must not depend on the parameters.
      `metrics` has more such pairs by name, whose quotients are logged as
      `train_<name>`; quotients that are not scalars are only passed to
      `update_extra`.
    """

  # --- Evaluation ---

  def outputs(self, params: Any, extra: Any, batch: dict) -> Any:
    """Computes the model's outputs for a batch, a tree of arrays [B, ...]."""
    return self.model.apply({'params': params}, batch['image'], train=False)

  @abc.abstractmethod
  def measure(self, params: Any, extra: Any, batch: dict) -> dict:
    """Returns {metric: (sum, weight)} over an evaluation batch.

    A row whose `mask` is 0 must not count.
    """

  @classmethod
  def evaluators(cls, config: ml_collections.ConfigDict) -> list[type]:
    """Returns the classes of the evaluators of each evaluation.

    vit_jax/evaluators/base.py describes them. `config.evaluators` adds further ones.
    """
    return [means.Means]


def check_is_pooled(model: ml_collections.ConfigDict) -> None:
  """Raises ValueError if a model, `config.model`, has outputs for every token."""
  classifier = model.get('classifier', '')
  if classifier.endswith('unpooled'):
    raise ValueError(
      f"classifier='{classifier}' has outputs for every token, not one row per image: "
      "use 'token' or 'gap' (config.model.classifier)"
    )
