"""Reads weights of any kind into the published parameter tree.

What is read, and by what it is known:

  published npz   a file of arrays with '/' in their names, or a URL or gs://
  timm            .safetensors or .bin with timm's names, or a folder of it
  hf              the same with Hugging Face's names (`ViTModel` and
                  `ViTForImageClassification`)
  workdir         folder of a run: config.json and checkpoints
"""

import json
import re
from typing import Any
from typing import NamedTuple
import zipfile

from etils import epath
import flax.traverse_util
import numpy as np

from vit_jax import cli
from vit_jax.configs import models as model_configs
from vit_jax.run import workdir as workdir_lib
from vit_jax.weights import fetch
from vit_jax.weights import layouts

# Name in a file -> name in Linen, for the layers of an encoder block. Files name
# them by their place in the block, Linen counts each kind on its own.
_LINEN_NAMES = {
  'LayerNorm_2': 'LayerNorm_1',
  'MlpBlock_3': 'MlpBlock_0',
  'MultiHeadDotProductAttention_1': 'MultiHeadDotProductAttention_0',
}
_FILE_NAMES = {linen: name for name, linen in _LINEN_NAMES.items()}
_PREFIXES = ('opt/target/', 'params/')
# Files of weights in a folder of timm's or Hugging Face's, the best first.
FILES = ('model.safetensors', 'pytorch_model.bin')
_TORCH_ENDINGS = ('.safetensors', '.bin', '.pt', '.pth')
_NPZ_ERRORS = (
  ValueError,
  OSError,
  EOFError,
  AttributeError,
  zipfile.BadZipFile,
)
_GELUS = {
  'gelu': 'erf',
  'gelu_new': 'tanh',
  'gelu_pytorch_tanh': 'tanh',
  'gelu_fast': 'tanh',
  'gelu_tanh': 'tanh',
}


class Weights(NamedTuple):
  """Weights, and what came with them.

  Attributes:
    params: nested dict of numpy arrays, Linen's names.
    kind: 'npz', 'timm', 'hf' or 'workdir'.
    model: fields of the model that the arrays do not tell, the kind of GELU for
      one; a nested dict, empty for a published npz.
    class_names: in the order of the logits, or None where they are not known.
    image_size: (height, width) in pixels, or None where it is not known.
  """

  params: dict
  kind: str
  model: dict
  class_names: tuple[str, ...] | None = None
  image_size: tuple[int, int] | None = None


def read(path: str, num_heads: int | None = None) -> Weights:
  """Reads weights of any kind.

  Args:
    path: see the top of this module; local, https:// or gs://.
    num_heads: number of attention heads, for files of timm's or Hugging Face's
      that come without a config.json and are of an unusual width.

  Raises:
    FileNotFoundError, PermissionError, OSError: if it is not there.
    ValueError: if it is no file of weights, is damaged or truncated, holds
      pickled objects, or is not of a plain ViT, hybrid or Mixer.
    ImportError: if a package is missing; names the extra to install.
  """
  found = _existing(path)
  if found.is_dir():
    if (found / 'checkpoints').exists():
      return _read_workdir(found)
    files = [found / name for name in FILES if (found / name).exists()]
    if not files:
      raise ValueError(
        f"'{path}' is a folder without weights: neither a workdir (checkpoints/) "
        f'nor one of {FILES}'
      )
    return _read_torch(files[0], num_heads, found / 'config.json')
  if found.suffix in _TORCH_ENDINGS:
    return _read_torch(found, num_heads, _config_beside(path))
  return _read_npz(found)


def _config_beside(path):
  """Path of the config.json beside a file, fetched if it is a remote one."""
  folder, _, _ = str(path).rpartition('/')
  try:
    return fetch.fetch(f'{folder}/config.json' if folder else 'config.json')
  except OSError:
    return epath.Path(folder) / 'config.json'  # There is none.


