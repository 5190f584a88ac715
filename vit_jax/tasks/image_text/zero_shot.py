"""Evaluators of image and text towers: zero-shot classification, retrieval.

Zero-shot classification (arXiv 2111.07991, section 4; CLIP, section 3.1.4): the
embedding of a class is the mean over templates of the normalised embeddings of the
sentences about it. With `task_options.unit_classes` it is normalised again, as
open_clip and big_vision do for CLIP and SigLIP. The predicted class is the one whose
embedding has the largest product with the image's.

Retrieval: of all texts of the split, an image's own texts should have the largest
products with its embedding, and vice versa. An image may have several texts.

Shapes: C classes, T templates, E width of an embedding, n images.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import console
from vit_jax.data.lazy import tf
from vit_jax.data.texts import templates as templates_lib
from vit_jax.distributed import sharding
from vit_jax.evaluators import base, means
from vit_jax.inference import engine
from vit_jax.run import metrics as metrics_lib
from vit_jax.tasks.image_text import captions

TOP = (1, 5)
RECALLS = (1, 5, 10)
METRICS_OF_CLASSES = {
  'accuracy': metrics_lib.SHARE,
  'accuracy_top5': metrics_lib.SHARE,
}
_FEW = 10  # Top-5 accuracy is measured with more classes than these.
METRICS_OF_TEXTS = {
  **{f'image_to_text_r{k}': metrics_lib.SHARE for k in RECALLS},
  **{f'text_to_image_r{k}': metrics_lib.SHARE for k in RECALLS},
}
_TEXTS = 512  # Texts embedded at a time.
_ROWS = 1024  # Rows of the matrix of similarities ranked at a time.


class Embedder:
  """Embeds any number of texts with a task, on all devices of a mesh."""

  def __init__(self, task: Any, mesh: jax.sharding.Mesh) -> None:
    self._task, self._mesh = task, mesh

    def embed(params: Any, extra: Any, tokens: jax.Array) -> jax.Array:
      tokens = sharding.constrain_batch(tokens)
      return task.embed_tokens(params, extra, tokens)

    self._embed = jax.jit(embed, out_shardings=sharding.replicated(mesh))

  def __call__(
    self,
    params: Any,
    extra: Any,
    texts: Sequence[str],
    stop: Callable[[], bool] = engine.never,
  ) -> np.ndarray:
    """Returns the embeddings of texts, float32 [n, E], of length 1.

    All processes of the mesh must make the same calls; for `stop` see engine.run.
    """
    shards = sharding.batch_shards(self._mesh)
    # A power of two, so that few sizes are compiled.
    size = min(_TEXTS, 1 << max(0, len(texts) - 1).bit_length())
    size = -(-size // shards) * shards
    label = 'Embedding texts'
    with console.bar(total=len(texts), desc=label, delay=3, leave=False) as bar:

      def embed(tokens: np.ndarray) -> jax.Array:
        if stop():
          raise engine.Stopped(label)
        bar.update(min(size, bar.total - bar.n))
        with jax.set_mesh(self._mesh):
          return self._embed(params, extra, tokens)

      return engine.by_parts(embed, self._task.tokenizer(texts), size)

  def classes(
    self,
    params: Any,
    extra: Any,
    names: Sequence[str],
    stop: Callable[[], bool] = engine.never,
  ) -> np.ndarray:
    """Returns the embeddings of classes, float32 [C, E], means over templates."""
    templates = self._task.templates
    rows = self(params, extra, templates_lib.fill(names, templates), stop)
    embeddings = rows.reshape(len(names), len(templates), -1).mean(axis=1)
    if self._task.options.unit_classes:
      embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings


def metrics_of(num_classes: int) -> dict[str, metrics_lib.Metric]:
  """Returns the metrics for a number of classes; {} for none."""
  metrics = dict(METRICS_OF_CLASSES)
  if num_classes <= _FEW:
    del metrics['accuracy_top5']
  return metrics if num_classes else {}


def measure(
  zimg: jax.Array, classes: jax.Array, batch: dict[str, jax.Array]
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Returns {metric: (sum, weight)} of images and their labels.

  Args:
    zimg: embeddings of images, [B, E].
    classes: embeddings of classes, [C, E].
    batch: `label`, float32 [B, C], and `mask`. Images without a label do not count.
  """
  products = jnp.einsum('be,ce->bc', zimg, classes, precision=jax.lax.Precision.HIGHEST)
  names = metrics_of(len(classes))
  _, best = jax.lax.top_k(products, TOP[len(names) - 1])
  correct = jnp.take_along_axis(batch['label'], best, axis=-1) > 0  # [B, top]
  weights = batch['mask'] * (batch['label'].sum(axis=-1) > 0)
  metrics = {}
  for name, k in zip(names, TOP):
    is_correct = correct[:, :k].any(axis=-1)
    metrics[name] = ((is_correct * weights).sum(), weights.sum())
  return metrics


