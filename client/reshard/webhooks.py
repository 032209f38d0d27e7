"""The webhooks of a service, as `Client.webhooks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from reshard._exchange import Exchange, Run
from reshard._wire import Call
from reshard.validation import invalid
from reshard.webhook_models import (
    ENDINGS,
    Delivery,
    DeliveryList,
    DeliveryState,
    Redelivered,
    RedeliverRequest,
    RotateRequest,
    Webhook,
    WebhookList,
    WebhookRequest,
)

_PATH = "/v1/webhooks"


class Webhooks:
    """Endpoints that the service calls when jobs end.

    Args:
        run: Takes the steps of an exchange.
        exchange: The exchanges with the service.
    """

    def __init__(self, run: Run, exchange: Exchange) -> None:
        self._run, self._exchange = run, exchange

    def create(self, url: str, *, events: Sequence[str] = ENDINGS, description: str = "") -> Webhook:
        """Add an endpoint. Its `secret` is in the answer, and is not shown again.

        Args:
            url: The endpoint.
            events: The kinds of events that it gets; by default the ends of jobs.
            description: A text for people.

        Returns:
            The endpoint with its secret.

        Raises:
            RequestError: `request.address_forbidden`, `request.invalid`, `request.above_maximum`.
        """
        try:
            body = WebhookRequest.model_validate({"url": url, "events": events, "description": description})
        except ValidationError as error:
            raise invalid(error) from None
        # A lost answer has a secret that nobody knows: the caller sees it, and removes the endpoint.
        return self._run(self._exchange.ask(Call("POST", _PATH, body=_dump(body), once=True), Webhook))

    def list(self) -> tuple[Webhook, ...]:
        """List the endpoints, the oldest first.

        Returns:
            The endpoints, without their secrets.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._run(self._exchange.pick(Call("GET", _PATH), WebhookList, lambda found: found.webhooks))

    def get(self, webhook_id: str) -> Webhook:
        """Get an endpoint.

        Args:
            webhook_id: The endpoint's id.

        Returns:
            The endpoint, without its secret.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._run(self._exchange.ask(Call("GET", _path(webhook_id)), Webhook))

    def remove(self, webhook_id: str) -> None:
        """Remove an endpoint and its deliveries.

        Args:
            webhook_id: The endpoint's id.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        self._run(self._exchange.tell(Call("DELETE", _path(webhook_id))))

    def rotate(self, webhook_id: str, *, keep_s: float = 86_400.0) -> Webhook:
        """Make a new secret; for `keep_s` seconds calls are signed with the one before, too.

        Args:
            webhook_id: The endpoint's id.
            keep_s: Seconds for which the secret before stays valid.

        Returns:
            The endpoint with its new secret.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        body = RotateRequest(keep_s=keep_s)
        return self._run(
            self._exchange.ask(Call("POST", f"{_path(webhook_id)}/rotate", body=_dump(body), once=True), Webhook)
        )

    def enable(self, webhook_id: str) -> Webhook:
        """Send to an endpoint again that has answered 410.

        Args:
            webhook_id: The endpoint's id.

        Returns:
            The endpoint.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._run(self._exchange.ask(Call("POST", f"{_path(webhook_id)}/enable"), Webhook))

    def deliveries(
        self, webhook_id: str, *, state: DeliveryState | None = None, limit: int = 50
    ) -> tuple[Delivery, ...]:
        """List the deliveries of an endpoint, the newest first.

        Args:
            webhook_id: The endpoint's id.
            state: Only deliveries in this state.
            limit: Most deliveries to list.

        Returns:
            The deliveries.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        params = [("limit", str(limit)), *([("state", state.value)] if state is not None else [])]
        call = Call("GET", f"{_path(webhook_id)}/deliveries", tuple(params))
        return self._run(self._exchange.pick(call, DeliveryList, lambda found: found.deliveries))

    def redeliver(self, webhook_id: str, delivery_id: str | None = None) -> int:
        """Send a delivery again, or all dead ones.

        Args:
            webhook_id: The endpoint's id.
            delivery_id: The delivery; None for all that are dead.

        Returns:
            The number of deliveries that are sent again.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        body = RedeliverRequest(delivery=delivery_id)
        call = Call("POST", f"{_path(webhook_id)}/redeliver", body=_dump(body))
        return self._run(self._exchange.pick(call, Redelivered, lambda found: found.count))


def _path(webhook_id: str) -> str:
    return f"{_PATH}/{quote(webhook_id, safe='')}"


def _dump(body: BaseModel) -> Any:
    return body.model_dump(mode="json")
