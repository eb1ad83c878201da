"""What a report is made of: its sections in their order, and all figures in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import figures, page
from .classified import read_classified
from .history import History
from .ranks import read_ranks
from .theme import Figure


def contents(histories: Sequence[History]) -> tuple[dict[str, str], list[Figure]]:
    """Heading -> HTML of each section (empty if there is nothing to show), and the figures in order.

    What is about one run only stands under its name where there are several.
    """
    found: list[Figure] = []

    def cards(made: Iterable[Figure], more: str = "") -> str:
        taken = {figure.name for figure in found}
        new = []
        for figure in made:
            number, name = 1, figure.name
            while figure.name in taken:
                number += 1
                figure.name = f"{name}-{number}"
            taken.add(figure.name)
            new.append(figure)
        found.extend(new)
        return page.gallery(new, more)

    sections = {"Curves": cards(figures.curves(histories)) + page.last_values(histories)}
    for history in histories:
        of = f": {history.name}" * (len(histories) > 1)
        sections[f"Timeline{of}"] = cards(figures.timeline(history)) + page.attempts(history)
        if ranks := read_ranks(history.path / "ranks.jsonl"):
            sections[f"Ranks{of}"] = cards(figures.rank_spread(ranks))
        for it in read_classified(history.path):
            shown = cards(figures.classified(it)) + page.confusion_table(it) + page.mistakes(it)
            sections[f"Predictions for the {it.part} set at step {it.step:,}{of}"] = shown
    sections["Where the time went"] = cards(figures.time_spent(histories), page.time_table(histories))
    nothing = '<p class="card">Nothing has been recorded yet.</p>' * (not found)
    return sections | {"Records": nothing, "Options": page.options(histories)}, found
