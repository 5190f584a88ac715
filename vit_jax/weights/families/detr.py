"""DETR's weights in other libraries: names of arrays, and Hugging Face's JSON files.

There are two namings of a detector, and one of a backbone:

  hf            `DetrForObjectDetection`, `DetrForSegmentation`
  pth           the files released with the paper, {'model': state dict}
  resnet        a ResNet without a detector

and two of the backbone itself: timm's, also in torchvision and the released
files, and Hugging Face's own. The constants of frozen batch norm
are at 'frozen/' in the tree, separate from the parameters.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import re
from typing import Any

from etils import epath
import ml_collections
import numpy as np

from vit_jax import models_detr
from vit_jax.configs import detr as recipe, models as model_configs, schema
from vit_jax.layers import resnet
from vit_jax.weights import descriptions, preparation
from vit_jax.weights.families import base, leaves

_MASK_HEAD = 'segmentation/'
_QUERIES = 'query_embedding'
# Rows of vit_jax.weights.families.leaves for a ResNet: names of timm and of
# Hugging Face. The norms are in a tree of their own.
_ROOT = (('conv_root', 'conv', 'conv1', 'embedder.embedder.convolution'),)
_ROOT_NORM = (('bn_root', 'frozen', 'bn1', 'embedder.embedder.normalization'),)
_UNIT = (
  ('conv1', 'conv', 'conv1', 'layer.0.convolution'),
  ('conv2', 'conv', 'conv2', 'layer.1.convolution'),
  ('conv3', 'conv', 'conv3', 'layer.2.convolution'),
  ('conv_proj', 'conv', 'downsample.0', 'shortcut.convolution'),
)
_UNIT_NORMS = (
  ('bn1', 'frozen', 'bn1', 'layer.0.normalization'),
  ('bn2', 'frozen', 'bn2', 'layer.1.normalization'),
  ('bn3', 'frozen', 'bn3', 'layer.2.normalization'),
  ('bn_proj', 'frozen', 'downsample.1', 'shortcut.normalization'),
)
_UNITS = 'backbone/block{1}/unit{1}/'
_THEIR_UNITS = 'layer{1}.{0}.', 'encoder.stages.{0}.layers.{0}.'
# The same for encoder, decoder and the rest: names of Hugging Face and of the
# released files.
_FIRST = (
  *leaves.attention('self_attention', 'self_attn', 'self_attn'),
  ('LayerNorm_0', 'norm', 'self_attn_layer_norm', 'norm1'),
  ('Dense_0', 'dense', 'fc1', 'linear1'),
  ('Dense_1', 'dense', 'fc2', 'linear2'),
)
_LAYERS = {
  'encoder': (*_FIRST, ('LayerNorm_1', 'norm', 'final_layer_norm', 'norm2')),
  'decoder': (
    *_FIRST,
    *leaves.attention('cross_attention', 'encoder_attn', 'multihead_attn'),
    ('LayerNorm_1', 'norm', 'encoder_attn_layer_norm', 'norm2'),
    ('LayerNorm_2', 'norm', 'final_layer_norm', 'norm3'),
  ),
}
_OTHERS = (
  (_QUERIES, 'same', 'model.query_position_embeddings.weight', 'query_embed.weight'),
  ('input_proj', 'conv', 'model.input_projection', 'input_proj'),
  ('decoder_norm', 'norm', 'model.decoder.layernorm', 'transformer.decoder.norm'),
  ('class_head', 'dense', 'class_labels_classifier', 'class_embed'),
  ('box_head/Dense_0', 'dense', 'bbox_predictor.layers.0', 'bbox_embed.layers.0'),
  ('box_head/Dense_1', 'dense', 'bbox_predictor.layers.1', 'bbox_embed.layers.1'),
  ('box_head/Dense_2', 'dense', 'bbox_predictor.layers.2', 'bbox_embed.layers.2'),
)
_MASK_ROWS = (
  ('attention/query', 'heads', 'bbox_attention.q_linear'),
  ('attention/key', 'heads', 'bbox_attention.k_linear'),
  ('conv_0', 'conv', 'mask_head.lay1'),
  ('convolutions/conv_1', 'conv', 'mask_head.lay2'),
  ('convolutions/conv_2', 'conv', 'mask_head.lay3'),
  ('convolutions/conv_3', 'conv', 'mask_head.lay4'),
  ('convolutions/conv_4', 'conv', 'mask_head.lay5'),
  ('convolutions/norm_0', 'norm', 'mask_head.gn1'),
  ('convolutions/norm_1', 'norm', 'mask_head.gn2'),
  ('convolutions/norm_2', 'norm', 'mask_head.gn3'),
  ('convolutions/norm_3', 'norm', 'mask_head.gn4'),
  ('convolutions/norm_4', 'norm', 'mask_head.gn5'),
  ('adapter_0', 'conv', 'mask_head.adapter1'),
  ('adapter_1', 'conv', 'mask_head.adapter2'),
  ('adapter_2', 'conv', 'mask_head.adapter3'),
  ('convolutions/output', 'conv', 'mask_head.out_lay'),
)


# Names in memory of transformers 5 -> in its files.
_MEMORY = (
  (r'^model\.backbone\.(?=model\.)', 'model.backbone.conv_encoder.'),
  (r'(attn)\.o_proj\.', r'\1.out_proj.'),
  (r'^(model\.\w+\.layers\.\d+)\.mlp\.', r'\1.'),
  (r'^bbox_attention\.([qk])_proj\.', r'bbox_attention.\1_linear.'),
  (r'^mask_head\.conv([12])\.conv\.', r'mask_head.lay\1.'),
  (r'^mask_head\.conv([12])\.norm\.', r'mask_head.gn\1.'),
  (r'^mask_head\.fpn_stages\.0\.fpn_adapter\.', 'mask_head.adapter1.'),
  (r'^mask_head\.fpn_stages\.1\.fpn_adapter\.', 'mask_head.adapter2.'),
  (r'^mask_head\.fpn_stages\.2\.fpn_adapter\.', 'mask_head.adapter3.'),
  (r'^mask_head\.fpn_stages\.0\.refine\.conv\.', 'mask_head.lay3.'),
  (r'^mask_head\.fpn_stages\.1\.refine\.conv\.', 'mask_head.lay4.'),
  (r'^mask_head\.fpn_stages\.2\.refine\.conv\.', 'mask_head.lay5.'),
  (r'^mask_head\.fpn_stages\.0\.refine\.norm\.', 'mask_head.gn3.'),
  (r'^mask_head\.fpn_stages\.1\.refine\.norm\.', 'mask_head.gn4.'),
  (r'^mask_head\.fpn_stages\.2\.refine\.norm\.', 'mask_head.gn5.'),
  (r'^mask_head\.output_conv\.', 'mask_head.out_lay.'),
)


def _backbone(style: int, start: str) -> tuple[leaves.Group, ...]:
  """Returns the table of a ResNet; `style`: 0 for timm, 1 for Hugging Face."""
  units = start + _THEIR_UNITS[style]
  return (
    ('backbone/', start, leaves.column(_ROOT, style)),
    ('frozen/backbone/', start, leaves.column(_ROOT_NORM, style)),
    (_UNITS, units, leaves.column(_UNIT, style)),
    (f'frozen/{_UNITS}', units, leaves.column(_UNIT_NORMS, style)),
  )


def _detector(
  kind: str, number: int, style: int, backbone: str, start: str, **options: Any
) -> leaves.Naming:
  """Returns a naming; `number` and `style` are columns, the rest prefixes."""
  rows = leaves.column(_OTHERS, number)
  encoder = leaves.column(_LAYERS['encoder'], number)
  decoder = leaves.column(_LAYERS['decoder'], number)
  _, _, queries = rows[0]
  return leaves.Naming(
    kind,
    'DETR',
    (
      *_backbone(style, backbone),
      ('', '', rows),
      ('encoder_layer_{0}/', f'{start}.encoder.layers.{{0}}.', encoder),
      ('decoder_layer_{0}/', f'{start}.decoder.layers.{{0}}.', decoder),
      (_MASK_HEAD, '', _MASK_ROWS),
    ),
    marks=(queries,),
    old_names=((r'^detr\.', ''), *_MEMORY),
    program='the DETR of other programs',
    **options,
  )


_HF_BACKBONE = 'model.backbone.conv_encoder.model.'
_NAMINGS = {
  'hf': _detector('hf', 0, 0, _HF_BACKBONE, 'model'),
  'hf, own backbone': _detector('hf', 0, 1, _HF_BACKBONE, 'model'),
  'pth': _detector(
    'pth',
    1,
    0,
    'backbone.0.body.',
    'transformer',
    joined={'.in_proj_': ('.q_proj.', '.k_proj.', '.v_proj.')},
  ),
  'resnet': leaves.Naming(
    'resnet',
    'ResNet of bottlenecks',
    _backbone(0, '') + _backbone(1, ''),
    marks=tuple(f'{name}.weight' for name in _ROOT[0][2:]),
    old_names=((r'^resnet\.', ''),),
    ignored=r'(fc|classifier)\.',
  ),
}


# Number of classes of the published panoptic models, and the first one of stuff.
_PANOPTIC, _STUFF_FROM = 250, 91
# Units per stage -> timm's name of backbones that Hugging Face takes from timm.
_TIMM = {(3, 4, 6, 3): 'resnet50', (3, 4, 23, 3): 'resnet101'}


class Detrs(base.Family):
  """DETR with a ResNet as the backbone."""

  noun = 'a detector'
  kind = 'detr'
  leaf = _QUERIES
  formats = ('hf', 'pth', 'workdir')
  hf_types = ('detr', 'resnet')
  pads = True
  preparation = preparation.Preparation(
    size=max(recipe.SIDES), longest_side=1333, antialias=True
  )
  normalization = models_detr.MEAN, models_detr.STD
  computes = {'dilate_last': False}  # noqa: RUF012
  head = 'class_head/bias'
  groups = (model_configs.Detr,)
  namings = _NAMINGS

  def naming(self, naming: str, names: Mapping[str, Any]) -> leaves.Naming:
    """Hugging Face has its own ResNet where timm has none of these sizes."""
    if naming != 'hf':
      return self.namings[naming]
    if _QUERIES in names:  # Paths in this package.
      width = names['backbone/conv_root/kernel'].shape[-1]
      is_hf_backbone = not _is_of_timm(leaves.units(names, _UNITS), width)
    else:
      prefix = f'{_HF_BACKBONE}embedder.'
      is_hf_backbone = any(name.startswith(prefix) for name in names)
    return self.namings['hf, own backbone' if is_hf_backbone else 'hf']

  def load(
    self, flat: dict[str, np.ndarray], naming: str, num_heads: base.NumHeads
  ) -> dict[str, np.ndarray]:
    """Returns the parameters; models of width 256 have 8 heads, as published."""
    table = self.namings[naming]
    leaves.rename(flat, table.old_names)
    queries = flat.get(table.marks[0])
    if queries is not None and queries.shape[-1:] == (256,):  # As published.
      num_heads = num_heads or 8
    return super().load(flat, naming, num_heads)

  def dump(self, flat: Mapping[str, np.ndarray], naming: str) -> dict[str, np.ndarray]:
    """Returns the arrays by name; with a mask head the others begin with 'detr.'."""
    state = super().dump(flat, naming)
    if not any(path.startswith(_MASK_HEAD) for path in flat):
      return state
    # All names get a prefix, except in a mask head.
    leaves.rename(state, ((r'^(?!(mask_head|bbox_attention)\.)', 'detr.'),))
    return state

  def sizes(
    self, flat: leaves.Shapes, known_fields: Mapping[str, Any]
  ) -> dict[str, Any]:
    sizes = {
      'kind': 'detr',
      'units': leaves.units(flat, _UNITS),
      'backbone_width': flat['backbone/conv_root/kernel'][-1],
      'norm': 'group' if 'backbone/bn_root/scale' in flat else 'frozen_batch',
      'hidden_size': flat[_QUERIES][1],
      'num_queries': flat[_QUERIES][0],
      'num_encoder_layers': leaves.count(flat, 'encoder_layer_{0}/'),
      'num_decoder_layers': leaves.count(flat, 'decoder_layer_{0}/'),
      'num_heads': flat['decoder_layer_0/self_attention/query/kernel'][1],
      'mlp_dim': flat['decoder_layer_0/Dense_0/kernel'][1],
    }
    if any(path.startswith(_MASK_HEAD) for path in flat):
      sizes['mask_head'] = True
    return {**sizes, **known_fields}

  def describe(self, fields: Mapping[str, Any]) -> str:
    units = tuple(fields['units'])
    names = {units: name.upper() for name, units in resnet.UNITS.items()}
    layers = f'{fields["num_encoder_layers"]}+{fields["num_decoder_layers"]}'
    backbone = names.get(units, f'ResNet of {units} units')
    masks = ', mask head' if fields.get('mask_head') else ''
    return (
      f'DETR of {layers} layers, width {fields["hidden_size"]}, '
      f'{fields["num_queries"]} queries, backbone {backbone}{masks}'
    )

  def num_classes(self, flat: Mapping[str, Any]) -> int:
    """The last one is "no object"."""
    return max(0, super().num_classes(flat) - 1)

  def read_description(
    self,
    sibling: Callable[[str], epath.Path],
    file: epath.Path,
    flat: dict[str, np.ndarray],
    naming: str,
  ) -> descriptions.Description:
    """Reads config.json; without it, the file's name may say 'dc5'."""
    describe = functools.partial(_from_config, name=file.name)
    return descriptions.read(sibling('config.json'), describe)

  def checked_names(self, names: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """The last classes of COCO's panoptic models have no names."""
    num_gaps = num_classes - len(names)
    gaps = [schema.NO_CLASS] * num_gaps
    return super().checked_names([*names, *gaps], num_classes)

  def run(self, model: Any) -> dict[str, Any]:
    """Images of an unknown size are prepared as in the published recipe."""
    largest = model.preparation.size or max(recipe.SIDES)
    sides = tuple(side for side in recipe.SIDES if side <= largest)
    pp = {}
    if model.image_size is None:
      pp['sides'] = sides or (largest,)
    return {
      'task': 'segment' if model.config.get('mask_head') else 'detect',
      'task_options': {'max_objects': min(100, model.config.num_queries)},
      'pp': pp,
    }

  def metadata(self, model: Any) -> dict[str, Any]:
    """In COCO's panoptic classes, the numbers up to 90 are things."""
    count = model.num_classes
    stuff = _STUFF_FROM if count == _PANOPTIC else count
    return {'isthing': [i < stuff for i in range(count)]}

  def check(self, model: Any) -> None:
    things = model.metadata.get('isthing')
    if things is not None and len(things) != model.num_classes:
      raise ValueError(
        f'isthing has {len(things)} entries for {model.num_classes} classes'
      )

  def notes(self, model: Any, to: str) -> list[str]:
    if 'pth' not in (model.source, to):
      return []
    dilated = 'has a' if model.config.get('dilate_last') else 'has no'
    return [
      f"the last stage of this model's backbone {dilated} dilation (DC5), which "
      "only a released file's name shows: keep 'dc5' in it if there is one, and only "
      'then'
    ]

  def files(self, model: Any, to: str) -> tuple[dict[str, dict], list[str]]:
    config = model.config
    fields = dict(
      model_type='detr',
      architectures=['DetrForObjectDetection'],
      d_model=config.hidden_size,
      num_queries=config.num_queries,
      encoder_layers=config.num_encoder_layers,
      decoder_layers=config.num_decoder_layers,
      encoder_attention_heads=config.num_heads,
      decoder_attention_heads=config.num_heads,
      encoder_ffn_dim=config.mlp_dim,
      decoder_ffn_dim=config.mlp_dim,
      activation_function='relu',
      position_embedding_type='sine',
      dropout=0.1,
      attention_dropout=0.0,
      **descriptions.label_fields(model),
      **_backbone_fields(config),
    )
    annotations = 'coco_detection'
    if config.get('mask_head'):
      annotations = 'coco_panoptic'
      fields['architectures'] = ['DetrForSegmentation']
      # For this package; others ignore it.
      fields['isthing'] = {**self.metadata(model), **model.metadata}['isthing']
    prepared = dataclasses.replace(
      model.preparation, mean=models_detr.MEAN, std=models_detr.STD
    )
    processor = preparation.to_hf(
      prepared, model.image_size, 3, format=annotations, do_pad=True
    )
    return {'config.json': fields, 'preprocessor_config.json': processor}, []


def _is_of_timm(units: Sequence[int], width: int) -> bool:
  """Returns whether Hugging Face takes a backbone from timm."""
  return tuple(units) in _TIMM and width == 64


def _from_config(config: Mapping[str, Any], name: str) -> descriptions.Description:
  """Returns what config.json says; without it, the name of the weights may say 'dc5'."""
  heads = descriptions.field(config, 'encoder_attention_heads', schema.Count)
  descriptions.check_supported(
    config,
    decoder_attention_heads=heads,
    position_embedding_type='sine',
    activation_function='relu',
  )
  backbone = descriptions.field(config, 'backbone_config', dict, {})
  descriptions.check_supported(
    backbone,
    downsample_in_first_stage=False,
    downsample_in_bottleneck=False,
    hidden_act='relu',
  )
  dilated = descriptions.field(config, 'dilation', bool, False)
  if not config:
    dilated = re.search('dc5', name, re.IGNORECASE) is not None
  # This package writes `isthing`.
  things = descriptions.field(config, 'isthing', tuple[bool, ...])
  return descriptions.Description(
    {'dilate_last': dilated or backbone.get('output_stride') == 16},
    descriptions.labels(config, gap=schema.NO_CLASS),
    metadata={'isthing': things} if things else {},
    num_heads=heads,
  )


def _backbone_fields(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the fields of config.json that describe the backbone."""
  dilated = bool(config.get('dilate_last'))
  units, width = config.units, config.backbone_width
  if _is_of_timm(units, width):
    return dict(
      use_timm_backbone=True,
      use_pretrained_backbone=False,
      backbone=_TIMM[tuple(units)],
      dilation=dilated,
    )
  if dilated:
    raise ValueError(
      f'Hugging Face has a dilated backbone (DC5) only of the sizes {list(_TIMM)}: '
      'write this model as a run or a released file (--to=workdir, --to=pth)'
    )
  stages = [f'stage{i + 1}' for i in range(len(units))]
  hidden_sizes = [4 * width * 2**i for i in range(len(units))]
  return dict(
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone_config=dict(
      model_type='resnet',
      layer_type='bottleneck',
      embedding_size=width,
      hidden_sizes=hidden_sizes,
      depths=list(units),
      out_features=stages if config.get('mask_head') else stages[-1:],
    ),
  )
