"""The topology of docker-compose.yml as plain processes, from empty stores: a job through it ends well.

Commands and environment are those of the compose file and the images. Only places differ: ports and folders of this
test instead of those of containers, and PostgreSQL on a socket.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psycopg
import pytest
from psycopg.sql import SQL, Identifier, Literal

from house.images import DOCKERFILE, command_of, compose, environment_of, example_settings
from house.repository import ROOT
from house.waiting import PATIENCE_S
from servers.process import ServerProcess, free_port
from servers.redis import redis_binary
from servers.stack import end_tree

pgserver = pytest.importorskip("pgserver", reason="pgserver 0.1.4 has no wheel for Python 3.13")

CHECKPOINT = ROOT / "tests" / "data" / "zero2_tiny"
SEAWEEDFS = ROOT / "deploy" / "images" / "seaweedfs.Dockerfile"
BIN = Path(sys.executable).parent
TWIN = 10_000
SECRETS = {
    "POSTGRES_PASSWORD": "planted-password-1",
    "REDIS_PASSWORD": "planted-password-2",
    "RESHARD_TOKEN": "planted-token-of-these-tests",
    "AWS_SECRET_ACCESS_KEY": "planted-secret-key",
}


@dataclass
class Topology:
    """The services of the compose file, and where they are on this host."""

    directory: Path
    facts: dict[str, Any]
    ports: dict[str, int]
    database_url: str = ""

    def here(self, text: str) -> str:
        """A text of the compose file with the places of this host."""
        for service, port in (("redis", 6379), ("seaweedfs", 8333), ("api", 8000)):
            text = re.sub(rf"\b({service}|127\.0\.0\.1):{port}\b", f"127.0.0.1:{self.ports[service]}", text)
        return text

    def environment(self, service: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RESHARD_", "AWS_"))}
        own = {name: self.here(str(value)) for name, value in self.facts["services"][service]["environment"].items()}
        if "RESHARD_DATABASE_URL" in own:
            own["RESHARD_DATABASE_URL"] = self.database_url
        path = f"{BIN}:{Path(redis_binary()).parent}:{inherited['PATH']}"
        # What the image says, beside its own PATH.
        image = {name: v for name, v in environment_of(DOCKERFILE, "cpu").items() if name.startswith("RESHARD_")}
        return {**inherited, **image, **own, "PATH": path}

    def start(self, service: str, argv: list[str]) -> ServerProcess:
        where = self.directory / service
        where.mkdir(exist_ok=True)
        return ServerProcess(argv, env=self.environment(service), log=self.directory / f"{service}.log", cwd=where)

    def healthy(self, service: str) -> bool:
        """Whether the health check of the compose file succeeds."""
        kind, *words = self.facts["services"][service]["healthcheck"]["test"]
        words = [self.here(word) for word in words]
        if words[0] == "redis-cli":
            # The wheel with the server has no client: the same question over the protocol.
            words = [sys.executable, "-c", _PING, str(self.ports["redis"])]
        argv = ["sh", "-c", words[0]] if kind == "CMD-SHELL" else words
        env = self.environment(service)
        return subprocess.run(argv, env=env, capture_output=True, timeout=180, check=False).returncode == 0


_PING = """
import os, redis, sys
redis.Redis(port=int(sys.argv[1]), password=os.environ["REDISCLI_AUTH"]).ping()
"""


def own_command(topology: Topology, service: str) -> list[str]:
    """What a container of ours runs, with the places of this host."""
    command = topology.facts["services"][service]["command"]
    argv = [topology.here(word) for word in command_of(DOCKERFILE, "cpu", command)]
    if "--port" in argv:
        argv[argv.index("--port") + 1] = str(topology.ports[service])
        argv[argv.index("--data-dir") + 1] = str(topology.directory / "data-dir")
    return [str(BIN / argv[0]), *argv[1:]]


def seaweedfs_command(topology: Topology) -> list[str]:
    argv = command_of(SEAWEEDFS)
    data = topology.directory / "objects"
    data.mkdir()
    places = {"-dir=/data": f"-dir={data}", "-s3.port=8333": f"-s3.port={topology.ports['seaweedfs']}"}
    assert set(places) <= set(argv)
    ports = {name: free_port(twin_offset=TWIN) for name in ("master", "volume", "filer")}
    more = [f"-{name}.port={port}" for name, port in ports.items()]
    return [shutil.which(argv[0]) or argv[0], *(places.get(word, word) for word in argv[1:]), *more, "-ip=127.0.0.1"]


def redis_command(topology: Topology) -> list[str]:
    shell, flag, line = topology.facts["services"]["redis"]["command"]
    return [shell, flag, f"{line} --port {topology.ports['redis']} --bind 127.0.0.1"]


def prepare_postgres(topology: Topology, directory: Path, stack: ExitStack) -> None:
    """What the image of PostgreSQL makes of its environment at its first start."""
    server = pgserver.get_server(directory, cleanup_mode="stop")
    stack.callback(server.cleanup)
    facts = topology.facts["services"]["postgres"]["environment"]
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        user, name = Identifier(facts["POSTGRES_USER"]), Identifier(facts["POSTGRES_DB"])
        connection.execute(SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(user, Literal(facts["POSTGRES_PASSWORD"])))
        connection.execute(SQL("CREATE DATABASE {} OWNER {}").format(name, user))
    stated = topology.facts["services"]["api"]["environment"]["RESHARD_DATABASE_URL"]
    socket = server.get_uri().partition("?")[2]
    topology.database_url = f"{re.sub(r'@postgres:5432/', '@/', stated)}?{socket}"


@pytest.fixture
def topology(tmp_path: Path, server_directory: Path) -> Generator[Topology]:
    settings = {**example_settings(), **SECRETS}
    ports = {"redis": free_port(), "seaweedfs": free_port(twin_offset=TWIN), "api": free_port()}
    found = Topology(tmp_path, compose(settings), ports)
    with ExitStack() as stack:
        prepare_postgres(found, server_directory / "pgc", stack)
        commands = {
            "redis": redis_command(found),
            "seaweedfs": seaweedfs_command(found),
            "api": own_command(found, "api"),
            "worker": own_command(found, "worker"),
        }
        for service, argv in commands.items():
            process = found.start(service, argv)
            stack.callback(end_tree, process)
            if service != "worker":
                process.wait_until(lambda name=service: found.healthy(name))
        yield found


def test_a_job_through_the_topology_of_the_compose_file(topology: Topology) -> None:
    environment = topology.environment("api")
    client = boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"], **_keys(environment))
    bucket = environment["RESHARD_ROOTS"].removeprefix("s3://")
    # Before anything is uploaded: an upload by the owner of the store would make its bucket.
    assert [entry["Name"] for entry in client.list_buckets()["Buckets"]] == [bucket]
    for path in sorted(CHECKPOINT.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=bucket, Key=f"run1/{path.relative_to(CHECKPOINT)}", Body=path.read_bytes())
    url = f"http://127.0.0.1:{topology.ports['api']}"
    argv = [str(BIN / "reshard"), "submit", f"s3://{bucket}/run1", f"s3://{bucket}/out", "--to", "universal", "--wait"]
    user = {**environment, "RESHARD_URL": url}
    done = subprocess.run(argv, env=user, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"s3://{bucket}/out"
    assert client.list_objects_v2(Bucket=bucket, Prefix="out/zero/")["KeyCount"] > 0
    deadline = time.monotonic() + PATIENCE_S
    while not topology.healthy("worker"):
        assert time.monotonic() < deadline, "the worker's health check fails"
    for service in ("api", "worker"):
        log = (topology.directory / f"{service}.log").read_text()
        lines = [json.loads(line) for line in log.splitlines()]
        assert any("attempt" in line for line in lines) == (service == "worker")
        assert [secret for secret in SECRETS.values() if secret in log] == []


def _keys(environment: dict[str, str]) -> dict[str, str]:
    return {
        "aws_access_key_id": environment["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
        "region_name": environment["AWS_DEFAULT_REGION"],
    }
