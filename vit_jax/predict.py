"""Loads trained models for prediction.

  model = predict.load('/tmp/digits')
  model.predict(['image.png'])  # [[('7', 0.98), ('9', 0.01), ...]]
  model = predict.load_weights('ViT-B_16.npz')

The task of the run decides what is predicted: see the class Predictor in the
file of the task, such as vit_jax/tasks/classify.py. `vit_jax predict`
(vit_jax/commands/predict.py) is the command.
"""

from collections.abc import Sequence
import gc
import math
from typing import TYPE_CHECKING, Literal

from etils import epath
import jax
import ml_collections

from vit_jax import console
from vit_jax.configs import models as model_configs, schema
from vit_jax.distributed import files

if TYPE_CHECKING:
  from vit_jax.inference import predictor


def load(
  workdir: str,
  step: int | None = None,
  mesh: jax.sharding.Mesh | None = None,
  dtype: str | None = None,
  max_image_pixels: int | None = None,
  compute_dtype: str | None = None,
) -> 'predictor.Predictor':
  """Loads a trained model: its parameters (averaged if kept) and extra state.

  Args:
    workdir: folder of a run, local or gs://.
    step: step of the checkpoint; by default the newest complete one.
    mesh: mesh for the parameters, split as in the run if the mesh has the axes
      of the run. By default as many devices as the run splits them over, or one
      if there are fewer.
    dtype: type of the parameters in memory, 'bfloat16', 'float16' or 'int8' (of
      kernels, see vit_jax/inference/int8.py). None: as in the run.
    max_image_pixels: largest image that the model accepts, height times width in
      pixels. None: as in the run.
    compute_dtype: type of the computation, 'float32', 'bfloat16', 'float16', or 'auto'
      for bfloat16 except on CPUs. None: as in the run (`config.model.dtype`).

  Returns:
    The Predictor of the run's task, with `params`, `config`, `metadata`,
    `class_names` and `predict(images)`.

  Raises:
    FileNotFoundError: if the folder has no run, or the run no checkpoint yet.
    ValueError: if all checkpoints are damaged, or the step has none, or `workdir`
      is a file.
  """
  _check_types(dtype, compute_dtype)
  from vit_jax import train
  from vit_jax.evaluators import calibration
  from vit_jax.inference import int8
  from vit_jax.learning import lora
  from vit_jax.run import (
    checkpoints as checkpoints_lib,
    config as run_config,
    workdir as workdir_lib,
  )

  workdir = files.expanded(workdir)
  if epath.Path(workdir).is_file():
    raise ValueError(
      f"workdir='{workdir}' is a file, not the folder of a run: load weights "
      'with predict.load_weights (--weights=FILE)'
    )
  config, metadata = workdir_lib.load(workdir)
  _limit_images(config, max_image_pixels)
  _compute_as(config, compute_dtype)
  run_config.replace_stored_functions(config)
  mesh = mesh or _mesh(config)
  axes = {name for name, size in config.mesh.items() if size is not None}
  if axes - set(mesh.shape):
    config.sharding_rules = ()
  layers = model_configs.layers_of(config.model)
  if 'attention' in layers:  # The run may have had other devices.
    layers.attention = 'auto'
  program = train.make_program(config, metadata, mesh)
  checkpoints = checkpoints_lib.Checkpoints(workdir, read_only=True)
  abstract = program.abstract
  stored = lora.trained(abstract.params, config)
  stored_dtype = None if dtype == 'int8' or config.lora.rank else dtype
  weights = checkpoints.restore_weights(stored, abstract.extra, step, stored_dtype)
  params = program.task.merged(weights.params, abstract.params, abstract.extra, workdir)
  if dtype and stored_dtype != dtype:
    params = int8.converted(params, dtype)
  task = program.task
  if calibrated := calibration.stored(workdir, weights.step):
    console.notify(f'Probabilities are calibrated: {calibrated}.')
    task = calibration.with_temperature(task, calibrated.temperature)
  model = task.predictor(params, weights.extra, weights.step)
  model.workdir = model.origin = str(workdir)
  return model


