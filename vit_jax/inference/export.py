"""Exports a trained model to formats that are served without this package.

  stablehlo    model.stablehlo: one file for CPUs, CUDA GPUs and TPUs, read by
               jax.export.deserialize
  saved_model  1/: a SavedModel, laid out for TensorFlow Serving
  onnx         model.onnx: an ONNX graph, see vit_jax/inference/onnx_graph.py

Inputs (`Task.input_spec`) and outputs (`Task.exported`) have names, and batches any
size. The exported model is run on random images and deleted if it differs from the
original. `model.json` describes inputs, outputs, labels and preprocessing; a text
tower also has its tokenizer's file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import copy
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
from typing import Any, Literal, NamedTuple

from etils import epath
import jax
from jax import export as jax_export
from jax.extend.mlir.dialects import stablehlo
import jax.numpy as jnp
import numpy as np
from PIL import Image

from vit_jax import console
from vit_jax.configs import schema
from vit_jax.data.augmentation import canvases
from vit_jax.data.images import image_files
from vit_jax.data.lazy import tf
from vit_jax.distributed import files
from vit_jax.inference import int8, serving
from vit_jax.weights import preparation

PLATFORMS = ('cpu', 'cuda', 'tpu')
# Largest difference to the model relative to the largest output (at least 1), by the
# type of the parameters or of the computation.
TOLERANCES = {'float32': 1e-4, 'float16': 1e-2, 'bfloat16': 5e-2, 'int8': 1e-1}
FREE = 'free'
_IMAGES = 5  # Compared as a batch, and the first one by itself.
_DATA = 'model.onnx.data'  # Weights of a large ONNX model.
MAX_STABLEHLO = 2**31 - 2**20  # Bytes of weights in a StableHLO file.

# A loaded export: inputs by name -> outputs by name.
Run = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


class Program(NamedTuple):
  """A model as a function of arrays."""

  run: Callable[..., dict[str, jax.Array]]  # (weights, **inputs) -> {name: [B, ...]}
  weights: Any  # Parameters and extra state, NumPy arrays.
  inputs: dict[str, jax.ShapeDtypeStruct]  # By name; the batch is a symbol.

  @property
  def size(self) -> int:
    """Bytes of the weights."""
    return sum(x.nbytes for x in jax.tree.leaves(self.weights))


def export(
  model: Any,
  out: str | os.PathLike,
  to: str,
  features: bool = False,
  dtype: str | None = None,
  uint8: bool = False,
  image_size: int | tuple[int, int] | str | None = None,
  command: str | None = None,
) -> float:
  """Exports a model and returns the largest difference to its outputs.

  Args:
    model: a vit_jax.inference.predictor.Predictor.
    out: new folder, which appears once everything is written and compared.
    to: one of FORMATS.
    features: whether the output is the inputs of the head, `features` [B, D].
    dtype: stored type of the parameters, a key of TOLERANCES. The type of the
      computation does not change.
    uint8: whether images are uint8 [B, H, W, C] from 0 to 255 instead of float32 from
      -1 to 1; pixels in the padding of a canvas are ignored.
    image_size: side, or (height, width), in pixels; 'free' for any size, if the model
      and the format allow it; None: as in evaluation.
    command: the command that `model.json` records.

  Raises:
    FileExistsError: if `out` exists.
    OSError: if it cannot be written.
    ImportError: if a package for the format is missing.
    ValueError: if an argument is wrong, the model cannot be exported in this way, or
      the result differs.
  """
  out = epath.Path(files.expanded(out))
  check(out, to, dtype, image_size)
  int8.check(model, "export: load it without, and pass dtype='int8' to export")
  if uint8 and model.config.pp.range is not None:
    raise ValueError(
      f'uint8=True is for images of 8-bit colour, and this model reads '
      f'pp.range={model.config.pp.range}: leave out uint8 (--uint8)'
    )
  if command is None:
    options = dict(features=features, dtype=dtype, uint8=uint8, image_size=image_size)
    arguments = ''.join(f', {name}={x!r}' for name, x in options.items() if x)
    command = f"model.export('{out}', '{to}'{arguments})"
  if image_size is not None and not isinstance(image_size, str):
    model = _at_size(model, image_size)
  served = _in_float32(model) if to == 'onnx' else model
  with _cpu():
    program = make_program(served, features, dtype, uint8, image_size == FREE)
  if to == 'stablehlo' and program.size > MAX_STABLEHLO:
    raise ValueError(
      f'the parameters take {console.size(program.size)}, more than the 2 GiB of a '
      'StableHLO file: pass --dtype=bfloat16 or --to=saved_model'
    )
  types = dtype or 'float32', _computed(model.task)
  tolerance = max(TOLERANCES.get(x, 0) for x in types)
  run = _function(model, features, uint8)
  with (
    _cpu(),
    _without_paths(),
    files.naming_output(out, 'out'),
    files.new_folder(out) as folder,
  ):
    comparison = _write_and_compare(model, run, program, folder, to, tolerance)
    facts = {
      **_facts(model, program, comparison.expected, uint8),
      'files': _checksums(folder),
      'command': command,
      'difference': comparison.difference,
      'compared_on': comparison.inputs_description,
    }
    content = json.dumps(serving.with_checksum(facts), indent=1)
    (folder / 'model.json').write_text(content)
  console.log(
    f"'{out}': {to}; largest difference from JAX on {comparison.inputs_description}: "
    f'{comparison.difference:.1e}'
  )
  for path in sorted(pathlib.Path(out).rglob('*')):
    if path.is_file():
      console.log(f'  {path}  {path.stat().st_size:,} bytes')
  return comparison.difference


def check(
  out: epath.PathLike,
  to: str,
  dtype: str | None,
  image_size: int | tuple[int, int] | str | None,
) -> None:
  """Checks arguments of `export` before a model is read."""
  schema.check('to', to, Literal[tuple(FORMATS)], '--')
  schema.check('dtype', dtype, Literal[tuple(TOLERANCES)] | None, '--')
  if image_size != FREE:
    schema.check('image_size', image_size, schema.Size | None, '--')
  if to == 'saved_model':
    files.check_no_pattern(out, 'out')
  if epath.Path(out).exists():
    raise FileExistsError(
      f"out='{out}' exists: use another path, or delete it first (--out)"
    )
  if to == 'onnx' and image_size == FREE:
    raise ValueError(
      f"image_size='{FREE}' is not supported with --to=onnx: pass "
      '--image_size=HEIGHT,WIDTH, or --to=stablehlo or --to=saved_model'
    )
  if to == 'onnx':
    console.require('onnx', 'onnx', '--to=onnx')
    console.require('onnxruntime', 'onnx', '--to=onnx')
  files.check_new_folder(out, 'out')


def _cpu() -> contextlib.AbstractContextManager:
  """Selects the CPU, if available: GPUs round matrix products."""
  with contextlib.suppress(RuntimeError):
    return jax.default_device(jax.local_devices(backend='cpu')[0])
  return contextlib.nullcontext()


@contextlib.contextmanager
def _without_paths() -> Iterator[None]:
  """Keeps the paths of source files out of what JAX lowers."""
  name = 'jax_traceback_in_locations_limit'
  previous = getattr(jax.config, name)
  jax.config.update(name, 0)
  try:
    yield
  finally:
    jax.config.update(name, previous)


def _at_size(model: Any, image_size: int | tuple[int, int]) -> Any:
  """Returns the model for images of another size."""
  if isinstance(image_size, int):
    image_size = (image_size, image_size)
  task = model.task
  if tuple(image_size) == tuple(task.image_size) and not task.config.pp.sides:
    return model
  config = task.config.copy_and_resolve_references()
  with config.ignore_type():
    sized = preparation.from_pp(config.pp).at_size(image_size)
    config.pp.update(sized.fields(image_size), sides=())
  try:
    task = type(task)(config, task.metadata)
    shapes = _shapes(task)
    # Positions of as many patches on another grid would be mixed up.
    config.pp.crop = tuple(2 * side for side in image_size)
    double_shapes = _shapes(type(task)(config, task.metadata))
    config.pp.crop = tuple(image_size)
    fits = shapes == double_shapes == jax.tree.map(jnp.shape, model.params)
  except ValueError as e:
    raise ValueError(f'image_size={image_size} does not fit the model: {e}') from e
  if not fits:
    raise ValueError(
      f'image_size={image_size} does not fit the model, whose parameters are for '
      f'{model.task.image_size}: leave out --image_size, or fine-tune the model at '
      'that size (--config.pp.crop)'
    )
  resized = task.predictor(model.params, model.extra, model.step)
  resized.workdir = model.workdir
  return resized


def _shapes(task: Any) -> Any:
  """Returns the shapes of a task's parameters."""
  params, _ = jax.eval_shape(task.init, jax.random.key(0))
  return jax.tree.map(jnp.shape, params)


