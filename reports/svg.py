"""Matplotlib figures as SVG that reads on light and dark pages, alone as a file or inline in HTML."""

import io
import re
from dataclasses import dataclass
from html import escape

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK = "#010203"
"""Stands for the page's own text colour; becomes `currentColor`."""

STYLE = {
    "svg.fonttype": "none",  # text stays text: selectable, searchable, small
    "text.parse_math": False,  # a `$` in a name is a dollar sign
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#808080",
    "grid.alpha": 0.3,
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "legend.fontsize": 9,
}

_STANDALONE = "<style>svg{color:#1c2126}@media(prefers-color-scheme:dark){svg{color:#e4e7ea}}</style>"


@dataclass(frozen=True)
class Drawing:
    """One figure of a report."""

    name: str
    title: str
    alt: str
    """What the figure shows, with its values, for those who cannot see it."""
    caption: str
    inline: str
    """`<svg>` element for HTML; its ids are unique in the page and it names no other document."""
    standalone: str
    """A whole SVG file."""


def draw(figure: Figure, *, name: str, title: str, alt: str, caption: str) -> Drawing:
    """Render a figure made under `style()`, under its title. Equal figures give equal bytes."""
    buffer = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.suptitle(title, x=0.01, ha="left")  # not in the middle: there it runs into a legend beside
        ConstrainedLayoutEngine().execute(figure)  # were it the figure's own, `savefig` would draw all of it twice
        figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    body = _clean(buffer.getvalue(), name)
    label = f'<svg role="img" aria-label="{escape(f"{title}. {alt}")}" '
    standalone = body.replace("<svg ", label, 1).replace(">", f">{_STANDALONE}", 1)
    # HTML knows the SVG namespaces; without them the page holds no address at all.
    inline = re.sub(r' xmlns(:\w+)?="[^"]*"', "", body).replace("xlink:href", "href")
    return Drawing(name, title, alt, caption, inline.replace("<svg ", label, 1), standalone)


def style() -> "mpl.rc_context":
    """The context to make figures in."""
    return mpl.rc_context(STYLE)


def _clean(text: str, name: str) -> str:
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # Matplotlib numbers its ids per figure: several figures in one page would clash.
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    return body.replace(INK, "currentColor")
