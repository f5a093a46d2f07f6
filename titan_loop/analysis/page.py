"""A page of HTML that opens anywhere, without a network: headings, tables, and images inside."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import titan_loop


class Section(NamedTuple):
    """A part of the page: a heading, a sentence, and an image or a table."""

    title: str
    text: str
    image: Path | None = None
    rows: Sequence[Sequence[str]] = ()


def page(name: str, sections: Sequence[Section], missing: Sequence[str] = ()) -> str:
    """Return the page, with the commands that would add a missing part at its end."""
    style = Path(__file__).with_suffix(".css").read_text()
    body = [f"<h1>{html.escape(name)}</h1>"]
    body += [_section(section) for section in sections]
    if missing:
        items = "".join(f"<li><code>{html.escape(text)}</code></li>" for text in missing)
        body.append(f"<h2>Not evaluated yet</h2><ul>{items}</ul>")
    body.append(f'<p class="quiet">Written by titan_loop {titan_loop.__version__}.</p>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(name)}</title><style>{style}</style></head>\n<body>\n"
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
