"""Casts on a GPU beside those of the processor: transfer limits, rates by batch and thread, a whole conversion.

    python bench/device_casts.py [--megabytes 4000] [--data /dev/shm] [--out DIR]

Results are compared with the processor's, bit for bit, before a rate is printed. Exit status 1 where they differ.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import kernel_report
from cases import environment, sized
from checkpoints import write_zero_checkpoint
from measure import measure

from reshard_engine.execute.casts.cast import CastKernel, NumpyCast
from reshard_engine.execute.casts.device import DeviceCast
from reshard_engine.execute.casts.rows import Kind, Rows
from reshard_engine.tensors.dtypes import BY_NAME

PAIRS = (("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"))
BATCH_MIB = (1, 4, 16)
SECONDS = 0.5
REPORTING = [sys.executable, str(Path(kernel_report.__file__)), "reshard.cli.main"]
"""The command line, which records where its casts ran."""
Row = dict[str, Any]


def _timed(work: Callable[[], None], threads: int, size_bytes: int) -> float:
    """Bytes a second of all threads together, each doing the work again and again."""

    def loop(_: int) -> int:
        done, until = 0, time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            work()
            done += 1
        return done

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: work(), range(threads)))
        begin = time.perf_counter()
        done = sum(pool.map(loop, range(threads)))
        return done * size_bytes / (time.perf_counter() - begin)


def _local_work(kernel: CastKernel, data: Any, kind: Kind, rows: Rows, result_bytes: int) -> Callable[[], None]:
    """One batch: read into the memory that the kernel gives, cast from there. Each thread has its own target."""
    mine = threading.local()

    def work() -> None:
        if not hasattr(mine, "target"):
            mine.target, mine.staged = np.zeros(result_bytes, dtype=np.uint8), np.zeros(len(data), dtype=np.uint8)
        staged = kernel.staging(len(data)) if isinstance(kernel, DeviceCast) else mine.staged
        staged[:] = data
        kernel.cast_rows(rows, staged, mine.target, kind)

    return work


def rates(device: str) -> list[Row]:
    """GB of source a second, the copy into staging memory included."""
    found: list[Row] = []
    cores = os.cpu_count() or 1
    for source, target in PAIRS:
        kind = Kind(BY_NAME[source], BY_NAME[target])
        wide, narrow = kind.source.itemsize_bytes, kind.target.itemsize_bytes
        for mib in BATCH_MIB:
            size = mib << 20
            bits = np.random.default_rng(0).standard_normal(size // 4).astype(np.float32).view(np.uint8)
            whole = Rows(*(np.array([n], dtype=np.int64) for n in (0, size, 0)))
            count = size // 4096
            each = np.full(count, 2048, dtype=np.int64)
            strided = Rows(np.arange(count) * 4096, each, np.arange(count) * (2048 // wide * narrow))
            for shape, rows in (("whole", whole), ("rows of 2 KiB", strided)):
                moved = int(rows.length.sum())
                row: Row = {"cast": f"{source} to {target}", "batch_mib": mib, "shape": shape}
                kernels: dict[str, CastKernel] = {
                    "cpu": NumpyCast(),
                    "device": DeviceCast(device, least_bytes=0, memory_bytes=16 << 30),
                }
                outs: list[bytes] = []
                for kernel in kernels.values():
                    out = np.zeros(moved // wide * narrow, dtype=np.uint8)
                    kernel.cast_rows(rows, bits, out, kind)
                    outs.append(out.tobytes())
                if outs[0] != outs[1]:
                    raise SystemExit(f"{row}: the device's bits are not the processor's")
                for threads in sorted({1, min(8, cores), cores}):
                    for where, kernel in kernels.items():
                        work = _local_work(kernel, bits, kind, rows, len(outs[0]))
                        row[f"{where}_{threads}"] = round(_timed(work, threads, moved) / 1e9, 2)
                used = kernels["device"].report()  # pyright: ignore[reportAttributeAccessIssue]
                row["to_cpu_because_busy"] = round(used["cpu_bytes"] / (used["cpu_bytes"] + used["device_bytes"]), 2)
                found.append(row)
                print(json.dumps(row), flush=True)
    return found


def transfers(device: str) -> Row:
    """GB a second of plain copies through pinned memory: what no cast on the device can pass."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    found: Row = {}
    for name, (to, of) in {"to_device": (there, host), "from_device": (host, there)}.items():
        walls: list[float] = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            to.copy_(of, non_blocking=True)
            torch.cuda.synchronize()
            walls.append(time.perf_counter() - begin)
        found[name] = round(len(host) / statistics.median(walls) / 1e9, 1)
    return found


