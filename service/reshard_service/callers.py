"""The caller of a request as a parameter of its route, with the scope that the route needs.

`AccessControl` has found the caller before. A route without such a parameter would serve callers without any scope;
`tests/unit/test_route_scopes.py` finds it.
"""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Request, Security
from fastapi.security import HTTPBearer, SecurityScopes

from reshard.choices import TokenScope
from reshard_jobs.principals import Principal

_BEARER = HTTPBearer(
    auto_error=False,
    description="A token of the service. Each operation names the scope that the token needs.",
)


def caller_of(request: Request, needed: SecurityScopes, _: Annotated[object, Security(_BEARER)]) -> Principal:
    """The caller, if its token has the scopes that the route names.

    Raises:
        RequestError: `request.forbidden`.
    """
    principal = cast("Principal", request.state.principal)
    for scope in needed.scopes:
        principal.require(TokenScope(scope))
    return principal


Submitter = Annotated[Principal, Security(caller_of, scopes=[TokenScope.SUBMIT.value])]
Reader = Annotated[Principal, Security(caller_of, scopes=[TokenScope.READ.value])]
Canceller = Annotated[Principal, Security(caller_of, scopes=[TokenScope.CANCEL.value])]
Administrator = Annotated[Principal, Security(caller_of, scopes=[TokenScope.ADMIN.value])]
