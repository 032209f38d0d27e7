"""The steps of `gpu_proof.py` that need installed packages: python bench/gpu_steps.py STEP --device cuda --size full.

Each prints its results as lines that begin with `@row ` or `@fact `. The device `cpu` runs the device's program on the
CPU: the engine takes it as `RESHARD_DEVICE=cpu:0`, because `cpu` means the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

Row = dict[str, Any]
LINK_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one lane in one direction, by PCIe generation."""
CAST_GB = {"full": (4.0, 16.0), "small": (0.016, 0.064)}
CONVERTED_MB = {"full": 4000, "small": 20}
JOB_MB = {"full": 1000, "small": 20}
ROUNDS = {"full": 3, "small": 1}
_GRAIN_BYTES = 16 << 20
_PROGRAM = "sixteen_bits or out_of_memory or damaged or wrongly or station"
"""The tests of the device's program that run without a GPU."""
TARGETS = {"bfloat16": "bf16", "float16": "fp16"}
_MOST_THREADS = 8
"""Threads that cast on a device at once: it has as many stations."""
_TILE_ELEMS = 16 << 20
_RESERVE_BYTES = 3 << 30
_EDGES = (0x7F800001, 0xFFFFFFFF, 0x7F7F8000, 0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001, 1, 1 << 31, 0xFF800000)
"""float32 that are NaN, infinite, subnormal, or at a boundary of a 16-bit type."""
_COLUMNS = 4096
"""Columns of the matrix that is quantized."""


def row(what: str, **fields: Any) -> None:
    """Print a measurement."""
    print("@row " + json.dumps({"what": what, **fields}), flush=True)


def fact(**fields: Any) -> None:
    """Print facts about the machine."""
    print("@fact " + json.dumps(fields), flush=True)


# The machine.


