"""A task's own order of samples: drawn by weights, or listed for each epoch.

The sample at a position stays a pure function of (seed, epoch, position), as in the usual order (`shuffle`). So a
resume on any number of ranks needs no state. torch's `WeightedRandomSampler` draws an epoch at once from a generator,
whose state belongs to the process. Here each position has its own uniform number, a keyed hash, and the cumulative sum
of the weights maps it to a sample.

Each position comes exactly once, but a sample may come several times in an epoch, or never.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from ..common.errors import EndedHere, Refusal
from ..common.naming import kind_of
from .blocks import Blocks, Integers, blocks_of
from .randomness import derive, generators_kept, seed_host
from .shuffle import Array, mixed
from .token_batches import TokenBatches

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 by the golden ratio, the distance of SplitMix64's states
POOL = 100
"""Groups of `buckets` that are sorted by length together. With more groups there is a little less padding, and less
mixing."""


class Draws:
    """Samples drawn with replacement, each with a probability in proportion to its weight; N draws an epoch.

    >>> Draws(np.array([0.0, 1.0, 3.0])).shuffled(np.arange(8, dtype=np.uint64), seed=0, epoch=0).tolist()
    [2, 2, 1, 2, 1, 1, 2, 2]
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        self._ends = np.cumsum(weights / weights.max())  # so that the total is neither subnormal nor too large
        self.length = len(weights)
        self.name = f"{self.length} draws by sample_weights() ({_digest(weights)})"

    def shuffled(self, positions: Array, seed: int, epoch: int) -> Array:
        """Return the samples at some positions of an epoch, which is SplitMix64 from the epoch's own seed."""
        bits = mixed(positions * GOLDEN, np.uint64(derive(seed, "draws", epoch)))
        uniform = (bits >> np.uint64(11)) * 2.0**-53  # below 1, and below the total after rounding
        # the first sum above it: this never selects a sample of weight 0
        drawn: Array = np.searchsorted(self._ends, uniform * self._ends[-1], side="right").astype(np.uint64)
        return drawn


class Listed:
    """The orders of a task's ``order(epoch)``.

    Args:
        method: epoch -> indices of samples. The generators are seeded from (seed, epoch) before each call.
        first: its result for epoch 0.
        places: for each sample of the task's data set its index among the remaining ones; -1 if it was removed.
        seed: the run's.

    Attributes:
        length: positions of each epoch.

    Raises:
        Refusal: it is not a valid order, or a second call of the method returns another one.
    """

    def __init__(self, method: Callable[[int], Any], first: Any, places: Integers, seed: int) -> None:
        self._method, self._places, self._seed = method, places, seed
        self._known: dict[int, Integers] = {}
        order = self._checked(0, first)
        if not len(order):
            raise Refusal("order(0) has only samples that --validation or --limit-batches removes; leave these out")
        if not np.array_equal(order, self._checked(0, call_seeded(method, seed, 0))):
            raise Refusal(
                "order(0) returns another order at each call, so a run could not resume; compute it from the epoch "
                "only, or draw from torch's, NumPy's or Python's global generator, which are seeded before each call"
            )
        self._known[0], self.length = order, len(order)
        self.name = f"an order of {self.length} samples by order() ({self.digest(0)})"

    def shuffled(self, positions: Array, seed: int, epoch: int) -> Array:
        """Return the samples at some positions of an epoch."""
        return self._of(epoch)[positions].astype(np.uint64)

    def digest(self, epoch: int) -> str:
        """A digest of an epoch's order, which ranks and starts compare."""
        return _digest(self._of(epoch))

    def _of(self, epoch: int) -> Integers:
        if epoch not in self._known:
            order = self._checked(epoch, call_seeded(self._method, self._seed, epoch))
            if len(order) != self.length:
                raise EndedHere(
                    f"order({epoch}) has {len(order)} samples and order(0) has {self.length}"
                    f"{' after --validation and --limit-batches' if (self._places < 0).any() else ''}: all epochs of a "
                    "run have one length; repeat or leave out samples, or begin a run for each (--init-from)"
                )
            newest = max(self._known, default=epoch)  # loader processes are an epoch ahead
            self._known = {it: self._known[it] for it in self._known if it == newest} | {epoch: order}
        return self._known[epoch]

    def _checked(self, epoch: int, found: Any) -> Integers:
        kind = EndedHere if epoch else Refusal
        try:
            numbers = np.asarray(found)
        except (TypeError, ValueError):
            numbers = np.asarray(None)
        samples = len(self._places)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
            shape = f"of shape {numbers.shape} and type {numbers.dtype}" if numbers.dtype != object else "of no numbers"
            raise kind(
                f"order({epoch}) returned {kind_of(found)} {shape}; return integer sample indices, of shape [length]"
            )
        if len(wrong := np.flatnonzero((numbers < 0) | (numbers >= samples))):
            raise kind(
                f"order({epoch}) has sample {numbers[wrong[0]]} at position {wrong[0]}, but train_dataset() has "
                f"{samples} samples; return numbers from 0 to {samples - 1}"
            )
        left = self._places[numbers.astype(np.int64)]
        return left[left >= 0]


