"""DINOv2 and DINOv3 in Hugging Face: names of their arrays, and their JSON files.

`Dinov2Model` (arXiv 2304.07193), `Dinov2WithRegistersModel` (arXiv 2309.16588), both of
which timm has under the names of its other Vision Transformers, and `DINOv3ViTModel`
(arXiv 2508.10104). DINOv3 has no biases of keys; they are zero here.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.configs import schema
from vit_jax.weights import descriptions
from vit_jax.weights.families import leaves, vit_files

HF_TYPES = ('dinov2', 'dinov2_with_registers', 'dinov3_vit')
# Names of an MLP with a gate, whose first layer other programs join with the gate.
JOINED = '.mlp.gate.', '.mlp.up.'
ATTENTION = 'MultiHeadDotProductAttention_0'
CLS = 'embeddings.cls_token'
_STEM = (
  ('cls', 'same', CLS),
  (
    'Transformer/posembed_input/pos_embedding', 'same',
    'embeddings.position_embeddings',
  ),
  ('register_tokens', 'same', 'embeddings.register_tokens'),
  ('embedding', 'conv', 'embeddings.patch_embeddings.projection'),
  ('Transformer/encoder_norm', 'norm', 'layernorm'),
  ('head', 'dense', 'classifier'),
)  # fmt: skip
LAYER = (
  ('LayerNorm_0', 'norm', 'norm1'),
  ('LayerScale_0/gamma', 'same', 'layer_scale1.lambda1'),
  ('LayerNorm_1', 'norm', 'norm2'),
  ('LayerScale_1/gamma', 'same', 'layer_scale2.lambda1'),
)
GATED_MLP = (
  ('MlpBlock_0/gate', 'dense', 'mlp.gate_proj'),
  ('MlpBlock_0/Dense_0', 'dense', 'mlp.up_proj'),
  ('MlpBlock_0/Dense_1', 'dense', 'mlp.down_proj'),
)
# Names in memory of transformers 5 -> in its files: attention, and an MLP with a gate.
MEMORY_ATTENTION = (
  (r'\.attention\.q_proj\.', '.attention.attention.query.'),
  (r'\.attention\.k_proj\.', '.attention.attention.key.'),
  (r'\.attention\.v_proj\.', '.attention.attention.value.'),
  (r'\.attention\.o_proj\.', '.attention.output.dense.'),
)
MEMORY_GATED = (
  (r'\.mlp\.gate_proj\.', JOINED[0]),
  (r'\.mlp\.up_proj\.', JOINED[1]),
  (r'\.mlp\.down_proj\.', '.mlp.weights_out.'),
)
# Names in the files of DINOv2's authors -> timm's. Chunks of layers are for FSDP.
OLD_NAMES = (
  (r'^blocks\.\d+\.(?=\d)', 'blocks.'),
  (r'^register_tokens$', 'reg_token'),
  (r'\.mlp\.w12\.', '.mlp.fc1.'),
  (r'\.mlp\.w3\.', '.mlp.fc2.'),
)
# The same of DINOv3.
_STEM_3 = (
  _STEM[0],
  _STEM[2],
  ('embedding', 'conv', 'embeddings.patch_embeddings'),
  ('Transformer/encoder_norm', 'norm', 'norm'),
)
LAYER_3 = (
  *LAYER,
  *leaves.attention(
    ATTENTION, 'attention', ends=('q_proj', 'k_proj', 'v_proj', 'o_proj')
  ),
  *GATED_MLP,
)


def mlp(first: str, last: str, gated: bool) -> tuple[leaves.Row, ...]:
  """Returns the rows of an MLP, whose dense layers have these names elsewhere."""
  names = {'MlpBlock_0/Dense_0': first, 'MlpBlock_0/Dense_1': last}
  if gated:
    gate, up = (name.strip('.') for name in JOINED)
    names |= {'MlpBlock_0/gate': gate, 'MlpBlock_0/Dense_0': up}
  return tuple((path, 'dense', name) for path, name in names.items())


def naming(gated: bool) -> leaves.Naming:
  """Returns Hugging Face's naming, for MLPs with a gate or without."""
  last = 'mlp.weights_out' if gated else 'mlp.fc2'
  ends = ('attention.query', 'attention.key', 'attention.value', 'output.dense')
  attention = leaves.attention(ATTENTION, 'attention', ends=ends)
  layer = (*LAYER, *attention, *mlp('mlp.fc1', last, gated))
  return leaves.Naming(
    'hf',
    'DINOv2',
    (('', '', _STEM), ('Transformer/encoderblock_{0}/', 'encoder.layer.{0}.', layer)),
    marks=('encoder.layer.0.layer_scale1.lambda1',),
    old_names=((r'^dinov2(_with_registers)?\.', ''), *MEMORY_ATTENTION, *MEMORY_GATED),
    joined={'.mlp.weights_in.': JOINED} if gated else {},
    ignored=r'embeddings\.mask_token',
    program="Hugging Face's DINOv2",
  )


NAMING_3 = leaves.Naming(
  'hf',
  'DINOv3',
  (('', '', _STEM_3), ('Transformer/encoderblock_{0}/', 'layer.{0}.', LAYER_3)),
  marks=('layer.0.layer_scale1.lambda1',),
  old_names=((r'^model\.(?=layer\.)', ''),),  # In memory.
  ignored=r'embeddings\.mask_token',
  program="Hugging Face's DINOv3",
)


