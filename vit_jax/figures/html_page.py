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


def check(out: epath.PathLike) -> epath.Path:
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
  out: epath.PathLike,
  title: str,
  facts: Mapping[str, str],
  sections: Sequence[tuple[Any, Mapping[str, bytes]]],
  missing: Mapping[str, str],
) -> None:
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


def _make_html(
  title: str,
  facts: Mapping[str, str],
  sections: Sequence[tuple[Any, Mapping[str, bytes]]],
  missing: Mapping[str, str],
) -> str:
  contents = []
  for entry, _ in sections:
    contents.append(f'<li><a href="#{entry.name}">{html.escape(entry.title)}</a></li>')
  omitted = ''
  if missing:
    omitted = f'<h2>Omitted figures</h2>{_make_list(missing)}'
  return _PAGE.format(
    title=html.escape(title),
    facts=_make_list(facts),
    contents=''.join(contents),
    sections=''.join(_make_section(*section) for section in sections),
    missing=omitted,
  )


def _make_list(facts: Mapping[str, str]) -> str:
  items = []
  for name, value in facts.items():
    items.append(f'<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>')
  return f'<dl>{"".join(items)}</dl>'


def _make_section(entry: Any, pictures: Mapping[str, bytes]) -> str:
  texts = {}
  for name in ('name', 'title', 'caption', 'source'):
    texts[name] = html.escape(getattr(entry, name))
  images = []
  for data in pictures.values():
    content = base64.b64encode(data).decode()
    images.append(f'<img src="data:image/png;base64,{content}" alt="{texts["title"]}">')
  return _SECTION.format(pictures='\n'.join(images), **texts)
