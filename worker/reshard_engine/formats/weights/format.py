"""Consolidated weights as a format: safetensors and `torch.save` files, whole or in shards with an index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from reshard.choices import TargetFormat
from reshard.errors import RequestError, SourceError, printable
from reshard.models import ConvertRequest, PossibleTarget
from reshard_engine.checkpoint import OF_TRAINING, Checkpoint, Question
from reshard_engine.formats.format import DryRun, Format
from reshard_engine.formats.model_weights import model_dtype
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

    def writer(self, target: str) -> Writer:
        """The writer of either container."""
        if target == TargetFormat.SAFETENSORS:
            from reshard_engine.formats.weights.writer.safetensors import SafetensorsWriter

            return SafetensorsWriter()
        from reshard_engine.formats.weights.writer.torch_weights import TorchWeightsWriter

        return TorchWeightsWriter()

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse a size of weights files in a request that writes none, and a target that is named as one file."""
        if request.to not in self.targets and request.options.weights.max_shard_bytes is not None:
            raise RequestError(
                "request.invalid",
                "--max-shard-size is for consolidated weights",
                fix="--to safetensors",
            )
        if request.to in self.targets:
            _refuse_file_name(request)

    def indifferent(self, checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Question, ...]:
        """All but the model. The optimizer tells frozen parameters from others, if those are to be left out."""
        return (Question.SCHEDULER, Question.GROUPS) if request.exclude_frozen else OF_TRAINING

    def completed(self, checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
        """The checkpoint with the files of `--model-files`."""
        if request.model_files is None or request.to not in self.targets:
            return checkpoint
        from reshard_engine.formats.weights.model_files import read_model_files

        location = open_location(request.model_files, request.source.profile)
        try:
            files = read_model_files(location, model_dtype(checkpoint, request), unties=checkpoint.unties)
        except SourceError as error:
            if request.options.peft.merge_adapter and error.code == "source.not_found":
                return checkpoint  # `--model-files` was given only for the adapter's configuration
            raise
        return replace(checkpoint, model_files=files)

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """Weights in either container."""
        detail = "any type; without the frozen parameters" if tried.lacks_parameters else "any type"
        for to in self.targets:
            refusal = tried.refusal(to)
            if refusal is None:
                yield tried.possible(to, detail, f"--to {to}")
            else:
                yield tried.impossible(to, refusal)


_FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def _refuse_file_name(request: ConvertRequest) -> None:
    """Refuse a target such as `model.safetensors`: it would become a directory of that name, which no loader opens."""
    directory, _, name = request.target.rstrip("/").rpartition("/")
    if not name.lower().endswith(_FILE_SUFFIXES):
        return
    whole = "model.safetensors" if request.to == TargetFormat.SAFETENSORS else "pytorch_model.bin"
    wanted = name.rpartition(".")[0] or "weights"
    place = f"{directory}/{wanted}" if directory else wanted
    raise RequestError(
        "request.invalid",
        f"{printable(request.target)} names a file, but --to {request.to} writes a directory: weights, "
        "and the manifest that `verify` needs",
        fix=f"name the directory {printable(place)}: without --max-shard-size the weights are one file in it, {whole}",
    )
