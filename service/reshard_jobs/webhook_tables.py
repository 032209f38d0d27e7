"""Tables of webhooks: the endpoints, and the outbox of what is to be sent to them."""

from __future__ import annotations

from sqlalchemy import Float, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from reshard_jobs.tables import MAX_ID_CHARS, Base


class WebhookRow(Base):
    """One endpoint."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), default="default", server_default="default")
    url: Mapped[str] = mapped_column(Text)
    # Separated by blanks.
    events: Mapped[str] = mapped_column(String(200))
    description: Mapped[str] = mapped_column(String(200), default="")
    # As `reshard_service.webhook_secrets` seals them.
    secret: Mapped[str] = mapped_column(Text)
    # Those before the last rotations, separated by blanks.
    previous_secret: Mapped[str | None] = mapped_column(Text, default=None)
    previous_until: Mapped[float | None] = mapped_column(Float(53), default=None)
    created_at: Mapped[float] = mapped_column(Float(53))
    disabled_at: Mapped[float | None] = mapped_column(Float(53), default=None)

    __table_args__ = (Index("webhooks_of_tenant", "tenant", "created_at"),)


class DeliveryRow(Base):
    """One event for one endpoint, written with the change of the job that it tells.

    It has no foreign keys: an endpoint or a job that goes away at that moment must not undo the change.
    """

    __tablename__ = "webhook_deliveries"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    webhook_id: Mapped[str] = mapped_column(String(40))
    job_id: Mapped[str] = mapped_column(String(MAX_ID_CHARS))
    event: Mapped[str] = mapped_column(String(32))
    # The bytes that are signed and sent.
    payload: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    tries: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[float] = mapped_column(Float(53))
    next_at: Mapped[float] = mapped_column(Float(53))
    # The process that sends it now, and until when nobody else does.
    owner: Mapped[str | None] = mapped_column(String(64), default=None)
    lease_until: Mapped[float | None] = mapped_column(Float(53), default=None)
    ended_at: Mapped[float | None] = mapped_column(Float(53), default=None)
    last_status: Mapped[int | None] = mapped_column(Integer, default=None)
    last_error: Mapped[str | None] = mapped_column(Text, default=None)

    __table_args__ = (
        Index("webhook_deliveries_due", "state", "next_at"),
        Index("webhook_deliveries_of_webhook", "webhook_id", "created_at"),
        Index("webhook_deliveries_sent_now", "webhook_id", "lease_until"),
    )
