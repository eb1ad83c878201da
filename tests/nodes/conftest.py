"""For all tests on nodes that are network namespaces."""

from pathlib import Path

import pytest

from evenkeel.cli.chaos.nodes import why_not

REASON = why_not()
"""Why there can be no nodes here, or None."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder where there can be no nodes."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skipif(REASON is not None, reason=str(REASON)))
