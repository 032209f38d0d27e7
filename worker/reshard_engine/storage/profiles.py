"""Storage profiles: named credentials and endpoints that the operator configures; jobs carry only names.

`RESHARD_PROFILES` names a TOML file::

    [profiles.cluster-a]
    endpoint_url = "http://127.0.0.1:8333"
    access_key_id = "..."
    secret_access_key = "..."
    region = "us-east-1"

Without a profile the usual AWS environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...) is used.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field

from reshard.errors import RequestError, printable

PROFILES_VARIABLE = "RESHARD_PROFILES"


@dataclass(frozen=True, slots=True)
class S3Profile:
    """How to reach one S3 service. The secret never appears in `repr`."""

    endpoint_url: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str | None = None


def profile_named(name: str | None) -> S3Profile:
    """The profile, or the one that the environment describes for None.

    Raises:
        RequestError: `request.unknown_profile` if the operator has configured no such name.
    """
    if name is None:
        # The endpoint is read here because s3fs of some versions does not read the variable itself.
        return S3Profile(endpoint_url=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
    path = os.environ.get(PROFILES_VARIABLE)
    table: dict[str, dict[str, str]] = {}
    if path:
        with open(path, "rb") as file:
            table = tomllib.load(file).get("profiles", {})
    if name not in table:
        raise RequestError(
            "request.unknown_profile",
            f"no storage profile is called {printable(name)!r}; configured: {', '.join(sorted(table)) or 'none'}",
            fix=f"add it to the TOML file that {PROFILES_VARIABLE} names, or leave the profile out",
        )
    entry = table[name]
    allowed = {"endpoint_url", "access_key_id", "secret_access_key", "session_token", "region"}
    if unknown := sorted(set(entry) - allowed):
        raise RequestError("request.invalid", f"storage profile {printable(name)!r} has unknown keys {unknown}")
    return S3Profile(**entry)
