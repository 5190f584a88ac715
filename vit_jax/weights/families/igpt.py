"""iGPT's weights in other libraries: Hugging Face's ImageGPT, and its JSON files.

The state dicts are `ImageGPTForCausalImageModeling` and `ImageGPTModel`, which has
no head. Their layers have biases, unlike the released code; they must be zero to be
read, and are written as zeros. The last row of their table of colours is the start
token. preprocessor_config.json has the palette, `clusters`, colours in [-1, 1].
"""

from collections.abc import Callable, Mapping
import math
import re
from typing import Annotated, Any, Literal

from absl import logging
from etils import epath
import jax
import ml_collections
import numpy as np

from vit_jax.configs import models as model_configs, schema
from vit_jax.layers import decoder
from vit_jax.weights import descriptions
from vit_jax.weights.families import base, leaves

_COLORS = 'transformer.wte.weight'
# Rows of vit_jax.weights.families.leaves.
_BLOCK = (
  ('norm_1', 'norm', 'ln_1'),
  *leaves.attention('attention', 'attn', ends=('q', 'k', 'v', 'c_proj')),
  ('norm_2', 'norm', 'ln_2'),
  ('mlp/hidden', 'dense', 'mlp.c_fc'),
  ('mlp/output', 'dense', 'mlp.c_proj'),
)
_OTHERS = (
  ('color_embedding', 'table', _COLORS),
  ('position_embedding', 'same', 'transformer.wpe.weight'),
  ('norm', 'norm', 'transformer.ln_f'),
  ('color_head', 'dense', 'lm_head'),
)
# Layers that Hugging Face keeps as [in, out], unlike PyTorch.
_NOT_TRANSPOSED = re.compile(r'.*\.(attn|mlp)\.c_\w+\.(weight|bias)')
_CLASSES = (
  "Hugging Face's classifier pools the tokens of the pixels without the start "
  "token, this package's classifier others"
)
_NAMING = leaves.Naming(
  'hf',
  'iGPT',
  (('', '', _OTHERS), ('block_{0}/', 'transformer.h.{0}.', _BLOCK)),
  marks=(_COLORS,),
  old_names=((r'^(wte|wpe|h|ln_f)\.', r'transformer.\1.'),),
  joined={'.c_attn.': ('.q.', '.k.', '.v.')},
  program="Hugging Face's ImageGPT",
  features={'score.weight': _CLASSES},
)
# Fields of config.json and the only values that this package has.
_ONLY = {
  'activation_function': 'quick_gelu',
  'layer_norm_epsilon': 1e-5,
  'scale_attn_weights': True,
  'scale_attn_by_inverse_layer_idx': False,
  'n_inner': None,
  'add_cross_attention': False,
}
_SCALES = tuple(decoder.SCALES)  # The first is the default.
_Value = Annotated[float, schema.Range(ge=-1.001, le=1.001)]
_PALETTE = Annotated[
  tuple[tuple[_Value, _Value, _Value], ...],
  schema.Fits('colours of 3 channels, numbers from -1 to 1'),
]


