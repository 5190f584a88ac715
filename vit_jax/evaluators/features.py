"""Extracts features of all images of a split, for probes.

Features are the inputs of a model's head (`features`, which every model of this
package sows), its layers (`layer_0`, `layer_1`, ..., see `layers`), the outputs of any
module, or the pixels.
"""

from collections.abc import Callable, Sequence
import difflib
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import console, models, preprocess
from vit_jax.configs import models as model_configs
from vit_jax.data import records
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.distributed import processes
from vit_jax.inference import engine

# (params, extra, batch) -> arrays [B, ...].
Compute = Callable[[Any, Any, dict[str, jax.Array]], Any]
LAYER = 'features'  # Sown in front of the head.
PIXELS = 'pixels'  # The model's input.
PATCHES = 'patches'  # See `patches`.
# Sown in front of each layer, see `layers`.
_SOWN = re.compile(r'(?:^|/)((stage|layer)_(\d+))$')


class Features(NamedTuple):
  """Features and labels of n examples, in the order of the split."""

  values: np.ndarray  # float32 [n, D].
  labels: np.ndarray  # int32 [n]; -1 for no class, or several.

  def labelled(self) -> np.ndarray:
    """Returns the numbers of the examples with a label; ValueError for none."""
    rows = np.flatnonzero(self.labels >= 0)
    if not len(rows):
      raise ValueError(
        'no image of the split has a single class: use labelled data for a probe'
      )
    return rows

  def take(self, rows: np.ndarray) -> 'Features':
    """Returns the examples of these numbers."""
    return Features(self.values[rows], self.labels[rows])

  def accuracy(self, classes: np.ndarray) -> float:
    """Returns the share of the examples with a label that have these classes."""
    return float((classes == self.labels).sum() / len(self.labelled()))


def layers(task: Any) -> dict[str, str]:
  """Returns the paths of a model's layers in `intermediates`, from the input on.

  The names are 'layer_0', 'layer_1', ... Each model of this package sows a mean
  [B, D] in front of each layer, and one after the last:

    ViT, Mixer, iGPT  the tokens as the first norm of the block returns them (n^l in
                      section 3.4 of "Generative Pretraining from Pixels"); last: after
                      the encoder's norm
    hybrid            before these, stage_<s>: what enters and what leaves the ResNet's
                      stages
    BiT               the feature map that enters the stage; last: after the last norm
  """
  matches = list(filter(None, map(_SOWN.search, _sown(task))))
  matches.sort(key=lambda match: (match[2] == 'layer', int(match[3])))
  return {match[1]: match.string for match in matches}


def output_shapes(task: Any, compute: Compute) -> Any:
  """Returns what `compute` returns for one image, as ShapeDtypeStructs."""
  params, extra = jax.eval_shape(task.init, jax.random.key(0))
  batch = {'image': task.image_spec(1)}
  return jax.eval_shape(compute, params, extra, batch)


def _sown(task: Any, capture: Any = False) -> dict[str, Any]:
  """Returns the shapes that a task's model sows for an image, by path."""

  def compute(params: Any, extra: Any, batch: dict[str, Any]) -> Any:
    return task.intermediates(params, extra, batch, capture)

  return output_shapes(task, compute)


def patches(task: Any) -> Compute:
  """Returns a function (params, extra, batch) -> tokens of the patches.

  These are what the encoder returns, after its last norm if it has one, as a grid
  float32 [B, h, w, D], without class token, distillation token and registers. In a
  hybrid, patches are cells of the ResNet's feature map. Raises ValueError for a model
  without a Vision Transformer's encoder.
  """
  path = 'Transformer/tokens'
  grid = models.patch_grid(model_configs.vit_of(task.config.model), task.image_size)
  if grid is None or path not in _sown(task):
    raise ValueError(
      f"'{PATCHES}' are the tokens of a Vision Transformer, which the model of the task "
      f"'{task.config.task}' lacks: use another layer, such as {LAYER}"
    )

  def compute(params: Any, extra: Any, batch: dict[str, Any]) -> Any:
    tokens = task.intermediates(params, extra, batch)[path][-1]  # [B, N, D]
    num_patches = grid[0] * grid[1]
    tokens = tokens[:, -num_patches:].astype(jnp.float32)
    return tokens.reshape(-1, *grid, tokens.shape[-1])

  return compute


