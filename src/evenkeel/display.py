"""The live line of a run on a terminal. Imported only where there is one: rich takes as long as all of our modules."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column


class Display:
    """A bar with the last step's text, below what is printed meanwhile.

    Args:
        total_steps: of the run.
        on_broken_pipe: is called when the terminal has gone.
    """

    def __init__(self, total_steps: int, on_broken_pipe: Callable[[], None]) -> None:
        # no colours for numbers, and no line breaks of rich's own
        self._console = _Console(highlight=False, soft_wrap=True)
        self._console.gone = on_broken_pipe
        columns = (
            # only the text at the end may shrink in a narrow terminal
            TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=16, table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True)),
        )
        self._progress = Progress(*columns, console=self._console, expand=True)
        self._line = self._progress.add_task("starting", total=total_steps)

    def start(self, step: int) -> None:
        """Show the bar, at a step."""
        self._progress.start()
        self._progress.update(self._line, completed=step)

    def update(self, step: int, text: str) -> None:
        """A step is done."""
        self._progress.update(self._line, completed=step, description=text)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, markup=False)

    def stop(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class _Console(Console):
    """An output whose reader may go without an end to the training."""

    gone: Callable[[], None]

    def on_broken_pipe(self) -> None:
        self.quiet = True
        self.gone()