class ImageGPTs(base.Family):
  """iGPT."""

  noun = 'an iGPT'
  kind = 'igpt'
  groups = (model_configs.Igpt,)
  leaf = 'color_embedding'
  formats = ('hf', 'workdir')
  hf_types = ('imagegpt',)
  computes = {'attention_scale': _SCALES[0]}  # noqa: RUF012
  head = 'class_head/kernel'
  namings = {'hf': _NAMING}  # noqa: RUF012

  def load(
    self, flat: dict[str, np.ndarray], naming: str, num_heads: base.NumHeads
  ) -> dict[str, np.ndarray]:
    """A missing colour head is zero."""
    leaves.rename(flat, _NAMING.old_names)
    for name in list(filter(_NOT_TRANSPOSED.fullmatch, flat)):
      value = flat.pop(name)
      if name.endswith('.weight'):
        flat[name] = value.T
      elif value.any():
        raise ValueError(
          f"'{name}' is not zero, and iGPT has no biases: these weights were trained "
          "further with Hugging Face's model, which has them"
        )
    params = super().load(flat, naming, num_heads)
    colors = params['color_embedding']
    params.update(color_embedding=colors[:-1], start_token=colors[-1])
    if 'color_head/kernel' not in params:
      logging.warning('These weights have no colour head: it is set to zero.')
      params['color_head/kernel'] = np.zeros_like(colors[:-1].T)
    return params

  def dump(self, flat: Mapping[str, np.ndarray], naming: str) -> dict[str, np.ndarray]:
    flat = dict(flat)
    reason = None
    if 'start_token' not in flat:
      reason = "masked pixels (the objective 'bert')"
    elif 'class_head/kernel' in flat:
      reason = f'such a class_head ({_CLASSES})'
    if reason:
      raise ValueError(
        f'{_NAMING.program} has no {reason}: write this model as a run (--to=workdir)'
      )
    start = flat.pop('start_token')[None]
    flat['color_embedding'] = np.concatenate([flat['color_embedding'], start])
    state = super().dump(flat, naming)
    for name in list(filter(_NOT_TRANSPOSED.fullmatch, state)):
      state[name] = value = np.ascontiguousarray(state[name].T)
      bias = f'{name.removesuffix("weight")}bias'
      state[bias] = np.zeros(value.shape[1], value.dtype)
    return state

  def sizes(
    self, flat: leaves.Shapes, known_fields: Mapping[str, Any]
  ) -> dict[str, Any]:
    num_colors, width = flat['color_embedding']
    return {
      'kind': 'igpt',
      'num_colors': num_colors,
      'num_positions': flat['position_embedding'][0],
      'hidden_size': width,
      'num_layers': leaves.count(flat, 'block_{0}/'),
      'num_heads': flat['block_0/attention/query/kernel'][1],
      **({} if 'start_token' in flat else {'causal': False}),
      **known_fields,
    }

  def describe(self, fields: Mapping[str, Any]) -> str:
    template = (
      'iGPT of {num_layers} layers, width {hidden_size}, {num_positions} pixels of '
      '{num_colors} colours'
    )
    return template.format(**fields)

  def read_description(
    self,
    sibling: Callable[[str], epath.Path],
    file: epath.Path,
    flat: dict[str, np.ndarray],
    naming: str,
  ) -> descriptions.Description:
    description = descriptions.read(sibling('config.json'), _from_config)
    palette = descriptions.read(
      sibling('preprocessor_config.json'),
      lambda processor: descriptions.field(processor, 'clusters', _PALETTE),
    )
    return description._replace(
      metadata={} if palette is None else {'palette': palette}
    )

  def image_size(
    self,
    config: ml_collections.ConfigDict,
    params: Mapping[str, Any],
    requested_size: tuple[int, int] | None,
  ) -> tuple[int, int]:
    pixels = config.num_positions
    size = requested_size or (math.isqrt(pixels),) * 2
    if math.prod(size) != pixels:
      raise ValueError(
        f'image_size={size[0]},{size[1]} has {math.prod(size)} pixels, but the '
        f'weights are for {pixels}: pass the size of the images '
        '(--image_size=HEIGHT,WIDTH)'
      )
    return size

  def inputs(
    self,
    config: ml_collections.ConfigDict,
    params: Mapping[str, Any],
    image_size: tuple[int, int],
  ) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, config.num_positions), np.dtype('int32'))

  def run(self, model: Any) -> dict[str, Any]:
    palette = model.metadata.get('palette') or [[0.0] * 3]
    return {
      'task': 'pixels_finetune' if model.num_classes else 'pixels',
      'pp': {'channels': len(palette[0])},
    }

  def check(self, model: Any) -> None:
    palette = model.metadata.get('palette')
    colors = model.config.num_colors
    if palette is not None and len(palette) != colors:
      raise ValueError(
        f'preprocessor_config.json has a palette of {len(palette)} colours, but '
        f'the weights are for {colors}: use the palette of their training'
      )

  def notes(self, model: Any, to: str) -> list[str]:
    config = model.config
    notes = []
    size = config.hidden_size // config.num_heads
    if 'hf' in (model.source, to) and math.isqrt(size) ** 2 != size:
      scale = config.get('attention_scale', _SCALES[0])
      notes.append(
        f"attention divides by the root of a head's size, {size}: transformers before "
        f'5.21 truncates it to an integer; this model has attention_scale={scale} (for '
        'weights trained with such a version, add "attention_scale": "truncated" to '
        'their config.json)'
      )
    if 'palette' not in model.metadata:
      notes.append(
        'the palette is unknown: put the preprocessor_config.json of the model '
        'next to its weights, for images and for --to=workdir'
      )
    return notes

  def files(self, model: Any, to: str) -> tuple[dict[str, dict], list[str]]:
    config = model.config
    scale = config.get('attention_scale', _SCALES[0])
    fields = dict(
      model_type='imagegpt',
      architectures=['ImageGPTForCausalImageModeling'],
      vocab_size=config.num_colors + 1,
      n_positions=config.num_positions,
      n_embd=config.hidden_size,
      n_layer=config.num_layers,
      n_head=config.num_heads,
      tie_word_embeddings=False,
      **_ONLY,
      **({} if scale == _SCALES[0] else {'attention_scale': scale}),
    )
    contents = {'config.json': fields}
    if 'palette' in model.metadata:
      height, width = model.image_size
      contents['preprocessor_config.json'] = dict(
        image_processor_type='ImageGPTImageProcessor',
        clusters=model.metadata['palette'],
        do_color_quantize=True,
        do_normalize=True,
        do_resize=True,
        size=dict(height=height, width=width),
        resample=2,
      )
    return contents, []


def _from_config(config: Mapping[str, Any]) -> descriptions.Description:
  descriptions.check_supported(config, **_ONLY)
  field = descriptions.field
  scale = field(config, 'attention_scale', Literal[*_SCALES], _SCALES[0])
  heads = field(config, 'n_head', schema.Count)
  return descriptions.Description({'attention_scale': scale}, num_heads=heads)
