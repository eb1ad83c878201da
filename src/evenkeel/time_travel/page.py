"""`replay --html`: what a replay has found, as one page in the style of the report."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli.html_page import document, table
from ..common.errors import Ended
from ..common.files import write_atomically

if TYPE_CHECKING:
    from .replay import Replay


def write_page(path: Path, name: str, found: Replay) -> None:
    """Write the page into a new file.

    Args:
        path: of the file.
        name: of the run.
        found: what to show; texts in it, such as names of files and modules, are escaped here.

    Raises:
        Ended: the file cannot be written.
    """
    numbers = [step["step"] for step in found.steps]
    steps = f"step {' to '.join(str(it) for it in dict.fromkeys([*numbers[:1], *numbers[-1:]]))}" if numbers else ""
    began = f"the checkpoint of step {found.started}" if found.started else "the start"
    lines = [found.agreement, found.ended, f"code or libraries differ: {found.other}" if found.other else ""]
    colour = "good" if found.agrees else "bad"
    state = f'<span class="state" style="--of: var(--{colour})">{"agrees" if found.agrees else "differs"}</span>'
    header = f"<p>Evenkeel replay · from {began}</p><h1>{escape(f'{name} {steps}')} {state}</h1>"
    header += "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    sections = {f"Step {step['step']}": _step(step) for step in found.steps}
    content = document("replay", f"{name} {steps}", header, sections).encode(errors="replace")
    try:
        write_atomically(path, lambda file: file.write(content), private=True)
    except OSError as error:
        raise Ended(f"--html {path}: cannot be written: {error.strerror or error}") from None


def _step(step: dict[str, Any]) -> str:
    """A step's tables."""
    facts = {"loss": f"{step['loss']:.6g}", "norm of the gradient": f"{step['norm']:.6g}"}
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    norms = [
        [escape(it["name"]), *(_number(it[name]) for name in ("gradient", "update", "weights"))]
        for it in sorted(step["layers"], key=lambda it: -(it["gradient"] or 0.0))
    ]
    samples = [[str(it["sample"]), escape(it["source"]), _number(it["loss"])] for it in step["samples"]]
    largest = [[escape(it["module"]), _number(it["largest"])] for it in step["activations"]]
    return (
        f"<dl>{tiles}</dl>{_culprit(step['nonfinite'])}"
        + (f'<p class="card">{escape(step["note"])}</p>' if step["note"] else "")
        + table(["sample", "file", "loss"], samples)
        + table(["layer", "gradient", "update", "weights"], norms)
        + table(["module", "largest activation"], largest)
    )


def _culprit(bad: dict[str, Any] | None) -> str:
    """The operation whose result is not finite, and its samples."""
    if not bad:
        return ""
    named = [f"{it['sample']} {it['source']}".strip() for it in bad["samples"]]
    rows = {
        "result": bad["value"], "operation": bad["operation"], "module": bad["module"], "line": bad["line"],
        "input": "is not finite already: the data, or the weights" if bad["given"] else "", "samples": ", ".join(named),
    }  # fmt: skip
    return table(["the first that is not finite", ""], [[name, escape(text)] for name, text in rows.items() if text])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
