"""Reads weights of any kind into the published parameter tree.

Formats, and how each is recognised:

  npz       a file of arrays with '/' in their names, such as the published ones
            of ViT, Mixer and BiT
  timm      .safetensors or .bin with timm's names, or a folder with such a file;
            also model.safetensors.index.json, beside the files that it names
  hf        the same with Hugging Face's names (`ViTModel` and
            `ViTForImageClassification`, `DetrForObjectDetection`,
            `DetrForSegmentation`, `ImageGPTForCausalImageModeling` and
            `ImageGPTModel`, `CLIPModel` and `SiglipModel`)
  open_clip a CLIP with open_clip's names, a file or a folder likewise
  bert      a BERT of Hugging Face, as a text tower
  pth       a file released with DETR's paper
  resnet    a ResNet of timm, torchvision or Hugging Face, as a backbone
  workdir   folder of a run, with config.json and checkpoints

All but a workdir may also be on the Hugging Face Hub, see
vit_jax/weights/hub.py.
"""

import functools
import os
import re
from typing import NamedTuple

from etils import epath
import flax.traverse_util
import jax
import numpy as np

from vit_jax import console
from vit_jax.distributed import files, processes
from vit_jax.run import workdir as workdir_lib
from vit_jax.weights import arrays, descriptions, fetch, hub
from vit_jax.weights.families import families

# Name in a file -> name in Linen, of the layers in an encoder block. Files
# number the layers by their place in the block, Linen counts each kind
# separately.
_LINEN_NAMES = {
  'LayerNorm_2': 'LayerNorm_1',
  'MlpBlock_3': 'MlpBlock_0',
  'MultiHeadDotProductAttention_1': 'MultiHeadDotProductAttention_0',
}
_FILE_NAMES = {linen: name for name, linen in _LINEN_NAMES.items()}
_PREFIXES = ('opt/target/', 'params/')
# The same of a BiT file, of the layers in a unit and of those outside.
_BIT_NAMES = {
  'a/standardized_conv2d': 'conv1',
  'b/standardized_conv2d': 'conv2',
  'c/standardized_conv2d': 'conv3',
  'a/proj/standardized_conv2d': 'conv_proj',
  'a/group_norm': 'gn1',
  'b/group_norm': 'gn2',
  'c/group_norm': 'gn3',
  'root_block/standardized_conv2d': 'root_block/conv_root',
  'group_norm': 'norm-pre-head',
  'head/conv2d': 'head',
  'gamma': 'scale',  # Leaves of a norm.
  'beta': 'bias',
}
_BIT_FILE_NAMES = {name: published for published, name in _BIT_NAMES.items()}
# Names in `extra` of arrays that weights bring along, beside the parameters:
# constants of frozen norms.
EXTRA = ('frozen',)
_TORCH_ENDINGS = ('.safetensors', hub.INDEX, '.bin', '.pt', '.pth')


class Weights(NamedTuple):
  """Weights and their description.

  Attributes:
    params: nested dict of numpy arrays, with Linen's names.
    kind: format, see the top of this module.
    model: fields of the model that the arrays do not tell, such as the kind of
      GELU; a nested dict, empty for a published npz.
    class_names: in the order of the logits, or None if unknown.
    image_size: (height, width) in pixels, or None if unknown.
    extra: nested dict of the arrays beside the parameters, such as {'frozen':
      statistics}; see vit_jax.tasks.base.Task.init.
    metadata: further metadata of a run by name, such as a palette.
    resize: `config.pp.resize` of a run.
  """

  params: dict
  kind: str
  model: dict
  class_names: tuple[str, ...] | None = None
  image_size: tuple[int, int] | None = None
  extra: dict = {}  # noqa: RUF012
  metadata: dict = {}  # noqa: RUF012
  resize: int | tuple[int, int] | None = None


