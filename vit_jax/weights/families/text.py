"""Text towers: Hugging Face's BERT, and the sizes of both kinds of towers.

The state dicts are those of `BertModel`, `BertForMaskedLM` and others of BERT,
whose pooler and heads are left out. They are weights of a part of a model,
config.pretrained={'txt': PATH}, and no model of their own.
"""

from collections.abc import Mapping
import types
from typing import Any

from absl import logging
import ml_collections

from vit_jax.layers import bert, text_towers
from vit_jax.weights import descriptions
from vit_jax.weights.families import base, leaves

_BERT = 'BertEncoder_0/'
_OLD_NAMES = (
  (r'^bert\.', ''),
  (r'\.LayerNorm\.gamma$', '.LayerNorm.weight'),
  (r'\.LayerNorm\.beta$', '.LayerNorm.bias'),
)
_EMBEDDINGS = {
  'token': 'embeddings.word_embeddings.weight',
  'position': 'embeddings.position_embeddings.weight',
  'segment': 'embeddings.token_type_embeddings.weight',
}
# Rows of vit_jax.weights.families.leaves, of a block.
_BLOCK = (
  *(
    (f'attention_block/attention_layer/{name}', 'dense', f'attention.self.{name}')
    for name in ('query', 'key', 'value')
  ),
  ('attention_block/dense_layer', 'dense', 'attention.output.dense'),
  ('attention_block/layer_norm', 'norm', 'attention.output.LayerNorm'),
  ('mlp_block/mlp/dense_layer', 'dense', 'intermediate.dense'),
  ('mlp_block/dense_layer', 'dense', 'output.dense'),
  ('mlp_block/layer_norm', 'norm', 'output.LayerNorm'),
)  # fmt: skip
# Beginnings of the names of what no text tower has.
_HEADS = ('pooler.', 'cls.', 'classifier.', 'qa_outputs.')
_GELUS = ('gelu', 'gelu_python', 'gelu_new', 'gelu_pytorch_tanh')
# Sizes of a BertEncoder.
BERT_FIELDS = (
  'width', 'num_layers', 'num_heads', 'mlp_dim', 'vocab_size', 'num_positions',
  'num_segments',
)  # fmt: skip


def bert_fields(config: str | Mapping[str, Any]) -> dict[str, int]:
  """Returns all sizes of a BertModel's `config`."""
  given = text_towers.BERTS[config] if isinstance(config, str) else config
  return {
    name: given.get(name, getattr(bert.BertEncoder, name)) for name in BERT_FIELDS
  }


def config_of(model) -> ml_collections.ConfigDict:
  """Returns the fields of an image-text model's text tower, and its kind."""
  fields = model.get('text') or {}
  if model.text_model == 'bert':
    fields = bert_fields(fields.get('config', 'base'))
  return ml_collections.ConfigDict({'kind': model.text_model, **fields})


def place_of(model) -> str:
  """Returns the dotted key of the fields of `config_of`."""
  return 'model.text.config' if model.text_model == 'bert' else 'model.text'


class _TextTowers(base.Family):
  """A text tower alone, which is a part of a model, and only read."""

  formats = ()
  computes: Mapping[str, Any] = types.MappingProxyType({})

  def _no_model(self, *_):
    raise ValueError(
      f'{self.words} alone is no model: name it as the text tower of one, '
      "config.pretrained={'txt': PATH}"
    )

  def detect(self, names):
    del names

  load = dump = read_beside = files = _no_model


class Berts(_TextTowers):
  """BERT."""

  words = 'a BERT'
  kind = 'bert'
  leaf = f'{_BERT}layer_norm/scale'
  hf_types = ('bert',)
  computes = types.MappingProxyType({'num_heads': None})

  def detect(self, names):
    names = {leaves.renamed(name, _OLD_NAMES) for name in names}
    return 'bert' if names.issuperset(_EMBEDDINGS.values()) else None

  def load(self, flat, naming, num_heads):
    leaves.rename(flat, _OLD_NAMES)
    heads = [name for name in flat if name.startswith(_HEADS)]
    if heads:
      logging.warning(
        'These parameters of BERT are left out, since a text tower has none: '
        f'{", ".join(sorted(heads))}'
      )
    for name in heads:
      del flat[name]
    return leaves.load(flat, _bert_table(flat), None, 'BERT')

  def sizes(self, flat, told):
    start = f'{_BERT}encoder_block/layer_sequence/'
    rows = {
      name: flat[f'{_BERT}embedder/embedders_{name}_ids/embedding']
      for name in _EMBEDDINGS
    }
    width = rows['token'][1]
    fields = {
      'kind': 'bert',
      'width': width,
      'num_layers': leaves.count(flat, rf'{start}layers_(\d+)/'),
      'num_heads': 1 if width % 64 else width // 64,
      'mlp_dim': flat[f'{start}layers_0/mlp_block/mlp/dense_layer/kernel'][1],
      'vocab_size': rows['token'][0],
      'num_positions': rows['position'][0],
      'num_segments': rows['segment'][0],
    }
    return {**fields, **told}

  def describe(self, fields):
    return f'BERT of {fields["num_layers"]} layers, width {fields["width"]}'

  def read_beside(self, beside, file, flat, naming):
    """Notes that BERT was trained with the exact GELU, if config.json says so."""
    return descriptions.read(beside('config.json'), _from_config)


class TextTransformers(_TextTowers):
  """The encoder of the Vision Transformer on tokens of a text."""

  words = 'a text transformer'
  kind = 'text_transformer'
  leaf = 'Embed_0/embedding'
  computes = types.MappingProxyType(
    {'gelu': 'tanh', 'norm_eps': 1e-6, 'causal': False, 'pool': 'last'}
  )

  def sizes(self, flat, told):
    rows, width = flat['Embed_0/embedding']
    num_layers = leaves.count(flat, r'Encoder_0/encoderblock_(\d+)/')
    block = 'Encoder_0/encoderblock_0/'
    query = flat[f'{block}MultiHeadDotProductAttention_0/query/kernel']
    return {
      'kind': 'text_transformer',
      'width': width,
      'num_layers': num_layers,
      'mlp_dim': flat[f'{block}MlpBlock_0/Dense_0/kernel'][1],
      'num_heads': query[1],
      'vocab_size': rows,
      **told,
    }

  def describe(self, fields):
    return f'text transformer of {fields["num_layers"]} layers, width {fields["width"]}'


def _bert_table(names):
  for ours, theirs in _EMBEDDINGS.items():
    path = f'{_BERT}embedder/embedders_{ours}_ids/embedding'
    yield path, 'table', theirs
  norm = (('layer_norm', 'norm', 'embeddings.LayerNorm'),)
  yield from leaves.layers(norm, here=_BERT)
  for i in range(leaves.count(names, r'encoder\.layer\.(\d+)\.')):
    here = f'{_BERT}encoder_block/layer_sequence/layers_{i}/'
    yield from leaves.layers(_BLOCK, here=here, there=f'encoder.layer.{i}.')


def _from_config(config):
  descriptions.only(
    config,
    'BERTs',
    model_type='bert',
    position_embedding_type='absolute',
    layer_norm_eps=bert.NORM_EPS,
  )
  field = descriptions.field
  gelu = field(config, 'hidden_act', descriptions.one_of(_GELUS))
  if gelu in ('gelu', 'gelu_python'):
    logging.warning(
      'This BERT was trained with the exact GELU (hidden_act in config.json), '
      'and the text tower computes its tanh approximation: features differ a '
      'little'
    )
  heads = field(config, 'num_attention_heads', descriptions.COUNT)
  return descriptions.Description({'num_heads': heads} if heads else {})
