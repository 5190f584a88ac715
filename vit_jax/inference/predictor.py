"""The base class of predictors: trained models that run on images."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import copy
import functools
import inspect
import os
from typing import Any, NoReturn

import jax
import ml_collections
import numpy as np

from vit_jax import console, input_pipeline
from vit_jax.data import records
from vit_jax.distributed import sharding
from vit_jax.inference import engine, int8, tables, user_images
from vit_jax.run import config as run_config

# On a single CPU device: images per batch, and concurrent batches. On two cores, the
# forward pass of Ti/16 is 1.3 times as fast with 8 images as with 32, which exceed the
# caches, and another 1.3 times as fast with two concurrent batches.
_CPU_BATCH = 8
_CPU_CONCURRENCY = 2


def _is_one_cpu(mesh: jax.sharding.Mesh) -> bool:
  return mesh.size == 1 and mesh.devices.flat[0].platform == 'cpu'


class Predictor:
  """A trained model that takes images as paths, file contents, PIL images or arrays.

  `model` is the Linen module, whose `apply` takes {'params': params}; `params` are
  averaged if the run kept an average; `config`, `metadata` and
  `class_names` (in the order of the logits) are the task's. `workdir` is the folder of
  the run, or '', and `origin` that folder or the path of the weights.
  """

  BATCH = 32  # Largest batch.

  def __init__(self, task: Any, params: Any, extra: Any, step: int) -> None:
    if any(x.dtype == np.int8 for x in jax.tree.leaves(params)):
      task = copy.copy(task)
      task.model = int8.Model(task.model)
    self.task = task
    self.params = params
    self.extra = extra
    self.step = step
    self.workdir = self.origin = ''
    self.config = task.config
    self.metadata = task.metadata
    self.class_names = task.class_names
    self.model = task.model
    self._outputs = jax.jit(task.outputs)
    self._features = functools.cache(lambda name: jax.jit(task.features(name)))
    # Parameters, extra state and mesh on all devices, see `_placed`.
    self._replicated: tuple[Any, Any, jax.sharding.Mesh] | None = None

  def __reduce__(self) -> tuple:
    """Pickles the task and the parameters; the copy compiles its own functions."""
    task = self.task
    args = type(task), task.config, task.metadata, self.params, self.extra, self.step
    return _unpickle, args, {'workdir': self.workdir, 'origin': self.origin}

  def __repr__(self) -> str:
    count = sum(x.size for x in jax.tree.leaves(self.params))
    height, width = self.task.image_size
    facts = [
      f'{self.config.model.get("model_name") or "model"} ({self.config.task})',
      f'{count:,} parameters',
      f'{height}x{width} pixels',
    ]
    if self.class_names:
      facts.append(console.pluralize(len(self.class_names), 'class'))
    if self.origin:
      facts.append(f"from '{self.origin}'")
    if self.step:
      facts.append(f'step {self.step:,}')
    return f'<{", ".join(facts)}>'

  def __getattr__(self, name: str) -> NoReturn:
    """Raises AttributeError with the names that this predictor has."""
    names = ', '.join(x for x in dir(type(self)) if x[0].islower())
    task = vars(self).get('config', {}).get('task')
    raise AttributeError(
      f"the predictor of the task '{task}' has no '{name}'; it has {names}"
    )

  def with_options(self, options: Mapping[str, Any]) -> 'Predictor':
    """Returns the predictor with other values of `config.task_options`.

    Raises ValueError if an option is unknown or has a wrong value.
    """
    config = self.config.copy_and_resolve_references()
    run_config.replace_options(config, options)
    task = type(self.task)(config, self.metadata)
    model = task.predictor(self.params, self.extra, self.step)
    model.workdir, model.origin = self.workdir, self.origin
    return model

  def _refuse(self, options: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that only other tasks accept."""
    for name, value in options.items():
      raise ValueError(
        f"{name}={value!r:.80} is not an option of the task '{self.config.task}': "
        f'leave out {name}'
      )

  def outputs(self, images: Sequence[Any]) -> Any:
    """Returns the outputs of the task for images, float32 arrays [n, ...].

    Args:
      images: a list (or an array [n, height, width, channels]) of images of any size:
        paths, contents of files (bytes or io.BytesIO), PIL images, or arrays uint8
        [height, width(, channels)]; with `config.pp.range` arrays of any type.

    Raises:
      FileNotFoundError: if an image does not exist.
      ValueError: if an image cannot be read, or an output is not finite.
    """
    return self.run(images, keep=())[1]

  def inputs(self, images: Sequence[Any]) -> dict[str, np.ndarray]:
    """Returns the task's inputs for images, see `outputs`: arrays [n, ...]."""
    return self.run(images, lambda *_: ())[0]

  def run(
    self,
    images: Sequence[Any],
    compute: Callable | None = None,
    keep: Iterable[str] | None = None,
  ) -> tuple[dict, Any]:
    """Returns inputs and results for images, arrays [n, ...], as `stream` does.

    By default all inputs are kept, which takes memory.
    """
    compute = compute or self._outputs
    keep = self.task.input_spec() if keep is None else keep
    rows = [row[1:] for row in self.stream(images, compute, keep)]
    if rows:
      return jax.tree.map(lambda *rows: np.stack(rows), *rows)
    spec = self.task.input_spec()
    inputs = {name: spec[name] for name in keep}
    outputs = jax.eval_shape(compute, self.params, self.extra, spec)
    return jax.tree.map(
      lambda x: np.zeros((0, *x.shape[1:]), x.dtype), (inputs, outputs)
    )

  def stream(
    self,
    images: Sequence[Any] | records.Source,
    compute: Callable | None = None,
    keep: Iterable[str] = (),
    parts: Callable | None = None,
    stop: Callable[[], bool] = engine.never,
  ) -> Iterator[tuple[int, dict, Any]]:
    """Yields (number, inputs, results) for any number of images in constant memory.

    More than one batch of images is spread over all devices of this process. Images
    of a part come in order.

    Args:
      images: see `outputs`, also for errors; or a source of images.
      compute: compiled function (params, extra, inputs) -> arrays [B, ...]; by
        default the outputs of the task.
      keep: names of the inputs to return.
      parts: function from the source to its parts (vit_jax.input_pipeline.Part), for
        each of which the model is compiled; by default one part.
    """
    source = self._source(images)
    total = source.num_examples
    if not total:
      return
    compute = compute or self._outputs
    keep = tuple(keep)
    params, extra, mesh = self._placed(total)
    batches = input_pipeline.part_batches(
      self.config,
      source,
      parts(source) if parts else [input_pipeline.Part(None, self.task.inputs)],
      mesh,
      functools.partial(self._rows, mesh),
    )

    def with_inputs(batch: input_pipeline.Batch) -> dict[str, Any]:
      return {
        'index': batch['index'],
        'mask': batch['mask'],
        'inputs': {name: batch[name] for name in keep},
        'outputs': compute(params, extra, batch),
      }

    concurrency = _CPU_CONCURRENCY if _is_one_cpu(mesh) else 1
    for results in engine.run(
      with_inputs, batches, mesh, stop, 'Predicting', total, concurrency
    ):
      for number, row in engine.rows(results):
        self._check_finite(row['outputs'], source.name(number))
        yield number, row['inputs'], row['outputs']

  def _source(self, images: Any) -> records.Source:
    """Returns images as a source."""
    if isinstance(images, records.Source):
      return images
    is_list = hasattr(images, '__len__') and hasattr(images, '__getitem__')
    if isinstance(images, (str, bytes)) or not is_list:
      raise ValueError(
        f'images={images!r:.80} must be a list: pass [image] for a single image, '
        'list(images) for a generator'
      )
    return user_images.for_model(images, self.config)

  def columns(self, embeddings: str | None = None, **options: Any) -> tables.Columns:
    """Returns the columns of a table.

    Args:
      embeddings: a layer whose features become a column, such as 'features' (the
        inputs of the head) or 'patches' (a token for each patch); see `embed`.
      **options: `top` for classifiers, `threshold` and `image_size` for detectors, and
        lists `classes` and `texts` for image-text models.

    Raises:
      ValueError: if there is no such layer, or an argument is out of range.
    """
    names = inspect.signature(self._columns).parameters
    extra_options = {k: v for k, v in options.items() if k not in names}
    for name, value in extra_options.items():
      if f'--{name}' in self.task.FLAGS:
        raise ValueError(
          f'{name}={value!r:.80} is not for a table: leave out --{name}, or the table (--out)'
        )
    self._refuse(extra_options)
    if embeddings is None:
      return self._columns(**options)
    _check_layer('embeddings', embeddings, ' (--embeddings)')
    features = self.task.features(embeddings)
    spec = jax.eval_shape(features, self.params, self.extra, self.task.input_spec())
    try:
      columns = self._columns(**options)
    except tables.NoColumns:  # Only features.
      columns = tables.Columns({}, lambda inputs, outputs: {}, lambda *_: ())
    compute = columns.compute or self._outputs

    @jax.jit
    def with_features(
      params: Any, extra: Any, batch: input_pipeline.Batch
    ) -> tuple[Any, jax.Array]:
      return compute(params, extra, batch), features(params, extra, batch)

    def row(inputs: dict[str, Any], outputs: Any) -> dict[str, Any]:
      return {**columns.row(inputs, outputs[0]), 'embedding': outputs[1]}

    shape = spec.shape[1:]
    kind = (float, shape if len(shape) > 1 else shape[0])
    types = {**columns.types, 'embedding': kind}
    return columns._replace(types=types, row=row, compute=with_features)

  def parse_flags(self, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of `report` or `columns` from the task's FLAGS by name."""
    return dict(flags)

  def _columns(self) -> tables.Columns:
    """Returns the task's own columns, see `columns`."""
    raise tables.NoColumns(
      f"the task '{self.config.task}' predicts pictures, which do not fit into "
      'a table: ask for its features (--embeddings)'
    )

  def table(self, images: Sequence[Any], **options: Any) -> Any:
    """Returns predictions as a pyarrow.Table with one row per image.

    For options and errors see `columns`. The columns are `path`, the task's columns,
    such as `class` and `probability`, and `error`; the other columns of a broken image
    are null. Raises ImportError without pyarrow.
    """
    columns = self.columns(**options)
    source = self._source(images)
    blocks = [range(source.num_examples)] if source.num_examples else []
    rows = []
    for _, block_rows in tables.rows(self, source, columns, blocks):
      rows += block_rows
    return tables.to_arrow(rows, tables.types(columns))

  def embed(self, images: Sequence[Any], layer: str = 'features') -> np.ndarray:
    """Returns the features of images, float32 [n, D]; of 'patches' [n, h, w, D].

    For layers see vit_jax.tasks.parts.Hooks.features.
    """
    _check_layer('layer', layer)
    return self.run(images, self._features(layer), keep=())[1]

  def export(self, out: str | os.PathLike, to: str, **options: Any) -> float:
    """Exports the model to `to`: 'stablehlo', 'saved_model' or 'onnx'.

    See vit_jax.inference.export.export. Returns the largest difference between the
    outputs of the exported model and of this one on a few images.
    """
    from vit_jax.inference import export  # Late, not needed for prediction.

    return export.export(self, out, to, **options)

  def batch_size(self, part: input_pipeline.Part) -> int:
    """Returns the largest batch for a part."""
    return self.BATCH

  def _rows(
    self, mesh: jax.sharding.Mesh, part: input_pipeline.Part, count: int
  ) -> int:
    """Returns the rows per batch of a part of `count` images.

    Powers of two bound the number of compilations, and the padding by half.
    """
    limit = self.batch_size(part)
    if _is_one_cpu(mesh):
      limit = min(limit, _CPU_BATCH)
    return min(limit, 1 << (count - 1).bit_length())

  def _placed(self, count: int) -> tuple[Any, Any, jax.sharding.Mesh]:
    """Returns parameters and extra state, placed for `count` images, and the mesh."""
    mesh = sharding.mesh_of(self.params)
    devices = jax.local_devices()
    if mesh.size > 1 or len(devices) == 1 or count <= self.BATCH:
      return self.params, self.extra, mesh
    if self._replicated is None:
      mesh = sharding.make_mesh({'data': -1}, devices)
      params, extra = jax.device_put(
        (self.params, self.extra), sharding.replicated(mesh)
      )
      self._replicated = (params, extra, mesh)
    return self._replicated

  def _check_finite(self, outputs: Any, name: str) -> None:
    """Raises ValueError if an output of an image is not finite."""
    if all(np.isfinite(x).all() for x in jax.tree.leaves(outputs)):
      return
    if not self.workdir:
      raise ValueError(
        f"the output of '{self.origin}' for '{name}' is not finite: the weights are "
        'damaged; use others (--weights)'
      )
    raise ValueError(
      f"the output of step {self.step} in '{self.workdir}' for '{name}' "
      'is not finite: the training diverged, or its checkpoint is damaged; use '
      'another checkpoint (--step=N)'
    )

  def predict(self, images: Sequence[Any], **options: Any) -> list[Any]:
    """Returns a prediction per image; by default the outputs."""
    self._refuse(options)
    outputs = self.outputs(images)
    return [engine.take(outputs, i) for i in range(len(images))]

  def report(
    self,
    images: Sequence[str],
    *,
    out: os.PathLike | str | None = None,
  ) -> Iterable[str]:
    """Returns (or yields) what `vit_jax predict` prints for each path.

    Args:
      images: paths.
      out: picture to write, see DRAWS of vit_jax.tasks.parts.Hooks; None: none.

    Predictors of tasks with FLAGS take these as further keyword arguments.
    """
    results = self.predict(images)
    return [f'{image}\n  {result}' for image, result in zip(images, results)]

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Adds the task's components to a demo page, inside a gradio.Blocks.

    Returns:
      show: function (photo, *values of the inputs) -> new values by component, of a
        vit_jax.inference.demo.Photo. Must be thread-safe. Omitted outputs are cleared.
      inputs: components whose values `show` takes.
      outputs: components that `show` changes.

    Raises:
      ValueError: if the task has no page.
    """
    raise ValueError(
      f"the task '{self.config.task}' has no demo page: add a method `page` to its "
      'predictor, as in vit_jax/tasks/classify.py'
    )


def _check_layer(name: str, layer: Any, flag: str = '') -> None:
  """Raises ValueError unless an argument is the name of a layer."""
  if not isinstance(layer, str):
    raise ValueError(
      f"{name}={layer!r:.80} must be the name of a layer: pass {name}='features' for the "
      f"inputs of the head, or 'patches' for a token per patch{flag}"
    )


def _unpickle(
  task_type: Callable[..., Any],
  config: ml_collections.ConfigDict,
  metadata: Mapping[str, Any],
  *args: Any,
) -> Predictor:
  return task_type(config, metadata).predictor(*args)