def read(
  path: str,
  num_heads: int | tuple[int, int] | None = None,
  dtype: str | None = None,
) -> Weights:
  """Reads weights of any format; warns of values that are not finite.

  All processes must call it. Of what is on the hub they take the same commit.

  Args:
    path: see the top of this module; local, https://, gs:// or hf://.
    num_heads: number of attention heads, or those of image and text tower;
      needed for files of timm, Hugging Face or open_clip if no config beside
      them tells it.
    dtype: type of the parameters, such as 'bfloat16'; None: that of the file.

  Raises:
    FileNotFoundError, PermissionError, OSError: if the file cannot be read.
    ValueError: if the file holds no weights, is damaged, holds pickled objects or
      other types than floats, or is of no model of this package.
    ImportError: if a package is missing; names the extra to install.
  """
  pair = num_heads if isinstance(num_heads, tuple) else (num_heads,)
  if any(count is not None and count < 1 for count in pair):
    raise ValueError(f'num_heads={num_heads} must be at least 1')
  if hub.is_at(path):
    commit = processes.from_first(
      'looking up a model on the hub', lambda: hub.commit(path)
    )
    path = hub.fetch(path, commit)  # Local, and so are the files beside it.
  found = existing(path)
  if found.is_dir() and (found / 'checkpoints').exists():
    weights = _read_workdir(found)
  elif found.is_dir():
    weights = _read_torch(_file_in(found), num_heads, found.joinpath, dtype)
  elif found.name.endswith(_TORCH_ENDINGS):
    beside = functools.partial(_beside, str(path).rpartition('/')[0])
    weights = _read_torch(found, num_heads, beside, dtype)
  else:
    weights = _read_npz(found, dtype)
  if dtype:
    convert = lambda x: np.asarray(x, dtype)
    weights = weights._replace(params=jax.tree.map(convert, weights.params))
  arrays.warn_of_what_is_not_finite(found, leaves_of(weights))
  return weights


def leaves_of(weights: Weights) -> dict:
  """Returns the parameters and the arrays beside them, by '/'-joined path."""
  tree = {**weights.params, **weights.extra}
  return flax.traverse_util.flatten_dict(tree, sep='/')


def _file_in(folder):
  """Returns the weights file in a folder of timm or Hugging Face."""
  for name in hub.FILES:
    if (folder / name).exists():
      return folder / name
  raise ValueError(
    f"'{folder}' is a folder without weights: neither a workdir (checkpoints/) "
    f'nor one of {hub.FILES}'
  )


def _beside(folder, name):
  """Returns the path of a file in a folder; fetches a remote one."""
  path = f'{folder}/{name}' if folder else name
  try:
    return fetch.fetch(path)
  except (FileNotFoundError, PermissionError):
    return fetch.local(path)  # It does not exist.


def check_packages(path: str):
  """Raises ImportError if a package is missing that reads these weights."""
  file = epath.Path(str(path).partition('?')[0].partition('://')[2] or path)
  if hub.is_at(path):
    file = epath.Path(hub.parse(path).path_in_repo or hub.FILES[0])
  elif file.is_dir() and not (file / 'checkpoints').exists():
    file = _file_in(file)
  if file.suffix in _TORCH_ENDINGS:
    console.needed('torch', 'torch', f"reading '{path}'")


def existing(path) -> epath.Path:
  """Returns the local path of a weights file; fetches a remote one.

  FileNotFoundError if it does not exist, ValueError if it is neither a file nor
  a folder.
  """
  # A folder in a bucket, such as a workdir, is read in place.
  bucket = str(path).startswith('gs://')
  whole = bucket and not str(path).endswith(('.npz', *_TORCH_ENDINGS))
  found = epath.Path(path) if whole else fetch.fetch(path)
  if not found.exists():
    raise FileNotFoundError(
      f"there is no weights file '{path}': give a published .npz, a .safetensors "
      "or .bin of timm's or Hugging Face's, a URL of one, hf://OWNER/NAME, or a "
      'workdir (config.pretrained), or the folder of the published files '
      '(config.pretrained_dir)' + fetch.elsewhere(str(path))
    )
  if not (found.is_dir() or files.is_remote(found) or os.path.isfile(found)):
    raise ValueError(f"'{path}' is a pipe or a device: give a file of weights")
  return found


def _read_npz(file, dtype):
  flat = {
    path: without_ones(path, leaf)
    for path, leaf in arrays.read_npz(file, _linen_name, dtype).items()
  }
  found = descriptions.read(descriptions.notes_file(file), descriptions.from_notes)
  model = families.of_tree(flat).beside_npz(file, flat, found.model)
  return _weights(flat, 'npz', found._replace(model=model))


def _weights(flat, kind, found: descriptions.Description) -> Weights:
  """Returns arrays by path, with what files beside them tell."""
  tree = flax.traverse_util.unflatten_dict(flat, sep='/')
  extra = {name: tree.pop(name) for name in EXTRA if name in tree}
  return Weights(
    tree,
    kind,
    found.model,
    found.class_names,
    found.image_size,
    extra,
    found.metadata,
  )


