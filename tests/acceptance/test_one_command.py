"""`reshard serve` and `reshard submit --wait` with the real engine: the main job with no service at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from servers.process import ServerProcess
from servers.stack import end_tree

SOURCE = Path(__file__).parent.parent / "data" / "zero3_tiny"
RESHARD = (sys.executable, "-m", "reshard.cli.main")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, str]]:
    """The environment in which the command line finds a running service."""
    directory = tmp_path_factory.mktemp("serve")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RESHARD_")}
    log = directory / "serve.log"
    argv = [*RESHARD, "serve", "--port", "0", "--data-dir", str(directory / "data")]
    process = ServerProcess(argv, env=env, log=log)
    try:
        process.wait_until(lambda: "startup complete" in log.read_text())
        found = re.search(r"RESHARD_URL=(http://\S+)", log.read_text())
        assert found is not None
        yield {**env, "RESHARD_URL": found[1]}
    finally:
        end_tree(process)


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RESHARD, *arguments], env=env, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.parametrize(("to", "options"), [("universal", ()), ("safetensors", ("--dtype", "fp32"))])
def test_the_main_job(service: dict[str, str], tmp_path: Path, to: str, options: tuple[str, ...]) -> None:
    target = tmp_path / "global_step3_out"
    done = run(service, "submit", str(SOURCE), str(target), "--to", to, *options, "--wait")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(target)
    verified = run(service, "verify", str(target), "--json")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["ok"]
    again = run(service, "submit", str(SOURCE), str(target), "--to", to, *options, "--wait", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["result"]["already_done"]
    if to == "safetensors":
        expected = load_file(SOURCE / "expected.safetensors")
        masters = {name.removeprefix("fp32/"): value for name, value in expected.items() if name.startswith("fp32/")}
        written = load_file(next(target.glob("*.safetensors")))
        assert masters
        for name, value in masters.items():
            assert torch.equal(written[name].view(torch.int32), value.view(torch.int32))


def test_errors_keep_their_code_and_exit(service: dict[str, str], tmp_path: Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "precious").write_text("data")
    refused = run(service, "submit", str(SOURCE), str(occupied), "--to", "universal", "--wait", "--quiet")
    assert refused.returncode == 5
    assert "request.target_exists" in refused.stderr
    assert "fix:" in refused.stderr
    assert refused.stdout == ""
    assert [path.name for path in occupied.iterdir()] == ["precious"]
    missing = run(service, "submit", str(tmp_path / "nothing"), str(tmp_path / "out"), "--to", "universal")
    assert missing.returncode == 3
