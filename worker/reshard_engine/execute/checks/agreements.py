"""What must agree in a source, compared before anything is written: copies bit for bit, weights with rounded masters.

A wrong rule, a wrong order or a mixed-up file shows here: parts that were said to be copies differ, or the weights in
the model's dtype are not what their masters round to. Copies are compared whole; weights whole where they are small,
and at places spread over them where they are large.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from reshard.errors import SourceError, printable
from reshard.models import ReplicaPolicy
from reshard_engine.checkpoint import Agreement, Checkpoint
from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.kernels import default_kernel
from reshard_engine.execute.casts.losses import are_nan
from reshard_engine.execute.gather.chunks import ChunkFiller

_THREADS = 4
_BLOCK_ELEMS = 1 << 20
SAMPLED_BLOCKS = 16
"""Blocks of a large weight that are compared with its master, evenly spread, the first and the last among them."""


def check_agreements(checkpoint: Checkpoint, policy: ReplicaPolicy, should_stop: Callable[[], None]) -> list[str]:
    """Compare everything that must agree; what does not is a warning for each tensor under the policy `first`.

    Raises:
        SourceError: `checkpoint.disagreement` under the policy `error`, and always where a weight is not its master's
            rounding: then it is the parts that were put together wrongly.
    """
    kernel = default_kernel()

    def compare(agreement: Agreement) -> str | None:
        should_stop()
        return _difference(checkpoint, agreement, kernel)

    # Beyond a store's waits, more threads than cores only hand Python's lock to one another: 2.2 s instead of 1.9.
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1) if checkpoint.is_local else _THREADS) as pool:
        found = list(zip(checkpoint.agreements, pool.map(compare, checkpoint.agreements), strict=True))
    wrong = [(a, text) for a, text in found if text is not None]
    if not wrong:
        return []
    fatal = [(a, text) for a, text in wrong if a.rounded or (policy is ReplicaPolicy.ERROR and not a.advisory)]
    if fatal:
        agreement, text = fatal[0]
        names = sorted({printable(a.fqn) for a, _ in fatal})
        raise SourceError(
            "checkpoint.disagreement",
            f"{len(fatal)} of {len(found)} tensors that must agree do not, in {len(names)} parameters: {text}",
            fix="the rules of tensor parallelism or the files are wrong: see --rules"
            if agreement.rounded
            else "--replicas first takes the lowest rank's copy; wrong rules of tensor parallelism look like this too",
            details={"parameters": names[:64]},
        )
    return [f"{text}; the first copy was taken" for _, text in wrong]


def _blocks(agreement: Agreement, numel: int) -> Iterator[tuple[int, int]]:
    count = -(-numel // _BLOCK_ELEMS)
    chosen = range(count)
    if agreement.rounded and count > SAMPLED_BLOCKS:
        chosen = sorted({i * (count - 1) // (SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS)})
    for block in chosen:
        yield block * _BLOCK_ELEMS, min((block + 1) * _BLOCK_ELEMS, numel)


def _difference(checkpoint: Checkpoint, agreement: Agreement, kernel: CastKernel) -> str | None:
    """What differs, with numbers; None if nothing does."""
    tensors = checkpoint.shard_map.tensors
    first, other = tensors[agreement.first], tensors[agreement.other]
    what = f"{printable(agreement.state)} of {printable(agreement.fqn)} and {agreement.where}"
    if first.shape != other.shape or (first.dtype is not other.dtype and not agreement.rounded):
        return f"{what}: {first.dtype.name} {first.shape} and {other.dtype.name} {other.shape}"
    filler = ChunkFiller(checkpoint, kernel)
    size, differing, at = other.dtype.itemsize_bytes, 0, -1
    for begin, end in _blocks(agreement, other.numel):
        ours = filler.elements(agreement.first, other.dtype, begin, end)
        theirs = filler.elements(agreement.other, other.dtype, begin, end)
        wide = np.uint64 if len(ours) % 8 == 0 else np.uint8
        if np.array_equal(ours.view(wide), theirs.view(wide)):
            continue
        rows = np.flatnonzero((ours.reshape(-1, size) != theirs.reshape(-1, size)).any(axis=1))
        if agreement.rounded:
            # A NaN of 16 bits that was widened and is rounded again is another one: its quiet bit is set.
            rows = rows[~(are_nan(ours, other.dtype) & are_nan(theirs, other.dtype))[rows]]
        if len(rows) and at < 0:
            at = begin + int(rows[0])
        differing += len(rows)
    return f"{what}: {differing} of {other.numel} elements differ, the first is {at}" if differing else None
