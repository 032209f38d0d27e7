"""DeepSpeed's functions and scripts beside ours of the same names, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cases import OURS, RESHARD, Case, Contender, environment, sized, written
from compare import same_universal, same_weights

_THEIRS, _MINE = "deepspeed.utils.zero_to_fp32", "reshard.deepspeed"
_GET = "get_fp32_state_dict_from_zero_checkpoint"
_CALLS = {
    f"{_GET}(...)": "found = call(sys.argv[1])",
    f"{_GET}(..., lazy_mode=True), each tensor once": (
        "found = call(sys.argv[1], lazy_mode=True)\nfor n in list(found): found.pop(n).contiguous()"
    ),
}


def _call(module: str, text: str, source: Path) -> list[str]:
    return [sys.executable, "-c", f"import sys\nfrom {module} import {_GET} as call\n{text}", str(source)]


def _differences(source: Path) -> list[str]:
    """Names of which the two functions return other tensors."""
    script = (
        f"import sys, json, torch; from {_THEIRS} import {_GET} as theirs; from {_MINE} import {_GET} as ours\n"
        "a, b = theirs(sys.argv[1]), ours(sys.argv[1], lazy_mode=True)\n"
        "print(json.dumps([n for n in {**a, **b} if not (n in a and n in b and torch.equal(a[n], b[n].contiguous()))]))"
    )
    command = [sys.executable, "-c", script, str(source)]
    done = subprocess.run(command, check=True, env=environment(), capture_output=True, text=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def function_cases(root: Path, megabytes: int) -> Iterator[Case]:
    """The functions, then the scripts, on ZeRO-2 and ZeRO-3."""
    for stage in (2, 3):
        name = f"ZeRO-{stage}, 4 ranks, {megabytes / 1000:g} GB"
        source = root / "source" / name
        make = partial(written, source, sized(megabytes), stage=stage, ranks=4)
        for what, text in _CALLS.items():
            pair = (
                Contender(OURS, _call(_MINE, text, source), root / "nothing"),
                Contender(what, _call(_THEIRS, text, source), root / "nothing"),
            )
            # What is returned whole is in memory whole.
            yield Case(f"{name}: {what}", make, pair, partial(_differences, source), anonymous_mib=2 * megabytes + 512)
        ours, peer = root / "ours" / "f", root / "peer" / "f"
        folders, tag = [str(source), str(peer)], str(source / "global_step7")
        scripts: dict[str, tuple[list[str], list[str], Callable[[], list[str]]]] = {
            "zero_to_fp32 --safe_serialization": (
                ["zero-to-fp32", str(source), str(ours), "--safe_serialization"],
                ["deepspeed.utils.zero_to_fp32", *folders, "--safe_serialization"],
                partial(same_weights, ours, peer),
            ),
            "zero_to_torch --dtype bf16 --safe_serialization": (
                ["zero-to-torch", str(source), str(ours), "--dtype", "bf16", "--safe_serialization"],
                ["deepspeed.utils.zero_to_torch", *folders, "--dtype", "bf16", "--safe_serialization"],
                partial(same_weights, ours, peer),
            ),
            "ds_to_universal": (
                ["ds-to-universal", "--input_folder", tag, "--output_folder", str(ours)],
                [
                    *("deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
                    *("--input_folder", tag, "--output_folder", str(peer)),
                ],
                partial(same_universal, ours, peer),
            ),
        }
        for what, (mine, theirs, check) in scripts.items():
            pair = (
                Contender(OURS, [*RESHARD, *mine], ours),
                Contender(what, [sys.executable, "-m", *theirs], peer),
            )
            yield Case(f"{name}: {what}", make, pair, check)
