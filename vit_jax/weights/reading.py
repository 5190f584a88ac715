"""Reads weights of any kind into the published parameter tree.

Formats, and how each is recognised:

  npz       a file of arrays with '/' in their names, such as the published ones
            of ViT, Mixer and BiT
  timm      .safetensors or .bin with timm's names, or a folder with such a file;
            also model.safetensors.index.json, next to the files that it names, and
            MoCo v3's .pth.tar, of which the base encoder is taken; also the names
            of torchvision's Vision Transformer and of DINOv2's authors;
            `VisionTransformer`, `Eva` and `Beit` there
  hf        the same with Hugging Face's names (`ViTModel` and
            `ViTForImageClassification`, likewise of DeiT, I-JEPA and MAE,
            `Dinov2Model` and `Dinov2WithRegistersModel` and their
            classifiers, `DINOv3ViTModel`,
            `DetrForObjectDetection`, `DetrForSegmentation`,
            `ImageGPTForCausalImageModeling` and `ImageGPTModel`, `CLIPModel` and
            `SiglipModel`, also their image towers alone)
  open_clip a CLIP with open_clip's names, likewise a file or a folder
  bert      a BERT of Hugging Face, as a text tower
  pth       a file released with DETR's paper
  resnet    a ResNet of timm, torchvision or Hugging Face, as a backbone
  workdir   the folder of a run, with config.json and checkpoints

All but npz and workdir may be in a checkpoint of another training program, see
vit_jax/weights/unwrapping.py. The content of a file counts, not its ending.

All but a workdir may also be on the Hugging Face Hub, see
vit_jax/weights/hub.py.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import contextvars
import os
from typing import Any, NamedTuple

from absl import logging
from etils import epath
import flax.traverse_util
import jax
import numpy as np

from vit_jax import console
from vit_jax.configs import schema
from vit_jax.distributed import files, processes
from vit_jax.weights import (
  adapters,
  arrays,
  descriptions,
  fetch,
  hub,
  identify,
  paths,
  preparation as preparation_lib,
  published,
  torch_files,
  unwrapping,
)
from vit_jax.weights.families import base, families

# Collections in `extra` that weights include: constants of frozen norms.
EXTRA = ('frozen',)
# Folders of the runs whose bases are being read: each but the first is the base of the
# one before.
_runs: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar('runs')


class Weights(NamedTuple):
  """Weights and their description.

  Attributes:
    params: nested dict of numpy arrays, with Linen's names.
    kind: format, see the top of this module.
    model: fields of the model that cannot be inferred from the arrays, such as
      the kind of GELU; a nested dict, empty for a published npz.
    class_names: in the order of the logits, or None if unknown.
    image_size: (height, width) in pixels, or None if unknown.
    extra: nested dict of arrays other than parameters, such as {'frozen':
      statistics}; see vit_jax.tasks.base.Task.init.
    metadata: further metadata of a run by name, such as a palette.
    preparation: how images are prepared, as the files next to the weights say.
    adapters: config of a run with adapters, which `params` include, and what the run
      has trained by path; None for other weights.
    omitted: paths of parameters that only the task of a run has.
  """

  params: dict
  kind: str
  model: dict
  class_names: tuple[str, ...] | None = None
  image_size: tuple[int, int] | None = None
  extra: dict = {}  # noqa: RUF012
  metadata: dict = {}  # noqa: RUF012
  preparation: preparation_lib.Preparation = preparation_lib.Preparation()
  adapters: tuple[Any, dict] | None = None
  omitted: tuple[str, ...] = ()


def read(
  path: str,
  num_heads: int | tuple[int, int] | None = None,
  dtype: str | None = None,
  entry: str | None = None,
  base: str | None = None,
) -> Weights:
  """Reads weights of any format; warns of values that are not finite.

  All processes must call it. They all read the same Hub commit.

  Args:
    path: see the top of this module; local, https://, gs:// or hf://.
    num_heads: number of attention heads, or a pair for image and text tower;
      needed for files of timm, Hugging Face or open_clip without a config that
      contains it.
    dtype: type of the parameters, such as 'bfloat16'; None: as in the file.
    entry: which model of a checkpoint with several to read, such as 'student'; None:
      the averaged weights, see vit_jax/weights/unwrapping.py.
    base: weights of timm or Hugging Face into which the adapters at `path`, in PEFT's
      format, are merged; see vit_jax/weights/adapters.py.

  Raises:
    FileNotFoundError, PermissionError, OSError: if the file cannot be read.
    ValueError: if it is damaged, holds pickled objects or other types than floats,
      or is not of a model of this package.
    ImportError: if a package is missing; names the extra to install.
  """
  counts = num_heads if isinstance(num_heads, tuple) else (num_heads,)
  for count in counts:
    schema.check('num_heads', count, schema.Count | None, '--')
  peft_adapters = None if base is None else _read_adapters(path)
  path = _local(path if base is None else base)
  local_path = paths.existing(path)
  if _is_workdir(local_path):
    weights = _read_workdir(local_path)
  elif local_path.is_dir():
    weights = _read_torch(
      _file_in(local_path), local_path.joinpath, num_heads, dtype, entry, peft_adapters
    )
  elif _is_torch(local_path):
    weights = _read_torch(
      local_path, _siblings_of(path), num_heads, dtype, entry, peft_adapters
    )
  else:
    weights = _read_npz(local_path, dtype)
  if weights.kind in ('npz', 'workdir'):
    _check_options(path, entry, base)
  if dtype:
    params = jax.tree.map(lambda x: np.asarray(x, dtype), weights.params)
    weights = weights._replace(params=params)
  arrays.warn_if_not_finite(local_path, leaves_of(weights))
  return weights


def _check_options(path: epath.PathLike, entry: str | None, base: str | None) -> None:
  """Raises ValueError for options that are only for files of other programs."""
  if entry is not None:
    raise ValueError(
      f"entry='{entry}' selects a model in a checkpoint of another program, but "
      f"'{path}' has only one: leave it out (--entry, config.pretrained_entry)"
    )
  if base is not None:
    raise ValueError(
      f"base='{base}' must be the weights of timm or Hugging Face that the adapters were "
      'trained with (--base)'
    )


def read_preparation(
  path: str,
  num_heads: int | tuple[int, int] | None = None,
  entry: str | None = None,
) -> preparation_lib.Preparation:
  """Reads only how images are prepared for weights; see `read`."""
  file = paths.existing(_local(path))
  if _is_workdir(file):
    from vit_jax.run import workdir as workdir_lib

    config, _ = workdir_lib.load(file)
    return preparation_lib.from_run(config)
  if file.is_dir() or arrays.format_of(file) != 'npz':
    return read(path, num_heads, entry=entry).preparation
  notes = descriptions.notes_file(file)
  described = descriptions.read(notes, descriptions.from_notes)
  if not described.preparation:
    return preparation_lib.Preparation()
  return preparation_lib.from_notes(described.preparation, notes.name)


def _is_workdir(path: epath.Path) -> bool:
  return path.is_dir() and (path / 'checkpoints').exists()


def _is_torch(file: epath.Path) -> bool:
  """Returns whether a file has the arrays of another program, or is their index."""
  return bool(hub.INDEX.fullmatch(file.name)) or arrays.format_of(file) != 'npz'


def _local(path: str) -> str | epath.Path:
  """Returns where weights and their siblings are; fetches a model from the hub."""
  if not hub.is_hub_path(path):
    return path
  commit = processes.from_first(
    'looking up a model on the hub', lambda: hub.commit(path)
  )
  return hub.fetch(path, commit)


def _siblings_of(path: epath.PathLike) -> Callable[[str], epath.Path]:
  """Returns a function from a name to the local path of a file next to `path`."""
  folder = str(path).rpartition('/')[0]
  return lambda name: _fetched(f'{folder}/{name}' if folder else name)


def _read_adapters(path: str) -> adapters.Adapters:
  """Reads adapters in PEFT's format, a folder or a file."""
  path = _local(path)
  file = paths.existing(path)
  sibling = file.joinpath if file.is_dir() else _siblings_of(path)
  file = _file_in(file) if file.is_dir() else file
  with arrays.file_errors(file):
    state = torch_files.to_numpy(_content(file), None)
    if not adapters.has_adapters(state):
      raise ValueError(
        'it has no adapters of PEFT, to which base belongs: leave out base (--base)'
      )
  return descriptions.read(
    sibling(adapters.CONFIG), lambda config: adapters.from_config(config, state)
  )


