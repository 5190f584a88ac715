"""Computes attention maps, filters and other insides of Vision Transformers.

Source: arXiv 2010.11929, section 4.5, D.4, D.7 and D.8. Shapes: B images, L layers, K
heads, h x w patches, N tokens (the patches, after the class token if there is one).
"""

from collections.abc import Sequence
import functools
import re
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import models_vit


class Attention(NamedTuple):
  """Attention weights and outputs of a model for a batch of images."""

  # L arrays float32 [B, K, N, N]; the row of each query sums to 1.
  weights: list[np.ndarray]
  outputs: np.ndarray  # The model's, float32; [B, classes] for a classifier.
  grid: tuple[int, int]  # Number of patches (down, across), (h, w).
  num_prefix_tokens: int  # Before the patches: class token, registers, ...
  # How much the classifier reads each token, float32 [B or 1, N], sums to 1; see
  # `readout`. None if no map needs it.
  readout: np.ndarray | None


def attention(
  model: models_vit.VisionTransformer, params: Any, images: Any
) -> Attention:
  """Computes the attention weights and the outputs of a model.

  The weights do not depend on the model's implementation of attention. Only `embed`,
  `encode` and `classify` are called, so a model of masked patches masks nothing.
  Images are float [B, H, W, C] in [-1, 1]. Raises ValueError if the model has no
  attention, or its encoder does not sow the weights.
  """
  grid = patch_grid(model, params, images)
  compute = jax.jit(functools.partial(forward, model))
  weights, outputs = jax.device_get(compute(params, images))
  return make_attention(model, weights, outputs, grid)


def make_attention(
  model: Any, weights: list[np.ndarray], outputs: Any, grid: tuple[int, int]
) -> Attention:
  """Returns the Attention of a model's weights and outputs, as `forward` returns them."""
  layers, pooling = split_pooling(model, weights)
  tokens = layers[0].shape[-1]
  num_prefix_tokens = tokens - grid[0] * grid[1]
  pooling = None if pooling is None else pooling.mean(axis=1)
  return Attention(
    layers,
    outputs,
    grid,
    num_prefix_tokens,
    readout(model, tokens, num_prefix_tokens, pooling),
  )


def split_pooling(model: Any, weights: list[Any]) -> tuple[list[Any], Any]:
  """Returns the weights of the layers, and of attention pooling or None."""
  return (weights[:-1], weights[-1]) if has_pooling(model) else (weights, None)


def has_pooling(model: Any) -> bool:
  """Returns whether the classifier reads the tokens by attention pooling."""
  return model.classifier in ('map', 'token_map')


def readout(
  model: Any, tokens: int, num_prefix_tokens: int, pooling: Any = None
) -> Any:
  """Returns how much the classifier reads each of N tokens, float32 [B or 1, N].

  The class token, the mean of class and distillation token, the mean of the patches, the
  mean of class token and patches, or what attention pooling attends to: `pooling`,
  [B, 1, n], the weights of the last n tokens.
  """
  if pooling is not None:
    last = np.eye(tokens, dtype=np.float32)[tokens - pooling.shape[-1] :]
    return pooling[:, 0] @ last
  first = np.zeros((1, tokens), np.float32)
  first[:, : 1 + model.distilled] = 1 / (1 + model.distilled)
  patches = np.zeros((1, tokens), np.float32)
  patches[:, num_prefix_tokens:] = 1 / (tokens - num_prefix_tokens)
  if model.classifier == 'token_with_gap':
    return (first + patches) / 2
  return first if model.classifier in ('token', 'token_unpooled') else patches


def lacks(model: Any) -> str | None:
  """Returns why a model has no attention weights, in words; None if it has."""
  if isinstance(model, models_vit.VisionTransformer) and model.transformer is not None:
    if getattr(model, 'num_queries', 0):
      return (
        f'model={type(model).__name__} has queries among its tokens, and these figures '
        'show pairs of patches only: draw others (--figures)'
      )
    if model.transformer.get('attention_pattern') != 'axial':
      return None
    return (
      "attention_pattern='axial' has attention weights of rows and columns, not of all "
      "pairs of patches: use 'global' or 'local' (config.model.transformer)"
    )
  return (
    f'model={type(model).__name__} has no attention weights to show: use a '
    'VisionTransformer without transformer=None (config.model)'
  )


def patch_grid(model: Any, params: Any, images: Any) -> tuple[int, int]:
  """Returns the number of patches (down, across); ValueError without attention."""
  reason = lacks(model)
  if reason is not None:
    raise ValueError(reason)
  return embedding_grid(model, params, images)


