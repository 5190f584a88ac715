"""Writes a model's weights as npz, for timm, for Hugging Face, or as a workdir.

Every writer returns notes for the user: what the other library will compute
differently, or what its files cannot hold.
"""

import copy
import json
import math
from typing import NamedTuple

from etils import epath
import flax.traverse_util
import jax
import ml_collections
import numpy as np

from vit_jax.configs import common
from vit_jax.layouts import families
from vit_jax.layouts import vit as layouts
from vit_jax.run import workdir as workdir_lib
from vit_jax.weights import descriptions
from vit_jax.weights import fetch
from vit_jax.weights import identify
from vit_jax.weights import reading
from vit_jax.weights import state_dicts

# Description of a hybrid's sizes -> timm's name for it.
_TIMM_HYBRIDS = {
  'R+ViT-Ti_16': 'vit_tiny_r_s16_p8_224',
  'R26+ViT-S_32': 'vit_small_r26_s32_224',
  'R26+ViT-B_32': 'vit_base_r26_s32_224',
  'R50+ViT-B_16': 'vit_base_r50_s16_224',
  'R50+ViT-L_32': 'vit_large_r50_s32_224',
}


# Units per stage of a BiT ResNet -> timm's name for one, and its width factor.
_TIMM_BITS = {
  (3, 4, 6, 3): ('resnetv2_50x1_bit', 1),
  (3, 4, 23, 3): ('resnetv2_101x1_bit', 1),
  (3, 8, 36, 3): ('resnetv2_152x2_bit', 2),
}
# Fields that change what a model computes, but no shapes, and their defaults.
_COMPUTES = {
  'transformer.gelu': 'tanh',
  'transformer.norm_eps': 1e-6,
  'resnet.eps': 'published',
  'eps': 'published',
}


class Model(NamedTuple):
  """A model with its weights and everything that a writer needs.

  Attributes:
    params: nested dict of numpy arrays, with Linen's names.
    config: fields of the model without `num_classes`.
    class_names: in the order of the logits, or None if unknown.
    num_classes: width of the head; 0 if there is no head.
    image_size: (height, width) in pixels.
    extra: see vit_jax.weights.reading.Weights.
    metadata: likewise.
    source: format that the model was read from, see
      vit_jax.weights.reading.Weights.
  """

  params: dict
  config: ml_collections.ConfigDict
  class_names: tuple[str, ...] | None
  num_classes: int
  image_size: tuple[int, int]
  extra: dict = {}  # noqa: RUF012
  metadata: dict = {}  # noqa: RUF012
  source: str = ''


# Formats of classifiers. Those of other models are in vit_jax.layouts.
_FORMATS = ('npz', 'timm', 'hf', 'workdir')


def _family(model):
  """Returns the family of a model; None for a classifier."""
  return families.FAMILIES.get(model.config.get('kind'))


def check(model: Model, to: str) -> list[str]:
  """Checks that a format holds models of this kind; returns notes.

  Raises:
    ValueError: if it does not.
  """
  family = _family(model)
  formats = family.files.FORMATS if family else _FORMATS
  if to not in formats:
    raise ValueError(
      f'{identify.describe(model.params)} cannot be written as {to}: give '
      f'--to={"|".join(formats)}'
    )
  return family.files.notes(model, to) if family else []


def save(params, path: str):
  """Writes parameters as an .npz file, under the published names.

  Args:
    params: nested dict of arrays. They keep their types, except that bfloat16
      becomes float32, since .npz cannot hold bfloat16.
    path: the file; it appears only when it is complete.

  Raises:
    ValueError: if two arrays would get the same name in the file.
  """
  flat = flax.traverse_util.flatten_dict(jax.device_get(params), sep='/')
  names = {}  # Name in the file -> path in the tree.
  for key in flat:
    name = reading.file_name(key, layouts.is_bit(flat))
    if name in names:
      raise ValueError(
        f"'{names[name]}' and '{key}' would both be named '{name}' in '{path}', "
        'which uses the published names: rename the module (name=)'
      )
    names[name] = key
  flat = {
    name: np.asarray(
      flat[key], np.float32 if flat[key].dtype.name == 'bfloat16' else None
    )
    for name, key in names.items()
  }
  head = 'resnet/head/conv2d/kernel'
  if head in flat:  # Published BiT files hold it as a 1x1 convolution.
    flat[head] = flat[head][None, None]
  target = epath.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  temporary = target.parent / f'.{target.name}.tmp'
  with temporary.open('wb') as f:
    np.savez(f, **flat)
  temporary.replace(target)


def _write_npz(model, dst):
  published = identify.model_config(model.params)
  notes, beside = [], {}
  if model.class_names:
    beside['class_names'] = list(model.class_names)
  for key, here, there in _differences(model.config, published):
    *groups, name = key.split('.')[1:]
    fields = beside.setdefault('model', {})
    for group in groups:
      fields = fields.setdefault(group, {})
    fields[name] = here
    notes.append(
      f'readers of .npz compute with {key}={there}, but these weights were made '
      f'for {here}: logits differ a little'
    )
  if beside:
    file = descriptions.notes_file(dst)
    workdir_lib.write_atomically(file, json.dumps(beside, indent=1))
    notes.append(
      f'an .npz cannot hold {" and ".join(beside)}: they are in {file}, where '
      'this package finds them'
    )
  save(model.params, dst)
  return notes


