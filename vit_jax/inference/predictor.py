"""Runs a trained model on images: the class of predictors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
import inspect
import os
from typing import Any

import jax
import numpy as np

from vit_jax import input_pipeline
from vit_jax.data import records
from vit_jax.distributed import sharding
from vit_jax.inference import engine, tables, user_images

# Of one CPU: images per batch, and batches at the same time. The forward pass alone
# of Ti/16 on two cores is 1.3 times as fast with 8 images as with 32, whose arrays
# its caches do not hold, and 1.3 times as fast again with two batches at once.
_CPU_BATCH, _AT_ONCE = 8, 2


def _is_one_cpu(mesh) -> bool:
  return mesh.size == 1 and mesh.devices.flat[0].platform == 'cpu'


class Predictor:
  """A trained model that takes images as paths, PIL images or arrays.

  Attributes:
    task: the objective, a vit_jax.tasks.base.Task; likewise its `config`,
      `metadata`, and `class_names`, in the order of the logits.
    params: the parameters; averaged if the run kept an average.
    extra: see vit_jax.tasks.base.Task.init.
    step: step of the checkpoint.
    workdir: folder of the run, '' if unknown.
    origin: the same, or the path of the weights.
  """

  BATCH = 32  # Most images per batch.
  # Those flags of `vit_jax predict` beyond --top and --out that
  # `report` reads.
  FLAGS = ()

  def __init__(self, task, params, extra, step: int):
    self.task = task
    self.params = params
    self.extra = extra
    self.step = step
    self.workdir = self.origin = ''
    self.config = task.config
    self.metadata = task.metadata
    self.class_names = task.class_names
    self._outputs = jax.jit(task.outputs)
    self._features = functools.cache(lambda name: jax.jit(task.features(name)))
    self._everywhere = None  # The state on all devices, see `_placed`.

  def __repr__(self):
    config, count = (
      self.config,
      sum(x.size for x in jax.tree.leaves(self.params)),
    )
    height, width = self.task.image_size
    words = [
      f'{config.model.get("model_name") or "model"} ({config.task})',
      f'{count:,} parameters',
      f'{height}x{width} pixels',
    ]
    if self.class_names:
      words.append(f'{len(self.class_names):,} classes')
    if self.origin:
      words.append(f"from '{self.origin}'")
    if self.step:
      words.append(f'step {self.step:,}')
    return f'<{", ".join(words)}>'

  def __getattr__(self, name):
    """Raises AttributeError for what only predictors of other tasks have."""
    known = ', '.join(x for x in dir(type(self)) if x[0].islower())
    task = vars(self).get('config', {}).get('task')
    raise AttributeError(
      f"the predictor of the task '{task}' has no '{name}'; it has {known}"
    )

  def _refuse(self, options):
    """Raises ValueError for arguments that only predictors of other tasks take."""
    for name, value in options.items():
      raise ValueError(
        f"{name}={value!r:.80}: a model of the task '{self.config.task}' has no "
        f'such choice: leave out {name}'
      )

  def outputs(self, images: Sequence[Any]):
    """Computes the model's outputs for images.

    Args:
      images: a list (or an array [n, height, width, channels]) of images of any
        size: paths, PIL images, or arrays uint8 [height, width(, channels)].

    Returns:
      The outputs of the task, float32 arrays [n, ...].

    Raises:
      FileNotFoundError, ValueError: if an image does not exist or cannot be
        read, or if an output is not finite.
    """
    return self.run(images, keep=())[1]

  def inputs(self, images: Sequence[Any]) -> dict:
    """Returns the task's inputs for images, see `outputs`: arrays [n, ...]."""
    return self.run(images, lambda *_: ())[0]

  def run(
    self,
    images: Sequence[Any],
    compute=None,
    keep: Iterable[str] | None = None,
  ) -> tuple[dict, Any]:
    """Computes arrays for images, see `outputs`.

    `compute` and `keep` are those of `stream`; by default all inputs are kept,
    which takes memory. Returns the inputs and the results of `compute`, arrays
    [n, ...].
    """
    compute = compute or self._outputs
    keep = self.task.input_spec() if keep is None else keep
    found = [row[1:] for row in self.stream(images, compute, keep)]
    if found:
      return jax.tree.map(lambda *rows: np.stack(rows), *found)
    spec = self.task.input_spec()
    outputs = jax.eval_shape(compute, self.params, self.extra, spec)
    return jax.tree.map(
      lambda x: np.zeros((0, *x.shape[1:]), x.dtype),
      ({name: spec[name] for name in keep}, outputs),
    )

  def stream(
    self,
    images: Sequence[Any] | records.Source,
    compute: Callable | None = None,
    keep: Iterable[str] = (),
    parts: Callable | None = None,
    stop: Callable[[], bool] = engine.never,
  ) -> Iterator[tuple[int, dict, Any]]:
    """Computes arrays for any number of images, in memory that does not grow.

    More than a batch of images is spread over all devices of this process.

    Args:
      images: see `outputs`; or a source of images.
      compute: compiled function (params, extra, inputs) -> arrays [B, ...]; by
        default the outputs of the task.
      keep: names of the inputs to return.
      parts: function from a source of the images to its parts, see
        vit_jax.input_pipeline.Part, for which the model is compiled one by one;
        by default one part of the task's inputs.
      stop: see vit_jax.inference.engine.run.

    Yields:
      For each image its number, the inputs in `keep`, and its results, NumPy
      arrays; images of one part in their order.

    Raises:
      FileNotFoundError, ValueError: see `outputs`.
    """
    source = self._source(images)
    total = source.num_examples
    if not total:
      return
    compute, keep = compute or self._outputs, tuple(keep)
    params, extra, mesh = self._placed(total)
    found = input_pipeline.part_batches(
      self.config,
      source,
      parts(source) if parts else [input_pipeline.Part(None, self.task.inputs)],
      mesh,
      functools.partial(self._rows, mesh),
    )

    def both(batch):
      return {
        **{name: batch[name] for name in ('index', 'mask')},
        'inputs': {name: batch[name] for name in keep},
        'outputs': compute(params, extra, batch),
      }

    at_once = _AT_ONCE if _is_one_cpu(mesh) else 1
    for batch in engine.run(both, found, mesh, stop, 'Predicting', total, at_once):
      for number, row in engine.rows(batch):
        self._check_finite(row['outputs'], source.name(number))
        yield number, row['inputs'], row['outputs']

  def _source(self, images):
    """Returns images, see `outputs`, as a source."""
    if isinstance(images, records.Source):
      return images
    is_list = hasattr(images, '__len__') and hasattr(images, '__getitem__')
    if isinstance(images, (str, bytes)) or not is_list:
      raise ValueError(
        f'images={images!r:.80} must be a list: give [image] for a single one, '
        'list(images) for what a generator yields'
      )
    return user_images.Given(images, self.config.max_image_pixels)

  def columns(self, embeddings: str | None = None, **options) -> tables.Columns:
    """Returns what a table has of each image.

    Args:
      embeddings: layer whose features are a column, such as 'features', the
        inputs of the head; see vit_jax.evaluators.features.Extractor. None: no
        such column.
      **options: `top`, of classifiers the number of classes; `threshold` and
        `image_size`, see `detect` of detectors; `classes` and `texts`, lists, see
        `predict` of image and text towers.

    Raises:
      ValueError: if there is no such layer, or an argument is out of range.
    """
    known = inspect.signature(self._columns).parameters
    self._refuse({k: v for k, v in options.items() if k not in known})
    if embeddings is None:
      return self._columns(**options)
    features = self.task.features(embeddings)
    spec = jax.eval_shape(features, self.params, self.extra, self.task.input_spec())
    try:
      own = self._columns(**options)
    except tables.NoColumns:  # The features are all that there is.
      own = tables.Columns({}, lambda inputs, outputs: {}, lambda *_: ())
    compute = own.compute or self._outputs

    @jax.jit
    def both(params, extra, batch):
      return compute(params, extra, batch), features(params, extra, batch)

    def row(inputs, outputs):
      return {**own.row(inputs, outputs[0]), 'embedding': outputs[1]}

    types = {**own.types, 'embedding': (float, spec.shape[-1])}
    return own._replace(types=types, row=row, compute=both)

  def table_options(self, args) -> dict[str, Any]:
    """Returns the arguments of `columns` that the flags of a command give."""
    names = ('embeddings', 'top', 'threshold', 'image_size')
    return {name: getattr(args, name) for name in names}

  def _columns(self, top=5, threshold=None, image_size=None) -> tables.Columns:
    """Returns the columns of the task, see `columns`."""
    raise tables.NoColumns(
      f"the task '{self.config.task}' predicts pictures, which are no columns of "
      'a table: ask for its features (--embeddings)'
    )

  def table(self, images: Sequence[Any], **options):
    """Predicts for images; returns a pyarrow.Table with a row an image.

    For images see `outputs`, for options and errors `columns`; ImportError
    without pyarrow. A row has the columns of the task, such as `class` and
    `probability`; `path`; and `error`, what is wrong with a broken image, whose
    other columns are null.
    """
    columns, source = self.columns(**options), self._source(images)
    blocks = [range(source.num_examples)] if source.num_examples else []
    found = tables.rows(self, source, columns, blocks)
    return tables.to_arrow(
      [row for _, block in found for row in block], tables.types(columns)
    )

  def embed(self, images: Sequence[Any], layer: str = 'features') -> np.ndarray:
    """Computes the features of images, float32 [n, D].

    For images and errors see `outputs`, for the layer `columns`.
    """
    return self.run(images, self._features(layer), keep=())[1]

  def export(self, out: str | os.PathLike, to: str, **options) -> float:
    """Writes the model for programs that serve it without this package.

    Args:
      out: the folder to write.
      to: 'stablehlo', 'saved_model' or 'onnx'.
      **options: see vit_jax.inference.export.export.

    Returns:
      The largest difference between the outputs of what was written and those of
      the model, on a few images.

    Raises:
      ImportError, FileExistsError, ValueError: see vit_jax.inference.export.export.
    """
    from vit_jax.inference import export  # Late: prediction does not need it.

    return export.export(self, out, to, **options)

  def batch_size(self, part: input_pipeline.Part) -> int:
    """Returns the greatest number of images of a batch of a part."""
    return self.BATCH

  def _rows(self, mesh, part, count):
    """Returns the number of rows of the batches of a part of `count` images.

    A power of two below the greatest: calls with any numbers of images compile
    the model a few times, and no more than half of the rows are padding.
    """
    most = self.batch_size(part)
    if _is_one_cpu(mesh):
      most = min(most, _CPU_BATCH)
    return min(most, 1 << (count - 1).bit_length())

  def _placed(self, count):
    """Returns parameters and extra state for so many images, and their mesh."""
    mesh = sharding.mesh_of(self.params)
    devices = jax.local_devices()
    if mesh.size > 1 or len(devices) == 1 or count <= self.BATCH:
      return self.params, self.extra, mesh
    if self._everywhere is None:
      mesh = sharding.make_mesh({'data': -1}, devices)
      state = jax.device_put((self.params, self.extra), sharding.replicated(mesh))
      self._everywhere = *state, mesh
    return self._everywhere

  def _check_finite(self, outputs, name):
    """Raises ValueError if an output of an image is not finite."""
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(outputs)):
      raise ValueError(
        f"the output of step {self.step} in '{self.workdir}' for '{name}' "
        'is not finite: the training diverged, or its checkpoint is '
        'damaged; choose another checkpoint (--step=N)'
      )

  def predict(self, images: Sequence[Any], **others) -> list:
    """Returns the predictions for each image; here the outputs themselves."""
    self._refuse(others)
    outputs = self.outputs(images)
    return [jax.tree.map(lambda x, i=i: x[i], outputs) for i in range(len(images))]

  def report(self, images: Sequence[str], args) -> Iterable[str]:
    """Returns what `vit_jax predict` prints, one string per image.

    If it is a generator, the strings are printed as they are computed. Takes paths, and the flags of that command, such as `top`, the number of
    classes to show, and `out`, the path of the picture to write, or None.
    """
    return [
      f'{image}\n  {result}' for image, result in zip(images, self.predict(images))
    ]

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Adds what is seen of a photograph to a page, see vit_jax/inference/demo.py.

    Runs inside of a gradio.Blocks; makes components there, and their events.

    Returns:
      (show, inputs, outputs). `inputs` and `outputs` are components. Several
      threads call show(photo, *values of the inputs), with a
      vit_jax.inference.demo.Photo; it returns new values by component, and those
      `outputs` that it leaves out are cleared.

    Raises:
      ValueError: if there is nothing to show.
    """
    raise ValueError(
      f"the task '{self.config.task}' shows nothing on a page: give its predictor "
      'a method `page`, as in vit_jax/tasks/classify.py'
    )
