"""What a cast must do, said in the most obvious way, and elements that are hard to cast."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.tensors.dtypes import BY_NAME, Dtype

Bytes = npt.NDArray[np.uint8]
PAIRS = [
    (BY_NAME[source], BY_NAME[target])
    for source in ("float64", "float32", "bfloat16", "float16")
    for target in ("float32", "bfloat16", "float16")
    if source != target
]
BITS = {8: np.uint64, 4: np.uint32, 2: np.uint16}
EDGES = {
    "float64": [0x7FF0000000000001, 0x7FF8000000000000, 0xFFFFFFFFFFFFFFFF, 0x47EFFFFFE0000000, 0x47EFFFFFF0000000, 1],
    "float32": [0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F7F8000, 0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001, 1],
    "bfloat16": [0x7F81, 0xFFFF, 0x7F7F, 0x4780, 0x3300, 1],
    "float16": [0x7C01, 0xFFFF, 0x7BFF, 0x0001, 0x03FF, 0x0400],
}


def by_the_rule(data: Bytes, source: Dtype, target: Dtype) -> Bytes:
    """The cast, element by element, in the most obvious way."""
    wide = data.view(BITS[source.itemsize_bytes])
    with np.errstate(all="ignore"):
        if source.name == "bfloat16":
            values = (wide.astype(np.uint32) << 16).view(np.float32)
        else:
            values = data.view(source.name).astype(np.float32)
        if target.name == "float32":
            return values.view(np.uint8)
        if target.name == "float16":
            return values.astype(np.float16).view(np.uint8)
    return np.array([_bfloat16(bits) for bits in values.view(np.uint32).tolist()], dtype=np.uint16).view(np.uint8)


def _bfloat16(bits: int) -> int:
    if bits & 0x7FFFFFFF > 0x7F800000:
        return bits >> 16 | 0x40
    kept, dropped = divmod(bits, 1 << 16)
    return kept + (dropped > 0x8000 or (dropped == 0x8000 and kept % 2 == 1))


def special(result: Bytes, source: Dtype, target: Dtype) -> int:
    """How many results are zero, infinite or NaN; none counts where a cast widens."""
    if target.name == "float32" and source.itemsize_bytes == 2:
        return 0
    size = target.itemsize_bytes
    infinity = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[target.name]
    bits = result.view(BITS[size]).astype(np.uint64) & np.uint64((1 << size * 8 - 1) - 1)
    return sum(b == 0 or b >= infinity for b in bits.tolist())


def elements(source: Dtype) -> st.SearchStrategy[list[int]]:
    size = source.itemsize_bytes * 8
    top = st.integers(0, (1 << 16) - 1).map(lambda high: high << (size - 16))
    ties = st.integers(0, (1 << 16) - 1).map(lambda high: (high << (size - 16)) | (1 << size - 17 if size > 16 else 0))
    edges = st.sampled_from(EDGES[source.name]).flatmap(lambda e: st.sampled_from([e, e ^ 1 << (size - 1)]))
    return st.lists(st.one_of(st.integers(0, (1 << size) - 1), top, ties, edges), min_size=1, max_size=80)


def hold(kernel: CastKernel, data: Bytes, source: Dtype, target: Dtype, *, shift: int) -> None:
    """The laws for some elements, `shift` bytes behind where their type wants to begin."""
    expected = by_the_rule(data, source, target)
    memory = np.zeros(len(data) + 8, dtype=np.uint8)
    memory[shift : shift + len(data)] = data
    out = np.full(len(expected) + 16, 0xA5, dtype=np.uint8)
    count = kernel.cast_into(memory[shift : shift + len(data)], source, target, out[shift : shift + len(expected)])
    assert out[shift : shift + len(expected)].tobytes() == expected.tobytes()
    beside = np.concatenate((out[:shift], out[shift + len(expected) :]))
    assert (beside == 0xA5).all()
    assert count == special(expected, source, target)


def weights(count: int, seed: int = 0) -> Bytes:
    """Ordinary float32 elements."""
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32).view(np.uint8)
