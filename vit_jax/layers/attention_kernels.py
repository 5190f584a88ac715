"""Implementations of attention on queries, keys and values.

vit_jax.layers.attention lists what each of them supports and selects one. All map
queries [B, Q, K, E], keys and values [B, S, K, E], and Options to [B, Q, K, E].

Shapes: B images, Q queries, S keys and values, K heads, E width of a head.
"""

from collections.abc import Callable
import functools
import typing
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from vit_jax.configs import models as model_configs
from vit_jax.distributed import sharding
from vit_jax.layers import dtypes, xla_hints
from vit_jax.layers.dtypes import Array

Dtype: TypeAlias = jax.typing.DTypeLike
Queries: TypeAlias = Float[Array, 'B Q K E']
Keys: TypeAlias = Float[Array, 'B S K E']
Logits: TypeAlias = Float[Array, 'B K Q S']
Bias: TypeAlias = Float[Array, '#B K Q S']
# True where a query may attend to a key.
Mask: TypeAlias = Bool[Array, '#B #K #Q #S']

# Most tokens of vit_jax.layers.fused_attention, which has never run on a TPU: 'auto' does
# not choose it. Of more tokens, flash attention is JAX's, which others train with.
FEW_TOKENS = 640
# Blocks of the TPU's flash attention are multiples of this number of tokens.
_LANES = 128
# Most tokens in a block: the vector memory of a TPU v3 core has no room for more in
# float32, nor that of a v5e.
_MOST_IN_BLOCK = 896
# Kernels of these devices cannot multiply numbers of 16 bits.
_WITHOUT_BFLOAT16 = ('TPU v2', 'TPU v3')
# Least number of queries in a block of causal attention, and most blocks.
CAUSAL_BLOCK = 256
CAUSAL_BLOCKS = 4
# Number of keys from which on products on CPUs have heads before tokens.
_KEYS_FOR_HEADS_FIRST = 32


class Options(NamedTuple):
  """Which keys a query attends to, and what becomes of the logits."""

  mask: Mask | None = None  # None: all keys.
  causal: bool = False  # Whether query i attends to keys 0 to i only.
  length: int | None = None  # Number of keys before the padding; None: no padding.
  # Embeddings of offsets or biases, see `relative_logits`.
  relative: Float[Array, '...'] | None = None
  scale: float = 1.0  # Multiplies queries.


Implementation: TypeAlias = Callable[[Queries, Keys, Keys, Options], Queries]
_NO_OPTIONS = Options()


def _softmax(logits: Logits, dtype: Dtype) -> Logits:
  """Softmax over the last axis, computed in float32, returned as `dtype`."""
  wide = jnp.promote_types(logits.dtype, jnp.float32)
  return jax.nn.softmax(logits.astype(wide), axis=-1).astype(dtype)


def _heads_first(key: Keys) -> bool:
  """Returns whether operands of products are transposed to have heads before tokens.

  XLA's CPU programs for attention are up to four times as fast for this order. A
  symbolic number of keys, as in exports for any size of images, counts as large.
  """
  if dtypes.platform() != 'cpu':
    return False
  keys = key.shape[1]
  is_large = not isinstance(keys, int) or keys >= _KEYS_FOR_HEADS_FIRST
  return is_large or xla_hints.is_16_bit_on_cpu(key)


def _dot_keys(query: Queries, key: Keys) -> Logits:
  """Returns logits in the type of the queries, which halves their memory in 16 bits."""
  if not _heads_first(key):
    return jnp.einsum('bqke,bske->bkqs', query, key)
  query = query.swapaxes(1, 2)  # [B, K, Q, E]
  key = key.swapaxes(1, 2)  # [B, K, S, E]
  return xla_hints.einsum('bkqe,bkse->bkqs', query, key).astype(query.dtype)


def dot_values(weights: Logits, value: Keys) -> Queries:
  """Returns sums of values, weighted by `weights`, both of the same type."""
  if not _heads_first(value):
    return jnp.einsum('bkqs,bske->bqke', weights, value)
  value = value.swapaxes(1, 2)  # [B, K, S, E]
  if xla_hints.is_16_bit_on_cpu(value):
    out = xla_hints.einsum('bkqs,bkse->bkqe', weights, value).astype(value.dtype)
  else:
    out = jnp.matmul(weights, value)  # An einsum would swap the operands.
  return out.swapaxes(1, 2)


