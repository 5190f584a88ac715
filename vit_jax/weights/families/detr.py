"""DETR's weights elsewhere: names of arrays, and Hugging Face's JSON files.

There are two namings of a detector, and one of a backbone alone:

  hf            `DetrForObjectDetection`, `DetrForSegmentation`
  pth           the files released with the paper, {'model': state dict}
  resnet        a ResNet alone, without a detector

and two of its backbone: 'timm', that of timm, torchvision and the released
files, and 'transformers', that of Hugging Face's own ResNet. The constants of
frozen batch norm are at 'frozen/' in the tree, beside the parameters.
"""

from collections.abc import Iterator
import functools
import re
import types

from vit_jax import models_detr
from vit_jax.configs import common, detr as recipe, schema
from vit_jax.layers import resnet
from vit_jax.weights import descriptions
from vit_jax.weights.families import base, leaves

_MASK_HEAD = 'segmentation/'
# Beginning of the backbone's names.
_BACKBONE = {
  'hf': 'model.backbone.conv_encoder.model.',
  'pth': 'backbone.0.body.',
  'resnet': '',
}
_QUERIES = {
  'hf': 'model.query_position_embeddings.weight',
  'pth': 'query_embed.weight',
}
# Beginning of the names of encoder and decoder.
_START = {'hf': 'model', 'pth': 'transformer'}
# Parts of the names of a mask head, which all namings share.
_MASKS = ('mask_head.', 'bbox_attention.')
# Module names of transformers 5 -> names in its files, which the table uses.
_OLD_NAMES = (
  (r'^(detr|resnet)\.', ''),
  (r'^model\.backbone\.model\.', _BACKBONE['hf']),
  (r'_attn\.o_proj\.', '_attn.out_proj.'),
  (r'(layers\.\d+)\.mlp\.fc', r'\1.fc'),
  (r'^bbox_attention\.([qk])_proj', r'bbox_attention.\1_linear'),
  (r'^mask_head\.conv(\d)\.conv', r'mask_head.lay\1'),
  (r'^mask_head\.conv(\d)\.norm', r'mask_head.gn\1'),
  (r'^mask_head\.output_conv', 'mask_head.out_lay'),
  *(
    (rf'^mask_head\.fpn_stages\.{i}\.{new}', f'mask_head.{old}')
    for i in range(3)
    for new, old in (
      ('fpn_adapter', f'adapter{i + 1}'),
      (r'refine\.conv', f'lay{i + 3}'),
      (r'refine\.norm', f'gn{i + 3}'),
    )
  ),
)
# Projections of queries, keys and values, which the released files join.
_JOINED = '.in_proj_', ('.q_proj.', '.k_proj.', '.v_proj.')


# Rows of vit_jax.weights.families.leaves for a ResNet, with both namings of it.
_STYLES = ('timm', 'transformers')
_ROOT = (
  ('conv_root', 'conv', 'conv1', 'embedder.embedder.convolution'),
  ('bn_root', 'frozen', 'bn1', 'embedder.embedder.normalization'),
)
_BOTTLENECK = (
  *((f'conv{i}', 'conv', f'conv{i}', f'layer.{i - 1}.convolution') for i in (1, 2, 3)),
  *((f'bn{i}', 'frozen', f'bn{i}', f'layer.{i - 1}.normalization') for i in (1, 2, 3)),
  ('conv_proj', 'conv', 'downsample.0', 'shortcut.convolution'),
  ('bn_proj', 'frozen', 'downsample.1', 'shortcut.normalization'),
)  # fmt: skip
# Naming -> beginning of a unit's names, and number of the first stage.
_UNITS = {
  'timm': ('layer{}.{}.', 1),
  'transformers': ('encoder.stages.{}.layers.{}.', 0),
}


def _backbone(units, style, start) -> Iterator[leaves.Leaf]:
  """Yields the leaves of a ResNet with these numbers of units per stage."""
  column = 2 + _STYLES.index(style)
  unit, first = _UNITS[style]
  found = [*leaves.layers(_ROOT, column, there=start)]
  for i, count in enumerate(units):
    for j in range(count):
      here = f'block{i + 1}/unit{j + 1}/'
      there = start + unit.format(i + first, j)
      found += leaves.layers(_BOTTLENECK, column, here, there)
  for path, layout, name in found:
    is_norm = path.split('/')[-2].startswith('bn')
    top = 'frozen/backbone/' if is_norm else 'backbone/'
    yield top + path, layout, name


