"""The one line in which a call is refused, or ends the run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from evenkeel.common.errors import Refusal


def line_of(kind: type[Exception], call: Callable[..., object], /, *arguments: Any, **options: Any) -> str:
    """What an error of this kind says, which the call must raise."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


refusal_of = partial(line_of, Refusal)
