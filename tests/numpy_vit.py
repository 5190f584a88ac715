"""The Vision Transformer in NumPy, with explicit sums."""

import jax
import numpy as np


def norm(p, x):
  x = x - x.mean(axis=-1, keepdims=True)
  return (
    x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * p['scale'] + p['bias']
  )


def dense(p, x, axes=1):
  return np.tensordot(x, p['kernel'], axes) + p['bias']


def gelu(x):
  return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def logits(params, x, heads, added, relative=None):
  """Equations 1 to 4 of the paper, in float64, for patches of 4 x 4.

  added[i] is added to the tokens before layer i. With `relative`, the query times
  relative[i][N - 1 + q - k] is added to the score of tokens q and k.
  """
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  x = np.asarray(x, np.float64)

  def attention(p, x, table):
    q, k, v = (dense(p[name], x) for name in ('query', 'key', 'value'))
    result = np.zeros_like(q)
    for b in range(len(x)):
      for head in range(heads):
        scores = q[b, :, head] @ k[b, :, head].T
        if table is not None:
          for i, j in np.ndindex(scores.shape):
            offset = np.asarray(table, np.float64)[len(scores) - 1 + i - j]
            scores[i, j] += q[b, i, head] @ offset
        scores /= np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        result[b, :, head] = weights @ v[b, :, head]
    return dense(p['out'], result, axes=2)

  kernel = params['embedding']['kernel']
  patches = [
    np.einsum('bijc,ijcd->bd', x[:, r : r + 4, c : c + 4], kernel)
    for r in range(0, x.shape[1], 4)
    for c in range(0, x.shape[2], 4)
  ]
  z = np.stack(patches, axis=1) + params['embedding']['bias']
  z = np.concatenate([np.repeat(params['cls'], len(x), axis=0), z], axis=1)
  encoder = params['Transformer']
  for i, table in enumerate(added):
    block = encoder[f'encoderblock_{i}']
    z = z + np.asarray(table, np.float64)
    z = z + attention(
      block['MultiHeadDotProductAttention_0'],
      norm(block['LayerNorm_0'], z),
      None if relative is None else relative[i],
    )
    mlp = block['MlpBlock_0']
    y = gelu(dense(mlp['Dense_0'], norm(block['LayerNorm_1'], z)))
    z = z + dense(mlp['Dense_1'], y)
  z = norm(encoder['encoder_norm'], z)[:, 0]
  if 'pre_logits' in params:
    z = np.tanh(dense(params['pre_logits'], z))
  return dense(params['head'], z)