class Ordered(Dataset[Any]):
    """A data set with its own order, which `ElasticSampler` uses; in all else the data set itself."""

    def __init__(self, dataset: Any, order: Draws | Listed | TokenBatches) -> None:
        self.dataset, self.order = dataset, order

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def ordered(
    dataset: Any, size: int, chosen: Sequence[int] | None, weights: Callable[[], Any], order: Callable[[int], Any],
    seed: int,
) -> Any:  # fmt: skip
    """Give a data set the order that its task defines; without one return it unchanged.

    Args:
        dataset: the training data.
        size: samples of train_dataset()'s result, to which the task's indices refer.
        chosen: the indices there of the samples of `dataset`; None: they are the same.
        weights, order: the task's methods sample_weights and order.
        seed: the run's.

    Raises:
        Refusal: the task defines both, or one does not fit the data.
    """
    by_weight, first = call_seeded(weights, seed), call_seeded(order, seed, 0)
    if by_weight is None and first is None:
        return dataset
    name = "sample_weights()" if first is None else "order()"
    if by_weight is not None and first is not None:
        raise Refusal("the task has both sample_weights() and order(); let one of them return None")
    if hasattr(dataset, "first_samples"):
        raise Refusal(f"{name}: train_dataset() returned a stream, which has its own order; let {name} return None")
    rows = np.arange(size) if chosen is None else np.asarray(chosen, dtype=np.int64)
    if first is None:
        found = _weights(by_weight, size)[rows]
        if not found.any():
            left = " of the samples left by --validation and --limit-batches" if len(rows) < size else ""
            raise Refusal(f"sample_weights(): all weights{left} are 0; give some samples a weight")
        return Ordered(dataset, Draws(found))
    places = np.full(size, -1)
    places[rows] = np.arange(len(rows))
    return Ordered(dataset, Listed(order, first, places, seed))


def _weights(found: Any, size: int) -> NDArray[np.float64]:
    try:
        values = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty(())
    if values.shape != (size,):
        raise Refusal(
            f"sample_weights() returned {kind_of(found)} of shape {list(values.shape)}, but train_dataset() has {size} "
            "samples; return a number for each of them"
        )
    if len(wrong := np.flatnonzero(~(np.isfinite(values) & (values >= 0)))):
        raise Refusal(f"sample_weights(): sample {wrong[0]} has the weight {values[wrong[0]]:g}; it must be 0 or more")
    return values


def call_seeded(method: Callable[..., Any], seed: int, *epoch: int) -> Any:
    """Call a method of a task with the generators seeded from (seed, its name, epoch), and restore them."""
    with generators_kept():
        seed_host(derive(seed, method.__name__, *epoch))
        return method(*epoch)


