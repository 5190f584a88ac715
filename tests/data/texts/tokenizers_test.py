"""Tests of tokenizers against Hugging Face's, SentencePiece, and literals."""

# ruff: noqa: RUF001

import dataclasses
import io
import json
import pickle
import random
import sys

from etils import epath
import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
from tokenizers import processors
import transformers
from transformers.models.bert import tokenization_bert_legacy

from vit_jax.data.texts import tokenizers
from vit_jax.weights import hub

# Building blocks of the texts, by kind.
_PIECES = (
  ['ka', 'lo', 'mi', 'Ta', 'PHOTO', 'of', 'unaffable', 'Dogs', "don't", 'I'],
  ['1', '22', '3.14', '2024', '٣', '½', 'Ⅷ', 'x²'],
  ['é', 'Ñ', 'ü', 'ÅNGSTRÖM', 'façade', 'ß', 'İ', '\u0131', 'Ǆ', 'Σας', 'ﬁn'],
  ['e\u0301', 'a\u0308\u0323', '\u0301', 'n\u0303o', 'ก\u0e33', 'q\u20dd'],
  ['世', '界', '日本語', 'カタ', 'ひら', '한국'],
  ['\U00020000', '豈', '『', '。'],
  ['🙂', '👩\u200d🚀', '🇫🇷', '❤\ufe0f', '👍🏽'],
  ['!', '?', '...', '-', '—', '"', '“', '”', '$', '^', '`', '<', '}', '[', '_'],
  ['\t', '\n', '\r\n', '\x0b', '\x1c', '\x85', '\u2028', '\u00a0', '\u3000'],
  ['\0', '\x07', '\x7f', '\u200b', '\u00ad', '\ufeff', '\ufffd', '\u202e'],
  ['привет', 'мир', 'Ёж', 'שָׁלוֹם', 'سلام', 'हिन्दी', 'ΑΒΓ'],
  ['▁', '▁ka', '##lo', '</', 'unk', '[CLS', 'www.a.b/c?d=1', '@me', '#tag'],
)


def make_texts(count, seed):
  """Texts of all kinds; some are empty, some have thousands of characters."""
  rng = random.Random(seed)
  texts = ['', ' ', '!', '! ka', ' ka lo', 'ka' * 2000, 'ka lo ' * 1000]
  texts += ['x' * 100, 'x' * 101, 'the end. ', '... ', "it's I'll we'd"]
  while len(texts) < count:
    kinds = rng.choices(_PIECES, k=rng.randint(1, 3))
    kinds.append(_PIECES[0])
    words = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 14))]
    gaps = rng.choice([[' '], ['', ' '], [' ', '  ', '']])
    texts.append(''.join(word + rng.choice(gaps) for word in words))
  return texts


TEXTS = make_texts(700, seed=0)


def padded(rows, max_len, value):
  """Rows of tokens as an array, int32 [n, max_len]."""
  rows = [[*row, *[value] * (max_len - len(row))] for row in rows]
  return np.array(rows, np.int32)


def assert_same(got, want, texts=TEXTS):
  """Compares row by row, so that a failure shows the text."""
  assert (got.dtype, got.shape) == (np.int32, want.shape)
  for text, row, expected in zip(texts, got.tolist(), want.tolist()):
    assert row == expected, repr(text)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('vocabularies')


@pytest.fixture(scope='module')
def bert(folder):
  """Path of a vocabulary of characters, subwords and words."""
  rng = random.Random(1)
  kept = ''.join(text for text in TEXTS[:500] if len(text) < 100).lower()
  characters = sorted({x for x in kept if not x.isspace() and x != '\ufffd'})
  words = ['ka', 'lo', '##ka', '##lo', 'un', '##aff', '##able', 'dog', '##s']
  words += ['photo', 'of', '##of', 'привет', '日本', '##22', '20', 'angstrom']
  words += rng.sample(sorted({kept[i : i + 3] for i in range(2000)}), 200)
  words = [word for word in words if word.split() == [word]]
  tokens = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *characters]
  tokens += [f'##{x}' for x in characters if rng.random() < 0.8] + words
  path = folder / 'vocab.txt'
  path.write_text('\n'.join(dict.fromkeys(tokens)) + '\n')
  return path