def _content(file: epath.Path, dtype: str | None = None) -> Any:
  """Returns the content of a .safetensors file or a checkpoint of PyTorch."""
  if arrays.format_of(file) == 'safetensors':
    return arrays.read_safetensors(file, dtype)
  return torch_files.load(file)


def leaves_of(weights: Any) -> dict[str, np.ndarray]:
  """Returns all arrays of a Weights or a writing.Model, by '/'-joined path."""
  tree = {**weights.params, **weights.extra}
  return flax.traverse_util.flatten_dict(tree, sep='/')


def _file_in(folder: epath.Path) -> epath.Path:
  """Returns the weights file in a folder of timm or Hugging Face."""
  for pattern in hub.FILES:
    if matches := sorted(folder.glob(pattern)):
      if len(matches) > 1:
        names = [path.name for path in matches]
        logging.warning(
          "'%s' has several weights: reading '%s', not '%s' (pass the path of a file)",
          folder,
          names[0],
          "', '".join(names[1:]),
        )
      return matches[0]
  raise ValueError(
    f"'{folder}' is a folder without weights: neither a workdir (checkpoints/) "
    f'nor one of {hub.FILES}'
  )


def _fetched(path: str) -> epath.Path:
  """Returns the local path of a file; fetches a remote one, if it exists."""
  try:
    return fetch.fetch(path)
  except (FileNotFoundError, PermissionError):
    return fetch.local(path)


