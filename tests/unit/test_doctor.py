"""`reshard doctor`: each line says ok, warn or fail, what to do, and the exit code is true."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from house.promises import command
from house.repository import ROOT
from reshard import doctor
from reshard.doctor import SETTINGS

LINE = re.compile(r"(ok   |warn |fail ) [a-z ]{12} \S.*|  +fix: \S.*")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without settings and credentials."""
    for name in list(os.environ):
        if name.startswith(("RESHARD_", "AWS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def findings(*words: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    code, out, err = command("doctor", *words, "--json")
    assert err == ""
    told = json.loads(out)
    assert told["ok"] is (code == 0)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in told["findings"]:
        found.setdefault(finding["subject"], []).append(finding)
    return code, found


def test_every_line_says_how_it_is(tmp_path: Path) -> None:
    code, out, err = command("doctor", str(tmp_path))
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if not LINE.fullmatch(line)] == []
    for subject in ("python", "space", "settings", "service", "engine", "gpu", "credentials", "place"):
        assert re.search(rf"(?m)^\w+ +{subject} ", out), subject


def test_missing_credentials_concern_only_users_of_s3_and_say_what_to_export() -> None:
    code, found = findings()
    assert code == 0
    assert (found["credentials"][0]["health"], found["credentials"][0]["fix"]) == ("ok", "")
    assert "none for s3://" in found["credentials"][0]["text"]
    code, found = findings("s3://bucket/run1")
    assert found["credentials"][0]["health"] == "warn"
    assert "AWS_ACCESS_KEY_ID" in found["credentials"][0]["fix"]


def test_credentials_and_profiles_are_named_without_their_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    profiles = tmp_path / "profiles.toml"
    profiles.write_text('[profiles.lab]\nsecret_access_key = "hushhush"\n')
    monkeypatch.setenv("RESHARD_PROFILES", str(profiles))
    code, found = findings()
    assert code == 0
    text = json.dumps(found)
    assert "profiles of RESHARD_PROFILES: lab" in text
    assert "from env" in text
    assert "hush" not in text
    assert "topsecret" not in text
    profiles.write_text("[profiles")
    code, found = findings()
    assert (code, found["credentials"][0]["code"]) == (2, "request.unknown_profile")


def test_a_setting_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_PROFILE", "x")
    code, found = findings()
    assert (code, found["settings"][0]["health"]) == (0, "warn")
    assert "RESHARD_PROFILES" in found["settings"][0]["fix"]


def test_every_setting_that_is_documented_is_known() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    documented = set(re.findall(r"(?m)^\| `(RESHARD_[A-Z_]+)`", page))
    assert documented
    assert documented - set(SETTINGS) == set()
    read = "".join(
        path.read_text() for folder in ("client", "worker", "service") for path in (ROOT / folder).rglob("*.py")
    )
    assert set(re.findall(r'"(RESHARD_[A-Z][A-Z_]+[A-Z])"', read)) - set(SETTINGS) == set()


def test_a_service_that_does_not_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_URL", "http://127.0.0.1:9")
    code, found = findings()
    assert (code, found["service"][0]["code"]) == (6, "service.unavailable")
    assert found["service"][0]["fix"]
    monkeypatch.setenv("RESHARD_URL", "reshard:8000")
    assert findings()[0] == 2


def test_a_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "disk_room", lambda _: (5, 1 << 40))
    code, found = findings()
    assert (code, found["space"][0]["health"]) == (0, "warn")


def test_places(tmp_path: Path) -> None:
    code, found = findings(str(tmp_path / "later" / "out"))
    assert (code, "not there yet" in found["place"][0]["text"]) == (0, True)
    code, found = findings("foo://x")
    assert (code, found["place"][0]["code"]) == (2, "request.unknown_scheme")


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_DEVICE", "cpu")
    assert "not used" in findings()[1]["gpu"][0]["text"]