def without_ones(path: str, leaf: np.ndarray) -> np.ndarray:
  """Returns a leaf without the dimensions of 1 that some files add.

  Old files keep the scale and bias of GroupNorms as [1, 1, 1, C], and those of
  BiT the kernel of the head as [1, 1, D, classes].
  """
  if re.search(r'(gn[^/]*|norm-pre-head)/(scale|bias)$', path):
    return leaf.reshape(-1)
  if path == 'head/kernel' and leaf.ndim == 4 and leaf.shape[:2] == (1, 1):
    return leaf[0, 0]
  return leaf


def _linen_name(key):
  for prefix in _PREFIXES:
    key = key.removeprefix(prefix)
  if not key.startswith('resnet/'):
    return _rename_block(key, _LINEN_NAMES)
  # Some files number the convolutions: standardized_conv2d_3.
  key = re.sub(r'(standardized_conv2d)_\d+/', r'\1/', key)
  return _rename_bit(key.removeprefix('resnet/'), _BIT_NAMES)


def file_name(key: str, bit: bool = False) -> str:
  """Returns the published name of a parameter's path; `bit`: of a BiT ResNet."""
  if not bit:
    return _rename_block(key, _FILE_NAMES)
  return f'resnet/{_rename_bit(key, _BIT_FILE_NAMES)}' if '/' in key else key


def _rename_bit(key, names):
  """Renames layer and leaf of a BiT ResNet: '<block>/<unit>/<layer>/<leaf>'."""
  found = re.fullmatch(r'(block\d+/unit\d+/|)(.+)/(\w+)', key)
  if not found:
    return key
  unit, layer, leaf = found.groups()
  new = names.get(layer, layer)
  if 'group_norm' in f'{layer}/{new}':
    leaf = names.get(leaf, leaf)
  return f'{unit}{new}/{leaf}'


def _rename_block(key, names):
  """Renames the layer that follows 'encoderblock_<i>/' in a name."""
  return re.sub(
    r'(encoderblock_\d+/)([^/]+)',
    lambda match: match[1] + names.get(match[2], match[2]),
    key,
  )


def _read_workdir(folder):
  # Imported late: these modules import Orbax.
  from vit_jax.run import checkpoints as checkpoints_lib, config as run_config

  config, metadata = workdir_lib.load(folder)
  own = tuple(run_config.get_task(config.task).OWN_PARAMS)
  found = checkpoints_lib.load_weights(folder, EXTRA)
  flat = flax.traverse_util.flatten_dict(found.params, sep='/')
  flat = {k: v for k, v in flat.items() if not k.startswith(own)}
  crop = config.pp.crop
  size = (crop, crop) if isinstance(crop, int) else tuple(crop)
  return Weights(
    flax.traverse_util.unflatten_dict(flat, sep='/'),
    'workdir',
    config.model.to_dict(),
    tuple(metadata.pop('class_names', ())) or None,
    None if config.pp.sides else size,
    found.extra,
    metadata,
    config.pp.resize,
  )


def _heads(given, told):
  """Returns the number of heads, or a pair; ValueError for a contradiction."""
  if isinstance(given, tuple) and isinstance(told, tuple):
    return tuple(map(_heads, given, told))
  if isinstance(given, int) and isinstance(told, int) and given != told:
    raise ValueError(
      f'num_heads={given}, but the config beside it says {told}: give that, or '
      'nothing (--num_heads, or num_heads of the config of a run)'
    )
  return given if told is None else told


def _read_part(part, file, others, dtype):
  """Reads a file of `file`, whose other files hold the arrays `others`."""
  if not part.exists():
    raise FileNotFoundError(
      f"'{file}' names the file {part.name}, which is not beside it: put all "
      'files of the weights into one folder'
    )
  is_torch = not part.name.endswith('.safetensors')
  found = (arrays.read_torch if is_torch else arrays.read_safetensors)(part, dtype)
  if repeated := sorted(others.keys() & found):
    raise ValueError(
      f"'{part}' repeats {repeated[0]}, which another file of '{file}' has too"
    )
  return found


def _read_torch(file, num_heads, beside, dtype):
  """Reads a state dict, and files by name (`beside`) that describe it."""
  descriptions.read(beside('config.json'), families.check_type)
  flat, parts = {}, [file]
  if file.name.endswith(hub.INDEX):
    parts = [*map(beside, descriptions.read(file, descriptions.shards))]
  for part in parts:
    flat |= _read_part(part, file, flat, dtype)
  with arrays.naming(file, 'cannot be used'):
    family, naming = families.of_names(flat)
  found = family.read_beside(beside, file, flat, naming)
  with arrays.naming(file, 'cannot be used'):
    flat = family.load(flat, naming, _heads(num_heads, found.num_heads))
  return _weights(flat, naming, found)