def train_sentencepiece(path, **options):
  content = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=(x.replace('\0', '') for x in TEXTS[:600] if len(x) < 99),
    model_writer=content,
    vocab_size=300,
    minloglevel=2,
    **{'unk_id': 2, 'eos_id': 1, 'bos_id': -1, 'pad_id': 0, **options},
  )
  path.write_bytes(content.getvalue())
  return path


@pytest.fixture(scope='module')
def spiece(folder):
  """Path of a SentencePiece model with the special tokens of T5."""
  return train_sentencepiece(folder / 'spiece.model')


def bytes_as_letters():
  """The letters that represent the 256 bytes in byte-level BPE.

  Printable Latin-1 characters represent themselves; all other bytes are mapped, in
  order, to the letters starting at U+0100.
  """
  plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = iter(range(256, 512))
  return [chr(x) if x in plain else chr(next(others)) for x in range(256)]


@pytest.fixture(scope='module')
def clip(folder):
  """(path of a tokenizer.json, the Hugging Face tokenizer that wrote it)."""
  letters = sorted(bytes_as_letters())
  pairs = (
    'k a</w>', 'k a', 'l o</w>', 'o f</w>', 'p h', 'o t', 'ph ot', 'phot o</w>',
    'Ã ©', "' s</w>", '. .', '.. .</w>', 'ð Ł', 'ka ka',
  )  # fmt: skip
  merges = [tuple(pair.split()) for pair in pairs]
  tokens = [*letters, *(f'{x}</w>' for x in letters)]
  tokens += [''.join(pair) for pair in merges]
  tokens += ['<|startoftext|>', '<|endoftext|>', '!!']
  theirs = transformers.CLIPTokenizer(
    vocab={token: i for i, token in enumerate(dict.fromkeys(tokens))},
    merges=merges,
  )
  theirs.save_pretrained(folder / 'clip')
  return folder / 'clip' / 'tokenizer.json', theirs


@pytest.fixture(scope='module')
def gemma(folder):
  """(path of a tokenizer.json like SigLIP 2's, its Hugging Face tokenizer)."""
  letters = sorted({x for text in TEXTS[:400] for x in text.lower()} - {' '})
  tokens = ['<pad>', '<eos>', '<bos>', '<unk>', '<mask>', '▁']
  tokens += [f'<0x{i:02X}>' for i in range(256)]
  merges = [('▁', 'l'), ('k', 'a'), ('▁l', 'o'), ('p', 'h'), ('▁', 'ka')]
  tokens += [*letters[::2], *'kalophK', *map(''.join, merges)]
  tokens = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
  theirs = transformers.Siglip2Tokenizer(
    vocab=tokens, merges=merges, padding_side='right'
  )
  # Like the published files, which do not lower-case and which append <eos>.
  backend = theirs.backend_tokenizer
  backend.post_processor = processors.TemplateProcessing(
    single='$A <eos>', special_tokens=[('<eos>', tokens['<eos>'])]
  )
  stored = json.loads(backend.to_str())
  _, stored['normalizer'] = stored['normalizer']['normalizers']
  (folder / 'gemma').mkdir()
  (folder / 'gemma' / 'tokenizer.json').write_text(json.dumps(stored))
  return folder / 'gemma' / 'tokenizer.json', theirs


# --- Comparisons with other implementations ---


def test_bert_matches_hugging_face_without_sep(bert):
  """Both the original tokenizer in pure Python and the current fast one."""
  slow = tokenization_bert_legacy.BertTokenizerLegacy(str(bert))
  fast = transformers.BertTokenizer.from_pretrained(bert.parent)
  for theirs in (slow, fast):
    rows = [
      theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
      for text in TEXTS
    ]
    for max_len in (2, 16):
      ours = tokenizers.HuggingFaceBertTokenizer(bert, max_len)
      want = [[theirs.cls_token_id, *row[: max_len - 1]] for row in rows]
      assert_same(ours(TEXTS), padded(want, max_len, 0))
      assert ours.cls_token == theirs.cls_token_id == 2


