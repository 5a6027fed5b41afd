"""What lines of figures look like, and how wide their labels are."""

import textwrap

# Colour-blind safe (after Okabe and Ito, and Tol), each with a contrast of about 3 or more on white and on near-black.
PALETTE = ("#0d7dc4", "#d55e00", "#00906a", "#b8609a", "#a67c00", "#7d75d8", "#c0405a", "#6f8796")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
LABEL_WIDTH = 34
"""Characters per line of a label."""


def look(i: int) -> dict[str, str]:
    """Colour, dash and marker of the line with this number: known by more than its colour, and one of its kind among 32
    and more.
    """
    turn = i // len(PALETTE)
    return {
        "color": PALETTE[i % len(PALETTE)],
        "linestyle": DASHES[(i + turn) % len(DASHES)],
        "marker": MARKERS[(i + turn) % len(MARKERS)],
    }


def wrapped(text: str, width: int = LABEL_WIDTH) -> str:
    """Lines that fit above a small panel or beside it, or of `width` characters."""
    return "\n".join(textwrap.wrap(text, width))
