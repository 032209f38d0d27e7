"""The calls of a service beside those of jobs: tokens, tenants, the audit log, webhooks and virtual layouts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Unpack
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from reshard.api.exchange import Calls
from reshard.api.wire import Call, request_fields
from reshard.choices import TargetFormat, TokenScope
from reshard.models.access import (
    DEFAULT_TOKEN_S,
    ENDINGS,
    AuditPage,
    CreatedToken,
    Delivery,
    DeliveryList,
    DeliveryState,
    NewTenant,
    NewToken,
    Redelivered,
    RedeliverRequest,
    RotateRequest,
    Tenant,
    TenantList,
    TenantSettings,
    Token,
    TokenList,
    Webhook,
    WebhookList,
    WebhookRequest,
)
from reshard.models.jobs import Layout, LayoutList, LayoutRequest, LayoutSummary
from reshard.models.keywords import ConvertOptions
from reshard.options import SourceSpec
from reshard.wire_model import invalid


class AdminClient(Calls):
    """The calls of administrators; `Client.admin` makes it. They need a token with the scope `admin`."""

    def create_token(
        self,
        name: str,
        scopes: Collection[TokenScope | str],
        *,
        tenant: str | None = None,
        expires_in_s: int | None = DEFAULT_TOKEN_S,
    ) -> CreatedToken:
        """Make a token. The service shows its secret only now.

        Args:
            name: A name for people.
            scopes: The rights of the token.
            tenant: The tenant; None for that of the caller. Only the operator may name another one.
            expires_in_s: Seconds until it expires; None for never.

        Returns:
            The token with its secret.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        try:
            asked = NewToken(
                name=name, scopes=tuple(TokenScope(s) for s in scopes), tenant=tenant, expires_in_s=expires_in_s
            )
        except ValidationError as error:
            raise invalid(error) from None
        return self._ask(Call("POST", "/v1/tokens", body=asked.model_dump(mode="json")), CreatedToken)

    def tokens(self, tenant: str | None = None) -> tuple[Token, ...]:
        """The tokens of a tenant, newest first, also those that have expired or were revoked.

        Args:
            tenant: The tenant; None for that of the caller.

        Returns:
            The tokens, without their secrets.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._pick(Call("GET", "/v1/tokens", _of(tenant)), TokenList, lambda found: found.tokens)

    def revoke_token(self, token_id: str) -> Token:
        """Revoke a token; to revoke it twice is harmless.

        Args:
            token_id: The token's id.

        Returns:
            The token as it is now.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._ask(Call("DELETE", f"/v1/tokens/{quote(token_id, safe='')}"), Token)

    def tenants(self) -> tuple[Tenant, ...]:
        """All tenants, by name. For the operator only, as are the other calls for tenants.

        Returns:
            The tenants with their settings.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._pick(Call("GET", "/v1/tenants"), TenantList, lambda found: found.tenants)

    def create_tenant(self, name: str, settings: TenantSettings | None = None) -> Tenant:
        """Make a tenant.

        Args:
            name: Its name.
            settings: Its settings; None for the service's own.

        Returns:
            The tenant.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        try:
            asked = NewTenant(name=name, **(settings or TenantSettings()).model_dump())
        except ValidationError as error:
            raise invalid(error) from None
        return self._ask(Call("POST", "/v1/tenants", body=asked.model_dump(mode="json")), Tenant)

    def set_tenant(self, name: str, settings: TenantSettings) -> Tenant:
        """Replace all settings of a tenant.

        Args:
            name: Its name.
            settings: Its settings from now on.

        Returns:
            The tenant.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        call = Call("PUT", f"/v1/tenants/{quote(name, safe='')}", body=settings.model_dump(mode="json"))
        return self._ask(call, Tenant)

    def remove_tenant(self, name: str) -> Tenant:
        """Remove a tenant with its tokens and the records of its jobs, if all of them have ended.

        Args:
            name: Its name.

        Returns:
            The tenant as it was.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._ask(Call("DELETE", f"/v1/tenants/{quote(name, safe='')}"), Tenant)

    def audit(self, tenant: str | None = None, *, before: int | None = None, limit: int = 100) -> AuditPage:
        """One page of the audit log, newest first; `next_before` of a page leads to the next.

        Args:
            tenant: Only entries of this tenant.
            before: The `next_before` of the page before.
            limit: Most entries of the page.

        Returns:
            The page.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        params = (*_of(tenant), *((("before", str(before)),) if before is not None else ()), ("limit", str(limit)))
        return self._ask(Call("GET", "/v1/audit", params), AuditPage)


def _of(tenant: str | None) -> tuple[tuple[str, str], ...]:
    return () if tenant is None else (("tenant", tenant),)


# The webhooks of a service, as `Client.webhooks`.

_PATH = "/v1/webhooks"


class Webhooks(Calls):
    """Endpoints that the service calls when jobs end."""

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
        return self._ask(Call("POST", _PATH, body=_dump(body), once=True), Webhook)

    def list(self) -> tuple[Webhook, ...]:
        """List the endpoints, the oldest first.

        Returns:
            The endpoints, without their secrets.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._pick(Call("GET", _PATH), WebhookList, lambda found: found.webhooks)

    def get(self, webhook_id: str) -> Webhook:
        """Get an endpoint.

        Args:
            webhook_id: The endpoint's id.

        Returns:
            The endpoint, without its secret.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._ask(Call("GET", _path(webhook_id)), Webhook)

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
        return self._ask(Call("POST", f"{_path(webhook_id)}/rotate", body=_dump(body), once=True), Webhook)

    def enable(self, webhook_id: str) -> Webhook:
        """Send to an endpoint again that has answered 410.

        Args:
            webhook_id: The endpoint's id.

        Returns:
            The endpoint.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._ask(Call("POST", f"{_path(webhook_id)}/enable"), Webhook)

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
        return self._pick(call, DeliveryList, lambda found: found.deliveries)

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
        return self._pick(call, Redelivered, lambda found: found.count)


