"""The report as one HTML page: it loads nothing, runs no script, and is laid out for a screen and for a phone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from html import escape
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any

from ...common.arguments import flag
from ...common.files import MOST
from ...common.naming import TRAIN
from ...run.records import ACCOUNTS, verified
from ...training.memory_parts import PEAK
from ..html_page import document, table
from . import figures
from .audited import audited
from .classified import Classified, read_classified
from .history import History, differing_options
from .media import read_media
from .ranks import read_ranks
from .theme import SERIES, Figure

FACTS = {
    "state": "state",
    "best": "best",
    "steps": "steps",
    "speed": "samples/s",
    "goodput": "goodput",
    "attempts": "attempts",
    "again": "steps done again",
    "time": "time",
}
"""The key figures of a run and their headings."""

ROWS, RANKS = 200, 16
"""Maximum number of listed attempts, the last ones; of ranks, those whose peaks of memory are the greatest."""


def contents(histories: Sequence[History]) -> tuple[dict[str, str], list[Figure]]:
    """Heading -> HTML of each section (empty if there is nothing to show), and the figures in order.

    What is about one run only stands under its name where there are several.
    """
    found: list[Figure] = []

    def cards(made: Iterable[Figure], more: str = "") -> str:
        new = list(made)
        for figure in new:
            names = (figure.name if number == 1 else f"{figure.name}-{number}" for number in count(1))
            figure.name = next(name for name in names if all(name != it.name for it in found))
            found.append(figure)
        return gallery(new, more)

    sections = {"Curves": cards(figures.curves(histories)) + last_values(histories)}
    for history in histories:
        of = f": {history.name}" if len(histories) > 1 else ""
        sections[f"Timeline{of}"] = cards(figures.timeline(history)) + attempts(history)
        if ranks := read_ranks(history.path / "ranks.jsonl"):
            shares = escape(str(history.status.get("shares", "")))
            more = f'<p class="card">Micro-batches of a step, by rank: {shares} (--shares)</p>' if shares else ""
            sections[f"Ranks{of}"] = cards(figures.rank_spread(ranks), more)
        sections[f"Memory{of}"] = memory(history)
        for it in read_classified(history.path):
            shown = cards(figures.classified(it)) + confusion_table(it) + mistakes(it)
            sections[f"Predictions for the {it.part} set at step {it.step:,}{of}"] = shown
        sections[f"Logged{of}"] = logged(history.path)
        sections[f"Audit{of}"] = table(["evenkeel audit", ""], audited(history))
    sections["Where the time went"] = cards(figures.time_spent(histories), time_table(histories))
    nothing = '<p class="card">Nothing has been recorded yet.</p>' if not found else ""
    return sections | {"Records": nothing, "Options": options(histories)}, found


def page(histories: Sequence[History], sections: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        histories: the runs.
        sections: heading -> HTML of what is below it; those that are empty are left out.
    """
    names = ", ".join(history.name for history in histories)
    return document("report", names, _header(histories), sections)


def _header(histories: Sequence[History]) -> str:
    if len(histories) > 1:
        colours = cycle(f'<i style="background: var(--{name})"></i>' for name in SERIES)
        rows = [[next(colours) + escape(it.name), *_facts(it).values()] for it in histories]
        heads = ["run", *FACTS.values()]
        return f"<p>Evenkeel report</p><h1>{len(histories)} runs</h1>{table(heads, rows)}"
    (history,) = histories
    facts = _facts(history)
    tiles = "".join(
        f"<div><dt>{head}</dt><dd>{facts[name]}</dd></div>" for name, head in FACTS.items() if name != "state"
    )
    why = f"<p>{escape(history.why)}</p>" if history.why else ""
    about = " · ".join(["Evenkeel report", *_about(history)])
    return f"<p>{about}</p><h1>{escape(history.name)} {facts['state']}</h1>{why}<dl>{tiles}</dl>"


def _about(history: History) -> Iterator[str]:
    if task := history.options.get("task"):
        yield f"task {escape(str(task))}"
    if history.attempts:
        ranks = sorted({attempt.ranks for attempt in history.attempts})
        yield f"on {' to '.join(map(str, ranks[:1] + ranks[1:][-1:]))} rank{'s' * (ranks[-1] != 1)}"
        yield time.strftime("%Y-%m-%d %H:%M", time.localtime(history.attempts[0].begun))

    order = history.status.get("order")
    if order and isinstance(order, str):
        yield escape(f"read in {order}")
    if checked := verified(history.status.get("verified", 0), history.status.get("alarms", [])):
        yield escape(checked)
    if history.options.get("drop_last"):
        yield "without the end of an epoch that fills no batch"


def _facts(history: History) -> dict[str, str]:
    """The key figures of a run, as HTML."""
    step, total, best = history.step, history.status.get("total_steps"), history.best_value()
    speeds = history.curves.get(f"{TRAIN}/samples_per_s")
    shown = f"{best[1]:.4g} <small>{escape(best[0])} at step {best[2]:,}</small>" if best else "-"
    at = f" at step {step:,}" if history.state not in ("finished", "running") else ""
    kinds = {"finished": "good", "running": "accent", "stopped": "fifth"}
    seconds = sum(history.seconds.values())
    colour = kinds.get(history.state, "bad")
    return {
        "state": f'<span class="state" style="--of: var(--{colour})">{escape(history.state)}{at}</span>',
        "best": shown,
        "steps": f"{step:,}" + (f" <small>of {total:,}</small>" if total and total != step else ""),
        "speed": f"{median(speeds.values):,.0f} <small>median</small>" if speeds and speeds.values else "-",
        "goodput": "-" if history.goodput is None else f"{history.goodput:.0%}",
        "attempts": str(history.starts),
        "again": f"{history.again:,}",
        "time": str(timedelta(seconds=round(min(seconds, MOST)))),
    }