@jax.custom_jvp
def average(logits: Logits, value: Keys) -> Queries:
  """Averages values, weighted by the softmax of logits.

  The tangent is written so that the backward pass does not sum over the
  gradient of the weights, the largest array of a layer. The sum over S of
  weight times gradient equals the sum over E of output times its gradient (as
  in FlashAttention, arXiv 2205.14135, appendix B.2). The backward pass then
  writes the gradient of the logits once, where the gradient of JAX's softmax
  also writes and reads the gradient of the weights.

  Maps logits [B, K, Q, S] and values [B, S, K, E] to [B, Q, K, E].
  """
  return dot_values(_softmax(logits, value.dtype), value)


@average.defjvp
def _average_jvp(
  primals: tuple[Logits, Keys], tangents: tuple[Logits, Keys]
) -> tuple[Queries, Queries]:
  logits, value = primals
  logits_dot, value_dot = tangents
  weights = _softmax(logits, value.dtype)
  out = dot_values(weights, value)
  # softmax(logits)' = weights * (logits' - sum(weights * logits')).
  wide = jnp.promote_types(logits.dtype, jnp.float32)
  first = _softmax(logits, wide) * logits_dot.astype(wide)
  mean = first.sum(axis=-1).swapaxes(1, 2)[..., None]  # [B, Q, K, 1]
  dot = (
    dot_values(weights, value_dot)
    + dot_values(first.astype(value.dtype), value)
    - (mean * out.astype(wide)).astype(value.dtype)
  )
  return out, dot


def relative_logits(query: Queries, embedding: Float[Array, '...'], keys: int) -> Bias:
  """Multiplies queries with embeddings of offsets between positions (T8).

  Maps the queries [B, Q, K, E] of the first Q of N tokens to logits [B, K, Q,
  S] for the first `keys`, S, of them. `embedding`, [2N - 1, E], has the offsets
  1 - N to N - 1 between the positions of query and key; or it has the logits of all
  queries and keys, [K, N, N].
  """
  embedding = embedding.astype(query.dtype)
  if embedding.ndim == 3:
    return embedding[None, :, : query.shape[1], :keys]
  offsets = np.arange(query.shape[1])[:, None] - np.arange(keys)  # [Q, S]
  pairs = embedding[offsets + len(embedding) // 2]  # [Q, S, E]
  return jnp.einsum('bqke,qse->bkqs', query, pairs)


def _mask(options: Options, keys: int) -> Mask | None:
  """Returns the mask, which hides the padding too, or None."""
  if options.length is None:
    return options.mask
  is_token = (jnp.arange(keys) < options.length)[None, None, None]  # [1, 1, 1, S]
  return is_token if options.mask is None else options.mask & is_token


def _causal_mask(queries: int, keys: int) -> Bool[Array, '1 1 Q S']:
  """Returns the mask of causal attention."""
  return jnp.tri(queries, keys, dtype=bool)[None, None]


def _allowed(mask: Mask | None, causal: bool, queries: int, keys: int) -> Mask | None:
  """Combines mask and causality into one mask, or None."""
  if not causal:
    return mask
  causal_mask = _causal_mask(queries, keys)
  return causal_mask if mask is None else mask & causal_mask


def _logits(
  query: Queries,
  key: Keys,
  allowed: Bool[Array, '...'] | None = None,
  bias: Bias | None = None,
) -> Logits:
  """Returns logits, low where not allowed, so that weights are 0.

  The logits keep the type of the queries: bfloat16 halves the memory traffic of
  the layer's largest array. The lowest finite number keeps the softmax of a fully
  masked row finite.
  """
  logits = _dot_keys(query, key)
  logits = logits if bias is None else logits + bias
  if allowed is None:
    return logits
  return jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)


def _scaled(query: Queries, options: Options) -> Queries:
  return query if options.scale == 1.0 else query * options.scale


def _bias(query: Queries, options: Options, keys: int) -> Bias | None:
  """Returns what is added to the logits of scaled queries, or None."""
  if options.relative is None:
    return None
  return relative_logits(query, options.relative, keys)


def attention_weights(
  query: Queries, key: Keys, options: Options = _NO_OPTIONS
) -> Logits:
  """Returns the attention weights, float32 or wider, [B, K, Q, S]."""
  queries, keys = query.shape[1], key.shape[1]
  query = _scaled(query, options)
  mask = _mask(options, keys)
  allowed = _allowed(mask, options.causal, queries, keys)
  logits = _logits(query, key, allowed, _bias(query, options, keys))
  weights = _softmax(logits, jnp.promote_types(logits.dtype, jnp.float32))
  if mask is None or allowed is None:
    return weights
  return jnp.where(allowed.any(axis=-1, keepdims=True), weights, 0.0)


