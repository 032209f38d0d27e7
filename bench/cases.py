"""The cases of the benchmark: a source, our command, the peer's, a plain copy, and what the ratios must be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from checkpoints import (
    gpt_parameters,
    many_small_parameters,
    write_tensor_parallel_checkpoint,
    write_zero_checkpoint,
)
from compare import same_files, same_universal, same_weights

PYTHON = sys.executable
RESHARD = [PYTHON, "-m", "reshard.cli.main"]
OURS, COPY, FULL = "reshard", "cp -r of our output, synced", "reshard --verify full"
WRITE = "as many bytes written from memory, synced"


@dataclass(frozen=True)
class Contender:
    """One command of a case; `output` is removed before each run."""

    name: str
    command: list[str]
    output: Path
    rounds: int | None = None
    """Fewer runs than the others have, for a peer that takes minutes."""
    variables: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Limit:
    """What the time of a contender must be at least, as a multiple of ours."""

    contender: str
    at_least: float


@dataclass(frozen=True)
class Case:
    """Commands that are timed in turn. Ours is the first."""

    name: str
    source: Callable[[], None]
    contenders: tuple[Contender, ...]
    check: Callable[[], list[str]]
    """What differs between our output and the peer's."""
    limits: tuple[Limit, ...] = ()
    anonymous_mib: int = 512


def environment() -> dict[str, str]:
    """What every command runs in."""
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RESHARD_DISABLE_PROGRESS_BARS": "1"}
    return {**os.environ, **quiet}


def sized(megabytes: int) -> list[tuple[str, tuple[int, ...]]]:
    """Parameters whose fp32 master and two moments take about so many megabytes."""
    hidden = 1024 if megabytes >= 500 else 256
    vocab = 20_000 if hidden == 1024 else 4_000
    wanted = megabytes * 1_000_000 / 12
    layers = max(1, round((wanted - (vocab + 1024) * hidden) / (12 * hidden * hidden)))
    return gpt_parameters(hidden, layers, vocab)


def widened(megabytes: int, layers: int = 24) -> list[tuple[str, tuple[int, ...]]]:
    """The same, with as many parameters whatever the size: a model that grows in width."""
    hidden = round((megabytes * 1_000_000 / 12 / (12 * layers)) ** 0.5 / 16) * 16
    return gpt_parameters(hidden, layers, 2_000)


def written(source: Path, parameters: list[tuple[str, tuple[int, ...]]], *, stage: int, ranks: int) -> None:
    """Write a checkpoint unless it is there."""
    if not source.exists():
        write_zero_checkpoint(source, parameters, stage=stage, ranks=ranks)


def _tensor_parallel(source: Path, parameters: list[tuple[str, tuple[int, ...]]]) -> None:
    if not source.exists():
        write_tensor_parallel_checkpoint(source, parameters, tp=4, ranks=2)


def convert_command(source: Path | str, target: Path, *options: str) -> list[str]:
    """Our command."""
    return [*RESHARD, "convert", str(source), str(target), *options, "-q"]


def copied(output: Path, target: Path) -> Contender:
    """A plain copy of our output."""
    command = f"cp -r {output} {target} && sync -f {target}"
    return Contender(COPY, ["sh", "-c", command], target)


def written_alone(output: Path, target: Path) -> Contender:
    """As many bytes as our output has, written from memory."""
    return Contender(WRITE, [PYTHON, str(Path(__file__).parent / "write_alone.py"), str(output), str(target)], target)


