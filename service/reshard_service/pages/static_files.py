"""Style sheets and scripts of the dashboard: a closed list of files, each under an address that has its digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from reshard.errors import RequestError, printable
from reshard.layout_svg import STYLE
from reshard_service.page_paths import STATIC

router = APIRouter(include_in_schema=False)
_OURS = Path(__file__).parent / "static"
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_A_YEAR = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file."""

    content: bytes
    media_type: str
    digest: str


@cache
def _files() -> dict[str, StaticFile]:
    found: dict[str, bytes] = {path.name: path.read_bytes() for path in sorted(_OURS.iterdir())}
    found["layout.css"] = STYLE.encode()
    # Swagger UI as this package carries it; nothing of the package is imported.
    theirs = find_spec("fastapi_offline")
    assert theirs is not None
    assert theirs.origin is not None
    for name in ("swagger-ui-bundle.js", "swagger-ui.css"):
        found[name] = (Path(theirs.origin).parent / "static" / name).read_bytes()
    return {
        name: StaticFile(content, _TYPES[Path(name).suffix], hashlib.sha256(content).hexdigest()[:16])
        for name, content in found.items()
        if Path(name).suffix in _TYPES
    }


def static_url(name: str) -> str:
    """The address of a file. It changes with the file, so that browsers may keep it for good."""
    return f"{STATIC}{name}?v={_files()[name].digest}"


@router.get(STATIC + "{name}")
def static_file(name: str, request: Request) -> Response:
    """Serve one of the files."""
    file = _files().get(name)
    if file is None:
        raise RequestError(
            "request.not_found",
            f"there is no file {printable(name, max_chars=64)!r}",
            fix="load the page again: its files have the names of this release",
        )
    kept = request.query_params.get("v") == file.digest
    headers = {"Cache-Control": _A_YEAR if kept else "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(file.content, media_type=file.media_type, headers=headers)
