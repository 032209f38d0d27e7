"""A minimal dashboard: the newest jobs on one server-rendered page that loads nothing from other hosts."""

from __future__ import annotations

from html import escape

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from reshard.errors import printable
from reshard.models import Job
from reshard_service.callers import Reader
from reshard_service.context import Context

router = APIRouter(include_in_schema=False)

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;max-width:80rem}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .8rem;border-bottom:1px solid #ccc}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}code{font-size:.9em}"
)
PAGE_HEADERS = {
    # Even if a name from a checkpoint were not escaped, this policy would not let it run anything.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@router.get("/")
def dashboard(context: Context, caller: Reader) -> HTMLResponse:
    """Show the newest jobs."""
    return HTMLResponse(render(context.jobs_of(caller).list(page_size=50).jobs), headers=PAGE_HEADERS)


def render(jobs: tuple[Job, ...]) -> str:
    """Render the page; every text from outside is escaped."""
    rows = "".join(_row(job) for job in jobs) or '<tr><td colspan="6">No jobs yet.</td></tr>'
    table = (
        "<table><thead><tr>"
        "<th>Job</th><th>State</th><th>Done</th><th>Source</th><th>Target</th><th>Created</th>"
        f"</tr></thead><tbody>{rows}</tbody></table>"
    )
    return page("Jobs", table, refresh_s=5)


def page(title: str, body: str, *, refresh_s: int = 0) -> str:
    """A whole page. The body is HTML, in which every text from outside is escaped already."""
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)} - Reshard</title>'
        f"{refresh}<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>"
    )


def _row(job: Job) -> str:
    progress = job.progress
    share = f"{100 * progress.bytes_done / progress.bytes_total:.0f} %" if progress and progress.bytes_total else ""
    cells = (
        f'<td><a href="{escape(job.links["self"])}"><code>{escape(job.id)}</code></a></td>',
        f"<td>{escape(job.state.value)}</td>",
        f'<td class="n">{share}</td>',
        f"<td><code>{escape(printable(job.request.source.url))}</code></td>",
        f"<td><code>{escape(printable(job.request.target))}</code></td>",
        f"<td>{escape(job.created_at.isoformat(timespec='seconds'))}</td>",
    )
    return f"<tr>{''.join(cells)}</tr>"
