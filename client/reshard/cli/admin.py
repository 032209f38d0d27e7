"""The commands of administrators of a service: `tokens`, `tenants`, `audit`, `webhooks`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from reshard.choices import TokenScope
from reshard.cli.flags import choice, signed
from reshard.cli.help_pages import OPERATION, REMOTE, Commands, aligned, say, say_all
from reshard.cli.local import JsonFlag
from reshard.engine import load_client
from reshard.errors import RequestError, counted, format_size, printable
from reshard.option import parse_size

if TYPE_CHECKING:
    from datetime import datetime

    from pydantic import BaseModel

    from reshard.api.client import Client
    from reshard.models.access import Tenant, TenantSettings, Token, Webhook


tokens = Commands(help="Tokens of a service (RESHARD_URL, RESHARD_TOKEN).", no_args_is_help=True)
tenants = Commands(help="Tenants of a service, for its operator (RESHARD_URL, RESHARD_TOKEN).", no_args_is_help=True)

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_NONE = "none"
TenantFlag = Annotated[
    str | None,
    typer.Option("--tenant", metavar="NAME", help="The tenant; only the operator may name another than their own."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The tenant's name: a-z, 0-9 and '-'.")]


def _places(metavar: str, text: str) -> Any:
    return Annotated[list[str] | None, typer.Option(metavar=metavar, help=f"{text}; may be repeated; none for any.")]


def _limit(text: str, metavar: str = "N|none") -> Any:
    return Annotated[str | None, typer.Option(metavar=metavar, help=text)]


_SETTINGS: Mapping[str, Any] = {
    "read_root": _places("URL", "URL that jobs may read below"),
    "write_root": _places("URL", "URL that jobs may write below"),
    "profile": _places("NAME", "Storage profile of the tenant"),
    "max_queued": _limit("The most jobs that may wait."),
    "max_running": _limit("The most jobs that run at once."),
    "max_workers": _limit("The most workers at once, helpers included."),
    "max_priority": _limit("The highest priority of a job."),
    "bytes_per_day": _limit("The most bytes of the conversions of 24 hours, such as 10TiB.", "SIZE|none"),
    "weight": Annotated[int | None, typer.Option(min=1, max=1000, help="Share of the workers, relative to others.")],
}
"""The settings of a tenant: a flag each. The field of one that may be repeated has an `s` behind its name."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the app."""
    app.add_typer(tokens, name="tokens", rich_help_panel=REMOTE)
    app.add_typer(tenants, name="tenants", rich_help_panel=OPERATION)
    app.command(rich_help_panel=OPERATION)(audit)


def _client() -> Client:
    return load_client()()


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for people: who uses the token.")],
    *,
    scope: Annotated[list[TokenScope], choice(TokenScope, help="A right of the token; may be repeated.")],
    tenant: TenantFlag = None,
    expires: Annotated[str, typer.Option(metavar="TIME", help="When it expires: 12h, 90d, or never.")] = "90d",
    as_json: JsonFlag = False,
) -> None:
    """Make a token and print it. Nobody can show it again."""
    with _client() as client:
        made = client.admin.create_token(name, scope, tenant=tenant, expires_in_s=_seconds(expires))
    say(_json(made) if as_json else made.secret)


@tokens.command("list")
def list_tokens(*, tenant: TenantFlag = None, as_json: JsonFlag = False) -> None:
    """List tokens, newest first, also those that have expired or were revoked."""
    with _client() as client:
        found = client.admin.tokens(tenant)
    if as_json:
        say_all("tokens", found)
        return
    header = ("ID", "SCOPES", "EXPIRES", "LAST USED", "NAME")
    say(*aligned([header, *map(_token_row, found)]))


@tokens.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id.")], *, as_json: JsonFlag = False
) -> None:
    """Revoke a token. Revoking twice is harmless."""
    with _client() as client:
        token = client.admin.revoke_token(token_id)
    say(_json(token) if as_json else f"{token.id} revoked")


def _takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each setting in place of its parameter `given`, which has those that were given."""

    @wraps(command)
    def run(name: str, *, as_json: bool, **flags: Any) -> None:
        # A flag that may be repeated and is not given is an empty list.
        command(name, given={n: v for n, v in flags.items() if v not in (None, [])}, as_json=as_json)

    own = inspect.signature(command, eval_str=True).parameters
    made = [inspect.Parameter(n, own["as_json"].kind, default=None, annotation=a) for n, a in _SETTINGS.items()]
    return signed(run, [own["name"], *made, own["as_json"]])


@tenants.command("create")
@_takes_settings
def create_tenant(name: Name, *, given: Mapping[str, Any], as_json: JsonFlag = False) -> None:
    """Make a tenant. A setting that is not given is the service's own."""
    with _client() as client:
        made = client.admin.create_tenant(name, _settings(None, given))
    say(_json(made) if as_json else made.name)


