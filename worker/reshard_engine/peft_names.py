"""What PEFT calls the parameters of a LoRA run, said once for those that export adapters and those that merge them.

Source: peft 0.21.2 `tuners/lora/layer.py` (`adapter_layer_names`), `utils/other.py` (`ModulesToSaveWrapper`),
`tuners/lora/model.py` (DoRA's magnitudes are saved without `.weight`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reshard.errors import RequestError, printable

WRAPPED = "base_model.model."
"""What PEFT puts before every name of the model."""
_LORA = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.(?P<adapter>[^.]+)(?P<tail>\.weight|\.bias)?"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<tail>.+)")
SHOWN_NAMES = 8


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """A parameter that belongs to an adapter."""

    fqn: str
    adapter: str
    saved_as: str
    """Its name in `adapter_model.safetensors`."""
    module: str
    """The module that is adapted, or saved whole."""
    kind: str
    """`lora_A`, ..., or `modules_to_save`."""
    tail: str
    """`.weight`, `.bias` or nothing; of a saved module the name within it."""


def adapter_part(fqn: str) -> AdapterPart | None:
    """What a parameter is to an adapter; None if nothing."""
    if (found := _SAVED.fullmatch(fqn)) is not None:
        saved_as = f"{found['module']}.{found['tail']}"
        return AdapterPart(fqn, found["adapter"], saved_as, found["module"], "modules_to_save", found["tail"])
    if (found := _LORA.fullmatch(fqn)) is not None:
        tail = found["tail"] or ""
        saved_as = f"{found['module']}.{found['kind']}{'' if found['kind'] == 'lora_magnitude_vector' else tail}"
        return AdapterPart(fqn, found["adapter"], saved_as, found["module"], found["kind"], tail)
    return None


def adapter_parts(names: Iterable[str]) -> list[AdapterPart]:
    """Those of some parameters that belong to adapters."""
    return [p for p in map(adapter_part, names) if p is not None]


def adapter_names(parts: Iterable[AdapterPart]) -> list[str]:
    """The LoRA adapters that they belong to, sorted."""
    return sorted({p.adapter for p in parts if p.kind != "modules_to_save"})


def chosen_adapter(names: Sequence[str], parts: Iterable[AdapterPart], wanted: str | None) -> str:
    """The adapter that is meant.

    Raises:
        RequestError: `request.unsatisfiable` if there is none, or several and none of them was named.
    """
    adapters = adapter_names(parts)
    listed = ", ".join(printable(a) for a in adapters[:SHOWN_NAMES])
    if not adapters:
        shown = ", ".join(printable(n) for n in names[:SHOWN_NAMES])
        raise RequestError(
            "request.unsatisfiable",
            f"there is no LoRA adapter among {len(names)} parameters: {shown}, ...",
            fix="--to safetensors writes all weights; other PEFT methods than LoRA are not exported",
        )
    if wanted is not None and wanted not in adapters:
        raise RequestError("request.unsatisfiable", f"there is no adapter {printable(wanted)}", fix=f"one of: {listed}")
    if wanted is None and len(adapters) > 1:
        several = f"there are {len(adapters)} adapters: {listed}"
        raise RequestError("request.unsatisfiable", several, fix="--adapter NAME")
    return wanted or adapters[0]
