"""Tests of the page: that it needs nothing else, and that nothing is overwritten."""

import base64
import html.parser
import types

import pytest

from vit_jax.figures import html_page

ENTRY = types.SimpleNamespace(
  name='filters', title='Filters <1>', caption='What & why.', source='figure 7'
)
SECTION = (ENTRY, {'filters': b'png'})


class Tags(html.parser.HTMLParser):
  """Collects the tags of a page, and its text."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.text = [], ''
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_data(self, data):
    self.text += data


def test_the_page_has_all_in_itself(tmp_path):
  out = tmp_path / 'new' / 'figures'
  facts, missing = {'classes': '10'}, {'confusion': 'no <run>'}
  html_page.write(out, 'Inside <ViT>', facts, [SECTION], missing)
  assert sorted(p.name for p in out.iterdir()) == ['filters.png', 'index.html']
  assert (out / 'filters.png').read_bytes() == b'png'
  assert [p.name for p in out.parent.iterdir()] == ['figures']
  text = (out / 'index.html').read_text()
  found = Tags(text)
  addresses = [
    value
    for _, attrs in found.tags
    for key, value in attrs.items()
    if key in ('src', 'href')
  ]
  data = base64.b64encode(b'png').decode()
  assert addresses == ['#filters', f'data:image/png;base64,{data}']
  assert ('section', {'id': 'filters'}) in found.tags
  assert not {'script', 'link', 'iframe'} & {tag for tag, _ in found.tags}
  assert 'url(' not in text
  for words in ('Inside <ViT>', 'Filters <1>', 'What & why.', 'no <run>'):
    assert words in found.text


def test_what_exists_is_not_overwritten(tmp_path):
  empty, full = tmp_path / 'empty', tmp_path / 'full'
  empty.mkdir()
  full.mkdir()
  (full / 'mine.txt').write_text('precious')
  beside = tmp_path / f'.{empty.name}.tmp'  # Somebody else's.
  beside.mkdir()
  html_page.write(empty, 'a', {}, [SECTION], {})
  beside.rmdir()
  assert (empty / 'index.html').exists()
  for path in (empty, full, full / 'mine.txt'):
    with pytest.raises(FileExistsError, match='pass another folder') as error:
      html_page.write(path, 'a', {}, [SECTION], {})
    assert str(path) in str(error.value)
  assert [p.name for p in full.iterdir()] == ['mine.txt']
