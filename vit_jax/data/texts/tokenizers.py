"""Tokenizers: strings become rows of numbers of one length.

LiT ("LiT: Zero-Shot Transfer with Locked-image text Tuning", Zhai et al., CVPR
2022, arXiv 2111.07991) has BERT's and SentencePiece, which keep the original's
interface; the others belong to CLIP (Radford et al., ICML 2021), SigLIP (Zhai et
al., ICCV 2023) and SigLIP 2 (arXiv 2502.14786):

  name           vocab_path         row of max_len tokens
  bert           vocab.txt          [CLS] tokens [PAD] [PAD]
                 or tokenizer.json
  hf_bert        likewise           the same, with words as Hugging Face splits them
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import math
import re
import string
from typing import TYPE_CHECKING, Any, ClassVar
import unicodedata

from etils import epath
import numpy as np

from vit_jax import console
from vit_jax.data.images import image_files
from vit_jax.data.lazy import tf
from vit_jax.distributed import files, text_files
from vit_jax.weights import fetch, hub

# The first tokens of a vocabulary of BERT, in this order.
SPECIAL = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
# Files next to a tokenizer.json on Hugging Face that name special tokens.
_CONFIGS = ('tokenizer_config.json', 'special_tokens_map.json')
_START, _END = '<|startoftext|>', '<|endoftext|>'
# Tokens of their own in tensorflow_text: punctuation and Chinese characters.
_ISOLATED = (
  r'[!-/:-@\[-`{-~\p{P}\u3400-\u4DBF\u4E00-\u9FFF\uF900-\uFAFF'
  '\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]'
)
# Largest number of bytes of a vocabulary. Gemma's, of 256,000 tokens, has 2**25.
_LARGEST = 2**27
_MOST_TOKENS = 2**24
_MOST_GROWTH = 100
_LONGEST = 100  # Letters of a word (bytes in tensorflow_text); longer ones are [UNK].
_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)


@dataclasses.dataclass(frozen=True)
class Tokenizer(abc.ABC):
  """Base class: reads the vocabulary at `vocab_path`, and pads rows to `max_len`.

  A pickle holds only these two fields; loading it reads the vocabulary again.

  Raises OSError if the vocabulary cannot be read, and ValueError if it is of another
  kind or `max_len` is below 2.
  """

  vocab_path: str
  max_len: int

  # Description of a vocabulary, its file names on the Hub in order of preference, and
  # the package to read it.
  _kind: ClassVar[str]
  _files: ClassVar[tuple[str, ...]]
  _package: ClassVar[str] = 'tokenizers'

  if TYPE_CHECKING:

    def __getattr__(self, name: str) -> Any:
      """Returns what `_load` returns by name, which `__post_init__` sets."""

  def __post_init__(self) -> None:
    if self.max_len < 2:
      raise ValueError(
        f'max_len={self.max_len} must be at least 2, since the tokenizer adds one or '
        'two tokens'
      )
    package = console.require(self._package, 'text', type(self).__name__)
    path, content = self._read()
    try:
      attributes = {'_content': content, **self._load(package, path, content)}
    except Exception as e:  # The packages do not document their errors.
      raise ValueError(
        f"vocab_path='{self.vocab_path}' is not {self._kind}: {e}"
      ) from e
    for name, value in attributes.items():
      object.__setattr__(self, name, value)  # The fields are frozen.

  def __reduce__(self) -> tuple:
    return type(self), (self.vocab_path, self.max_len)

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """Returns the tokens of n strings, int32 [n, max_len].

    Bytes that are not UTF-8 count as U+FFFD. ValueError for a single string.
    """
    texts = _as_list(texts)
    rows = np.full([len(texts), self.max_len], self._padding, np.int32)
    for row, text in zip(rows, texts):
      with self._no_panic(text):
        tokens = self._tokens(text)
      row[: len(tokens)] = tokens
    return rows

  @contextlib.contextmanager
  def _no_panic(self, text: str) -> Iterator[None]:
    """Turns panics of Rust, which are no Exceptions, into a ValueError."""
    try:
      yield
    except BaseException as e:
      if type(e).__name__ != 'PanicException':
        raise
      raise ValueError(
        f"vocab_path='{self.vocab_path}' cannot tokenize {text!r:.80}: {e}; use "
        f'{self._kind}'
      ) from e

  def preprocess_tf(self, text: 'tf.Tensor') -> 'tf.Tensor':
    """Returns the tokens of a string scalar, int32 [max_len], in a TensorFlow graph.

    Python computes them, so the graph cannot be exported.
    """

    def tokenize(text: Any) -> np.ndarray:
      [row] = self([text])
      return row

    return image_files.call_python(tokenize, text, tf.int32, [self.max_len])

  @property
  def num_tokens(self) -> int:
    """Returns one more than the largest token: how many embeddings a model needs."""
    return self._num_tokens

  def content(self) -> bytes:
    """Returns a file from which the tokenizer can be made without any other."""
    return self._content

  @abc.abstractmethod
  def _load(self, package: Any, path: epath.Path, content: bytes) -> dict[str, Any]:
    """Returns what `_tokens` needs, `_padding`, `_num_tokens`, and the other fields."""

  @abc.abstractmethod
  def _tokens(self, text: str) -> list[int]:
    """Returns at most `max_len` tokens of a string."""

  def _read(self) -> tuple[epath.Path, bytes]:
    """Returns the local path and the content of the vocabulary."""
    try:
      path = self._fetched()
      with fetch.local_input(path) as local_path:
        return path, files.read(local_path, _LARGEST)
    except OSError as e:
      raise type(e)(
        f"vocab_path='{self.vocab_path}' cannot be read: {e}; use {self._kind}"
      ) from e

  def _fetched(self) -> epath.Path:
    """Returns the local path of the vocabulary; fetches a remote one."""
    uri = hub.parse(self.vocab_path) if hub.is_hub_path(self.vocab_path) else None
    if uri is None or uri.path_in_repo:
      return fetch.fetch(self.vocab_path)
    paths = [dataclasses.replace(uri, path_in_repo=x).to_uri() for x in self._files]
    for path in paths[:-1]:
      with contextlib.suppress(FileNotFoundError):
        return fetch.fetch(path)
    return fetch.fetch(paths[-1])


@dataclasses.dataclass(frozen=True)
class BertTokenizer(Tokenizer):
  """BERT's tokenizer: [CLS], then the pieces of lower-case words.

  The vocabulary is a text file with token i in line i: LiT's `<name>.txt`, or the
  `vocab.txt` of a lower-case model. transformers 5 has the same in `tokenizer.json`.

  Words are split as by tensorflow_text's BertTokenizer with `lower_case=True`, which
  the original uses: NFKC case folding, so that "℃" becomes "°c" and "ﬁ" "fi",
  without accents and invisible characters. They are cut into the longest pieces in
  the vocabulary (WordPiece; Devlin et al., NAACL 2019). There is no [SEP], and names
  of special tokens in a string, such as '[CLS]', are ordinary words. An unknown word
  is [UNK]; if the vocabulary has no such token, its number is the one after the last.
  """

  cls_token: int = dataclasses.field(init=False)

  _kind = 'a vocabulary of BERT, one token a line, among them [CLS]'
  _files = ('vocab.txt', 'tokenizer.json')

  def _load(self, package: Any, path: epath.Path, content: bytes) -> dict[str, Any]:
    if content.startswith(b'{'):
      content = '\n'.join(_word_pieces(json.loads(content))).encode()
    lines = text_files.lines(content, path)
    vocabulary = {token: number for number, token in enumerate(lines)}
    [cls] = _numbers(vocabulary.get, '[CLS]')
    vocabulary.setdefault('[UNK]', len(lines))
    model = package.models.WordPiece(
      vocabulary, unk_token='[UNK]', max_input_chars_per_word=_LONGEST
    )
    return {
      'cls_token': cls,
      '_padding': 0,
      '_num_tokens': _count(vocabulary),
      '_model': model,
      '_split': self._splitter(package),
      '_content': content,
    }

  def _splitter(self, package: Any) -> Callable[[str], list[str]]:
    """Returns a function that splits a string into words."""
    split = _words_of_tensorflow_text(package)

    def split_short(text: str) -> list[str]:
      pieces = split(text)
      return [word if len(word.encode()) <= _LONGEST else '[UNK]' for word in pieces]

    return split_short

  def _tokens(self, text: str) -> list[int]:
    tokens = [self.cls_token]
    for word in self._split(text):
      tokens += [piece.id for piece in self._model.tokenize(word)]
    return tokens[: self.max_len]


@dataclasses.dataclass(frozen=True)
class HuggingFaceBertTokenizer(BertTokenizer):
  """BertTokenizer with words split as by Hugging Face and BERT's own code.

  Words become lower case without NFKC, so that "℃" and "ﬁ" stay one character.
  """

  def _splitter(self, package: Any) -> Callable[[str], list[str]]:
    normalizer = package.normalizers.BertNormalizer(lowercase=True)
    return _split_by(package.pre_tokenizers.BertPreTokenizer(), normalizer)


@dataclasses.dataclass(frozen=True)
class SentencepieceTokenizer(Tokenizer):
  """SentencePiece (Kudo and Richardson, EMNLP 2018), such as LiT's `<name>.model`.

  The last token is always </s>, which LiT's text towers read out.
  """

  eos_token: int = dataclasses.field(init=False)

  _kind = 'a SentencePiece model with the token </s>'
  _files = ('spiece.model',)
  _package = 'sentencepiece'

  def _load(self, package: Any, path: epath.Path, content: bytes) -> dict[str, Any]:
    model = package.SentencePieceProcessor(model_proto=content)
    end = model.piece_to_id('</s>')
    if model.id_to_piece(end) != '</s>':  # <unk> if there is none.
      raise ValueError('there is no token </s>')
    return {
      'eos_token': end,
      '_padding': end,
      '_num_tokens': model.get_piece_size(),
      '_model': model,
    }

  def _tokens(self, text: str) -> list[int]:
    return self._model.encode(text)[: self.max_len - 1]


@dataclasses.dataclass(frozen=True)
class SiglipTokenizer(SentencepieceTokenizer):
  """SigLIP's tokenizer: SentencePiece of lower-case text without punctuation.

  Computes the same as Hugging Face's class of this name with
  `padding='max_length', truncation=True, split_special_tokens=True`; the published
  models have 64 tokens.
  """

  def _load(self, package: Any, path: epath.Path, content: bytes) -> dict[str, Any]:
    attributes = super()._load(package, path, content)
    return {**attributes, '_skipped': len(attributes['_model'].encode('<unk>'))}

  def _tokens(self, text: str) -> list[int]:
    # As in Hugging Face's: '▁', SentencePiece's space, begins the text, so that white
    # space after it is not stripped. The word in front decides between pieces of
    # equal scores: 'aaa' can be 'a', 'aa' or 'aa', 'a'.
    text = '▁' + text.replace('▁', ' ')
    text = re.sub(r'\s+', ' ', text.lower().translate(_NO_PUNCTUATION)).strip()
    pieces = self._model.encode('<unk>' + text)[self._skipped :]
    return pieces[: self.max_len - 1]


@dataclasses.dataclass(frozen=True)
class ClipTokenizer(Tokenizer):
  """CLIP's tokenizer: byte pairs between a start and an end token.

  Computes the same as Hugging Face's CLIPTokenizer with
  `padding='max_length', truncation=True`; the published models have 77 tokens.
  A truncated string keeps its end token. Names of special tokens in a string are
  these tokens, as in CLIP's own code. The padding is the one named in Hugging Face's
  files next to `tokenizer.json`, else the end token.
  """

  eos_token: int = dataclasses.field(init=False)

  _kind = 'the tokenizer.json of a CLIP model on Hugging Face'
  _files = ('tokenizer.json',)

  def _load(self, package: Any, path: epath.Path, content: bytes) -> dict[str, Any]:
    tokenizer = _from_json(package, content)
    stored_padding = (tokenizer.padding or {}).get('pad_token', _END)
    padding = _padding_in_configs(path) or stored_padding
    start, end, number = _numbers(tokenizer.token_to_id, _START, _END, padding)
    tokenizer.enable_padding(pad_id=number, pad_token=padding)
    content = tokenizer.to_str().encode()  # With the padding.
    tokenizer.no_padding()
    return {
      'eos_token': end,
      '_start': start,
      '_padding': number,
      '_num_tokens': _count(tokenizer.get_vocab()),
      '_tokenizer': tokenizer,
      '_content': content,
    }

  def _tokens(self, text: str) -> list[int]:
    tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
    return [self._start, *tokens[: self.max_len - 2], self.eos_token]


@dataclasses.dataclass(frozen=True)
class Siglip2Tokenizer(Tokenizer):
  """SigLIP 2's tokenizer: Gemma's byte pairs of lower-case text, then <eos>.

  Computes the same as Hugging Face's class of this name with
  `padding='max_length', truncation=True`; the published models have 64 tokens.
  There is no <bos>, and a truncated string keeps its <eos>. Names of special tokens
  in a string are these tokens.
  """

  eos_token: int = dataclasses.field(init=False)

  _kind = 'the tokenizer.json of a SigLIP 2 model on Hugging Face'
  _files = ('tokenizer.json',)

  def _load(self, package: Any, path: epath.Path, content: bytes) -> dict[str, Any]:
    tokenizer = _from_json(package, content)
    end, padding = _numbers(tokenizer.token_to_id, '<eos>', '<pad>')
    tokenizer.no_padding()
    normalizers = [package.normalizers.Lowercase()]
    if tokenizer.normalizer:
      normalizers.append(tokenizer.normalizer)
    tokenizer.normalizer = package.normalizers.Sequence(normalizers)
    return {
      'eos_token': end,
      '_padding': padding,
      '_num_tokens': _count(tokenizer.get_vocab()),
      '_tokenizer': tokenizer,
    }

  def _tokens(self, text: str) -> list[int]:
    tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
    return [*tokens[: self.max_len - 1], self.eos_token]


TOKENIZERS = {
  'bert': BertTokenizer,
  'hf_bert': HuggingFaceBertTokenizer,
  'sentencepiece': SentencepieceTokenizer,
  'clip': ClipTokenizer,
  'siglip': SiglipTokenizer,
  'siglip2': Siglip2Tokenizer,
}


def get_tokenizer(tokenizer_name: str) -> type[Tokenizer]:
  """Returns a class of TOKENIZERS, to be called with vocab_path and max_len."""
  if tokenizer_name not in TOKENIZERS:
    names = ', '.join(map(repr, TOKENIZERS))
    raise ValueError(
      f'tokenizer_name={tokenizer_name!r} is unknown: use one of {names}'
    )
  return TOKENIZERS[tokenizer_name]


def word_vocabulary(texts: Iterable[str]) -> list[str]:
  """Makes a vocabulary of whole words for BertTokenizer, for small experiments.

  It has SPECIAL, then all characters of the strings and their `##` forms, to spell other
  words, then all words by frequency.
  """
  package = console.require('tokenizers', 'text', 'word_vocabulary')
  split = _words_of_tensorflow_text(package)
  counts: collections.Counter[str] = collections.Counter()
  for text in _as_list(texts):
    counts.update(split(text))
  characters = sorted(set(''.join(counts)))
  inner = [f'##{character}' for character in characters]
  by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
  long_words = [word for word in by_frequency if len(word) > 1]
  return [*SPECIAL, *characters, *inner, *long_words]


def write_vocabulary(path: epath.PathLike, vocabulary: Sequence[str]) -> None:
  """Writes a vocabulary as BertTokenizer reads it, one token a line."""
  files.write(path, ''.join(f'{token}\n' for token in vocabulary))


def _words_of_tensorflow_text(package: Any) -> Callable[[str], list[str]]:
  """Returns the function of tensorflow_text's BertTokenizer that splits a string.

  Equal for all characters up to Unicode 12, where its tables end.
  """

  def replace(pattern: str, replacement: str) -> Any:
    return package.normalizers.Replace(package.Regex(pattern), replacement)

  def split_at(pattern: str, behavior: str) -> Any:
    return package.pre_tokenizers.Split(package.Regex(pattern), behavior)

  normalizer = package.normalizers.Sequence(
    [
      replace(r'\p{Default_Ignorable_Code_Point}', ''),
      package.normalizers.NFD(),
      replace(r'\p{Mn}', ''),  # Accents.
      replace(r'[\p{Cc}\p{Cf}]', ' '),  # Control characters.
    ]
  )
  splitter = package.pre_tokenizers.Sequence(
    [
      # White space of ASCII only; NFKC has made spaces of most others.
      split_at('[\t\n\f\r ]+', 'removed'),
      split_at(_ISOLATED, 'isolated'),
    ]
  )
  split = _split_by(splitter, normalizer)

  def split_folded(text: str) -> list[str]:
    for _ in range(2):  # Folding can make characters that NFKC changes.
      text = unicodedata.normalize('NFKC', text).casefold()
    return split(text)

  return split_folded


def _split_by(splitter: Any, normalizer: Any) -> Callable[[str], list[str]]:
  def split(text: str) -> list[str]:
    normalized = normalizer.normalize_str(text)
    return [word for word, _ in splitter.pre_tokenize_str(normalized)]

  return split


def _word_pieces(fields: dict) -> list[str]:
  """Returns the tokens in the tokenizer.json of a lower-case BERT, in order."""
  model, normalizer = fields.get('model'), fields.get('normalizer')
  if not isinstance(model, dict) or model.get('type') != 'WordPiece':
    raise ValueError('its model is not WordPiece')
  if not isinstance(normalizer, dict) or normalizer.get('lowercase') is not True:
    raise ValueError('its model tells capital letters from lower-case ones')
  if model.get('continuing_subword_prefix') != '##':
    raise ValueError('its pieces inside words do not begin with ##')
  vocabulary = model.get('vocab')
  if not isinstance(vocabulary, dict):
    raise ValueError('its vocab is not an object')
  tokens = sorted(vocabulary, key=vocabulary.__getitem__)
  if [vocabulary[token] for token in tokens] != [*range(len(tokens))]:
    raise ValueError(f'its {len(tokens)} tokens are not numbered from 0')
  if any({*token} & {'\n', '\r'} for token in tokens):
    raise ValueError('a token has a line break')
  return tokens


def _from_json(package: Any, content: bytes) -> Any:
  """Returns the package's Tokenizer of a tokenizer.json, without truncation."""
  tokenizer = package.Tokenizer.from_buffer(text_files.as_utf8(content))
  count = _count(tokenizer.get_vocab())
  if count > _MOST_TOKENS:
    raise ValueError(f'its largest token is {count - 1:,}, above {_MOST_TOKENS - 1:,}')
  growth = _growth(json.loads(content).get('normalizer'))
  if growth > _MOST_GROWTH:
    raise ValueError(
      f'its normalizer makes strings {growth:,} times as long, more than {_MOST_GROWTH}'
    )
  if dropout := getattr(tokenizer.model, 'dropout', None):
    raise ValueError(f'dropout={dropout} makes tokens random; set it to null')
  tokenizer.no_truncation()
  return tokenizer