def conversion_row(
    root: Path, source: Path, dtype: str, devices: Sequence[str], *, rounds: int, until: float = math.inf
) -> Row:
    """Medians of whole commands that export weights, in turns; `bits_equal`: all targets have the same bytes.

    Args:
        root: A directory for the targets.
        source: The checkpoint.
        dtype: The type of the weights.
        devices: Values of RESHARD_DEVICE.
        rounds: Number of commands with each device.
        until: No round but the first begins after this time of `time.monotonic`.
    """
    walls: dict[str, list[tuple[float, float]]] = {device: [] for device in devices}
    targets = {device: root / f"to-{device.replace(':', '-')}" for device in devices}
    reports: dict[str, Row] = {}
    equal = True
    for turn in range(rounds):
        if turn and time.monotonic() > until:
            break
        for device, target in targets.items():
            shutil.rmtree(target, ignore_errors=True)
            report = root / f"{target.name}.json"
            report.unlink(missing_ok=True)
            command = [*REPORTING, "convert", str(source), str(target), "--to", "safetensors", "--dtype", dtype]
            variables = {**environment(), "RESHARD_DEVICE": device, kernel_report.VARIABLE: str(report)}
            done = measure([*command, "--json"], env=variables)
            walls[device].append((done.wall_s, float(json.loads(done.output.splitlines()[-1])["seconds"]["run"])))
            reports[device] = json.loads(report.read_text().splitlines()[-1]) if report.exists() else {}
        first, *others = targets.values()
        equal &= all(same_weight_files(first, other) for other in others)
    row: Row = {"to": dtype, "rounds": len(walls[devices[0]]), "bits_equal": equal, "kernels": reports}
    for device, times in walls.items():
        row[f"{device}_wall_s"] = round(statistics.median(w for w, _ in times), 2)
        row[f"{device}_run_s"] = round(statistics.median(r for _, r in times), 2)
    for target in targets.values():
        shutil.rmtree(target, ignore_errors=True)
    return row


def same_weight_files(one: Path, other: Path) -> bool:
    """True if both directories have the same safetensors files, byte for byte, and at least one."""
    names = sorted(path.name for path in one.glob("*.safetensors"))
    if not names or names != sorted(path.name for path in other.glob("*.safetensors")):
        return False
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def conversions(root: Path, arguments: argparse.Namespace) -> list[Row]:
    """Whole commands with the device ruled out, forced and chosen by measurement."""
    source = root / "source"
    write_zero_checkpoint(source, sized(arguments.megabytes), stage=2, ranks=4)
    found: list[Row] = []
    for dtype in ("bf16", "fp16"):
        row = conversion_row(root, source, dtype, ("cpu", arguments.device, "auto"), rounds=arguments.rounds)
        if not row["bits_equal"]:
            raise SystemExit(f"{dtype}: the device's files are not those of the processor")
        found.append({**row, "source_gb": arguments.megabytes / 3000})
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="torch's name; cpu tries the script, its numbers say nothing")
    parser.add_argument("--megabytes", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="where the checkpoint is made; memory shows the casts, not the disk")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    arguments = parser.parse_args()
    facts: Row = {"machine": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__}
    if arguments.device.startswith("cuda"):
        facts["device"] = torch.cuda.get_device_name(arguments.device)
        facts["transfers_gb_per_s"] = transfers(arguments.device)
    print(json.dumps(facts), flush=True)
    facts["rates_gb_per_s"] = rates(arguments.device)
    with tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=arguments.data) as directory:
        facts["conversions"] = conversions(Path(directory), arguments)
    model = DeviceCast(arguments.device, always=False)
    for source, target in PAIRS:
        data = np.zeros(16 << 20, dtype=np.uint8)
        model.cast(data, BY_NAME[source], BY_NAME[target])
    facts["model"] = model.report()
    print(json.dumps(facts["model"]), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "device.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
