"""Routes of tokens: create, list, revoke."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from reshard.identity_models import CreatedToken, NewToken, TenantName, Token, TokenList
from reshard_jobs.principals import Principal
from reshard_service.callers import Administrator
from reshard_service.context import Context
from reshard_service.documented import problems

router = APIRouter(prefix="/v1/tokens", tags=["identity"])


@router.post("", status_code=201, response_model=CreatedToken, responses=problems(403, 404))
def create_token(body: NewToken, context: Context, caller: Administrator) -> Response:
    """Make a token. Its secret is in this answer only. Only the operator may name another tenant."""
    _may_manage(caller, body.tenant)
    token, secret = context.tokens.create(body, by=caller)
    made = CreatedToken(token=token, secret=secret)
    return JSONResponse(made.model_dump(mode="json"), status_code=201, headers={"Cache-Control": "no-store"})


@router.get("", response_model=TokenList, responses=problems(403))
def list_tokens(
    context: Context, caller: Administrator, tenant: Annotated[TenantName | None, Query()] = None
) -> TokenList:
    """List the tokens of the caller's tenant, newest first. Only the operator may name another tenant."""
    _may_manage(caller, tenant)
    return TokenList(tokens=tuple(context.tokens.list(tenant or caller.tenant)))


@router.delete("/{token_id}", response_model=Token, responses=problems(403, 404))
def revoke_token(token_id: str, context: Context, caller: Administrator) -> Token:
    """Revoke a token. Repeating is harmless."""
    return context.tokens.revoke(token_id, by=caller)


def _may_manage(caller: Principal, tenant: str | None) -> None:
    # The answer is the same for a tenant that exists and for one that does not.
    if tenant is not None and tenant != caller.tenant:
        caller.require_operator()