class Extractor:
  """Computes features of splits; compiled once for all of them.

  All processes of the mesh must make the same calls. Dimensions between the first and
  the last, such as tokens, are averaged.

  Args:
    task: the task of the model.
    mesh: the mesh of its parameters.
    layer: one or several of 'features'; 'pixels', the model's inputs; a name of
      `layers`; the path of another array that the model sows; or the path of a module,
      such as 'Transformer/encoderblock_3', for its outputs.
    pp: preprocessing of the images, by default `task.config.pp`.

  Attributes:
    widths: numbers of features by layer.
    width: their sum D.
  """

  def __init__(
    self,
    task: Any,
    mesh: jax.sharding.Mesh,
    layer: str | Sequence[str] = LAYER,
    pp: ml_collections.ConfigDict | None = None,
  ):
    self._config = task.config
    self._mesh = mesh
    self._pp = pp or task.config.pp
    names = (layer,) if isinstance(layer, str) else tuple(layer)
    self._layers = _of_layers(task, names)
    shapes = output_shapes(task, self._means)
    self.widths = {name: x.shape[-1] for name, x in zip(names, shapes)}
    self.width = sum(self.widths.values())

    def compute(params: Any, extra: Any, batch: dict[str, Any]) -> Any:
      return {**batch, 'image': self.compute(params, extra, batch)}

    self._compute = engine.on_all_hosts(mesh, compute)

  def compute(self, params: Any, extra: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Computes the features of a batch, float32 [B, D]; not compiled."""
    return jnp.concatenate(self._means(params, extra, batch), axis=-1)

  def _means(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> list[jax.Array]:
    """Returns the features of each layer, float32 [B, D]."""
    means = []
    for x in self._layers(params, extra, batch):
      inner_axes = tuple(range(1, x.ndim - 1))
      means.append(x.mean(axis=inner_axes).astype(jnp.float32))
    return means

  def split(self, features: Features) -> dict[str, Features]:
    """Splits features of all layers by layer."""
    ends = np.cumsum([*self.widths.values()])
    by_layer = np.split(features.values, ends[:-1], axis=-1)
    features_of = {}
    for name, values in zip(self.widths, by_layer, strict=True):
      features_of[name] = Features(values, features.labels)
    return features_of

  @no_autograph
  def example(self, record: dict[str, Any], seed: Any) -> dict[str, Any]:
    """Returns `image` and `label` of a record; without augmentation."""
    del seed
    image = preprocess.prepare(record['image'], None, self._pp)
    return {'image': image, **_label(record)}

  def run(
    self,
    source: Any,
    params: Any,
    extra: Any,
    indices: np.ndarray | None = None,
    stop: Callable[[], bool] = engine.never,
  ) -> Features:
    """Computes the features of every example of a split, once.

    `indices` are the numbers of the examples to take; None: all. The result is the
    same on all processes; ValueError if it does not fit their memory.
    """
    source = source.evaluated
    if indices is not None:
      source = records.Subset(source, indices)
    check_memory(source.num_examples, self.width)
    columns = engine.collect(
      self._config,
      self._mesh,
      source,
      self.example,
      functools.partial(self._compute, params, extra),
      stop,
      'Extracting features',
    )
    labels = columns.get('label', np.full(source.num_examples, -1, np.int32))
    return Features(columns['image'], labels)


def check_memory(count: int, width: int, copies: int = 1) -> None:
  """Raises ValueError if copies of float32 [count, width] fill half of the memory."""
  needed = 4 * copies * count * width
  memory = least_memory()
  if needed > memory / 2:
    raise ValueError(
      f'{count:,} examples with {width:,} features each take '
      f'{console.size(needed)}, more than half of the {console.size(memory)} of a '
      "machine: use a part of the split, such as --train='train[:10%]' or "
      "--test='test[:10%]' (config.fewshot.train, config.fewshot.test)"
    )


def least_memory() -> int:
  """Returns the memory in bytes of the smallest machine; a collective."""
  return min(processes.attempt('the memory', console.machine_memory))


class _Labels(records.Subset):
  """A source whose images are not read."""

  def lookup(self, indices: Any) -> dict[str, Any]:
    columns = super().lookup(indices)
    return {name: x for name, x in columns.items() if name != 'image'}


def read_labels(
  config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh, source: Any
) -> np.ndarray:
  """Reads the class of every example of a split, int32 [n], see Features."""
  source = source.evaluated
  source = _Labels(source, np.arange(source.num_examples))

  @no_autograph
  def example(record: dict[str, Any], seed: Any) -> dict[str, Any]:
    del seed
    return _label(record)

  compute = engine.on_all_hosts(mesh, lambda batch: batch)
  columns = engine.collect(
    config, mesh, source, example, compute, label='Reading labels'
  )
  return columns['label']


def _label(record: dict[str, Any]) -> dict[str, Any]:
  """Returns the class of a record, see Features; {} if it has no labels."""
  if 'label' not in record:
    return {}
  label = tf.cast(record['label'], tf.int32)  # [L], padded with -1.
  is_single = tf.reduce_sum(tf.cast(label >= 0, tf.int32)) == 1
  return {'label': tf.where(is_single, tf.reduce_max(label), -1)}


def _of_layers(task: Any, names: Sequence[str]) -> Compute:
  """Returns a function (params, extra, batch) -> list of layers."""
  paths_by_layer = layers(task)
  sown = _sown(task)
  paths = {}
  for name in names:
    if name != PIXELS:
      paths[name] = paths_by_layer.get(name, name)
  captured = {path for path in paths.values() if path not in sown}

  def capture(module: Any, method: str) -> bool:
    return method == '__call__' and '/'.join(module.path) in captured

  modules = _sown(task, True) if captured else {}
  for path in captured:
    if f'{path}/__call__' not in modules:
      inner = {p.removesuffix('/__call__') for p in modules} - {'__call__'}
      near = difflib.get_close_matches(path, sorted(inner), n=3, cutoff=0)
      names_of_layers = ', '.join([LAYER, PIXELS, *paths_by_layer])
      raise ValueError(
        f"'{path}' is not a layer of the model, which has {names_of_layers}, and "
        f'modules such as {", ".join(near)}'
      )

  def compute(params: Any, extra: Any, batch: dict[str, Any]) -> Any:
    intermediates = {}
    if paths:
      intermediates = task.intermediates(params, extra, batch, capture)
    arrays = []
    for name in names:
      if name == PIXELS:
        arrays.append(batch['image'].reshape(batch['image'].shape[0], -1))
        continue
      path = paths[name]
      key = path if path in intermediates else f'{path}/__call__'
      arrays.append(intermediates[key][-1])
    return arrays

  return compute