# Rows of vit_jax.weights.families.leaves, with the names of both namings.
_MLP = (
  ('Dense_0', 'dense', 'fc1', 'linear1'),
  ('Dense_1', 'dense', 'fc2', 'linear2'),
)
_LAYERS = {
  'encoder': (
    *leaves.attention('self_attention', 'self_attn', 'self_attn'),
    ('LayerNorm_0', 'norm', 'self_attn_layer_norm', 'norm1'),
    ('LayerNorm_1', 'norm', 'final_layer_norm', 'norm2'),
    *_MLP,
  ),
  'decoder': (
    *leaves.attention('self_attention', 'self_attn', 'self_attn'),
    *leaves.attention('cross_attention', 'encoder_attn', 'multihead_attn'),
    ('LayerNorm_0', 'norm', 'self_attn_layer_norm', 'norm1'),
    ('LayerNorm_1', 'norm', 'encoder_attn_layer_norm', 'norm2'),
    ('LayerNorm_2', 'norm', 'final_layer_norm', 'norm3'),
    *_MLP,
  ),
}
_OTHERS = (
  ('query_embedding', 'leaf', _QUERIES['hf'], _QUERIES['pth']),
  ('input_proj', 'conv', 'model.input_projection', 'input_proj'),
  ('decoder_norm', 'norm', 'model.decoder.layernorm', 'transformer.decoder.norm'),
  ('class_head', 'dense', 'class_labels_classifier', 'class_embed'),
  ('box_head/Dense_0', 'dense', 'bbox_predictor.layers.0', 'bbox_embed.layers.0'),
  ('box_head/Dense_1', 'dense', 'bbox_predictor.layers.1', 'bbox_embed.layers.1'),
  ('box_head/Dense_2', 'dense', 'bbox_predictor.layers.2', 'bbox_embed.layers.2'),
)  # fmt: skip
# The same of a mask head, whose names are those of all namings.
_MASK_ROWS = (
  ('attention/query', 'heads', 'bbox_attention.q_linear'),
  ('attention/key', 'heads', 'bbox_attention.k_linear'),
  ('conv_0', 'conv', 'mask_head.lay1'),
  *((f'convolutions/conv_{i}', 'conv', f'mask_head.lay{i + 1}') for i in range(1, 5)),
  *((f'convolutions/norm_{i}', 'norm', f'mask_head.gn{i + 1}') for i in range(5)),
  *((f'adapter_{i}', 'conv', f'mask_head.adapter{i + 1}') for i in range(3)),
  ('convolutions/output', 'conv', 'mask_head.out_lay'),
)  # fmt: skip


def _table(naming, layers: dict[str, int]) -> Iterator[leaves.Leaf]:
  """Yields the leaves of all but the backbone, with names of 'hf' or 'pth'."""
  column = 2 + ('hf', 'pth').index(naming)
  yield from leaves.layers(_OTHERS, column)
  for side, count in layers.items():
    for i in range(count):
      here, there = f'{side}_layer_{i}/', f'{_START[naming]}.{side}.layers.{i}.'
      yield from leaves.layers(_LAYERS[side], column, here, there)
  yield from leaves.layers(_MASK_ROWS, here=_MASK_HEAD)


def _style(names, naming) -> str | None:
  """Returns the naming of the backbone."""
  for style, root in zip(_STYLES, _ROOT[0][2:]):
    if f'{_BACKBONE[naming]}{root}.weight' in names:
      return style
  return None


# Width and heads of the published models.
_PUBLISHED = 256, 8
# Classes of the published models for panoptic segmentation, and the first number
# of a class of stuff.
_PANOPTIC, _STUFF_FROM = 250, 91
# Units per stage -> timm's name, of backbones that Hugging Face takes from timm.
_TIMM = {(3, 4, 6, 3): 'resnet50', (3, 4, 23, 3): 'resnet101'}


