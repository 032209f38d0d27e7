"""The models that the flags of a command make. They load when a command runs, not when it shows its help."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from reshard.api import plan_files
from reshard.declared import Declared, declared_options, options_of_source, present_names
from reshard.installed_formats import nested
from reshard.models.access import TenantSettings
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard.wire_model import invalid


def spec_of(url: str, given: Mapping[str, Any]) -> SourceSpec:
    """Make the wire model of a source from what was given of its flags.

    Raises:
        RequestError: `request.invalid`.
    """
    try:
        return SourceSpec(url=url, **values_of(options_of_source(), given))
    except ValidationError as error:
        raise invalid(error, called()) from None


def request_of(source: str, target: str, given: Mapping[str, Any], of_formats: str | None) -> ConvertRequest:
    """Make the wire model of a conversion from what was given of its flags, and from options of formats as JSON.

    Raises:
        RequestError: `request.invalid`.
    """
    of_conversion = {n: o for n, o in declared_options().items() if o.within != ("source",)}
    said = values_of(of_conversion, given) | json.loads(of_formats or "{}")
    said |= {"source": spec_of(source, given), "target": target, "to": given["to"]}
    try:
        return ConvertRequest.model_validate(nested(said))
    except ValidationError as error:
        raise invalid(error, called()) from None


def planned_request(plan: str, typed: Mapping[str, Any]) -> ConvertRequest:
    """The request of a plan file, with the flags that were typed beside it.

    Raises:
        RequestError: `request.invalid`.
    """
    names = {"to": "--to", **{name: option.flag for name, option in declared_options().items()}}
    return plan_files.run_as_planned(plan_files.read_plan(plan), present_names(typed, declared_options()), names)


def settings_of(values: Mapping[str, Any]) -> TenantSettings:
    """Make the wire model of a tenant's settings.

    Raises:
        RequestError: `request.invalid`.
    """
    try:
        return TenantSettings.model_validate(values)
    except ValidationError as error:
        raise invalid(error, {}) from None


def called() -> dict[str, str]:
    """The flag of each request field whose flag has another name than the field."""
    renamed = {o.field: o.flag for o in declared_options().values() if o.name != o.field}
    return {"url": "SRC", "target": "DST", **renamed}


def values_of(options: Mapping[str, Declared], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the fields of these options that were given, also by a former name.

    Raises:
        RequestError: `request.invalid`.
    """
    found = present_names(given, options)
    return {options[n].field: options[n].value(value) for n, value in found.items() if n in options}
