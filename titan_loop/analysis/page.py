"""A page of HTML that opens anywhere, without a network: headings, tables, and images inside."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import titan_loop

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff; margin: 0 auto;
       max-width: 62rem; padding: 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0 .8rem; } .quiet { color: #5b6a78; font-size: .92rem; }
img { width: 100%; height: auto; border: 1px solid #e3e8ee; border-radius: 6px; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #e3e8ee; }
th:first-child, td:first-child, .facts td { text-align: left; }
code { font-family: ui-monospace, monospace; font-size: .9em; }
@media (prefers-color-scheme: dark) {
  body { color: #dde5ec; background: #14191f; } .quiet { color: #93a1ad; }
  th, td { border-color: #2b343d; } img { border-color: #2b343d; background: #fff; } }
"""


class Section(NamedTuple):
    """A part of the page: a heading, a sentence, and an image or a table."""

    title: str
    text: str
    image: Path | None = None
    rows: Sequence[Sequence[str]] = ()


def page(name: str, sections: Sequence[Section], missing: Sequence[str] = ()) -> str:
    """Return the page, with the commands that would add a missing part at its end."""
    body = [f"<h1>{html.escape(name)}</h1>"]
    body += [_section(section) for section in sections]
    if missing:
        items = "".join(f"<li><code>{html.escape(text)}</code></li>" for text in missing)
        body.append(f"<h2>Not evaluated yet</h2><ul>{items}</ul>")
    body.append(f'<p class="quiet">Written by titan_loop {titan_loop.__version__}.</p>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(name)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{html.escape(section.text)}</p>")
    if section.image is not None:
        data = base64.b64encode(section.image.read_bytes()).decode()
        alt = html.escape(f"{section.title}. {section.text}", quote=True)
        parts.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
    if section.rows:
        parts.append(_table(section.rows))
    return "\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    header = f"<thead>{row(rows[0], 'th')}</thead>" if any(rows[0]) else ""
    body = "".join(row(cells, "td") for cells in rows[1:])
    kind = "table" if header else "table facts"
    return f'<div class="{kind}"><table>{header}<tbody>{body}</tbody></table></div>'
