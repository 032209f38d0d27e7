"""Weights as `torch.save` writes them: `pytorch_model.bin`, or shards with an index.

Source: transformers 5.23.0 `utils/__init__.py`, peft `adapter_model.bin`, accelerate 1.15.0 `utils/fsdp_utils.py`
(names; `pytorch_model_fsdp.bin` holds whole tensors by name: FULL_STATE_DICT).
"""

from __future__ import annotations

import re

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import open_torch_file
from reshard_engine.containers.torch_tensors import place_of
from reshard_engine.formats.names import checked_name
from reshard_engine.formats.reader import ReadOptions
from reshard_engine.formats.weights.reader.consolidated import HeldTensor, Shard, read_weights
from reshard_engine.formats.weights.reader.files import WeightFiles, weight_files
from reshard_engine.pickles.nodes import Node, PTensor, kind_of, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.state_dict import is_extra_state
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing
from reshard_engine.tensors.dtypes import BY_NAME

# Other .bin files beside weights are not weights: training_args.bin, optimizer.bin, scheduler.bin, ...
_STEMS = re.compile(r"pytorch_model|pytorch_model_fsdp|adapter_model|diffusion_pytorch_model")


class TorchWeightsReader:
    """Reads `pytorch_model.bin` weights."""

    family = "torch-weights"

    def recognises(self, listing: Listing) -> bool:
        """True if there are files with Hugging Face's names for such weights."""
        return _files(listing).present

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the weights of a directory. Names that share their elements are tied; the first one is the owner.

        Raises:
            SourceError: `zip.*`, `pickle.*`, `tensor.*`, `checkpoint.*`, `source.unsupported`, `name.invalid`.
        """

        def parse(file: SourceFile) -> Shard:
            return _parse(file, options.ledger)

        return read_weights(
            location, _files(listing), parse, preferred="pytorch_model", form="torch-weights", options=options
        )


def _files(listing: Listing) -> WeightFiles:
    return weight_files(listing, ".bin", _STEMS)


def _parse(file: SourceFile, ledger: OpaqueLedger) -> Shard:
    parsed = open_torch_file(file, ledger)
    owners: dict[tuple[object, ...], str] = {}
    tensors: list[HeldTensor] = []
    aliases: dict[str, str] = {}
    extra_states: dict[str, Node] = {}
    for key, value in mapping_items(parsed.root, what=printable(file.name)).items():
        if isinstance(key, str) and is_extra_state(key) and not isinstance(value, PTensor):
            extra_states[checked_name(key)] = value
            continue
        if not isinstance(key, str) or not isinstance(value, PTensor):
            raise SourceError(
                "source.unsupported",
                f"{printable(file.name)}: {printable(key)} is no name of a tensor (its value is {kind_of(value)})",
                fix="only a flat mapping of names to tensors is read: save `model.state_dict()` alone",
            )
        name = checked_name(key)
        owner = owners.setdefault(place_of(value), name) if value.numel else name
        if owner != name:
            aliases[name] = owner
            continue
        offset = parsed.tensor_offset(value) if value.numel else 0
        tensors.append(HeldTensor(name, BY_NAME[value.dtype], value.shape, offset, value.stride))
    return Shard(parsed.file, tensors, aliases, {}, extra_states, parsed)
