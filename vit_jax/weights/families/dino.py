"""DINOv2 in Hugging Face: names of its arrays, and its JSON files.

`Dinov2Model` (arXiv 2304.07193) and `Dinov2WithRegistersModel` (arXiv 2309.16588);
timm has them under the names of its other Vision Transformers.
"""

from vit_jax.weights import descriptions
from vit_jax.weights.families import leaves, vit_files

HF_TYPES = ('dinov2', 'dinov2_with_registers')
# Names of an MLP with a gate, whose first layer other programs join with the gate.
JOINED = '.mlp.gate.', '.mlp.up.'
_ATTENTION = 'MultiHeadDotProductAttention_0'
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
)  # fmt: skip
_LAYER = (
  ('LayerNorm_0', 'norm', 'norm1'),
  *(
    (f'{_ATTENTION}/{x}', 'heads', f'attention.attention.{x}')
    for x in ('query', 'key', 'value')
  ),
  (f'{_ATTENTION}/out', 'out', 'attention.output.dense'),
  ('LayerScale_0/gamma', 'same', 'layer_scale1.lambda1'),
  ('LayerNorm_1', 'norm', 'norm2'),
  ('LayerScale_1/gamma', 'same', 'layer_scale2.lambda1'),
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
  layer = (*_LAYER, *mlp('mlp.fc1', last, gated))
  return leaves.Naming(
    'hf',
    'DINOv2',
    (('', '', _STEM), ('Transformer/encoderblock_{0}/', 'encoder.layer.{0}.', layer)),
    marks=('encoder.layer.0.layer_scale1.lambda1',),
    old_names=((r'^dinov2(_with_registers)?\.', ''),),
    joined=(('.mlp.weights_in.', JOINED),) if gated else (),
    ignored=r'embeddings\.mask_token',
    program="Hugging Face's DINOv2",
    features={'classifier': 'a classifier of class token and mean of the patches'},
  )


def from_hf(config) -> descriptions.Description:
  """Returns what config.json says; GELU and epsilon have other defaults than ViT's."""
  descriptions.only(config, qkv_bias=True)
  found = vit_files.from_hf({'layer_norm_eps': 1e-6, **config})
  gelu = found.model['transformer']['gelu'] if config else 'erf'
  model = {'transformer': {**found.model['transformer'], 'gelu': gelu}}
  return found._replace(model=model)


def of_hf(model) -> tuple[dict[str, dict], list[str]]:
  """Returns the JSON files of a model by name, and notes.

  ValueError for sizes that Hugging Face's model cannot have.
  """
  config, encoder = model.config, model.config.transformer
  gated = encoder.get('mlp') == 'swiglu'
  # It rounds two thirds of this width up to a multiple of 8 if there is a gate.
  hidden = encoder.mlp_dim * 3 // 2 if gated else encoder.mlp_dim
  ratio, rest = divmod(hidden, config.hidden_size)
  if rest or (gated and encoder.mlp_dim % 8):
    raise ValueError(
      f"Hugging Face's DINOv2 has no MLP of width {encoder.mlp_dim} for tokens of "
      f'width {config.hidden_size}: write this model for timm, or as a run (--to)'
    )
  if model.image_size[0] != model.image_size[1]:
    raise ValueError(
      "Hugging Face's DINOv2 has position embeddings of a square only, not of images "
      f'of {model.image_size}: write this model for timm, or as a run (--to)'
    )
  registers = config.get('registers', 0)
  kind, name = HF_TYPES[registers > 0], 'Dinov2WithRegisters' if registers else 'Dinov2'
  files = vit_files.hf_files(
    model,
    model_type=kind,
    architectures=[f'{name}Model'],
    mlp_ratio=ratio,
    use_swiglu_ffn=gated,
    layerscale_value=encoder.layer_scale,
    **({'num_register_tokens': registers} if registers else {}),
  )
  return files, [f'load it as {name}Model: the model has no classifier']
