"""In the place of mlflow where it is not installed: its functions write to a file. A run belongs to a thread."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_thread = threading.local()
_file = Path(os.environ["MLFLOW_STAND_IN"])


def _note(call: str, **what: Any) -> None:
    with _file.open("a") as file:
        file.write(json.dumps({"call": call, "run": _thread.run, **what}) + "\n")


def start_run(run_id: str | None = None, run_name: str | None = None) -> Any:
    _thread.run = run_id or f"{run_name}-1"
    _note("start_run", new=run_id is None)
    return SimpleNamespace(info=SimpleNamespace(run_id=_thread.run))


def log_params(params: dict[str, Any]) -> None:
    _note("log_params", params=params)


def log_metric(key: str, value: float, step: int) -> None:
    _note("log_metric", key=key, value=float(value), step=step)


def log_artifact(local_path: str, artifact_path: str) -> None:
    _note("log_artifact", path=local_path, to=artifact_path, bytes=Path(local_path).stat().st_size)


def end_run(status: str) -> None:
    _note("end_run", status=status)
