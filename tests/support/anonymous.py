"""How much memory a process must have: what is not a file's, which the kernel can write to the disk and free."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def anonymous() -> int:
    """Bytes of this process's memory that belong to no file."""
    (line,) = (it for it in Path("/proc/self/status").read_text().splitlines() if it.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


@contextmanager
def growth() -> Iterator[list[int]]:
    """By how much that grows at most within the block; looks each millisecond, and tells it at the end."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again, and not be seen
    found, over = [0], threading.Event()
    before = anonymous()

    def watch() -> None:
        while not over.wait(0.001):
            found[0] = max(found[0], anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
