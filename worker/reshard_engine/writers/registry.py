"""Which writers there are."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.models import TargetFormat
from reshard_engine.writers.protocol import Writer
from reshard_engine.writers.safetensors import SafetensorsWriter
from reshard_engine.writers.torch_weights import TorchWeightsWriter
from reshard_engine.writers.universal import LATEST as LATEST_UNIVERSAL, UniversalWriter
from reshard_engine.writers.zero.writer import LATEST, ZeroWriter

POINTER_NAMES = (LATEST, LATEST_UNIVERSAL)
"""Files beside a target that name it: an overwritten target must not stay named."""

WRITERS: Mapping[TargetFormat, Writer] = {
    TargetFormat.UNIVERSAL: UniversalWriter(),
    TargetFormat.SAFETENSORS: SafetensorsWriter(),
    TargetFormat.TORCH: TorchWeightsWriter(),
    TargetFormat.ZERO: ZeroWriter(),
}
