"""Converts DETR's weights between this package and Hugging Face's state dicts.

Conversions only transpose and reshape: they are exact in both directions. The
statistics of the frozen batch norm are in the collection `frozen`.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class _Leaf(NamedTuple):
  """One array: collection and path here, kind of layout, name in PyTorch."""

  collection: str
  path: str
  kind: str
  name: str


def _dense(path, name):
  yield _Leaf('params', f'{path}/kernel', 'dense', f'{name}.weight')
  yield _Leaf('params', f'{path}/bias', 'same', f'{name}.bias')


def _norm(path, name):
  yield _Leaf('params', f'{path}/scale', 'same', f'{name}.weight')
  yield _Leaf('params', f'{path}/bias', 'same', f'{name}.bias')


def _attention(path, name):
  for ours, theirs in (('query', 'q'), ('key', 'k'), ('value', 'v')):
    yield _Leaf(
      'params', f'{path}/{ours}/kernel', 'heads', f'{name}.{theirs}_proj.weight'
    )
    yield _Leaf(
      'params', f'{path}/{ours}/bias', 'head_bias', f'{name}.{theirs}_proj.bias'
    )
  yield _Leaf('params', f'{path}/out/kernel', 'out', f'{name}.o_proj.weight')
  yield _Leaf('params', f'{path}/out/bias', 'same', f'{name}.o_proj.bias')


def _batch_norm(path, name):
  for ours, theirs in (
    ('scale', 'weight'),
    ('bias', 'bias'),
    ('mean', 'running_mean'),
    ('var', 'running_var'),
  ):
    yield _Leaf('frozen', f'{path}/{ours}', 'same', f'{name}.{theirs}')


def _backbone(units) -> Iterator[_Leaf]:
  path, name = 'backbone', 'model.backbone.model'
  yield _Leaf(
    'params', f'{path}/conv_root/kernel', 'conv', f'{name}.conv1.weight'
  )
  yield from _batch_norm(f'{path}/bn_root', f'{name}.bn1')
  for stage, count in enumerate(units, start=1):
    for unit in range(count):
      here = f'{path}/block{stage}/unit{unit + 1}'
      there = f'{name}.layer{stage}.{unit}'
      pairs = [(f'conv{i}', f'bn{i}', f'conv{i}', f'bn{i}') for i in (1, 2, 3)]
      if not unit:
        pairs.append(('conv_proj', 'bn_proj', 'downsample.0', 'downsample.1'))
      for conv, norm, their_conv, their_norm in pairs:
        yield _Leaf(
          'params',
          f'{here}/{conv}/kernel',
          'conv',
          f'{there}.{their_conv}.weight',
        )
        yield from _batch_norm(f'{here}/{norm}', f'{there}.{their_norm}')


def _table(units, encoder_layers, decoder_layers) -> Iterator[_Leaf]:
  """Yields all arrays of a model."""
  yield from _backbone(units)
  yield _Leaf(
    'params',
    'query_embedding',
    'same',
    'model.query_position_embeddings.weight',
  )
  yield _Leaf(
    'params', 'input_proj/kernel', 'conv', 'model.input_projection.weight'
  )
  yield _Leaf(
    'params', 'input_proj/bias', 'same', 'model.input_projection.bias'
  )
  for i in range(encoder_layers):
    here, there = f'encoder_layer_{i}', f'model.encoder.layers.{i}'
    yield from _attention(f'{here}/self_attention', f'{there}.self_attn')
    yield from _norm(f'{here}/LayerNorm_0', f'{there}.self_attn_layer_norm')
    yield from _norm(f'{here}/LayerNorm_1', f'{there}.final_layer_norm')
    for j in (0, 1):
      yield from _dense(f'{here}/Dense_{j}', f'{there}.mlp.fc{j + 1}')
  for i in range(decoder_layers):
    here, there = f'decoder_layer_{i}', f'model.decoder.layers.{i}'
    yield from _attention(f'{here}/self_attention', f'{there}.self_attn')
    yield from _attention(f'{here}/cross_attention', f'{there}.encoder_attn')
    yield from _norm(f'{here}/LayerNorm_0', f'{there}.self_attn_layer_norm')
    yield from _norm(f'{here}/LayerNorm_1', f'{there}.encoder_attn_layer_norm')
    yield from _norm(f'{here}/LayerNorm_2', f'{there}.final_layer_norm')
    for j in (0, 1):
      yield from _dense(f'{here}/Dense_{j}', f'{there}.mlp.fc{j + 1}')
  yield from _norm('decoder_norm', 'model.decoder.layernorm')
  yield from _dense('class_head', 'class_labels_classifier')
  for i in range(3):
    yield from _dense(f'box_head/Dense_{i}', f'bbox_predictor.layers.{i}')


def from_torch(
  state: Mapping[str, np.ndarray], units, encoder_layers, decoder_layers, heads
) -> dict[str, dict[str, np.ndarray]]:
  """Returns {'params': {path: array}, 'frozen': ...} of a state dict."""
  found = {'params': {}, 'frozen': {}}
  for leaf in _table(units, encoder_layers, decoder_layers):
    x = np.asarray(state[leaf.name])
    if leaf.kind == 'conv':
      x = x.transpose(2, 3, 1, 0)
    elif leaf.kind == 'dense':
      x = x.T
    elif leaf.kind == 'heads':
      x = x.T.reshape(x.shape[1], heads, -1)
    elif leaf.kind == 'head_bias':
      x = x.reshape(heads, -1)
    elif leaf.kind == 'out':
      x = x.T.reshape(heads, -1, x.shape[0])
    found[leaf.collection][leaf.path] = x
  return found
