"""Reports as a user makes them, the files that they may also read, and what a browser says of them."""

import base64
import io
import json
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image

from evenkeel.run.records import read_config
from evenkeel.tasks.classify import Classify
from tests.support.processes import evenkeel, run
from tests.support.small_runs import OLD_RUNS

CHROMIUM = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")

MEASURE = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(it => !it.closest(".scroll") &&
    it.getBoundingClientRect().right > innerWidth + 1).map(it => it.tagName + "." + it.className);
  const ink = getComputedStyle(document.querySelector("h1")).color;
  parent.postMessage(JSON.stringify({scrolls: document.documentElement.scrollWidth > innerWidth, wide, ink,
    width: innerWidth, lacking: [...document.images].filter(it => !it.naturalWidth).length}), "*");
})</script>"""
"""Added to a copy of a page, which itself runs no script: whether it is wider than the window, what it lacks."""


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    return evenkeel("report", *arguments)


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
            facts = {"arrival": arrival, "data_wait": [0.001] * ranks}
            hosts = {"hosts": ["node0", "node0", "node1"][:ranks]} if line in (0, lines // 2) else {}
            file.write(json.dumps({"step": 10 * line + 10, "time": float(line)} | hosts | facts) + "\n")
        file.write('{"step": 999, "arriv')


class Seen(NamedTuple):
    """What came of a page in a browser."""

    measured: dict[str, Any]
    """By MEASURE, in a copy of the page."""
    dom: str
    """Of the page itself, as are the next two of both."""
    console: str
    requests: set[str]
    """Besides the pages themselves."""


def in_a_browser(page: Path, width: int, dark: bool = False) -> Seen:
    """Open a page in headless Chromium, served by HTTP, so that it could ask for more."""
    folder = page.parent / f"browser-{width}-{dark}"
    folder.mkdir()
    text = page.read_text()
    (folder / "page.html").write_text(text)
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    (folder / "measured.html").write_text(free.replace("</body>", f"{MEASURE}</body>"))
    # a headless window is at least 500 pixels wide, a frame is not
    (folder / "frame.html").write_text(
        f'<link rel="icon" href="data:,"><iframe src="measured.html" style="border:0;width:{width}px;height:3000px">'
        "</iframe><pre></pre><script>onmessage = it => document.querySelector('pre').textContent = it.data</script>"
    )
    requests = set[str]()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.add(self.path)
            super().do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        frame, said = _chromium(server.server_port, "frame.html", folder, dark)
        dom, more = _chromium(server.server_port, "page.html", folder, dark)
        server.shutdown()
    found = re.search(r"<pre>(.*?)</pre>", frame)
    assert found, "the page did not load"
    return Seen(json.loads(found[1]), dom, said + more, requests - {"/frame.html", "/measured.html", "/page.html"})


def _chromium(port: int, name: str, folder: Path, dark: bool) -> tuple[str, str]:
    """(the DOM of a page, what the console said)."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--enable-logging=stderr"]
    done = run([*command, "--virtual-time-budget=5000", "--dump-dom", f"http://127.0.0.1:{port}/{name}"])
    return done.stdout, "".join(line for line in done.stderr.splitlines(keepends=True) if "CONSOLE" in line)
