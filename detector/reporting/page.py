"""What pages of HTML are made of, which need nothing beside them: no other file, no network."""

import base64
import html
from collections.abc import Iterable, Sequence

import cv2
import numpy as np

STYLE = """
:root { color-scheme: light dark; --ink: #262a30; --paper: #fafaf8; --faint: #6b717a; --line: #d5d8dc;
  --blue: #2a7ae2; --raised: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6ea; --paper: #16181c; --faint: #9aa1ab; --line: #3a3f47;
  --blue: #5b9bf0; --raised: #1f2227; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 72rem; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem .2rem 0; text-align: right; font-weight: normal; }
th { color: var(--faint); } th.name, td.name { text-align: left; }
td.bars { min-width: 16rem; text-align: left; } .bar { background: var(--blue); height: .55rem; margin: 1px 0; }
.path { color: var(--faint); overflow-wrap: anywhere; } details { margin: .3rem 0; } summary { cursor: pointer; }
.mark { color: #fff; border-radius: 3px; padding: 0 .4rem; font-size: .8rem; margin-right: .5rem; }
.error { background: #e63946; } .warning { background: #b86e00; } .note { background: #6b717a; }
li { overflow-wrap: anywhere; } .row { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; }
figure { margin: 0; } figcaption { font-size: .82rem; overflow-wrap: anywhere; }
svg text { font-size: 11px; fill: var(--faint); }
"""


def html_page(title: str, body: Iterable[str], style: str = "") -> str:
    """A whole page, well-formed also as XML. `body` is of elements, `title` of any text; `style` comes after STYLE."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" />'
        f'<meta name="viewport" content="width=device-width" /><title>{escaped(title)}</title>'
        f"<style>{STYLE}{style}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def escaped(value: object) -> str:
    """Text of any characters, names of files among it, as HTML that shows it."""
    return html.escape("".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value)))


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text whose first column are names."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = ['class="name"' if column == 0 else "" for column in range(len(row))]
        return "".join(
            f"<{tag} {kind}>{escaped(cell)}</{tag}>".replace(" >", ">") for kind, cell in zip(kinds, row, strict=True)
        )

    lines = [cells("th", heads), *(cells("td", row) for row in rows)]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def html_picture(rgb: np.ndarray, suffix: str, flags: Sequence[int] = (), attributes: str = "") -> str:
    """(H, W, 3) uint8 RGB as an element that holds it, as `suffix` says: .jpg or .png."""
    done, data = cv2.imencode(suffix, np.ascontiguousarray(rgb[..., ::-1]), list(flags))
    assert done
    kind = {".jpg": "jpeg", ".png": "png"}[suffix]
    return f'<img {attributes} alt="" src="data:image/{kind};base64,{base64.b64encode(data.tobytes()).decode()}" />'
