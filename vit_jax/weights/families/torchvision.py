"""torchvision's Vision Transformers: their names, and what their files do not state."""

from collections.abc import Iterable

import numpy as np

from vit_jax.weights import descriptions

# Names of torchvision -> timm's. Its first models numbered the dense layers.
OLD_NAMES = (
  (r'^class_token$', 'cls_token'),
  (r'^conv_proj\.', 'patch_embed.proj.'),
  (r'^encoder\.pos_embedding$', 'pos_embed'),
  (r'^encoder\.layers\.encoder_layer_(\d+)\.', r'blocks.\1.'),
  (r'^(blocks\.\d+)\.ln_([12])\.', r'\1.norm\2.'),
  (r'\.self_attention\.in_proj_', '.attn.qkv.'),
  (r'\.self_attention\.out_proj\.', '.attn.proj.'),
  (r'^(blocks\.\d+\.mlp)\.(0|linear_1)\.', r'\1.fc1.'),
  (r'^(blocks\.\d+\.mlp)\.(3|linear_2)\.', r'\1.fc2.'),
  (r'^encoder\.ln\.', 'norm.'),
  (r'^heads\.head\.', 'head.'),
  (r'^heads\.pre_logits\.', 'pre_logits.fc.'),
)
# Widths of its models -> numbers of heads.
HEADS = {768: 12, 1024: 16, 1280: 16}


def is_torchvision(names: Iterable[str]) -> bool:
  """Returns whether the names of a state dict are torchvision's."""
  return 'conv_proj.weight' in names


def complete(
  description: descriptions.Description, flat: dict[str, np.ndarray]
) -> descriptions.Description:
  """Adds torchvision's GELU, and the heads of its models, to a description.

  The arrays in `flat` already have timm's names.
  """
  encoder = description.model['transformer']
  model = {**description.model, 'transformer': {**encoder, 'gelu': 'erf'}}
  width = flat['patch_embed.proj.weight'].shape[0]
  num_heads = description.num_heads or HEADS.get(width)
  return description._replace(model=model, num_heads=num_heads)
