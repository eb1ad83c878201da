"""The figures of a report. Each function yields figures, or none if there is nothing to show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...common.display import plain
from ...common.naming import TRAIN, count_ranks
from ...run.records import ACCOUNTS
from .classified import Classified
from .history import Attempt, Curve, History
from .ranks import Ranks
from .theme import LIGHT, SERIES, SMALL, TALL, WIDE, Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {"loss": "Loss", "lr": "Learning rate", "samples_per_s": "Samples per second", "grad_norm": "Gradient norm"}
"""Of measured values, by name. Others have their own name."""

OF_STEPS = ("lr", "samples_per_s", "grad_norm")
"""They come after the evaluations' metrics, in this order; what else is measured in steps comes last."""

DECADES = ("loss", "grad_norm")
"""Shown on a logarithmic axis if they span more than two decades."""

ENDS = {"killed": ("X", "bad"), "failed": ("D", "second"), "stopped": ("s", "fifth"), "finished": ("o", "good")}
"""How an attempt has ended -> marker and colour."""

MARKS = {"eval": "evaluations", "checkpoint": "checkpoints"}
"""Kind of an event -> its name in the timeline."""

TIME = {"productive": "accent", "redone": "bad", "dead": "bad"}
"""Account of the ledger -> colour, where there is one run; the others are grey."""

MOST = 2000
"""Points of a curve in a figure."""

SMOOTHED = 50
"""A curve of fewer points is shown as it is."""

ROWS = 40
"""Bars with a label each that fit into a figure."""

CELLS = 12
"""Classes up to which a confusion matrix has its numbers in it."""

Numbers = npt.NDArray[np.float64]
Values = Sequence[float] | Numbers

Line = tuple[str, Curve, int, bool]
"""Label, curve, number of its colour, and whether it is measured in steps, which is noisy."""


def curves(histories: Sequence[History]) -> Iterator[Figure]:
    """Loss and metrics, then learning rate, throughput and what else was measured.

    The sets of one run share a figure (train and test loss); of several runs each set has its own, shared by the runs.
    """
    groups: dict[str, list[Line]] = {}
    parts = list(dict.fromkeys(name.partition("/")[0] for name in histories[0].curves))  # each set has its own colour
    for number, history in enumerate(histories):
        for name, curve in history.curves.items():
            part, _, metric = name.partition("/")
            if len(histories) == 1:
                groups.setdefault(metric, []).append((part, curve, parts.index(part), part == TRAIN))
            else:
                groups.setdefault(name, []).append((history.name, curve, number, part == TRAIN))
    for number, group in enumerate(sorted(groups, key=lambda group: _place(group, groups[group]))):
        size = TALL if number == 0 and len(groups) % 2 else SMALL  # so that no card stands alone in its row
        yield _curves(group, groups[group], size)


def _place(group: str, lines: Sequence[Line]) -> tuple[int, str]:
    """Where a figure belongs in the page, for sorting."""
    metric, evaluated = group.rpartition("/")[2], not all(noisy for *_, noisy in lines)
    if metric == "loss":
        return int(evaluated), ""
    if evaluated:
        return 2, group
    kind = "lr" if metric.startswith("lr_") else metric  # of another optimizer
    return 3, f"{OF_STEPS.index(kind) if kind in OF_STEPS else len(OF_STEPS)}{metric}"


def _curves(group: str, lines: Sequence[Line], size: tuple[float, float]) -> Figure:
    part, _, metric = group.rpartition("/")
    part = part or lines[0][0] * (len(lines) == 1 and not lines[0][-1])
    title = TITLES.get(metric, metric[:1].upper() + metric[1:].replace("_", " "))
    title = re.sub("^Lr (.*)", rf"{TITLES['lr']} (\1)", title)
    title += f" ({part})" if part and (part != TRAIN or metric == "loss") else ""
    canvas, axes = _canvas(size)
    handles = []
    for _, curve, number, noisy in lines:
        style: dict[str, Any] = {"color": _colour(number), "linestyle": "--" if number >= len(SERIES) else "-"}
        values: Sequence[float] = curve.values
        if noisy and len(values) > SMOOTHED:
            axes.plot(*thinned(curve.steps, values), alpha=0.25, linewidth=0.8, **style)
            values = list(smoothed(values))
        dots = {"marker": "o", "markersize": 3} if len(values) <= SMOOTHED else {}
        handles += axes.plot(*thinned(curve.steps, values), **style, **dots)
    least, most = (end(end(curve.values) for _, curve, _, _ in lines) for end in (min, max))
    if metric in DECADES and most > 100 * least > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("step")
    axes.locator_params(axis="x", nbins=6)
    if len(lines) > 1:
        _legend(axes, handles, [label for label, *_ in lines])
    description = [f"{label} {_in_words(curve)}" for label, curve, *_ in lines]
    return Figure(_file_name(group), title, f"{title} by step: {'; '.join(description)}.", canvas)