@tenants.command("set")
@_takes_settings
def set_tenant(name: Name, *, given: Mapping[str, Any], as_json: JsonFlag = False) -> None:
    """Change settings of a tenant; the others stay. `none` makes a setting the service's own again."""
    with _client() as client:
        before = next((tenant for tenant in client.admin.tenants() if tenant.name == name), None)
        if before is None:
            raise RequestError(
                "request.not_found", f"there is no tenant {printable(name, max_chars=64)!r}", fix="reshard tenants list"
            )
        changed = client.admin.set_tenant(name, _settings(before, given))
    say(_json(changed) if as_json else changed.name)


@tenants.command("list")
def list_tenants(*, as_json: JsonFlag = False) -> None:
    """List the tenants, by name."""
    with _client() as client:
        found = client.admin.tenants()
    if as_json:
        say_all("tenants", found)
        return
    header = ("NAME", "QUEUED", "RUNNING", "WORKERS", "BYTES A DAY", "WEIGHT", "MAY WRITE BELOW")
    say(*aligned([header, *map(_tenant_row, found)]))


@tenants.command("remove")
def remove_tenant(name: Name, *, as_json: JsonFlag = False) -> None:
    """Remove a tenant with its tokens and the records of its jobs, once all of these have ended."""
    with _client() as client:
        tenant = client.admin.remove_tenant(name)
    say(_json(tenant) if as_json else f"{tenant.name} removed")


def audit(
    *,
    tenant: TenantFlag = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most this many entries, newest first.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """Show the audit log of a service: who did what, and who was refused as an administrator."""
    entries: list[Any] = []
    before: int | None = None
    with _client() as client:
        while len(entries) < limit:
            page = client.admin.audit(tenant, before=before, limit=min(500, limit - len(entries)))
            entries.extend(page.entries)
            before = page.next_before
            if before is None:
                break
    if as_json:
        say_all("entries", entries)
        return
    header = ("TIME", "TENANT", "ACTOR", "ADDRESS", "ACTION", "OUTCOME", "OBJECT")
    rows = [
        (_time(e.at), e.tenant, printable(e.actor), e.address, e.action, e.outcome, printable(e.object))
        for e in entries
    ]
    say(*aligned([header, *rows]))


def _settings(before: Tenant | None, given: Mapping[str, Any]) -> TenantSettings:
    from reshard.cli.given import settings_of

    values: dict[str, Any] = before.model_dump(exclude={"name", "created_at"}) if before is not None else {}
    for name, value in given.items():
        if isinstance(value, list):
            values[f"{name}s"] = None if value == [_NONE] else value
        else:
            values[name] = _number(name, value) if isinstance(value, str) else value
    return settings_of(values)


def _number(name: str, text: str) -> int | None:
    if text == _NONE:
        return None
    if name == "bytes_per_day":
        return parse_size(text)
    if re.fullmatch(r"-?\d{1,9}", text, re.ASCII) is None:
        raise RequestError(
            "request.invalid",
            f"--{name.replace('_', '-')} {printable(text, max_chars=64)} is not a number",
            fix="name a whole number, or none",
        )
    return int(text)


def _seconds(text: str) -> int | None:
    if text == "never":
        return None
    match = re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII)
    if match is None:
        raise RequestError(
            "request.invalid",
            f"--expires {printable(text, max_chars=64)} is not a time",
            fix="name a number with a unit, such as 12h or 90d, or never",
        )
    return int(match[1]) * _UNITS_S[match[2]]


def _token_row(token: Token) -> tuple[str, ...]:
    expires = "revoked" if token.revoked_at else _time(token.expires_at) if token.expires_at else "never"
    used = _time(token.last_used_at) if token.last_used_at else "never"
    return (token.id, ",".join(token.scopes), expires, used, printable(token.name))


