"""Storage profiles: credentials and endpoints that the operator configures under a name. Jobs carry only the name.

`RESHARD_PROFILES` names a TOML file::

    [profiles.cluster-a]
    endpoint_url = "http://127.0.0.1:8333"
    access_key_id = "..."
    secret_access_key = "..."
    region = "us-east-1"

Each kind of store says which keys its profiles have, and which environment counts without a profile.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from reshard.errors import PROFILES_VARIABLE, RequestError, printable

_PROFILES = TypeAdapter(dict[str, dict[str, str]])
_Profile = TypeVar("_Profile")


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


def profile_named(name: str, *kinds: type[_Profile]) -> _Profile:
    """The profile of this name.

    Args:
        name: The name.
        kinds: Dataclasses whose fields are the keys that a profile may have; the first one that fits is made.

    Raises:
        RequestError: `request.unknown_profile` if the operator has not configured this name, `request.invalid` if no
            kind has all of its keys.
    """
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
    for kind in kinds:
        if set(entry) <= _keys(kind):
            return kind(**entry)
    allowed = _keys(kinds[0])
    raise RequestError(
        "request.invalid",
        f"storage profile {printable(name)!r} has unknown keys {sorted(set(entry) - allowed)}",
        fix=f"remove them from the file that {PROFILES_VARIABLE} names; known are {', '.join(sorted(allowed))}",
    )


def _keys(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}
