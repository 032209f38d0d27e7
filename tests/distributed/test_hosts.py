"""Workers on several hosts that share a directory and nothing else: no locks, no process ids, no clocks.

Each host is a process of its own with another host name, without file locks, and, where the kernel lets us, in PID and
mount namespaces with another boot id.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed.test_workers import contents, numbered, plain, result, strays
from house.measured import say
from house.sources import zero_source
from house.waiting import PATIENCE_S
from reshard.engine import load_engine
from reshard_engine.distributed.segments import FormerWork
from reshard_engine.storage.texts import FileTexts

HERE = Path(__file__).parent
PARAMETERS = [(f"layer.{n}.weight", (256, 257)) for n in range(16)] + [("embed.weight", (2048, 256))]
FLAGS = ("--to", "universal", "--part-size", "64KiB", "--threads", "1")
NAMESPACES = (
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
BOOT_ID = "/proc/sys/kernel/random/boot_id"


source = zero_source(PARAMETERS, stage=2)


def namespaces_work() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*NAMESPACES, "sh", "-c", f"mount --bind /dev/null {BOOT_ID}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def on_host(
    host: str, command: list[str], directory: Path, *, isolated: bool, skew_s: float = 0.0
) -> subprocess.Popen[str]:
    """A command on another host."""
    path = os.pathsep.join([str(HERE / "other_host"), os.environ.get("PYTHONPATH", "")])
    skew = {"CLOCK_SKEW_S": str(skew_s)} if skew_s else {}
    environment = {**os.environ, "PYTHONPATH": path, "RESHARD_LEASE_S": "2", "OMP_NUM_THREADS": "1", **skew}
    if isolated:
        boot_id = directory / f"boot-id-{host}"
        boot_id.write_text(f"{host}\n")
        inside = f'mount --bind "{boot_id}" {BOOT_ID} && hostname {host} && exec "$@"'
        command = [*NAMESPACES, "sh", "-c", inside, "sh", *command]
    return subprocess.Popen(
        command,
        env={**environment, "OTHER_HOST": host},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def convert(source: Path, target: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "reshard.cli.main", "convert", str(source), str(target)]
    return [*command, *FLAGS, "--json", "--quiet", *more]


def wait_for_segments(target: Path) -> None:
    """Wait until a worker has recorded units, as the other hosts see it."""
    until = time.monotonic() + PATIENCE_S
    while not any(map(recorded, target.parent.glob(f".{target.name}.reshard-*.workers"))):
        assert time.monotonic() < until, "no worker wrote a record"
        time.sleep(0.01)


def recorded(workers: Path) -> bool:
    return bool(FormerWork(FileTexts(str(workers))).records())


@pytest.mark.parametrize("skewed", [False, True], ids=["without shared locks", "clocks two hours wrong"])
def test_hosts_that_share_a_directory_and_nothing_else(skewed: bool, source: Path, tmp_path: Path) -> None:
    """One host dies in the middle; the others finish its work."""
    expected = plain(source, tmp_path / "alone", FLAGS)
    target, isolated = tmp_path / "together", namespaces_work()
    skews = (7200.0, -7200.0, 0.0) if skewed else (0.0, 0.0, 0.0)
    hosts = [
        on_host(f"host{n}", convert(source, target, *numbered(n, 3)), tmp_path, isolated=isolated, skew_s=skew)
        for n, skew in enumerate(skews)
    ]
    wait_for_segments(target)
    hosts[0].kill()
    hosts[0].communicate()
    for host in hosts[1:]:
        result(host)
    assert contents(target) == expected
    assert strays(tmp_path) == []
    assert load_engine().verify(str(target)).ok
    say(f"3 hosts, one killed, clocks {skews}: {'namespaces and boot ids of their own' if isolated else 'one kernel'}")


def test_another_host_begins_a_second_session_with_what_the_first_host_synced(source: Path, tmp_path: Path) -> None:
    """Under another boot id, only synced data count: those of segments. The first session is collected."""
    expected = plain(source, tmp_path / "alone", FLAGS)
    target, isolated = tmp_path / "together", namespaces_work()
    lost = on_host("host0", convert(source, target, *numbered(0, 2)), tmp_path, isolated=isolated)
    wait_for_segments(target)
    lost.kill()
    lost.communicate()
    for beat in target.parent.glob(f".{target.name}.reshard-*.workers/beats/*"):
        beat.unlink()  # it left, for all that others can see
    after = result(on_host("host1", convert(source, target, *numbered(1, 2)), tmp_path, isolated=isolated))
    assert contents(target) == expected
    assert strays(tmp_path) == []
    say(f"another host resumed {after['resumed_bytes']} bytes of a host that was lost")
    assert int(str(after["resumed_bytes"])) > 0
