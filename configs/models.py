"""Sizes of the models: tables from which every model config is made.

`get_b16_config()` and `MODEL_CONFIGS['ViT-B_16']` give the same config: the
arguments of `vit_jax.models.VisionTransformer` (or of the class of another `kind`) without
`num_classes`. Sources: arXiv 2010.11929 table 1 (B, L, H), 2106.10270 table 2
(Ti, S, R+Ti, R26+S), 2106.04560 table 2 (G), 2302.05442 table 1 (22B), 2105.01601
table 1 (Mixer), 1912.11370 (BiT), 2005.12872 (DETR), 2304.07193 and 2309.16588
(DINOv2), 2508.10104 (DINOv3), 2503.19108 and its released code (EoMT); "Generative
Pretraining from Pixels", section 3.1, and its released code (iGPT).

The configs hold sizes only, so that other implementations of the models accept
them too. FIELDS has all fields of a model, with their types and defaults; set them
on the command line (--config.model.dtype=bfloat16) or in a config file.
"""

from collections.abc import Mapping
import copy
import dataclasses
import difflib
import functools
import re
from typing import Annotated, Any, Literal, TypeAlias

import ml_collections

from vit_jax.configs import schema

# Name -> (layers, width D, width of the MLP, heads).
SIZES = {
  'Ti': (12, 192, 768, 3),
  'S': (12, 384, 1536, 6),
  'B': (12, 768, 3072, 12),
  'L': (24, 1024, 4096, 16),
  'H': (32, 1280, 5120, 16),
  'G': (48, 1664, 8192, 16),
  '22B': (48, 6144, 24576, 48),
}
# Size -> how its encoder differs from the original's. As published, the sizes of G and
# 22B do not include attention pooling, which is --config.model.classifier=map.
VARIATIONS = {
  '22B': {'norm': 'rms', 'qkv_bias': False, 'qk_norm': True, 'parallel': True},
}
# Size -> its name on the command line. Papers tell G ("gigantic") from g ("giant", of
# width 1408) by its case only.
SHORT_SIZES = {'G': 'gigantic'}

# Size -> patch sizes in pixels.
PATCHES = {
  'Ti': (16, 32),
  'S': (16, 32),
  'B': (8, 14, 16, 32),
  'L': (14, 16, 32),
  'H': (14, 16, 32),
  'G': (14,),
  '22B': (14,),
}

# Name -> (size, patch in cells of the feature map, units per stage, width
# factor).
HYBRIDS = {
  'R+ViT-Ti_16': ('Ti', 8, (), 1),
  'R26+ViT-S_32': ('S', 1, (2, 2, 2, 2), 1),
  'R26+ViT-B_32': ('B', 1, (2, 2, 2, 2), 1),
  'R50+ViT-B_16': ('B', 1, (3, 4, 9), 1),
  'R50+ViT-B_32': ('B', 1, (3, 4, 6, 3), 1),
  'R50+ViT-L_16': ('L', 1, (3, 4, 9), 1),
  'R50+ViT-L_32': ('L', 1, (3, 4, 6, 3), 1),
}

# DINOv2: size -> its row of SIZES, where it has one, and how its encoder differs. There
# are models with 4 registers ('-reg4') and without. The MLP of g has two thirds of the
# width of one without a gate.
DINOV2 = {
  'S': (SIZES['S'], {}),
  'B': (SIZES['B'], {}),
  'L': (SIZES['L'], {}),
  'g': ((40, 1536, 4096, 24), {'mlp': 'swiglu'}),
}
# DINOv3, with 4 registers and patches of 16 pixels: sizes of SIZES, and how the encoder
# differs from DINOv2's.
DINOV3 = ('S', 'B', 'L')
_DINOV3_ENCODER = {'position_embedding': 'rope', 'norm_eps': 1e-5}

# EoMT, with patches of 16 pixels: encoder -> number of layers that read the queries, as in
# the released configs. DINOv2's have 4 registers, and their patch embeddings are resized
# from 14 pixels.
EOMTS = {
  **{f'DINOv2-{size}': layers for size, layers in zip('SBLg', (3, 3, 4, 5))},
  **{f'DINOv3-{size}': layers for size, layers in zip('SBL', (3, 3, 4))},
}

