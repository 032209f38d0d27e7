"""Virtual layouts in the job database: their requests, the digests of what was planned, their files, their expiry.

The record has what any process of the API needs to plan the layout again, and to prove that the plan is the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel
from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from reshard.errors import RequestError, printable
from reshard.models.jobs import ConvertRequest, FileEntry, Layout, LayoutSummary, NotCarried
from reshard_jobs.database import Database
from reshard_jobs.limits import TenantLimits, limits_of
from reshard_jobs.records import time_of
from reshard_jobs.tables import DEFAULT_TENANT, LayoutFileRow, LayoutRow, TenantRow, db_now
from reshard_jobs.tenants.principals import Principal, record
from reshard_jobs.tenants.tenants import refuse_bytes_above_quota
from reshard_jobs.webhooks import new_id

MOST_LAYOUTS = 100
"""Number of layouts that a tenant may have open: each holds its list of files in the job database."""
_RENEWED_PART = 0.9
"""A use writes the new time only when less than this part of the whole is left: most uses write nothing."""


class _Facts(BaseModel):
    """The facts of a plan that are stored as JSON, beside its digests and files."""

    source_format: str
    tag: str | None
    compared: int | None
    warnings: tuple[str, ...]
    not_carried: tuple[NotCarried, ...]


class PlannedLayout(_Facts):
    """The answer of an engine process that has opened a layout."""

    content_digest: str
    source_digest: str
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class UsedLayout:
    """A layout for one use: what an engine process must plan again, and the digests that its plan must have."""

    id: str
    tenant: str
    request: ConvertRequest
    limits: TenantLimits
    """The tenant's, as they are now."""
    max_running: int | None
    """The most engine processes of the tenant at once."""
    content_digest: str = ""
    source_digest: str = ""
    """Empty before it is planned for the first time."""
    size_bytes: int = 0
    """Size of the file that is used; 0 before there is one."""


