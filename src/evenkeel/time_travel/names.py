"""Where a sample comes from, if its data set can tell."""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from ..data.dataset import Limited


def source_of(dataset: Any, index: int) -> str:
    """The file of a sample, or its shard; "" if neither is known.

    Known are this package's image folders and shards, torchvision's folders (`samples`), and data sets with a list
    `paths` or `files`, all also inside subsets.
    """
    while hasattr(dataset, "dataset"):
        if type(dataset) in (Subset, Limited):  # others, such as `Collated`, may pass on the attributes of an inner one
            index = int(dataset.indices[index])
        dataset = dataset.dataset
    if hasattr(dataset, "shards") and hasattr(dataset, "_starts"):
        shard = bisect_right(dataset._starts, index) - 1
        return f"{dataset.folder / dataset.shards[shard].name}, sample {index - dataset._starts[shard]}"
    for name in ("paths", "files", "samples", "imgs"):
        listed = getattr(dataset, name, None)
        try:
            found = listed[index] if listed is not None else None
        except (LookupError, TypeError):
            continue
        found = found[0] if isinstance(found, tuple) else found
        if isinstance(found, (str, bytes, Path)):
            return str(Path(getattr(dataset, "folder", "")) / os.fsdecode(found))
    return ""
