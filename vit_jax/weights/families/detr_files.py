"""The files beside DETR's weights: Hugging Face's config.json and processor."""

from collections.abc import Callable
import re

from etils import epath

from vit_jax import models_detr
from vit_jax.configs import common
from vit_jax.configs import detr as recipe
from vit_jax.configs import rules
from vit_jax.weights import descriptions
from vit_jax.weights.families import detr
from vit_jax.weights.families import leaves

# Classes of the published models for panoptic segmentation, and the first number
# of a class of stuff.
_PANOPTIC, _STUFF_FROM = 250, 91
# Formats of vit_jax.convert that hold a detector.
FORMATS = ('hf', 'pth', 'workdir')
# Units per stage -> timm's name, of backbones that Hugging Face takes from timm.
_TIMM = {(3, 4, 6, 3): 'resnet50', (3, 4, 23, 3): 'resnet101'}


def run(model) -> dict:
  """Returns what a model determines of the config of its run."""
  pp = {'sides': recipe.SIDES} if model.image_size is None else {}
  return {
    'task': 'segment' if model.config.get('mask_head') else 'detect',
    'task_options': {'max_objects': min(100, model.config.num_queries)},
    'pp': pp,
  }


def metadata(model) -> dict:
  """Returns metadata of a run that weights do not bring along.

  Of the classes of the published models for panoptic segmentation, the
  categories of COCO, those up to number 90 are things. Without stuff, all are.
  """
  count = model.num_classes
  stuff = _STUFF_FROM if count == _PANOPTIC else count
  return {'isthing': [i < stuff for i in range(count)]}


def image_size(
  config, params, given: tuple[int, int] | None
) -> tuple[int, int] | None:
  """Returns (height, width) of a model's images if it is known, see `run`.

  A detector takes images of any size; those of an unknown size are prepared as
  in the recipe of the published models.
  """
  del config, params
  return given


inputs = leaves.images


def describe(
  beside: Callable[[str], epath.Path], file: epath.Path, flat, layout, num_heads
) -> descriptions.Description:
  """Returns what files tell about weights.

  Args:
    beside: function from a name to the path of the file of this name beside the
      weights, which need not exist.
    file: file of the weights: a released one tells only by its name whether its
      backbone has a dilation ('dc5').
    flat: the arrays by name.
    layout: their naming.
    num_heads: number of attention heads, if it is known.

  Raises:
    ValueError: if a field of config.json has a wrong value, or one that no
      model here has.
  """
  del flat, layout
  found = descriptions.read(
    beside('config.json'), lambda config: _describe(config, file.name)
  )
  heads = num_heads or found.model.get('num_heads')
  return found._replace(num_heads=heads)


def _describe(config, name):
  heads = descriptions.count(config, 'encoder_attention_heads')
  for key, only in (
    ('decoder_attention_heads', heads),
    ('position_embedding_type', 'sine'),
    ('activation_function', 'relu'),
  ):
    if config.get(key, only) != only:
      raise ValueError(
        f'{key} is {config[key]!r:.80}, but this package has only DETRs with '
        f'{only!r}'
      )
  dilated = descriptions.field(
    config, 'dilation', lambda x: isinstance(x, bool), 'true or false', False
  )
  backbone = descriptions.fields(config, 'backbone_config')
  stride = descriptions.count(backbone, 'output_stride')
  things = descriptions.field(
    config,
    'isthing',
    lambda x: isinstance(x, list) and all(type(y) is bool for y in x),
    'a list of true and false, one for each class',
  )
  if not config:
    dilated = re.search('dc5', name, re.IGNORECASE) is not None
  return descriptions.Description(
    {
      **({'num_heads': heads} if heads else {}),
      'dilate_last': dilated or stride == 16,
    },
    descriptions.labels(config, gap=rules.NO_CLASS),
    metadata={'isthing': things} if things else {},
  )


def notes(model, to: str) -> list[str]:
  """Returns what a user should know of a model in a format."""
  if 'pth' not in (model.source, to):
    return []
  dilated = 'has a' if model.config.get('dilate_last') else 'has no'
  return [
    f"the last stage of this model's backbone {dilated} dilation (DC5), which a "
    "released file tells by its name alone: keep 'dc5' in the names of those "
    'that have one, and of no others'
  ]


def check(model) -> None:
  """Raises ValueError if the lengths of lists of classes differ."""
  things = model.metadata.get('isthing')
  if things is not None and len(things) != model.num_classes:
    raise ValueError(
      f'isthing has {len(things)} entries for {model.num_classes} classes'
    )


def layout(config, to: str) -> detr.Layout:
  """Returns the naming of a model's arrays in a format."""
  published = tuple(config.units) in _TIMM and config.backbone_width == 64
  return detr.Layout(to, 'timm' if published or to == 'pth' else 'transformers')


def files(model, to: str) -> tuple[dict[str, dict], list[str]]:
  """Returns Hugging Face's JSON files of a model by name, and notes.

  Args:
    model: has `config`, `class_names` and `num_classes`.

  Raises:
    ValueError: if Hugging Face has no such model.
  """
  del to
  config = model.config
  names = model.class_names or [f'LABEL_{i}' for i in range(model.num_classes)]
  kind = 'Segmentation' if config.get('mask_head') else 'ObjectDetection'
  sides = ('encoder', 'decoder')
  fields = dict(
    model_type='detr',
    architectures=[f'DetrFor{kind}'],
    d_model=config.hidden_size,
    num_queries=config.num_queries,
    **{f'{side}_layers': config[f'num_{side}_layers'] for side in sides},
    **{f'{side}_attention_heads': config.num_heads for side in sides},
    **{f'{side}_ffn_dim': config.mlp_dim for side in sides},
    activation_function='relu',
    position_embedding_type='sine',
    dropout=0.1,
    attention_dropout=0.0,
    id2label={str(i): name for i, name in enumerate(names)},
    label2id={name: i for i, name in enumerate(names)},
    **_backbone(config),
  )
  pp = common.get_config().pp
  if config.get('mask_head'):  # For this package; others ignore it.
    fields['isthing'] = {**metadata(model), **model.metadata}['isthing']
  processor = dict(
    image_processor_type='DetrImageProcessor',
    format='coco_panoptic' if config.get('mask_head') else 'coco_detection',
    do_resize=True,
    size=dict(shortest_edge=pp.eval_side, longest_edge=pp.longest_side),
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    image_mean=models_detr.MEAN,
    image_std=models_detr.STD,
    do_pad=True,
  )
  return {'config.json': fields, 'preprocessor_config.json': processor}, []


def _backbone(config):
  """Returns the fields of config.json that describe the backbone."""
  dilated = bool(config.get('dilate_last'))
  if layout(config, 'hf').backbone == 'timm':
    return dict(
      backbone=_TIMM[tuple(config.units)],
      use_timm_backbone=True,
      use_pretrained_backbone=False,
      dilation=dilated,
    )
  if dilated:
    raise ValueError(
      'Hugging Face has a dilated backbone (DC5) only of the sizes '
      f'{list(_TIMM)}: write this model as a run or a released file '
      '(--to=workdir, --to=pth)'
    )
  width = config.backbone_width
  stages = [f'stage{i + 1}' for i in range(len(config.units))]
  return dict(
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone_config=dict(
      model_type='resnet',
      layer_type='bottleneck',
      embedding_size=width,
      hidden_sizes=[4 * width * 2**i for i in range(len(stages))],
      depths=list(config.units),
      out_features=stages if config.get('mask_head') else stages[-1:],
    ),
  )