def embedding_grid(model: Any, params: Any, images: Any) -> tuple[int, int]:
  """Returns the number of patches (down, across) of a Vision Transformer."""
  embed = functools.partial(model.apply, method='embed', flat=False)
  tokens = jax.eval_shape(embed, {'params': params}, images)  # [B, h, w, D]
  return tokens.shape[1:3]


def forward(model: Any, params: Any, images: Any) -> tuple[list[jax.Array], jax.Array]:
  """Computes `attention` without the grid, for `jax.jit`.

  Returns the weights of all layers and then of attention pooling, [B, K, 1, n], if the
  model has it, and the outputs.
  """

  def compute(model: Any, images: Any) -> jax.Array:
    tokens = model.embed(images, flat=not model.needs_grid)
    encoded = model.encode(tokens, train=False)
    return model.classify(encoded, train=False)

  outputs, seen = model.apply(
    {'params': params}, images, method=compute, mutable='intermediates'
  )
  flat = flax.traverse_util.flatten_dict(seen.get('intermediates', {}), sep='/')
  paths = [path for path in flat if path.endswith('/attention_weights')]
  # A layer that is called several times has sown one array per call.
  paths.sort(key=path_key)
  weights = []
  for path in paths:
    weights += flat[path]
  if not weights:
    raise ValueError(
      f'encoder={getattr(model.encoder, "__name__", model.encoder)} sows no '
      'attention_weights: use at least one layer with '
      'vit_jax.layers.attention.MultiHeadDotProductAttention (config.model.transformer)'
    )
  return [w.astype(jnp.float32) for w in weights], outputs.astype(jnp.float32)


def path_key(path: str) -> tuple[bool, list[int | str]]:
  """Returns a sort key for paths of attention weights: by layer, the pooling last.

  Numbers are compared by value: encoderblock_10 comes after encoderblock_2.
  """
  pieces = [int(x) if x.isdigit() else x for x in re.split(r'(\d+)', path)]
  return path.startswith('MAPHead'), pieces


def mean_distances(
  layers: Sequence[np.ndarray], grid: tuple[int, int], patch: tuple[float, float]
) -> np.ndarray:
  """Computes the mean attention distance of each head (D.7, figure 11).

  Averages the distance between the centres of a query's patch and a key's patch: over
  the keys, weighted by attention, then over queries and images. The class token counts
  neither as query nor as key. Uniform attention over 14 x 14 patches of 16 pixels gives
  116.49. A query that attends to no patch gives 0. Takes the weights of each layer,
  [B, K, N, N], the grid, and the (height, width) of a patch in pixels; returns pixels,
  float32 [L, K].
  """
  rows, columns = np.indices(grid).reshape(2, -1)  # [h*w]
  down = (rows[:, None] - rows) * patch[0]
  across = (columns[:, None] - columns) * patch[1]
  lengths = np.hypot(down, across).astype(np.float32)  # [h*w, h*w]
  means = []
  for weights in layers:
    patches = weights[..., -len(lengths) :, -len(lengths) :]
    weighted = (patches * lengths).sum(axis=-1)  # [B, K, h*w]
    totals = patches.sum(axis=-1)
    distances = weighted / np.where(totals == 0, 1, totals)
    means.append(distances.mean(axis=(0, 2)))  # [K]
  return np.stack(means)


def maps(attention: Attention) -> np.ndarray:
  """Computes the maps of each layer, mean over the heads, float32 [L, B, h, w].

  The query is what the classifier reads: the class token, the mean over all patches, or
  their mean in attention pooling.
  """
  means = np.stack([np.mean(w, axis=1) for w in attention.weights])
  return on_grid(means, attention)


def token_maps(attention: Attention) -> np.ndarray:
  """Computes what the tokens before the patches attend to in the last layer.

  These are class token, distillation token and registers ("Vision Transformers Need
  Registers", arXiv 2309.16588, figure 9). Returns the mean over the heads, float32
  [tokens, B, h, w].
  """
  count = attention.num_prefix_tokens
  last = np.mean(attention.weights[-1], axis=1)  # [B, N, N]
  maps = last[:, :count, count:].swapaxes(0, 1)
  return maps.reshape(count, len(last), *attention.grid)


