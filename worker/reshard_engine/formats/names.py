"""Names of parameters and optimizer states: checks before they become parts of paths, and PEFT's names for files."""

from __future__ import annotations

import re

from reshard.errors import SourceError, printable

MAX_NAME_CHARS = 512
_STATE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def checked_name(name: str) -> str:
    """Check a parameter name, which may become part of a path.

    Raises:
        SourceError: `name.invalid` otherwise.
    """
    parts = name.split("/")
    bad = not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or "\\" in name
    if bad or any(p in ("", ".", "..") for p in parts):
        raise SourceError(
            "name.invalid", f"a parameter is called {printable(name)!r}", fix="rename it in the checkpoint"
        )
    return name


def checked_state(name: object) -> str:
    """Check the name of an optimizer state, which becomes a file name and must be a plain word.

    Raises:
        SourceError: `name.invalid` otherwise, and for `fp32`, which means the master.
    """
    if not isinstance(name, str) or _STATE.fullmatch(name) is None or name == "fp32" or ".." in name:
        raise SourceError("name.invalid", f"an optimizer state is called {printable(str(name))!r}")
    return name


def name_without_adapter(fqn: str, adapter: str) -> str:
    """The name under which PEFT saves a parameter of an adapter; other names stay as they are.

    Source: peft 0.21.2 `tuners/tuners_utils.py` (`_remove_adapter_name_from_state_dict_key`), `utils/other.py`
    (`ModulesToSaveWrapper.adapter_state_dict`), `tuners/lora/model.py` (`_get_adapter_state_dict`: magnitudes of DoRA
    without `.weight`); verified by running.
    """
    module, saved, tail = fqn.rpartition(f".modules_to_save.{adapter}.")
    name = f"{module}.{tail}" if saved else fqn
    if name.endswith(f".lora_magnitude_vector.{adapter}.weight"):
        name = name.removesuffix(".weight")
    if name.endswith(f".{adapter}"):
        return name.removesuffix(f".{adapter}")
    head, dot, last = name.rpartition(".")
    return f"{head.removesuffix(f'.{adapter}')}{dot}{last}"
