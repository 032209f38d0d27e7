"""The version that plans and manifests carry."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("reshard")
    except PackageNotFoundError:
        return "unknown"


TOOL_VERSION = f"reshard {_installed()}"
