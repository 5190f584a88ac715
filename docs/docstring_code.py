"""Extension of the site's API reference: examples in docstrings are shown as code.

In a docstring they are paragraphs that are indented by two spaces, before the sections.
"""

import re
import textwrap

import griffe

_EXAMPLE = re.compile(r'(?<=\n\n)(?:  .*\n?|\n(?=  ))+')
_SECTION = re.compile(r'^(Args|Attributes|Raises|Returns|Yields):$', re.MULTILINE)


def _fenced(example: re.Match) -> str:
  code = textwrap.dedent(example[0]).strip('\n')
  is_command = code.startswith(('python ', 'vit_jax ', 'pip '))
  language = 'bash' if is_command else 'python'
  return f'```{language}\n{code}\n```\n'


class Extension(griffe.Extension):
  def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
    if not obj.docstring:
      return
    text = obj.docstring.value
    section = _SECTION.search(text)
    end = section.start() if section else len(text)
    obj.docstring.value = _EXAMPLE.sub(_fenced, text[:end]) + text[end:]
