"""Tokenizers: texts become rows of numbers of one length.

LiT ("LiT: Zero-Shot Transfer with Locked-image text Tuning", Zhai et al., CVPR
2022, arXiv 2111.07991) has BERT's and SentencePiece, which keep the original's
interface; the others belong to CLIP (Radford et al., ICML 2021), SigLIP (Zhai et
al., ICCV 2023) and SigLIP 2 (arXiv 2502.14786):

  name           vocab_path         row of max_len tokens
  bert           vocab.txt          [CLS] tokens [PAD] [PAD]
  hf_bert        vocab.txt          the same, with words as Hugging Face cuts them
  sentencepiece  *.model            tokens </s> </s> </s>
  clip           tokenizer.json     <|startoftext|> tokens <|endoftext|> padding
  siglip         spiece.model       tokens </s> </s> </s>
  siglip2        tokenizer.json     tokens <eos> <pad> <pad>

  tokenizer = get_tokenizer('bert')('vocab.txt', max_len=16)
  tokenizer(['a photo of a cat', 'a photo of a dog'])  # int32 [2, 16]

A vocabulary may be local, at gs:// or https://, or on the Hugging Face Hub.
"""

import abc
import collections
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import json
import os
import re
import string
from typing import ClassVar
import unicodedata

from etils import epath
import numpy as np

from vit_jax import console
from vit_jax.distributed import files
from vit_jax.weights import fetch, hub

# The first tokens of a vocabulary of BERT, in this order.
SPECIAL = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
# Files beside tokenizer.json on Hugging Face that name special tokens.
_CONFIGS = ('tokenizer_config.json', 'special_tokens_map.json')
_START, _END = '<|startoftext|>', '<|endoftext|>'
# What tensorflow_text splits words at and keeps, as a pattern: punctuation of ASCII
# and Unicode, and Chinese characters.
_KEPT = (
  r'[!-/:-@\[-`{-~\p{P}\u3400-\u4DBF\u4E00-\u9FFF\uF900-\uFAFF'
  '\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]'
)
_LONGEST = 100  # Letters of a word (bytes in tensorflow_text), else [UNK].
_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)


