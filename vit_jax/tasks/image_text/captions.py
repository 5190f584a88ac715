"""The texts of the images of a data set."""

from collections.abc import Iterator

from vit_jax import console
from vit_jax.data import records
from vit_jax.data.lazy import tf
from vit_jax.data.texts import tokenizers
from vit_jax.distributed import processes

# Features that may hold one or more texts of an image; the first one present counts.
# `captions/text` is the one of COCO in TFDS.
FEATURES = ('text', 'texts', 'caption', 'captions', 'captions/text')
# Value of `config.model.pp.vocab_path`: the words of the training texts.
WORDS = 'words'
_MOST = 100_000  # Largest number of examples from whose texts a vocabulary is made.


def feature(source: records.Source) -> str | None:
  """Returns the feature of a source that holds texts, or None."""
  return next((name for name in FEATURES if name in source.features), None)


def from_record(record: records.Record) -> 'tf.Tensor | None':
  """Returns the texts of a record, a string tensor [n]; None if it has none."""
  name = next((name for name in FEATURES if name in record), None)
  if name is None:
    return None
  texts = record[name]
  texts = texts.flat_values if isinstance(texts, tf.RaggedTensor) else texts
  return tf.reshape(texts, [-1])


def check(source: records.Source, where: str) -> None:
  """Raises ValueError unless the examples of a source have texts."""
  if feature(source) is None:
    raise ValueError(
      f"dataset='{where}' has no texts, only {list(source.features)}: use data "
      f'with one of the features {", ".join(FEATURES)}, such as a folder with '
      'train.jsonl, whose lines are {"image": PATH, "text": TEXT} (config.dataset)'
    )


def read(source: records.Source) -> Iterator[str]:
  """Yields the texts of the first examples of a source."""
  count = min(source.num_examples, _MOST)
  data = tf.data.Dataset.range(count).map(
    lambda index: from_record(source.read(source.record(index))), num_parallel_calls=2
  )
  with console.bar(total=count, desc='Reading texts', delay=3) as bar:
    for texts in data:
      for text in texts.numpy():
        yield text.decode()
      bar.update()


def vocabulary(source: records.Source) -> list[str]:
  """Returns the words of the texts of a source, the same on all processes."""
  return processes.from_first(
    'making a vocabulary', lambda: tokenizers.word_vocabulary(read(source.evaluated))
  )


def draw(texts: 'tf.Tensor', seed: 'tf.Tensor') -> 'tf.Tensor':
  """Returns a random one of several texts [n]; `seed` is int64 [2]."""
  count = tf.shape(texts)[0]
  message = 'an image has no text: remove the image from the training data'
  with tf.control_dependencies([tf.debugging.assert_positive(count, message)]):
    number = tf.random.stateless_uniform([], seed, 0, count, tf.int32)
  return texts[number]


def tokenize(
  tokenizer: tokenizers.Tokenizer, texts: 'tf.Tensor', most: int
) -> tuple['tf.Tensor', 'tf.Tensor']:
  """Returns tokens of the texts [n] of one image, int32 [most, N], and n.

  Rows after the texts are zeros.
  """
  count = tf.shape(texts)[0]
  message = (
    f'an image has more than {most} texts: raise --config.task_options.most_texts'
  )
  with tf.control_dependencies([tf.debugging.assert_less_equal(count, most, message)]):
    texts = tf.identity(texts)
  tokens = tf.numpy_function(
    lambda texts: tokenizer(list(texts)), [texts], tf.int32, stateful=False
  )
  tokens = tf.pad(
    tf.ensure_shape(tokens, [None, tokenizer.max_len]),
    [(0, most - count), (0, 0)],
  )
  return tf.ensure_shape(tokens, [most, tokenizer.max_len]), count
