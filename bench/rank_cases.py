"""The cases of files of FSDP's ranks: to bf16 weights beside verl's merger, and for another number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cases import COPY, OURS, PYTHON, Case, Contender, Limit, convert_command, copied, environment, written_alone
from compare import same_state_dicts, same_weights

PEER = "verl's model_merger"
VERL = "RESHARD_VERL_PYTHON"
"""Names the interpreter of an environment with verl. Its merger reads 16-bit weights alone."""
_HERE = Path(__file__).parent


def _config(megabytes: int) -> dict[str, object]:
    """A Llama whose fp32 weights and two moments take about so many megabytes."""
    hidden, vocab = (1024, 20_000) if megabytes >= 500 else (256, 4_000)
    of_layer = 4 * hidden * hidden + 3 * hidden * 3 * hidden
    layers = max(1, round((megabytes * 1_000_000 / 12 - 2 * vocab * hidden) / of_layer))
    return {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": vocab,
        "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": False,
    }  # fmt: skip


def _saved(source: Path, megabytes: int) -> None:
    """Save the checkpoint with torch, as verl saves it, unless it is there."""
    if source.exists():
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_config(megabytes), architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        parameters = [(name, list(p.shape)) for name, p in LlamaForCausalLM(config).named_parameters()]
    source.parent.mkdir(parents=True, exist_ok=True)
    listed = source.with_name(f"{source.name}.json")
    listed.write_text(json.dumps(parameters))
    command = [PYTHON, str(_HERE / "dcp_source.py"), str(source), str(listed), "verl"]
    subprocess.run(command, check=True, env=environment())
    config.save_pretrained(source / "huggingface")


def _verl() -> tuple[str | None, str]:
    """The interpreter that has verl, and what is said where none has."""
    python = os.environ.get(VERL, PYTHON)
    command = [python, "-c", "import verl.model_merger.fsdp_model_merger"]
    tried = subprocess.run(command, check=False, capture_output=True, text=True)
    if tried.returncode == 0:
        return python, ""
    why = (tried.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return None, f"verl's merger is left out: {python}: {why}. {VERL} names the Python of an environment that has verl"


def rank_cases(root: Path, megabytes: int) -> Iterator[Case]:
    """Files of four ranks of verl."""
    size = f"{megabytes / 1000:g} GB"
    source, make = root / "source" / f"verl, 4 ranks, {size}", partial(_saved, megabytes=megabytes)
    ours, peer = root / "ours" / "w", root / "peer" / "w"
    python, missing = _verl()
    if missing:
        print(missing, file=sys.stderr)
    theirs = () if python is None else (
        Contender(PEER, [python, str(_HERE / "verl_peer.py"), str(source), str(peer)], peer),
    )  # fmt: skip
    check: Callable[[], list[str]] = list if python is None else lambda: same_weights(ours, peer)
    yield Case(
        f"verl, 4 ranks, {size} to bf16 safetensors",
        partial(make, source),
        (
            Contender(OURS, convert_command(source, ours, "--to", "safetensors", "--dtype", "bf16"), ours),
            copied(ours, root / "copy"),
            written_alone(ours, root / "written"),
            *theirs,
        ),
        check,
        () if python is None else (Limit(PEER, 2),),
    )
    six = root / "ours" / "six"
    yield Case(
        f"verl, 4 ranks, {size} to 6 ranks",
        partial(make, source),
        (
            Contender(OURS, convert_command(source, six, "--to", "fsdp_ranks", "--dp", "6"), six),
            copied(six, root / "copy"),
            written_alone(six, root / "written"),
        ),
        lambda: _same_as_shards(source, six, root / "shards"),
        (Limit(COPY, 1 / 3),),
    )


def _same_as_shards(source: Path, six: Path, shards: Path) -> list[str]:
    """Differences between the distributed checkpoints that are made of both, as torch loads them."""
    for name, each in (("source", source), ("six", six)):
        command = convert_command(each, shards / name, "--to", "dcp", "--framework", "state-dict", "--overwrite")
        subprocess.run(command, check=True, env=environment(), capture_output=True)
    return same_state_dicts(shards / "six", shards / "source")