def with_key_biases(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns arrays by path, with biases of keys, zeros, where queries have some."""
  arrays = {}
  for path, x in flat.items():
    if path.endswith('/query/bias'):
      arrays[path.replace('/query/', '/key/')] = np.zeros_like(x)
  arrays.update(flat)
  return {path: x for path, x in arrays.items() if x.size}


def with_placeholders(
  state: dict[str, np.ndarray], naming: leaves.Naming, has_registers: bool
) -> dict[str, np.ndarray]:
  """Adds the arrays of Hugging Face's models that are zero or empty to a state dict.

  These are the mask token and absent registers. All names of a classifier begin with its
  type, except the names of its head.
  """
  token = state[CLS]
  if naming is NAMING_3:
    placeholders = {
      'embeddings.mask_token': np.zeros_like(token),
      'embeddings.register_tokens': token[:, :0],
    }
  else:
    placeholders = {'embeddings.mask_token': np.zeros_like(token[0])}
  state = {**placeholders, **state}
  if 'classifier.bias' not in state:
    return state
  model_type = 'dinov2_with_registers' if has_registers else 'dinov2'
  prefixed = {}
  for name, x in state.items():
    is_head = name.startswith('classifier.')
    prefixed[name if is_head else f'{model_type}.{name}'] = x
  return prefixed


def from_hf_3(config: Mapping[str, Any]) -> descriptions.Description:
  """Returns what config.json of DINOv3 says."""
  gated = descriptions.field(config, 'use_gated_mlp', bool, False)
  if gated:  # Only the gate has an activation.
    descriptions.check_supported({'hidden_act': 'gelu', **config}, hidden_act='silu')
    config = {**config, 'hidden_act': 'gelu'}
  descriptions.check_supported(config, proj_bias=True, mlp_bias=True)
  description = from_hf({'layer_norm_eps': 1e-5, **config})
  rope = {
    'position_embedding': 'rope',
    'add_position_embedding': True,
    'rope_temperature': float(
      descriptions.field(config, 'rope_theta', schema.Positive, 100.0)
    ),
  }
  model = {'transformer': {**description.model['transformer'], **rope}}
  return description._replace(model=model)


def from_hf(config: Mapping[str, Any]) -> descriptions.Description:
  """Returns what config.json says; GELU and epsilon have other defaults than ViT's."""
  descriptions.check_supported(config, qkv_bias=True, apply_layernorm=True)
  return vit_files.from_hf({'layer_norm_eps': 1e-6, 'hidden_act': 'gelu', **config})


def mlp_ratio(mlp_dim: int, width: int, gated: bool) -> int | None:
  """Returns Hugging Face's `mlp_ratio` of an MLP of this width; None if it has none."""
  largest = mlp_dim * (3 if gated else 2) // 2 // width
  for ratio in range(largest, 0, -1):
    hidden = ratio * width
    if gated:  # Two thirds of the width are rounded up to a multiple of 8.
      hidden = -(-(hidden * 2 // 3) // 8) * 8
    if hidden == mlp_dim:
      return ratio
  return None


def hf_description(model: Any) -> tuple[dict[str, dict], list[str]]:
  """Returns the JSON files of a model by name, and notes.

  ValueError for sizes that Hugging Face's model cannot have.
  """
  if model.config.transformer.get('position_embedding') == 'rope':
    return _hf_description_3(model)
  config = model.config
  encoder = model.config.transformer
  is_gated = encoder.get('mlp') == 'swiglu'
  ratio = mlp_ratio(encoder.mlp_dim, config.hidden_size, is_gated)
  if ratio is None:
    raise ValueError(
      f"Hugging Face's DINOv2 has no MLP of width {encoder.mlp_dim} for tokens of "
      f'width {config.hidden_size}: write this model for timm, or as a run (--to)'
    )
  if model.image_size[0] != model.image_size[1]:
    raise ValueError(
      "Hugging Face's DINOv2 has position embeddings of a square only, not of images "
      f'of {model.image_size}: write this model for timm, or as a run (--to)'
    )
  is_classifier = config.classifier == 'token_with_gap'
  if is_classifier != bool(model.num_classes) or 'pre_logits' in model.params:
    raise ValueError(
      f"Hugging Face's DINOv2 has no head of {model.num_classes} classes for classifier="
      f"'{config.classifier}', only for 'token_with_gap': write this model as a run "
      '(--to=workdir)'
    )
  fields = dict(
    model_type='dinov2',
    mlp_ratio=ratio,
    use_swiglu_ffn=is_gated,
    layerscale_value=encoder.layer_scale,
  )
  name = 'Dinov2'
  if registers := config.get('registers', 0):
    name = 'Dinov2WithRegisters'
    fields['model_type'] = 'dinov2_with_registers'
    fields['num_register_tokens'] = registers
  if is_classifier:
    name += 'ForImageClassification'
    fields |= descriptions.label_fields(model)
    notes = []
  else:
    name += 'Model'
    notes = [f'load it as {name}: the model has no classifier']
  return vit_files.hf_files(model, architectures=[name], **fields), notes


def _hf_description_3(model: Any) -> tuple[dict[str, dict], list[str]]:
  """Returns the JSON files of a DINOv3, and notes."""
  encoder = model.config.transformer
  is_gated = encoder.get('mlp') == 'swiglu'
  has_biases = encoder.get('qkv_bias', True)
  files = vit_files.hf_files(
    model,
    model_type='dinov3_vit',
    architectures=['DINOv3ViTModel'],
    query_bias=has_biases,
    key_bias=has_biases,
    value_bias=has_biases,
    use_gated_mlp=is_gated,
    num_register_tokens=model.config.get('registers', 0),
    layerscale_value=encoder.layer_scale,
    rope_theta=encoder.get('rope_temperature', 100.0),
  )
  if is_gated:
    files['config.json']['hidden_act'] = 'silu'
  return files, ['load it as DINOv3ViTModel: the model has no classifier']
