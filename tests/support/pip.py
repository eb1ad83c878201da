"""How this machine's pip reaches its index, for machines that a test makes."""

import ast
import os
import subprocess
import sys
from pathlib import Path


def pip_configuration() -> str:
    """How this machine's pip reaches its index, environment included, as a pip.conf; without local folders."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    options = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        words = [word for word in str(ast.literal_eval(value)).split() if not word.startswith(("/", "file:"))]
        if words:
            options[name.rpartition(".")[2]] = "\n    ".join(words)
    return "\n".join(["[global]", *(f"{name} = {value}" for name, value in options.items()), ""])


def certificates() -> Path | None:
    """The CA file that this machine's pip is told to use."""
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.cert"], capture_output=True, text=True, check=False
    ).stdout.strip()
    path = os.environ.get("PIP_CERT") or found
    return Path(path) if path else None
