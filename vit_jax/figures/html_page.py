"""Writes figures as PNGs, and index.html, which shows all of them."""

from collections.abc import Mapping, Sequence
import html
from typing import Any

from etils import epath

from vit_jax.distributed import files

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ margin: 0 auto; max-width: 72rem; padding: 1.5rem; font: 1rem/1.55 system-ui, sans-serif; }}
img {{ width: 100%; }}
p {{ max-width: 45rem; overflow-wrap: anywhere; }}
</style>
<h1>{title}</h1>
{body}
</html>
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
      for name, content in pictures.items():
        (folder / f'{name}.png').write_bytes(content)
    text = _make_html(title, facts, sections, missing)
    (folder / 'index.html').write_text(text)


def _make_html(
  title: str,
  facts: Mapping[str, str],
  sections: Sequence[tuple[Any, Mapping[str, bytes]]],
  missing: Mapping[str, str],
) -> str:
  lines = _paragraphs(facts)
  for entry, pictures in sections:
    lines.append(f'<h2>{html.escape(entry.title)}</h2>')
    for name in pictures:
      lines.append(f'<img src="{name}.png" alt="{html.escape(entry.title)}">')
    lines.append(f'<p>{html.escape(entry.caption)}</p>')
    lines += _paragraphs({'Source': entry.source})
  if missing:
    lines += ['<h2>Omitted figures</h2>', *_paragraphs(missing)]
  return _PAGE.format(title=html.escape(title), body='\n'.join(lines))


def _paragraphs(texts: Mapping[str, str]) -> list[str]:
  return [
    f'<p>{html.escape(name)}: {html.escape(text)}</p>' for name, text in texts.items()
  ]