def _tenant_row(tenant: Tenant) -> tuple[str, ...]:

    limits = (tenant.max_queued, tenant.max_running, tenant.max_workers)
    size = "-" if tenant.bytes_per_day is None else format_size(tenant.bytes_per_day)
    places = "-" if tenant.write_roots is None else ", ".join(map(printable, tenant.write_roots)) or "nothing"
    return (tenant.name, *("-" if n is None else str(n) for n in limits), size, str(tenant.weight), places)


def _time(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _json(model: BaseModel) -> str:
    return json.dumps({"schema_version": 1, **model.model_dump(mode="json")})


# `reshard webhooks`: endpoints that a service calls when jobs end.

webhooks = Commands(
    help="Endpoints that a service calls when jobs end (RESHARD_URL, RESHARD_TOKEN).", no_args_is_help=True
)
WebhookId = Annotated[str, typer.Argument(metavar="ID", help="The webhook's id.")]


def register_webhooks(app: typer.Typer) -> None:
    """Mount the group of commands."""
    app.add_typer(webhooks, name="webhooks", rich_help_panel=REMOTE)


@webhooks.command()
def create(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where calls go: https://host/path.")],
    *,
    event: Annotated[
        list[str] | None,
        typer.Option(
            help="job.started, job.succeeded, job.failed or job.cancelled; may be repeated. Default: the last three."
        ),
    ] = None,
    description: Annotated[str, typer.Option(help="For people.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Add an endpoint and print its id and its secret, which is not shown again."""
    from reshard.models.access import ENDINGS

    with _client() as client:
        made = client.webhooks.create(url, events=event or ENDINGS, description=description)
    _say_secret(made, as_json=as_json)


@webhooks.command("list")
def list_webhooks(*, as_json: JsonFlag = False) -> None:
    """List the endpoints."""
    with _client() as client:
        found = client.webhooks.list()
    if as_json:
        say_all("webhooks", found)
        return
    for hook in found:
        off = "  disabled: it answered 410" if hook.disabled_at is not None else ""
        say(f"{hook.id}  {printable(hook.url)}  {' '.join(hook.events)}{off}  {printable(hook.description)}".rstrip())


@webhooks.command()
def remove(webhook_id: WebhookId) -> None:
    """Remove an endpoint and its deliveries."""
    with _client() as client:
        client.webhooks.remove(webhook_id)


@webhooks.command()
def rotate(
    webhook_id: WebhookId,
    *,
    keep_hours: Annotated[float, typer.Option(min=0, max=720, help="For so long the secret before signs, too.")] = 24.0,
    as_json: JsonFlag = False,
) -> None:
    """Make a new secret and print it."""
    with _client() as client:
        made = client.webhooks.rotate(webhook_id, keep_s=3600 * keep_hours)
    _say_secret(made, as_json=as_json)


@webhooks.command()
def enable(webhook_id: WebhookId, *, as_json: JsonFlag = False) -> None:
    """Send to an endpoint again that has answered 410 (Gone)."""
    with _client() as client:
        found = client.webhooks.enable(webhook_id)
    say(found.model_dump_json() if as_json else found.id)


@webhooks.command()
def deliveries(
    webhook_id: WebhookId,
    *,
    state: Annotated[
        Literal["pending", "delivered", "dead"] | None, typer.Option(help="Only deliveries in this state.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="At most so many, the newest.")] = 50,
    as_json: JsonFlag = False,
) -> None:
    """List the deliveries of an endpoint, the newest first. Dead ones were tried for about a day."""
    from reshard.models.access import DeliveryState

    with _client() as client:
        found = client.webhooks.deliveries(webhook_id, state=DeliveryState(state) if state else None, limit=limit)
    if as_json:
        say_all("deliveries", found)
        return
    for one in found:
        said = f"  {printable(one.last_error)}" if one.last_error else ""
        at = one.created_at.astimezone().isoformat(timespec="seconds")
        say(f"{one.id}  {one.state.value}  {one.event}  {one.job_id}  {at}  {counted(one.tries, 'try', 'tries')}{said}")


@webhooks.command()
def redeliver(
    webhook_id: WebhookId,
    *,
    delivery: Annotated[str | None, typer.Option(metavar="ID", help="This one only; default: all dead ones.")] = None,
) -> None:
    """Send dead deliveries again, with their ids. Prints their number."""
    with _client() as client:
        say(str(client.webhooks.redeliver(webhook_id, delivery)))


def _say_secret(hook: Webhook, *, as_json: bool) -> None:
    say(hook.model_dump_json() if as_json else f"{hook.id}\n{hook.secret}")
