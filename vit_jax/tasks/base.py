"""The contract of a task: all that the commands know of an objective.

A task is a subclass of `Task`, named `Task`, in a module of its own, and a line in
`vit_jax.run.config.TASKS`; research code outside of this package names its module,
`config.task = 'my_package.my_task'`. Who trains, evaluates, predicts, plans or
converts asks the task; nothing outside its file knows what a label is.

In the order in which a run asks:

  make_metadata   what the training data say and all later use needs (class names)
  Task(config, metadata)
  example         an example of a record of the data, for training and evaluation
  batch_spec      shapes of a batch
  init            parameters, and what else the state carries
  augment         mixes a whole batch, on the devices
  loss            sum and weight over a part of a batch
  update_extra    the new extra of the state after an update
  evaluators      what measures, on which splits
  finish          what to write and say at the end of a run
  predictor       what `vit_jax.predict` loads
"""

import abc
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import ClassVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import preprocess
from vit_jax.configs import rules
from vit_jax.evaluators import means
from vit_jax.run import config as run_config


class Task(abc.ABC):
  """An objective; subclasses say how it differs.

  Attributes:
    FEATURES: names of the features that a record must have, see
      vit_jax.data.sources.open_split: 'image', 'label', 'objects/bbox', ...
    OPTIONS: what `config.task_options` may hold, with the defaults, whose types
      the values must have.
    OPTION_RULES: what else their values must be, by name, in the words of
      vit_jax/configs/rules.py: {'mixup': rules.number(0)}.
    METRICS: names of what the evaluators measure. With the name of an evaluation
      behind, 'accuracy_test', one can be `config.best_metric`.
    LOW: those of METRICS of which less is better.
    METADATA: names of what `make_metadata` returns; each is a JSON file of the
      workdir.
    METADATA_RULES: what they must be, by name, likewise.
    NEW_PARAMS: beginnings of the paths of parameters that start anew where the
      others come from `config.pretrained`.
    OWN_PARAMS: beginnings of the paths of parameters that only this objective can
      use: runs that start from one of this task, and converted weights, do not
      get them.
    DRAWS: whether that is a picture, which the predictor's `report` writes.
    NEXT: what `python -m vit_jax.predict` tells of an image, in words.
    config: the config of the run, complete.
    metadata: what `make_metadata` returned.
    options: `config.task_options`, complete.
    model: the Flax module. `init`, `outputs` and `loss` of this class use it, and
      so do plans.
  """

  FEATURES: ClassVar[tuple[str, ...]] = ('image',)
  OPTIONS: ClassVar[dict[str, Any]] = {}
  OPTION_RULES: ClassVar[dict[str, rules.Rule]] = {}
  METRICS: ClassVar[tuple[str, ...]] = ('loss',)
  LOW: ClassVar[tuple[str, ...]] = ('loss',)
  METADATA: ClassVar[tuple[str, ...]] = ()
  METADATA_RULES: ClassVar[dict[str, rules.Rule]] = {}
  NEW_PARAMS: ClassVar[tuple[str, ...]] = ('head/',)
  OWN_PARAMS: ClassVar[tuple[str, ...]] = ()
  DRAWS: ClassVar[bool] = False
  NEXT: ClassVar[str] = 'what the model says of an image'

  model: Any = None

  def __init__(self, config, metadata: dict[str, Any]):
    """Builds the model and checks the options; computes nothing.

    Raises:
      ValueError: on options that are not right, and a model that does not fit.
    """
    self.config = config
    self.metadata = metadata
    self.options = run_config.task_options(config)
    self.image_size = preprocess.crop_size(config.pp)

  # --- Data ---

  @classmethod
  def make_metadata(cls, config, source) -> dict[str, Any]:
    """Returns what the run stores of its data: a dict of what JSON can hold.

    Args:
      config: of the run.
      source: the training split, see vit_jax.data.sources.Source.
    """
    del config, source
    return {}

  @classmethod
  def planned_metadata(cls, config, num_classes: int | None) -> dict[str, Any]:
    """Returns metadata for a plan, which sees no data.

    Args:
      config: of the run.
      num_classes: number of classes of the data, where it is known.
    """
    del config, num_classes
    return {}

  @property
  def class_names(self) -> tuple[str, ...]:
    """Names of the classes in the order of the logits; () where there are none."""
    return tuple(self.metadata.get('class_names', ()))

  def example(self, record: dict, seed) -> dict:
    """Makes an example of a record, as a TensorFlow graph.

    Args:
      record: the features of FEATURES by name (images encoded), and `index`,
        int64, the number of the record in its split.
      seed: int64 [2], from which all that is random follows; None in evaluation.

    Returns:
      A dict of tensors of fixed shapes. Evaluation adds `mask`, float32, which is
      0 for the rows that only fill the last batch up.
    """
    return self.inputs(record, seed)

  def inputs(self, record: dict, seed=None) -> dict:
    """The part of `example` that needs nothing but the image: for prediction."""
    return {'image': preprocess.prepare(record['image'], seed, self.config.pp)}

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and types of a training batch of so many rows."""
    return {'image': self.image_spec(size)}

  def image_spec(self, size: int) -> jax.ShapeDtypeStruct:
    """Returns shape and type of a batch of images."""
    shape = (size, *self.image_size, self.config.pp.channels)
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  # --- Training ---

  def init(self, rng) -> tuple[Any, Any]:
    """Returns (parameters, extra) for a random key.

    `extra` is a tree of arrays that the state carries beside the parameters: a
    teacher, a codebook, statistics; {} for most tasks. It is saved, restored and
    sharded like the parameters.
    """
    image = self.image_spec(1)
    zeros = jnp.zeros(image.shape, image.dtype)
    return self.model.init(rng, zeros, train=False)['params'], {}

  def augment(self, batch: dict, rng) -> dict:
    """Changes a whole global batch on the devices, before it is taken apart.

    Args:
      batch: arrays [B, ...]; B is `config.batch`, over all devices and hosts.
      rng: random key of the step.
    """
    del rng
    return batch

  @abc.abstractmethod
  def loss(self, params, extra, batch: dict, rng):
    """Computes the loss of a batch, or of a part of it.

    Args:
      params: the parameters.
      extra: see `init`.
      batch: arrays [b, ...] of what `example` returns.
      rng: random key, for dropout.

    Returns:
      ((sum, weight), metrics): two float32 scalars, the loss summed and what it
      is to be divided by once all parts are added up (the number of examples, of
      boxes, of masked patches; it must not depend on the parameters); and more
      such pairs by name. The quotients are logged as `train_<name>`; those that
      are no scalars are for `update_extra` alone.
    """

  def update_extra(self, extra, params, metrics: dict):
    """Returns the extra of the next state.

    Args:
      extra: that of the state before the update.
      params: the parameters after it.
      metrics: the quotients of what `loss` returned.
    """
    del params, metrics
    return extra

  # --- Evaluation and prediction ---

  def outputs(self, params, extra, batch: dict):
    """Computes what the model says of a batch; a tree of arrays [B, ...]."""
    del extra
    return self.model.apply({'params': params}, batch['image'], train=False)

  @abc.abstractmethod
  def measure(self, params, extra, batch: dict) -> dict:
    """Returns {name: (sum, weight)} over a batch of evaluation, for each METRICS.

    Args:
      params: the parameters.
      extra: see `init`.
      batch: arrays [B, ...]; a row whose `mask` is 0 must not count.
    """

  def evaluators(self, mesh, split: str, open_split: Callable) -> list:
    """Returns what is to be measured on a split.

    Args:
      mesh: the mesh.
      split: as `config.evals` names it.
      open_split: function from a split to its source. An evaluator may open
        others too, the training data for a probe.

    Returns:
      Objects with `run(params, extra, stop)`, which returns numbers by their
      plain names, or None if `stop()` became true; the loop adds the name of the
      evaluation.
    """
    return [means.Means(self, mesh, open_split(split))]

  def predictor(self, params, extra, step: int) -> 'Predictor':
    """Returns the object that `vit_jax.predict.load` returns."""
    return Predictor(self, params, extra, step)

  # --- Words ---

  def describe(self) -> str:
    """Says what is learned, at the start of a run; '' where nothing is to say."""
    return ''

  def finish(self, source, state, mesh) -> 'Ending':
    """Returns what belongs to the end of a run; all processes call it.

    Args:
      source: the first of the splits that are tested on.
      state: the TrainState at the end.
      mesh: the mesh.
    """
    del source, state, mesh
    return Ending()


class Ending(NamedTuple):
  """What a run ends with.

  Attributes:
    lines: to print.
    pictures: uint8 [height, width, 3] by name; each is written as NAME.png into
      the workdir, and for TensorBoard.
  """

  lines: Sequence[str] = ()
  pictures: Mapping[str, np.ndarray] = {}


class Predictor:
  """A trained model, for images of any kind.

  Attributes:
    task: the objective.
    params: the parameters (their average, where the run kept one).
    extra: see Task.init.
    step: the step of the checkpoint.
    workdir: the folder of the run, '' where nobody said it.
    config: the config of the run.
    metadata: see Task.make_metadata.
    class_names: names of the classes, in the order of the logits.
  """

  BATCH = 32  # Images at a time.

  def __init__(self, task: Task, params, extra, step: int):
    self.task = task
    self.params = params
    self.extra = extra
    self.step = step
    self.workdir = ''
    self.config = task.config
    self.metadata = task.metadata
    self.class_names = task.class_names
    self._outputs = jax.jit(task.outputs)

  def outputs(self, images: Sequence[Any]):
    """Computes what the model says of images.

    Args:
      images: a list (or an array [n, height, width, channels]) of images of any
        size: paths, PIL images, or arrays uint8 [height, width(, channels)].

    Returns:
      What the task's `outputs` returns, float32 arrays [n, ...].

    Raises:
      FileNotFoundError, ValueError: if an image does not exist or cannot be read,
        or if an output is not finite.
    """
    return self.run(images)[1]

  def run(self, images: Sequence[Any]) -> tuple[dict, Any]:
    """Returns (inputs, outputs) of images, see `outputs`: arrays [n, ...]."""
    if isinstance(images, (str, bytes)):
      raise ValueError(
        f'images={images!r:.80} must be a list: give [image], also for one'
      )
    found = []
    # One shape for all batches: compiled once.
    size = 1 if len(images) == 1 else self.BATCH
    for start in range(0, len(images), size):
      rows = [
        preprocess.from_user(
          image,
          lambda encoded, i=start + i: self._inputs(encoded, i),
          self.config.max_image_pixels,
        )
        for i, image in enumerate(images[start : start + size])
      ]
      batch = {
        key: _padded([row[key] for row in rows], size) for key in rows[0]
      }
      outputs = self._outputs(self.params, self.extra, batch)
      count = len(rows)
      found.append(
        jax.tree.map(lambda x, n=count: np.asarray(x)[:n], (batch, outputs))
      )
      self._check_finite(found[-1][1], images[start : start + count], start)
    if not found:
      return self._none()
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

  def _check_finite(self, outputs, images, start):
    """Refuses outputs [n, ...] of images that are no numbers."""
    for i, image in enumerate(images):
      if not all(np.isfinite(x[i]).all() for x in jax.tree.leaves(outputs)):
        name = image if isinstance(image, str) else f'image {start + i}'
        raise ValueError(
          f"what the model of step {self.step} in '{self.workdir}' computes of "
          f"'{name}' is not finite: the training diverged, or its checkpoint is "
          'damaged; take another one (--step=N)'
        )

  def _inputs(self, encoded, index):
    record = {'image': encoded, 'index': np.int64(index)}
    return {k: np.asarray(v) for k, v in self.task.inputs(record).items()}

  def _none(self):
    """Inputs and outputs of no image."""
    spec = self.task.batch_spec(1)
    shapes = jax.eval_shape(self._outputs, self.params, self.extra, spec)
    return jax.tree.map(
      lambda x: np.zeros((0, *x.shape[1:]), x.dtype), (spec, shapes)
    )

  def predict(self, images: Sequence[Any]) -> list:
    """Returns what is to be said of each image; here the outputs themselves."""
    outputs = self.outputs(images)
    return [
      jax.tree.map(lambda x, i=i: x[i], outputs) for i in range(len(images))
    ]

  def report(self, images: Sequence[str], args) -> list[str]:
    """Returns the lines that `python -m vit_jax.predict` prints.

    Args:
      images: paths.
      args: `top`, number of classes to show; `out`, path for a picture, or None.
    """
    del args
    return [
      f'{image}\n  {result}'
      for image, result in zip(images, self.predict(images))
    ]


def _padded(rows, size):
  """Stacks rows, and fills up with zeros to `size` of them."""
  batch = np.zeros((size, *rows[0].shape), rows[0].dtype)
  batch[: len(rows)] = rows
  return batch