class Layouts:
    """The virtual layouts of one tenant.

    Args:
        database: The job database.
        tenant: The tenant. No method reads or changes anything of another one.
        keep_s: Seconds after its last use at which a layout expires.
        by: The caller, for the audit log.
    """

    def __init__(
        self, database: Database, tenant: str = DEFAULT_TENANT, *, keep_s: float, by: Principal | None = None
    ) -> None:
        self._database = database
        self._tenant = tenant
        self._keep_s = keep_s
        self._by = by

    def begin(self, request: ConvertRequest) -> UsedLayout:
        """A layout that is not planned yet, with a new id and without digests. Nothing is recorded.

        Raises:
            RequestError: `request.above_maximum`: the tenant has too many.
        """
        with self._database.read() as session:
            open_ones = select(LayoutRow.id).where(*self._open()).limit(MOST_LAYOUTS)
            if len(session.scalars(open_ones).all()) >= MOST_LAYOUTS:
                raise RequestError(
                    "request.above_maximum",
                    f"there are {MOST_LAYOUTS} layouts already",
                    fix="remove one first: DELETE /v1/layouts/ID; or wait until some expire",
                )
            return self._used(session, new_id("lay"), request)

    def create(self, layout: UsedLayout, planned: PlannedLayout) -> Layout:
        """Record a layout that an engine process has planned.

        Raises:
            RequestError: `request.quota_bytes`.
        """
        total_bytes = sum(f.size_bytes for f in planned.files)
        with self._database.write() as session:
            refuse_bytes_above_quota(session, self._tenant, total_bytes)
            new = insert(LayoutRow).values(
                id=layout.id,
                tenant=self._tenant,
                request=layout.request.model_dump_json(),
                content_digest=planned.content_digest,
                source_digest=planned.source_digest,
                files=len(planned.files),
                total_bytes=total_bytes,
                facts=planned.model_dump_json(include=set(_Facts.model_fields)),
                created_at=db_now(),
                expires_at=db_now() + self._keep_s,
            )
            row = session.scalars(new.returning(LayoutRow)).one()
            rows = [
                {"layout_id": row.id, "key": _key(f.path), "number": n, "path": f.path, "size_bytes": f.size_bytes}
                for n, f in enumerate(planned.files)
            ]
            if rows:
                session.execute(insert(LayoutFileRow), rows)
            record(session, self._by, "layout.create", row.id)
            return _whole(row, planned.files)

    def get(self, layout_id: str) -> Layout:
        """Get a layout with its files.

        Raises:
            RequestError: `request.not_found`; `request.gone` if it has expired.
        """
        with self._database.read() as session:
            row, _ = self._require(session, layout_id)
            return _whole(row, _files(session, layout_id))

    def files(self, layout_id: str) -> tuple[FileEntry, ...]:
        """The files of a layout, in the order of the plan. Raises the errors of `get`."""
        with self._database.read() as session:
            self._require(session, layout_id)
            return _files(session, layout_id)

    def list(self) -> tuple[LayoutSummary, ...]:
        """The layouts that have not expired, the newest first."""
        query = select(LayoutRow).where(*self._open()).order_by(LayoutRow.created_at.desc(), LayoutRow.id)
        with self._database.read() as session:
            return tuple(LayoutSummary.model_validate(_summary(row)) for row in session.scalars(query))

    def remove(self, layout_id: str) -> None:
        """End a layout. Raises the errors of `get`."""
        with self._database.write() as session:
            self._require(session, layout_id)
            session.execute(update(LayoutRow).where(LayoutRow.id == layout_id).values(expires_at=db_now()))
            record(session, self._by, "layout.remove", layout_id)

    def known(self, layout_id: str) -> UsedLayout:
        """The request of a layout and the limits of its tenant, as they are now. Raises the errors of `get`."""
        with self._database.read() as session:
            row, _ = self._require(session, layout_id)
            return self._used(session, row.id, ConvertRequest.model_validate_json(row.request))

    def use(self, layout_id: str, path: str) -> UsedLayout:
        """Find a file of a layout, whose expiry moves.

        Raises:
            RequestError: `request.not_found`: there is no such layout or file; `request.gone`.
        """
        with self._database.read() as session:
            row, left_s = self._require(session, layout_id)
            key = (LayoutFileRow.layout_id == layout_id, LayoutFileRow.key == _key(path))
            size_bytes = session.scalars(select(LayoutFileRow.size_bytes).where(*key)).one_or_none()
            if size_bytes is None:
                raise RequestError(
                    "request.not_found",
                    f"the layout has no file {printable(path)!r}",
                    fix=f"GET /v1/layouts/{row.id}/files",
                )
            found = self._used(session, row.id, ConvertRequest.model_validate_json(row.request))
            digests = {"content_digest": row.content_digest, "source_digest": row.source_digest}
            found = replace(found, size_bytes=size_bytes, **digests)
        self._move_expiry(layout_id, left_s)
        return found

    def renew(self, layout_id: str) -> bool:
        """Move the expiry of a layout that is in use; false if it is gone."""
        with self._database.read() as session:
            left_s = session.scalars(
                select(LayoutRow.expires_at - db_now()).where(LayoutRow.id == layout_id, *self._open())
            ).one_or_none()
        if left_s is None:
            return False
        self._move_expiry(layout_id, left_s)
        return True

    def _move_expiry(self, layout_id: str, left_s: float) -> None:
        """Move the expiry of a layout that has so many seconds left, unless it was moved a short while ago."""
        if left_s < _RENEWED_PART * self._keep_s:
            with self._database.write() as session:
                # One that ends meanwhile stays ended.
                statement = update(LayoutRow).where(LayoutRow.id == layout_id, *self._open())
                session.execute(statement.values(expires_at=db_now() + self._keep_s))

    def _open(self) -> tuple[Any, ...]:
        return (LayoutRow.tenant == self._tenant, LayoutRow.expires_at > db_now())

    def _require(self, session: Session, layout_id: str) -> tuple[LayoutRow, float]:
        """The row of a layout that is open, and the seconds until it expires."""
        query = select(LayoutRow, LayoutRow.expires_at - db_now())
        found = session.execute(query.where(LayoutRow.id == layout_id, LayoutRow.tenant == self._tenant)).one_or_none()
        if found is None:
            raise RequestError(
                "request.not_found",
                f"there is no layout {printable(layout_id, max_chars=64)!r}",
                fix="GET /v1/layouts lists them; POST /v1/layouts makes one",
            )
        row, left_s = found
        if left_s <= 0:
            raise RequestError(
                "request.gone",
                f"the layout {layout_id!r} has expired, or was removed",
                fix="make it again: POST /v1/layouts; its files have the same ETags if the source has not changed",
            )
        return row, left_s

    def _used(self, session: Session, layout_id: str, request: ConvertRequest) -> UsedLayout:
        limits = limits_of(session, self._tenant)
        max_running = session.scalars(select(TenantRow.max_running).where(TenantRow.name == self._tenant)).one_or_none()
        return UsedLayout(layout_id, self._tenant, request, limits, max_running)


def _key(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()


def _files(session: Session, layout_id: str) -> tuple[FileEntry, ...]:
    query = select(LayoutFileRow.path, LayoutFileRow.size_bytes).where(LayoutFileRow.layout_id == layout_id)
    rows = session.execute(query.order_by(LayoutFileRow.number))
    return tuple(FileEntry(path=path, size_bytes=size_bytes) for path, size_bytes in rows)


def _summary(row: LayoutRow) -> dict[str, Any]:
    request, facts = ConvertRequest.model_validate_json(row.request), _Facts.model_validate_json(row.facts)
    place = f"/v1/layouts/{row.id}"
    return {
        "id": row.id,
        "to": request.to,
        "source_url": request.source.url,
        "source_format": facts.source_format,
        "tag": facts.tag,
        "files_count": row.files,
        "total_bytes": row.total_bytes,
        "created_at": time_of(row.created_at),
        "expires_at": time_of(row.expires_at),
        "links": {"self": place, "files": f"{place}/files"},
    }


def _whole(row: LayoutRow, files: tuple[FileEntry, ...]) -> Layout:
    facts = _Facts.model_validate_json(row.facts)
    more = facts.model_dump(include={"compared", "warnings", "not_carried"})
    return Layout.model_validate({**_summary(row), "digest": row.content_digest, "files": files, **more})