# Name -> (patch in pixels, width D, blocks, widths of the MLPs over tokens and
# over channels).
MIXERS = {
  'Mixer-B_16': (16, 768, 12, 384, 3072),
  'Mixer-B_32': (32, 768, 12, 384, 3072),
  'Mixer-L_16': (16, 1024, 24, 512, 4096),
}

# Name -> units per stage of a BiT ResNet (arXiv 1912.11370, section 3.3), and
# the width factors to which it is scaled.
BITS = {
  'R50': ((3, 4, 6, 3), (1, 2, 3)),
  'R101': ((3, 4, 23, 3), (1, 3)),
  'R152': ((3, 8, 36, 3), (1, 2, 4)),
  'R200': ((3, 24, 36, 3), (3,)),
}

# iGPT: size -> (layers, width D, heads). The heads of XL, whose weights were never
# released, are unknown: the number here is the number of L.
IGPTS = {
  'S': (24, 512, 8),
  'M': (36, 1024, 8),
  'L': (48, 1536, 16),
  'XL': (60, 3072, 16),
}

# Name -> units per stage of the backbone, whether its last stage is dilated instead of
# strided ("DC5"), of a DETR (arXiv 2005.12872, section 4).
DETRS = {
  'DETR-R50': ((3, 4, 6, 3), False),
  'DETR-R50-DC5': ((3, 4, 6, 3), True),
  'DETR-R101': ((3, 4, 23, 3), False),
  'DETR-R101-DC5': ((3, 4, 23, 3), True),
}

# Name -> image tower, text tower, tokenizer, widths of the heads (image, text) of
# a LiT model (arXiv 2111.07991; sizes of the released models).
LITS: dict[str, tuple[str, str, Any, tuple[int | None, int]]] = {
  'LiT-B16B': ('ViT-B_16', 'bert', {'config': 'base'}, (768, 768)),
  'LiT-B16B_2': ('ViT-B_16', 'bert', {'config': 'base'}, (None, 768)),
  'LiT-L16L': ('ViT-L_16', 'bert', {'config': 'large'}, (None, 1024)),
  'LiT-L16S': ('ViT-L_16', 'sentencepiece', 'S', (None, 1024)),
  'LiT-L16Ti': ('ViT-L_16', 'sentencepiece', 'Ti', (None, 1024)),
}

# Small models for tests, with the original's sizes -> classifier.
TESTING = {'testing': 'token', 'testing-unpooled': 'unpooled'}

# Models that the original fine-tunes with dropout.
DROPOUT = dict.fromkeys(
  (*TESTING, 'ViT-L_16', 'ViT-H_14', 'R50+ViT-B_16', 'R50+ViT-L_32'), 0.1
)

# Models with mean pooling in place of the class token, as published.
GAP = ('S_16', 'S_32', 'B_16', 'B_32')


# --- Fields of each kind of model ---
#
# A field with a default is added to a config that lacks it. Transformer is itself the
# field of the encoder's modules (vit_jax/layers/encoder.py); the classes of the models
# describe the other fields: VisionTransformer, MlpMixer, BitResNet, ImageGPT, Detr,
# Eomt, LitModel.

# Choices: modules read them with typing.get_args.
Float = Literal['float32', 'bfloat16', 'float16']
ComputeDtype = Literal['auto', 'float32', 'bfloat16', 'float16']
Attention = Literal['auto', 'default', 'xla', 'cudnn', 'flash']
AttentionPattern = Literal['global', 'local', 'axial']
AttentionScale = Literal['exact', 'truncated']
Backbone = Literal['resnet', 'vit']
BackboneNorm = Literal['frozen_batch', 'group']
Classifier = Literal[
  'token',
  'gap',
  'token_gap',
  'token_with_gap',
  'map',
  'token_map',
  'unpooled',
  'token_unpooled',
]
Epsilons = Literal['published', 'timm']
Gelu = Literal['tanh', 'erf', 'quick']
HeadInit = Literal['zeros', 'lecun_normal']
Mlp = Literal['gelu', 'swiglu']
Norm = Literal['layer', 'layer_no_bias', 'rms']
PositionEmbedding = Literal[
  'learned_1d',
  'learned_2d',
  'sincos2d',
  'relative',
  'rope',
  'axial_rope',
  'learned_axial_rope',
  'relative_bias',
  'none',
]
PositionLayers = Literal['stem', 'every', 'shared']
Remat = Literal['', 'full', 'dots']
TextModel = Literal['bert', 'text_transformer']
TextPool = Literal['last', 'eos']
UnitRemat = Literal['', 'full']
Tokenizer = Literal['bert', 'hf_bert', 'sentencepiece', 'clip', 'siglip', 'siglip2']

