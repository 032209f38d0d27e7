"""Consolidated weights as a format: safetensors and `torch.save` files, whole or in shards with an index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from reshard.errors import SourceError
from reshard.models import ConvertRequest, PossibleTarget, TargetFormat, WeightDtype
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.format import Format, Trial
from reshard_engine.formats.reader import Reader
from reshard_engine.formats.weights.reader.safetensors import SafetensorsReader
from reshard_engine.formats.weights.reader.torch_weights import TorchWeightsReader
from reshard_engine.formats.writer import Writer
from reshard_engine.storage.locations import open_location
from reshard_engine.tensors.layout import KnownFiles


class Weights(Format):
    """Weights as `save_pretrained` and `torch.save` write them."""

    name = "weights"
    readers: ClassVar[tuple[Reader, ...]] = (SafetensorsReader(), TorchWeightsReader())
    files = KnownFiles(
        suffixes=(".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json"), needed=(".index.json",)
    )
    targets = (TargetFormat.SAFETENSORS, TargetFormat.TORCH)
    takes_model_files = True
    whole_models = True

    def writer(self, target: TargetFormat) -> Writer:
        """The writer of either container."""
        if target is TargetFormat.SAFETENSORS:
            from reshard_engine.formats.weights.writer.safetensors import SafetensorsWriter

            return SafetensorsWriter()
        from reshard_engine.formats.weights.writer.torch_weights import TorchWeightsWriter

        return TorchWeightsWriter()

    def completed(self, checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
        """The checkpoint with the files of `--model-files`."""
        if request.model_files is None or request.to not in self.targets:
            return checkpoint
        from reshard_engine.formats.weights.model_files import read_model_files

        location = open_location(request.model_files, request.source.profile)
        dtype = request.dtype or (WeightDtype.FP32 if checkpoint.trained else None)
        try:
            files = read_model_files(location, dtype, unties=checkpoint.unties)
        except SourceError as error:
            if request.merge_adapter and error.code == "source.not_found":
                return checkpoint  # it was named for the adapter's configuration alone
            raise
        return replace(checkpoint, model_files=files)

    def possible_targets(self, tried: Trial) -> Iterable[PossibleTarget]:
        """Weights in either container."""
        detail = "any type; without the frozen parameters" if tried.lacks_parameters else "any type"
        for to in self.targets:
            refusal = tried.refusal(to)
            if refusal is None:
                yield tried.possible(to.value, detail, f"--to {to.value}")
            else:
                yield tried.impossible(to.value, refusal)
