"""The files beside iGPT's weights: Hugging Face's config.json and palette.

preprocessor_config.json has the palette, `clusters`, colours in [-1, 1].
"""

from collections.abc import Callable
import math

from etils import epath
import jax
import numpy as np

from vit_jax.layers import decoder
from vit_jax.weights import arrays
from vit_jax.weights import descriptions
from vit_jax.weights.families import igpt

# Formats of vit_jax.convert that hold an iGPT.
FORMATS = ('hf', 'workdir')
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
# The first version of transformers that divides by the exact root.
_EXACT_SINCE = '5.21'


def run(model) -> dict:
  """Returns what a model determines of the config of its run."""
  palette = model.metadata.get('palette') or [[0.0] * 3]
  return {
    'task': 'pixels_finetune' if model.num_classes else 'pixels',
    'pp': {'channels': len(palette[0])},
  }


def metadata(model) -> dict:
  """Returns metadata of a run that weights do not bring along: nothing."""
  del model
  return {}


def image_size(
  config, params, given: tuple[int, int] | None
) -> tuple[int, int]:
  """Returns (height, width) of a model's images.

  Args:
    config: fields of the model.
    params: its parameters.
    given: the size, if it is known.

  Raises:
    ValueError: if the given size has another number of pixels, or none is given
      and the pixels are no square.
  """
  del params
  pixels = config.num_positions
  side = math.isqrt(pixels)
  size = given or (side, side)
  if math.prod(size) != pixels:
    raise ValueError(
      f'image_size={size[0]},{size[1]} has {math.prod(size)} pixels, but the '
      f'weights are for {pixels}: give the size of the images '
      '(--image_size=HEIGHT,WIDTH)'
    )
  return size


def inputs(config, params, image_size) -> jax.ShapeDtypeStruct:
  """Returns shape and type of a model's input, the numbers of an image."""
  del params, image_size
  return jax.ShapeDtypeStruct((1, config.num_positions), np.dtype('int32'))


def check(model) -> None:
  """Raises ValueError if a model's palette does not fit its weights."""
  palette = model.metadata.get('palette')
  colors = model.config.num_colors
  if palette is not None and len(palette) != colors:
    raise ValueError(
      f'preprocessor_config.json has a palette of {len(palette)} colours, but the '
      f'weights are for {colors}: give the palette that they were trained with'
    )


def layout(config, to: str) -> igpt.Layout:
  """Returns the naming of a model's arrays in a format."""
  del config
  return igpt.Layout(to)


def describe(
  beside: Callable[[str], epath.Path], file: epath.Path, flat, layout, num_heads
) -> descriptions.Description:
  """Returns what config.json and preprocessor_config.json tell about weights.

  Args:
    beside: function from a name to the path of the file of this name beside the
      weights, which need not exist.
    file: file of the weights.
    flat: the arrays by name.
    layout: their naming.
    num_heads: number of attention heads, if it is known.

  Raises:
    ValueError: if a field has a wrong value, or one that no model here has.
  """
  del file, flat, layout
  found = descriptions.read(beside('config.json'), _from_config)
  heads = num_heads or found.model.get('num_heads')
  found = found._replace(num_heads=heads)
  processor = beside('preprocessor_config.json')
  with arrays.naming(processor, 'cannot be used'):
    palette = _palette(descriptions.load(processor))
  if palette is None:
    return found
  return found._replace(metadata={'palette': palette})


def _from_config(config):
  for key, only in _ONLY.items():
    if config.get(key, only) != only:
      raise ValueError(
        f'{key} is {config[key]!r:.80}, but this package has only iGPTs with '
        f'{only!r}'
      )
  model = {
    'attention_scale': descriptions.choice(
      config, 'attention_scale', _SCALES, _SCALES[0]
    )
  }
  heads = descriptions.count(config, 'n_head')
  if heads:
    model['num_heads'] = heads
  return descriptions.Description(model)


def _palette(processor):
  """Returns the palette of preprocessor_config.json as a list, or None."""

  def is_right(x):
    try:
      array = np.asarray(x, np.float32)
    except (ValueError, TypeError):
      return False
    return array.ndim == 2 and array.shape[1] == 3 and bool(
      np.isfinite(array).all() and (abs(array) <= 1 + 1e-3).all()
    )  # fmt: skip

  what = 'colours of 3 channels, numbers from -1 to 1'
  return descriptions.field(processor, 'clusters', is_right, what)


def files(model, to: str) -> tuple[dict[str, dict], list[str]]:
  """Returns Hugging Face's JSON files of a model by name, and notes.

  Args:
    model: has `config`, `image_size` and `metadata`.
  """
  del to
  config, scale = model.config, model.config.get('attention_scale', _SCALES[0])
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
  )
  if scale != _SCALES[0]:
    fields['attention_scale'] = scale
  found = {'config.json': fields}
  if 'palette' in model.metadata:
    height, width = model.image_size
    found['preprocessor_config.json'] = dict(
      image_processor_type='ImageGPTImageProcessor',
      clusters=model.metadata['palette'],
      do_color_quantize=True,
      do_normalize=True,
      do_resize=True,
      size=dict(height=height, width=width),
      resample=2,
    )
  return found, []


def notes(model, to: str) -> list[str]:
  """Returns what a user should know of a model in a format."""
  config = model.config
  size = config.hidden_size // config.num_heads
  found = []
  if 'hf' in (model.source, to) and math.isqrt(size) ** 2 != size:
    found.append(
      f"attention divides by the root of a head's size, {size}, which is no whole "
      f'number: transformers before version {_EXACT_SINCE} cut off its fraction, '
      'the released code and later versions do not; this model has '
      f'attention_scale={config.get("attention_scale", _SCALES[0])} (for weights '
      'that such a version has trained, add "attention_scale": "truncated" to '
      'their config.json)'
    )
  if 'palette' not in model.metadata:
    found.append(
      'the palette is unknown: put the preprocessor_config.json of the model '
      'beside its weights, for images and for --to=workdir'
    )
  return found