def by_tokens(dataset: Any, lengths: Any, size: int, chosen: Sequence[int] | None, **cut: int) -> Ordered:
    """Give a data set micro-batches of a bounded number of tokens.

    Args:
        dataset: the training data, in the usual order.
        lengths: the result of the task's sample_lengths().
        size, chosen: as for `ordered`.
        cut: of `TokenBatches`.

    Raises:
        Refusal: the lengths do not fit the data, or the data has an order already.
    """
    if isinstance(dataset, Ordered) or hasattr(dataset, "first_samples"):
        own = "the task has sample_weights() or order()" if isinstance(dataset, Ordered) else "the data is a stream"
        raise Refusal(f"--batch-tokens: {own}, which is another order of samples; leave one of the two out")
    found = np.asarray(lengths if lengths is not None else [])
    if found.shape != (size,) or found.dtype.kind not in "iu" or found.min() < 1:
        raise Refusal(
            f"--batch-tokens: sample_lengths() returned {kind_of(lengths)} of shape {list(found.shape)}; return the "
            f"tokens of each of the {size} samples of train_dataset(), integers from 1 on"
        )
    rows = found if chosen is None else found[np.asarray(chosen, dtype=np.int64)]
    return Ordered(dataset, TokenBatches(rows.astype(np.int64), **cut))


def order_of(dataset: Any) -> Blocks | Draws | Listed | TokenBatches | None:
    """The order of a data set, its own or its task's; None: the usual one."""
    return dataset.order if isinstance(dataset, Ordered) else blocks_of(dataset)


def order_name(dataset: Any) -> str:
    """The record of the order of the training data in a run; empty: the usual one."""
    order = order_of(dataset)
    return order.name if order else ""


def token_batches(dataset: Any) -> TokenBatches | None:
    """The micro-batches of --batch-tokens; None without it."""
    return order if isinstance(order := order_of(dataset), TokenBatches) else None


def positions_in(dataset: Any) -> int:
    """Positions of an epoch: the number of samples, unless the task defines an order of another length."""
    return dataset.order.length if isinstance(dataset, Ordered) else len(dataset)


def balanced(labels: ArrayLike) -> NDArray[np.float64]:
    """Weights for `Task.sample_weights` that draw every class equally often.

    Args:
        labels: the class of each sample, a number or a name, shape [N].

    >>> balanced(["cat", "dog", "cat", "cat"]).round(2).tolist()
    [0.33, 1.0, 0.33, 0.33]
    """
    _, of, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    return 1 / counts[of.reshape(-1)]


def buckets(lengths: ArrayLike, size: int) -> Integers:
    """An order for `Task.order` with shuffled groups of samples of similar length.

    Draws from NumPy's global generator, which is seeded by (--seed, epoch) before each call of `Task.order`. Pools of
    some groups are drawn at random and sorted by length, so that groups differ from epoch to epoch.

    Args:
        lengths: of each sample, shape [N].
        size: samples of a group: the --micro-batch, which should divide --batch-size.

    >>> np.random.seed(0)
    >>> buckets([5, 90, 6, 91, 7, 92, 8], size=2).tolist()
    [1, 3, 0, 2, 4, 6, 5]
    """
    values = np.asarray(lengths)
    order = np.random.permutation(len(values))
    for start in range(0, len(order), POOL * size):
        pool = order[start : start + POOL * size]
        pool[:] = pool[np.argsort(values[pool], kind="stable")]
    whole = len(order) // size * size  # a smaller group stays last: otherwise it would shift all that follow
    groups = order[:whole].reshape(-1, size)
    return np.concatenate([groups[np.random.permutation(len(groups))].reshape(-1), order[whole:]])


def _digest(values: NDArray[Any]) -> str:
    return hashlib.sha256(values.astype(values.dtype.newbyteorder("<")).tobytes()).hexdigest()[:16]
