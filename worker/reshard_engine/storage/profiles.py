"""Storage profiles: credentials and endpoints that the operator configures under a name. Jobs carry only the name.

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

from pydantic import TypeAdapter, ValidationError

from reshard.errors import RequestError, printable

PROFILES_VARIABLE = "RESHARD_PROFILES"
_PROFILES = TypeAdapter(dict[str, dict[str, str]])


@dataclass(frozen=True, slots=True)
class S3Profile:
    """The endpoint and credentials of one S3 service. The secrets never appear in `repr`."""

    endpoint_url: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str | None = None


def _read_profiles(path: str) -> dict[str, dict[str, str]]:
    fix = f"correct the file that {PROFILES_VARIABLE} names, or unset the variable"
    try:
        with open(path, "rb") as file:
            found: object = tomllib.load(file).get("profiles", {})
    except OSError as error:
        raise RequestError("request.unknown_profile", f"{printable(path)}: {error.strerror}", fix=fix) from None
    except tomllib.TOMLDecodeError as error:
        raise RequestError("request.unknown_profile", f"{printable(path)}: {printable(str(error))}", fix=fix) from None
    try:
        return _PROFILES.validate_python(found)
    except ValidationError:
        raise RequestError(
            "request.unknown_profile", f"{printable(path)}: profiles must be tables of strings", fix=fix
        ) from None


def profile_names() -> tuple[str, ...]:
    """The names of all profiles that the operator has configured.

    Raises:
        RequestError: `request.unknown_profile` if the file cannot be read.
    """
    path = os.environ.get(PROFILES_VARIABLE)
    return tuple(_read_profiles(path)) if path else ()


def profile_named(name: str | None) -> S3Profile:
    """The profile of this name; for None, the profile that the environment variables describe.

    Raises:
        RequestError: `request.unknown_profile` if the operator has not configured this name.
    """
    if name is None:
        # The endpoint is needed to tell if two locations are in one service (`S3Store.reaches`).
        return S3Profile(endpoint_url=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
    path = os.environ.get(PROFILES_VARIABLE)
    table: dict[str, dict[str, str]] = {}
    if path:
        table = _read_profiles(path)
    if name not in table:
        raise RequestError(
            "request.unknown_profile",
            f"no storage profile is called {printable(name)!r}",
            fix=f"add it to the TOML file that {PROFILES_VARIABLE} names, or leave the profile out",
        )
    entry = table[name]
    allowed = {"endpoint_url", "access_key_id", "secret_access_key", "session_token", "region"}
    if unknown := sorted(set(entry) - allowed):
        raise RequestError(
            "request.invalid",
            f"storage profile {printable(name)!r} has unknown keys {unknown}",
            fix=f"remove them from the file that {PROFILES_VARIABLE} names; known are {', '.join(sorted(allowed))}",
        )
    return S3Profile(**entry)