def _to_universal(source: Path, output: Path, *, rounds: int | None = None) -> Contender:
    return Contender(
        "ds_to_universal",
        [
            *(PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--input_folder", str(source / "global_step7"), "--output_folder", str(output)),
        ],
        output,
        rounds,
    )


def _universal(
    root: Path, name: str, make: Callable[[Path], None], limits: tuple[Limit, ...], *, peer_rounds: int | None = None
) -> Case:
    source, ours, peer, full = root / "source" / name, root / "ours" / "u", root / "peer" / "u", root / "full"
    contenders = (
        Contender(OURS, convert_command(source, ours, "--to", "universal"), ours),
        copied(ours, root / "copy"),
        written_alone(ours, root / "written"),
        _to_universal(source, peer, rounds=peer_rounds),
        Contender(FULL, convert_command(source, full / "u", "--to", "universal", "--verify", "full"), full),
    )
    return Case(f"{name} to universal", partial(make, source), contenders, lambda: same_universal(ours, peer), limits)


def _weights(root: Path, name: str, make: Callable[[Path], None], dtype: str, limits: tuple[Limit, ...]) -> Case:
    source, ours, peer = root / "source" / name, root / "ours" / "w", root / "peer" / "w"
    script = (
        "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert; import sys"
    )
    call = "convert(sys.argv[1], sys.argv[2], safe_serialization=True)"
    if dtype == "bf16":
        script = f"{script}, torch; from bf16_peer import convert_to_bf16"
        call = "convert_to_bf16(sys.argv[1], sys.argv[2])"
    contenders = (
        Contender(OURS, convert_command(source, ours, "--to", "safetensors", "--dtype", dtype), ours),
        copied(ours, root / "copy"),
        written_alone(ours, root / "written"),
        Contender(
            "zero_to_fp32 --safe_serialization" if dtype == "fp32" else "zero_to_fp32's functions, then bf16",
            [PYTHON, "-c", f"{script}; {call}", str(source), str(peer)],
            peer,
            variables={"PYTHONPATH": str(Path(__file__).parent)},
        ),
    )
    case = f"{name} to {dtype} safetensors"
    return Case(case, partial(make, source), contenders, lambda: same_weights(ours, peer), limits)


def _native(root: Path, name: str, make: Callable[[Path], None], dp: int, limits: tuple[Limit, ...]) -> Case:
    source, ours, back = root / "source" / name, root / "ours" / "n", root / "back"
    contenders = (
        Contender(OURS, convert_command(source, ours, "--to", "zero", "--dp", str(dp)), ours),
        copied(ours, root / "copy"),
        written_alone(ours, root / "written"),
    )

    def check() -> list[str]:
        """The new layout holds the same: its universal form is the source's."""
        shutil.rmtree(back, ignore_errors=True)
        for which, tree in (("a", source), ("b", ours)):
            command = convert_command(tree, back / which, "--to", "universal")
            subprocess.run(command, check=True, env=environment(), stderr=subprocess.DEVNULL)
        return same_files(back / "a" / "zero", back / "b" / "zero")

    return Case(f"{name} to {dp} ranks", partial(make, source), contenders, check, limits)


def main_cases(root: Path, megabytes: int) -> Iterator[Case]:
    """What is promised, at the size that is promised."""
    parameters = sized(megabytes)
    for stage in (2, 3):
        name = f"ZeRO-{stage}, 4 ranks, {megabytes / 1000:g} GB"
        make = partial(written, parameters=parameters, stage=stage, ranks=4)
        yield _universal(root, name, make, (Limit("ds_to_universal", 8), Limit(COPY, 1 / 1.25)))
        yield _weights(root, name, make, "fp32", (Limit("zero_to_fp32 --safe_serialization", 5),))
        yield _weights(root, name, make, "bf16", (Limit("zero_to_fp32's functions, then bf16", 4),))
        yield _native(root, name, make, 3, (Limit(COPY, 1 / 1.3),))


def small_cases(root: Path, ranks: int = 64) -> Iterator[Case]:
    """Many small tensors on many ranks; fewer at stage 3: the peer writes a file per parameter, state and rank."""
    for stage, count in ((2, 20_000), (3, 5_000)):
        name = f"ZeRO-{stage}, {ranks} ranks, {count} small tensors"
        make = partial(written, parameters=many_small_parameters(count), stage=stage, ranks=ranks)
        yield _universal(root, name, make, (Limit("ds_to_universal", 20),), peer_rounds=1)


def wide_cases(root: Path, megabytes: int) -> Iterator[Case]:
    """Stages and rank counts, slices of tensor parallelism put together along both dimensions, universal to native."""
    parameters = sized(megabytes)
    for stage in (1, 2, 3):
        for ranks in (2, 8, 64):
            name = f"ZeRO-{stage}, {ranks} ranks, {megabytes / 1000:g} GB"
            make = partial(written, parameters=parameters, stage=stage, ranks=ranks)
            yield _universal(root, name, make, (Limit("ds_to_universal", 1),))
    name = f"ZeRO-1, tensor-parallel 4, 2 ranks, {megabytes / 1000:g} GB"
    make = partial(_tensor_parallel, parameters=parameters)
    yield _universal(root, name, make, (Limit("ds_to_universal", 1),))
    name = f"universal of ZeRO-2, {megabytes / 1000:g} GB"
    yield _native(root, name, partial(_universal_source, parameters=parameters), 3, ())


def _universal_source(source: Path, parameters: list[tuple[str, tuple[int, ...]]]) -> None:
    if source.exists():
        return
    before = source.with_name(f"{source.name} before")
    written(before, parameters, stage=2, ranks=4)
    subprocess.run(convert_command(before, source, "--to", "universal"), check=True, env=environment())