def _zero_masked(out: Queries, mask: Mask, causal: bool, keys: int) -> Queries:
  """Sets the outputs [B, Q, K, E] of queries without an allowed key to 0."""
  allowed = mask & _causal_mask(out.shape[1], keys) if causal else mask
  has_key = allowed.any(axis=-1).swapaxes(1, 2)[..., None]  # [B, Q, K, 1]
  return jnp.where(has_key, out, jnp.zeros_like(out))


def _default(
  query: Queries, key: Keys, value: Keys, options: Options = _NO_OPTIONS
) -> Queries:
  """Computes attention with matrix products."""
  queries, keys = query.shape[1], key.shape[1]
  query = _scaled(query, options)
  mask = _mask(options, keys)
  bias = _bias(query, options, keys)
  if options.causal and mask is None and bias is None:
    return _causal(query, key, value)
  allowed = _allowed(mask, options.causal, queries, keys)
  out = average(_logits(query, key, allowed, bias), value)
  return out if mask is None else _zero_masked(out, mask, options.causal, keys)


def _causal(query: Queries, key: Keys, value: Keys) -> Queries:
  """Computes causal attention in blocks of queries.

  The keys after the last query of a block are left out, which saves up to three
  eighths of the matrix products and of the memory for logits.
  """
  tokens = query.shape[1]
  size = max(CAUSAL_BLOCK, -(-tokens // CAUSAL_BLOCKS))
  blocks = []
  for start in range(0, tokens, size):
    stop = min(start + size, tokens)
    past = jnp.tri(stop - start, stop, start, dtype=bool)
    logits = _logits(query[:, start:stop], key[:, :stop], past)
    blocks.append(average(logits, value[:, :stop]))
  return jnp.concatenate(blocks, axis=1)


def _xla(
  query: Queries, key: Keys, value: Keys, options: Options = _NO_OPTIONS
) -> Queries:
  """Computes attention with jax.nn, compiled by XLA."""
  keys = key.shape[1]
  query = _scaled(query, options)
  mask = _mask(options, keys)
  out = jax.nn.dot_product_attention(
    query,
    key,
    value,
    _bias(query, options, keys),
    mask,
    scale=1.0,
    is_causal=options.causal,
    implementation='xla',
  )
  return out if mask is None else _zero_masked(out, mask, options.causal, keys)


def _cudnn(
  query: Queries, key: Keys, value: Keys, options: Options = _NO_OPTIONS
) -> Queries:
  """Computes attention with jax.nn and cuDNN, without relative positions.

  cuDNN multiplies the logits by the scale, which saves a pass over the queries. For
  gradients jax 0.10 supports only even numbers of tokens: an odd number is padded with
  one token, which is masked out. cuDNN turns the mask into a bias, which would overflow
  in the backward pass of a query without an allowed key: such a query is here allowed
  all keys, and its output is set to 0.
  """
  queries, keys = query.shape[1], key.shape[1]
  compute = functools.partial(
    jax.nn.dot_product_attention,
    _even(query),
    _even(key),
    _even(value),
    scale=options.scale,
    is_causal=options.causal,
    implementation='cudnn',
  )
  mask = _mask(options, keys)
  if options.mask is None or mask is None:
    lengths = None
    if (keys % 2 or options.length) and not options.causal:
      lengths = jnp.full(key.shape[0], options.length or keys, jnp.int32)
    return compute(key_value_seq_lengths=lengths)[:, :queries]
  allowed = mask & _causal_mask(queries, keys) if options.causal else mask
  allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], queries, keys))
  padding = ((0, 0), (0, 0), (0, queries % 2), (0, keys % 2))
  allowed = jnp.pad(allowed, padding)
  out = compute(mask=allowed | ~allowed.any(axis=-1, keepdims=True))[:, :queries]
  return _zero_masked(out, mask, options.causal, keys)


def _even(x: Float[Array, 'B N K E']) -> Float[Array, 'B even K E']:
  """Adds a token if their number N is odd."""
  return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))


