"""Routes that take requests whose options are at the places of 0.1.0, and name these places in the answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute

from reshard.installed_formats import present_places


class FormerPlacesRoute(APIRoute):
    """A route whose body is a conversion. A body with options at former places is answered with a `Warning`.

    Source of the header's form: RFC 7234, section 5.5 (code 299, a text in quotes). RFC 9111 has no codes any more.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of the route, with the header added to its answer."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_and_warn(request: Request) -> Response:
            response = await handle(request)
            # FastAPI has parsed the body by now, and the request keeps it.
            body: Any = await request.json()
            for text in present_places(cast("dict[str, Any]", body))[1] if isinstance(body, dict) else ():
                response.headers.append("Warning", f'299 - "{text}"')
            return response

        return handle_and_warn
