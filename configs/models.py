"""Sizes of the models: one table, from which every model config is made.

Reading `get_b16_config()` and `MODEL_CONFIGS['ViT-B_16']` gives the same thing:
the arguments of `vit_jax.models.VisionTransformer` (or `MlpMixer`) but for
`num_classes`. Sources: arXiv 2010.11929 table 1 (B, L, H), 2106.10270 table 2
(Ti, S, R+Ti, R26+S), 2105.01601 table 1 (Mixer).
"""

import copy

import ml_collections

# name: layers, width D, width of the MLP, heads.
SIZES = {
  'Ti': (12, 192, 768, 3),
  'S': (12, 384, 1536, 6),
  'B': (12, 768, 3072, 12),
  'L': (24, 1024, 4096, 16),
  'H': (32, 1280, 5120, 16),
}

# size: patches in pixels.
PATCHES = {
  'Ti': (16, 32),
  'S': (16, 32),
  'B': (8, 14, 16, 32),
  'L': (14, 16, 32),
  'H': (14, 16, 32),
}

# name: size, patch in cells of the feature map, units per stage, width factor.
HYBRIDS = {
  'R+ViT-Ti_16': ('Ti', 8, (), 1),
  'R26+ViT-S_32': ('S', 1, (2, 2, 2, 2), 1),
  'R26+ViT-B_32': ('B', 1, (2, 2, 2, 2), 1),
  'R50+ViT-B_16': ('B', 1, (3, 4, 9), 1),
  'R50+ViT-B_32': ('B', 1, (3, 4, 6, 3), 1),
  'R50+ViT-L_16': ('L', 1, (3, 4, 9), 1),
  'R50+ViT-L_32': ('L', 1, (3, 4, 6, 3), 1),
}

# name: patch in pixels, width D, blocks, width of the MLPs over tokens, channels.
MIXERS = {
  'Mixer-B_16': (16, 768, 12, 384, 3072),
  'Mixer-B_32': (32, 768, 12, 384, 3072),
  'Mixer-L_16': (16, 1024, 24, 512, 4096),
}

# Models that the original fine-tunes with dropout.
DROPOUT = {
  'ViT-L_16': 0.1,
  'ViT-H_14': 0.1,
  'R50+ViT-B_16': 0.1,
  'R50+ViT-L_32': 0.1,
}

# Mean pooling in place of the class token, as in the published models.
GAP = ('S_16', 'S_32', 'B_16', 'B_32')


def _config(name, size, patch, resnet=None, classifier='token'):
  layers, width, mlp_dim, heads = size
  config = ml_collections.ConfigDict()
  config.model_name = name
  config.patches = ml_collections.ConfigDict({'size': (patch, patch)})
  config.hidden_size = width
  config.transformer = ml_collections.ConfigDict()
  config.transformer.mlp_dim = mlp_dim
  config.transformer.num_heads = heads
  config.transformer.num_layers = layers
  # How attention is computed: see vit_jax/layers/attention.py.
  config.transformer.attention = 'default'
  config.transformer.attention_dropout_rate = 0.0
  config.transformer.dropout_rate = DROPOUT.get(name, 0.0)
  config.transformer.gelu = 'tanh'
  config.transformer.norm_eps = 1e-6
  config.transformer.remat = ''
  config.transformer.scan = False
  config.classifier = classifier
  config.representation_size = ml_collections.config_dict.placeholder(int)
  config.head_bias_init = 0.0
  config.dtype = 'float32'
  config.param_dtype = 'float32'
  if resnet is not None:
    units, width_factor = resnet
    config.resnet = ml_collections.ConfigDict()
    config.resnet.num_layers = units
    config.resnet.width_factor = width_factor
    config.resnet.eps = 'published'
  return config


def _mixer_config(name, patch, width, blocks, tokens_mlp_dim, channels_mlp_dim):
  config = ml_collections.ConfigDict()
  config.model_name = name
  config.patches = ml_collections.ConfigDict({'size': (patch, patch)})
  config.hidden_dim = width
  config.num_blocks = blocks
  config.tokens_mlp_dim = tokens_mlp_dim
  config.channels_mlp_dim = channels_mlp_dim
  config.dtype = 'float32'
  config.param_dtype = 'float32'
  return config


def _make_configs():
  configs = {'testing': _config('testing', (1, 16, 16, 2), 16)}
  for size, patches in PATCHES.items():
    for patch in patches:
      name = f'ViT-{size}_{patch}'
      configs[name] = _config(name, SIZES[size], patch)
  for variant in GAP:
    size, patch = variant.split('_')
    name = f'ViT-{variant}-gap-norep'
    configs[name] = _config(name, SIZES[size], int(patch), classifier='gap')
  for name, (size, patch, units, width_factor) in HYBRIDS.items():
    configs[name] = _config(
      name, SIZES[size], patch, resnet=(units, width_factor)
    )
  for name, sizes in MIXERS.items():
    configs[name] = _mixer_config(name, *sizes)
  return configs


def short_name(name: str) -> str:
  """Shortens a model's name for the command line: 'ViT-B_16' -> 'b16'."""
  hybrid, _, rest = name.rpartition('+')
  rest = rest.removeprefix('ViT-')
  size, _, variant = rest.partition('_')
  short = (size + variant).replace('-', '_')  # mixer_b16 for Mixer-B_16.
  return (f'{hybrid}_{short}' if hybrid else short).lower()


MODEL_CONFIGS = _make_configs()

# The models of "How to train your ViT?" (arXiv 2106.10270), by the first part of
# the names of their files.
AUGREG_CONFIGS = {
  name.replace('ViT-', '').replace('+', '_'): MODEL_CONFIGS[name]
  for name in (
    'ViT-Ti_16', 'ViT-S_32', 'ViT-S_16', 'ViT-B_32', 'ViT-B_16', 'ViT-B_8',
    'ViT-L_16', 'R+ViT-Ti_16', 'R26+ViT-S_32', 'R26+ViT-B_32', 'R50+ViT-L_32',
  )
}  # fmt: skip
SHORT_NAMES = {short_name(name): name for name in MODEL_CONFIGS}


def get_config(name: str) -> ml_collections.ConfigDict:
  """Returns a copy of the config of a model.

  Args:
    name: a key of MODEL_CONFIGS ('ViT-B_16') or its short form ('b16').

  Raises:
    ValueError: if there is no such model.
  """
  name = SHORT_NAMES.get(name.lower(), name)
  if name not in MODEL_CONFIGS:
    raise ValueError(
      f"model '{name}' is unknown: use one of {', '.join(SHORT_NAMES)}, or a "
      "long name such as 'ViT-B_16'"
    )
  return copy.deepcopy(MODEL_CONFIGS[name])


def _add_functions():
  """Adds get_b16_config() and its like, one for each row."""
  for short, name in SHORT_NAMES.items():
    globals()[f'get_{short}_config'] = lambda name=name: get_config(name)


_add_functions()
