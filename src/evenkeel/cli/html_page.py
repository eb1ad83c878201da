"""A page of HTML in one file, which loads nothing and runs no script, and its tables; for report and time_travel."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from itertools import takewhile
from pathlib import Path

from .. import __version__

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""With this the browser refuses to load anything."""


def begins(kind: str) -> str:
    """How a page of a kind such as "report" begins: by this a file is recognised as one that may be replaced."""
    return f"<!DOCTYPE html><!-- evenkeel {kind} -->"


def document(kind: str, title: str, header: str, sections: Mapping[str, str]) -> str:
    """The whole page, in the style of `assets/page.css`.

    Args:
        kind: see `begins`.
        title: of the window, as plain text.
        header: HTML of what is above the sections.
        sections: heading -> HTML of what is below it; those that are empty are left out.
    """
    style = (Path(__file__).parents[1] / "assets" / "page.css").read_text()
    # options of train.py, after --, may be secret
    command = shlex.join(["evenkeel", *takewhile(lambda word: word != "--", sys.argv[1:])])
    body = "".join(
        f"<section><h2>{escape(head)}</h2>{content}</section>" for head, content in sections.items() if content
    )
    return (
        f'{begins(kind)}<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{style}</style></head>'
        f"<body><header>{header}</header><main>{body}</main><footer>Made by Evenkeel {__version__} on "
        f"{time.strftime('%Y-%m-%d %H:%M')}: <code>{escape(command)}</code></footer></body></html>\n"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], folded: str = "") -> str:
    """A table of HTML in a card of its own, which scrolls if it is too wide; the first cell of a row is its heading.

    Empty without rows; with ``folded`` it is shown on demand, behind these words.
    """
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    card = f'<div class="scroll card"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    fold = f"<details><summary>{escape(folded)}</summary>{card}</details>" if folded else card
    return fold if rows else ""