def load_weights(
  path: str,
  class_names: Sequence[str] | None = None,
  image_size: tuple[int, int] | None = None,
  dtype: str | None = None,
  num_heads: int | tuple[int, int] | None = None,
  gelu: str | None = None,
  max_image_pixels: int | None = None,
  entry: str | None = None,
  base: str | None = None,
  compute_dtype: str | None = None,
) -> 'predictor.Predictor':
  """Loads a model from weights in any format, without a run.

  Returns the predictor of the model's task; for errors see
  vit_jax.weights.convert.read.

  Args:
    path: a published .npz, a .safetensors or .bin of timm or Hugging Face or a
      folder with such a file, or a released .pth; local, gs:// or a URL; or
      hf://OWNER/NAME, see vit_jax/weights/hub.py.
    class_names: override the names in the file; unnamed classes have numbers.
    image_size: (height, width) in pixels, to which position embeddings are resized as
      the program of the file does; needed if the file does not contain
      it and the grid of patches is not square.
    dtype: see `load`; None: as in the file.
    num_heads: number of attention heads, or a pair for image and text tower;
      needed, like `gelu`, for a file without a config that contains it.
    gelu: 'erf', 'tanh' or 'quick'.
    max_image_pixels: see `load`; None: 89,478,485.
    entry: which model of a checkpoint with several to load, such as 'student'; None:
      the averaged weights, if it has some.
    base: weights of timm or Hugging Face into which the adapters of PEFT at `path` are
      merged.
    compute_dtype: see `load`; None: float32.
  """
  _check_types(dtype, compute_dtype)
  from vit_jax.inference import int8
  from vit_jax.run import config as run_config
  from vit_jax.weights import convert, fitting, writing

  read_dtype = None if dtype == 'int8' else dtype
  model = convert.read(
    path, class_names, image_size, num_heads, read_dtype, gelu, entry, base
  )
  model = fitting.at_crop(writing.scaled(model))
  if model.preparation.source:
    console.notify(
      f"Preparing images as the weights' {model.preparation.source} says: "
      f'{model.preparation}'
    )
  config, metadata = writing.as_run(model)
  _limit_images(config, max_image_pixels)
  _compute_as(config, compute_dtype)
  task = run_config.get_task(config.task)(config, metadata)
  params = _moved(model.params)
  extra = _moved(model.extra)
  if dtype and read_dtype != dtype:
    params = int8.converted(params, dtype)
  model = task.predictor(params, extra, 0)
  model.origin = str(path)
  return model


def _check_types(dtype: str | None, compute_dtype: str | None) -> None:
  stored = Literal['bfloat16', 'float16', 'int8'] | None
  schema.check('dtype', dtype, stored, '--')
  computed = model_configs.ComputeDtype | None
  schema.check('compute_dtype', compute_dtype, computed, '--')


def _limit_images(
  config: ml_collections.ConfigDict, max_image_pixels: int | None
) -> None:
  """Sets config.max_image_pixels, unless it is None."""
  if max_image_pixels is not None:
    schema.check('max_image_pixels', max_image_pixels, schema.Count, '--')
    config.max_image_pixels = max_image_pixels


def _compute_as(config: ml_collections.ConfigDict, compute_dtype: str | None) -> None:
  """Sets config.model.dtype, unless it is None."""
  if compute_dtype is not None:
    with config.unlocked():
      config.model.dtype = compute_dtype


def _moved(tree: dict) -> dict:
  """Moves a nested dict to the device array by array, emptying it."""
  moved = {}
  for name in list(tree):
    if isinstance(tree[name], dict):
      moved[name] = _moved(tree.pop(name))
    else:
      moved[name] = jax.device_put(tree.pop(name)).block_until_ready()
      gc.collect(0)  # JAX frees what it has copied when Python collects.
  return moved


def _mesh(config: ml_collections.ConfigDict) -> jax.sharding.Mesh:
  """Returns the mesh that splits the run's parameters, if devices suffice."""
  from vit_jax.distributed import sharding

  devices = jax.local_devices()
  axes = {name: size for name, size in config.mesh.items() if size is not None}
  axes['data'] = 1
  count = len(devices) if -1 in axes.values() else math.prod(axes.values())
  try:
    return sharding.make_mesh(axes, devices[:count])
  except ValueError:
    return sharding.make_mesh({'data': 1}, devices[:1])
