"""Which writers there are. Each is imported when it is asked for: a command waits for one of them, not for all."""

from __future__ import annotations

from typing import assert_never

from reshard.models import TargetFormat
from reshard_engine.formats.writer import Writer


def writer_of(target: TargetFormat) -> Writer:
    """The writer of a target format."""
    match target:
        case TargetFormat.UNIVERSAL:
            from reshard_engine.formats.deepspeed.writer.universal.writer import UniversalWriter

            return UniversalWriter()
        case TargetFormat.SAFETENSORS:
            from reshard_engine.formats.weights.writer.safetensors import SafetensorsWriter

            return SafetensorsWriter()
        case TargetFormat.TORCH:
            from reshard_engine.formats.weights.writer.torch_weights import TorchWeightsWriter

            return TorchWeightsWriter()
        case TargetFormat.ZERO:
            from reshard_engine.formats.deepspeed.writer.native.writer import ZeroWriter

            return ZeroWriter()
        case TargetFormat.PEFT:
            from reshard_engine.formats.peft.writer import PeftWriter

            return PeftWriter()
        case TargetFormat.SLIM:
            from reshard_engine.formats.torch_files.writer import SlimWriter

            return SlimWriter()
        case _:
            assert_never(target)
