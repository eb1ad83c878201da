"""The plot of `scaling`: speed-up with the ideal line, and below it the parts of a step's time."""

from __future__ import annotations

from pathlib import Path

from ...common.naming import count_ranks
from .analysis import LOSSES, Row, predicted

COLOURS = ("#4c956c", "#e9c46a", "#e76f51", "#9d4edd", "#adb5bd")
"""Of the efficient part and the losses."""


def draw(tables: dict[str, list[Row]], path: Path) -> None:
    """Write the plot.

    Args:
        tables: by title; the second with a fixed batch per rank.
        path: .svg or .png.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(tables), 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(tables), squeeze=False)
    for column, (title, rows) in enumerate(tables.items()):
        ranks, speedup, *_ = predicted(rows, weak=column == 1)
        upper, lower = axes[:, column]
        numbers, first = [row.ranks for row in rows], rows[0].ranks
        upper.plot([first, ranks], [1, ranks / first], ":", color="grey", label="ideal")
        upper.plot(numbers, [row.speedup for row in rows], "o-", color=COLOURS[0], label="measured")
        dashed = [rows[-1].speedup, speedup]
        label = "prediction, not measured"
        upper.plot(
            [numbers[-1], ranks], dashed, "--o", markevery=[1], mfc="white", color=COLOURS[0], alpha=0.6, label=label
        )
        upper.set(title=title, xlabel="ranks", ylabel=f"speed-up over {count_ranks(first)}", ylim=0)
        upper.set_xticks([*numbers, ranks])
        upper.legend(frameon=False)
        bottom = [0.0] * len(rows)
        parts = {"efficiency": [row.efficiency for row in rows]}
        parts |= {name: [row.lost[name] for row in rows] for name in LOSSES}
        for (name, shares), colour in zip(parts.items(), COLOURS, strict=True):
            heights = [100 * max(0.0, share) for share in shares]
            lower.bar(list(map(str, numbers)), heights, 0.6, bottom, label=name, color=colour)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        lower.set(xlabel="ranks", ylabel="% of a step", ylim=(0, max(100, *bottom)))
    axes[1][-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