class Detrs(base.Family):
  """DETR with a ResNet as the backbone."""

  words = 'a detector'
  kind = 'detr'
  leaf = 'query_embedding'
  formats = ('hf', 'pth', 'workdir')
  hf_types = ('detr', 'resnet')
  computes = types.MappingProxyType({'dilate_last': False})
  head = 'class_head/bias'

  def detect(self, names):
    names = {leaves.renamed(name, _OLD_NAMES) for name in names}
    for naming, queries in _QUERIES.items():
      if queries in names:
        return naming
    return 'resnet' if _style(names, 'resnet') else None

  def load(self, flat, naming, num_heads):
    leaves.rename(flat, _OLD_NAMES)
    leaves.split(flat, *_JOINED)
    style = _style(flat, naming) or 'timm'
    unit, first = _UNITS[style]
    pattern = re.escape(_BACKBONE[naming]) + unit.format(r'(\d+)', r'(\d+)')
    units = leaves.units(flat, pattern, first, 0)
    table = [*_backbone(units, style, _BACKBONE[naming])]
    if naming == 'resnet':  # Its head is left out.
      head = ('fc.', 'classifier.')
      for name in [name for name in flat if name.startswith(head)]:
        del flat[name]
      return leaves.load(flat, table, None, 'ResNet of bottlenecks')
    pattern = rf'{_START[naming]}\.{{}}\.layers\.(\d+)\.'
    counts = {side: leaves.count(flat, pattern.format(side)) for side in _LAYERS}
    width, heads = _PUBLISHED
    if flat[_QUERIES[naming]].shape[-1:] == (width,):
      num_heads = num_heads or heads
    table += _table(naming, counts)
    return leaves.load(flat, table, num_heads, 'DETR')

  def dump(self, flat, naming):
    fields = self.sizes({path: x.shape for path, x in flat.items()}, {})
    layers = {side: fields[f'num_{side}_layers'] for side in _LAYERS}
    style = 'timm' if naming == 'pth' or _of_timm(fields) else 'transformers'
    table = [
      *_backbone(fields['units'], style, _BACKBONE[naming]),
      *_table(naming, layers),
    ]
    state = leaves.dump(flat, table, 'the DETR of other programs')
    if fields.get('mask_head'):
      state = {
        name if name.startswith(_MASKS) else f'detr.{name}': value
        for name, value in state.items()
      }
    return leaves.join(state, *_JOINED) if naming == 'pth' else state

  def sizes(self, flat, told):
    encoder, decoder = (leaves.count(flat, rf'{side}_layer_(\d+)/') for side in _LAYERS)
    masks = any(path.startswith(_MASK_HEAD) for path in flat)
    return {
      'kind': 'detr',
      'units': leaves.units(flat, r'backbone/block(\d+)/unit(\d+)/'),
      'backbone_width': flat['backbone/conv_root/kernel'][-1],
      'norm': 'group' if 'backbone/bn_root/scale' in flat else 'frozen_batch',
      'hidden_size': flat['query_embedding'][1],
      'num_queries': flat['query_embedding'][0],
      'num_encoder_layers': encoder,
      'num_decoder_layers': decoder,
      'num_heads': flat['decoder_layer_0/self_attention/query/kernel'][1],
      'mlp_dim': flat['decoder_layer_0/Dense_0/kernel'][1],
      **({'mask_head': True} if masks else {}),
      **told,
    }

  def describe(self, fields):
    units = tuple(fields['units'])
    known = {units: name.upper() for name, units in resnet.UNITS.items()}
    layers = f'{fields["num_encoder_layers"]}+{fields["num_decoder_layers"]}'
    return (
      f'DETR of {layers} layers, width {fields["hidden_size"]}, '
      f'{fields["num_queries"]} queries, backbone '
      f'{known.get(units, f"ResNet of {units} units")}'
      + (', mask head' if fields.get('mask_head') else '')
    )

  def num_classes(self, flat):
    """The last one is "no object"."""
    return max(0, super().num_classes(flat) - 1)

  def read_beside(self, beside, file, flat, naming):
    """Reads config.json; without it, the file's name may say 'dc5'."""
    return descriptions.read(
      beside('config.json'), lambda config: _from_config(config, file.name)
    )

  def run(self, model):
    """Images of an unknown size are prepared as in the published recipe."""
    return {
      'task': 'segment' if model.config.get('mask_head') else 'detect',
      'task_options': {'max_objects': min(100, model.config.num_queries)},
      'pp': {'sides': recipe.SIDES} if model.image_size is None else {},
    }

  def metadata(self, model):
    """Of COCO's panoptic classes those up to number 90 are things."""
    count = model.num_classes
    stuff = _STUFF_FROM if count == _PANOPTIC else count
    return {'isthing': [i < stuff for i in range(count)]}

  def check(self, model):
    things = model.metadata.get('isthing')
    if things is not None and len(things) != model.num_classes:
      raise ValueError(
        f'isthing has {len(things)} entries for {model.num_classes} classes'
      )

  def notes(self, model, to):
    if 'pth' not in (model.source, to):
      return []
    dilated = 'has a' if model.config.get('dilate_last') else 'has no'
    return [
      f"the last stage of this model's backbone {dilated} dilation (DC5), which "
      "a released file tells by its name alone: keep 'dc5' in the names of those "
      'that have one, and of no others'
    ]

  def files(self, model, to):
    config = model.config
    masks = config.get('mask_head')
    fields = dict(
      model_type='detr',
      architectures=[f'DetrFor{"Segmentation" if masks else "ObjectDetection"}'],
      d_model=config.hidden_size,
      num_queries=config.num_queries,
      **{f'{side}_layers': config[f'num_{side}_layers'] for side in _LAYERS},
      **{f'{side}_attention_heads': config.num_heads for side in _LAYERS},
      **{f'{side}_ffn_dim': config.mlp_dim for side in _LAYERS},
      activation_function='relu',
      position_embedding_type='sine',
      dropout=0.1,
      attention_dropout=0.0,
      **descriptions.label_fields(model),
      **_backbone_fields(config),
    )
    if masks:  # For this package; others ignore it.
      fields['isthing'] = {**self.metadata(model), **model.metadata}['isthing']
    pp = common.get_config().pp
    processor = descriptions.processor(
      'DetrImageProcessor',
      dict(shortest_edge=pp.eval_side, longest_edge=pp.longest_side),
      models_detr.MEAN,
      models_detr.STD,
      format='coco_panoptic' if masks else 'coco_detection',
      do_pad=True,
    )
    return {'config.json': fields, 'preprocessor_config.json': processor}, []


