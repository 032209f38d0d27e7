"""Which writers there are."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.models import TargetFormat
from reshard_engine.writers.protocol import Writer
from reshard_engine.writers.safetensors import SafetensorsWriter
from reshard_engine.writers.torch_weights import TorchWeightsWriter
from reshard_engine.writers.universal import UniversalWriter

WRITERS: Mapping[TargetFormat, Writer] = {
    TargetFormat.UNIVERSAL: UniversalWriter(),
    TargetFormat.SAFETENSORS: SafetensorsWriter(),
    TargetFormat.TORCH: TorchWeightsWriter(),
}
