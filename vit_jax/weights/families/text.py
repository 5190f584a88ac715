"""Text towers: Hugging Face's BERT, and the sizes of both kinds of towers.

State dicts of `BertModel`, `BertForMaskedLM` and other BERTs are read without
pooler and heads, as weights of a part of a model: config.pretrained={'txt': PATH}.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from absl import logging
from etils import epath
import ml_collections
import numpy as np

from vit_jax.configs import models as model_configs, schema
from vit_jax.layers import bert, text_towers
from vit_jax.weights import descriptions
from vit_jax.weights.families import base, leaves

_BERT = 'BertEncoder_0/'
_LAYER = f'{_BERT}encoder_block/layer_sequence/layers_{{0}}/'
_EMBEDDING = f'{_BERT}embedder/embedders_{{}}_ids/embedding'
# Rows of vit_jax.weights.families.leaves.
_BLOCK = (
  ('attention_block/attention_layer/query', 'dense', 'attention.self.query'),
  ('attention_block/attention_layer/key', 'dense', 'attention.self.key'),
  ('attention_block/attention_layer/value', 'dense', 'attention.self.value'),
  ('attention_block/dense_layer', 'dense', 'attention.output.dense'),
  ('attention_block/layer_norm', 'norm', 'attention.output.LayerNorm'),
  ('mlp_block/mlp/dense_layer', 'dense', 'intermediate.dense'),
  ('mlp_block/dense_layer', 'dense', 'output.dense'),
  ('mlp_block/layer_norm', 'norm', 'output.LayerNorm'),
)
_OTHERS = (
  (_EMBEDDING.format('token'), 'table', 'embeddings.word_embeddings.weight'),
  (_EMBEDDING.format('position'), 'table', 'embeddings.position_embeddings.weight'),
  (_EMBEDDING.format('segment'), 'table', 'embeddings.token_type_embeddings.weight'),
  (f'{_BERT}layer_norm', 'norm', 'embeddings.LayerNorm'),
)
_NAMING = leaves.Naming(
  'bert',
  'BERT',
  (('', '', _OTHERS), (_LAYER, 'encoder.layer.{0}.', _BLOCK)),
  marks=(_OTHERS[2][2],),
  old_names=(
    (r'^bert\.', ''),
    (r'\.LayerNorm\.gamma$', '.LayerNorm.weight'),
    (r'\.LayerNorm\.beta$', '.LayerNorm.bias'),
  ),
  ignored=r'(pooler|cls|classifier|qa_outputs)\.',  # Text towers have no heads.
)
# Sizes of a BertEncoder.
_SIZES = (
  'width',
  'num_layers',
  'num_heads',
  'mlp_dim',
  'vocab_size',
  'num_positions',
  'num_segments',
)


def bert_fields(config: str | Mapping[str, Any]) -> dict[str, int]:
  """Returns all sizes of a BertModel's `config`."""
  sizes = text_towers.BERTS[config] if isinstance(config, str) else config
  return {name: sizes.get(name, getattr(bert.BertEncoder, name)) for name in _SIZES}


def tower_config(
  model: ml_collections.ConfigDict,
) -> tuple[ml_collections.ConfigDict, str]:
  """Returns fields and kind of an image-text model's text tower, and their key."""
  fields = model.get('text') or {}
  key = 'model.text'
  if model.text_model == 'bert':
    fields = bert_fields(fields.get('config', 'base'))
    key = 'model.text.config'
  return ml_collections.ConfigDict({'kind': model.text_model, **fields}), key


class _TextTowers(base.Family):
  """A text tower, which is a part of a model, and only read."""

  formats = ()
  groups = (model_configs.TextTower,)

  def describe(self, fields: Mapping[str, Any]) -> str:
    noun = self.noun.removeprefix('a ')
    return f'{noun} of {fields["num_layers"]} layers, width {fields["width"]}'


class Berts(_TextTowers):
  """BERT, also as a text tower of image-text models."""

  noun = 'a BERT'
  kind = 'bert'
  leaf = f'{_BERT}layer_norm/scale'
  hf_types = ('bert',)
  computes = {'num_heads': None}  # noqa: RUF012
  namings = {'bert': _NAMING}  # noqa: RUF012

  def sizes(
    self, flat: leaves.Shapes, known_fields: Mapping[str, Any]
  ) -> dict[str, Any]:
    vocab_size, width = flat[_EMBEDDING.format('token')]
    mlp = _LAYER.format(0) + 'mlp_block/mlp/dense_layer/kernel'
    return {
      'kind': 'bert',
      'width': width,
      'num_layers': leaves.count(flat, _LAYER),
      'num_heads': 1 if width % 64 else width // 64,
      'mlp_dim': flat[mlp][1],
      'vocab_size': vocab_size,
      'num_positions': flat[_EMBEDDING.format('position')][0],
      'num_segments': flat[_EMBEDDING.format('segment')][0],
      **known_fields,
    }

  def read_description(
    self,
    sibling: Callable[[str], epath.Path],
    file: epath.Path,
    flat: dict[str, np.ndarray],
    naming: str,
  ) -> descriptions.Description:
    """Warns if BERT was trained with the exact GELU."""
    return descriptions.read(sibling('config.json'), _from_config)


class TextTransformers(_TextTowers):
  """Text transformers of image-text models, such as CLIP's and SigLIP's."""

  noun = 'a text transformer'
  kind = 'text_transformer'
  leaf = 'Embed_0/embedding'
  computes = {  # noqa: RUF012
    'gelu': 'tanh',
    'norm_eps': 1e-6,
    'causal': False,
    'pool': 'last',
  }

  def sizes(
    self, flat: leaves.Shapes, known_fields: Mapping[str, Any]
  ) -> dict[str, Any]:
    rows, width = flat['Embed_0/embedding']
    block = 'Encoder_0/encoderblock_0/'
    query = flat[f'{block}MultiHeadDotProductAttention_0/query/kernel']
    return {
      'kind': 'text_transformer',
      'width': width,
      'num_layers': leaves.count(flat, 'Encoder_0/encoderblock_{0}/'),
      'mlp_dim': flat[f'{block}MlpBlock_0/Dense_0/kernel'][1],
      'num_heads': query[1],
      'vocab_size': rows,
      **known_fields,
    }


def _from_config(config: Mapping[str, Any]) -> descriptions.Description:
  descriptions.check_supported(
    config,
    model_type='bert',
    position_embedding_type='absolute',
    layer_norm_eps=bert.NORM_EPS,
  )
  gelus = Literal['gelu', 'gelu_python', 'gelu_new', 'gelu_pytorch_tanh']
  gelu = descriptions.field(config, 'hidden_act', gelus)
  if gelu in ('gelu', 'gelu_python'):
    logging.warning(
      'This BERT was trained with the exact GELU (hidden_act in config.json), '
      'and the text tower computes its tanh approximation: features differ '
      'slightly'
    )
  heads = descriptions.field(config, 'num_attention_heads', schema.Count)
  return descriptions.Description({'num_heads': heads} if heads else {})
