"""verl's own merger of the files of FSDP's ranks into Hugging Face's weights, of a model without a tokenizer.

python bench/verl_peer.py DIRECTORY OUTPUT

Runs in an environment with verl.
"""

from __future__ import annotations

import sys
from typing import Any

import verl.model_merger.base_model_merger as base  # pyright: ignore[reportMissingImports]
from verl.model_merger.fsdp_model_merger import FSDPModelMerger  # pyright: ignore[reportMissingImports]


def _none(*_: Any, **__: Any) -> None:
    """The benchmark's model has neither a tokenizer nor a processor."""


def main() -> None:
    """Merge the checkpoint that the arguments name."""
    base.hf_tokenizer = base.hf_processor = _none
    config = base.ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=sys.argv[1],
        hf_model_config_path=f"{sys.argv[1]}/huggingface",
        target_dir=sys.argv[2],
    )
    FSDPModelMerger(config).merge_and_save()


if __name__ == "__main__":
    main()