def check_packages(path: str) -> None:
  """Raises ImportError if a package is missing that reads these weights."""
  without_query = str(path).partition('?')[0]
  _, _, path_of_url = without_query.partition('://')
  file = epath.Path(path_of_url or files.expanded(path))
  if hub.is_hub_path(path):
    file = epath.Path(hub.parse(path).path_in_repo or hub.FILES[0])
  elif file.is_dir() and not _is_workdir(file):
    file = _file_in(file)
  is_file = not file.is_dir() and not hub.INDEX.fullmatch(file.name)
  if is_file and arrays.format_of(file) == 'torch':
    console.require('torch', 'torch', f"reading '{path}'")


def _read_npz(file: epath.Path, dtype: str | None) -> Weights:
  notes = descriptions.notes_file(file)
  description = descriptions.read(notes, descriptions.from_notes)
  with arrays.file_errors(file):
    flat = arrays.read_npz(file, dtype)
    for name, path in published.linen_names(flat).items():
      flat[path] = published.without_ones(path, flat.pop(name))
  family = families.from_tree(flat)
  with arrays.file_errors(notes):
    descriptions.check_fields(description.model, family.stated_fields())
    model = family.complete_npz(file, flat, description.model)
    description = _with_names(description._replace(model=model), flat)
    preparation = family.preparation
    if description.preparation:
      preparation = preparation_lib.from_notes(description.preparation, notes.name)
  with arrays.file_errors(file):
    return _weights(flat, 'npz', description)._replace(preparation=preparation)


def _with_names(
  description: descriptions.Description, flat: Mapping[str, np.ndarray]
) -> descriptions.Description:
  """Returns a description that names all classes of a head, or none."""
  family = families.from_tree(flat)
  num_classes = family.num_classes(flat)
  if description.class_names is None or not num_classes:
    return description
  names = family.checked_names(description.class_names, num_classes)
  return description._replace(class_names=names)