def _differences(config, other):
  """Yields (key, value, other value) where two models compute differently."""
  for key, default in _COMPUTES.items():
    group, _, name = key.rpartition('.')
    ours, theirs = (c.get(group) if group else c for c in (config, other))
    if group and (ours is None or theirs is None):
      continue
    here, there = ours.get(name, default), theirs.get(name, default)
    if here != there:
      yield f'model.{key}', here, there


def _write_timm(model, dst):
  config = model.config
  flat = flax.traverse_util.flatten_dict(model.params, sep='/')
  bit = layouts.is_bit(flat)
  state = layouts.dump(model.params, 'timm')
  width = flat['norm-pre-head/scale'].size if bit else config.hidden_size
  architecture, args = (_timm_bit if bit else _timm_vit)(model)
  _write_torch(
    dst,
    state,
    dict(
      architecture=architecture,
      num_classes=model.num_classes,
      num_features=width,
      global_pool=args['global_pool'],
      model_args=args,
      pretrained_cfg=dict(
        num_classes=model.num_classes,
        input_size=(identify.channels(model.params), *model.image_size),
        crop_pct=1.0,
        interpolation='bilinear',
        first_conv=None,
        classifier='head.fc' if bit else 'head',
        **_pixels(model.params),
      ),
      **({'label_names': model.class_names} if model.class_names else {}),
    ),
  )
  computes = copy.deepcopy(config)
  if bit:
    computes.eps = 'timm'
  else:
    computes.transformer.norm_eps = 1e-6
  if config.get('resnet') is not None:
    computes.resnet.eps = 'timm'
  notes = [
    f'timm computes with {key}={there}, but these weights were made for {here}: '
    'logits differ a little'
    for key, here, there in _differences(config, computes)
  ]
  if 'pre_logits' in model.params and model.num_classes:
    notes.append(
      'timm ignores the pre-logits layer, though it is in the file: its logits '
      'are not those of this model'
    )
  return notes


def _timm_vit(model):
  """Returns timm's name of a ViT or hybrid, and its arguments there."""
  config, encoder = model.config, model.config.transformer
  architecture = 'vit_base_patch16_224'
  if config.get('resnet') is not None:
    name = identify.describe(model.params)
    if name not in _TIMM_HYBRIDS:
      raise ValueError(
        f'timm has no hybrid like {name}: it has {sorted(_TIMM_HYBRIDS)} (--to)'
      )
    architecture = _TIMM_HYBRIDS[name]
  return architecture, dict(
    img_size=model.image_size,
    patch_size=_one(config.patches.size),
    embed_dim=config.hidden_size,
    depth=encoder.num_layers,
    num_heads=encoder.num_heads,
    # timm truncates this product to an integer.
    mlp_ratio=math.nextafter(encoder.mlp_dim / config.hidden_size, math.inf),
    in_chans=identify.channels(model.params),
    class_token=config.classifier == 'token',
    global_pool='token' if config.classifier == 'token' else 'avg',
    fc_norm=False,
    act_layer='gelu_tanh' if encoder.get('gelu', 'tanh') == 'tanh' else 'gelu',
  )


