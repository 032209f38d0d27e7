"""The processes that look at checkpoints for the API: none outlives the request that it was started for."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from reshard.options import SourceSpec
from reshard_jobs.limits import Roots
from reshard_service.probes.pool import Prober
from reshard_service.settings import ServiceSettings

NEVER_READY = "import os, signal, sys; open(sys.argv[1], 'w').write(str(os.getpid())); signal.pause()"


def test_a_probe_that_is_still_importing_ends_with_its_request(tmp_path: Path) -> None:
    place = tmp_path / "started"
    os.mkfifo(place)
    prober = Prober(ServiceSettings(probe_command=(sys.executable, "-c", NEVER_READY, str(place))))

    async def ask() -> int:
        source = SourceSpec(url=str(tmp_path))
        asked = asyncio.create_task(prober.inspect(source, roots=Roots.parse(str(tmp_path)), limit_s=3600))
        pid = int(await asyncio.to_thread(place.read_text))
        asked.cancel()  # as its deadline does
        with pytest.raises(asyncio.CancelledError):
            await asked
        return pid

    pid = asyncio.run(ask())
    try:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
