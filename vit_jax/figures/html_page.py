"""Writes figures as PNGs, and a web page that contains all of them."""

import base64
from collections.abc import Mapping, Sequence
import html
from typing import Any

from etils import epath

from vit_jax.distributed import files

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
dt, small {{ color: #666; }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
nav ul {{ columns: 16rem; padding-left: 1.2rem; }}
a {{ color: #0072b2; }}
figure {{ margin: 0; }}
img {{ width: 100%; height: auto; }}
figcaption {{ max-width: 45rem; }}
</style>
<h1>{title}</h1>
{facts}
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


def check(out) -> epath.Path:
  """Returns the path of a folder to write to, which is empty or can be created."""
  path = epath.Path(out)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise FileExistsError(
      f"out='{path}' exists and is not an empty folder: pass another folder, or delete "
      'this one first (--out)'
    )
  files.check_new_folder(path, 'out')
  return path


def write(
  out,
  title: str,
  facts: Mapping[str, str],
  sections: Sequence[tuple[Any, Mapping[str, bytes]]],
  missing: Mapping[str, str],
):
  """Writes PNGs and index.html to a folder, which appears when it is complete.

  `facts` about the model and reasons for `missing` figures are by name; `sections`
  are pairs of a gallery.Entry and the contents of its PNG files by name.
  """
  with files.naming_output(out, 'out'), files.new_folder(check(out)) as folder:
    for _, pictures in sections:
      for name, data in pictures.items():
        (folder / f'{name}.png').write_bytes(data)
    text = _make_html(title, facts, sections, missing)
    (folder / 'index.html').write_text(text)


def _make_html(title, facts, sections, missing) -> str:
  escape = html.escape

  def listed(facts):
    found = (f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in facts.items())
    return f'<dl>{"".join(found)}</dl>'

  def show(entry, pictures):
    names = ('name', 'title', 'caption', 'source')
    words = {name: escape(getattr(entry, name)) for name in names}
    images = (
      f'<img src="data:image/png;base64,{base64.b64encode(data).decode()}" '
      f'alt="{words["title"]}">'
      for data in pictures.values()
    )
    return _SECTION.format(pictures='\n'.join(images), **words)

  left_out = f'<h2>Omitted figures</h2>{listed(missing)}'
  return _PAGE.format(
    title=escape(title),
    facts=listed(facts),
    contents=''.join(
      f'<li><a href="#{x.name}">{escape(x.title)}</a></li>' for x, _ in sections
    ),
    sections=''.join(show(*section) for section in sections),
    missing=left_out if missing else '',
  )
