"""A real SFTP server: asyncssh, one process (`python -m servers.sftp PORT DIRECTORY`)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import asyncssh

from servers.process import free_port, running

USER, PASSWORD = "trainer", "correct horse"


@dataclass(frozen=True)
class SftpServer:
    """The address of a server, and the directory that its user sees as `/`."""

    port: int
    root: Path
    host: str = "127.0.0.1"

    @property
    def credentials(self) -> dict[str, Any]:
        """The arguments of a client beside the host."""
        return {"port": self.port, "username": USER, "password": PASSWORD}


class _Accounts(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return bool(username)

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return (username, password) == (USER, PASSWORD)


async def _serve(port: int, root: str) -> None:
    server = await asyncssh.listen(
        "127.0.0.1",
        port,
        server_factory=_Accounts,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        sftp_factory=partial(asyncssh.SFTPServer, chroot=root.encode()),
    )
    print("ready", flush=True)
    await server.wait_closed()


@contextmanager
def sftp_server(root: Path, log: Path) -> Generator[SftpServer]:
    """A server that shows a directory to the one user it has; its output goes into a file."""
    port = free_port()
    tests = str(Path(__file__).parents[1])
    argv = [sys.executable, "-m", "servers.sftp", str(port), str(root)]
    with running(argv, env={**os.environ, "PYTHONPATH": tests}, log=log) as server:
        server.wait_until(lambda: "ready" in log.read_text())
        yield SftpServer(port, root)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
