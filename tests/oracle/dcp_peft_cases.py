"""Adapters of PEFT in the Trainer's FSDP runs: their kinds, and the runs as tests call them.  Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oracle.dcp_driver import TIMEOUT_S
from oracle.launcher import Worlds
from oracle.truth import Resumed, Truth

OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 6},
    "dora": {"r": 4, "lora_alpha": 6, "use_dora": True},
    "norms": {"r": 4, "lora_alpha": 6, "modules_to_save": ["norm", "ln_f"]},
    "head": {"r": 4, "lora_alpha": 6, "modules_to_save": ["lm_head"]},
}
"""Options of ``LoraConfig``. ``norm`` means every norm of Llama, whose names all end so; ``ln_f`` is GPT-2's."""
_AFTER = ("4", "5", "6")


def train_adapter(worlds: Worlds, kind: str, adapter: str, folder: Path, *, world: int = 2) -> list[float]:
    """Trains an adapter of this kind under FSDP2 and leaves the checkpoint of step 3; the losses after it.

    ``folder`` gets ``output/checkpoint-3``, ``truth.*``, and PEFT's own word: ``peft/adapter``, ``peft/base`` and
    ``peft/merged.safetensors``.
    """
    losses = _run(worlds, world, kind=kind, adapter=adapter, folder=str(folder))
    return [losses[step] for step in _AFTER]


def resume_adapter(
    worlds: Worlds,
    kind: str,
    adapter: str,
    checkpoint: Path,
    out: Path,
    *,
    world: int,
    stage: int | None = None,
    to: str | None = None,
    universal: bool = False,
) -> Resumed:
    """The Trainer resumes a ``checkpoint-3`` on so many ranks.

    Args:
        worlds: The launcher.
        kind: Of the model.
        adapter: Of its adapter.
        checkpoint: What is resumed.
        out: Gets the state after loading.
        world: Ranks.
        stage: Of ZeRO; FSDP2 without one.
        to: What ``reshard.ensure`` makes of the checkpoint first.
        universal: The checkpoint is a universal one.

    Raises:
        WorldError: it refused; the traceback is in it.
    """
    more = {"folder": str(out), "resume": str(checkpoint), "stage": stage, "to": to, "universal": universal}
    losses = _run(worlds, world, kind=kind, adapter=adapter, **more)
    state = Truth(out / "resumed.safetensors", out / "resumed.json")
    return Resumed(state, tuple(losses[step] for step in _AFTER))


def _run(worlds: Worlds, world: int, **kwargs: Any) -> dict[str, float]:
    ranks = worlds.run("oracle.dcp_trainer:trainer", world=world, timeout_s=TIMEOUT_S, **kwargs)
    losses: dict[str, float] = ranks[0]["losses"]
    return losses
