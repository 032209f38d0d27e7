"""The calls of administrators of a service: tokens, tenants and the audit log."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import quote

from pydantic import ValidationError

from reshard._exchange import Exchange, Run
from reshard._wire import Call
from reshard.choices import TokenScope
from reshard.identity_models import (
    DEFAULT_TOKEN_S,
    AuditPage,
    CreatedToken,
    NewTenant,
    NewToken,
    Tenant,
    TenantList,
    TenantSettings,
    Token,
    TokenList,
)
from reshard.validation import invalid


class AdminClient:
    """The calls of administrators; `Client.admin` makes it. They need a token with the scope `admin`."""

    def __init__(self, run: Run, exchange: Exchange) -> None:
        self._run, self._exchange = run, exchange

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
        return self._run(
            self._exchange.ask(Call("POST", "/v1/tokens", body=asked.model_dump(mode="json")), CreatedToken)
        )

    def tokens(self, tenant: str | None = None) -> tuple[Token, ...]:
        """The tokens of a tenant, newest first, also those that have expired or were revoked.

        Args:
            tenant: The tenant; None for that of the caller.

        Returns:
            The tokens, without their secrets.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._run(
            self._exchange.pick(Call("GET", "/v1/tokens", _of(tenant)), TokenList, lambda found: found.tokens)
        )

    def revoke_token(self, token_id: str) -> Token:
        """Revoke a token; to revoke it twice is harmless.

        Args:
            token_id: The token's id.

        Returns:
            The token as it is now.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._run(self._exchange.ask(Call("DELETE", f"/v1/tokens/{quote(token_id, safe='')}"), Token))

    def tenants(self) -> tuple[Tenant, ...]:
        """All tenants, by name. For the operator only, as are the other calls for tenants.

        Returns:
            The tenants with their settings.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._run(self._exchange.pick(Call("GET", "/v1/tenants"), TenantList, lambda found: found.tenants))

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
        return self._run(self._exchange.ask(Call("POST", "/v1/tenants", body=asked.model_dump(mode="json")), Tenant))

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
        return self._run(self._exchange.ask(call, Tenant))

    def remove_tenant(self, name: str) -> Tenant:
        """Remove a tenant with its tokens and the records of its jobs, if all of them have ended.

        Args:
            name: Its name.

        Returns:
            The tenant as it was.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._run(self._exchange.ask(Call("DELETE", f"/v1/tenants/{quote(name, safe='')}"), Tenant))

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
        return self._run(self._exchange.ask(Call("GET", "/v1/audit", params), AuditPage))


def _of(tenant: str | None) -> tuple[tuple[str, str], ...]:
    return () if tenant is None else (("tenant", tenant),)