def _existing(path):
  # A bucket's folder, a workdir for one, is read where it is.
  bucket = str(path).startswith('gs://')
  whole = bucket and not str(path).endswith(('.npz', *_TORCH_ENDINGS))
  found = epath.Path(path) if whole else fetch.fetch(path)
  if not found.exists():
    raise FileNotFoundError(
      f"there is no weights file '{path}': give a published .npz, a .safetensors "
      "or .bin of timm's or Hugging Face's, a URL of one, or a workdir "
      '(config.pretrained), or the folder of the published files '
      '(config.pretrained_dir)' + fetch.elsewhere(str(path))
    )
  return found


def _read_npz(file):
  flat = {}
  try:
    with file.open('rb') as f, np.load(f, allow_pickle=False) as arrays:
      for key in arrays.files:
        flat[_linen_name(key)] = arrays[key]
  except _NPZ_ERRORS as e:
    with file.open('rb') as f:
      whole = zipfile.is_zipfile(f)
    reason = 'it is no zip archive, or only part of one'
    if whole:
      reason = 'it is damaged, or holds pickled objects, which are never loaded'
    raise ValueError(
      f"'{file}' is not an .npz file of weights: {reason}"
    ) from e
  for key, value in flat.items():
    # Old files keep the scale and bias of GroupNorms with dimensions of 1.
    if re.search(r'gn[^/]*/(scale|bias)$', key):
      flat[key] = value.reshape(-1)
  beside = notes_file(file)
  notes = _read_json(beside) if beside.exists() else {}
  names = notes.get('class_names')
  return Weights(
    flax.traverse_util.unflatten_dict(flat, sep='/'),
    'npz',
    notes.get('model', {}),
    tuple(names) if names else None,
  )


def notes_file(npz) -> epath.Path:
  """Path of what an .npz cannot hold, a JSON file beside it: class names, and
  fields of the model in which it differs from the published ones."""
  npz = epath.Path(npz)
  return npz.with_name(f'{npz.name}.json')


def _linen_name(key):
  for prefix in _PREFIXES:
    key = key.removeprefix(prefix)
  return _rename_block(key, _LINEN_NAMES)


def file_name(key: str) -> str:
  """Returns the name in published files of a '/'-joined path of Linen's."""
  return _rename_block(key, _FILE_NAMES)


def _rename_block(key, names):
  """Renames the layer that comes after 'encoderblock_<i>/'."""
  return re.sub(
    r'(encoderblock_\d+/)([^/]+)',
    lambda match: match[1] + names.get(match[2], match[2]),
    key,
  )


def _read_workdir(folder):
  # Late: they bring Orbax and TensorFlow.
  from vit_jax.run import checkpoints as checkpoints_lib
  from vit_jax.run import config as run_config

  cli.load_tensorflow()
  config, metadata = workdir_lib.load(folder)
  own = run_config.get_task(config.task).OWN_PARAMS
  flat = flax.traverse_util.flatten_dict(
    checkpoints_lib.load_params(folder), sep='/'
  )
  flat = {k: v for k, v in flat.items() if not k.startswith(tuple(own))}
  return Weights(
    flax.traverse_util.unflatten_dict(flat, sep='/'),
    'workdir',
    config.model.to_dict(),
    tuple(metadata.get('class_names', ())) or None,
    image_size=_pair(config.pp.crop),
  )


def _read_torch(file, num_heads, beside):
  """Reads a state dict of timm's or Hugging Face's, and its config.json."""
  flat = _state_dict(file)
  layout = layouts.detect(flat)
  if layout is None:
    raise ValueError(
      f"'{file}' holds no Vision Transformer by timm's or Hugging Face's names; "
      f'it has {sorted(flat)[:4]} ...'
    )
  config = _read_json(beside) if beside.exists() else {}
  found = _from_timm if layout == 'timm' else _from_hf
  model, class_names, image_size = found(config, file)
  heads = num_heads or model['transformer'].pop('num_heads', None)
  heads = heads or _usual_heads(flat, layout, file)
  try:
    flat = layouts.load(flat, layout, heads)
  except ValueError as e:
    raise ValueError(f"'{file}': {e}") from None
  params = flax.traverse_util.unflatten_dict(flat, sep='/')
  if 'conv_root/kernel' in flat:
    model['resnet'] = {'eps': 'timm'}
  return Weights(params, layout, model, class_names, image_size=image_size)


