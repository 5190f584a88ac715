"""EoMT in Hugging Face: names of its arrays, and its JSON files.

`EomtForUniversalSegmentation`, whose encoder is DINOv2's, and
`EomtDinov3ForUniversalSegmentation` (arXiv 2503.19108), as the files of tue-mps. Their
class token has no position, which is zero here.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from absl import logging
from etils import epath
import numpy as np

from vit_jax.configs import models as model_configs, schema, task_options
from vit_jax.weights import descriptions
from vit_jax.weights.families import base, dino, leaves, vit, vit_files

_POSEMB = 'Transformer/posembed_input/pos_embedding'
_PATCHES = 'embeddings.patch_embeddings'
# Probabilities of masked attention, which are 0 after training.
_MASK_RATES = 'attn_mask_probs'
# Number of classes -> things among them, which come first: COCO's panoptic classes.
_THINGS = {133: 80}
_MOST_CLASSES = task_options.SegmentSemantic.max_classes
_STEM = (
  ('cls', 'same', dino.CLS),
  ('register_tokens', 'same', 'embeddings.register_tokens'),
  ('Transformer/encoder_norm', 'norm', 'layernorm'),
  ('queries', 'table', 'query.weight'),
  ('class_head', 'dense', 'class_predictor'),
  ('mask_mlp/Dense_0', 'dense', 'mask_head.fc1'),
  ('mask_mlp/Dense_1', 'dense', 'mask_head.fc2'),
  ('mask_mlp/Dense_2', 'dense', 'mask_head.fc3'),
)
_UPSCALE = (
  ('kernel', 'deconv', 'conv1.weight'),
  ('bias', 'same', 'conv1.bias'),
  ('depthwise', 'conv', 'conv2'),
  ('norm', 'norm', 'layernorm2d'),
)


def _naming(
  stem: tuple[leaves.Row, ...], layer: tuple[leaves.Row, ...], **options: Any
) -> leaves.Naming:
  """Returns a naming; `stem` and `layer` are rows of the encoder."""
  return leaves.Naming(
    'hf',
    'EoMT',
    (
      ('', '', (*_STEM, *stem)),
      ('Transformer/encoderblock_{0}/', 'layers.{0}.', layer),
      ('upscale_{0}/', 'upscale_block.block.{0}.', _UPSCALE),
    ),
    marks=('mask_head.fc1.weight',),
    ignored=r'criterion\.',
    program="Hugging Face's EoMT",
    **options,
  )


def _dino_2_naming(
  mlp: tuple[leaves.Row, ...], joined: Mapping[str, tuple[str, str]] | None = None
) -> leaves.Naming:
  """Returns the naming with DINOv2's encoder; `mlp` are rows of a layer."""
  stem = (
    ('embedding', 'conv', f'{_PATCHES}.projection'),
    (_POSEMB, 'rows', 'embeddings.position_embeddings.weight'),
  )
  attention = leaves.attention(dino.ATTENTION, 'attention')
  return _naming(stem, (*dino.LAYER, *attention, *mlp), joined=joined or {})


def _check_counts(config: Mapping[str, Any], flat: Mapping[str, np.ndarray]) -> None:
  """Raises ValueError if config.json states other numbers than the arrays have."""
  counts = {
    'num_queries': len(flat['query.weight']),
    'num_upscale_blocks': leaves.count(flat, 'upscale_block.block.{0}.'),
  }
  if _MASK_RATES in flat:
    counts['num_blocks'] = len(flat[_MASK_RATES])
  for name, count in counts.items():
    stated = descriptions.field(config, name, schema.Natural, count)
    if stated != count:
      raise ValueError(
        f'it says {name}={stated}, but the weights have {count}: download them again'
      )