def _of_timm(config) -> bool:
  """Returns whether Hugging Face takes the backbone from timm."""
  return tuple(config['units']) in _TIMM and config['backbone_width'] == 64


def _from_config(config, name):
  field = functools.partial(descriptions.field, config)
  heads = field('encoder_attention_heads', descriptions.COUNT)
  descriptions.only(
    config,
    'DETRs',
    decoder_attention_heads=heads,
    position_embedding_type='sine',
    activation_function='relu',
  )
  dilated = field('dilation', descriptions.FLAG, False)
  backbone = field('backbone_config', descriptions.OBJECT, {})
  descriptions.only(
    backbone,
    'ResNets in backbone_config',
    downsample_in_first_stage=False,
    downsample_in_bottleneck=False,
    hidden_act='relu',
  )
  stride = descriptions.field(backbone, 'output_stride', descriptions.COUNT)
  things = config.get('isthing')  # Of this package.
  if not config:
    dilated = re.search('dc5', name, re.IGNORECASE) is not None
  return descriptions.Description(
    {'dilate_last': dilated or stride == 16},
    descriptions.labels(config, gap=schema.NO_CLASS),
    metadata={'isthing': things} if things else {},
    num_heads=heads,
  )


def _backbone_fields(config):
  """Returns the fields of config.json that describe the backbone."""
  dilated = bool(config.get('dilate_last'))
  units, width = config.units, config.backbone_width
  if _of_timm(config):
    return dict(
      backbone=_TIMM[tuple(units)],
      use_timm_backbone=True,
      use_pretrained_backbone=False,
      dilation=dilated,
    )
  if dilated:
    raise ValueError(
      f'Hugging Face has a dilated backbone (DC5) only of the sizes {list(_TIMM)}: '
      'write this model as a run or a released file (--to=workdir, --to=pth)'
    )
  stages = [f'stage{i + 1}' for i in range(len(units))]
  return dict(
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone_config=dict(
      model_type='resnet',
      layer_type='bottleneck',
      embedding_size=width,
      hidden_sizes=[4 * width * 2**i for i in range(len(stages))],
      depths=list(units),
      out_features=stages if config.get('mask_head') else stages[-1:],
    ),
  )
