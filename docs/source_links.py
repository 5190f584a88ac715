"""Markdown extension of the site: links to files outside docs/.

On GitHub they are relative links. The site links to the repository, or shows the
text only if `REPOSITORY_URL` is not set.
"""

import re

from markdown import extensions, treeprocessors


class _Links(treeprocessors.Treeprocessor):
  def __init__(self, md, repository: str):
    super().__init__(md)
    self.repository = repository

  def run(self, root):
    for link in root.iter('a'):
      if not re.match(r'(\.\./)+', href := link.get('href', '')):
        continue
      if self.repository:
        path = href.replace('../', '', 1)
        link.set('href', f'{self.repository}/blob/main/{path}')
      else:
        link.tag = 'span'
        del link.attrib['href']


class _Extension(extensions.Extension):
  def __init__(self, **kwargs):
    self.config = {'repository': ['', 'URL of the repository, or empty']}
    super().__init__(**kwargs)

  def extendMarkdown(self, md):
    links = _Links(md, self.getConfig('repository'))
    md.treeprocessors.register(links, 'source_links', 15)


def makeExtension(**kwargs):
  return _Extension(**kwargs)
