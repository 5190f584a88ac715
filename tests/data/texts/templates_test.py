"""Tests of the templates for zero-shot classification."""

import pytest

from vit_jax.data.texts import templates


def test_clip_templates():
  """Counts and samples from CLIP's notebook Prompt_Engineering_for_ImageNet."""
  full = templates.TEMPLATES['full']
  assert len(full) == len(set(full)) == 80
  for text in (
    'a bad photo of a {}.', 'a photo of many {}.', 'a sculpture of a {}.',
    'a photo of the hard to see {}.', 'a black and white photo of the {}.',
    'a jpeg corrupted photo of the {}.', 'the plushie {}.', 'a origami {}.',
    'a photo of a cool {}.', 'itap of my {}.', 'a tattoo of the {}.',
    'a photo of the {}.', 'graffiti of the {}.', 'the {} in a video game.',
  ):  # fmt: skip
    assert text in full
  short = templates.TEMPLATES['short']
  assert len(short) == 8
  assert set(short) - set(full) == {'{}'}


def test_filled_templates_are_grouped_by_class():
  assert templates.fill(['cat', 'dog'], ['a {}', '{}s']) == [
    'a cat', 'cats', 'a dog', 'dogs'
  ]  # fmt: skip


def test_user_templates(tmp_path):
  assert templates.get('a {} in the snow') == ('a {} in the snow',)
  file = tmp_path / 'mine.txt'
  file.write_text('a {}\n\nmy {}\n')
  assert templates.get(str(file)) == ('a {}', 'my {}')
  file.write_text('a cat\n')
  with pytest.raises(ValueError, match=r"'a cat' .*\{\}"):
    templates.get(str(file))
  file.write_text('\n')
  with pytest.raises(ValueError, match='has no lines'):
    templates.get(str(file))
  with pytest.raises(FileNotFoundError, match="templates='.*none.txt'"):
    templates.get(str(tmp_path / 'none.txt'))


def test_word_lists(tmp_path):
  assert templates.listed('a cat; a dog;', 'classes') == ['a cat', 'a dog']
  file = tmp_path / 'words.txt'
  file.write_text('one\ntwo\n')
  assert templates.listed(str(file), 'classes') == ['one', 'two']