_Odd = Annotated[
  int,
  schema.Range(ge=1),
  schema.Fits('an odd integer of at least 1', lambda x: x % 2 == 1),
]


@dataclasses.dataclass(kw_only=True)
class _Model:
  kind: schema.Text | None
  model_name: schema.Text | None
  # Types of the computation and of the parameters. 'auto' computes in bfloat16 on
  # GPUs and TPUs, and in float32 on CPUs.
  dtype: ComputeDtype = 'float32'
  param_dtype: Float = 'float32'


@dataclasses.dataclass(kw_only=True)
class _Patches:
  size: schema.HeightWidth


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
  """The encoder of a Vision Transformer: a pre-norm Transformer.

  Raises ValueError if a value does not have its type.
  """

  num_layers: schema.Count
  mlp_dim: schema.Count  # M, the width of the hidden layer of an MLP.
  num_heads: schema.Count  # K.
  # Dropout after dense layers and after the position embeddings.
  dropout_rate: schema.Rate = 0.1
  attention_dropout_rate: schema.Rate = 0.1  # Dropout of the attention weights.
  attention: Annotated[Attention, schema.FREE] = 'auto'  # See vit_jax.layers.attention.
  # Probability that an image skips the attention of the last layer, and likewise the
  # MLP; it increases linearly from 0 in the first layer (arXiv 1603.09382). An image
  # skips both or neither of a layer with `parallel`.
  stochastic_depth: schema.Rate = 0.0
  # Activations that the backward pass recomputes. '': none; 'full': all but each layer's
  # input; 'dots': all but the inputs and the results of the dense layers.
  remat: Annotated[Remat, schema.FREE] = ''
  # Whether to apply all layers but the last in a loop, which compiles faster. Results
  # are the same except for dropout's noise, and parameters keep their names. None: in
  # training on TPUs, with more than 12 layers.
  scan: Annotated[bool | None, schema.FREE] = None
  gelu: Gelu = 'tanh'  # See vit_jax.layers.encoder.GELUS.
  norm_eps: schema.Epsilon = 1e-6  # Added to the variance in norms.
  add_position_embedding: bool = True  # False is position_embedding='none'.
  # See vit_jax.layers.positions. The grid is (height, width) in patches of learned
  # tables, which are resized to the grid of the images; None: the tables have that grid.
  position_embedding: PositionEmbedding = 'learned_1d'
  position_layers: PositionLayers = 'stem'
  position_grid: schema.HeightWidth | None = None
  causal: bool = False  # Whether token i attends to tokens 0 to i only.
  first_norm: bool = False  # Whether a LayerNorm precedes the layers, as in CLIP.

  # Variations of ViT-22B (arXiv 2302.05442, section 2).
  norm: Norm = 'layer'  # Kind of all norms, see vit_jax.layers.norms.
  qkv_bias: bool = True  # Whether queries, keys and values have biases.
  # Whether norms precede the product of queries and keys, one over each head.
  qk_norm: bool = False
  # Whether attention and MLP of a layer both read its input, after one norm.
  parallel: bool = False

  # Variations of DINOv2 (arXiv 2304.07193).
  # MLP of a layer: 'swiglu' multiplies two hidden layers of width M, one after a SiLU.
  mlp: Mlp = 'gelu'
  # Initial value of learned factors on the channels of each branch; None: no factors.
  layer_scale: schema.Positive | None = None

  # See vit_jax.layers.grid_attention. The window is a number of patches a side.
  attention_pattern: AttentionPattern = 'global'
  attention_window: _Odd = 7

  # Variations of EVA-02 (arXiv 2303.11331, section 2.1). Rotary embeddings: their
  # temperature, and the grid to which `axial_rope` scales.
  rope_temperature: schema.Positive = 100.0
  rope_grid: schema.HeightWidth | None = None
  # Whether norms follow the hidden layer of the MLP, and the heads of attention.
  mlp_norm: bool = False
  attention_norm: bool = False

  def __post_init__(self) -> None:
    for key, kind in schema.fields(type(self)).items():
      schema.check(key, getattr(self, key), kind, 'config.model.transformer.')