def rollout(weights: list[np.ndarray]) -> np.ndarray:
  """Computes attention rollout (Abnar and Zuidema, arXiv 2005.00928; D.8).

  Estimates how much each token of the first layer contributes to each token of the
  last: averages the heads of each layer, adds the identity for the residual connection,
  divides rows by their sums, and multiplies the layers. Takes L arrays [B, K, N, N];
  returns float32 [B, N, N], in which the row of each token of the last layer sums to 1.
  """
  identity = np.eye(weights[0].shape[-1], dtype=np.float32)
  result = identity
  for layer in weights:
    mixed = np.mean(layer, axis=1) + identity  # [B, N, N]
    result = mixed / mixed.sum(axis=-1, keepdims=True) @ result
  return result


def rollout_maps(attention: Attention) -> np.ndarray:
  """Computes maps of `rollout` (figure 6), float32 [B, h, w]; queries as in `maps`."""
  return on_grid(rollout(attention.weights), attention)


def on_grid(mixed: Any, attention: Attention) -> Any:
  """Turns matrices [..., B, N, N] into maps [..., B, h, w] of what the classifier reads."""
  assert attention.readout is not None
  row = (attention.readout[:, None] @ mixed)[..., 0, :]  # [..., B, N]
  patches = row[..., attention.num_prefix_tokens :]
  return patches.reshape(*row.shape[:-1], *attention.grid)


def principal_filters(kernel: Any, count: int = 28) -> tuple[np.ndarray, np.ndarray]:
  """Computes at most `count` principal components of D filters [p, q, C, D].

  Returns the components, float32 [count, p, q, C], of norm 1 and with the largest
  magnitude positive; and the fraction of the variance that each explains.
  """
  kernel = np.asarray(kernel, np.float64)
  filters = kernel.reshape(-1, kernel.shape[-1]).T  # [D, p*q*C]
  filters = filters - filters.mean(axis=0)
  components, explained = _principal(filters, min(count, *filters.shape))
  components = components.reshape(-1, *kernel.shape[:-1])  # [count, p, q, C]
  return components.astype(np.float32), explained.astype(np.float32)


def _principal(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns components [count, D] of centred rows [n, D], and explained variances."""
  variances, vectors = np.linalg.eigh(rows.T @ rows)  # Ascending.
  components = vectors.T[::-1][:count]
  largest = np.abs(components).argmax(axis=1)
  signs = np.sign(components[np.arange(count), largest])
  explained = variances[::-1][:count] / max(variances.sum(), 1e-30)  # [count]
  return components * signs[:, None], explained


def patch_colours(tokens: Any, foreground: str = '') -> tuple[np.ndarray, np.ndarray]:
  """Computes the first three principal components of patches as colours.

  As in DINOv2 (arXiv 2304.07193, figure 1): one PCA over the patches of all images,
  whose components are each scaled to [0, 1] and shown as red, green and blue.
  With `foreground`, 'positive' or 'negative', patches whose first component has the
  other sign are black, and a second PCA is of the rest. Signs are as in
  `principal_filters`, so which of them is the foreground depends on the images.

  Takes the tokens of patches, float [B, h, w, D] with D of at least 3. Returns float32
  [B, h, w, 3] and the fraction of the variance that each component explains, float32 [3].
  """
  tokens = np.asarray(tokens, np.float32)
  rows = tokens.reshape(-1, tokens.shape[-1])
  rows = rows - rows.mean(axis=0, dtype=np.float64).astype(np.float32)
  mask = np.ones(len(rows), bool)
  if foreground:
    first = rows @ _principal(rows, 1)[0][0]
    mask = first >= 0 if foreground == 'positive' else first <= 0
    rows = rows[mask] - rows[mask].mean(axis=0)
  components, explained = _principal(rows, 3)
  values = rows @ components.T
  low = values.min(axis=0)
  spread = np.ptp(values, axis=0)
  colours = np.zeros((len(mask), 3), np.float32)
  colours[mask] = (values - low) / np.where(spread > 0, spread, 1)
  return colours.reshape(*tokens.shape[:-1], 3), explained.astype(np.float32)


def position_similarity(embeddings: Any, grid: tuple[int, int]) -> np.ndarray:
  """Computes the cosine similarity of the position embeddings of patches.

  Takes [N, D] or [1, N, D], whose tokens before the patches are ignored. Returns
  float32 [h, w, h, w]; [i, j] compares the patch in row i, column j with all.
  """
  count = grid[0] * grid[1]
  table = np.asarray(embeddings, np.float64)
  table = table.reshape(-1, table.shape[-1])
  table = table[-count:]  # [h*w, D]
  norms = np.linalg.norm(table, axis=1, keepdims=True)
  table = table / np.maximum(norms, np.finfo(np.float64).tiny)
  return (table @ table.T).reshape(*grid, *grid).astype(np.float32)