def _in_float32(model: Any) -> Any:
  """Returns the model computing in float32, for ONNX Runtime."""
  computed = _computed(model.task)
  if computed == 'float32':
    return model
  console.notify(f'The model computes in {computed}, and its ONNX file in float32.')
  task = copy.copy(model.task)
  task.model = task.model.clone(dtype=jnp.float32)
  return task.predictor(model.params, model.extra, model.step)


def make_program(
  model: Any,
  features: bool = False,
  dtype: str | None = None,
  uint8: bool = False,
  free: bool = False,
) -> Program:
  """Returns what an exported model computes; see `export`."""
  weights = jax.device_get((model.params, model.extra))
  run = _function(model, features, uint8)
  batch, *size = jax_export.symbolic_shape('batch, height, width')
  spec = model.task.input_spec(tuple(size) if free else None, batch)
  if uint8:
    spec['image'] = jax.ShapeDtypeStruct(spec['image'].shape, jnp.uint8)
  try:
    jaxpr = jax.make_jaxpr(run)(weights, **spec).jaxpr
  except Exception as e:
    if isinstance(e, ValueError) and not free:
      raise
    reason = (
      f"the task '{model.config.task}' cannot be traced with a symbolic batch size, "
      'which an export needs: fix its `exported`'
    )
    if free:
      reason = (
        f"image_size='{FREE}' does not fit the model, which depends on the size: pass "
        '--image_size=HEIGHT,WIDTH, or leave it out'
      )
    raise ValueError(f'{reason} ({image_files.first_line(e)})') from e
  read: set[int] = set()
  for eqn in jaxpr.eqns:
    read.update(map(id, eqn.invars))
  names = sorted(spec)
  for name, variable in zip(names, jaxpr.invars[-len(names) :]):
    if id(variable) not in read:
      del spec[name]
  if dtype:
    params, extra = weights
    weights = jax.device_get(int8.converted(params, dtype)), extra
  return Program(run, weights, spec)


