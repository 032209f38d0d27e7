"""The type of a target's name in requests: a target of reshard, or of a format of another package."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue

from reshard.choices import TargetFormat


class _OfInstalledFormats:
    """Makes the API's schema list every target that the service can write."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """A string of a closed list."""
        from reshard.installed_formats import target_names

        return {"type": "string", "enum": list(target_names())}


def known_target(name: str) -> str:
    """The member of `TargetFormat` with this name; the name itself if it belongs to another package's format."""
    return TargetFormat.__members__.get(name.upper(), name)


TargetName = Annotated[str, Field(max_length=64), AfterValidator(known_target), _OfInstalledFormats]
"""The name of a target. A name that this machine does not know stays a plain string; the engine refuses it."""