def _flash(
  query: Queries, key: Keys, value: Keys, options: Options = _NO_OPTIONS
) -> Queries:
  """Computes flash attention on each device's own images, heads and queries.

  It takes neither mask nor relative positions, see `check`. The compiler cannot split
  the kernel over devices, so shard_map does, which needs queries that the axis
  `sequence` divides. A single query, as in the last layer, uses the default, since the
  kernel works on whole blocks of queries; so do images that the mesh cannot split.
  """
  mesh = jax.sharding.get_abstract_mesh()
  is_divisible = mesh.empty or len(query) % sharding.batch_shards(mesh) == 0
  if query.shape[1] == 1 or not is_divisible:
    return _default(query, key, value, options)
  query = _scaled(query, options)
  compute = functools.partial(_flash_on_one_device, causal=options.causal)
  if mesh.empty:
    return compute(query, key, value)
  head_shards = mesh.shape.get(sharding.MODEL_AXIS, 1)
  is_split = head_shards > 1 and query.shape[2] % head_shards == 0
  heads = sharding.MODEL_AXIS if is_split else None
  whole_spec = jax.P(sharding.batch_axes(mesh), None, heads)
  query_spec = whole_spec
  queries = query.shape[1]
  query_shards = sharding.sequence_shards()
  if query_shards > 1:
    query_spec = jax.P(sharding.batch_axes(mesh), sharding.SEQUENCE_AXIS, heads)
    query = jnp.pad(query, ((0, 0), (0, -queries % query_shards), (0, 0), (0, 0)))
  out = jax.shard_map(
    compute,
    in_specs=(query_spec, whole_spec, whole_spec),
    out_specs=query_spec,
    check_vma=False,
  )(query, key, value)
  return out[:, :queries]


