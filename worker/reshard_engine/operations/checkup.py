"""The engine's part of `reshard doctor`: libraries, storage profiles, credentials, places and the GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from importlib.metadata import PackageNotFoundError, version

from reshard.doctor import LEAST_FREE_BYTES, Finding, Health
from reshard.errors import PROFILES_VARIABLE, ReshardError, counted, format_size, printable
from reshard.extras import install_line
from reshard_engine.execute.casts.placing import DEVICE_VARIABLE, default_kernel
from reshard_engine.execute.sinks.free_space import room_at
from reshard_engine.storage.locations import WRITABLE, open_location, service_store
from reshard_engine.storage.profiles import profile_named, profile_names
from reshard_engine.storage.protocol import ServiceStore
from reshard_engine.storage.urls import is_local, scheme_of

_GPU = "/dev/nvidiactl"
_USUAL = "s3"


def checkup(places: Sequence[str], profile: str | None) -> Iterator[Finding]:
    """Yield what each check finds. Nothing is written."""
    yield _libraries()
    yield _gpu()
    yield from _credentials({scheme_of(place) for place in places if not is_local(place)})
    for place in places:
        yield _place(place, profile)


def _libraries() -> Finding:
    found = [f"{name} {known}" for name in ("numpy", "torch", "deepspeed") if (known := _version(name))]
    return Finding("engine", Health.OK, f"reshard {_version('reshard')}, {', '.join(found)}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _gpu() -> Finding:
    wanted = os.environ.get(DEVICE_VARIABLE, "auto")
    try:
        default_kernel()
    except ReshardError as error:
        return Finding.of_error("gpu", error)
    if wanted == "cpu":
        return Finding("gpu", Health.OK, f"not used: {DEVICE_VARIABLE} is cpu")
    if not os.path.exists(_GPU):
        return Finding("gpu", Health.OK, "none: casts run on the processor")
    from reshard_engine.execute.casts.device import device_facts  # numpy's casts need none of it

    try:
        facts = device_facts()
    except ModuleNotFoundError:
        text = "there is one, but torch is not installed: casts run on the processor"
        return Finding("gpu", Health.WARN, text, install_line("worker"))
    if facts is None:
        text = f"there is one, but torch {_version('torch')} cannot use it: casts run on the processor"
        return Finding("gpu", Health.WARN, text, "install a torch that fits the driver: nvidia-smi shows its CUDA")
    name, free_bytes, total_bytes = facts
    return Finding("gpu", Health.OK, f"{name}, {format_size(free_bytes)} of {format_size(total_bytes)} free")


def _credentials(schemes: Set[str]) -> Iterator[Finding]:
    """Check the profiles, and the credentials for these schemes; S3 is always told about, for most have it."""
    kinds: dict[str, type[ServiceStore]] = {}
    for scheme in WRITABLE:
        try:
            kinds[scheme] = service_store(scheme)
        except ReshardError as error:
            if scheme in schemes or scheme == _USUAL:
                yield Finding("credentials", Health.WARN, error.message, error.fix)
    try:
        names = profile_names()
        for name in names:
            profile_named(name, *(kind.profiles for kind in kinds.values()))
    except ReshardError as error:
        yield Finding.of_error("credentials", error)
        return
    if names:
        yield Finding("credentials", Health.OK, f"profiles of {PROFILES_VARIABLE}: {', '.join(map(printable, names))}")
    for scheme, kind in kinds.items():
        if scheme in schemes or scheme == _USUAL:
            yield from _credentials_for(kind, needed=scheme in schemes and not names, told=not names)


def _credentials_for(kind: type[ServiceStore], *, needed: bool, told: bool) -> Iterator[Finding]:
    try:
        found = kind.credentials()
    except ReshardError as error:
        yield Finding("credentials", Health.FAIL, error.message, error.fix, error.code)
        return
    shown = f"{kind.scheme}://"
    if found is not None:
        yield Finding("credentials", Health.OK, found)
    elif needed:
        yield Finding("credentials", Health.WARN, f"none for {shown}: its URLs will be refused", kind.credentials_fix)
    elif told:
        yield Finding("credentials", Health.OK, f"none for {shown} (only for its URLs)")


def _place(url: str, profile: str | None) -> Finding:
    subject = "place"
    try:
        location = open_location(url, profile)
        if not is_local(url):
            listing = location.store.list_directory(location.path)
            count = len(listing.files) + len(listing.directories)
            return Finding(
                subject, Health.OK, f"{printable(location.url)} can be listed: {counted(count, 'entry', 'entries')}"
            )
    except ReshardError as error:
        return Finding.of_error(subject, error)
    return _directory(location.path)


def _directory(path: str) -> Finding:
    shown = printable(path)
    existing = path
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    missing = "" if existing == path else f"; it is not there yet, below {printable(existing)}"
    if not os.access(existing, os.W_OK | os.X_OK):
        fix = "choose another directory as a target, or ask for the right to write there"
        return Finding("place", Health.WARN, f"{shown} can be read and not written{missing}", fix)
    room = room_at(existing)
    free = "an unknown number of bytes" if room is None else format_size(room.free_bytes)
    text = f"{shown} can be written, {free} free{missing}"
    if room is not None and room.free_bytes < LEAST_FREE_BYTES:
        return Finding("place", Health.WARN, text, "free space there; `reshard plan` says what a target needs")
    return Finding("place", Health.OK, text)
