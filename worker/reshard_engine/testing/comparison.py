"""Compares two targets, file by file or tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from reshard_engine.testing.formats import Content
from reshard_engine.testing.logical import Bits, tree_difference


def content_difference(expected: Content, found: Content) -> str | None:
    """The first difference of a target from its expected contents (tensor, bit or value); None if they are equal."""
    if expected.tensors.keys() != found.tensors.keys():
        missing = sorted(expected.tensors.keys() - found.tensors.keys())
        more = sorted(found.tensors.keys() - expected.tensors.keys())
        return f"tensors missing: {missing[:5]}, not expected: {more[:5]}"
    wrong = tensors_that_differ(expected, found)
    if wrong:
        pair = expected.tensors[wrong[0]], found.tensors[wrong[0]]
        if wrong[0] in expected.cast:
            pair = pair[0].with_plain_nans(), pair[1].with_plain_nans()
        return f"{wrong[0]}: {_first_difference(*pair)}"
    lost = sorted(expected.values.keys() - found.values.keys())
    if lost:
        return f"lost: {lost[:5]}"
    differences = (tree_difference(value, found.values[key], key) for key, value in expected.values.items())
    return next((d for d in differences if d is not None), None)


def tensors_that_differ(expected: Content, found: Content) -> list[str]:
    """Names of the tensors that differ in type, shape or any bit but the payload of a NaN that was cast."""
    wrong = [name for name, wanted in expected.tensors.items() if found.tensors[name] != wanted]
    return [
        name
        for name in wrong
        if name not in expected.cast
        or expected.tensors[name].with_plain_nans() != found.tensors[name].with_plain_nans()
    ]


def _first_difference(wanted: Bits, there: Bits) -> str:
    if (wanted.dtype, wanted.shape) != (there.dtype, there.shape):
        return f"{there.dtype}{list(there.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    at = next(i for i, (a, b) in enumerate(zip(wanted.data, there.data, strict=True)) if a != b)
    size = len(wanted.data) // prod(wanted.shape)
    element = slice(at // size * size, at // size * size + size)
    return f"element {at // size} is {there.data[element].hex()}, not {wanted.data[element].hex()}"


def elements_that_differ(wanted: Bits, there: Bits) -> int:
    """The number of elements that differ between two tensors of one type and shape."""
    if not wanted.numel:
        return 0
    pair = (np.frombuffer(b.data, dtype=np.uint8).reshape(wanted.numel, -1) for b in (wanted, there))
    first, second = pair
    return int((first != second).any(axis=1).sum())


def assert_same_files(left: Mapping[str, bytes], right: Mapping[str, bytes]) -> None:
    """Fail unless both have the same paths with the same bytes."""
    assert sorted(left) == sorted(right), f"files {sorted(left.keys() ^ right.keys())[:5]} are on one side only"
    wrong = [path for path in left if left[path] != right[path]]
    assert not wrong, f"{wrong[:5]} differ"