def gallery(made: Iterable[Figure], more: str = "") -> str:
    """Figures as cards, each with its words for those who do not see it; ``more`` is the HTML of another card."""
    cards = "".join(
        f'<figure class="{it.place}"><figcaption>{escape(it.title)}</figcaption>'
        f'<div class="scroll" role="img" aria-label="{escape(it.description)}" tabindex="0">{it.svg()}</div></figure>'
        for it in made
    )
    return f'<div class="cards">{cards}{more}</div>' if cards else ""


def attempts(history: History) -> str:
    """A table of all starts of a run and how they have ended; shown on demand, as it says what the timeline shows."""
    rows = [
        [str(it.number), str(it.ranks), f"{it.first_step:,} to {it.last_step:,}", f"{it.until - it.begun:.1f} s",
         escape(f"{it.ending}: {it.reason}" if it.reason else it.ending)]
        for it in history.attempts[-ROWS:]
    ]  # fmt: skip
    heads = ["attempt", "ranks", "steps", "lived", "end"]
    return table(heads, rows, "Table of the attempts")


def memory(history: History) -> str:
    """Bytes of memory by part, of some ranks."""
    ranks = sorted(enumerate(history.memory), key=lambda it: -it[1].get(PEAK, 0))[:RANKS]
    parts = [name for name in (ranks[0][1] if ranks else ()) if name != PEAK]
    rows = []
    for rank, of in sorted(ranks):
        known = [of.get(name, 0) for name in parts]
        shown = [*known, max(0, of.get(PEAK, 0) - sum(known)), of.get(PEAK, 0)]
        rows.append([str(rank), *(f"{size / 1e6:,.2f} MB" for size in shown)])
    return table(["rank", *map(escape, parts), "activations, buffers and all else", "peak"], rows)


def time_table(histories: Sequence[History]) -> str:
    """Seconds by account of the ledger, a column for each run."""
    both = [(history.seconds, max(sum(history.seconds.values()), 1e-9)) for history in histories]
    rows = [
        [account.replace("_", "-"), *(f"{it[account]:,.1f} s ({it[account] / total:.1%})" for it, total in both)]
        for account in ACCOUNTS
    ]
    return table(["account", *(escape(it.name) for it in histories)], rows)


def last_values(histories: Sequence[History]) -> str:
    """The last value of each curve, a column for each run; of one run on demand, as the figures show it."""
    names = sorted({name for history in histories for name in history.curves})
    known = [(name, [history.curves.get(name) for history in histories]) for name in names]
    rows = [[escape(name), *(f"{it.values[-1]:.4g}" if it else "-" for it in found)] for name, found in known]
    heads = ["last value", *(escape(history.name) for history in histories)]
    return table(heads, rows, "Table of the last values" if len(histories) == 1 else "")


def options(histories: Sequence[History]) -> str:
    """The options of which a run is made, or in which runs differ; all of them on demand."""
    differing = list(differing_options(histories))
    heads = ["option", *(escape(history.name) for history in histories)]
    names = sorted({name for history in histories for name in history.options})
    every = [(name, [history.options.get(name) for history in histories]) for name in names]
    words = [escape(f"{flag(name)} {_value(values[0])}") for name, values in differing]
    if len(histories) == 1:
        shown = f'<div class="card words">{"".join(f"<code>{word}</code>" for word in words)}</div>' if words else ""
    else:
        shown = table(heads, _option_rows(differing)) or '<p class="card">They do not differ.</p>'
    return shown + table(heads, _option_rows(every), f"All {len(every)} options") if every else ""


def _option_rows(values: Iterable[tuple[str, Sequence[Any]]]) -> list[list[str]]:
    return [[f"<code>{escape(flag(name))}</code>", *(escape(_value(it)) for it in its)] for name, its in values]


def _value(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def confusion_table(found: Classified) -> str:
    """The confusion matrix as a table, if it is small."""
    if len(found.classes) > figures.CELLS:
        return ""
    names = [escape(name) for name in found.classes]
    rows = [[name, *map(str, row)] for name, row in zip(names, found.confusion.tolist(), strict=True)]
    return table(["target \\ prediction", *names], rows, "Table of the confusion matrix")


def logged(path: Path) -> str:
    """The newest picture and table of each name that the job has logged itself."""
    parts = []
    for it in read_media(path):
        title = f"{escape(it.name)} <small>step {it.step:,}</small>"
        if it.rows:
            head, *rows = ([escape(cell) for cell in row] for row in it.rows)
            parts.append(f"<h3>{title}</h3>{table(head, rows)}")
        else:
            image = f'<img src="data:image/png;base64,{it.image}" alt="{escape(it.name)}">'
            parts.append(f'<figure class="card"><figcaption>{title}</figcaption>{image}</figure>')
    return "".join(parts)


def mistakes(found: Classified) -> str:
    """The images that the model took for something else with the greatest confidence."""
    names = [escape(name) for name in found.classes]
    shown = "".join(
        f'<figure><img src="data:image/png;base64,{it["image"]}" alt="sample {it["index"]}">'
        f"<figcaption><b>{names[it['prediction']]}</b> {it['confidence']:.0%}<br>is {names[it['target']]}"
        f"<small>sample {it['index']}</small></figcaption></figure>"
        for it in found.worst
    )
    head = f"<h3>Most wrong ({escape(found.part)})</h3>"
    return f'<div class="card">{head}<div class="images">{shown}</div></div>' if shown else ""
