"""Element types: one table that maps the names of torch, safetensors and storage classes to sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type. Two dtypes are the same object if they are equal.

    Source: torch 2.13.0 `torch/storage.py` (storage class names), safetensors 0.6 README (names); verified by torch and
    safetensors for each type. safetensors counts four bits of `float4_e2m1fn_x2`, and torch pairs: shapes differ.
    """

    name: str
    """torch's name, without `torch.`"""
    itemsize_bytes: int
    storage_class: str | None
    """Name, in the module `torch`, of the typed storage in pickles; None if torch pickles plain bytes for this type."""
    safetensors: str | None
    """Name in safetensors headers; None if safetensors has no such type."""
    floating: bool

    @property
    def complex(self) -> bool:
        """True for complex numbers."""
        return self.name.startswith("complex")

    @property
    def trainable(self) -> bool:
        """True for element types that autograd can train: floating-point and complex numbers.

        Source: torch 2.13.0 `_tensor.py` (`requires_grad_`: "only Tensors of floating point and complex dtype can
        require gradients").
        """
        return self.floating or self.complex


_TABLE = (
    Dtype("float64", 8, "DoubleStorage", "F64", True),
    Dtype("float32", 4, "FloatStorage", "F32", True),
    Dtype("float16", 2, "HalfStorage", "F16", True),
    Dtype("bfloat16", 2, "BFloat16Storage", "BF16", True),
    Dtype("int64", 8, "LongStorage", "I64", False),
    Dtype("int32", 4, "IntStorage", "I32", False),
    Dtype("int16", 2, "ShortStorage", "I16", False),
    Dtype("int8", 1, "CharStorage", "I8", False),
    Dtype("uint8", 1, "ByteStorage", "U8", False),
    Dtype("bool", 1, "BoolStorage", "BOOL", False),
    Dtype("complex64", 8, "ComplexFloatStorage", "C64", False),
    Dtype("complex128", 16, "ComplexDoubleStorage", None, False),
    Dtype("uint16", 2, None, "U16", False),
    Dtype("uint32", 4, None, "U32", False),
    Dtype("uint64", 8, None, "U64", False),
    Dtype("float8_e4m3fn", 1, None, "F8_E4M3", True),
    Dtype("float8_e5m2", 1, None, "F8_E5M2", True),
    Dtype("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ", True),
    Dtype("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ", True),
    Dtype("float8_e8m0fnu", 1, None, "F8_E8M0", True),
    Dtype("float4_e2m1fn_x2", 1, None, None, True),
    Dtype("complex32", 4, None, None, False),
)
BY_NAME = {d.name: d for d in _TABLE}
BY_STORAGE_CLASS = {d.storage_class: d for d in _TABLE if d.storage_class}
BY_SAFETENSORS = {d.safetensors: d for d in _TABLE if d.safetensors}
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

FLOAT32 = BY_NAME["float32"]
UINT8 = BY_NAME["uint8"]