@dataclasses.dataclass(kw_only=True)
class _ResNet:
  num_layers: schema.Units
  width_factor: schema.WidthFactor
  eps: Epsilons = 'published'


@dataclasses.dataclass(kw_only=True)
class Vit(_Model):
  """Fields of vit_jax.models_vit.VisionTransformer in a config."""

  patches: _Patches
  hidden_size: schema.Count
  transformer: Transformer
  resnet: _ResNet
  representation_size: schema.Count | None
  classifier: Classifier
  head_init: HeadInit
  # Initial bias of the head: -10 for many classes with a sigmoid.
  head_bias_init: float = 0.0
  registers: schema.Natural = 0
  pool_norm: bool = False
  distilled: bool = False


@dataclasses.dataclass(kw_only=True)
class Eomt(Vit):
  """Fields of vit_jax.models_eomt.Eomt in a config."""

  num_queries: schema.Count = 200
  num_query_layers: schema.Count = 4
  num_upscales: schema.Natural = 2


@dataclasses.dataclass(kw_only=True)
class Mixer(_Model):
  """Fields of vit_jax.models_mixer.MlpMixer in a config."""

  patches: _Patches
  hidden_dim: schema.Count
  num_blocks: schema.Count
  tokens_mlp_dim: schema.Count
  channels_mlp_dim: schema.Count


@dataclasses.dataclass(kw_only=True)
class Bit(_Model):
  """Fields of vit_jax.models_bit.BitResNet in a config."""

  num_layers: schema.Units
  width_factor: schema.WidthFactor
  head_bias_init: float = 0.0
  eps: Epsilons = 'published'
  remat: Annotated[UnitRemat, schema.FREE] = ''


@dataclasses.dataclass(kw_only=True)
class Igpt(_Model):
  """Fields of vit_jax.models_igpt.ImageGPT in a config."""

  hidden_size: schema.Count
  num_layers: schema.Count
  num_heads: schema.Count
  num_colors: Annotated[int, schema.Range(ge=2)]
  num_positions: schema.Count
  causal: bool = True
  attention_scale: AttentionScale = 'exact'
  attention: Annotated[Attention, schema.FREE] = 'auto'
  remat: Annotated[Remat, schema.FREE] = ''
  scan: Annotated[bool | None, schema.FREE] = None


@dataclasses.dataclass(kw_only=True)
class Detr(_Model):
  """Fields of vit_jax.models_detr.Detr in a config."""

  backbone: Backbone
  vit: Vit
  units: schema.Units
  dilate_last: bool
  backbone_width: schema.Count
  hidden_size: schema.Count
  num_queries: schema.Count
  num_encoder_layers: schema.Natural
  num_decoder_layers: schema.Count
  num_heads: schema.Count
  mlp_dim: schema.Count
  norm: BackboneNorm = 'frozen_batch'
  mask_head: bool = False
  masks_at_a_time: Annotated[schema.Natural, schema.FREE] = 10
  dropout_rate: schema.Rate = 0.1
  attention_dropout_rate: schema.Rate = 0.1


@dataclasses.dataclass(kw_only=True)
class TextTower:
  """Fields of the text tower of a vit_jax.models_lit.LitModel in a config."""

  config: str | dict
  width: schema.Count
  num_layers: schema.Count
  mlp_dim: schema.Count
  num_heads: schema.Count
  vocab_size: Annotated[int, schema.Range(ge=2)]
  dropout_rate: schema.Rate
  causal: bool
  pool: TextPool
  gelu: Gelu
  norm_eps: schema.Epsilon


@dataclasses.dataclass(kw_only=True)
class _Tokens:
  tokenizer_name: Tokenizer
  vocab_path: schema.Text | None
  size: schema.Count
  max_len: Annotated[int, schema.Range(ge=2)]


@dataclasses.dataclass(kw_only=True)
class Lit(_Model):
  """Fields of vit_jax.models_lit.LitModel in a config."""

  image: Vit
  text: TextTower
  text_model: TextModel
  pp: _Tokens
  out_dim: Any
  # As in the released training code.
  temperature_init: schema.Positive = 10.0
  bias_init: float | None = None


