"""`python -m evenkeel sample`: continue a text with a run's model. Only reads the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from ..common.display import say
from ..config import FINITE, SEEDS, option
from ..run.chosen import chosen


@dataclass(frozen=True)
class SampleCommand:
    """Continue a text with the model of a run.

    The run is of --task lm, or of a task of your own that defines `generate`.

    Example: python -m evenkeel sample runs/lm "It is a truth"

    The same options give the same text on the same machine. What follows after `--` are options of train.py that differ
    from the run's.
    """

    run: tyro.conf.Positional[Path]
    """The run directory."""
    text: tyro.conf.Positional[str] = ""
    """Beginning of the text. Default: empty."""
    tokens: int = option(200, 1, 10**6)
    """Maximum number of tokens to add; the document may end earlier."""
    temperature: float = option(0.8, 0, FINITE)
    """Randomness: below 1 prefers likely tokens, 0 always takes the most likely one."""
    top_k: int = option(0, 0)
    """Draw from the K most likely tokens only (0: from all)."""
    seed: int = option(0, *SEEDS)
    """Seed of the random draws."""
    checkpoint: str = "last"
    """last, best or a step, e.g. 460."""

    def __call__(self, train_options: list[str]) -> int:
        """Load the model, and print the text with what it adds."""
        chosen(self.run, self.checkpoint)  # refused before torch is imported
        import torch

        from ..run.build import build_model
        from ..run.weights import read_chosen
        from ..tasks.command_line import parse_as_recorded

        config, task = parse_as_recorded(self.run, train_options)
        model = build_model(config, task)
        read_chosen(model, self.run, self.checkpoint)
        model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        with torch.no_grad():
            more = task.generate(model, self.text, self.tokens, self.temperature, self.top_k, self.seed)
        say(self.text + more)
        return 0