# Texts, and their words according to tensorflow_text 2.18.1 (TensorFlow 2.18.1):
# BasicTokenizer(lower_case=True) of its BertTokenizer. Recorded from a run.
WORDS_OF_TENSORFLOW_TEXT = (
  ('25 ℃ in the café… №7', '25 °c in the cafe . . . no7'),
  ('ＦＵＬＬ－ｗｉｄｔｈ ｶﾞ', 'full - width カ'),
  ('½ cup, x² ≠ 3µm™ ®', '1⁄2 cup , x2 = 3μmtm ®'),
  ('ﬁne oﬃce ﬅ ǰ ŉ', 'fine office st j ʼn'),
  ('İstanbul ISPARTA ıI', 'istanbul isparta ıi'),
  ('e\u0301te\u0301 ẛ\u0323 A\u030a', 'ete s a'),
  ('so\xadft zero\u200bwidth \ufeffbom', 'soft zerowidth bom'),
  ('tab\x09nul\x07bell\x85nel', 'tab nul bell nel'),
  ('世界peace 豈更 \U0002f800', '世 界 peace 豈 更 丽'),
  ('👩\u200d🚀 ❤\ufe0f 🇫🇷 👍🏽', '👩🚀 ❤ 🇫🇷 👍🏽'),
  (
    'Ǆ ǅ ǆ \ufdfa ﹏',
    'dz dz dz \u0635\u0644\u0649 \u0627\u0644\u0644\u0647 \u0639\u0644\u064a\u0647 \u0648\u0633\u0644\u0645 _',
  ),
  ('한국어 ㈱ ㋿ ㍿', '\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165 ( 株 ) 令 和 株 式 会 社'),
  ("don't—stop «now» ¿qué?", "don ' t — stop « now » ¿ que ?"),
  ('$5 + £3 = €8 ^_^ `x`', '$ 5 + £3 = €8 ^ _ ^ ` x `'),
  (
    '\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd \u0633\u064e\u0644\u064e\u0627\u0645',
    '\u05e9\u05dc\u05d5\u05dd \u0633\u0644\u0627\u0645',
  ),
  ('ह\u093fन\u094dद\u0940 กำ ๑', 'ह\u093fनद\u0940 กา ๑'),
  ('[CLS] [unused1] <s>', '[ cls ] [ unused1 ] < s >'),
)  # fmt: skip


def test_bert_reads_the_tokenizer_json_of_transformers_5(bert, tmp_path):
  lines = bert.read_text().removesuffix('\n').split('\n')
  vocabulary = {token: number for number, token in enumerate(lines)}
  transformers.BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path)
  assert not (tmp_path / 'vocab.txt').exists()
  for cls in tokenizers.BertTokenizer, tokenizers.HuggingFaceBertTokenizer:
    ours, want = cls(tmp_path / 'tokenizer.json', 16), cls(bert, 16)
    assert_same(ours(TEXTS), want(TEXTS))
    assert ours.num_tokens == want.num_tokens == len(lines)
    assert ours.content().decode().split('\n') == lines


@pytest.mark.parametrize(
  'model, lowercase, message',
  [
    ({'type': 'BPE'}, True, 'not WordPiece'),
    ({'vocab': {'[CLS]': 0, 'a': 2}}, True, '2 tokens are not numbered from 0'),
    ({'vocab': {'[CLS]': 0, 'a\n': 1}}, True, 'line break'),
    ({'vocab': ['[CLS]']}, True, 'not an object'),
    ({'continuing_subword_prefix': ''}, True, 'do not begin with ##'),
    ({}, False, 'capital letters'),
  ],
)
def test_other_tokenizer_jsons_of_bert_are_rejected(
  tmp_path, model, lowercase, message
):
  default = dict(type='WordPiece', continuing_subword_prefix='##', vocab={'[CLS]': 0})
  fields = {'model': {**default, **model}, 'normalizer': {'lowercase': lowercase}}
  path = tmp_path / 'tokenizer.json'
  path.write_text(json.dumps(fields))
  with pytest.raises(ValueError, match=f"vocab_path='{path}' .*{message}"):
    tokenizers.BertTokenizer(path, 8)


