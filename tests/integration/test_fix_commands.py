"""Every command that a `fix` says is run: against a service with a job, a tenant, a webhook, and beside a checkpoint.

A command that asks the user for a name (`ID`, `NAME`, `DST`) gets one that is there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import reshard
from house.fixes import commands_in, fixes
from house.keys import key_pair
from house.megatron_runs import MegatronRun
from house.promises import command
from house.repository import pyproject
from house.saves import DATA
from house.waiting import PATIENCE_S
from reshard.api.client import Client
from reshard.models.access import ENDINGS
from servers.scripted import scripted
from servers.stack import Stack

COMMANDS = sorted({found for line in fixes() for found in commands_in(line.partition("\t")[2])})
OURS = [found for found in COMMANDS if found.startswith("reshard ")]
OPERATOR = "operator-token-of-this-test"
NEVER_ENDS = ("reshard serve", "reshard worker")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, str]]:
    """What stands for the words in upper case, in the environment of a user of a service."""
    place = tmp_path_factory.mktemp("fixes")
    shutil.copytree(DATA / "zero2_tiny", place / "source")
    run = MegatronRun(experts=4).save_torch_dist(place / "megatron")
    private, public = key_pair(place, "seal")
    certificate = place / "source.sealed.json"
    certificate.write_text(reshard.seal(place / "source", key=private, progress=False).certificate)
    extra = {"RESHARD_TOKEN": OPERATOR, "RESHARD_WEBHOOK_HTTP": "true", "RESHARD_WEBHOOK_NETWORKS": "127.0.0.0/8"}
    stack = Stack(place / "logs", f"sqlite:///{place}/jobs.db", extra=extra)
    with stack.api() as url, stack.worker(), Client(url, OPERATOR) as client:
        job = client.submit(scripted(units=1), str(place / "done"), to="universal")
        client.wait(job.id, timeout_s=PATIENCE_S)
        hook = client.webhooks.create("http://127.0.0.1:9/", events=ENDINGS)
        environment = pytest.MonkeyPatch()
        for name, value in {
            "RESHARD_URL": url,
            "RESHARD_TOKEN": OPERATOR,
            "RESHARD_DATABASE_URL": stack.database_url,
        }.items():
            environment.setenv(name, value)
        environment.setenv("AWS_EC2_METADATA_DISABLED", "true")  # no machine of Amazon's is waited for
        yield {
            "SRC": str(place / "source"), "DST": str(place / "out"), "JOB": job.id, "WEBHOOK": hook.id, "N": "2",
            "MEGATRON": str(run), "PUB": str(public), "CERT": str(certificate),
        }  # fmt: skip
        environment.undo()


def filled(line: str, words: dict[str, str]) -> list[str]:
    """The arguments of a command of ours, with names that are there."""
    found = shlex.split(line)[1:]
    kind = {"jobs": "JOB", "webhooks": "WEBHOOK", "tenants": "TENANT", "tokens": "TENANT", "clean": "DST"}.get(found[0])
    known = {**words, "TENANT": "vision", "ID": words.get(kind or "", ""), "NAME": "vision"}
    # In a second pair of braces, more may follow the place.
    known["{}"] = known["{}{}"] = known.get(kind or "SRC", "")
    if "--cert" in found:
        known["{}"] = words["CERT"]
    if "DST/iter_NNNNNNN" in found:
        # The format, with the number of expert-parallel ranks behind it if there are several.
        found[found.index("--to") + 1] = "megatron"
        known["{}"], known["DST/iter_NNNNNNN"] = words["MEGATRON"], f"{words['DST']}/iter_0000007"
    if "--ep" in found:
        found[found.index("--ep") + 1] = "2"
    if "--scope" in found:
        found[found.index("--scope") + 1] = "read"
    return [known.get(word, word) for word in found]


def test_there_are_commands_of_all_kinds() -> None:
    assert {line.split()[0] for line in COMMANDS} == {"reshard", "pip", "export"}
    assert len(OURS) > 15


@pytest.mark.parametrize("line", OURS)
def test_a_command_of_a_fix_runs(
    line: str, words: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write a FILE
    if line.startswith(("reshard tenants set", "reshard tokens")):
        command("tenants", "create", "vision")
    if line.startswith("reshard webhooks remove"):
        with Client() as client:  # the others need theirs
            words = {**words, "WEBHOOK": client.webhooks.create("http://127.0.0.1:9/", events=ENDINGS).id}
    if line.startswith(NEVER_ENDS):
        line += " --help"
    code, told, said = command(*filled(line, words))
    assert code == 0, (line, told, said)


@pytest.mark.parametrize("line", [found for found in COMMANDS if found.startswith("pip ")])
def test_what_a_fix_installs_can_be_installed(line: str) -> None:
    for text in shlex.split(line)[2:]:
        name = Requirement(text.replace("{}", "worker"))
        if name.name == "reshard":
            assert name.extras <= set(pyproject()["project"]["optional-dependencies"])


@pytest.mark.parametrize("line", [found for found in COMMANDS if found.startswith("export ")])
def test_what_a_fix_exports_a_shell_takes(line: str) -> None:
    found = re.match(r"export( [A-Z_]+=(\$\([^)]*\)?|\S)*)+", line)
    assert found, line
    text = found[0] if found[0].count("(") == found[0].count(")") else f"{found[0]})"
    done = subprocess.run(["bash", "-euc", text], env=dict(os.environ), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