def _function(
  model: Any, features: bool, uint8: bool
) -> Callable[..., dict[str, jax.Array]]:
  """Returns Program.run."""
  features_of = model.task.features('features') if features else None
  types = jax.tree.map(lambda x: x.dtype, (model.params, model.extra))

  def run(weights: Any, **inputs: jax.Array) -> dict[str, jax.Array]:
    # By JAX rather than NumPy: a program with constants keeps their stored type.
    convert = jax.lax.convert_element_type
    params, extra = jax.tree.map(convert, int8.restored(weights), types)
    if uint8:
      pixels = inputs['image'].astype(jnp.float32) / 127.5 - 1
      if 'real' in inputs:  # The padding of a canvas is 0, which no byte maps to.
        pixels = jnp.where(inputs['real'][..., None], pixels, 0)
      inputs = {**inputs, 'image': pixels}
    if features_of is not None:
      return {'features': features_of(params, extra, inputs)}
    return model.task.exported(params, extra, inputs)

  return run


# --- Formats ---


def _write_stablehlo(program: Program, folder: epath.Path) -> None:
  run = jax.jit(functools.partial(program.run, program.weights))
  exported = jax_export.export(run, platforms=PLATFORMS)(**program.inputs)
  (folder / 'model.stablehlo').write_bytes(exported.serialize())


