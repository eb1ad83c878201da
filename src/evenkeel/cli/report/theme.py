"""Colours and style of the figures; a figure as SVG that follows the page's light or dark theme.

matplotlib draws with the colours of the light theme. In the SVG each of them is then replaced by the variable of the
style sheet (`assets/page.css`) that has its value in light and another one in dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.errors import Refusal

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

LIGHT = {
    "ink": "#1f2733",
    "muted": "#66707f",
    "line": "#e3e7ec",
    "accent": "#2a78d6",
    "second": "#d9480f",
    "third": "#0c8599",
    "fourth": "#7048c8",
    "fifth": "#b7791f",
    "good": "#2b8a3e",
    "bad": "#c92a2a",
}
"""The colours of figures, by their names in the style sheet."""

SERIES = ("accent", "second", "third", "fourth", "fifth", "good")
"""Of several curves in a figure, in this order and then again, dashed."""

SOFTWARE = "evenkeel report"
"""In the metadata of each PNG."""

STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": LIGHT["line"],
    "axes.facecolor": "none",
    "axes.formatter.limits": (-5, 9),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": LIGHT["muted"],
    "axes.labelsize": 8.5,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.01,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "font.size": 8.5,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.7,
    "legend.borderpad": 0,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text, in the page's font
    "text.color": LIGHT["ink"],
    "text.parse_math": False,  # a $ in a name is a $
    "xtick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.color": LIGHT["line"],
    "ytick.labelcolor": LIGHT["muted"],
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}

SMALL, TALL, WIDE = (4.6, 2.5), (4.6, 5.6), 9.6
"""Inches of figures that stand side by side, of one beside two of them, and the width of those that take the page's."""


@dataclass
class Figure:
    """A figure of the report.

    Attributes:
        name: of its file with --png; unique within a report.
        title: its heading.
        description: its description, for screen readers.
        canvas: matplotlib's figure.
    """

    name: str
    title: str
    description: str
    canvas: Canvas

    @property
    def place(self) -> str:
        """The class of its card in the style sheet; empty for a small one."""
        width, height = map(float, self.canvas.get_size_inches())
        return "tall" if (width, height) == TALL else "wide" if width > SMALL[0] else ""

    def svg(self) -> str:
        """An <svg> for a page, without network access or ids that clash with other figures."""
        with io.StringIO() as file:
            self.canvas.savefig(file, format="svg", metadata={"Date": None})
            text = file.getvalue()
        text = re.sub(r'<metadata>.*?</metadata>|<style.*?</style>| xmlns(:xlink)?="[^"]*"', "", text, flags=re.DOTALL)
        text = text[text.index("<svg") :].replace("xlink:href", "href")
        text = re.sub(r' id="([^"]+)"', rf' id="{self.name}-\1"', text)
        text = re.sub(r'(href="|url\()#', rf"\1#{self.name}-", text)
        text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
        for name, colour in LIGHT.items():
            text = text.replace(colour, f"var(--{name})")
        return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'aria-hidden="true"', text, count=1)

    def png(self) -> bytes:
        """The figure on white, 200 dots per inch."""
        with io.BytesIO() as file:
            frame: dict[str, Any] = {"dpi": 200, "facecolor": "white", "bbox_inches": "tight", "pad_inches": 0.15}
            self.canvas.savefig(file, format="png", metadata={"Software": SOFTWARE}, **frame)
            return file.getvalue()


@contextmanager
def drawing() -> Iterator[None]:
    """A context in which figures are made and written in our style.

    Raises:
        Refusal: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise Refusal("report draws with matplotlib, which is not installed: pip install matplotlib") from None
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the page's own font has it
        yield
