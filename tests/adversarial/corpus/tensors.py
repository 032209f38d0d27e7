"""Tensors that reach outside their storage, repeat it without end, or are of no known kind; and good ones."""

from __future__ import annotations

from adversarial.corpus import carriers, opcodes as op
from adversarial.corpus.entry import OK, Entry

_EXTENT, _MORE = "tensor.bad_extent", "tensor.amplification"


def _store(numel: int, kind: str = "FloatStorage", key: str = "9") -> op.Code:
    return op.storage(kind, key, numel)


def _module(number: int, name: str, tensor: op.Code, expected: str, *, size: int = 48, why: str = "") -> Entry:
    build = carriers.module({"extra": tensor}, {"9": carriers.floats(size // 4)})
    return Entry(number, name, expected, build, why=why)


def _many_over_one(draft: carriers.Draft) -> None:
    numel = 1 << 14
    draft.model.entries["user_state"] = {f"copy.{i}": op.tensor(_store(numel), (numel,)) for i in range(1_000)}
    draft.model.storages["9"] = bytes(4 * numel)


def _two_types(draft: carriers.Draft) -> None:
    draft.model.entries["user_state"] = [
        op.tensor(_store(12), (12,)),
        op.tensor(_store(24, "HalfStorage"), (24,)),
    ]
    draft.model.storages["9"] = carriers.floats(12)


def _two_sizes(draft: carriers.Draft) -> None:
    draft.model.entries["user_state"] = [op.tensor(_store(12), (12,)), op.tensor(_store(3), (3,))]
    draft.model.storages["9"] = carriers.floats(12)


def _views(draft: carriers.Draft) -> None:
    base = _store(12)
    draft.model.entries["module"] = op.ordered(
        {
            "w": carriers.f32("0", 4, 3),
            "b": carriers.f32("1", 3),
            "scalar": op.tensor(_store(12), (), offset=7),
            "none": op.tensor(op.storage("FloatStorage", "8", 0), (0, 5)),
            "turned": op.tensor(base, (3, 4), stride=(1, 3)),
            "skipping": op.tensor(base, (4,), stride=(3,), offset=1),
            "wide": op.tensor(base, (3, 12), stride=(0, 1)),
            "flags": op.tensor(op.storage("BoolStorage", "7", 3), (3,)),
        }
    )
    draft.model.storages |= {"9": carriers.floats(12), "8": b"", "7": b"\0\1\0"}


ENTRIES = (
    _module(61, "numel-beyond-record", op.tensor(_store(1_000), (1_000,)), _EXTENT),
    _module(61, "record-longer-than-numel", op.tensor(_store(11), (11,)), _EXTENT),
    _module(62, "offset-past-end", op.tensor(_store(12), (3,), offset=10), _EXTENT),
    _module(62, "stride-past-end", op.tensor(_store(12), (3,), stride=(6,)), _EXTENT),
    _module(63, "negative-size", op.tensor(_store(12), (-1,), stride=(1,)), _EXTENT),
    _module(63, "negative-stride", op.tensor(_store(12), (3,), stride=(-1,)), _EXTENT),
    _module(63, "negative-offset", op.tensor(_store(12), (3,), offset=-1), _EXTENT),
    _module(64, "product-overflow", op.tensor(_store(12), (1 << 32, 1 << 32)), _EXTENT),
    _module(64, "product-overflow-to-small", op.tensor(_store(12), (1 << 33, 1 << 31, 3)), _EXTENT),
    _module(64, "offset-2-64", op.tensor(_store(12), (3,), offset=1 << 64), _EXTENT),
    _module(65, "expand-to-10-12", op.tensor(_store(12), (10**12,), stride=(0,)), _MORE),
    _module(65, "expand-hidden-in-dims", op.tensor(_store(12), (10**6, 12), stride=(0, 1)), _MORE),
    _module(65, "strides-that-overlap", op.tensor(_store(12), (6, 6, 6), stride=(1, 1, 1), offset=0), _EXTENT),
    Entry(66, "thousand-over-one-storage", _MORE, carriers.edited(_many_over_one)),
    Entry(67, "storage-of-two-types", _EXTENT, carriers.edited(_two_types)),
    Entry(67, "storage-of-two-sizes", _EXTENT, carriers.edited(_two_sizes)),
    _module(67, "half-over-float-record", op.tensor(_store(12, "HalfStorage"), (12,)), _EXTENT),
    _module(68, "quantized-storage", op.tensor(_store(12, "QInt8Storage"), (12,)), "tensor.unsupported"),
    _module(68, "storage-that-does-not-exist", op.tensor(_store(12, "Float5Storage"), (12,)), "tensor.unsupported"),
    _module(68, "dtype-that-does-not-exist", op.call(op.name("torch._utils", "_rebuild_tensor_v3"), op.storage("UntypedStorage", "9", 48, module="torch.storage"), 0, (12,), (1,), False, op.ordered({}), op.name("torch", "float5")), "tensor.unsupported"),
    Entry(68, "sparse", "pickle.forbidden_call", carriers.module({"extra": op.call(op.name("torch._utils", "_rebuild_sparse_tensor"), op.name("torch", "sparse_coo"), (op.tensor(_store(12), (12,)), op.tensor(_store(12), (12,)), (1 << 40,)))}, {"9": carriers.floats(12)}), inspect=OK, why="no sparse tensor is on the allow-list, good or bad"),
    Entry(68, "quantized", "pickle.forbidden_call", carriers.module({"extra": op.call(op.name("torch._utils", "_rebuild_qtensor"), _store(12), 0, (12,), (1,), (), False, op.ordered({}))}, {"9": carriers.floats(12)}), inspect=OK, why="no quantized tensor is on the allow-list"),
    _module(69, "65-dims", op.tensor(_store(12), (1,) * 65), _EXTENT),
    _module(69, "million-dims", op.tensor(_store(12), (1,) * 1_000_000), _EXTENT),
    _module(69, "sizes-and-strides-differ", op.tensor(_store(12), (3,), stride=(1, 1)), "pickle.type_confusion"),
    Entry(70, "good-tensors", OK, carriers.edited(_views)),
)  # fmt: skip
