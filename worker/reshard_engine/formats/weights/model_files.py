"""Reads the files that `from_pretrained` needs beside the weights: configuration, tokenizer, generation settings.

Source: transformers 5.23.0 `utils/__init__.py` (`CONFIG_NAME`, `GENERATION_CONFIG_NAME`, ...) and
`tokenization_utils_base.py` (names of tokenizer files).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from reshard.errors import SourceError, printable
from reshard_engine.storage.links import refuse_hub_link_elsewhere
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import read_bytes

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
    listed = {i.path.rpartition("/")[2]: i for i in location.store.list_directory(location.path).files}
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
