"""Image and text towers: LiT (arXiv 2111.07991), CLIP and SigLIP.

One tower embeds images, another one texts, as vectors of length 1. The product
of two vectors tells how well an image and a text fit together.

  model = models.get_model('LiT-B16B')
  variables = model.load_variables()
  tokens = model.get_tokenizer()(['a photo of a cat'])
  images = model.get_image_preprocessing()([image])  # uint8 [height, width, 3]
  zimg, ztxt, out = model.apply(variables, images=images, tokens=tokens)
  probabilities = jax.nn.softmax(out['t'] * zimg @ ztxt.T, axis=-1)

Shapes in the comments:
  B images or texts    N tokens    D width of a token    E width of an embedding

Parameters: the image tower, a Vision Transformer, under `img`; the text tower under
`txt`; `t` [1], the logarithm of the inverse temperature;
and `b` [1], added to the products, with `bias_init`.
"""

from collections.abc import Callable, Mapping
import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from vit_jax import console, models_vit
from vit_jax.configs import models as model_configs, schema
from vit_jax.layers import dtypes, patches, text_towers
from vit_jax.layers.dtypes import Array

BASE_PATH = 'gs://vit_models/lit'
_TINY = 1e-8  # Added to the length of an embedding that is divided by it.

# Names of the original.
BertModel = text_towers.BertModel
TextTransformer = text_towers.TextTransformer


def normalized(
  x: Float[Array, 'B E'],
) -> tuple[Float[Array, 'B E'], Float[Array, 'B 1']]:
  """Returns embeddings divided by their lengths, and these."""
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  length = jnp.linalg.norm(x, axis=1, keepdims=True)
  return x / (length + _TINY), length


