"""Writes figures as PNGs, and an HTML page that contains all of them."""

import base64
from collections.abc import Mapping
from collections.abc import Sequence
import html
import io
from typing import Any
from typing import NamedTuple

from etils import epath

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0 auto; max-width: 72rem; padding: 1.5rem; color: #1a1a1a;
  background: #fff; font: 1rem/1.55 system-ui, sans-serif; }}
h1 {{ font-size: 1.8rem; line-height: 1.2; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.3rem; margin: 2.5rem 0 .25rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }}
dt {{ color: #666; }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
nav ul {{ columns: 16rem; padding-left: 1.2rem; }}
a {{ color: #0072b2; }}
figure {{ margin: 0; }}
img {{ width: 100%; height: auto; }}
figcaption {{ max-width: 45rem; }}
small {{ color: #666; }}
</style>
<h1>{title}</h1>
<dl>{facts}</dl>
<nav aria-label="Figures"><ul>{contents}</ul></nav>
{sections}
{missing}
</html>
"""
_SECTION = """<section id="{name}">
<h2>{title}</h2>
<figure>
{pictures}
<figcaption>{caption}<br><small>{source}</small></figcaption>
</figure>
</section>
"""
_PICTURE = '<img src="data:image/png;base64,{data}" alt="{title}">'


class Section(NamedTuple):
  """A part of the page.

  Attributes:
    name: name of the figure, see gallery.Entry.
    title: see gallery.Entry.
    caption: see gallery.Entry.
    source: see gallery.Entry.
    pictures: contents of PNG files, by name.
  """

  name: str
  title: str
  caption: str
  source: str
  pictures: Mapping[str, bytes]


def png(figure: Any) -> bytes:
  """Renders a matplotlib Figure, and returns the bytes of a PNG file."""
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=150)
  return buffer.getvalue()


def check(out) -> epath.Path:
  """Returns the path of a folder if figures can be written to it.

  Args:
    out: path of a folder that is empty or does not exist.

  Raises:
    FileExistsError: if the folder has content, or the path is a file.
    OSError: if the folder cannot be written.
  """
  path = epath.Path(out)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise FileExistsError(
      f"out='{path}' exists and is not an empty folder, and is not overwritten: "
      'give another folder, or delete this one first (--out)'
    )
  try:
    temporary = _temporary(path)
    temporary.mkdir(parents=True, exist_ok=True)
    temporary.rmtree()
  except OSError as e:
    raise OSError(
      f"out='{path}' cannot be written: {e.strerror or e}; give a folder in "
      'which you may write (--out)'
    ) from e
  return path


def _temporary(path):
  return path.parent / f'.{path.name}.tmp'


def write(
  out,
  title: str,
  facts: Mapping[str, str],
  sections: Sequence[Section],
  missing: Mapping[str, str],
):
  """Writes PNGs and index.html to a folder, which appears when it is complete.

  Args:
    out: path of the folder, see `check`.
    title: title of the page.
    facts: facts about the model, by name.
    sections: the figures.
    missing: reasons why figures are left out, by name of the figure.

  Raises:
    FileExistsError: see `check`.
    OSError: if the folder cannot be written.
  """
  path = check(out)
  temporary = _temporary(path)
  try:
    temporary.mkdir(parents=True)
    for section in sections:
      for name, data in section.pictures.items():
        (temporary / f'{name}.png').write_bytes(data)
    text = make_html(title, facts, sections, missing)
    (temporary / 'index.html').write_text(text)
    if path.exists():
      path.rmdir()
    temporary.rename(path)
  finally:
    if temporary.exists():
      temporary.rmtree()


def make_html(title, facts, sections, missing) -> str:
  """Returns the HTML of the page; see `write` for the arguments."""
  escape = html.escape
  return _PAGE.format(
    title=escape(title),
    facts=''.join(
      f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in facts.items()
    ),
    contents=''.join(
      f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections
    ),
    sections=''.join(
      _SECTION.format(
        name=section.name,
        title=escape(section.title),
        caption=escape(section.caption),
        source=escape(section.source),
        pictures='\n'.join(
          _PICTURE.format(
            data=base64.b64encode(data).decode(), title=escape(section.title)
          )
          for data in section.pictures.values()
        ),
      )
      for section in sections
    ),
    missing='<h2>Figures that are left out</h2><dl>'
    + ''.join(
      f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in missing.items()
    )
    + '</dl>'
    if missing
    else '',
  )
