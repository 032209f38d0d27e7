"""Principals: who makes a request, for which tenant, with which rights."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.choices import TokenScope
from reshard.errors import RequestError
from reshard_jobs.tables import DEFAULT_TENANT

ALL_SCOPES = frozenset(TokenScope)


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of one request.

    Attributes:
        tenant: The tenant whose things the caller reaches.
        scopes: Its rights.
        actor: Its name in the audit log: the id of a token, the subject of an OIDC token, or a word.
        name: Its name for people.
        token_id: The id of its token in the job database; empty for any other caller.
        address: The network address that the request came from.
        expires_at: Seconds since the epoch at which an OIDC token expires.
    """

    tenant: str
    scopes: frozenset[TokenScope]
    actor: str
    name: str = ""
    token_id: str = ""
    address: str = ""
    expires_at: float | None = None

    @property
    def is_operator(self) -> bool:
        """True for an administrator of the operator's tenant, who manages all tenants."""
        return self.tenant == DEFAULT_TENANT and TokenScope.ADMIN in self.scopes

    def require(self, scope: TokenScope) -> None:
        """Refuse a caller without a right.

        Raises:
            RequestError: `request.forbidden`.
        """
        if scope not in self.scopes:
            raise RequestError(
                "request.forbidden",
                f"this token has no scope `{scope}`; its scopes: {', '.join(sorted(self.scopes)) or 'none'}",
                fix="use a token with that scope; an administrator makes it with: "
                f"reshard tokens create NAME --scope {scope.value}",
                details={"scope": scope.value},
            )

    def require_operator(self) -> None:
        """Refuse everybody but administrators of the operator's tenant.

        Raises:
            RequestError: `request.forbidden`.
        """
        self.require(TokenScope.ADMIN)
        self._require_default()

    def require_default(self, scope: TokenScope) -> None:
        """Refuse tenants other than the operator's.

        Raises:
            RequestError: `request.forbidden`.
        """
        self.require(scope)
        self._require_default()

    def _require_default(self) -> None:
        if self.tenant != DEFAULT_TENANT:
            raise RequestError(
                "request.forbidden",
                "only the operator of the service may do this",
                fix="ask the operator of the service",
            )


OPERATOR = Principal(DEFAULT_TENANT, ALL_SCOPES, "operator", "operator")
"""The caller with the service's own token."""
ANYBODY = Principal(DEFAULT_TENANT, ALL_SCOPES - {TokenScope.ADMIN}, "anonymous", "anonymous")
"""The caller without a token of a service that lets everybody in. What it may do must end with that setting."""
