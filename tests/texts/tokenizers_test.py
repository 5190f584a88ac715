"""Tests of tokenizers against Hugging Face's, SentencePiece, and literals."""

import dataclasses
import io
import json
import pickle
import random
import sys

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
import transformers
from transformers.models.bert import tokenization_bert_legacy

from vit_jax.texts import tokenizers
from vit_jax.weights import fetch
from vit_jax.weights import hub

# What texts are made of, by kind.
_PIECES = (
  ['ka', 'lo', 'mi', 'Ta', 'PHOTO', 'of', 'unaffable', 'Dogs', "don't", 'I'],
  ['1', '22', '3.14', '2024', '٣', '½', 'Ⅷ', 'x²'],
  ['é', 'Ñ', 'ü', 'ÅNGSTRÖM', 'façade', 'ß', 'İ', 'ı', 'Ǆ', 'Σας', 'ﬁn'],
  ['e\u0301', 'a\u0308\u0323', '\u0301', 'n\u0303o', 'ก\u0e33', 'q\u20dd'],
  [
    '世',
    '界',
    '日本語',
    'カタ',
    'ひら',
    '한국',
    '\U00020000',
    '豈',
    '『',
    '。',
  ],
  ['🙂', '👩\u200d🚀', '🇫🇷', '❤\ufe0f', '👍🏽'],
  ['!', '?', '...', '-', '—', '"', '“', '”', '$', '^', '`', '<', '}', '[', '_'],
  ['\t', '\n', '\r\n', '\x0b', '\x1c', '\x85', '\u2028', '\u00a0', '\u3000'],
  ['\0', '\x07', '\x7f', '\u200b', '\u00ad', '\ufeff', '\ufffd', '\u202e'],
  ['привет', 'мир', 'Ёж', 'שָׁלוֹם', 'سلام', 'हिन्दी', 'ΑΒΓ'],
  ['▁', '▁ka', '##lo', '</', 'unk', '[CLS', 'www.a.b/c?d=1', '@me', '#tag'],
)


def make_texts(count, seed):
  """Texts of all kinds; some empty, some of thousands of characters."""
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


TEXTS = make_texts(2000, seed=0)


def padded(rows, max_len, value):
  """Rows of numbers as an array, int32 [n, max_len]."""
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
  """Path of a vocabulary of characters, parts and words."""
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
  """Path of a model of SentencePiece, with the special tokens of T5."""
  return train_sentencepiece(folder / 'spiece.model')


def bytes_as_letters():
  """The letters that byte-level BPE writes for the 256 bytes.

  Printable ones of Latin-1 stand for themselves, all others for the letters from
  U+0100 on, in the order of the bytes.
  """
  plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = iter(range(256, 512))
  return [chr(x) if x in plain else chr(next(others)) for x in range(256)]


@pytest.fixture(scope='module')
def clip(folder):
  """(path of a tokenizer.json, Hugging Face's tokenizer that has written it)."""
  letters = sorted(bytes_as_letters())
  merges = [('k', 'a</w>'), ('k', 'a'), ('l', 'o</w>'), ('o', 'f</w>')]
  merges += [
    ('p', 'h'),
    ('o', 't'),
    ('ph', 'ot'),
    ('phot', 'o</w>'),
    ('Ã', '©'),
  ]
  merges += [
    ("'", 's</w>'),
    ('.', '.'),
    ('..', '.</w>'),
    ('ð', 'Ł'),
    ('ka', 'ka'),
  ]
  tokens = [*letters, *(f'{x}</w>' for x in letters)]
  tokens += [''.join(pair) for pair in merges]
  tokens += ['<|startoftext|>', '<|endoftext|>', '!!']
  theirs = transformers.CLIPTokenizer(
    vocab={token: i for i, token in enumerate(dict.fromkeys(tokens))},
    merges=merges,
  )
  theirs.save_pretrained(folder / 'clip')
  return folder / 'clip' / 'tokenizer.json', theirs


# --- The same tokens as elsewhere ---


@pytest.mark.parametrize('max_len', [2, 16])
def test_bert_is_that_of_hugging_face_without_sep(bert, max_len):
  """Both in pure Python, as published, and theirs of today."""
  ours = tokenizers.BertTokenizer(bert, max_len)
  got = ours(TEXTS)
  slow = tokenization_bert_legacy.BertTokenizerLegacy(str(bert))
  fast = transformers.BertTokenizer.from_pretrained(bert.parent)
  for theirs in (slow, fast):
    rows = [
      theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
      for text in TEXTS
    ]
    rows = [[theirs.cls_token_id, *row[: max_len - 1]] for row in rows]
    assert_same(got, padded(rows, max_len, 0))
  assert ours.cls_token == theirs.cls_token_id == 2


@pytest.mark.parametrize('max_len', [2, 16])
def test_sentencepiece_is_the_package_of_that_name_with_eos(spiece, max_len):
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


@pytest.mark.parametrize('max_len', [2, 16, 64])
def test_siglip_is_that_of_hugging_face(spiece, max_len):
  ours = tokenizers.SiglipTokenizer(spiece, max_len)
  theirs = transformers.SiglipTokenizer(str(spiece))
  assert_same(ours(TEXTS), hugging_face(theirs, TEXTS, max_len))
  special = ['</s> ka', 'ka</s>lo', '<unk>', 'ka <pad> </s>']
  want = hugging_face(theirs, special, max_len, split_special_tokens=True)
  assert_same(ours(special), want, special)


@pytest.mark.parametrize('max_len', [2, 16, 77])
def test_clip_is_that_of_hugging_face(clip, max_len):
  path, theirs = clip
  texts = [*TEXTS, 'ka<|endoftext|> lo', '<|startoftext|>']
  ours = tokenizers.ClipTokenizer(path, max_len)
  assert_same(ours(texts), hugging_face(theirs, texts, max_len), texts)
  assert ours.eos_token == theirs.eos_token_id