def _load_stablehlo(folder: epath.Path) -> Run:
  exported = jax_export.deserialize((folder / 'model.stablehlo').read_bytes())
  return lambda inputs: exported.call(**inputs)


def _write_saved_model(program: Program, folder: epath.Path) -> None:
  console.load_tensorflow()
  from tensorflow.compiler.tf2xla.python import xla as tf_xla

  module = tf.Module()
  weights = [tf.Variable(x) for x in jax.tree.leaves(program.weights)]
  module.variables_of_the_model = weights  # To be saved.

  run = jax.jit(lambda weights, inputs: program.run(weights, **inputs))
  exported = jax_export.export(run, platforms=PLATFORMS)(
    program.weights, program.inputs
  )
  module_text = exported.mlir_module()
  # The oldest StableHLO version that has all operations, for old TensorFlows.
  version = stablehlo.get_minimum_version()
  if 'operand_batching_dims' in module_text:  # Gathers, as in masked patches.
    version = '1.1.0'
  hlo = stablehlo.serialize_portable_artifact_str(module_text, version)

  def static(shape: Sequence[Any]) -> list[int | None]:
    """Returns a shape in which None stands for a free size."""
    return [size if isinstance(size, int) else None for size in shape]

  def serve(**inputs: 'tf.Tensor') -> dict[str, 'tf.Tensor']:
    args = weights + [inputs[name] for name in sorted(inputs)]
    results = tf_xla.call_module(
      [args[i] for i in exported.module_kept_var_idx],
      version=exported.calling_convention_version,
      module=hlo,
      Tout=[x.dtype.name for x in exported.out_avals],
      Sout=[static(x.shape) for x in exported.out_avals],
      platforms=[x.upper() for x in exported.platforms],
    )
    return exported.out_tree.unflatten(results)

  signature = {}
  for name, x in program.inputs.items():
    signature[name] = tf.TensorSpec(static(x.shape), x.dtype, name)
  # As an attribute of the module it would be traced twice.
  serve = tf.function(serve, autograph=False).get_concrete_function(**signature)
  try:
    tf.saved_model.save(module, os.fspath(folder / '1'), signatures=serve)
  except tf.errors.OpError as e:  # Such as ResourceExhaustedError for a full disk.
    raise OSError(image_files.first_line(e)) from e


def _load_saved_model(folder: epath.Path) -> Run:
  loaded = tf.saved_model.load(os.fspath(folder / '1'))
  serve = loaded.signatures['serving_default']

  def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    results = serve(**{name: tf.constant(x) for name, x in inputs.items()})
    return {name: x.numpy() for name, x in results.items()}

  run.loaded = loaded  # type: ignore[attr-defined]  # Keeps its variables alive.
  return run


def _write_onnx(program: Program, folder: epath.Path) -> None:
  import onnx

  from vit_jax.inference import onnx_graph

  model = onnx_graph.make_model(program.run, program.weights, program.inputs)
  path = folder / 'model.onnx'
  if program.size <= MAX_STABLEHLO // 2:
    path.write_bytes(model.SerializeToString())
  else:  # Protobuf files are limited to 2 GiB.
    onnx.save_model(model, os.fspath(path), save_as_external_data=True, location=_DATA)


def _load_onnx(folder: epath.Path) -> Run:
  import onnxruntime

  path = folder / 'model.onnx'
  source = os.fspath(path) if (folder / _DATA).exists() else path.read_bytes()
  session = onnxruntime.InferenceSession(source, providers=['CPUExecutionProvider'])
  names = [x.name for x in session.get_outputs()]
  return lambda inputs: dict(zip(names, session.run(names, inputs)))