@pytest.mark.parametrize(('text', 'words'), WORDS_OF_TENSORFLOW_TEXT)
def test_bert_splits_words_like_tensorflow_text(tmp_path, text, words):
  words = words.split(' ')
  vocabulary = ['[PAD]', '[UNK]', '[CLS]', *dict.fromkeys(words)]
  path = tmp_path / 'vocab.txt'
  tokenizers.write_vocabulary(path, vocabulary)
  got = tokenizers.BertTokenizer(path, 40)([text])[0]
  assert [vocabulary[i] for i in got if i] == ['[CLS]', *words]


def test_bert_words_have_at_most_100_bytes(tmp_path):
  """As in tensorflow_text (recorded as above). Hugging Face counts characters."""
  words = ['a' * 100, 'a' * 101, 'ы' * 50, 'ы' * 51]
  path = tmp_path / 'vocab.txt'
  tokenizers.write_vocabulary(path, ['[PAD]', '[UNK]', '[CLS]', *words])
  for kind, want in (
    (tokenizers.BertTokenizer, [2, 3, 1, 5, 1]),
    (tokenizers.HuggingFaceBertTokenizer, [2, 3, 1, 5, 6]),
  ):
    assert kind(path, 5)([' '.join(words)]).tolist() == [want]


@pytest.mark.parametrize('max_len', [2, 16])
def test_sentencepiece_matches_the_package_with_eos(spiece, max_len):
  ours = tokenizers.SentencepieceTokenizer(spiece, max_len)
  theirs = sentencepiece.SentencePieceProcessor(model_file=str(spiece))
  rows = [theirs.encode(text)[: max_len - 1] for text in TEXTS]
  got = ours(TEXTS)
  assert_same(got, padded(rows, max_len, theirs.eos_id()))
  assert ours.eos_token == theirs.eos_id() == 1
  assert (got[:, -1] == 1).all()


def hugging_face(theirs, texts, max_len, **kwargs):
  options = {'padding': 'max_length', 'truncation': True, 'max_length': max_len}
  return np.array(theirs(texts, **options, **kwargs)['input_ids'], np.int32)


@pytest.mark.parametrize('rule', ['nmt_nfkc', 'identity'])
@pytest.mark.parametrize('max_len', [2, 64])
def test_siglip_matches_hugging_face(folder, rule, max_len):
  """Models that collapse white space themselves, and models that do not."""
  path = folder / f'{rule}.model'
  path.exists() or train_sentencepiece(path, normalization_rule_name=rule)
  ours = tokenizers.SiglipTokenizer(path, max_len)
  theirs = transformers.SiglipTokenizer(str(path))
  assert_same(ours(TEXTS), hugging_face(theirs, TEXTS, max_len))
  special = ['</s> ka', 'ka</s>lo', '<unk>', 'ka <pad> </s>']
  want = hugging_face(theirs, special, max_len, split_special_tokens=True)
  assert_same(ours(special), want, special)


@pytest.mark.parametrize('max_len', [2, 16])
def test_clip_matches_hugging_face(clip, max_len):
  path, theirs = clip
  texts = [*TEXTS, 'ka<|endoftext|> lo', '<|startoftext|>']
  ours = tokenizers.ClipTokenizer(path, max_len)
  assert_same(ours(texts), hugging_face(theirs, texts, max_len), texts)
  assert ours.eos_token == theirs.eos_token_id


@pytest.mark.parametrize('max_len', [2, 16])
def test_siglip2_matches_hugging_face(gemma, max_len):
  path, theirs = gemma
  texts = [*TEXTS, 'KA<eos> lo', '<bos>', 'a  b   c']
  ours = tokenizers.Siglip2Tokenizer(path, max_len)
  got = ours(texts)
  assert_same(got, hugging_face(theirs, texts, max_len), texts)


@pytest.mark.parametrize(
  'name, value',
  [
    ('tokenizer_config.json', '!!'),
    ('special_tokens_map.json', {'content': '!!', 'lstrip': False}),
  ],
)
def test_clip_reads_the_padding_token_from_an_adjacent_file(
  clip, tmp_path, name, value
):
  """Stable Diffusion 2 does not pad with the end token."""
  path, theirs = clip
  here, alone = tmp_path / 'tokenizer.json', tmp_path / 'alone' / 'tokenizer.json'
  here.write_bytes(path.read_bytes())
  start, end, other = theirs.convert_tokens_to_ids(
    ['<|startoftext|>', '<|endoftext|>', '!!']
  )
  assert tokenizers.ClipTokenizer(here, 4)(['']).tolist() == [[start, end, end, end]]
  (tmp_path / name).write_text(json.dumps({'pad_token': value}))
  ours = tokenizers.ClipTokenizer(here, 4)
  alone.parent.mkdir()
  alone.write_bytes(ours.content())  # Includes the padding token.
  for tokenizer in (ours, tokenizers.ClipTokenizer(alone, 4)):
    assert tokenizer(['']).tolist() == [[start, end, other, other]]


