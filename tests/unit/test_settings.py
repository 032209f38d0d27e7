"""Settings from the environment: names, defaults and errors are those of the documents."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from reshard.errors import RequestError
from reshard_jobs.settings import EnvironmentSettings, JobSettings
from reshard_service.settings import ServiceSettings
from reshard_worker.settings import WorkerSettings

UNUSUAL = {
    "RESHARD_ROOTS": "/data",
    "RESHARD_WEBHOOK_NETWORKS": "10.0.0.0/8",
    "RESHARD_TRUSTED_PROXIES": "10.0.0.7",
    "RESHARD_OIDC_ISSUER": "https://issuer.example",
    "RESHARD_OIDC_JWKS_URL": "https://issuer.example/keys",
    "RESHARD_WEBHOOK_HTTP": "true",
    "RESHARD_WEBHOOK_KEYS": base64.urlsafe_b64encode(bytes(32)).decode(),
    "RESHARD_VERIFY": "full",
    "RESHARD_WARM_ENGINE": "0",
    "RESHARD_LOG_FORMAT": "json",
    "RESHARD_LEASE_S": "20",
    "RESHARD_ANONYMOUS": "true",
    "RESHARD_ROOT_PATH": "/seven",
}
"""Values of variables that may not be 7."""
ALL = (JobSettings, WorkerSettings, ServiceSettings)
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


def _documented() -> dict[str, str]:
    rows = re.findall(r"^\| `(RESHARD_\w+)` \|([^|]*)\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: default.strip().strip("`") for name, default in rows}


@pytest.mark.parametrize("kind", ALL)
def test_every_variable_is_documented_with_its_default(kind: type[EnvironmentSettings]) -> None:
    documented = _documented()
    for field in kind.model_fields.values():
        if field.validation_alias is None:
            continue
        default = documented[str(field.validation_alias)]
        if field.validation_alias == "RESHARD_VERIFY":
            assert default == str(field.default)
        elif isinstance(field.default, float):
            assert float(default) == field.default


@pytest.mark.parametrize("kind", ALL)
def test_only_from_env_reads_the_environment(
    kind: type[JobSettings | WorkerSettings | ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for field in kind.model_fields.values():
        monkeypatch.setenv(str(field.validation_alias), "7")
    for name in ("cancel_poll_s", "CANCEL_POLL_S", "RESHARD_CANCEL_POLL_S", "probes", "RESHARD_JOBS", "jobs"):
        monkeypatch.setenv(name, "7")
    for name, text in UNUSUAL.items():
        monkeypatch.setenv(name, text)
    built, read = kind(), kind.from_env()
    for name, field in kind.model_fields.items():
        assert getattr(built, name) == field.default
        if name not in {"jobs", "probes"}:
            assert (getattr(read, name) == field.default) == (field.validation_alias is None), name


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        *((name, text, f"set {name} to a number of seconds above 0 and below 1e9")
          for name in ("RESHARD_LEASE_S", "RESHARD_RETRY_DELAY_S", "RESHARD_SHUTDOWN_GRACE_S")
          for text in ("x", "0", "-1", "1e12", "inf", "nan")),
        ("RESHARD_VERIFY", "some", "set RESHARD_VERIFY to default or full"),
    ],
)  # fmt: skip
def test_what_a_variable_may_not_be(name: str, text: str, fix: str) -> None:
    with pytest.raises(RequestError) as caught:
        WorkerSettings.from_env({name: text})
    assert caught.value.code == "request.invalid"
    assert caught.value.message == f"{name} is {text!r}"
    assert caught.value.fix == fix


def test_an_empty_variable_is_none() -> None:
    assert WorkerSettings.from_env({"RESHARD_LEASE_S": "", "RESHARD_VERIFY": ""}) == WorkerSettings()


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(ServiceSettings.from_env({"RESHARD_TOKEN": "secret"}))
