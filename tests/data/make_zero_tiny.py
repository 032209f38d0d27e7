"""Makes ``zero2_tiny``, ``zero3_tiny`` and their kin: small real DeepSpeed checkpoints and the truth about them.

Run ``python tests/data/make_zero_tiny.py [case[=folder] ...]`` where DeepSpeed is installed.  ``zero2_python3112`` and
``zero3_python3112`` are the same cases by CPython 3.11.2, whose pickler names members of enums.  The same versions make the same
bytes, but for the padding of ZeRO-3's last rank, which DeepSpeed leaves as uninitialised memory.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE.parent))

from oracle.cases import CASES, ds_config  # noqa: E402 - after the path
from oracle.driver import Oracle, Trained  # noqa: E402
from oracle.launcher import Worlds  # noqa: E402

WORLD = 2
_README = """# {name}

A ZeRO-{stage} checkpoint as `engine.save_checkpoint` of DeepSpeed {deepspeed} (torch {torch}, CPU, gloo) wrote it
under CPython {python}: {world} data-parallel ranks, bf16, AdamW, WarmupLR, saved after {steps} steps of the tiny tied language model in
`tests/oracle/models.py` (tied head, one frozen matrix, one trainable parameter that is never used, an int and a float
buffer). Made by `tests/data/make_zero_tiny.py`; only DeepSpeed's copies of its recovery scripts were left out.

* `latest`, `{tag}/`: the checkpoint.
* `expected.safetensors`: what the run held when it saved, whole tensors under `<kind>/<parameter>`: `fp32` (masters),
  `exp_avg`, `exp_avg_sq`, `module` (bf16 weights), `frozen`, `buffer`.
* `expected.json`: steps, hyper-parameters, counters, tied names, and the losses of the next {after} steps of the
  uninterrupted run (`losses_after`).
"""


def make(oracle: Oracle, case: str, name: str) -> None:
    """Trains ``case`` and replaces the folder ``name``."""
    target = _HERE / name
    with tempfile.TemporaryDirectory() as scratch:
        run = oracle.train(CASES[case], Path(scratch), world=WORLD, steps_after=3)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        shutil.copytree(run.tag_dir, target / run.tag)
        shutil.copy(run.dir / "latest", target)
        (target / "expected.safetensors").write_bytes(run.truth.tensors_path.read_bytes())
        shutil.copy(run.truth.meta_path, target / "expected.json")
        (target / "README.md").write_text(_readme(run, name))


def _readme(run: Trained, name: str) -> str:
    meta = run.truth.meta
    return _README.format(
        name=name,
        python=platform.python_version(),
        stage=ds_config(run.case, run.world)["zero_optimization"]["stage"],
        deepspeed=meta["ds_version"],
        torch=meta["torch_version"],
        world=run.world,
        steps=run.case.steps,
        after=len(run.losses_after),
        tag=run.tag,
    )


if __name__ == "__main__":
    with Worlds() as worlds:
        for wanted in sys.argv[1:] or ["zero2_tiny", "zero3_tiny"]:
            case, _, folder = wanted.partition("=")
            make(Oracle(worlds), case, folder or case)
