"""Micro-batches of samples of similar length, with a bounded number of tokens (--batch-tokens).

A fixed number of long texts needs the memory of the longest ones, and wastes it on short ones. So a step has as many
samples as fit. Tokens are counted as padded: samples of a micro-batch times the longest of them. Token-based batches
are as in fairseq (Ott et al., "fairseq: A Fast, Extensible Toolkit for Sequence Modeling", NAACL 2019, `--max-tokens`).

The cut is one of the *sorted* lengths, which are the same in every epoch. So each epoch has the same number of steps,
and the position of a run stays one integer. Each epoch mixes the samples of one length, and the micro-batches.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from ..common.errors import Refusal
from .shuffle import Array, shuffled

Integers = NDArray[np.int64]


class TokenBatches:
    """The order of an epoch, and its cut into micro-batches: pure functions of (lengths, seed, epoch).

    Args:
        lengths: tokens of each sample, shape [N].
        tokens: at most so many in a step.
        samples: at most so many in a step.
        parts: micro-batches of a step, M, each of at most ``tokens // parts`` tokens.
        seed: the run's.

    Attributes:
        length: positions of each epoch, N.
        sizes: samples of each micro-batch, in the order of their lengths, shape [B]; the same in all epochs.
        padded: tokens of each of them, with padding, shape [B].

    Raises:
        Refusal: a sample does not fit into a micro-batch.

    >>> batches = TokenBatches(np.array([9, 2, 1, 2, 8, 2]), tokens=20, samples=8, parts=2, seed=0)
    >>> batches.sizes.tolist(), batches.padded.tolist()
    ([4, 1, 1], [8, 8, 9])
    >>> epoch = batches.shuffled(np.arange(6, dtype=np.uint64), seed=0, epoch=0)
    >>> epoch.tolist(), [batches.bounds(0, step) for step in range(batches.steps)]
    ([4, 2, 1, 5, 3, 0], [[0, 1, 5], [5, 6]])
    """

    def __init__(self, lengths: Integers, tokens: int, samples: int, parts: int, seed: int) -> None:
        self._lengths, self.parts, self._seed, self.length = lengths, parts, seed, len(lengths)
        most, fit = tokens // parts, -(-samples // parts)
        if len(wrong := np.flatnonzero(lengths > most)):
            number = wrong[lengths[wrong].argmax()]
            raise Refusal(
                f"--batch-tokens {tokens} --micro-batches {parts}: sample {number} has {lengths[number]} tokens, and a "
                f"micro-batch at most {most}; shorten it, or give --batch-tokens {lengths[number] * parts}"
            )
        ascending = np.sort(lengths)
        self._starts = _cut(ascending, most, fit)
        self.sizes = np.diff(self._starts)
        self.padded = self.sizes * ascending[self._starts[1:] - 1]
        digest = hashlib.sha256(np.asarray([most, fit, *lengths], "<i8").tobytes()).hexdigest()[:16]
        cut = f"{len(self.sizes)} micro-batches, {parts} in a step (--micro-batches),"
        self.name = f"{cut} of at most {most} tokens by sample_lengths() ({digest})"
        self._known: dict[int, tuple[Array, Integers]] = {}

    def shuffled(self, positions: Array, seed: int, epoch: int) -> Array:
        """Return the samples at some positions of an epoch."""
        return self._of(epoch)[0][positions]

    @property
    def steps(self) -> int:
        """Steps of an epoch; the last one may have fewer micro-batches."""
        return -(-len(self.sizes) // self.parts)

    def bounds(self, epoch: int, step: int) -> list[int]:
        """The first position of each micro-batch of an epoch's step, and the one after its last."""
        found: list[int] = self._of(epoch)[1][step * self.parts : (step + 1) * self.parts + 1].tolist()
        return found

    def _of(self, epoch: int) -> tuple[Array, Integers]:
        known = self._known.get(epoch)
        if known is None:
            known = self._computed(epoch)
            self._known = dict([*self._known.items(), (epoch, known)][-2:])  # loader processes are an epoch ahead
        return known

    def _computed(self, epoch: int) -> tuple[Array, Integers]:
        mixed = shuffled(np.arange(self.length, dtype=np.uint64), self.length, self._seed, epoch)
        by_length = mixed[np.argsort(self._lengths[mixed], kind="stable")]  # equal lengths stay mixed
        count = len(self.sizes)
        order = shuffled(np.arange(count, dtype=np.uint64), count, self._seed, epoch, "micro-batches")
        sizes = self.sizes[order]
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        places = np.arange(self.length) + np.repeat(self._starts[order] - bounds[:-1], sizes)
        return by_length[places], bounds


def _cut(ascending: Integers, most: int, fit: int) -> Integers:
    """Where each micro-batch begins in sorted lengths, and the end of the last: as many samples as fit, from the
    shortest on."""
    starts, numbers = [0], np.arange(1, fit + 1)
    while (start := starts[-1]) < len(ascending):
        window = ascending[start : start + fit]
        starts.append(start + int(np.searchsorted(window * numbers[: len(window)], most, side="right")))
    return np.asarray(starts)
