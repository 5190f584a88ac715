"""Tests of the HTML page: it shows all figures and overwrites nothing."""

import re
import types

import pytest

from vit_jax.figures import html_page

ENTRY = types.SimpleNamespace(
  name='filters', title='Filters <1>', caption='What & why.', source='figure 7'
)
SECTION = (ENTRY, {'filters': b'png'})


def test_page_shows_the_figures_of_its_folder(tmp_path):
  out = tmp_path / 'new' / 'figures'
  facts, missing = {'classes': '10'}, {'confusion': 'no <run>'}
  html_page.write(out, 'Inside <ViT>', facts, [SECTION], missing)
  assert sorted(p.name for p in out.iterdir()) == ['filters.png', 'index.html']
  assert (out / 'filters.png').read_bytes() == b'png'
  text = (out / 'index.html').read_text()
  assert re.findall(r'(?:src|href)="([^"]*)"', text) == ['filters.png']
  assert not re.search('<(script|link|iframe)', text)
  for words in (
    'Inside &lt;ViT&gt;',
    'Filters &lt;1&gt;',
    'What &amp; why.',
    'no &lt;run&gt;',
  ):
    assert words in text


def test_existing_files_are_not_overwritten(tmp_path):
  empty, full = tmp_path / 'empty', tmp_path / 'full'
  empty.mkdir()
  full.mkdir()
  (full / 'mine.txt').write_text('precious')
  html_page.write(empty, 'a', {}, [SECTION], {})
  assert (empty / 'index.html').exists()
  for path in (empty, full, full / 'mine.txt'):
    with pytest.raises(FileExistsError, match='pass another folder') as error:
      html_page.write(path, 'a', {}, [SECTION], {})
    assert str(path) in str(error.value)
  assert [p.name for p in full.iterdir()] == ['mine.txt']