class Eomts(vit.Classifiers):
  """EoMT with the encoder of DINOv2 or DINOv3."""

  noun = 'a segmenter'
  kind = 'eomt'
  leaf = 'queries'
  formats = ('hf', 'workdir')
  hf_types = ('eomt', 'eomt_dinov3')
  groups = (model_configs.Eomt,)
  modules = ()
  computes = {  # noqa: RUF012
    **{k: x for k, x in vit.Classifiers.computes.items() if k.startswith('transf')},
    'num_query_layers': 4,
  }
  head = 'class_head/bias'
  pads = True
  namings = {  # noqa: RUF012
    'hf': _dino_2_naming(dino.mlp('mlp.fc1', 'mlp.fc2', gated=False)),
    'hf, gated': _dino_2_naming(dino.GATED_MLP),
    # transformers 4 writes this naming.
    'hf, joined': _dino_2_naming(
      dino.mlp('', 'mlp.weights_out', gated=True), {'.mlp.weights_in.': dino.JOINED}
    ),
    'hf, DINOv3': _naming((('embedding', 'conv', _PATCHES),), dino.LAYER_3),
  }

  def naming(self, naming: str, names: Mapping[str, Any]) -> leaves.Naming:
    if not vit.has_learned_positions(names):
      return self.namings['hf, DINOv3']
    if any('.mlp.weights_in.' in name for name in names):
      return self.namings['hf, joined']
    return self.namings['hf, gated' if vit.is_gated(names) else 'hf']

  def load(
    self, flat: dict[str, np.ndarray], naming: str, num_heads: base.NumHeads
  ) -> dict[str, np.ndarray]:
    """Returns the parameters; the class token gets a position embedding of 0."""
    rates = flat.pop(_MASK_RATES, np.zeros(1))
    if rates.any():
      logging.warning(
        f'{_MASK_RATES}={rates.tolist()}: these weights were trained with masked '
        'attention to the end, which predictions here do not have'
      )
    params = super().load(flat, naming, num_heads)
    if _POSEMB in params:
      params[_POSEMB] = np.pad(params[_POSEMB], ((0, 0), (1, 0), (0, 0)))
    return params

  def dump(self, flat: Mapping[str, np.ndarray], naming: str) -> dict[str, np.ndarray]:
    """Returns the arrays; the class token includes its position embedding."""
    flat = dict(flat)
    if _POSEMB in flat:
      first, flat[_POSEMB] = np.split(flat[_POSEMB], [1], axis=1)
      flat['cls'] = flat['cls'] + first
    else:
      flat = {path: x for path, x in flat.items() if not path.endswith('/key/bias')}
    flat.setdefault('register_tokens', flat['cls'][:, :0])
    return leaves.dump(flat, self.naming(naming, flat))

  def buffers(self, model: Any) -> dict[str, np.ndarray]:
    return {_MASK_RATES: np.zeros(model.config.num_query_layers, np.float32)}

  def sizes(
    self, flat: leaves.Shapes, known_fields: Mapping[str, Any]
  ) -> dict[str, Any]:
    return {
      'kind': 'eomt',
      **super().sizes(flat, {}),
      'num_queries': flat['queries'][0],
      'num_upscales': leaves.count(flat, 'upscale_{0}/'),
    }

  def describe(self, fields: Mapping[str, Any]) -> str:
    return (
      f'EoMT of {fields["num_queries"]} queries, encoder: {super().describe(fields)}'
    )

  def num_classes(self, flat: Mapping[str, Any]) -> int:
    """Returns the number of classes, without "no object"."""
    return max(0, super().num_classes(flat) - 1)

  def read_description(
    self,
    sibling: Callable[[str], epath.Path],
    file: epath.Path,
    flat: dict[str, np.ndarray],
    naming: str,
  ) -> descriptions.Description:
    is_dino_3 = self.naming(naming, flat) is self.namings['hf, DINOv3']

    def describe(config: Mapping[str, Any]) -> descriptions.Description:
      model_type = 'eomt_dinov3' if is_dino_3 else 'eomt'
      descriptions.field(config, 'model_type', Literal[model_type])
      _check_counts(config, flat)
      config = {'layer_norm_eps': 1e-6, **config}
      if is_dino_3:
        rope = descriptions.field(config, 'rope_parameters', dict, {})
        description = dino.from_hf_3({**config, **rope})
      else:
        description = dino.from_hf(config)
      stored_count = len(flat[_MASK_RATES]) if _MASK_RATES in flat else 4
      count = descriptions.field(config, 'num_blocks', schema.Count, stored_count)
      model = {**description.model, 'num_query_layers': count}
      return description._replace(model=model)

    return descriptions.read(sibling('config.json'), describe)

  def run(self, model: Any) -> dict[str, Any]:
    """Returns the keys of a run; models with padded images are of things and stuff."""
    prepared = model.preparation
    if prepared.longest_side is not None:
      return self._run_of_objects(model)
    options: dict[str, Any] = {
      'max_classes': min(_MOST_CLASSES, model.config.num_queries)
    }
    if prepared.windows:
      options['window'] = prepared.crop
    return {
      **super().run(model),
      'task': 'segment_semantic',
      'task_options': options,
    }

  def _run_of_objects(self, model: Any) -> dict[str, Any]:
    """Returns the keys of a run on squares whose upper left corner images fill."""
    prepared = model.preparation
    patch = max(model.config.patches.size)
    side = -(-prepared.longest_side // patch) * patch
    has_positions = model.config.transformer.get('position_embedding') != 'rope'
    if has_positions and (side, side) != tuple(model.image_size):
      raise ValueError(
        f'{prepared.source} puts images on squares of {side} pixels, but the position '
        f'embeddings are for images of {model.image_size}: correct its size'
      )
    max_objects = min(task_options.Segment.max_objects, model.config.num_queries)
    return {
      **super().run(model),
      'task': 'segment',
      'task_options': {'max_objects': max_objects, 'tight': 0},
      'pp': {
        'resize': None,
        'sides': (prepared.size,),
        'eval_side': prepared.size,
        'longest_side': prepared.longest_side,
        'canvas_multiple': patch,
      },
    }

  def metadata(self, model: Any) -> dict[str, Any]:
    """Returns the classes: numbers count from 0, and things come before stuff."""
    if model.preparation.longest_side is not None:
      num_things = _THINGS.get(model.num_classes, model.num_classes)
      return {'isthing': [i < num_things for i in range(model.num_classes)]}
    names = model.class_names or [str(i) for i in range(model.num_classes)]
    return {'mask_classes': [{'name': x, 'id': i} for i, x in enumerate(names)]}

  def missing(self, config: Mapping[str, Any], to: str) -> list[str]:
    missing = super().missing(config, to)
    if to != 'hf':
      return missing
    encoder = config.get('transformer') or {}
    classifier = config.get('classifier', 'token')
    if classifier != 'token':
      missing.append(f'classifier={classifier}')
    if encoder.get('layer_scale') is None:
      missing.append('transformer.layer_scale=None')
    return missing

  def files(self, model: Any, to: str) -> tuple[dict[str, dict], list[str]]:
    config = model.config
    encoder = model.config.transformer
    is_gated = encoder.get('mlp') == 'swiglu'
    fields = dict(
      num_queries=config.num_queries,
      num_blocks=config.num_query_layers,
      num_upscale_blocks=config.num_upscales,
      num_register_tokens=config.get('registers', 0),
      layerscale_value=encoder.layer_scale,
      attention_dropout=0.0,
      **descriptions.label_fields(model),
    )
    if encoder.get('position_embedding') == 'rope':
      return _with_padding(self._dino_3_files(model, fields), model), []
    height, width = model.image_size
    ratio = dino.mlp_ratio(encoder.mlp_dim, config.hidden_size, is_gated)
    if ratio is None or height != width:
      raise ValueError(
        f"Hugging Face's EoMT has no MLP of width {encoder.mlp_dim} for tokens of width "
        f'{config.hidden_size}, or no position embeddings for images of '
        f'{model.image_size}: write this model as a run (--to)'
      )
    files = vit_files.hf_files(
      model,
      model_type='eomt',
      architectures=['EomtForUniversalSegmentation'],
      mlp_ratio=ratio,
      use_swiglu_ffn=is_gated,
      **fields,
    )
    return _with_padding(files, model), []

  def _dino_3_files(self, model: Any, fields: Mapping[str, Any]) -> dict[str, dict]:
    """Returns the JSON files of a model with DINOv3's encoder."""
    encoder = model.config.transformer
    is_gated = encoder.get('mlp') == 'swiglu'
    files = vit_files.hf_files(
      model,
      model_type='eomt_dinov3',
      architectures=['EomtDinov3ForUniversalSegmentation'],
      use_gated_mlp=is_gated,
      rope_parameters={
        'rope_type': 'default',
        'rope_theta': encoder.get('rope_temperature', 100.0),
      },
      **fields,
    )
    if is_gated:
      files['config.json']['hidden_act'] = 'silu'
    return files


def _with_padding(files: dict[str, dict], model: Any) -> dict[str, dict]:
  """Returns JSON files whose image processor is EoMT's if images are padded."""
  if model.preparation.longest_side is not None:
    files['preprocessor_config.json'] |= {
      'image_processor_type': 'EomtImageProcessor',
      'do_pad': True,
    }
  return files