class Format(NamedTuple):
  """Writes a program to a folder, and loads it from there."""

  write: Callable[[Program, epath.Path], None]
  load: Callable[[epath.Path], Run]


FORMATS = {
  'stablehlo': Format(_write_stablehlo, _load_stablehlo),
  'saved_model': Format(_write_saved_model, _load_saved_model),
  'onnx': Format(_write_onnx, _load_onnx),
}


# --- The comparison ---


class Comparison(NamedTuple):
  """An export next to the model, on the same inputs."""

  expected: dict[str, np.ndarray]  # The model's outputs [n, ...] by name.
  difference: float  # Largest absolute difference.
  inputs_description: str


def _write_and_compare(
  model: Any,
  run: Callable[..., dict[str, jax.Array]],
  program: Program,
  folder: epath.Path,
  to: str,
  tolerance: float,
) -> Comparison:
  """Writes a program, reads it again, and compares it with `run` of the model."""
  inputs, inputs_description = _inputs(model, program)
  weights = jax.device_get((model.params, model.extra))
  expected = jax.device_get(jax.jit(run)(weights, **inputs))
  write, load = FORMATS[to]
  write(program, folder)
  difference = _compare(load(folder), inputs, expected, tolerance, to)
  if 'image' not in program.inputs:  # A text tower.
    (folder / model.task.vocabulary_name).write_bytes(model.task.vocabulary())
  return Comparison(expected, difference, inputs_description)


def _inputs(model: Any, program: Program) -> tuple[dict[str, np.ndarray], str]:
  """Returns inputs [n, ...] by name, and a description of them."""
  if 'image' not in program.inputs:
    return model.task.sample(_IMAGES)
  rng = np.random.RandomState(0)
  spec = model.task.input_spec(None, _IMAGES)
  count, height, width, channels = spec['image'].shape
  images = [_smooth_image(rng, height, width, channels) for _ in range(count)]
  pixels = np.stack(images)
  if program.inputs['image'].dtype != jnp.uint8:
    pixels = pixels.astype(np.float32) / 127.5 - 1
  inputs = {'image': pixels}
  if 'real' in spec:  # Canvases whose lower quarter is padding.
    inputs['real'] = np.broadcast_to(
      np.arange(height)[:, None] < height * 3 / 4, (count, height, width)
    )
    inputs['image'] = np.where(inputs['real'][..., None], pixels, pixels.dtype.type(0))
  for name in spec.keys() - inputs:  # Numbers that are valid in any table.
    inputs[name] = rng.randint(0, 2, spec[name].shape).astype(spec[name].dtype)
  return {name: inputs[name] for name in program.inputs}, f'{count} random images'


def _smooth_image(
  rng: np.random.RandomState, height: int, width: int, channels: int
) -> np.ndarray:
  """Returns random pixels uint8 [height, width, channels] that are smooth, like photos."""
  bands = []
  for band in rng.randint(0, 256, (channels, 8, 8)).astype(np.uint8):
    image = Image.fromarray(band).resize((width, height), Image.Resampling.BICUBIC)
    bands.append(np.asarray(image))
  return np.stack(bands, -1)


def _computed(task: Any) -> str:
  """Returns the computation type of a task's model."""
  return jnp.dtype(getattr(task.model, 'dtype', None) or jnp.float32).name


def _compare(
  run: Run,
  inputs: Mapping[str, np.ndarray],
  want: Mapping[str, np.ndarray],
  tolerance: float,
  to: str,
) -> float:
  """Returns the largest difference to the model; ValueError if it is too large."""
  largest = 0.0
  for count in {1, len(next(iter(inputs.values())))}:
    outputs = run({name: x[:count] for name, x in inputs.items()})
    for name, expected in want.items():
      expected = np.asarray(expected[:count], np.float64)
      got = np.asarray(outputs[name], np.float64)
      difference = np.abs(got - expected).max()
      allowed = tolerance * max(1.0, np.abs(expected).max())
      if not difference <= allowed:  # True for NaN.
        raise ValueError(
          f"'{name}' of the {to} differs from JAX by {difference:.2g}, more than "
          f'{allowed:.2g}, so nothing was written: use another format (--to) or '
          'type (--dtype)'
        )
      largest = max(largest, float(difference))
  return largest


