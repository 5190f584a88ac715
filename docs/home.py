"""Hook of the site: its home is the README, followed by the index of all pages."""

import pathlib
import re

# Pages that are wider, without a sidebar.
_HIDDEN = {'README.md': ['navigation'], 'gallery.md': ['toc']}
_README = pathlib.Path(__file__).parents[1] / 'README.md'


def on_page_markdown(markdown: str, page, **kwargs) -> str:
  """Returns the text of a page."""
  page.meta['hide'] = _HIDDEN.get(page.file.src_uri, [])
  if page.file.src_uri != 'README.md':
    return markdown
  front, _, _ = _README.read_text().partition('\n## Further reading\n')
  front = re.sub(r'\]\((?!https?:|docs/|#)', '](../', front)
  front = front.replace('](docs/', '](')
  index = markdown.replace('# Documentation\n', '## All pages\n', 1)
  return f'{front}\n{index}'