def _growth(normalizer: Any) -> int:
  """Returns how many times as long a normalizer can make a string."""
  if not isinstance(normalizer, dict):
    return 1
  inner = normalizer.get('normalizers') or []
  return math.prod(map(_growth, inner)) * max(1, len(normalizer.get('content', '')))


def _numbers(find: Callable[[str], int | None], *tokens: str) -> list[int]:
  """Returns the numbers of tokens; ValueError if one is missing."""
  numbers = []
  for token in tokens:
    number = find(token)
    if number is None:
      raise ValueError(f'there is no token {token}')
    numbers.append(number)
  return numbers


def _count(vocabulary: Mapping[str, int]) -> int:
  """Returns one more than the largest number of a token."""
  return 1 + max(vocabulary.values())


def _padding_in_configs(path: epath.Path) -> str | None:
  """Returns the padding named in files next to a tokenizer.json, if any."""
  for name in _CONFIGS:
    file = path.parent / name
    if file.exists():
      with fetch.local_input(file) as local_path:
        config = files.read_json(local_path)
      token = config.get('pad_token') if isinstance(config, dict) else None
      token = token.get('content') if isinstance(token, dict) else token
      if token and not isinstance(token, str):
        raise ValueError(f'pad_token in {name} is {token!r:.80}, not a string')
      if token:
        return token
  return None


def _as_list(texts: Any) -> list[str]:
  """Returns texts as a list of strings; ValueError for a single string."""
  if hasattr(texts, 'numpy'):  # A tensor of TensorFlow.
    texts = texts.numpy()
  if isinstance(texts, str | bytes):
    raise ValueError(f'texts={texts!r} is a single string: pass a list, [text]')
  return [x.decode(errors='replace') if isinstance(x, bytes) else x for x in texts]
