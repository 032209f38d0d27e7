"""Consolidated weights as a format: safetensors and `torch.save` files, whole or in shards with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from reshard.choices import OpaquePolicy, TargetFormat
from reshard.errors import RequestError, SourceError, printable
from reshard.models.jobs import ConvertRequest, PossibleTarget
from reshard_engine.checkpoint import OF_TRAINING, Checkpoint, Question
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.format import Completion, Discovery, DryRun, Format, Presentation, Reader, Writer
from reshard_engine.formats.model_card import check_card
from reshard_engine.formats.model_weights import check_written, model_dtype
from reshard_engine.formats.weight_files import (
    SafetensorsReader,
    TorchWeightsReader,
    parse_safetensors,
    parse_torch_weights,
    safetensors_files,
    torch_weight_files,
)
from reshard_engine.formats.weights.writer import SafetensorsWriter, TorchWeightsWriter
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location, open_location, refuse_hub_link_elsewhere
from reshard_engine.storage.protocol import read_bytes
from reshard_engine.tensors.layout import KnownFiles


class _Discovery(Discovery):
    """The directories and files that are checkpoints of this format."""

    readers: ClassVar[tuple[Reader, ...]] = (SafetensorsReader(), TorchWeightsReader())
    files = KnownFiles(
        suffixes=(".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json"),
        needed=("*.index.json", "model.safetensors", "pytorch_model.bin"),
    )


class _Completion(Completion):
    """The checkpoint that a request means, in the terms of this format."""

    takes_model_files = True

    def indifferent(self, checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Question, ...]:
        """All but the model. The optimizer tells frozen parameters from others, if those are to be left out."""
        return (Question.SCHEDULER, Question.GROUPS, Question.MEMBERS) if request.exclude_frozen else OF_TRAINING

    def completed(self, checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
        """The checkpoint with the files of `--model-files`."""
        if request.model_files is None or request.to not in Weights.targets:
            return checkpoint

        location = open_location(request.model_files, request.source.profile)
        try:
            files = read_model_files(location, model_dtype(checkpoint, request), unties=checkpoint.unties)
        except SourceError as error:
            if request.options.peft.merge_adapter and error.code == "source.not_found":
                return checkpoint  # `--model-files` was given only for the adapter's configuration
            raise
        return replace(checkpoint, model_files=files)


class _Presentation(Presentation):
    """The answers for people about checkpoints of this format."""

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """Weights in either container."""
        detail = "any type; without the frozen parameters" if tried.lacks_parameters else "any type"
        for to in Weights.targets:
            refusal = tried.refusal(to)
            if refusal is None:
                yield tried.possible(to, detail, f"--to {to}")
            else:
                yield tried.impossible(to, refusal)


class Weights(Format):
    """Weights as `save_pretrained` and `torch.save` write them."""

    name = "weights"
    discovery = _Discovery()
    completion = _Completion()
    presentation = _Presentation()
    targets = (TargetFormat.SAFETENSORS, TargetFormat.TORCH)
    whole_models = True
    model_only = True

    def writer(self, target: str) -> Writer:
        """The writer of either container."""
        if target == TargetFormat.SAFETENSORS:
            return SafetensorsWriter()
        return TorchWeightsWriter()

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse options of weights in a request that writes none, and a target that is named as one file."""
        check_card(request)
        _check_quantization(request)
        if request.to in self.targets:
            _refuse_file_name(request)

    def check_names(self, place: Location, checkpoint: Checkpoint, request: ConvertRequest) -> None:
        """Refuse weights under names of wrapping modules, and weights without elements."""
        listing = place.store.list_directory(place.path)
        safe = request.to == TargetFormat.SAFETENSORS
        files = safetensors_files(listing) if safe else torch_weight_files(listing)
        shapes: dict[str, Sequence[int]] = {}
        for name, info in files.named.items():
            file = SourceFile(place.store, name, (info,))
            parsed = parse_safetensors(file) if safe else parse_torch_weights(file, OpaqueLedger(OpaquePolicy.KEEP))
            shapes |= {tensor.name: tensor.shape for tensor in parsed.tensors}
        check_written(shapes, checkpoint, request)


def _check_quantization(request: ConvertRequest) -> None:
    options = request.options.weights
    if options.quantize_layers is not None and options.quantize is None:
        raise RequestError("request.invalid", "--quantize-layers is for --quantize", fix="add --quantize fp8-block")


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


# Reads the files that `from_pretrained` needs beside the weights: configuration, tokenizer, generation settings.
#
# Source: transformers 5.23.0 `utils/__init__.py` (`CONFIG_NAME`, `GENERATION_CONFIG_NAME`, ...) and
# `tokenization_utils_base.py` (names of tokenizer files).

_NAMES = re.compile(
    r"config\.json|generation_config\.json"
    r"|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|tokenizer\.model|spiece\.model|sentencepiece\.bpe\.model"
    r"|chat_template\.(jinja|json)|(pre)?processor_config\.json|video_preprocessor_config\.json"
)
"""Names of the files. They are data only: code in a model's repository is not copied."""
_MAX_BYTES = 128 << 20
"""Largest size of all of them, because they are in memory during a conversion. A large tokenizer has 30 MB."""
_DTYPE_KEYS = ("dtype", "torch_dtype")


def read_model_files(location: Location, dtype: str | None, *, unties: bool = False) -> Mapping[str, bytes]:
    """The files of a directory by their names, `config.json` with the type that the weights get.

    Args:
        location: A directory that `save_pretrained` wrote, or a trainer's checkpoint.
        dtype: The name of the type of the weights that will lie beside them; None leaves the configuration as it is.
        unties: True if the head has weights of its own now, so that the configuration must not say that it is tied.

    Raises:
        SourceError: `source.not_found` if there is no `config.json`, `checkpoint.too_large`, `checkpoint.malformed`.
    """
    listed = location.store.list_directory(location.path).by_name
    found = {name: info for name, info in listed.items() if _NAMES.fullmatch(name)}
    if "config.json" not in found:
        raise SourceError(
            "source.not_found",
            f"{printable(location.url)} has no config.json",
            fix="--model-files names the directory that `save_pretrained` wrote, or the trainer's checkpoint",
        )
    for info in found.values():
        refuse_hub_link_elsewhere(location, info.path)
    total = sum(i.size_bytes for i in found.values())
    if total > _MAX_BYTES:
        raise SourceError(
            "checkpoint.too_large", f"configuration and tokenizer have {total} bytes, the limit is {_MAX_BYTES}"
        )
    files = {name: read_bytes(location.store, info) for name, info in sorted(found.items())}
    return files | {"config.json": _fitting(files["config.json"], dtype, unties=unties)}


def _fitting(data: bytes, dtype: str | None, *, unties: bool) -> bytes:
    """The configuration with the type and ties of the target's weights, because loaders make weights match it."""
    try:
        config: Any = json.loads(data)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise SourceError("checkpoint.malformed", "config.json is not a JSON object", fix="copy it again")
    facts = cast("dict[str, Any]", config)
    keys = [k for k in _DTYPE_KEYS if isinstance(facts.get(k), str)] if dtype is not None else []
    said = facts | dict.fromkeys(keys, dtype)
    if unties:
        # PEFT's merge writes the same. Without the key, the default of the model's class may be true.
        said["tie_word_embeddings"] = False
    if said == facts:
        return data
    return json.dumps(said, indent=2, ensure_ascii=False).encode() + b"\n"