def _timm_bit(model):
  """Returns timm's name of a BiT ResNet, and its arguments there."""
  config = model.config
  units, width = tuple(config.num_layers), config.width_factor
  if units not in _TIMM_BITS:
    raise ValueError(
      f'timm has no BiT ResNet of {units} units: it has {list(_TIMM_BITS)} (--to)'
    )
  architecture, factor = _TIMM_BITS[units]
  # timm multiplies these by the width factor of the architecture.
  channels = [int(256 * 2**i * width) // factor for i in range(len(units))]
  return architecture, dict(
    in_chans=identify.channels(model.params),
    stem_chs=int(64 * width) // factor,
    channels=channels,
    global_pool='avg',
  )


def _write_hf(model, dst):
  family = _family(model)
  if family is None:
    return _write_hf_vit(model, dst)
  layout = family.files.layout(model.config, 'hf')
  state = family.layout.dump(reading.leaves_of(model), layout)
  files = family.files.files(model)
  _write_torch(dst, state, files.pop('config.json'))
  for name, content in files.items():
    (dst / name).write_text(json.dumps(content, indent=1))
  return []


def _write_pth(model, dst):
  """Writes a detector under the names of the files released with DETR."""
  files = _family(model).files
  layout = files.layout(model.config, 'pth')
  state = _family(model).layout.dump(reading.leaves_of(model), layout)
  temporary = dst.parent / f'.{dst.name}.tmp'
  with fetch.local_output(temporary) as file:
    if dst.suffix == '.pth':
      state_dicts.write(file, {'model': state})
    else:
      _save_safetensors(state, file)
  temporary.replace(dst)
  return []


def _write_hf_vit(model, dst):
  config = model.config
  state = layouts.dump(model.params, 'hf')
  encoder = config.transformer
  pooled = 'pre_logits' in model.params
  whole = model.num_classes and not pooled
  names = model.class_names or [f'LABEL_{i}' for i in range(model.num_classes)]
  height, width = model.image_size
  _write_torch(
    dst,
    state,
    dict(
      model_type='vit',
      architectures=['ViTForImageClassification' if whole else 'ViTModel'],
      hidden_size=config.hidden_size,
      num_hidden_layers=encoder.num_layers,
      num_attention_heads=encoder.num_heads,
      intermediate_size=encoder.mlp_dim,
      hidden_act='gelu_pytorch_tanh'
      if encoder.get('gelu', 'tanh') == 'tanh'
      else 'gelu',
      layer_norm_eps=encoder.get('norm_eps', 1e-6),
      hidden_dropout_prob=0.0,
      attention_probs_dropout_prob=0.0,
      qkv_bias=True,
      image_size=_one(model.image_size),
      patch_size=_one(config.patches.size),
      num_channels=identify.channels(model.params),
      pooler_act='tanh',
      pooler_output_size=config.get('representation_size')
      or config.hidden_size,
      id2label={str(i): name for i, name in enumerate(names)},
      label2id={name: i for i, name in enumerate(names)},
    ),
  )
  processor = dict(
    image_processor_type='ViTImageProcessor',
    do_resize=True,
    size=dict(height=height, width=width),
    resample=2,
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    image_mean=_pixels(model.params)['mean'],
    image_std=_pixels(model.params)['std'],
  )
  (dst / 'preprocessor_config.json').write_text(json.dumps(processor, indent=1))
  if whole:
    return []
  notes = ['load it as ViTModel(Config): the model has no classifier']
  if pooled and model.num_classes:
    notes = [
      'ViTForImageClassification has no pre-logits layer: load it as ViTModel, '
      'whose pooler_output is the pre-logits; the head is in the file'
    ]
  return notes


def _one(pair):
  """Returns one number for a square, else a list of two."""
  return pair[0] if pair[0] == pair[1] else list(pair)


def _pixels(params):
  """Returns the mean and deviation that map pixels in [0, 1] to [-1, 1]."""
  half = (0.5,) * identify.channels(params)
  return dict(mean=half, std=half)


def _write_torch(dst, state, config):
  dst.mkdir(parents=True)
  with fetch.local_output(dst / 'model.safetensors') as file:
    _save_safetensors(state, file)
  (dst / 'config.json').write_text(json.dumps(config, indent=1))


def _save_safetensors(state, file):
  try:
    from safetensors import numpy as safetensors
  except ImportError as e:
    raise ImportError(
      'writing .safetensors needs the package safetensors: pip install -e '
      "'.[interop]' in the checkout of vit_jax"
    ) from e
  safetensors.save_file(state, file, metadata={'format': 'pt'})


def as_run(model: Model) -> tuple[ml_collections.ConfigDict, dict]:
  """Returns config and metadata of a finished run of one step, for a model.

  Classes without known names are named by their numbers.
  """
  from vit_jax.run import config as run_config

  config = common.get_config()
  config.model = model.config
  config.pp.crop = model.image_size
  config.update(total_steps=1, warmup_steps=0, batch=1, batch_eval=32)
  family = _family(model)
  if family is not None:
    config.update(family.files.run(model))
  else:
    config.pp.channels = identify.channels(model.params)
  names = model.class_names or [str(i) for i in range(model.num_classes)]
  metadata = {'class_names': list(names), **model.metadata}
  known = run_config.get_task(config.task).METADATA
  missing = sorted(set(known) - set(metadata))
  if missing:
    raise ValueError(
      f"a run of the task '{config.task}' needs {missing}, which these weights do "
      'not bring along: put the preprocessor_config.json of the model beside '
      'them'
    )
  return run_config.complete(config), {name: metadata[name] for name in known}


def _write_workdir(model, dst):
  # Imported late: these modules import Orbax and optax.
  from vit_jax.learning import optim
  from vit_jax.learning import state as state_lib
  from vit_jax.run import checkpoints as checkpoints_lib

  config, metadata = as_run(model)
  tx = optim.get_optimizer(config, lambda _: 0.0)
  params, extra = (
    jax.tree.map(np.asarray, tree) for tree in (model.params, model.extra)
  )
  state = state_lib.TrainState(np.int32(1), params, tx.init(params), extra)
  workdir_lib.create(dst, config, metadata, data={})
  checkpoints = checkpoints_lib.Checkpoints(dst)
  checkpoints.save(1, state)
  checkpoints.close()
  if model.num_classes and not model.class_names:
    return ['class names are unknown: give --class_names=FILE']
  return []


WRITERS = {
  'npz': _write_npz,
  'timm': _write_timm,
  'hf': _write_hf,
  'pth': _write_pth,
  'workdir': _write_workdir,
}
# Formats that are a single file, and how its name may end.
FILES = {'npz': ('.npz',), 'pth': ('.pth', '.safetensors')}