class ZeroShot:
  """Measures the accuracy of zero-shot classification; nothing without labels."""

  metrics = METRICS_OF_CLASSES

  def __init__(self, evaluation: base.Evaluation) -> None:
    task = evaluation.task
    class_names = evaluation.source.class_names
    self._names = task.words_of(class_names) if class_names else ()
    self._embed = Embedder(task, evaluation.mesh)
    self.metrics = metrics_of(len(self._names))
    self._means = means.Means(evaluation)

  def run(
    self, params: Any, extra: Any, stop: Callable[[], bool] = engine.never
  ) -> dict[str, float]:
    """Returns `accuracy`, of more than 10 classes `accuracy_top5`; see Means."""
    if not self._names:
      return {}
    classes = self._embed.classes(params, extra, self._names, stop)
    return self._means.run(params, {**extra, 'classes': classes}, stop)


class Retrieval:
  """Measures recalls between images and texts; nothing with labels but no texts."""

  metrics = METRICS_OF_TEXTS

  def __init__(self, evaluation: base.Evaluation) -> None:
    task, source = evaluation.task, evaluation.source
    self._task = task
    self._mesh = evaluation.mesh
    self._source = source
    if captions.feature(source) is None:
      self.metrics = {}
    if not source.class_names:
      captions.check(source, f"{task.config.dataset}', split '{evaluation.split}")

    def compute(
      params: Any, extra: Any, batch: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
      tokens = batch['tokens']  # [B, max_texts, N]
      ztxt = task.embed_tokens(params, extra, tokens.reshape(-1, tokens.shape[-1]))
      return {
        'image': task.outputs(params, extra, batch),
        'text': ztxt.reshape(*tokens.shape[:2], -1),
        'tokens': tokens,
        'count': batch['count'],
      }

    self._compute = engine.on_all_hosts(evaluation.mesh, compute)

  def run(
    self, params: Any, extra: Any, stop: Callable[[], bool] = engine.never
  ) -> dict[str, float]:
    """Returns the recalls in METRICS_OF_TEXTS, and `num_texts`."""
    if not self.metrics:
      return {}
    results = engine.collect(
      self._task.config,
      self._mesh,
      self._source.evaluated,
      self._example,
      lambda batch: self._compute(params, extra, batch),
      stop,
      'Evaluating',
    )
    max_texts = results['text'].shape[1]
    mask = np.arange(max_texts) < results['count'][:, None]  # [n, max_texts]
    images = np.broadcast_to(np.arange(len(mask))[:, None], mask.shape)[mask]
    # The same text may belong to several images.
    _, first_rows, texts = np.unique(
      results['tokens'][mask], axis=0, return_index=True, return_inverse=True
    )
    ztxt = results['text'][mask][first_rows]
    metrics = recalls(results['image'], ztxt, images, texts.reshape(-1))
    return {**metrics, 'num_texts': len(images)}

  def _example(
    self, record: dict[str, 'tf.Tensor'], seed: 'tf.Tensor | None'
  ) -> dict[str, 'tf.Tensor']:
    texts = captions.from_record(record)
    max_texts = self._task.options.most_texts
    tokens, count = captions.tokenize(self._task.tokenizer, texts, max_texts)
    return {**self._task.inputs(record), 'tokens': tokens, 'count': count}


def recalls(
  zimg: np.ndarray, ztxt: np.ndarray, images: np.ndarray, texts: np.ndarray
) -> dict[str, float]:
  """Returns the recalls of METRICS_OF_TEXTS, shares from 0 to 1.

  `image_to_text_rK` is the share of images with one of their texts among the K
  largest products; images without a text do not count. `text_to_image_rK` is the
  share of pairs whose text has one of its images among the K largest, so that a text
  of several images counts for each of them. Ties count as wrong.

  Args:
    zimg: embeddings of n images, float [n, E].
    ztxt: embeddings of m different texts, float [m, E].
    images: numbers of the images of p pairs, int [p].
    texts: numbers of their texts, int [p].
  """
  image_ranks = _ranks(zimg, ztxt, images, texts)[np.unique(images)]
  text_ranks = _ranks(ztxt, zimg, texts, images)[texts]
  metrics = {}
  for k in RECALLS:
    metrics[f'image_to_text_r{k}'] = float((image_ranks < k).mean())
  for k in RECALLS:
    metrics[f'text_to_image_r{k}'] = float((text_ranks < k).mean())
  return metrics


def _ranks(
  queries: np.ndarray, keys: np.ndarray, of_queries: np.ndarray, of_keys: np.ndarray
) -> np.ndarray:
  """Returns how many wrong keys rank above the best correct one, int [n].

  A query without correct keys has the rank m.

  Args:
    queries: embeddings [n, E].
    keys: embeddings [m, E].
    of_queries: numbers of the queries of all correct pairs, int [p].
    of_keys: numbers of their keys, int [p].
  """
  order = np.argsort(of_queries, kind='stable')
  ends = np.cumsum(np.bincount(of_queries, minlength=len(queries)))
  correct = np.split(of_keys[order], ends[:-1])
  ranks = np.full(len(queries), len(keys))
  for start in range(0, len(queries), _ROWS):
    products = queries[start : start + _ROWS] @ keys.T
    for number, row in enumerate(products, start):
      if len(correct[number]):
        best = row[correct[number]].max()
        row[correct[number]] = -np.inf
        ranks[number] = (row >= best).sum()
  return ranks