def test_tokenizer_json_with_dropout_is_rejected(clip, tmp_path):
  stored = json.loads(clip[0].read_text())
  stored['model']['dropout'] = 0.1
  (tmp_path / 'tokenizer.json').write_text(json.dumps(stored))
  with pytest.raises(ValueError, match='tokenizer.json.*dropout=0.1'):
    tokenizers.ClipTokenizer(tmp_path / 'tokenizer.json', 8)


def test_truncation_and_padding_in_tokenizer_json_are_ignored(clip, tmp_path):
  path, _ = clip
  stored = json.loads(path.read_text())
  stored['truncation'] = {
    'direction': 'Right', 'max_length': 3, 'strategy': 'LongestFirst', 'stride': 0
  }  # fmt: skip
  stored['padding'] = {
    'strategy': {'Fixed': 9}, 'direction': 'Left', 'pad_to_multiple_of': None,
    'pad_id': 7, 'pad_type_id': 0, 'pad_token': '!!',
  }  # fmt: skip
  (tmp_path / 'tokenizer.json').write_text(json.dumps(stored), 'utf-8-sig')
  got = tokenizers.ClipTokenizer(tmp_path / 'tokenizer.json', 7)(['ka lo of'])
  plain = tokenizers.ClipTokenizer(path, 7)(['ka lo of'])
  assert got[0, :5].tolist() == plain[0, :5].tolist()
  assert got[0, 5:].tolist() == 2 * [stored['model']['vocab']['!!']]


# --- Literal examples ---


@pytest.fixture
def small(tmp_path):
  """Path of a vocabulary of [PAD], [UNK], [CLS] and a few words, as on Windows."""
  tokens = ['[PAD]', '[UNK]', '[CLS]', 'un', '##aff', '##able', 'cafe', '!']
  (tmp_path / 'vocab.txt').write_text('\r\n'.join(tokens), 'utf-8-sig')
  return tmp_path / 'vocab.txt'


def test_words_are_split_into_the_longest_pieces(small):
  got = tokenizers.BertTokenizer(str(small), 6)(
    ['Unaffable!', 'CAFÉ cafe\u0301', '', 'unknown [CLS]', 5 * 'un!']
  )
  assert got.tolist() == [
    [2, 3, 4, 5, 7, 0],
    [2, 6, 6, 0, 0, 0],
    [2, 0, 0, 0, 0, 0],
    [2, 1, 1, 1, 1, 0],  # '[', 'cls' and ']' are not in the vocabulary.
    [2, 3, 7, 3, 7, 3],
  ]


@pytest.mark.parametrize('end', ['', '\n'])
@pytest.mark.parametrize('name', ['bert', 'hf_bert'])
def test_without_unk_unknown_words_have_the_number_after_the_last(tmp_path, name, end):
  """The vocabulary and the tokens are those of the original's preprocess_test."""
  (tmp_path / 'vocab.txt').write_text('[PAD]\n[CLS]\nsome\ntest\nwords' + end)
  tokenizer = tokenizers.get_tokenizer(name)(tmp_path / 'vocab.txt', max_len=3)
  got = tokenizer(['some', 'test', 'words', 'xxx', 'test 101' + 101 * 'x'])
  assert got.tolist() == [[1, 2, 0], [1, 3, 0], [1, 4, 0], [1, 5, 0], [1, 3, 5]]


