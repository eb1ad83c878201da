"""Reports as a user makes them, the files that they may also read, and what a browser says of them."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from evenkeel.run.records import read_config
from evenkeel.tasks.classify import Classify
from tests.support.processes import run
from tests.support.small_runs import OLD_RUNS

REPORT = [sys.executable, "-m", "evenkeel", "report"]

CHROMIUM = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")

MEASURE = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(it => !it.closest(".scroll") &&
    it.getBoundingClientRect().right > innerWidth + 1).map(it => it.tagName + "." + it.className);
  const loaded = performance.getEntriesByType("resource").map(it => it.name);
  const ink = getComputedStyle(document.querySelector("svg text") || document.body).fill;
  parent.postMessage(JSON.stringify({scrolls: document.documentElement.scrollWidth > innerWidth, wide, loaded, ink,
    width: innerWidth, pictures: [...document.images].filter(it => !it.naturalWidth).length}), "*");
})</script>"""
"""Added to a copy of a page, which itself runs no script: whether it is wider than the window, what it has loaded."""


def report(*arguments: object, expect: int = 0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Make a report."""
    return run([*REPORT, *map(str, arguments)], expect=expect, env=env)


def copy_of_a_run(to: Path, name: str = "finished") -> Path:
    """A small run of the task `classify` that was made once."""
    return Path(shutil.copytree(OLD_RUNS / name, to))


def write_predictions(run_dir: Path, classes: list[str] | None = None) -> tuple[list[int], list[int]]:
    """What --save-predictions leaves of the test set, from the run's own model.pt; returns targets and predictions."""
    options = read_config(run_dir / "config.toml")
    task = Classify(width=options["width"])
    model = task.model()
    model.load_state_dict(torch.load(run_dir / "model.pt", weights_only=True))
    images, targets = task.test_dataset()[range(360)]
    with torch.inference_mode():
        sure, found = model.eval()(task.inputs(images)).softmax(1).max(1)
    wrong = [int(it) for it in sure.argsort(descending=True) if found[it] != targets[it]]
    worst = [
        {"index": it, "target": int(targets[it]), "prediction": int(found[it]), "confidence": float(sure[it]),
         "image": _png(images[it])}
        for it in wrong[:12]
    ]  # fmt: skip
    content = {"set": "test", "step": 60, "classes": classes, "worst": worst, "confidences": sure.tolist()}
    content |= {"targets": targets.tolist(), "predictions": found.tolist()}
    (run_dir / "predictions").mkdir()
    (run_dir / "predictions" / "test.json").write_text(json.dumps(content))
    return targets.tolist(), found.tolist()


def _png(image: torch.Tensor) -> str:
    pixels = (image[0].float() / image.max().clamp(min=1) * 255).to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(file := io.BytesIO(), format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def write_ranks(run_dir: Path, lines: int = 40) -> None:
    """A ranks.jsonl of three ranks, the last one slow, and of two from the middle on; its last line is cut."""
    with (run_dir / "ranks.jsonl").open("w") as file:
        for line in range(lines):
            ranks = 3 if line < lines / 2 else 2
            arrival = [0.010 + 0.001 * (line % 3), 0.011, 0.020][:ranks]
            facts = {"hosts": ["node0", "node0", "node1"][:ranks], "arrival": arrival, "data_wait": [0.001] * ranks}
            file.write(json.dumps({"step": 10 * line + 10, "time": float(line)} | facts) + "\n")
        file.write('{"step": 999, "arriv')


def in_a_browser(page: Path, width: int, dark: bool = False) -> tuple[dict[str, object], str, str]:
    """Open a page in headless Chromium: (what MEASURE found, the DOM, what the console said)."""
    folder = page.parent / f"browser-{width}-{dark}"
    folder.mkdir()
    measured, frame = folder / "measured.html", folder / "frame.html"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    measured.write_text(text.replace("</body>", f"{MEASURE}</body>"))
    # a headless window is at least 500 pixels wide, a frame is not
    frame.write_text(
        f'<iframe src="measured.html" style="border:0;width:{width}px;height:3000px"></iframe>'
        "<pre></pre><script>onmessage = it => document.querySelector('pre').textContent = it.data</script>"
    )
    found = re.search(r"<pre>(.*?)</pre>", _chromium(frame, folder, dark)[0])
    assert found, "the page did not load"
    dom, said = _chromium(page, folder, dark)
    return json.loads(found[1]), dom, said


def _chromium(page: Path, folder: Path, dark: bool) -> tuple[str, str]:
    assert CHROMIUM
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--enable-logging=stderr"]
    done = run([*command, "--virtual-time-budget=5000", "--dump-dom", page.resolve().as_uri()])
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