class LitModel(patches.ImageModel):
  """An image tower and a text tower (arXiv 2111.07991, section 3).

  Embeddings are float32 or wider. `pp` says what the inputs are: `size`, pixels of an
  image's side; `max_len`, tokens of a text; `tokenizer_name`, see
  vit_jax.preprocess.get_tokenizer; and `vocab_path`, the file of the vocabulary, for
  others than the published models.
  """

  image: Mapping[str, Any]  # Fields of models_vit.VisionTransformer.
  text_model: str  # A key of vit_jax.layers.text_towers.TEXT_MODELS.
  text: Mapping[str, Any] | None  # Fields of that class; None: its defaults.
  pp: Mapping[str, Any]
  # Widths of the heads of the image and of the text tower, or one for both; None: none.
  out_dim: int | tuple[int | None, int | None] | None
  model_name: str | None = None  # Name of the config and of the published files.
  temperature_init: float = 1.0  # Initial value of exp(t).
  bias_init: float | None = None  # Initial value of `b`; None: there is no `b`.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @property
  def out_dims(self) -> tuple[int | None, int | None]:
    """Widths of the heads of the image and of the text tower; None for none."""
    out = self.out_dim
    image, text = out if isinstance(out, list | tuple) else (out, out)
    return image, text

  @nn.nowrap
  def image_tower(self, **kwargs: Any) -> models_vit.VisionTransformer:
    """Returns the image tower, whose parameters are under `img`."""
    types = dtypes.of(self)
    fields = {k: v for k, v in self.image.items() if k != 'kind'}
    # A head of zeros would have no direction.
    fields = {'head_init': 'lecun_normal', **fields, **types, **kwargs}
    return models_vit.VisionTransformer(**{**fields, 'num_classes': self.out_dims[0]})

  @nn.nowrap
  def text_tower(self, **kwargs: Any) -> nn.Module:
    """Returns the text tower, whose parameters are under `txt`."""
    schema.check(
      'text_model', self.text_model, model_configs.TextModel, 'config.model.'
    )
    fields = {**(self.text or {}), **dtypes.of(self), **kwargs}
    return text_towers.TEXT_MODELS[self.text_model](
      **{**fields, 'num_classes': self.out_dims[1]}
    )

  @nn.compact
  def __call__(
    self,
    *,
    images: Float[Array, 'B H W C'] | None = None,
    tokens: Int[Array, 'T N'] | None = None,
    train: bool = False,
  ) -> tuple[Float[Array, 'B E'] | None, Float[Array, 'T E'] | None, dict[str, Array]]:
    """Embeds images, texts, or both.

    Args:
      images: float [B, size, size, C] in [-1, 1], see `get_image_preprocessing`.
      tokens: int32 [B, max_len], see `get_tokenizer`.
      train: whether dropout of the image tower is on (needs the rng 'dropout').

    Returns:
      (zimg, ztxt, out): embeddings of length 1, float32 [B, E], or None for what
      is not given. `out` has the inverse temperature `t`, [1]; `b`, [1], with
      `bias_init`; and, of the inputs given, `img/norm`, `img/normalized`,
      `txt/norm`, `txt/normalized`, and what the text tower returns, such as
      `txt/pre_logits`. The logit of image i and text j is
      t * zimg[i] @ ztxt[j] (+ b).

    Raises ValueError if the inputs have wrong shapes.
    """
    zimg, ztxt, out = None, None, {}
    if tokens is not None:
      tokens = jnp.asarray(tokens)
      if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
          'tokens must be integers [texts, tokens], got '
          f'{tokens.dtype}{list(tokens.shape)}: see get_tokenizer()'
        )
      ztxt, intermediates = self.text_tower(name='txt')(tokens)
      out.update({f'txt/{name}': value for name, value in intermediates.items()})
      ztxt, out['txt/norm'] = normalized(ztxt)
      out['txt/normalized'] = ztxt
    if images is not None:
      zimg = self.image_tower(name='img')(images, train=train)
      zimg, out['img/norm'] = normalized(zimg)
      out['img/normalized'] = zimg
    log = jnp.log(self.temperature_init)
    t = self.param('t', nn.initializers.constant(log), (1,), jnp.float32)
    out['t'] = jnp.exp(t)
    if self.bias_init is not None:
      init = nn.initializers.constant(self.bias_init)
      out['b'] = self.param('b', init, (1,), jnp.float32)
    return zimg, ztxt, out

  def load_variables(
    self, path: str | None = None, cache: bool = True
  ) -> dict[str, Any]:
    """Loads the published variables: {'params': nested dict of NumPy arrays}.

    `path` is a .npz, by default `<model_name>.npz` in the current folder, else the
    published file, which `cache` keeps in the current folder. Raises what
    vit_jax.checkpoint.load raises.
    """
    from vit_jax import checkpoint
    from vit_jax.weights import fetch

    if path is None:
      local = f'{self.model_name}.npz'
      path = f'{BASE_PATH}/{local}'
      if os.path.exists(local):
        console.log(f'Reading {local} from the current folder.')
        path = local
      elif cache:
        fetch.copy(fetch.fetch(path), local, progress=False)
        path = local
    return {'params': checkpoint.load(path)}

  @property
  def vocab_path(self) -> str:
    """The file of the vocabulary: `pp.vocab_path`, or the published one.

    ValueError for a model that is neither published nor has a `pp.vocab_path`.
    """
    path = self.pp.get('vocab_path')
    ending = text_towers.TOKENIZERS[self.pp['tokenizer_name']]
    if not path and self.model_name not in model_configs.LITS:
      raise ValueError(
        'the vocabulary of this model is unknown: put the file next to its weights, '
        f'with their name and the ending .{ending} (NAME.{ending} for NAME.npz), or '
        'pass its path (config.model.pp.vocab_path)'
      )
    return path or f'{BASE_PATH}/{self.model_name}.{ending}'

  def get_pp(self, crop: bool = False) -> Callable[[dict], dict]:
    """Returns a function on dicts of tensors; see vit_jax.preprocess.get_pp."""
    from vit_jax import preprocess

    return preprocess.get_pp(
      tokenizer_name=self.pp['tokenizer_name'],
      vocab_path=self.vocab_path,
      max_len=self.pp['max_len'],
      size=self.pp['size'],
      crop=crop,
    )

  def get_tokenizer(self) -> Callable[..., Any]:
    """Returns the tokenizer: a function (texts) -> tokens, int32 [n, max_len]."""
    from vit_jax import preprocess

    make = preprocess.get_tokenizer(self.pp['tokenizer_name'])
    return make(vocab_path=self.vocab_path, max_len=self.pp['max_len'])

  def get_image_preprocessing(self, crop: bool = False) -> Callable[..., Any]:
    """Returns a function (images) -> float32 [n, size, size, C] in [-1, 1].

    Images are uint8 [height, width, C]; see vit_jax.preprocess.PreprocessImages.
    """
    from vit_jax import preprocess

    return preprocess.PreprocessImages(size=self.pp['size'], crop=crop)


def similarity(
  zimg: Float[Array, 'B E'], ztxt: Float[Array, 'T E'], out: Mapping[str, Array]
) -> Float[Array, 'B T']:
  """Returns the logits of images and texts, see LitModel."""
  logits = out['t'] * jnp.einsum(
    'ie,te->it', zimg, ztxt, precision=jax.lax.Precision.HIGHEST
  )
  return logits + out['b'] if 'b' in out else logits
