"""Where a thin project gets the package: a wheel, a checkout, a git address, or an index.

The public index has another package of this name. So an index is used only if --from says so.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ...common.errors import Refusal

GIT = re.compile(r"git\+(https|ssh|file)://[^\s\"'\\]+@[^\s\"'\\@:]+")
VERSION = r"[0-9][0-9A-Za-z.!+]*"
CHOICES = "the path of a wheel or checkout, git+https://HOST/evenkeel@REVISION, or evenkeel==VERSION"


@dataclass(frozen=True)
class Source:
    """Where the project gets the package."""

    requirement: str
    """As pip reads it: evenkeel==0.1.0, or evenkeel @ git+https://..."""
    kind: str = "index"
    """index, git or wheel."""
    wheel: Path | None = None
    """The file to copy."""


def source_of(typed: str, scratch: Path) -> Source:
    """What --from names; a wheel of a checkout is built in `scratch`.

    Raises:
        Refusal: neither a wheel or checkout of this package, a git address with a revision, nor a version.
    """
    if re.fullmatch(f"evenkeel=={VERSION}", typed):
        return Source(typed)
    if typed.startswith("git+"):
        host = typed.partition("://")[2].partition("/")[0]
        if not GIT.fullmatch(typed) or "@" not in typed.partition("://")[2][len(host) :]:
            raise Refusal(f"--from {typed}: name the revision, as in git+https://HOST/evenkeel@v0.1.0")
        if "@" in host and (":" in host.partition("@")[0] or not typed.startswith("git+ssh:")):  # a token has no colon
            raise Refusal("--from: the address has a password, which would stand in files; let git ask for it")
        # the pip that some Pythons bring takes no address without a host
        return Source(f"evenkeel @ {typed.replace('git+file:///', 'git+file://localhost/')}", "git")
    path = Path(typed)
    if (path / "src" / "evenkeel" / "__init__.py").is_file():
        path = _build(path, scratch)
    if path.suffix != ".whl":
        raise Refusal(f"--from {typed}: give {CHOICES}")
    named = re.fullmatch(rf"evenkeel-({VERSION})-py3-none-any\.whl", path.name)
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise Refusal(f"--from {typed}: {'is not a wheel' if path.is_file() else 'no such file'}")
    if not named:
        raise Refusal(f"--from {typed}: is not a wheel of evenkeel; those are named evenkeel-VERSION-py3-none-any.whl")
    return Source(f"evenkeel=={named[1]}", "wheel", path)


def _build(checkout: Path, scratch: Path) -> Path:
    """A wheel of a checkout, built outside of it, because building leaves files."""
    sys.stderr.write(f"evenkeel: building a wheel of {checkout}, which may take half a minute\n")
    source, python = scratch / "source", checkout / ".venv" / "bin" / "python"
    shutil.copytree(checkout / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, source)
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(scratch), str(source)]
    done = subprocess.run([python if python.exists() else sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise Refusal(f"{checkout}: cannot build a wheel: {why}; run `make setup` there, or give another --from")
    return next(scratch.glob("*.whl"))


def own_source() -> str:
    """Where this evenkeel itself came from, as --from takes it: its checkout, wheel or git address.

    Raises:
        Refusal: it came from an index, its origin was not recorded, or the wheel is gone.
    """
    checkout = Path(__file__).resolve().parents[4]
    if (checkout / "pyproject.toml").is_file() and Path(__file__).resolve().is_relative_to(checkout / "src"):
        return str(checkout)
    try:  # pip records it: packaging.python.org/specifications/direct-url
        known = json.loads(importlib.metadata.distribution("evenkeel").read_text("direct_url.json") or "{}")
    except importlib.metadata.PackageNotFoundError:
        known = {}
    url = urlsplit(known.get("url", ""))
    if "vcs_info" in known:
        return f"git+{known['url']}@{known['vcs_info']['commit_id']}"
    path = Path(unquote(url.path))
    if url.scheme == "file" and path.exists():
        return str(path)
    raise Refusal(f"this evenkeel has no record of a wheel, a checkout or git; name one: --from, {CHOICES}")
