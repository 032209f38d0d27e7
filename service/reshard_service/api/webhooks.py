"""Routes of webhooks: endpoints, their secrets and their deliveries."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from reshard.models.access import (
    DeliveryList,
    DeliveryState,
    Redelivered,
    RedeliverRequest,
    RotateRequest,
    Webhook,
    WebhookList,
    WebhookRequest,
)
from reshard_jobs.webhooks import Deliveries, Webhooks
from reshard_service.api.context import Administrator, Context, Reader
from reshard_service.api.problems import problems
from reshard_service.webhooks.address import accepted_url
from reshard_service.webhooks.secrets import new_secret

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])


@router.post("", status_code=201, response_model=Webhook, responses=problems(403), summary="Create a webhook")
def create(body: WebhookRequest, context: Context, caller: Administrator) -> Webhook:
    """Add an endpoint. The answer has the secret of its signatures, which is not shown again."""
    settings = context.settings
    url = accepted_url(body.url, http=settings.webhook_http, allowed=settings.webhook_networks)
    secret = new_secret()
    sealed = context.sealer.seal(secret)
    events = tuple(dict.fromkeys(body.events))
    made = Webhooks(context.database, caller.tenant).create(
        url, events=events, description=body.description, secret=sealed
    )
    return made.model_copy(update={"secret": secret})


@router.get("", response_model=WebhookList)
def list_webhooks(context: Context, caller: Reader) -> WebhookList:
    """List the endpoints, the oldest first."""
    return WebhookList(webhooks=tuple(Webhooks(context.database, caller.tenant).list()))


@router.get("/{webhook_id}", response_model=Webhook, responses=problems(404), summary="Get a webhook")
def get(webhook_id: str, context: Context, caller: Reader) -> Webhook:
    """Get an endpoint."""
    return Webhooks(context.database, caller.tenant).get(webhook_id)


@router.delete("/{webhook_id}", status_code=204, responses=problems(404), summary="Remove a webhook")
def remove(webhook_id: str, context: Context, caller: Administrator) -> Response:
    """Remove an endpoint and its deliveries."""
    Webhooks(context.database, caller.tenant).remove(webhook_id)
    return Response(status_code=204)


@router.post(
    "/{webhook_id}/rotate", response_model=Webhook, responses=problems(404), summary="Rotate a webhook's secret"
)
def rotate(webhook_id: str, body: RotateRequest, context: Context, caller: Administrator) -> Webhook:
    """Make a new secret. For `keep_s` seconds each call is signed with the one before, too."""
    secret = new_secret()
    sealed = context.sealer.seal(secret)
    found = Webhooks(context.database, caller.tenant).rotate(webhook_id, sealed, keep_s=body.keep_s)
    return found.model_copy(update={"secret": secret})


@router.post("/{webhook_id}/enable", response_model=Webhook, responses=problems(404), summary="Enable a webhook")
def enable(webhook_id: str, context: Context, caller: Administrator) -> Webhook:
    """Send to an endpoint again that has answered 410."""
    return Webhooks(context.database, caller.tenant).enable(webhook_id)


@router.get(
    "/{webhook_id}/deliveries",
    response_model=DeliveryList,
    responses=problems(404),
    summary="List a webhook's deliveries",
)
def deliveries(
    webhook_id: str,
    context: Context,
    caller: Reader,
    state: DeliveryState | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> DeliveryList:
    """List the deliveries of an endpoint, the newest first."""
    Webhooks(context.database, caller.tenant).get(webhook_id)
    found = Deliveries(context.database).list(webhook_id, state=state, limit=limit)
    return DeliveryList(deliveries=tuple(found))


@router.post(
    "/{webhook_id}/redeliver", response_model=Redelivered, responses=problems(404), summary="Send deliveries again"
)
def redeliver(webhook_id: str, body: RedeliverRequest, context: Context, caller: Administrator) -> Redelivered:
    """Send a delivery again, or all that are dead."""
    Webhooks(context.database, caller.tenant).get(webhook_id)
    return Redelivered(count=Deliveries(context.database).redeliver(webhook_id, body.delivery))