def test_bytes_and_arrays_are_accepted(small):
  tokenizer = tokenizers.BertTokenizer(small, 3)
  texts = ['cafe', '!']
  for inputs in (np.array(texts), [b'cafe', b'!'], tf.constant(texts), iter(texts)):
    assert tokenizer(inputs).tolist() == [[2, 6, 0], [2, 7, 0]]
  # Invalid UTF-8 becomes U+FFFD, which is [UNK].
  assert tokenizer([b'\xff!']).tolist() == [[2, 1, 7]]
  assert tokenizer([]).shape == (0, 3)


def test_graph_mode_gives_the_same_tokens(bert, spiece, clip, gemma):
  texts = TEXTS[:60]
  paths = {'bert': bert, 'hf_bert': bert, 'clip': clip[0], 'siglip2': gemma[0]}
  for name, kind in tokenizers.TOKENIZERS.items():
    tokenizer = kind(paths.get(name, spiece), 16)
    data = tf.data.Dataset.from_tensor_slices(texts).map(
      tokenizer.preprocess_tf, num_parallel_calls=2
    )
    assert data.element_spec == tf.TensorSpec([16], tf.int32)
    [got] = data.batch(len(texts)).as_numpy_iterator()
    assert_same(got, tokenizer(texts), texts)
    eager = tokenizer.preprocess_tf(tf.constant(texts[30])).numpy()
    assert_same(eager[None], got[30:31], texts[30:31])


def test_tokenizers_compare_hash_and_pickle_by_their_fields(small):
  tokenizer = tokenizers.BertTokenizer(str(small), 6)
  assert dataclasses.asdict(tokenizer) == {
    'vocab_path': str(small), 'max_len': 6, 'cls_token': 2
  }  # fmt: skip
  same = tokenizers.BertTokenizer(vocab_path=str(small), max_len=6)
  assert {tokenizer: 1}[same] == 1
  assert tokenizer != dataclasses.replace(tokenizer, max_len=7)
  copied = pickle.loads(pickle.dumps(tokenizer))
  assert copied == tokenizer
  assert copied(['cafe']).tolist() == [[2, 6, 0, 0, 0, 0]]


def test_word_vocabulary_spells_unknown_words(tmp_path):
  vocabulary = tokenizers.word_vocabulary(['A cat, a DOG.', 'the dog', 'a é'])
  characters = [*',.acdeghot']
  assert vocabulary == [
    '[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *characters,
    *(f'##{x}' for x in characters), 'dog', 'cat', 'the',
  ]  # fmt: skip
  tokenizers.write_vocabulary(tmp_path / 'words.txt', vocabulary)
  tokenizer = tokenizers.BertTokenizer(tmp_path / 'words.txt', 6)
  got = tokenizer(['a cat', 'Goth', 'sea'])
  assert [[vocabulary[i] for i in row if i] for row in got] == [
    ['[CLS]', 'a', 'cat'],
    ['[CLS]', 'g', '##o', '##t', '##h'],
    ['[CLS]', '[UNK]'],
  ]
  with pytest.raises(ValueError, match="texts='a cat'"):
    tokenizers.word_vocabulary('a cat')


# --- Vocabularies on the Hub ---


def test_vocabulary_on_the_hub_needs_no_file_name(small, monkeypatch):
  fetched = []
  monkeypatch.setattr(
    hub, 'fetch', lambda path: fetched.append(path) or epath.Path(small)
  )
  paths = 'https://huggingface.co/a/b', 'hf://a/b@v1', 'hf://a/b/vocab.txt'
  for path in paths:
    tokenizer = tokenizers.BertTokenizer(path, 3)
    assert tokenizer(['cafe']).tolist() == [[2, 6, 0]]
    assert tokenizer.vocab_path == path
  want = 'hf://a/b/vocab.txt', 'hf://a/b@v1/vocab.txt', 'hf://a/b/vocab.txt'
  assert [*map(hub.parse, fetched)] == [*map(hub.parse, want)]


def test_bert_on_the_hub_may_have_only_a_tokenizer_json(bert, tmp_path, monkeypatch):
  transformers.BertTokenizer.from_pretrained(bert.parent).save_pretrained(tmp_path)
  names = []

  def fetch(path):
    names.append(hub.parse(path).path_in_repo)
    if names[-1] == 'vocab.txt':
      raise FileNotFoundError(path)
    return epath.Path(tmp_path / names[-1])

  monkeypatch.setattr(hub, 'fetch', fetch)
  ours = tokenizers.BertTokenizer('hf://a/b', 16)
  assert names == ['vocab.txt', 'tokenizer.json']
  assert_same(ours(TEXTS), tokenizers.BertTokenizer(bert, 16)(TEXTS))