FIELDS = {
  'vit': Vit,
  'mixer': Mixer,
  'bit': Bit,
  'igpt': Igpt,
  'detr': Detr,
  'eomt': Eomt,
  'lit': Lit,
}

# The kind of a model whose fields the weights determine (config.pretrained).
PRETRAINED = 'pretrained'

_Config: TypeAlias = Mapping[str, Any] | ml_collections.ConfigDict


def _config(name: str, **fields: Any) -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({'model_name': name, **fields})


def _vit_config(
  name: str,
  size: tuple[int, int, int, int],
  patch: int,
  classifier: str = 'token',
  variations: Mapping[str, Any] | None = None,
  **fields: Any,
) -> ml_collections.ConfigDict:
  layers, width, mlp_dim, heads = size
  return _config(
    name,
    patches={'size': (patch, patch)},
    hidden_size=width,
    transformer={
      'mlp_dim': mlp_dim,
      'num_heads': heads,
      'num_layers': layers,
      'attention_dropout_rate': 0.0,
      'dropout_rate': DROPOUT.get(name, 0.0),
      **(variations or {}),
    },
    classifier=classifier,
    representation_size=ml_collections.config_dict.placeholder(int),
    **fields,
  )


_Configs = dict[str, ml_collections.ConfigDict]


def _make_configs() -> _Configs:
  configs = {**_vits(), **_dinos()}
  configs.update(_eomts(configs))
  configs.update(_gap_vits())
  configs.update(_hybrids())
  configs.update(_mixers())
  configs.update(_bits())
  configs.update(_igpts())
  configs.update(_detrs())
  configs.update(_lits(configs))
  return configs


def _vits() -> _Configs:
  configs = {}
  for name, classifier in TESTING.items():
    configs[name] = _vit_config(name, (1, 10, 10, 2), 16, classifier)
  for size, patches in PATCHES.items():
    for patch in patches:
      name = f'ViT-{size}_{patch}'
      variations = VARIATIONS.get(size, {})
      configs[name] = _vit_config(name, SIZES[size], patch, variations=variations)
  return configs


def _dinos() -> _Configs:
  configs = {}
  for size, (sizes, extra_fields) in DINOV2.items():
    variations = {'gelu': 'erf', 'layer_scale': 1e-5, **extra_fields}
    for suffix, registers in (('', 0), ('-reg4', 4)):
      name = f'DINOv2-{size}_14{suffix}'
      fields: dict[str, Any] = {'registers': registers} if registers else {}
      configs[name] = _vit_config(name, sizes, 14, variations=variations, **fields)
  for size in DINOV3:
    name = f'DINOv3-{size}_16'
    variations = {'gelu': 'erf', 'layer_scale': 1e-5, **_DINOV3_ENCODER}
    configs[name] = _vit_config(
      name, SIZES[size], 16, variations=variations, registers=4
    )
  return configs


def _eomts(encoders: _Configs) -> _Configs:
  configs = {}
  for encoder, query_layers in EOMTS.items():
    variant = '16' if encoder.startswith('DINOv3') else '14-reg4'
    config = copy.deepcopy(encoders[f'{encoder}_{variant}'])
    config.patches.size = (16, 16)
    name = f'EoMT-{encoder.removeprefix("DINOv2-")}_16'
    config.update(model_name=name, kind='eomt', num_query_layers=query_layers)
    configs[name] = config
  return configs


def _gap_vits() -> _Configs:
  configs = {}
  for variant in GAP:
    size, _, patch_size = variant.partition('_')
    name = f'ViT-{variant}-gap-norep'
    configs[name] = _vit_config(name, SIZES[size], int(patch_size), 'gap')
  return configs


def _hybrids() -> _Configs:
  configs = {}
  for name, (size, patch, units, width_factor) in HYBRIDS.items():
    resnet = {'num_layers': units, 'width_factor': width_factor}
    configs[name] = _vit_config(name, SIZES[size], patch, resnet=resnet)
  return configs


def _mixers() -> _Configs:
  configs = {}
  for name, (patch, width, blocks, tokens, channels) in MIXERS.items():
    configs[name] = _config(
      name,
      patches={'size': (patch, patch)},
      hidden_dim=width,
      num_blocks=blocks,
      tokens_mlp_dim=tokens,
      channels_mlp_dim=channels,
    )
  return configs