_LAYOUTS = "/v1/layouts"


class Layouts(Calls):
    """Targets that the service serves and that nobody writes."""

    def create(
        self,
        source: str | SourceSpec,
        *,
        to: TargetFormat | str,
        name: str | None = None,
        compare: bool = True,
        wait_s: float = 300.0,
        **options: Unpack[ConvertOptions],
    ) -> Layout:
        """Plan a layout, whose files are served until it expires.

        Args:
            source: The checkpoint, as the service sees it, or a `SourceSpec` with its tag and profile.
            to: The format of the files.
            name: The last name of the target's directory; by default the tag of the source.
            compare: True to compare the copies of the source first, as a conversion does. It reads them.
            wait_s: Seconds that planning and comparing may take, beside the client's own limit.
            **options: Options of the conversion that decide bytes, by their names in requests; see `LayoutRequest`.

        Returns:
            The layout with its files.

        Raises:
            ReshardError: What is wrong with the request or with the source; `service.busy`.
        """
        own = {"name": name, "compare": compare}
        try:
            body = LayoutRequest.model_validate({**own, **request_fields(source, to, options)})
        except ValidationError as error:
            raise invalid(error) from None
        sent = body.model_dump(mode="json", exclude_defaults=True)
        return self._ask(Call("POST", _LAYOUTS, body=sent, wait_s=wait_s), Layout)

    def list(self) -> tuple[LayoutSummary, ...]:
        """List the layouts that have not expired, the newest first.

        Returns:
            The layouts, without their files.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._pick(Call("GET", _LAYOUTS), LayoutList, lambda found: found.layouts)

    def get(self, layout_id: str) -> Layout:
        """Get a layout with its files.

        Args:
            layout_id: The layout's id.

        Returns:
            The layout. `links["files"]` is the path of the service below which each file is at its own path.

        Raises:
            RequestError: `request.not_found`; `request.gone` when it has expired.
        """
        return self._ask(Call("GET", _layout_path(layout_id)), Layout)

    def remove(self, layout_id: str) -> None:
        """End a layout before it expires.

        Args:
            layout_id: The layout's id.

        Raises:
            RequestError: `request.not_found`; `request.gone`.
        """
        self._run(self._exchange.tell(Call("DELETE", _layout_path(layout_id))))


def _path(webhook_id: str) -> str:
    return f"{_PATH}/{quote(webhook_id, safe='')}"


def _layout_path(layout_id: str) -> str:
    return f"{_LAYOUTS}/{quote(layout_id, safe='')}"


def _dump(body: BaseModel) -> Any:
    return body.model_dump(mode="json")