def nvidia_smi(*names: str) -> dict[str, str]:
    """Values of `nvidia-smi --query-gpu` of the first GPU; empty where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=15).stdout
        return dict(zip(names, (value.strip() for value in answer.splitlines()[0].split(",")), strict=True))
    return {}


def link() -> str:
    """The PCIe link of the first GPU with its rate in theory; empty where it is unknown. An idle link may be slower."""
    names = ("pcie.link.gen.current", "pcie.link.width.current")
    values = nvidia_smi(*names)
    with suppress(KeyError, ValueError):
        generation, width = (int(values[name]) for name in names)
        return f"PCIe {generation} x{width} ({LINK_GB_PER_S[generation] * width:.1f} GB/s in theory)"
    return ""


def available_bytes() -> int:
    """Memory that this process may take."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8")
    free = int(re.search(r"MemAvailable:\s+(\d+)", lines)[1]) << 10  # pyright: ignore[reportOptionalSubscript]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text())
        free = min(free, most - int((group / "memory.current").read_text()))
    return free


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine(_: argparse.Namespace) -> None:
    """Facts about the processor, the GPU and the driver."""
    with suppress(OSError, IndexError):
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        fact(processor=f"{names[0]}, {cores()} cores")
    fact(memory=f"{available_bytes() / 1e9:.0f} GB of memory free", python=platform.python_version())
    fact(kernel=platform.release())
    values = nvidia_smi("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    if values:
        fact(gpu=values["name"], driver=values["driver_version"], nvidia_smi=values)
    import torch

    fact(torch=f"torch {torch.__version__}", device="cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        fact(gpu=torch.cuda.get_device_name(), cuda=torch.version.cuda, gpu_memory=torch.cuda.mem_get_info()[1])


# Tests.


def tests(arguments: argparse.Namespace) -> None:
    """Run the tests for a GPU, or those of the device's program on the CPU."""
    cuda = arguments.device == "cuda"
    which = ["-m", "gpu", "tests/gpu"] if cuda else ["-k", _PROGRAM, "tests/property/test_device_casts.py"]
    # A warning of another torch than ours must not fail a test of bits.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--tb=short", *which]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    counts: dict[str, int] = {}
    for line in process.stdout or ():
        print(line, end="", flush=True)
        if re.search(r" in \d+\.\d+s", line):
            counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", line)}
    status = process.wait()
    passed, wrong = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    numbers = ", ".join(f"{number} {name}" for name, number in counts.items())
    done = status == 0 and passed > 0
    row(
        f"`{which[-1]}`",
        bits_equal=None if not (done or wrong) else done,
        note=numbers or f"pytest ended with {status}",
    )
    if not done:
        raise SystemExit(status or 5)


# Casts in memory.


def filled(size_bytes: int, *, edges: bool) -> Any:
    """float32 as bits, normally distributed, no part of 64 MiB like another; NaNs and others at both ends if wanted."""
    import numpy as np

    count = size_bytes // 4
    rng = np.random.default_rng(0)
    base = rng.standard_normal(min(count, _TILE_ELEMS), dtype=np.float32).view(np.uint32)
    bits = np.empty(count, dtype=np.uint32)

    def fill(number: int) -> None:
        part = bits[number * len(base) : (number + 1) * len(base)]
        np.bitwise_xor(base[: len(part)], np.uint32(number * 0x9E3779 & 0x7FFFFF), out=part)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(fill, range(-(-count // len(base)))))
    if edges:
        bits[: len(_EDGES)] = bits[-len(_EDGES) :] = _EDGES
    return bits.view(np.uint8)


def equal_bytes(one: Any, other: Any) -> bool:
    """True if two memories have the same bytes."""
    import numpy as np

    step = 64 << 20
    with ThreadPoolExecutor(cores()) as pool:
        lows = range(0, max(len(one), len(other)), step)
        return all(pool.map(lambda low: np.array_equal(one[low : low + step], other[low : low + step]), lows))


def one_pass(kernel: Any, source: Any, target: Any, name: str, threads: int) -> float:
    """Seconds to cast all float32 elements in the executor's batches; a copy into staging memory stands for a read."""
    from reshard_engine.plan.budget import READ_BATCH_BYTES
    from reshard_engine.tensors.dtypes import BY_NAME

    narrow = BY_NAME[name].itemsize_bytes

    def cast(low: int) -> None:
        part = source[low : low + READ_BATCH_BYTES]
        staged = kernel.staging(len(part))
        staged[:] = part
        place = target[low // 4 * narrow : (low + len(part)) // 4 * narrow]
        kernel.cast_into(staged, BY_NAME["float32"], BY_NAME[name], place)

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(cast, range(0, len(source), READ_BATCH_BYTES)))
    return time.perf_counter() - begin


def cast_row(kernel: Any, source: Any, name: str, *, rounds: int, pinned: Row, note: str = "") -> Row:
    """The rates of a cast by the CPU and by a kernel of a device, and whether all bits are equal."""
    import numpy as np

    from reshard_engine.execute.casts.cast import NumpyCast

    reference, threads = NumpyCast(), min(_MOST_THREADS, cores())
    expected, results = (np.empty(len(source) // 2, dtype=np.uint8) for _ in range(2))
    # The first passes pay for new memory and compiled kernels.
    one_pass(reference, source, expected, name, cores())
    before = kernel.report()
    one_pass(kernel, source, results, name, threads)
    equal = equal_bytes(expected, results)
    walls: dict[str, list[float]] = {"device": [], "cpu": [], "all": []}
    for _ in range(rounds):
        walls["device"].append(one_pass(kernel, source, results, name, threads))
        walls["cpu"].append(one_pass(reference, source, expected, name, threads))
        walls["all"].append(one_pass(reference, source, expected, name, cores()))
    equal &= equal_bytes(expected, results)
    report = kernel.report()
    moved, on_cpu = (report[key] - before[key] for key in ("device_bytes", "cpu_bytes"))
    rates = {key: len(source) / statistics.median(times) / 1e9 for key, times in walls.items()}
    notes = [note, f"{threads} threads"]
    notes += [f"CPU with {cores()} threads {rates['all']:.2f} GB/s"] if cores() > threads else []
    notes += [f"the CPU cast {on_cpu / (on_cpu + moved):.0%} of the bytes"] if on_cpu else []
    notes += [f"the device was turned off: {report['off']}"] if report["off"] else []
    to = pinned.get("to_device")
    return {
        "unit": "GB/s",
        "cpu": rates["cpu"],
        "cpu_all_threads": rates["all"],
        "device": rates["device"],
        "to_device": rates["device"],
        "from_device": rates["device"] / 2,
        "share_of_pcie": rates["device"] / to if to else None,
        "bits_equal": equal,
        "device_bytes": moved,
        "cpu_bytes": on_cpu,
        "source_bytes": len(source),
        "note": "; ".join(filter(None, notes)),
    }


def fp8_rate(source: Any) -> float:
    """GB/s of fp32 that the CPU quantizes to fp8-block, with all cores."""
    import numpy as np

    from reshard.choices import Quantization
    from reshard_engine.execute.casts.cast import Scaled
    from reshard_engine.tensors.dtypes import FLOAT32
    from reshard_engine.tensors.views import BLOCK_ROWS, Quantized

    rule = Quantized(base=0, kind=Quantization.FP8_BLOCK, scale=FLOAT32, scales=False)
    values = source.view(np.float32)
    values = values[: len(values) // (BLOCK_ROWS * _COLUMNS) * BLOCK_ROWS * _COLUMNS].reshape(-1, _COLUMNS)

    def quantize(low: int) -> None:
        Scaled.of(values[low : low + BLOCK_ROWS], rule).quantized()

    begin = time.perf_counter()
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(quantize, range(0, len(values), BLOCK_ROWS)))
    return values.nbytes / (time.perf_counter() - begin) / 1e9


def fitting_bytes(wanted_bytes: int, free_bytes: int) -> int:
    """Bytes of a source that fit, with two results of half its size, into the free memory; at least 16 MiB."""
    fitting = min(wanted_bytes, (free_bytes - _RESERVE_BYTES) // 2) // _GRAIN_BYTES * _GRAIN_BYTES
    return max(_GRAIN_BYTES, fitting)


def casts(arguments: argparse.Namespace) -> None:
    """Pinned copies, what `auto` measures, and casts of 4 and 16 GB."""
    from reshard_engine.execute.casts.device import DeviceCast

    began, pinned = time.monotonic(), Row()
    if arguments.device == "cuda":
        import device_casts

        pinned = device_casts.transfers("cuda")
        fact(link=link())
        row("pinned copies of 256 MiB: what no cast can exceed", **pinned, share_of_pcie=1.0)
    kernel = DeviceCast(arguments.device)
    kernel.start()
    different = False
    for gigabytes in CAST_GB[arguments.size]:
        size = fitting_bytes(int(gigabytes * 1e9) + _GRAIN_BYTES - 1, available_bytes())
        note = "" if size >= gigabytes * 1e9 else f"{gigabytes:g} GB and the results do not fit into memory"
        rounds = ROUNDS[arguments.size] if time.monotonic() - began < arguments.until_s / 2 else 1
        source = filled(size, edges=True)
        for name, short in TARGETS.items():
            fields = cast_row(kernel, source, name, rounds=rounds, pinned=pinned, note=note)
            different |= not fields["bits_equal"]
            row(f"fp32 to {short}, {size / 1e9:.2f} GB in memory", **fields)
        if gigabytes == CAST_GB[arguments.size][0]:
            auto_rows(arguments.device)
        del source
        source = filled(size, edges=False)
        text = f"{cores()} threads; quantized on the CPU: the device does not quantize"
        row(f"fp32 to fp8-block, {size / 1e9:.2f} GB in memory", unit="GB/s", cpu=fp8_rate(source), note=text)
        del source
    if different:
        raise SystemExit("the device's bits are not those of the reference")


def auto_rows(device: str) -> None:
    """Print the rates that `RESHARD_DEVICE=auto` measures before the first batch of 16 MiB, and the side it chooses."""
    import numpy as np

    from reshard_engine.execute.casts.device import DeviceCast
    from reshard_engine.tensors.dtypes import BY_NAME

    for name, short in TARGETS.items():
        kernel = DeviceCast(device, always=False)
        kernel.cast(np.zeros(16 << 20, dtype=np.uint8), BY_NAME["float32"], BY_NAME[name])
        report = kernel.report()
        measured = report["measured"].get(f"float32 to {name}", {})
        rates = {
            side: measured.get(where, {}).get("gb_per_s") for side, where in (("cpu", "cpu"), ("device", "device"))
        }
        chosen = "the device" if report["device_bytes"] else "the CPU"
        text = f"one thread; auto casts the next batch on {chosen}" + (f" ({report['off']})" if report["off"] else "")
        row(f"what `auto` measures, fp32 to {short}, 16 MiB", unit="GB/s", **rates, note=text, measured=measured)


# Whole conversions.


def device_variable(device: str) -> str:
    """The value of RESHARD_DEVICE that runs the device's program."""
    return "cpu:0" if device == "cpu" else device


@contextmanager
def scratch(need_bytes: int) -> Iterator[Path]:
    """A directory in memory if there is room, else on disk."""
    memory = Path("/dev/shm")
    room = shutil.disk_usage(memory).free if memory.is_dir() and os.access(memory, os.W_OK) else 0
    fits = min(room, available_bytes() - _RESERVE_BYTES) > need_bytes
    # The proof, which is the parent, removes directories of this name when a step was killed.
    prefix = f"reshard-gpu-step-{os.getppid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=memory if fits else None) as directory:
        yield Path(directory)


def place_of(directory: Path) -> str:
    """A remark on where files are."""
    return "files in memory" if directory.is_relative_to("/dev/shm") else "files on disk"


def used(report: Row) -> str:
    """A remark on where the casts of a process ran."""
    if not report.get("device_bytes"):
        return "no cast ran on the device" + (f" ({report['off']})" if report.get("off") else "")
    share = report["device_bytes"] / (report["device_bytes"] + report["cpu_bytes"])
    return f"{share:.0%} of the cast bytes on the device"


def conversion(arguments: argparse.Namespace) -> None:
    """Whole commands with the device ruled out, forced and chosen by measurement."""
    import device_casts
    from cases import sized
    from checkpoints import write_distributed_checkpoint

    began, megabytes = time.monotonic(), CONVERTED_MB[arguments.size]
    forced, wrong = device_variable(arguments.device), False
    with scratch(megabytes * 3_000_000) as directory:
        source = write_distributed_checkpoint(directory / "source", sized(3 * megabytes))
        size = sum(path.stat().st_size for path in source.iterdir())
        for dtype in TARGETS.values():
            measured = device_casts.conversion_row(
                directory,
                source,
                dtype,
                ("cpu", forced, "auto"),
                rounds=2 if arguments.size == "full" else 1,
                until=began + arguments.until_s / 2,
            )
            kernels = measured["kernels"]
            automatic = f"`auto` {measured['auto_wall_s']:.2f} s ({used(kernels['auto'])})"
            row(
                f"conversion of {size / 1e9:.2f} GB fp32, DCP to {dtype} safetensors",
                unit="s",
                cpu=measured["cpu_wall_s"],
                device=measured[f"{forced}_wall_s"],
                bits_equal=measured["bits_equal"],
                note=f"{automatic}; device: {used(kernels[forced])}; {place_of(directory)}",
                measured=measured,
            )
            wrong |= not measured["bits_equal"] or not kernels[forced].get("device_bytes")
    if wrong:
        raise SystemExit("files differ, or the device was not used")


# A job of a service.


def job(arguments: argparse.Namespace) -> None:
    """A job of a Celery worker that casts on the device, beside one that casts on the CPU."""
    from cases import sized
    from checkpoints import write_distributed_checkpoint

    from servers.redis import redis_server

    megabytes = JOB_MB[arguments.size]
    with scratch(megabytes * 3_000_000) as directory, ExitStack() as servers:
        source = write_distributed_checkpoint(directory / "source", sized(3 * megabytes))
        broker = servers.enter_context(redis_server(directory / "redis"))
        try:
            _jobs(arguments, directory, source, broker)
        except BaseException:
            for log in sorted(directory.glob("logs/*.log")):
                print(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}", flush=True)
            raise


def _jobs(arguments: argparse.Namespace, directory: Path, source: Path, broker: str) -> None:
    import device_casts
    import kernel_report

    from servers.stack import Stack, client_of

    report = directory / "report.json"
    runner = shlex.join([sys.executable, "-P", kernel_report.__file__, "reshard_worker.runner"])
    unhurried = {"RESHARD_LEASE_S": "60", "RESHARD_HEARTBEAT_S": "10", "RESHARD_REAPER_S": "15"}
    service = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db", broker, scripted=False, extra=unhurried)
    seconds: dict[str, float] = {}
    warnings: tuple[str, ...] = ()
    with service.api() as url, client_of(url) as client:
        for device in (device_variable(arguments.device), "cpu"):
            variables = {"RESHARD_DEVICE": device, "RESHARD_RUNNER_COMMAND": runner}
            if device != "cpu":
                variables[kernel_report.VARIABLE] = str(report)
            with service.worker(variables):
                target = directory / f"to-{device.replace(':', '-')}"
                ended = client.wait(
                    client.submit(str(source), str(target), to="safetensors", dtype="bf16").id, timeout_s=120
                )
                if ended.result is None or ended.started_at is None or ended.finished_at is None:
                    raise SystemExit(f"the job with RESHARD_DEVICE={device} is {ended.state}: {ended.error}")
                seconds[device] = (ended.finished_at - ended.started_at).total_seconds()
                warnings += tuple(w for w in ended.result.warnings if "were cast on the CPU" in w)
    forced = device_variable(arguments.device)
    kernel: Row = json.loads(report.read_text().splitlines()[-1]) if report.exists() else {}
    equal = device_casts.same_weight_files(directory / "to-cpu", directory / f"to-{forced.replace(':', '-')}")
    size = sum(path.stat().st_size for path in source.iterdir())
    row(
        f"job of a Celery worker, {size / 1e9:.2f} GB fp32, DCP to bf16 safetensors",
        unit="s",
        cpu=seconds["cpu"],
        device=seconds[forced],
        bits_equal=equal,
        measured=kernel,
        note="; ".join([f"device: {used(kernel)}", *warnings, place_of(directory)]),
    )
    if not equal or not kernel.get("device_bytes"):
        raise SystemExit("files differ, or the job did not use the device")


STEPS: dict[str, Callable[[argparse.Namespace], None]] = {
    "machine": machine,
    "tests": tests,
    "casts": casts,
    "conversion": conversion,
    "job": job,
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--device", default="cpu", help="cuda or cpu")
    parser.add_argument("--size", choices=CAST_GB, default="small")
    parser.add_argument("--until-s", type=float, default=60.0, help="seconds after which nothing is repeated")
    arguments = parser.parse_args(words)
    if arguments.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"  # several threads cast at once, and each would start as many of torch's
    # The step is asked to stop by SIGTERM, and then stops its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    STEPS[arguments.step](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
