"""Objects as YAML, without a library for it, and words that pass through Kubernetes unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Plain words that no version of YAML takes for a number, a date, a truth value or null.
PLAIN = re.compile(r"(?!(?:true|false|yes|no|on|off|null|[yn])$)[A-Za-z][\w./-]*", re.IGNORECASE | re.ASCII)

# JSON leaves these as they are; YAML forbids them, or takes them for ends of lines.
SPECIAL = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def escaped(word: str) -> str:
    """A word of `args` or a value of `env` as Kubernetes must get it: it expands $(NAME), and makes one $ of two."""
    return word.replace("$", "$$")


def document(*objects: dict[str, Any]) -> str:
    """Some objects as one YAML text, without what is None."""
    return "\n---\n".join("\n".join(_lines(it)) for it in objects)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if isinstance(inner, (dict, list)) and inner:
                yield f"{_scalar(key)}:"
                yield from (f"  {line}" for line in _lines(inner))
            elif inner is not None:
                yield f"{_scalar(key)}: {_scalar(inner)}"
    elif isinstance(value, list):
        for first, *rest in map(_lines, value):
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value):
        return value
    return SPECIAL.sub(lambda it: f"\\u{ord(it[0]):04x}", json.dumps(value, ensure_ascii=False))