def _bits() -> _Configs:
  configs = {}
  for depth, (units, width_factors) in BITS.items():
    for factor in width_factors:
      name = f'BiT-{depth}x{factor}'
      configs[name] = _config(
        name, kind='bit', num_layers=units, width_factor=float(factor)
      )
  return configs


def _igpts() -> _Configs:
  configs = {}
  for size, (layers, width, heads) in IGPTS.items():
    name = f'iGPT-{size}'
    configs[name] = _config(
      name,
      kind='igpt',
      hidden_size=width,
      num_layers=layers,
      num_heads=heads,
      num_colors=512,
      num_positions=32 * 32,
    )
  return configs


def _detrs() -> _Configs:
  configs = {}
  for name, (units, dilate_last) in DETRS.items():
    configs[name] = _config(
      name,
      kind='detr',
      units=units,
      dilate_last=dilate_last,
      hidden_size=256,
      num_queries=100,
      num_encoder_layers=6,
      num_decoder_layers=6,
      num_heads=8,
      mlp_dim=2048,
    )
  return configs


def _lits(images: _Configs) -> _Configs:
  configs = {}
  for name, (image, tokenizer, text, out_dim) in LITS.items():
    text_model = 'bert' if tokenizer == 'bert' else 'text_transformer'
    if tokenizer == 'sentencepiece':
      layers, width, mlp_dim, heads = SIZES[text]
      text = dict(
        width=width,
        num_layers=layers,
        mlp_dim=mlp_dim,
        num_heads=heads,
        vocab_size=16_000,
      )
    configs[name] = _config(
      name,
      kind='lit',
      image=copy.deepcopy(images[image]),
      text=text,
      text_model=text_model,
      pp={'tokenizer_name': tokenizer, 'size': 224, 'max_len': 16},
      out_dim=out_dim,
    )
  return configs


def short_name(name: str) -> str:
  """Returns a model's name for the command line: 'ViT-B_16' -> 'b16'."""
  if name in LITS:
    return name.replace('-', '_').lower()
  hybrid, _, vit_name = name.rpartition('+')
  vit_name = vit_name.removeprefix('ViT-')
  size, _, variant = vit_name.partition('_')
  size = SHORT_SIZES.get(size, size)
  short = (size + variant).replace('-', '_')  # mixer_b16 for Mixer-B_16.
  if hybrid:
    short = f'{hybrid}_{short}'
  return short.lower()


MODEL_CONFIGS = _make_configs()

# The models of "How to train your ViT?" (arXiv 2106.10270), by the first part
# of their file names.
AUGREG_CONFIGS = {
  name.replace('ViT-', '').replace('+', '_'): config
  for name, config in MODEL_CONFIGS.items()
  if name
  in (
    'ViT-Ti_16', 'ViT-S_32', 'ViT-S_16', 'ViT-B_32', 'ViT-B_16', 'ViT-B_8',
    'ViT-L_16', 'R+ViT-Ti_16', 'R26+ViT-S_32', 'R26+ViT-B_32', 'R50+ViT-L_32',
  )
  or name.endswith('-gap-norep')
}  # fmt: skip
SHORT_NAMES = {short_name(name): name for name in MODEL_CONFIGS}


def get_config(name: str) -> ml_collections.ConfigDict:
  """Returns a copy of a model's config; raises ValueError for an unknown one.

  `name` is a key of MODEL_CONFIGS ('ViT-B_16'), its short form ('b16'), or a
  key of AUGREG_CONFIGS ('R_Ti_16').
  """
  name = SHORT_NAMES.get(name.lower(), name)
  if name in AUGREG_CONFIGS:
    name = AUGREG_CONFIGS[name].model_name
  if name not in MODEL_CONFIGS:
    short = SHORT_SIZES.get(name[:1].upper(), name[:1]) + name[1:]
    near = _translated(name) or difflib.get_close_matches(short.lower(), SHORT_NAMES, 1)
    hint = f"did you mean '{near[0]}'? Or " if near else ''
    raise ValueError(
      f"model '{name}' is unknown: {hint}use one of {', '.join(SHORT_NAMES)}, or a "
      "long name such as 'ViT-B_16'"
    )
  return copy.deepcopy(MODEL_CONFIGS[name])


