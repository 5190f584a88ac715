"""Contrastive learning of images and texts: LiT, CLIP, SigLIP.

"LiT: Zero-Shot Transfer with Locked-image text Tuning" (arXiv 2111.07991). An image
tower and a text tower embed the images and the texts of a batch, and the loss
compares all pairs of them, over all devices and hosts (config.loss, see
contrastive.py).

The image tower is locked where `config.lr_multipliers` freeze it, as in
(('img/', 0.0),): it then has neither gradients nor optimiser state, and runs as in
evaluation.

Examples have an image and one or more texts, of which each epoch draws one:
`captions.FEATURES` are the names of the features. A split for evaluation may have
labels (zero-shot classification), texts (retrieval), or both.
"""

import base64
from collections.abc import Callable, Sequence
import functools
import shlex
import tempfile
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import console, input_pipeline, models, preprocess
from vit_jax.configs import task_options
from vit_jax.data import records
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.data.texts import templates as templates_lib, tokenizers
from vit_jax.distributed import text_files
from vit_jax.figures import grids
from vit_jax.inference import predictor as predictor_lib
from vit_jax.layers import text_towers
from vit_jax.learning import optim
from vit_jax.tasks import base, predict_flags
from vit_jax.tasks.image_text import (
  captions,
  contrastive,
  precomputed,
  predicting,
  similarity_plots,
  zero_shot,
)


