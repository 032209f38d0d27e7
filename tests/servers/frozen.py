"""Job databases that earlier code wrote (`tests/data/job_databases`), in a database of today."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import psycopg

from house.repository import ROOT

FROZEN = ROOT / "tests" / "data" / "job_databases"
HOST = {"RESHARD_HOST_ID": "frozen"}
"""The host to which the SQLite files are bound."""


def thaw(schema: int, url: str, directory: Path | None = None) -> list[dict[str, Any]]:
    """Write an earlier database into an empty one; returns what its code said about each job.

    Its places are moved from `/frozen` to `directory`.
    """
    kind = url.partition(":")[0]

    def moved(ending: str) -> str:
        text = (FROZEN / f"schema{schema}.{kind}.{ending}").read_text()
        return text if directory is None else text.replace("/frozen", str(directory))

    if kind == "sqlite":
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.executescript(moved("sql"))
        connection.close()
    else:
        with psycopg.connect(url, autocommit=True) as server:
            server.execute(moved("sql").encode())
    return [json.loads(line) for line in moved("jsonl").splitlines()]