def _in_words(curve: Curve) -> str:
    steps, values = curve.steps, curve.values
    ends = f"from {values[0]:.4g} at step {steps[0]} to {values[-1]:.4g} at step {steps[-1]}"
    return f"{ends}, between {min(values):.4g} and {max(values):.4g}"


def timeline(history: History) -> Iterator[Figure]:
    """Steps over time through all attempts, and below a bar for each: its ranks, what happened in it, its end."""
    attempts = history.attempts
    if not attempts:
        return
    begin, end = attempts[0].begun, max(attempt.until for attempt in attempts)
    unit, seconds = next((it for it in (("h", 3600), ("min", 60)) if end - begin > 3 * it[1]), ("s", 1))

    def at(*times: float) -> list[float]:
        return [(time - begin) / seconds for time in times]

    rows = min(4.0, max(0.6, 0.22 * len(attempts)))
    canvas, (steps, marks, bars) = _canvas((WIDE, 2.9 + rows), nrows=3, sharex=True, height_ratios=[1.8, 0.4, rows])
    for before, attempt in zip([None, *attempts], attempts, strict=False):
        if before:
            gap = [before.steps[-1], attempt.first_step]
            steps.plot(at(before.until, attempt.ready), gap, color=LIGHT["accent"], linestyle=(0, (1, 2)), linewidth=1)
        steps.plot(*thinned(at(*attempt.times), attempt.steps), color=LIGHT["accent"], linewidth=2)
    for row, kind in enumerate(MARKS):
        happened = at(*[time for time, _ in history.marks.get(kind, [])])
        marks.eventplot(happened[:: -(-len(happened) // 400) or 1], lineoffsets=row, linelengths=0.6, linewidths=1,
                        color=LIGHT["ink"], alpha=0.7)  # fmt: skip
    marks.set_yticks(range(len(MARKS)), list(MARKS.values()))
    marks.set_ylim(len(MARKS) - 0.4, -0.6)
    handles = _bars(bars, attempts, at)
    for ending, (marker, colour) in ENDS.items():
        ended = [attempt for attempt in attempts if attempt.ending == ending]
        if ended:
            where, style = at(*[it.until for it in ended]), {"marker": marker, "color": LIGHT[colour], "zorder": 4}
            handles[ending] = bars.scatter(where, [it.number for it in ended], s=26, linewidths=0, **style)
            for axes in (steps, marks) if ending != "finished" and len(attempts) <= ROWS else ():
                for time in where:
                    axes.axvline(time, color=LIGHT[colour], linewidth=0.8, alpha=0.5)
    steps.set_ylabel("step")
    for axes in (steps, marks):
        axes.tick_params(bottom=False)
        axes.spines["bottom"].set_visible(False)
    marks.grid(visible=False)
    bars.set_xlabel(f"time since the first start ({unit})")
    _legend(steps, list(handles.values()), list(handles), columns=len(handles))
    title = "All attempts" + (" (bold: on another number of ranks)" if len({it.ranks for it in attempts}) > 1 else "")
    yield Figure("timeline", title, _attempts_in_words(history), canvas)


def _bars(axes: Axes, attempts: Sequence[Attempt], at: Callable[..., list[float]]) -> dict[str, Any]:
    """A bar for each attempt: its start-up, then its steps. Returns what belongs into the legend."""
    numbers, handles = [attempt.number for attempt in attempts], dict[str, Any]()
    for name, colour, begins, ends in (
        ("start-up", "muted", [it.begun for it in attempts], [it.ready for it in attempts]),
        ("steps", "accent", [it.ready for it in attempts], [it.until for it in attempts]),
    ):
        left, right = np.array(at(*begins)), np.array(at(*ends))
        alpha = 0.35 if name == "start-up" else 1.0
        handles[name] = axes.barh(numbers, right - left, left=left, height=0.5, color=LIGHT[colour], alpha=alpha)
    shown = attempts[:: -(-len(attempts) // (ROWS // 2))]
    before = [0, *(it.ranks for it in attempts)]
    axes.set_yticks([it.number for it in shown], [f"{it.number}:  {count_ranks(it.ranks)}" for it in shown])
    for it, label in zip(shown, axes.get_yticklabels(), strict=True):
        if it.number > 1 and it.ranks != before[it.number - 1]:  # a resize
            label.set(color=LIGHT["second"], fontweight="bold")
    axes.set_ylim(len(attempts) + 0.6, 0.4)
    axes.grid(visible=False)
    return handles


def _attempts_in_words(history: History) -> str:
    description = [
        f"{it.number}, {count_ranks(it.ranks)}, steps {it.first_step} to {it.last_step}, {it.ending}"
        for it in history.attempts[:ROWS]
    ]
    more = f"; and {len(history.attempts) - ROWS} more" if len(history.attempts) > ROWS else ""
    return f"Steps over time and a bar for each attempt: {'; '.join(description)}{more}."


def time_spent(histories: Sequence[History]) -> Iterator[Figure]:
    """The use of time: a bar for each account of the ledger and each run."""
    ledgers = [(number, history.seconds) for number, history in enumerate(histories) if history.goodput is not None]
    if not ledgers:
        return
    height = 0.75 / len(ledgers)
    canvas, axes = _canvas((SMALL[0], max(2.7, 0.7 + len(ACCOUNTS) * max(0.3, 0.16 * len(ledgers)))))
    handles = []
    for row, (number, seconds) in enumerate(ledgers):
        shares = [100 * seconds[account] / max(sum(seconds.values()), 1e-9) for account in ACCOUNTS]
        places = np.arange(len(ACCOUNTS)) - 0.375 + height * (row + 0.5)
        alone = [LIGHT[TIME.get(account, "muted")] for account in ACCOUNTS]
        colours = alone if len(histories) == 1 else _colour(number)
        handles.append(axes.barh(places, shares, height=0.85 * height, color=colours))
        axes.bar_label(handles[-1], fmt="%.1f", padding=3, fontsize=7.5)
    axes.set_yticks(range(len(ACCOUNTS)), [account.replace("_", "-") for account in ACCOUNTS])
    axes.set(ylim=(len(ACCOUNTS) - 0.5, -0.5), xlabel="% of the time since the first start")
    axes.margins(x=0.12)
    axes.grid(visible=False)
    if len(histories) > 1:
        _legend(axes, handles, [histories[number].name for number, _ in ledgers])
    description = "; ".join(
        f"{histories[number].name}: " + ", ".join(f"{account} {spent:.1f} s" for account, spent in seconds.items())
        for number, seconds in ledgers
    )
    yield Figure("time", "Share of the time", f"Seconds by account. {description}.", canvas)


def rank_spread(ranks: Ranks) -> Iterator[Figure]:
    """How long each rank takes on average, and how far apart the fastest and the slowest are over time."""
    order = np.arange(len(ranks.hosts))
    chosen = order if len(order) <= ROWS else np.sort(np.argsort(ranks.arrival)[-ROWS:])
    canvas, axes = _canvas((SMALL[0], max(SMALL[1], 0.9 + 0.16 * len(chosen))))
    places = np.arange(len(chosen))
    arrival, wait = 1000 * ranks.arrival[chosen], 1000 * ranks.data_wait[chosen]
    handles = [
        axes.barh(places - 0.2, arrival, height=0.38, color=LIGHT["accent"]),
        axes.barh(places + 0.2, wait, height=0.38, color=LIGHT["third"]),
    ]
    axes.set_yticks(places, [f"rank {rank}" for rank in chosen])
    axes.set(ylim=(len(chosen) - 0.4, -0.6), xlabel="ms per step, mean of the run")
    _legend(axes, handles, ["until ready to reduce", "waiting for data"])
    slowest = f"rank {ranks.slowest} on {ranks.hosts[ranks.slowest]} is the slowest"
    description = ", ".join(f"rank {rank} {ms:.3g} ms" for rank, ms in zip(chosen, arrival, strict=True))
    which = "All ranks" if len(order) <= ROWS else f"The {ROWS} slowest of {len(order)} ranks"
    yield Figure(
        "ranks", f"{which}: {slowest}", f"Time until a rank is ready to reduce: {description}; {slowest}.", canvas
    )

    canvas, axes = _canvas(SMALL)
    spread = 1000 * np.array(ranks.spread)
    steps, low = thinned(ranks.steps, spread[:, 0])
    high = np.interp(steps, *thinned(ranks.steps, spread[:, 2]))
    band = axes.fill_between(steps, low, high, color=LIGHT["accent"], alpha=0.25, linewidth=0)
    middle = axes.plot(*thinned(ranks.steps, spread[:, 1]), color=LIGHT["accent"])
    axes.set(xlabel="step", ylabel="ms per step")
    _legend(axes, [*middle, band], ["median rank", "fastest to slowest"])
    worst = float(np.max(spread[:, 2] - spread[:, 0]))
    description = (
        f"Time until the ranks are ready to reduce, by step; at most {worst:.3g} ms between the first and the last."
    )
    yield Figure("ranks-by-step", "Spread of the ranks", description, canvas)


def classified(found: Classified) -> Iterator[Figure]:
    """The confusion matrix and the accuracy of each class."""
    from matplotlib.colors import to_rgba_array

    number, counts = len(found.classes), found.confusion
    side = min(6.0, max(3.0, 0.9 + 0.3 * number))
    canvas, axes = _canvas((SMALL[0] if number <= CELLS else 6.0, side))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = np.tile(to_rgba_array(LIGHT["accent"]), (number, number, 1)).reshape(number, number, 4)
    image[..., 3] = shares**0.5  # so that a few mistakes are seen
    axes.imshow(image, interpolation="none", aspect="auto")
    axes.grid(visible=False)
    ticks = np.arange(0, number, -(-number // ROWS))
    labels = [_short(found.classes[tick]) for tick in ticks]
    turned = 90 if max(map(len, labels)) > 3 or number > CELLS else 0
    axes.set_xticks(ticks, labels, rotation=turned)
    axes.set_yticks(ticks, labels)
    axes.set(xlabel="prediction", ylabel="target")
    for (row, column), count in np.ndenumerate(counts) if number <= CELLS else ():
        if count:
            colour = "white" if shares[row, column] > 0.3 else LIGHT["ink"]
            axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=7.5)
    right = int(counts.diagonal().sum())
    description = f"Confusion matrix of {number} classes: {right} of {int(counts.sum())} samples are right."
    yield Figure(f"{_file_name(found.part)}-confusion", f"Confusion matrix ({found.part})", description, canvas)

    recall = found.recall
    known = np.flatnonzero(~np.isnan(recall))
    order = known if len(known) <= ROWS else known[np.argsort(recall[known], kind="stable")[:ROWS]]
    canvas, axes = _canvas((SMALL[0], max(SMALL[1], side if number <= CELLS else 0.8 + 0.15 * len(order))))
    bars = axes.barh(np.arange(len(order)), 100 * recall[order], height=0.6, color=LIGHT["accent"])
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=7.5)
    axes.set_yticks(np.arange(len(order)), [_short(found.classes[label]) for label in order])
    axes.set(xlim=(0, 112), ylim=(len(order) - 0.4, -0.6), xlabel="% of the class's samples that are right")
    axes.set_xticks(range(0, 101, 25))
    axes.grid(axis="x", visible=True)
    axes.grid(axis="y", visible=False)
    which = "Accuracy by class" if len(order) == len(known) else f"The {ROWS} classes with the lowest accuracy"
    description = ", ".join(f"{found.classes[label]} {100 * recall[label]:.1f} %" for label in order)
    yield Figure(f"{_file_name(found.part)}-classes", f"{which} ({found.part})", f"{which}: {description}.", canvas)


def thinned(steps: Values, values: Values, most: int = MOST) -> tuple[Numbers, Numbers]:
    """At most so many points: the first and the last one, and the minimum and maximum of each interval."""
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(x) <= most:
        return x, y
    cuts = np.linspace(1, len(x) - 1, (most - 2) // 2 + 1).astype(int)
    picked = {0, len(x) - 1}
    for begin, end in pairwise(cuts):
        picked |= {begin + int(np.argmin(y[begin:end])), begin + int(np.argmax(y[begin:end]))}
    chosen = sorted(picked)
    return x[chosen], y[chosen]


def smoothed(values: Values) -> Numbers:
    """The mean of the values around each one: a twenty-fifth of all, less at both ends."""
    y = np.asarray(values, dtype=np.float64)
    half, here = max(4, len(y) // 50), np.arange(len(y))
    begin, end = np.maximum(here - half, 0), np.minimum(here + half + 1, len(y))
    sums = np.concatenate([[0.0], np.cumsum(y)])
    means = (sums[end] - sums[begin]) / (end - begin)
    return np.asarray(np.clip(means, y.min(), y.max()))  # a constant stays one, whatever was rounded


def _canvas(inches: tuple[float, float], nrows: int = 1, **more: Any) -> tuple[Any, Any]:
    """An empty figure and its axes."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=inches)
    return canvas, canvas.subplots(nrows, **more)


def _legend(axes: Axes, handles: Sequence[Any], labels: Sequence[str], columns: int = 3) -> None:
    """A legend above the axes, so that it covers nothing."""
    seen = [f" {_short(label)}" if label.startswith("_") else _short(label) for label in labels]  # _ would hide it
    axes.legend(handles, seen, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=columns, columnspacing=1.2)


def _colour(number: int) -> str:
    return LIGHT[SERIES[number % len(SERIES)]]


def _short(text: str, most: int = 24) -> str:
    text = plain(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _file_name(text: str) -> str:
    """Of letters, digits and dashes only."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "figure"