# --- The description ---


def _facts(
  model: Any,
  program: Program,
  want: Mapping[str, np.ndarray],
  uint8: bool,
) -> dict:
  """Returns the content of `model.json`."""
  names = ('vit_jax', 'jax', 'flax')
  outputs = {}
  for name, x in want.items():
    spec = jax.ShapeDtypeStruct(('batch', *x.shape[1:]), x.dtype)
    outputs[name] = _described(spec)
  return {
    'task': model.config.task,
    'model': model.config.model.get('model_name'),
    'step': model.step,
    'inputs': {name: _described(spec) for name, spec in program.inputs.items()},
    'outputs': outputs,
    'labels': list(model.task.output_names),
    'preprocessing': _preprocessing(model.task, program.inputs, uint8),
    'versions': {name: importlib.metadata.version(name) for name in names},
    'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
    **_similarity(model.params),
  }


def _checksums(folder: epath.Path) -> dict[str, str]:
  """Returns the SHA-256 of all files in a folder, by relative path."""
  hashes = {}
  for path in sorted(pathlib.Path(folder).rglob('*')):
    if path.is_file():
      hashes[path.relative_to(folder).as_posix()] = serving.sha256(path)
  return hashes


def _similarity(params: Mapping[str, Any]) -> dict:
  """Returns how products of embeddings become probabilities, for image-text models."""
  if 't' not in params:
    return {}
  similarity = {
    'scale': float(np.exp(np.sum(params['t']))),
    'bias': float(np.sum(params.get('b', 0.0))),
    'probabilities': 'sigmoid' if 'b' in params else 'softmax',
  }
  return {'similarity': similarity}


def _described(spec: jax.ShapeDtypeStruct) -> dict:
  shape = [n if isinstance(n, int) else str(n) for n in spec.shape]
  return {'shape': shape, 'dtype': np.dtype(spec.dtype).name}


def _preprocessing(
  task: Any, inputs: Mapping[str, jax.ShapeDtypeStruct], uint8: bool
) -> dict:
  """Returns how images (vit_jax/preprocess.py) or texts become inputs."""
  pp = task.config.pp
  spec = inputs.get('image')
  if spec is None:
    facts = {name: task.config.model.pp[name] for name in ('tokenizer_name', 'max_len')}
    return {**facts, 'vocab_path': task.vocabulary_name}
  *size, channels = _described(spec)['shape'][1:]
  facts = {
    'size': size,
    'channels': channels,
    'interpolation': pp.interpolation,
    'jpeg_shrink': bool(pp.jpeg_shrink),
  }
  if pp.sides:  # The aspect ratio is kept, and `size` is padded.
    group = canvases.evaluation(pp)
    facts.update(shorter_side=pp.eval_side, longest_side=group.longest, antialias=True)
  else:
    resize = list(pp.resize) if isinstance(pp.resize, tuple) else pp.resize
    names = ('resize_mode', 'antialias', 'crop_rounding')
    facts.update(resize=resize, **{name: pp[name] for name in names})
  if uint8:
    return {**facts, 'range': [0, 255]}
  if pp.range is not None:
    facts['value_range'] = _as_lists(pp.range)
    if pp.mean is not None:
      facts.update(value_mean=_as_lists(pp.mean), value_std=_as_lists(pp.std))
    return {**facts, 'range': [-1, 1]}
  half = [0.5] * channels  # For pixels from 0 to 1.
  return {**facts, 'range': [-1, 1], 'mean': half, 'std': half}


def _as_lists(values: Any) -> Any:
  """Returns nested tuples as lists, for JSON."""
  return list(map(_as_lists, values)) if isinstance(values, tuple | list) else values
