"""Every operation of the API needs a scope and says so in the schema; only the probes of load balancers need none."""

from __future__ import annotations

from typing import Any

import pytest

from reshard.choices import TokenScope
from reshard_jobs.settings import JobSettings
from reshard_service.app import create_app
from reshard_service.settings import ServiceSettings

# FastAPI puts its alias of a body beside the model, for which pydantic warns; the application is built without it.
OPEN = {"/healthz", "/readyz"}


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    directory = tmp_path_factory.mktemp("schema")
    settings = ServiceSettings(token="t", jobs=JobSettings(database_url=f"sqlite:///{directory}/jobs.db"))
    paths = create_app(settings).openapi()["paths"]
    return {(path, verb): operation for path, verbs in paths.items() for verb, operation in verbs.items()}


def test_every_operation_needs_one_scope(operations: dict[tuple[str, str], Any]) -> None:
    assert len(operations) > 15
    for (path, verb), operation in operations.items():
        if path in OPEN:
            assert "security" not in operation
            continue
        scopes = [scope for entry in operation["security"] for found in entry.values() for scope in found]
        assert len(scopes) == 1, (path, verb, scopes)
        assert scopes[0] in set(TokenScope)
        assert "403" in operation["responses"], (path, verb)


def test_reading_and_changing_need_different_scopes(operations: dict[tuple[str, str], Any]) -> None:
    for (path, verb), operation in operations.items():
        if path in OPEN:
            continue
        (scope,) = operation["security"][0]["HTTPBearer"]
        admin = path.startswith(("/v1/tokens", "/v1/tenants", "/v1/audit"))
        admin = admin or (path.startswith("/v1/webhooks") and verb != "get")
        assert (scope == "admin") == admin, (path, verb)
        assert (scope == "read") == (verb == "get" and not admin), (path, verb)
        assert (scope == "cancel") == path.endswith("/cancel")