@dataclasses.dataclass(frozen=True)
class Tokenizer(abc.ABC):
  """What all tokenizers share: reading the vocabulary, clipping, padding.

  Two tokenizers are equal if their fields are. A pickle holds `vocab_path` and
  `max_len` only, and reads the vocabulary again when it is loaded.
  """

  vocab_path: str
  max_len: int

  # What a vocabulary is, and the name of its file in a model on the hub.
  _kind: ClassVar[str]
  _file: ClassVar[str]

  def __post_init__(self):
    if self.max_len < 2:
      raise ValueError(
        f'max_len={self.max_len} is too small: give at least 2, since the '
        'tokenizer adds one or two tokens'
      )
    self._load()

  def __reduce__(self):
    return type(self), (self.vocab_path, self.max_len)

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Returns the tokens of texts, int32 [n, max_len].

    Args:
      texts: n texts. Of bytes, those that are not UTF-8 count as U+FFFD.

    Raises:
      ValueError: if `texts` is a single text, or has anything but texts.
    """
    texts = _listed(texts)
    rows = np.full([len(texts), self.max_len], self._padding, np.int32)
    for row, text in zip(rows, texts):
      tokens = self._tokens(text)
      row[: len(tokens)] = tokens
    return rows

  def preprocess_tf(self, text):
    """Returns the tokens of one text in a graph, such as tf.data.Dataset.map.

    Python computes them, so that the graph cannot be stored without it.

    Args:
      text: string scalar.

    Returns:
      int32 [max_len].
    """
    import tensorflow as tf  # Only here: a server needs no TensorFlow.

    text = tf.convert_to_tensor(text)

    def tokenize(value):  # Bytes in a graph, else an array of them.
      value = value.item() if isinstance(value, np.ndarray) else value
      return self([value])[0]

    tokens = tf.numpy_function(tokenize, [text], tf.int32, stateful=False)
    return tf.ensure_shape(tokens, [self.max_len])

  def content(self) -> bytes:
    """Returns a file from which the tokenizer can be made without any other."""
    return self._read()[1]

  @abc.abstractmethod
  def _load(self):
    """Sets what `_tokens` needs, `_padding`, and the fields that are left."""

  @abc.abstractmethod
  def _tokens(self, text: str) -> list[int]:
    """Returns `max_len` tokens of a text at most."""

  def _set(self, **attributes):
    """Sets attributes once, at construction: the fields are frozen."""
    for name, value in attributes.items():
      object.__setattr__(self, name, value)

  def _read(self) -> tuple[epath.Path, bytes]:
    """Returns the local path of the vocabulary, and what is in it."""
    path = self.vocab_path
    if hub.is_at(path):
      uri = hub.parse(path)
      if not uri.path_in_repo:
        path = dataclasses.replace(uri, path_in_repo=self._file).to_uri()
    try:
      path = fetch.fetch(path)
    except OSError as e:  # Also that it does not exist, or access is refused.
      raise type(e)(
        f"vocab_path='{self.vocab_path}': {e}; else give {self._kind}, as a file "
        'of this machine'
      ) from e
    if not os.path.isfile(path):  # epath counts pipes and devices as files.
      raise FileNotFoundError(
        f"vocab_path='{self.vocab_path}' is not a file: give {self._kind}, local or "
        'at gs://, hf:// or https://'
      )
    content = path.read_bytes()
    if not content:
      raise self._wrong('is empty')
    return path, content

  def _wrong(self, what: str) -> ValueError:
    """Returns the error to raise for a vocabulary that cannot be used."""
    return ValueError(f"vocab_path='{self.vocab_path}' {what}: give {self._kind}")

  def _needed(self, package: str):
    """Imports a package that this tokenizer needs."""
    return console.needed(package, 'text', type(self).__name__)

  def _read_json(self):
    """Returns a tokenizer.json as an object, and its path."""
    package = self._needed('tokenizers')
    path, content = self._read()
    try:
      tokenizer = package.Tokenizer.from_buffer(content)
    except Exception:  # The package has no class of errors of its own.
      raise self._wrong('is not a tokenizer.json') from None
    if getattr(tokenizer.model, 'dropout', None):
      raise self._wrong('draws tokens at random (dropout)')
    return tokenizer, path

  def _numbers(self, tokenizer, *tokens: str) -> list[int]:
    """Returns the numbers of tokens of an object of `_read_json`."""
    numbers = [tokenizer.token_to_id(token) for token in tokens]
    if None in numbers:
      raise self._wrong(f'has no token {tokens[numbers.index(None)]}')
    return numbers


@dataclasses.dataclass(frozen=True)
class BertTokenizer(Tokenizer):
  """BERT's tokenizer: [CLS], then the pieces of lower-case words.

  Words are those of tensorflow_text's BertTokenizer with `lower_case=True`, which
  the original uses: NFKC case folding, so that "℃" becomes "°c" and "ﬁ" "fi",
  without accents and invisible characters. They are cut into the longest pieces
  that the vocabulary has (WordPiece; Devlin et al., NAACL 2019). There is no [SEP].
  Tokens are clipped to `max_len`, and padded with 0. Names of special tokens in a
  text, such as '[CLS]', are text.

  Attributes:
    vocab_path: a text file, token i in line i: one of LiT's (`<name>.txt`) or
      the `vocab.txt` of a model that reads lower case.
    max_len: tokens of a row, with [CLS].
    cls_token: the number of [CLS].
  """

  cls_token: int = dataclasses.field(init=False)

  _kind = 'a vocabulary of BERT, one token a line, among them [CLS] and [UNK]'
  _file = 'vocab.txt'
  _padding = 0

  def _load(self):
    package = self._needed('tokenizers')
    _, content = self._read()
    try:
      text = content.decode()
    except UnicodeDecodeError:
      raise self._wrong('is not a text in UTF-8') from None
    lines = text.replace('\r\n', '\n').removesuffix('\n').split('\n')
    vocabulary = {token: number for number, token in enumerate(lines)}
    for token in ('[CLS]', '[UNK]'):
      if token not in vocabulary:
        raise self._wrong(f'has no token {token}')
    model = package.models.WordPiece(
      vocabulary, unk_token='[UNK]', max_input_chars_per_word=_LONGEST
    )
    self._set(
      cls_token=vocabulary['[CLS]'],
      _model=model,
      _words=self._splitter(package),
    )

  def _splitter(self, package) -> Callable[[str], list[str]]:
    """Returns a function of a text that returns its words in lower case."""
    words = _words_of_tensorflow_text(package)
    return lambda text: [
      word if len(word.encode()) <= _LONGEST else '[UNK]' for word in words(text)
    ]

  def _tokens(self, text):
    words = self._words(text)
    pieces = [x.id for word in words for x in self._model.tokenize(word)]
    return [self.cls_token, *pieces[: self.max_len - 1]]


@dataclasses.dataclass(frozen=True)
class HuggingFaceBertTokenizer(BertTokenizer):
  """BERT's tokenizer with the words of Hugging Face's and BERT's own code.

  See BertTokenizer. Computes the same as Hugging Face's BertTokenizer without
  [SEP], for models trained with it: words become lower case without NFKC, so that
  "℃" and "ﬁ" stay one character.
  """

  def _splitter(self, package):
    normalizer = package.normalizers.BertNormalizer(lowercase=True)
    return _split_by(package.pre_tokenizers.BertPreTokenizer(), normalizer)


@dataclasses.dataclass(frozen=True)
class SentencepieceTokenizer(Tokenizer):
  """SentencePiece (Kudo and Richardson, EMNLP 2018), with </s> at the end.

  Tokens are clipped to `max_len` - 1, and the rest is </s>, so that the last
  token is always </s>: LiT's text towers take what they find there.

  Attributes:
    vocab_path: a model of SentencePiece: one of LiT's, `<name>.model`.
    max_len: tokens of a row, with the last one.
    eos_token: the number of </s>.
  """

  eos_token: int = dataclasses.field(init=False)

  _kind = 'a model of SentencePiece with the token </s>'
  _file = 'spiece.model'

  def _load(self):
    package = self._needed('sentencepiece')
    _, content = self._read()
    try:
      model = package.SentencePieceProcessor(model_proto=content)
    except RuntimeError:
      raise self._wrong('is not a model of SentencePiece') from None
    end = model.piece_to_id('</s>')  # That of <unk> if there is none.
    if model.id_to_piece(end) != '</s>':
      raise self._wrong('has no token </s>')
    self._set(eos_token=end, _padding=end, _model=model)

  def _tokens(self, text):
    return self._model.encode(text)[: self.max_len - 1]


@dataclasses.dataclass(frozen=True)
class SiglipTokenizer(SentencepieceTokenizer):
  """SigLIP's tokenizer: SentencePiece of lower-case text without punctuation.

  Computes the same as Hugging Face's class of this name with
  `padding='max_length', truncation=True`; the published models have 64 tokens.
  Names of special tokens in a text, such as '</s>', are text (there:
  `split_special_tokens=True`).

  Attributes:
    vocab_path: the `spiece.model` of a model.
    max_len: tokens of a row, with </s> at the end.
    eos_token: the number of </s>, which is also the padding.
  """

  def _load(self):
    super()._load()
    self._set(_skipped=len(self._model.encode('<unk>')))

  def _tokens(self, text):
    # As there, '▁', which SentencePiece writes for a space, begins the text, so
    # that white space after it is not stripped. A word in front decides between
    # pieces of equal scores: of 'aaa' these are 'a', 'aa' and 'aa', 'a'.
    text = '▁' + text.replace('▁', ' ')
    text = re.sub(r'\s+', ' ', text.lower().translate(_NO_PUNCTUATION)).strip()
    pieces = self._model.encode('<unk>' + text)[self._skipped :]
    return pieces[: self.max_len - 1]


@dataclasses.dataclass(frozen=True)
class ClipTokenizer(Tokenizer):
  """CLIP's tokenizer: byte pairs between a token of start and a token of end.

  Computes the same as Hugging Face's CLIPTokenizer with
  `padding='max_length', truncation=True`; the published models have 77 tokens.
  A text that is too long keeps its token of end. Names of special tokens in a
  text are these tokens, as in CLIP's own code.

  Attributes:
    vocab_path: the `tokenizer.json` of a model. Files of Hugging Face beside it
      say what the padding is; else it is the token of end.
    max_len: tokens of a row, with the first and the last.
    eos_token: the number of <|endoftext|>.
  """

  eos_token: int = dataclasses.field(init=False)

  _kind = 'the tokenizer.json of a CLIP model on Hugging Face'
  _file = 'tokenizer.json'

  def _load(self):
    tokenizer, path = self._read_json()
    padding = _padding_beside(path) or (tokenizer.padding or {}).get('pad_token', _END)
    start, end, number = self._numbers(tokenizer, _START, _END, padding)
    tokenizer.no_truncation()
    tokenizer.enable_padding(pad_id=number, pad_token=padding)
    content = tokenizer.to_str().encode()
    tokenizer.no_padding()
    self._set(
      eos_token=end,
      _start=start,
      _padding=number,
      _tokenizer=tokenizer,
      _content=content,
    )

  def content(self):
    return self._content  # Says what the padding is.

  def _tokens(self, text):
    pieces = self._tokenizer.encode(text, add_special_tokens=False).ids
    return [self._start, *pieces[: self.max_len - 2], self.eos_token]


@dataclasses.dataclass(frozen=True)
class Siglip2Tokenizer(Tokenizer):
  """SigLIP 2's tokenizer: Gemma's byte pairs of lower-case text, then <eos>.

  Computes the same as Hugging Face's class of this name with
  `padding='max_length', truncation=True`, which ends texts with <eos>; the
  published models have 64 tokens. There is no <bos>, and a text that is too long
  keeps its <eos>. Names of special tokens in a text are these tokens.

  Attributes:
    vocab_path: the `tokenizer.json` of a model.
    max_len: tokens of a row, with <eos>.
    eos_token: the number of <eos>.
  """

  eos_token: int = dataclasses.field(init=False)

  _kind = 'the tokenizer.json of a SigLIP 2 model on Hugging Face'
  _file = 'tokenizer.json'

  def _load(self):
    normalizers = self._needed('tokenizers').normalizers
    tokenizer, _ = self._read_json()
    end, padding = self._numbers(tokenizer, '<eos>', '<pad>')
    tokenizer.no_truncation()
    tokenizer.no_padding()
    before = [tokenizer.normalizer] if tokenizer.normalizer else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
    self._set(eos_token=end, _padding=padding, _tokenizer=tokenizer)

  def _tokens(self, text):
    pieces = self._tokenizer.encode(text, add_special_tokens=False).ids
    return [*pieces[: self.max_len - 1], self.eos_token]


TOKENIZERS = {
  'bert': BertTokenizer,
  'hf_bert': HuggingFaceBertTokenizer,
  'sentencepiece': SentencepieceTokenizer,
  'clip': ClipTokenizer,
  'siglip': SiglipTokenizer,
  'siglip2': Siglip2Tokenizer,
}


def get_tokenizer(tokenizer_name: str) -> type[Tokenizer]:
  """Returns the class of a tokenizer, to be called with vocab_path and max_len.

  Args:
    tokenizer_name: a key of TOKENIZERS.

  Raises:
    ValueError: if there is no tokenizer of this name.
  """
  if tokenizer_name not in TOKENIZERS:
    raise ValueError(
      f'tokenizer_name={tokenizer_name!r} is unknown: give one of '
      f'{", ".join(map(repr, TOKENIZERS))}'
    )
  return TOKENIZERS[tokenizer_name]


def word_vocabulary(texts: Iterable[str]) -> list[str]:
  """Makes a vocabulary for BertTokenizer, of whole words, for small experiments.

  It has SPECIAL first, then all characters of the texts and their `##` forms,
  then all words, the most frequent first, those of one frequency by alphabet. So
  words of the texts are one token each, and other words of the same characters
  are spelt.

  Args:
    texts: texts of any number.

  Returns:
    Tokens; the place of a token is its number, that of [PAD] 0.

  Raises:
    ValueError: if `texts` is a single text, or has anything but texts.
  """
  package = console.needed('tokenizers', 'text', 'word_vocabulary')
  words_of = _words_of_tensorflow_text(package)
  counts = collections.Counter(
    word for text in _listed(texts) for word in words_of(text)
  )
  characters = sorted({character for word in counts for character in word})
  words = sorted(counts, key=lambda word: (-counts[word], word))
  return [
    *SPECIAL,
    *characters,
    *(f'##{character}' for character in characters),
    *(word for word in words if len(word) > 1),
  ]


def write_vocabulary(path, vocabulary: Sequence[str]):
  """Writes a vocabulary as BertTokenizer reads it, one token a line."""
  files.write(path, ''.join(f'{token}\n' for token in vocabulary))


def _words_of_tensorflow_text(package) -> Callable[[str], list[str]]:
  """Returns the function of tensorflow_text's BertTokenizer that splits a text.

  Equal for all characters up to Unicode 12; its tables end there.
  """
  regex, normalizers = package.Regex, package.normalizers
  normalizer = normalizers.Sequence(
    [
      normalizers.Replace(regex(r'\p{Default_Ignorable_Code_Point}'), ''),
      normalizers.NFD(),
      normalizers.Replace(regex(r'\p{Mn}'), ''),
      normalizers.Replace(regex(r'[\p{Cc}\p{Cf}]'), ' '),
    ]
  )
  split = package.pre_tokenizers.Split
  words_of = _split_by(
    package.pre_tokenizers.Sequence(
      # White space of ASCII only; NFKC has made spaces of most others.
      [split(regex('[\t\n\f\r ]+'), 'removed'), split(regex(_KEPT), 'isolated')]
    ),
    normalizer,
  )

  def words(text):
    for _ in range(2):  # Folding can make characters that NFKC changes.
      text = unicodedata.normalize('NFKC', text).casefold()
    return words_of(text)

  return words


def _split_by(splitter, normalizer) -> Callable[[str], list[str]]:
  """Returns a function of a text that returns its words."""
  return lambda text: [
    word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
  ]


def _padding_beside(path: epath.Path) -> str | None:
  """Returns the padding that files beside a tokenizer.json name, if they do."""
  for name in _CONFIGS:
    file = path.parent / name
    if not file.exists():
      continue
    if not os.path.isfile(file):  # To read a pipe would wait for ever.
      raise ValueError(
        f"'{file}', next to vocab_path='{path}', is not a regular file: delete it"
      )
    try:
      token = json.loads(file.read_text()).get('pad_token')
    except (AttributeError, ValueError):
      raise ValueError(
        f"'{file}', next to vocab_path='{path}', is not JSON of Hugging Face: fix "
        'or delete it'
      ) from None
    if token:
      return token['content'] if isinstance(token, dict) else token
  return None


def _listed(texts) -> list[str]:
  """Returns texts as a list of strings; ValueError if they are no texts."""
  if hasattr(texts, 'numpy'):  # A tensor of TensorFlow.
    texts = texts.numpy()
  if (
    isinstance(texts, str | bytes)
    or not isinstance(texts, Iterable)
    or getattr(texts, 'shape', None) == ()
  ):
    raise ValueError(
      f'texts={texts!r} is not a list of texts: give a list, [text] for a single one'
    )
  return [_decoded(text) for text in texts]


def _decoded(text) -> str:
  """Returns a text, of UTF-8 if it is bytes, that can be encoded."""
  if isinstance(text, bytes):
    return text.decode(errors='replace')
  if not isinstance(text, str):
    raise ValueError(
      f'texts has {text!r}, which is {type(text).__name__}: give strings'
    )
  # Halves of a pair of UTF-16 that lack the other one.
  return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
