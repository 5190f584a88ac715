"""Markdown extension of the site: inline code breaks between words only.

A browser would also break a flag after its hyphens.
"""

from xml.etree import ElementTree

from markdown import extensions, treeprocessors


class _Words(treeprocessors.Treeprocessor):
  def run(self, root):
    blocks = {code for block in root.iter('pre') for code in block.iter('code')}
    for code in root.iter('code'):
      if code not in blocks:
        _wrap_words(code)


def _wrap_words(code: ElementTree.Element) -> None:
  words = (code.text or '').split(' ')
  code.text = ''
  for word in words:
    span = ElementTree.SubElement(code, 'span', {'class': 'word'})
    span.text = word
    span.tail = ' '
  span.tail = ''


class _Extension(extensions.Extension):
  def extendMarkdown(self, md):
    md.treeprocessors.register(_Words(md), 'inline_code', 14)


def makeExtension(**kwargs):
  return _Extension(**kwargs)