# --- Errors ---


@pytest.mark.parametrize('name', tokenizers.TOKENIZERS)
def test_unreadable_vocabularies(tmp_path, name):
  tokenizer = tokenizers.get_tokenizer(name)
  nowhere = tmp_path / 'nowhere'
  with pytest.raises(FileNotFoundError, match=f"vocab_path='{nowhere}'"):
    tokenizer(nowhere, 8)
  nowhere.write_bytes(b'')
  with pytest.raises(
    ValueError, match=f"vocab_path='{nowhere}'.*{tokenizer._kind[:9]}"
  ):
    tokenizer(nowhere, 8)


@pytest.mark.parametrize(
  'name, content, words',
  [
    ('bert', b'[PAD]\n[UNK]\na\n', r'BERT.*\[CLS\]$'),
    ('hf_bert', b'[PAD]\n[UNK]\na\n', r'BERT.*\[CLS\]$'),
    ('sentencepiece', b'[CLS]\n', 'SentencePiece'),
    ('clip', b'{}', 'tokenizer.json'),
  ],
)
def test_vocabularies_of_another_tokenizer(tmp_path, name, content, words):
  path = tmp_path / 'vocabulary'
  path.write_bytes(content)
  with pytest.raises(ValueError, match=f"vocab_path='{path}' .*{words}"):
    tokenizers.get_tokenizer(name)(path, 8)


def _large(fields):
  fields['model']['vocab']['a'] = 2**31


def _growing(fields):
  step = {'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 10 * 'a'}
  fields['normalizer'] = {'type': 'Sequence', 'normalizers': 9 * [step]}


def _slow(fields):
  split = {'type': 'Split', 'pattern': {'Regex': '(a+)+$'}, 'behavior': 'Isolated'}
  fields['pre_tokenizer'] = {**split, 'invert': False}


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
  'change, words',
  [
    (_large, 'largest token is 2,147,483,648'),
    (_growing, 'strings 1,000,000,000 times as long'),
    (_slow, "cannot tokenize 'aaa"),
  ],
)
def test_hostile_tokenizers_are_rejected(tmp_path, clip, change, words):
  """They would fill the memory, or end in a panic of Rust."""
  fields = json.loads(clip[0].read_text())
  change(fields)
  path = tmp_path / 'tokenizer.json'
  path.write_text(json.dumps(fields))
  with pytest.raises(ValueError, match=f"vocab_path='{path}' .*{words}"):
    tokenizers.ClipTokenizer(path, 8)([30 * 'a' + '!'])


def test_models_without_an_end_token(tmp_path, clip):
  path = train_sentencepiece(tmp_path / 'no_end.model', eos_id=-1)
  with pytest.raises(ValueError, match='SentencePiece.*</s>$'):
    tokenizers.SentencepieceTokenizer(path, 8)
  path = tmp_path / 'tokenizer.json'
  path.write_text(clip[0].read_text().replace('<|endoftext|>', '<|end|>'))
  with pytest.raises(ValueError, match=r'CLIP.*<\|endoftext\|>$'):
    tokenizers.ClipTokenizer(path, 8)


def test_wrong_arguments(small):
  with pytest.raises(ValueError, match="tokenizer_name='word2vec'.*'bert', .*'siglip'"):
    tokenizers.get_tokenizer('word2vec')
  with pytest.raises(ValueError, match='max_len=1 .*2'):
    tokenizers.BertTokenizer(small, 1)
  tokenizer = tokenizers.BertTokenizer(small, 3)
  for single in ('cafe', tf.constant('cafe')):
    with pytest.raises(ValueError, match='texts=.*cafe'):
      tokenizer(single)


def test_missing_package_is_reported(small, monkeypatch):
  monkeypatch.setitem(sys.modules, 'sentencepiece', None)
  message = r"SiglipTokenizer needs sentencepiece: pip install .*\[text\]'"
  with pytest.raises(ImportError, match=message):
    tokenizers.SiglipTokenizer(small, 8)
