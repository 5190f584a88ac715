"""Text towers: they map the tokens of a text to one embedding.

Shapes: B texts, N tokens, D width of a token, E width of an embedding.
"""

from collections.abc import Mapping
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float, Int

from vit_jax.configs import models as model_configs, schema
from vit_jax.distributed import sharding
from vit_jax.layers import bert, dtypes, encoder
from vit_jax.layers.dtypes import Array

# Name -> sizes of a BERT (arXiv 1810.04805, section 3).
BERTS = {
  'base': {},  # The defaults of BertEncoder.
  'large': dict(width=1024, num_layers=24, num_heads=16, mlp_dim=4096),
}
# Tokenizers (vit_jax.preprocess.get_tokenizer), and how their files end.
TOKENIZERS = {
  'bert': 'txt',
  'hf_bert': 'txt',
  'sentencepiece': 'model',
  'clip': 'json',
  'siglip': 'model',
  'siglip2': 'json',
}


class BertModel(nn.Module):
  """BERT; its first token, [CLS], is the embedding of a text."""

  config: str | Mapping[str, Any]  # A key of BERTS, or the fields of BertEncoder.
  num_classes: int | None = None  # E, the width of a linear head; None: no head.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, tokens: Int[Array, 'B N']
  ) -> tuple[Float[Array, 'B _'], dict[str, Array]]:
    """Embeds tokens, int32 [B, N], with 0 for padding.

    Returns embeddings [B, E], or [B, D] without a head, and a dict of `transformed`,
    [B, N, D], `pre_logits`, [B, D], and with a head `logits`. Raises ValueError if the
    config is unknown, or a text has too many tokens.
    """
    fields = self.config
    if isinstance(fields, str):
      schema.check('config', fields, Literal[*BERTS], 'config.model.text.')
      fields = BERTS[fields]
    types = dtypes.of(self)
    out = {}
    encode = bert.BertEncoder(name='BertEncoder_0', **{**types, **fields})
    x = out['transformed'] = encode(tokens)
    x = out['pre_logits'] = x[:, 0]
    if self.num_classes:
      x = out['logits'] = _head(self)(x)
    return x, out


class TextTransformer(nn.Module):
  """The encoder of the Vision Transformer on the tokens of a text."""

  num_classes: int | None  # E, the width of a linear head; None: no head.
  width: int = 512  # D.
  num_layers: int = 12
  mlp_dim: int = 2048
  num_heads: int = 8
  dropout_rate: float = 0.0  # Ignored: the tower has no dropout.
  vocab_size: int = 32_000
  causal: bool = False  # Whether a token attends to itself and earlier ones only.
  # Which token of a text is its embedding: the last one, or with 'eos' the first one of
  # the highest number, which CLIP puts at the end of a text.
  pool: str = 'last'
  gelu: str = 'tanh'  # See vit_jax.layers.encoder.GELUS.
  norm_eps: float = 1e-6  # Added to the variance in LayerNorm.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: Int[Array, 'B N']
  ) -> tuple[Float[Array, 'B _'], dict[str, Array]]:
    """Embeds tokens, int32 [B, N].

    Returns embeddings [B, E], or [B, D] without a head, and a dict of `embedded`, [B,
    N, D], `pre_logits`, [B, D], and with a head `logits`. Raises ValueError if the
    numbers of tokens and positions differ, or `pool` is unknown.
    """
    schema.check('pool', self.pool, model_configs.TextPool, 'config.model.text.')
    types = dtypes.of(self)
    out = {}
    tokens = x
    x = nn.Embed(self.vocab_size, self.width, **types)(tokens)  # [B, N, D]
    out['embedded'] = x
    x = x + self._positions(tokens.shape[1]).astype(x.dtype)
    config = model_configs.Transformer(
      num_layers=self.num_layers,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      dropout_rate=0.0,
      attention_dropout_rate=0.0,
      add_position_embedding=False,
      gelu=self.gelu,
      norm_eps=self.norm_eps,
      causal=self.causal,
    )
    encode = encoder.Encoder(config, **types)
    x = encode(sharding.constrain_batch(x), train=False)
    if self.pool == 'last':
      x = x[:, -1]
    else:
      x = jnp.take_along_axis(x, tokens.argmax(-1)[:, None, None], 1)[:, 0]
    out['pre_logits'] = x  # [B, D]
    if self.num_classes:
      x = out['logits'] = _head(self)(x)
    return x, out

  def _positions(self, tokens: int) -> Float[Array, '1 {tokens} D']:
    """Returns position embeddings for a number of tokens."""
    name = 'pos_embedding'
    stored = self.get_variable('params', name)
    num_positions = tokens if stored is None else stored.shape[1]
    # The embedding of a text without its last tokens is defined only where the
    # tokens after its end change nothing.
    if tokens > num_positions or (tokens < num_positions and not self.causal):
      raise ValueError(
        f'tokens has {tokens} tokens per text, but the model has {num_positions} positions: '
        'make texts of that length (max_len of the tokenizer, '
        'config.model.pp.max_len)'
      )
    init = nn.initializers.normal(self.width**-0.5)
    table = self.param(name, init, (1, num_positions, self.width), self.param_dtype)
    return table[:, :tokens]


def _head(module: BertModel | TextTransformer) -> nn.Dense:
  """Returns the linear head of a text tower; its results are float32 or wider."""
  types = dtypes.of(module)
  types['dtype'] = jnp.promote_types(types['dtype'], jnp.float32)
  return nn.Dense(module.num_classes, name='head', **types)


def vocab_size(params: Mapping[str, Any]) -> int:
  """Returns the number of tokens that a text tower of these parameters has."""
  if 'Embed_0' in params:
    return params['Embed_0']['embedding'].shape[0]
  tables = params['BertEncoder_0']['embedder']
  return tables['embedders_token_ids']['embedding'].shape[0]


# Text towers by the name that configs give (config.model.text_model).
TEXT_MODELS = {'bert': BertModel, 'text_transformer': TextTransformer}