def _weights(
  flat: dict[str, np.ndarray], kind: str, description: descriptions.Description
) -> Weights:
  """Returns arrays by path as a tree, with their description."""
  tree = flax.traverse_util.unflatten_dict(flat, sep='/')
  extra = {name: tree.pop(name) for name in EXTRA if name in tree}
  model, class_names, image_size, metadata, *_ = description
  return Weights(tree, kind, model, class_names, image_size, extra, metadata)


def _read_workdir(folder: epath.Path) -> Weights:
  # Only weights of runs need the modules of runs, some of which import Orbax.
  from vit_jax.learning import lora
  from vit_jax.run import checkpoints, config as run_config, workdir as workdir_lib

  config, metadata = workdir_lib.load(folder)
  task_class = run_config.get_task(config.task)
  stored = checkpoints.load_weights(folder, EXTRA)
  params = stored.params
  trained = None
  if config.lora.rank:
    trained = config, flax.traverse_util.flatten_dict(params, sep='/')
    task = task_class(config, metadata)
    init = lora.adapted(task.init, config)
    shapes, extra = jax.eval_shape(init, jax.random.key(0))
    with _reading_base_of(folder):
      params = jax.tree.map(np.asarray, task.merged(params, shapes, extra, folder))
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  task_prefixes = tuple(task_class.OWN_PARAMS)
  omitted = tuple(path for path in flat if path.startswith(task_prefixes))
  flat = {path: x for path, x in flat.items() if path not in omitted}
  preparation = preparation_lib.from_run(config)
  return Weights(
    params=flax.traverse_util.unflatten_dict(flat, sep='/'),
    kind='workdir',
    model=config.model.to_dict(),
    class_names=tuple(metadata.pop('class_names', ())) or None,
    image_size=preparation.crop,
    extra=stored.extra,
    metadata=metadata,
    preparation=preparation,
    adapters=trained,
    omitted=omitted,
  )


@contextlib.contextmanager
def _reading_base_of(folder: epath.Path) -> Iterator[None]:
  """Raises ValueError if the base of a run is that run, directly or by others."""
  runs = _runs.get(())
  path = os.path.realpath(folder)
  if path in runs:
    raise ValueError(
      f"the adapters in '{folder}' start from themselves: restore its config.json "
      '(config.pretrained)'
    )
  token = _runs.set((*runs, path))
  try:
    yield
  finally:
    _runs.reset(token)


def _read_torch(
  file: epath.Path,
  sibling: Callable[[str], epath.Path],
  num_heads: int | tuple[int, int] | None,
  dtype: str | None,
  entry: str | None,
  peft_adapters: adapters.Adapters | None,
) -> Weights:
  """Reads a state dict, and the files (`sibling`: by name) that describe it."""
  descriptions.read(sibling('config.json'), families.check_type)
  content = _content_of_shards(file, sibling, dtype)
  with arrays.file_errors(file):
    state = unwrapping.unwrap(content, families.knows, entry)
    del content
    flat = torch_files.to_numpy(state, dtype)
    if adapters.has_adapters(flat):
      base = descriptions.read(sibling(adapters.CONFIG), adapters.describe_base)
      raise ValueError(
        f'it holds adapters of PEFT for {base}, not a whole model: pass the weights of '
        'that model as base (--base)'
      )
    family, naming = families.from_names(flat)
    if peft_adapters is not None:
      old_names = family.naming(naming, flat).old_names
      adapters.merge(flat, peft_adapters, old_names)
    description = family.read_description(sibling, file, flat, naming)
    if peft_adapters is not None:  # Their head has other classes.
      description = description._replace(class_names=None)
    flat = family.load(flat, naming, _heads(num_heads, description.num_heads))
    weights = _weights(flat, naming, _with_names(description, flat))
    weights = weights._replace(preparation=_preparation(sibling, naming, family, flat))
    _check_complete(weights.params, descriptions.read(sibling('config.json')))
    return weights