# Words of timm, Hugging Face and torchvision for sizes.
_SIZE_WORDS = {
  'tiny': 'ti',
  'small': 's',
  'base': 'b',
  'large': 'l',
  'huge': 'h',
  'giant': 'g',
}
_OTHER_NAME = re.compile(r'^(?:vit_?)?(ti|s|b|l|h|g)_?(?:patch)?(\d+)(?=_|$)')
_DINO = re.compile(r'^dinov(2|3)_(?:vit)?(s|b|l|g)(?:1[46])?(_reg)?')


def _translated(name: str) -> list[str]:
  """Returns the short names of a model of timm, Hugging Face or torchvision."""
  text = name.rpartition('/')[2].partition('.')[0].lower().replace('-', '_')
  for word, size in _SIZE_WORDS.items():
    text = text.replace(word, size)
  if text.endswith(('_dinov2', '_dinov3')):  # timm's.
    registers = '_reg' if '_reg4_' in text else ''
    text = f'{text[-6:]}_{text.split("_")[1]}{registers}'
  text = text.replace('with_registers_', '')  # Hugging Face's.
  if match := _DINO.search(text):
    version, size, registers = match.groups()
    if version == '3':
      short = f'dinov3_{size}16'
    else:
      has_registers = registers or 'with-registers' in name
      short = f'dinov2_{size}14{"_reg4" if has_registers else ""}'
  elif match := _OTHER_NAME.search(text):
    short = f'{match[1]}{match[2]}'
  else:
    return []
  return [short] if short in SHORT_NAMES else []


def kind_of(model: _Config) -> str:
  """Returns the kind of a model, which the original's configs do not name."""
  return model.get('kind') or ('mixer' if 'tokens_mlp_dim' in model else 'vit')


def is_of_weights(model: _Config) -> bool:
  """Returns whether the fields of a model are those of its weights.

  It has the kind PRETRAINED, or a kind that extends Vision Transformers, without sizes.
  """
  kind = kind_of(model)
  extends_vit = kind != 'vit' and issubclass(FIELDS.get(kind, object), Vit)
  return kind == PRETRAINED or (extends_vit and 'hidden_size' not in model)


def kinds_with_fields_of(kind: str | None) -> list[str]:
  """Returns the kinds of models that have all fields of a kind, which comes first."""
  if kind is None:
    return list(FIELDS)
  fields = FIELDS.get(kind, Vit if kind == PRETRAINED else None)
  kinds = [kind]
  for other_kind, other_fields in FIELDS.items():
    if fields and other_kind not in (kind, 'vit') and issubclass(other_fields, fields):
      kinds.append(other_kind)
  return kinds


# Key of a part of a model that is itself a model -> first name of its
# parameters: of a DETR's Vision Transformer, and of an image tower.
_PARTS = {'vit': 'backbone', 'image': 'img'}


def parts_of(model: _Config) -> dict[str, str]:
  """Returns the parts of a model that are Vision Transformers of their own.

  {first name of the part's parameters: key of its config in `model`}, such as
  {'backbone': 'vit'} for a DETR with a Vision Transformer.
  """
  return {name: key for key, name in _PARTS.items() if model.get(key)}


def vit_of(model: _Config) -> ml_collections.ConfigDict:
  """Returns the config of a model's Vision Transformer, by default of all of it."""
  return next((model[key] for key in _PARTS if model.get(key)), model)


def layers_of(model: _Config) -> ml_collections.ConfigDict:
  """Returns the part of a model's config that describes its layers.

  The part has `num_layers`, `attention` and `remat` where the model has them: it
  is the `transformer` of a Vision Transformer, and the whole config of an iGPT.
  """
  return vit_of(model).get('transformer') or vit_of(model)


def place_of_layers(model: _Config) -> str:
  """Returns the dotted key of `layers_of`, such as 'model.vit.transformer'."""
  inner = ('transformer',) if vit_of(model).get('transformer') else ()
  return '.'.join(('model', *parts_of(model).values(), *inner))


def with_options(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """Returns a copy of a model's config that contains all options of its kind."""
  config = copy.deepcopy(config)
  if fields := FIELDS.get(kind_of(config)):
    schema.fill(config, fields)
  return config


# get_b16_config() and the like, one for each model.
for _short, _name in SHORT_NAMES.items():
  globals()[f'get_{_short}_config'] = functools.partial(get_config, _name)
