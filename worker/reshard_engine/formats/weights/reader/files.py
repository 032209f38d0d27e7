"""Finds the weights files of a directory: one file, or shards that an index names.

Source: transformers 5.23.0 `utils/__init__.py` (names), `trainer.py` (`optimizer.pt`, `optimizer.bin`,
`trainer_state.json`), huggingface_hub 2.4.0 `constants.py` (shard pattern), accelerate 1.15.0 `utils/fsdp_utils.py` and
torch_checkpointing 0.1.1 (optimizer files by number and rank).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reshard.errors import SourceError, listed
from reshard_engine.storage.protocol import Listing, ObjectInfo

_SHARD = re.compile(r"(?P<stem>.+)-[0-9]{5,6}-of-[0-9]{5,6}")
_INDEX = ".index.json"
_OPTIMIZER = re.compile(r"optimizer(_[0-9]+)?(_rank[0-9]+)?\.(bin|pt)")
TRAINER_STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of one form in a directory, by their names."""

    suffix: str
    """The suffix, such as `.safetensors`."""
    named: dict[str, ObjectInfo]
    """All files with the suffix."""
    indexes: dict[str, ObjectInfo]
    optimizers: tuple[str, ...] = ()
    """Files of optimizer states beside the weights, which are not read."""
    trainers: bool = False
    """True if the directory is a Trainer's `checkpoint-N`."""

    @property
    def no_optimizer(self) -> str:
        """The reason why the weights come without optimizer states, a part of a sentence."""
        if self.optimizers:
            are = "lies beside the weights and is" if len(self.optimizers) == 1 else "lie beside the weights and are"
            return f"{listed(self.optimizers)} {are} not read yet"
        return "the Trainer saved the weights alone, as with save_only_model" if self.trainers else ""

    @property
    def singles(self) -> list[str]:
        """The names of files that are not shards."""
        return [n for n in self.named if _SHARD.fullmatch(n.removesuffix(self.suffix)) is None]

    @property
    def present(self) -> bool:
        """True if a file or an index of this form exists."""
        return bool(self.named or self.indexes)

    def shards_of(self, stem: str) -> set[str]:
        """The names of the shards with this stem."""
        matches = ((n, _SHARD.fullmatch(n.removesuffix(self.suffix))) for n in self.named)
        return {n for n, found in matches if found is not None and found["stem"] == stem}

    def chosen(self, preferred: str) -> str:
        """The weights file, or the index of the shards.

        Args:
            preferred: The stem that takes precedence, such as `model`.

        Raises:
            SourceError: `checkpoint.ambiguous` if several files are possible, `checkpoint.incomplete` for shards
                without an index.
        """
        candidates = [*self.indexes, *self.singles]
        wanted = {f"{preferred}{self.suffix}", f"{preferred}{self.suffix}{_INDEX}"}
        usual = [n for n in candidates if n in wanted]
        if len(usual) == 1 or len(candidates) == 1:
            return (usual or candidates)[0]
        if candidates:
            raise SourceError(
                "checkpoint.ambiguous",
                f"several files could be the weights: {listed(usual or candidates)}",
                fix="move the right one into a directory of its own",
            )
        raise SourceError(
            "checkpoint.incomplete",
            f"{len(self.named)} shards of weights, and no *{self.suffix}{_INDEX} that lists their contents",
            fix=f"copy the *{self.suffix}{_INDEX} too",
        )


def weight_files(listing: Listing, suffix: str, stems: re.Pattern[str]) -> WeightFiles:
    """The weights files of a directory that end with `suffix` and whose stem matches."""
    named: dict[str, ObjectInfo] = {}
    indexes: dict[str, ObjectInfo] = {}
    names = [info.path.rpartition("/")[2] for info in listing.files]
    for info in listing.files:
        name = info.path.rpartition("/")[2]
        table = indexes if name.endswith(suffix + _INDEX) else named if name.endswith(suffix) else None
        stem = name.removesuffix(_INDEX).removesuffix(suffix)
        shard = _SHARD.fullmatch(stem)
        if table is not None and stems.fullmatch(shard["stem"] if shard else stem):
            table[name] = info
    optimizers = tuple(sorted(n for n in names if _OPTIMIZER.fullmatch(n)))
    return WeightFiles(suffix, named, indexes, optimizers, trainers=TRAINER_STATE in names)


def stem_of_index(name: str, suffix: str) -> str:
    """`model` for `model.safetensors.index.json`."""
    return name.removesuffix(_INDEX).removesuffix(suffix)
