"""`reshard webhooks`: endpoints that a service calls when jobs end."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from reshard.cli.help_pages import REMOTE, Commands
from reshard.cli.local import JsonFlag
from reshard.errors import counted, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

    from reshard.client import Client
    from reshard.webhook_models import Webhook

webhooks = Commands(
    help="Endpoints that a service calls when jobs end (RESHARD_URL, RESHARD_TOKEN).", no_args_is_help=True
)
WebhookId = Annotated[str, typer.Argument(metavar="ID", help="The webhook's id.")]


def register(app: typer.Typer) -> None:
    """Mount the group of commands."""
    app.add_typer(webhooks, name="webhooks", rich_help_panel=REMOTE)


def _client() -> Client:
    from reshard.client import Client

    return Client()


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
    from reshard.webhook_models import ENDINGS

    with _client() as client:
        made = client.webhooks.create(url, events=event or ENDINGS, description=description)
    _say_secret(made, as_json=as_json)


@webhooks.command("list")
def list_webhooks(*, as_json: JsonFlag = False) -> None:
    """List the endpoints."""
    with _client() as client:
        found = client.webhooks.list()
    if as_json:
        _say_all("webhooks", found)
        return
    for hook in found:
        off = "  disabled: it answered 410" if hook.disabled_at is not None else ""
        _say(f"{hook.id}  {printable(hook.url)}  {' '.join(hook.events)}{off}  {printable(hook.description)}".rstrip())


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
    _say(found.model_dump_json() if as_json else found.id)


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
    from reshard.webhook_models import DeliveryState

    with _client() as client:
        found = client.webhooks.deliveries(webhook_id, state=DeliveryState(state) if state else None, limit=limit)
    if as_json:
        _say_all("deliveries", found)
        return
    for one in found:
        said = f"  {printable(one.last_error)}" if one.last_error else ""
        at = one.created_at.astimezone().isoformat(timespec="seconds")
        _say(
            f"{one.id}  {one.state.value}  {one.event}  {one.job_id}  {at}  {counted(one.tries, 'try', 'tries')}{said}"
        )


@webhooks.command()
def redeliver(
    webhook_id: WebhookId,
    *,
    delivery: Annotated[str | None, typer.Option(metavar="ID", help="This one only; default: all dead ones.")] = None,
) -> None:
    """Send dead deliveries again, with their ids. Prints their number."""
    with _client() as client:
        _say(str(client.webhooks.redeliver(webhook_id, delivery)))


def _say_secret(hook: Webhook, *, as_json: bool) -> None:
    _say(hook.model_dump_json() if as_json else f"{hook.id}\n{hook.secret}")


def _say_all(name: str, found: Sequence[BaseModel]) -> None:
    _say(json.dumps({"schema_version": 1, name: [one.model_dump(mode="json") for one in found]}))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