class Task(base.Task):
  """Learns which images and texts belong together."""

  FEATURES = ('image', 'label?', *(f'{name}?' for name in captions.FEATURES))
  Options = task_options.ImageText
  METRICS = zero_shot.METRICS_OF_CLASSES
  METADATA = ('vocabulary',)
  LEARNED = ('vocabulary',)
  NEW_PARAMS = ()
  DRAWS = True
  FLAGS, IMAGELESS, NEEDS = predict_flags.IMAGE_TEXT

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    _check(config)
    super().__init__(config, metadata)
    self.model = models.make_model(config.model)
    self.templates = templates_lib.get(self.options.templates)
    params, _ = jax.eval_shape(self.init, jax.random.key(0))
    self.locked = _is_locked(config.lr_multipliers, params)
    self._embeddings: Any = None  # Embeddings of the training images, see `begin`.
    if self.options.precompute:
      precomputed.check(config)
      if not self.locked or config.model.out_dim[0]:
        raise ValueError(
          'precompute=True needs an image tower that is locked completely, without '
          'a head: --config.lr_multipliers="((\'img/\', 0.0),)" and '
          'config.model.out_dim=(None, WIDTH)'
        )
    self._rows = text_towers.vocab_size(params['txt'])
    if metadata['vocabulary']:
      self.tokenizer  # noqa: B018 (raises errors before anything is compiled)

  @functools.cached_property
  def tokenizer(self) -> tokenizers.Tokenizer:
    """The tokenizer of the metadata's vocabulary, or of the model's file."""
    tokenizer = self._make_tokenizer()
    if tokenizer.num_tokens > self._rows:
      raise ValueError(
        f'the vocabulary has {tokenizer.num_tokens:,} tokens, but the text tower has '
        f'only {self._rows:,}: raise its vocab_size (config.model.text)'
      )
    return tokenizer

  def _make_tokenizer(self) -> tokenizers.Tokenizer:
    pp = self.config.model.pp
    make = preprocess.get_tokenizer(pp.tokenizer_name)
    if not self.metadata['vocabulary']:
      return make(self.model.vocab_path, pp.max_len)
    with tempfile.TemporaryDirectory() as folder:
      path = epath.Path(folder) / self.vocabulary_name
      path.write_bytes(self.vocabulary())
      return make(str(path), pp.max_len)

  @property
  def vocabulary_name(self) -> str:
    """Name of a file for the vocabulary: .txt if it is a list of words."""
    ending = text_towers.TOKENIZERS[self.config.model.pp.tokenizer_name]
    return f'vocabulary.{ending}'

  @property
  def _has_words(self) -> bool:
    return self.vocabulary_name.endswith('.txt')

  def vocabulary(self) -> bytes:
    """Returns the content of the file from which the tokenizer is made."""
    entries = self.metadata['vocabulary']
    if not entries:
      return self.tokenizer.content()
    if self._has_words:
      return ''.join(f'{word}\n' for word in entries).encode()
    return base64.b64decode(entries[0])

  # --- Data ---

  @classmethod
  def class_names_of(cls, source: records.Source) -> tuple[str, ...]:
    """Returns (): each evaluation may have other classes."""
    return ()

  @classmethod
  def learn(
    cls, config: ml_collections.ConfigDict, source: records.Source
  ) -> dict[str, Any]:
    """Returns the vocabulary of a file, or the words of the training texts.

    A text file becomes a list of its lines; any other file one base64 string.
    """
    _check(config)
    captions.check(source, config.dataset)
    pp = config.model.pp
    if pp.get('vocab_path') == captions.WORDS:
      return {'vocabulary': captions.vocabulary(source)}
    try:
      path = models.make_model(config.model).vocab_path
      tokenizer = preprocess.get_tokenizer(pp.tokenizer_name)(path, pp.max_len)
    except (OSError, ValueError) as e:
      if text_towers.TOKENIZERS.get(pp.tokenizer_name) != 'txt':
        raise
      raise type(e)(
        f'{e}; or use the words of the training texts '
        f'(--config.model.pp.vocab_path={captions.WORDS})'
      ) from e
    return {'vocabulary': stored(tokenizer)}

  @classmethod
  def planned_metadata(
    cls, config: ml_collections.ConfigDict, num_classes: int | None
  ) -> dict[str, Any]:
    return {'vocabulary': []}

  def words_of(self, class_names: Sequence[str]) -> list[str]:
    """Returns the words for the classes of a data set, in their order."""
    classes = self.options.classes
    if classes:
      names = templates_lib.listed(classes, 'classes')
    else:
      names = [name.replace('_', ' ') for name in class_names]
    if len(names) != len(class_names):
      raise ValueError(
        f"classes='{classes}' has {len(names)} names, but the data have "
        f'{len(class_names)} classes, {list(class_names[:5])} ...: pass a name for '
        'each class (--config.task_options.classes, --option=classes=)'
      )
    return names

  @no_autograph
  def example(
    self, record: records.Record, seed: 'tf.Tensor | None'
  ) -> dict[str, 'tf.Tensor']:
    """Returns `image`, and the `tokens`, int32 [N], of one of its texts.

    Without a text, the tokens are left out. In evaluation it is the first text.
    """
    if seed is None or self._embeddings is None:
      example = self.inputs(record, seed)
    else:
      example = {'zimg': self._stored_embedding(record['index'])}
    texts = captions.from_record(record)
    if texts is not None:
      text = texts[0] if seed is None else captions.draw(texts, seed)
      example['tokens'] = self.tokenizer.preprocess_tf(text)
    return example

  def _stored_embedding(self, index: 'tf.Tensor') -> 'tf.Tensor':
    """Returns the embedding of a training image, float32 [E], see `begin`."""

    def read(index: np.ndarray) -> np.ndarray:
      return self._embeddings[index].astype(np.float32)

    row = tf.numpy_function(read, [index], tf.float32, stateful=False)
    return tf.ensure_shape(row, self._embeddings.shape[1:])

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `tokens`, int32 [size, max_len], and `image` or its embedding `zimg`."""
    model = self.config.model
    tokens = jax.ShapeDtypeStruct((size, model.pp.max_len), jnp.int32)
    if self.options.precompute:
      zimg = jax.ShapeDtypeStruct((size, model.out_dim[1]), jnp.float32)
      return {'zimg': zimg, 'tokens': tokens}
    return {'image': self.image_spec(size), 'tokens': tokens}

  # --- Training ---

  def init(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns the parameters of both towers, and no extra state."""
    images = jnp.zeros(self.image_spec(1).shape)
    tokens = jnp.zeros((1, self.config.model.pp.max_len), jnp.int32)
    return self.model.init(rng, images=images, tokens=tokens)['params'], {}

  def begin(
    self,
    params: Any,
    extra: Any,
    source: records.Source,
    mesh: jax.sharding.Mesh,
    workdir: epath.PathLike,
    stop: Callable[[], bool],
  ) -> None:
    if self.options.precompute:
      self._embeddings = precomputed.make(
        self, params, extra, source, mesh, workdir, stop
      )

  def loss(
    self, params: Any, extra: Any, batch: base.Batch, rng: jax.Array
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the contrastive loss summed over pairs, and their number.

    The metrics are the inverse temperature `t`, and `accuracy`, the share of images
    whose own text has the largest logit of the batch.
    """
    zimg, ztxt, out = self.model.apply(
      {'params': params},
      images=batch.get('image'),
      tokens=batch['tokens'],
      train=not self.locked,
      rngs={'dropout': rng},
    )
    zimg = batch.get('zimg', zimg)
    logits = contrastive.logits_of(zimg, ztxt, out)
    losses = contrastive.LOSSES[self.config.loss](logits)  # [B]
    count = jnp.float32(len(losses))
    correct = logits.max(axis=1) == jnp.diagonal(logits)
    return (losses.sum(), count), {
      'accuracy': (correct.sum().astype(jnp.float32), count),
      't': (out['t'].sum(), jnp.float32(1)),
    }

  # --- Evaluation and prediction ---

  def outputs(self, params: Any, extra: Any, batch: base.Batch) -> Any:
    """Returns the embeddings of images, float32 [B, E], of length 1."""
    return self.model.apply({'params': params}, images=batch['image'])[0]

  def embed_tokens(self, params: Any, extra: Any, tokens: jax.Array) -> jax.Array:
    """Returns the embeddings of texts, float32 [B, E], of length 1."""
    return self.model.apply({'params': params}, tokens=tokens)[1]

  def exported(
    self, params: Any, extra: Any, batch: base.Batch
  ) -> dict[str, jax.Array]:
    """Returns `embedding`, float32 [B, E], of images."""
    return {'embedding': self.outputs(params, extra, batch)}

  def text_task(self) -> 'TextTask':
    """Returns the task of the text tower, for its export."""
    return TextTask(self.config, self.metadata)

  def features(
    self, layer: str
  ) -> Callable[[Any, Any, dict[str, jax.Array]], jax.Array]:
    """For 'features', returns the function of the images' embeddings."""
    return self.outputs if layer == 'features' else super().features(layer)

  def intermediates(
    self, params: Any, extra: Any, batch: base.Batch, capture: Any = False
  ) -> dict[str, Any]:
    """Computes what the image tower sows."""
    tower = self.model.image_tower()
    return self._intermediates(params['img'], batch, capture, tower)

  def parts(self, source: records.Source) -> list[input_pipeline.Part]:
    """Returns the examples of zero-shot classification: images and labels."""
    count = len(source.class_names)
    example = input_pipeline.labelled_example(self.config, count)
    return [input_pipeline.Part(None, example)]

  def measure(self, params: Any, extra: Any, batch: base.Batch) -> base.WeightedSums:
    """Computes zero-shot accuracy; `extra['classes']` are the classes' embeddings."""
    zimg = self.outputs(params, extra, batch)
    return zero_shot.measure(zimg, extra['classes'], batch)

  @classmethod
  def evaluators(cls, config: ml_collections.ConfigDict) -> list[type]:
    return [zero_shot.ZeroShot, zero_shot.Retrieval]

  # --- Pictures ---

  def drawn_outputs(self, params: Any, extra: Any, batch: base.Batch) -> Any:
    """Returns the logits of the images and the first texts of a batch."""
    zimg, ztxt, out = self.model.apply(
      {'params': params}, images=batch['image'], tokens=batch.get('tokens')
    )
    return {} if ztxt is None else contrastive.logits_of(zimg, ztxt, out)

  def draw_evaluation(self, batch: base.Batch, outputs: Any) -> dict[str, np.ndarray]:
    """Draws images, and the matrix of their similarities to their texts."""
    pictures = self._draw('test_images', batch)
    if 'tokens' in batch:
      texts = self.texts_of(batch['tokens'])
      pictures['similarities'] = similarity_plots.matrix(batch['image'], texts, outputs)
    return pictures

  def captions_of(
    self, batch: base.Batch, outputs: Any = None
  ) -> Sequence[grids.Caption]:
    """Returns the texts of a batch; () if it has none."""
    if 'tokens' not in batch:
      return ()
    return [grids.Caption(text) for text in self.texts_of(batch['tokens'])]

  def texts_of(self, tokens: np.ndarray) -> list[str]:
    """Returns the texts of tokens [n, N], '' if the vocabulary is not of words."""
    vocabulary = self.metadata['vocabulary']
    if not self._has_words or not vocabulary:
      return [''] * len(tokens)
    texts = []
    for row in tokens:
      text = ' '.join(vocabulary[token] for token in row[1:] if token)
      texts.append(text.replace(' ##', ''))
    return texts

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return predicting.Predictor(self, params, extra, step)

  def flags_to_predict(self) -> str:
    classes = shlex.quote(self.options.classes or 'a cat;a dog')
    return f'--classes={classes} --out=picture.png'

  def describe(self) -> str:
    return 'the image tower is locked' if self.locked else ''


class TextTask(Task):
  """The text tower: its inputs are tokens."""

  def input_spec(
    self,
    image_size: tuple[int, int] | None = None,
    batch: Any = 1,
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `tokens`, int32 [batch, max_len]."""
    shape = (batch, self.config.model.pp.max_len)
    return {'tokens': jax.ShapeDtypeStruct(shape, jnp.int32)}

  def exported(
    self, params: Any, extra: Any, batch: base.Batch
  ) -> dict[str, jax.Array]:
    """Returns `embedding`, float32 [B, E], of texts."""
    return {'embedding': self.embed_tokens(params, extra, batch['tokens'])}

  def sample(self, count: int) -> tuple[dict[str, np.ndarray], str]:
    """Returns the tokens of `count` texts, and a description of the texts."""
    templates = templates_lib.TEMPLATES['short'][:count]
    tokens = self.tokenizer(templates_lib.fill(['cat'], templates))
    return {'tokens': tokens}, console.pluralize(count, 'text')


def stored(tokenizer: tokenizers.Tokenizer) -> list[str]:
  """Returns the vocabulary of a tokenizer as stored in a run's metadata."""
  content = tokenizer.content()
  if isinstance(tokenizer, tokenizers.BertTokenizer):
    return text_files.lines(content, tokenizer.vocab_path)
  return [base64.b64encode(content).decode()]


def _is_locked(multipliers: Sequence[tuple[str, float]] | None, params: Any) -> bool:
  """Returns whether all of the image tower but its head is frozen."""
  if not multipliers:
    return False
  factors = optim.multipliers(multipliers, params)['img']
  without_head = {name: x for name, x in factors.items() if name != 'head'}
  return not any(jax.tree.leaves(without_head))


def _check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if keys of a config do not fit this task."""
  model = config.model
  pp = config.model.get('pp')
  if model.get('kind') != 'lit':
    raise ValueError(
      f"task='image_text' needs an image and a text tower (kind='lit'), but the "
      f"model is '{model.get('model_name')}': use a config such as configs/lit.py "
      '(config.model)'
    )
  if not pp or not pp.get('tokenizer_name') or not pp.get('max_len'):
    raise ValueError(
      f'model.pp={pp} must have tokenizer_name and max_len (the number of tokens of a '
      'text), as in configs/lit.py (config.model.pp)'
    )
  if config.accum_steps > 1:
    raise ValueError(
      f'accum_steps={config.accum_steps} is not possible, since the loss compares '
      'all pairs of a batch: leave out --config.accum_steps, and split the batch over '
      'more devices or recompute (--config.model.image.transformer.remat=full)'
    )
  if config.label_smoothing:
    raise ValueError(
      f'label_smoothing={config.label_smoothing} is for classes, which this task '
      'does not have: leave out --config.label_smoothing'
    )
  dims = model.out_dim
  image_dim, text_dim = (dims, dims) if isinstance(dims, int | None) else dims
  image_width = image_dim or model.image.hidden_size
  if text_dim and image_width != text_dim:
    raise ValueError(
      f'out_dim={(image_dim, text_dim)} gives images embeddings of width '
      f'{image_width} and texts of {text_dim}: set both to the same width '
      '(config.model.out_dim)'
    )
