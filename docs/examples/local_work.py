"""Look at a checkpoint, plan, convert it to another number of ranks, and check the result, in one process."""

import sys

import reshard


def main(source: str, target: str, ranks: int) -> None:
    """Convert `source` for `ranks` data-parallel ranks."""
    found = reshard.inspect(source)
    print(f"{found.format}, step {found.step}, {found.parameter_elems:,} elements on {found.world}")

    plan = reshard.plan(source, target, to="zero", dp=ranks)
    print(f"reads {plan.read_bytes:,} bytes, writes {plan.write_bytes:,} in {len(plan.files)} files")

    result = reshard.convert(source, target, to="zero", dp=ranks, on_progress=tell)
    print(f"wrote {result.target} in {sum(result.seconds.values()):.1f} s")

    assert reshard.verify(target).ok
    report = reshard.diff(source, target)
    print("equal bit for bit" if report.equal else f"{len(report.differences)} differences")
    reshard.picture(source, beside=target).save("layouts.svg")


def tell(progress: reshard.Progress) -> None:
    """Say what the conversion does."""
    if progress.bytes_total:
        print(f"{progress.phase}: {progress.bytes_done:,} of {progress.bytes_total:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