def _block_size(tokens: int) -> int:
  """Returns the number of tokens in a block: few large blocks with little padding.

  With 128 tokens, JAX's default, a v5e reaches 4 % of its peak (jax-ml/jax issue 24633).
  """
  fewest = -(-tokens // _MOST_IN_BLOCK)
  sizes = []
  for num_blocks in range(fewest, 2 * fewest + 1):
    size = -(-tokens // (num_blocks * _LANES)) * _LANES
    sizes.append((num_blocks * size, num_blocks, size))
  return min(sizes)[-1]


def _side_by_side(x: Float[Array, 'B N K E']) -> Float[Array, 'B N D']:
  return x.reshape(*x.shape[:2], -1)


def _in_blocks(
  x: Float[Array, 'B N K E'], size: int
) -> tuple[Float[Array, 'BK padded_N E'], Int[Array, ' padded_N']]:
  """Pads tokens to whole blocks; also returns their segments, 1 for the padding."""
  tokens = x.shape[1]
  padded = jnp.pad(x, ((0, 0), (0, -tokens % size), (0, 0), (0, 0))).swapaxes(1, 2)
  is_padding = jnp.arange(padded.shape[2]) >= tokens
  return padded.reshape(-1, *padded.shape[2:]), is_padding.astype(jnp.int32)


def _flash_on_one_device(
  query: Queries, key: Keys, value: Keys, causal: bool
) -> Queries:
  """Computes flash attention on TPUs, of few tokens at once, of many in blocks."""
  from vit_jax.layers import fused_attention

  needs_float32 = dtypes.device_kind() in _WITHOUT_BFLOAT16
  if query.shape == key.shape and query.shape[1] <= FEW_TOKENS:
    out = fused_attention.attend(
      _side_by_side(query),
      _side_by_side(key),
      _side_by_side(value),
      head_dim=query.shape[-1],
      causal=causal,
      multiply_as=jnp.float32 if needs_float32 else None,
    )
    return out.reshape(query.shape)
  dtype = query.dtype
  if needs_float32:
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
  return _splash(query, key, value, causal).astype(dtype)


def _splash(query: Queries, key: Keys, value: Keys, causal: bool) -> Queries:
  """Computes JAX's splash attention, flash attention that skips masked blocks.

  Its backward pass reads a logarithm for each query, where JAX's older kernel reads
  three arrays as large as the queries.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention

  query_size = _block_size(query.shape[1])
  key_size = _block_size(key.shape[1])
  query_blocks, query_segments = _in_blocks(query, query_size)
  key_blocks, key_segments = _in_blocks(key, key_size)
  value_blocks, _ = _in_blocks(value, key_size)
  shape = (len(query_segments), len(key_segments))
  make_mask = splash_attention.CausalMask if causal else splash_attention.FullMask
  images, queries, heads, head_dim = query.shape
  # To the kernel, the heads of all images are heads of one.
  attend = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([make_mask(shape)] * (images * heads)),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=splash_attention.BlockSizes(
      block_q=query_size,
      block_q_dkv=query_size,
      block_q_dq=query_size,
      block_kv=key_size,
      block_kv_dkv=key_size,
      block_kv_dq=key_size,
      block_kv_compute=key_size,
      block_kv_dkv_compute=key_size,
    ),
  )
  segments = splash_attention.SegmentIds(query_segments, key_segments)
  out = attend(query_blocks, key_blocks, value_blocks, segments)
  return out.reshape(images, heads, -1, head_dim).swapaxes(1, 2)[:, :queries]


# Implementations by name (config.model.transformer.attention).
IMPLEMENTATIONS: dict[str, Implementation] = {
  'default': _default,
  'xla': _xla,
  'cudnn': _cudnn,
  'flash': _flash,
}
AUTO = 'auto'  # Chosen by the devices, see `choose`.
NAMES = typing.get_args(model_configs.Attention)
# cuDNN's flash attention needs this, and heads of at most this width.
_CAPABILITY = (8, 0)  # Ampere.
_MOST_HEAD_DIM = 128


def has_cudnn() -> bool:
  """Returns whether the program is for NVIDIA GPUs with flash attention."""
  if dtypes.platform() not in ('gpu', 'cuda'):
    return False
  try:
    capability = jax.local_devices(backend='cuda')[0].compute_capability
  except (
    RuntimeError
  ):  # Other vendors' GPUs, or a plan: planned GPUs are recent enough.
    return 'NVIDIA' in dtypes.device_kind()
  return tuple(int(x) for x in capability.split('.')) >= _CAPABILITY


def choose(
  name: str, dtype: Dtype, head_dim: int, tokens: int, plain: bool = True
) -> str:
  """Returns the implementation that a name stands for on the devices in use.

  'auto' is, if the computation is plain, 'cudnn' on NVIDIA GPUs from Ampere on for a
  `dtype` of 16 bits, and 'flash' on TPUs for many `tokens`; else it is 'default'. The
  devices are the current mesh, else JAX's default device. Plain means no dropout of the
  weights, no bias, no mask (which cuDNN reads as a bias), more than one query and tokens
  that are not split.
  """
  if name != AUTO:
    return name
  if not plain or sharding.sequence_shards() > 1:
    return 'default'
  if tokens > FEW_TOKENS and dtypes.platform() == 'tpu':
    return 'flash'
  is_supported = jnp.dtype(dtype).itemsize == 2
  is_supported = is_supported and head_dim % 8 == 0 and head_dim <= _MOST_HEAD_DIM
  return 'cudnn' if is_supported and has_cudnn() else 'default'


def check(
  name: str,
  dropout_rate: float,
  platform: str | None = None,
  dtype: str = '',
  mask: bool = False,
  bias: bool = False,
  key: str = 'config.model.transformer.attention',
) -> None:
  """Raises ValueError if an implementation does not support what is requested.

  `platform` is 'cpu', 'gpu', 'tpu', or None if unknown; `dtype` is
  `config.model.dtype`; `mask` is any mask but the causal one, `bias` a bias on the
  logits, such as relative position embeddings; `key` is the key of the config that
  holds `name`.
  """
  problem = None
  if name not in NAMES:
    problem = f'is unknown: use one of {", ".join(NAMES)}'
  elif name == 'cudnn' and platform and (platform, dtype) != ('gpu', 'bfloat16'):
    problem = (
      'needs NVIDIA GPUs from Ampere on and --config.model.dtype=bfloat16, but '
      f"the devices are '{platform}' and the type is {dtype}: use 'default'"
    )
  elif name == 'flash' and platform not in ('tpu', None):
    problem = f"needs TPUs, but the devices are '{platform}': use 'default'"
  elif name not in (AUTO, 'default') and dropout_rate:
    problem = (
      'does not support dropout of the attention weights: set '
      "--config.model.transformer.attention_dropout_rate=0.0, or use 'default'"
    )
  elif name == 'flash' and mask:
    problem = "does not support masks: use 'default' or 'xla'"
  elif name in ('flash', 'cudnn') and bias:
    problem = (
      "does not support relative position embeddings: use 'default' or 'xla', or "
      'another position_embedding'
    )
  if problem:
    raise ValueError(f"attention='{name}' {problem} ({key})")
