"""Our CLI beside DeepSpeed's converters and a plain copy, on the same checkpoint, in one run.

    python bench/run.py [--megabytes 1000] [--ranks 4] [--rounds 3] [--out DIR]

Commands alternate, medians and ratios are printed. Outputs are compared with the peer's, tensor by
tensor, before any ratio is. Exit status 1 if we are slower than a peer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from checkpoints import gpt_parameters, write_zero_checkpoint
from compare import same_universal, same_weights
from measure import Measured, measure

_PYTHON = sys.executable
_RESHARD = [_PYTHON, "-m", "reshard.cli.main"]


@dataclass(frozen=True)
class Contender:
    """One command of a case; `output` is removed before each run."""

    name: str
    command: list[str]
    output: Path


def _environment() -> dict[str, str]:
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RESHARD_DISABLE_PROGRESS_BARS": "1"}


def _sized(megabytes: int) -> list[tuple[str, tuple[int, ...]]]:
    """Parameters whose fp32 master and two moments take about so many megabytes."""
    hidden = 1024 if megabytes >= 500 else 256
    vocab = 20_000 if hidden == 1024 else 4_000
    wanted = megabytes * 1_000_000 / 12
    layers = max(1, round((wanted - (vocab + 1024) * hidden) / (12 * hidden * hidden)))
    return gpt_parameters(hidden, layers, vocab)


def _rounds(contenders: list[Contender], rounds: int) -> dict[str, list[Measured]]:
    results: dict[str, list[Measured]] = {c.name: [] for c in contenders}
    for turn in range(rounds + 1):
        for contender in contenders:
            shutil.rmtree(contender.output, ignore_errors=True)
            contender.output.parent.mkdir(parents=True, exist_ok=True)
            measured = measure(contender.command, env=_environment())
            if turn:  # the first round warms the page cache for everyone
                results[contender.name].append(measured)
    return results


def _row(case: str, name: str, runs: list[Measured], ours: list[Measured]) -> dict[str, object]:
    ratios = [theirs.wall_s / mine.wall_s for theirs, mine in zip(runs, ours, strict=True)]
    return {
        "case": case,
        "name": name,
        "wall_s": round(statistics.median(r.wall_s for r in runs), 3),
        "times_ours": round(statistics.median(ratios), 2),
        "peak_anonymous_mib": round(max(r.peak_anonymous_bytes for r in runs) / 2**20),
        "peak_file_backed_mib": round(max(r.peak_file_backed_bytes for r in runs) / 2**20),
        "runs": [asdict(r) for r in runs],
    }


def _case(
    case: str, contenders: list[Contender], rounds: int, check: Callable[[], list[str]]
) -> tuple[list[dict[str, object]], list[str]]:
    results = _rounds(contenders, rounds)
    problems = check()
    if problems:
        raise SystemExit(f"{case}: outputs differ, no ratio is printed:\n" + "\n".join(problems[:10]))
    ours = results[contenders[0].name]
    rows = [_row(case, name, runs, ours) for name, runs in results.items()]
    slower = [
        f"{case}: slower than {r['name']} ({r['times_ours']}x)"
        for r in rows[1:]
        if not str(r["name"]).startswith("cp") and float(str(r["times_ours"])) < 1
    ]
    return rows, slower


def _stage_cases(stage: int, root: Path, arguments: argparse.Namespace) -> tuple[list[dict[str, object]], list[str]]:
    source = root / f"z{stage}"
    tag = write_zero_checkpoint(source, _sized(arguments.megabytes), stage=stage, ranks=arguments.ranks)
    ours, peer, copy = root / f"ours{stage}", root / f"peer{stage}", root / f"copy{stage}"
    kept = root / f"kept{stage}"
    measure([*_RESHARD, "convert", str(source), str(kept), "--to", "universal", "-q"], env=_environment())
    universal = [
        Contender(
            "reshard", [*_RESHARD, "convert", str(source), str(ours / "u"), "--to", "universal", "-q"], ours / "u"
        ),
        Contender(
            "ds_to_universal",
            [
                *(_PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
                *("--input_folder", str(tag), "--output_folder", str(peer / "u")),
            ],
            peer / "u",
        ),
        Contender("cp -r of our output, synced", ["sh", "-c", f"cp -r {kept} {copy} && sync -f {copy}"], copy),
    ]
    rows, slower = _case(
        f"ZeRO-{stage} to universal", universal, arguments.rounds, lambda: same_universal(ours / "u", peer / "u")
    )
    for path in (ours, peer, copy, kept):
        shutil.rmtree(path, ignore_errors=True)
    script = [_PYTHON, "-m", "deepspeed.utils.zero_to_fp32", str(source), str(peer / "w"), "--safe_serialization"]
    weights = [
        Contender(
            "reshard", [*_RESHARD, "convert", str(source), str(ours / "w"), "--to", "safetensors", "-q"], ours / "w"
        ),
        Contender("zero_to_fp32 --safe_serialization", script, peer / "w"),
        Contender(
            "cp -r of the peer's output, synced", ["sh", "-c", f"cp -r {peer / 'w'} {copy} && sync -f {copy}"], copy
        ),
    ]
    more, also_slower = _case(
        f"ZeRO-{stage} to fp32 safetensors", weights, arguments.rounds, lambda: same_weights(ours / "w", peer / "w")
    )
    for path in (ours, peer, copy, source):
        shutil.rmtree(path, ignore_errors=True)
    return rows + more, slower + also_slower


def _markdown(rows: list[dict[str, object]]) -> str:
    lines = [
        "| case | command | wall s (median) | time / ours | peak anonymous MiB | peak file-backed MiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    names = ("case", "name", "wall_s", "times_ours", "peak_anonymous_mib", "peak_file_backed_mib")
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all cases; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1_000, help="master and moments of the checkpoint")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    slower: list[str] = []
    with tempfile.TemporaryDirectory(prefix="reshard-bench-") as directory:
        for stage in (2, 3):
            more, also = _stage_cases(stage, Path(directory), arguments)
            rows += more
            slower += also
    arguments.out.mkdir(parents=True, exist_ok=True)
    facts = {"megabytes": arguments.megabytes, "ranks": arguments.ranks, "rounds": arguments.rounds, "rows": rows}
    (arguments.out / "bench.json").write_text(json.dumps(facts, indent=1) + "\n")
    table = _markdown(rows)
    (arguments.out / "bench.md").write_text(table)
    print(table)
    for line in slower:
        print(line, file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