def _content_of_shards(
  file: epath.Path, sibling: Callable[[str], epath.Path], dtype: str | None
) -> Any:
  """Returns the content of a file, or of all files that an index lists."""
  shards = [file]
  if hub.INDEX.fullmatch(file.name):
    shards = [sibling(name) for name in descriptions.read(file, descriptions.shards)]
  content: Any = {}
  for shard in shards:
    if not shard.exists():
      raise FileNotFoundError(
        f"'{file}' names the file {shard.name}, which is not in its folder: put all "
        'files of the weights into one folder'
      )
    with arrays.file_errors(shard):
      shard_content = _content(shard, dtype)
      content = {**content, **shard_content} if content else shard_content
  return content


def _preparation(
  sibling: Callable[[str], epath.Path],
  naming: str,
  family: base.Family,
  flat: Mapping[str, np.ndarray],
) -> preparation_lib.Preparation:
  """Returns how images are prepared for arrays by path, as their files say.

  Warns if pixels are scaled in a way that neither the model nor its task has.
  """
  stated = preparation_lib.read(sibling, naming)
  if stated is None:
    return family.preparation
  if stated.longest_side is not None and not family.pads:
    raise ValueError(
      f'{stated.source} limits the longer side of images to {stated.longest_side} '
      'pixels, which this package does only for models of objects: correct its size'
    )
  channels = family.scaled_channels(flat)
  shapes = ((), (channels,))
  if channels and np.shape(stated.mean) in shapes and np.shape(stated.std) in shapes:
    return stated
  if not stated.scales_as(*family.normalization):
    logging.warning(
      f'These weights were trained on pixels scaled by mean={stated.mean} and '
      f'std={stated.std} (in {stated.source}), but this package scales them by '
      f'{family.normalization}: expect worse results until the model is fine-tuned'
    )
  return stated.unscaled()


def _check_complete(params: Mapping[str, Any], config: Mapping[str, Any]) -> None:
  """Raises ValueError if config.json states other layers, registers or patches."""
  field = descriptions.field
  image = field(config, 'vision_config', dict, config)
  args = field(config, 'model_args', dict, {})
  depth = field(args, 'depth', schema.Natural)
  stated_layers = field(image, 'num_hidden_layers', schema.Natural, depth)
  registers = field(args, 'num_reg_tokens', schema.Natural)
  registers = field(args, 'reg_tokens', schema.Natural, registers)
  stated_registers = field(image, 'num_register_tokens', schema.Natural, registers)
  stated_patch = field(image, 'patch_size', schema.Size)
  if stated_layers is None and stated_registers is None and stated_patch is None:
    return
  model = identify.model_config(params)
  if model is None:
    raise ValueError(
      'it lacks arrays of the model in its config.json: download the weights again'
    )
  model = model.get('image', model)
  layers = (model.get('transformer') or {}).get('num_layers')
  if layers is None:
    return
  registers = model.get('registers', 0)
  patch = tuple(model.patches.size) if 'patches' in model else None
  if isinstance(stated_patch, int):
    stated_patch = stated_patch, stated_patch
  for name, actual, expected in (
    ('num_layers', layers, stated_layers),
    ('registers', registers, stated_registers),
    ('patches.size', patch, descriptions.as_tuple(stated_patch)),
  ):
    if expected is not None and actual != expected:
      raise ValueError(
        f'it has the arrays of {name}={actual}, but its config.json says {expected}: '
        'download the weights again'
      )


def _heads(requested: Any, stated: Any) -> Any:
  """Returns the number of heads, or a pair; ValueError for a contradiction."""
  if isinstance(requested, tuple) and isinstance(stated, tuple):
    return tuple(map(_heads, requested, stated))
  if isinstance(requested, int) and isinstance(stated, int) and requested != stated:
    raise ValueError(
      f'num_heads={requested}, but its config says {stated}: leave out num_heads '
      '(--num_heads, or num_heads of the config of a run)'
    )
  return requested if stated is None else stated