def _state_dict(file) -> dict[str, np.ndarray]:
  """Reads arrays by name, and runs no code that the file may hold."""
  if file.suffix == '.safetensors':
    try:
      from safetensors import SafetensorError
      from safetensors import numpy as safetensors
    except ImportError as e:
      raise ImportError(
        f"'{file}' needs the package safetensors: pip install "
        "'vit_jax[interop]'"
      ) from e
    try:
      return safetensors.load_file(file)
    except (SafetensorError, OSError) as e:
      raise ValueError(
        f"'{file}' is no .safetensors file, or only part of one: {e}"
      ) from e
  try:
    import torch
  except ImportError as e:
    raise ImportError(
      f"'{file}' needs PyTorch to be read: pip install 'vit_jax[torch]', or take "
      'the .safetensors file of the same model'
    ) from e
  try:
    state = torch.load(file, map_location='cpu', weights_only=True)
  except Exception as e:
    raise ValueError(
      f"'{file}' is no file of PyTorch weights, is only part of one, or holds "
      'pickled objects, which are never loaded'
    ) from e
  if isinstance(state, dict):
    state = state.get('state_dict', state.get('model', state))
  if not isinstance(state, dict) or not all(
    isinstance(value, torch.Tensor) for value in state.values()
  ):
    raise ValueError(f"'{file}' holds no state dict: arrays by name")
  return {
    name: value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    for name, value in state.items()
  }  # fmt: skip


def _gelu(name, file):
  if name not in _GELUS:
    raise ValueError(
      f"'{file}': activation '{name}' (config.json) is none that a ViT has here: "
      f'{sorted(_GELUS)}'
    )
  return _GELUS[name]


def _pair(size):
  return (size, size) if isinstance(size, int) else tuple(size)


def _from_hf(config, file):
  """What Hugging Face's config.json says: (model fields, classes, size)."""
  transformer = dict(
    gelu=_gelu(config.get('hidden_act', 'gelu'), file),
    norm_eps=float(config.get('layer_norm_eps', 1e-12)),
  )
  if 'num_attention_heads' in config:
    transformer['num_heads'] = config['num_attention_heads']
  names = config.get('id2label')
  if names:
    names = tuple(names[key] for key in sorted(names, key=int))
  size = config.get('image_size')
  return dict(transformer=transformer), names or None, size and _pair(size)


def _from_timm(config, file):
  """What timm's config.json says: (model fields, classes, size)."""
  args = config.get('model_args', {})
  pretrained = config.get('pretrained_cfg', {})
  transformer = dict(
    gelu=_gelu(args.get('act_layer', 'gelu'), file), norm_eps=1e-6
  )
  architecture = config.get('architecture', '')
  for part, size in (
    ('tiny', 'Ti'),
    ('small', 'S'),
    ('base', 'B'),
    ('large', 'L'),
    ('huge', 'H'),
  ):
    if f'_{part}_' in architecture:
      transformer['num_heads'] = model_configs.SIZES[size][3]
  if 'num_heads' in args:
    transformer['num_heads'] = args['num_heads']
  size = args.get('img_size') or pretrained.get('input_size', (0, 0, 0))[1:]
  names = config.get('label_names') or pretrained.get('label_names')
  return (
    dict(transformer=transformer),
    tuple(names) if names else None,
    _pair(size) if any(_pair(size)) else None,
  )


def _usual_heads(flat, layout, file):
  """Number of heads that goes with a width in the table of sizes."""
  bias = 'patch_embed.proj.bias'
  if layout == 'hf':
    [bias] = [k for k in flat if k.endswith('patch_embeddings.projection.bias')]
  width = flat[bias].shape[0] if bias in flat else None
  for _, size, _, heads in model_configs.SIZES.values():
    if size == width:
      return heads
  raise ValueError(
    f"'{file}' does not say how many attention heads its model of width {width} "
    'has: put its config.json beside it, or give num_heads'
  )


def _read_json(path) -> Any:
  try:
    return json.loads(path.read_text())
  except ValueError as e:
    raise ValueError(f"'{path}' is damaged: {e}") from e
