"""Rank 0's news of its checkpoints, for nodes that share no disk with it: they may delete their older snapshots."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

SAVED = "saved"
"""Key in the store: the step of rank 0's last complete checkpoint."""


class News:
    """What a rank says and hears of saved steps, with each beat.

    Args:
        local_rank: only 0 hears them for its node.
        on_saved: is called on each node with the newest step that rank 0 has saved, if it is new.
    """

    def __init__(self, local_rank: int, on_saved: Callable[[int], None]) -> None:
        self._local_rank, self._on_saved = local_rank, on_saved
        self._saved, self._announced, self._heard = 0, 0, 0  # steps
        self._cleaning = threading.Thread()  # the last that has called `on_saved`

    def announce(self, step: int) -> None:
        """On rank 0: tell all nodes of a complete checkpoint, with the next beat."""
        self._saved = step

    def share(self, store: Store) -> None:
        """Tell and hear what is new; the store may raise a RuntimeError."""
        if (step := self._saved) > self._announced:
            store.set(SAVED, str(step))
            self._announced = step
        asks = self._local_rank == 0 and not self._cleaning.is_alive() and store.check([SAVED])
        if asks and (step := int(store.get(SAVED))) > self._heard:
            # in a thread of its own: while a slow disk deletes, this rank must not look frozen
            self._cleaning = threading.Thread(target=self._on_saved, args=(step,), name="clean", daemon=True)
            self._cleaning.start()
            self._heard = step
