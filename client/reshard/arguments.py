"""The keyword arguments of the functions of `import reshard`: their signatures and texts, and the models they make."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from reshard.declared import Declared, declared_options, options_of_source
from reshard.errors import SEE_HELP
from reshard.keywords import ChoiceKeywords, ConversionKeywords, TwoSourceKeywords
from reshard.models import ConvertRequest, Progress, SourceSpec
from reshard.nested_options import nested
from reshard.option import PathLike
from reshard.sizes import parse_percent
from reshard.validation import invalid

if TYPE_CHECKING:
    from reshard.client import Client

OnProgress = Callable[[Progress], None]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_LISTED = "        **given: "
_TYPES: Mapping[str, Any] = {
    **ConversionKeywords.__annotations__,
    **ChoiceKeywords.__annotations__,
    **TwoSourceKeywords.__annotations__,
}


def keywords() -> dict[str, str]:
    """Fields of requests whose keyword arguments have other names."""
    return {"url": "source", **{o.field: o.name for o in declared_options().values() if o.name != o.field}}


def takes_keywords(options: Mapping[str, Declared]) -> Callable[[FunctionT], FunctionT]:
    """Give a function that takes these options as `**given` a signature and a docstring that list them.

    They stand where the docstring has `**given`. Type checkers know them from `reshard.keywords`, which is generated
    from the same fields.
    """

    def listing(function: FunctionT) -> FunctionT:
        own, text = signature(function), function.__doc__ or ""
        begin = text.index(_LISTED)
        made = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=o.default, annotation=_type_of(name, o))
            for name, o in options.items()
        ]
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        before = [p for p in named if f"\n        {p.name}: " in text[:begin]]
        parameters = [*before, *made, *(p for p in named if p not in before)]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        lines = "".join(f"        {name}: {_meaning(name, o)}\n" for name, o in options.items())
        function.__doc__ = text[:begin] + lines + text[text.index("\n", begin) + 1 :]
        return function

    return listing


def of_two_sources() -> dict[str, Declared]:
    """The options of two sources, which have the letter of their side behind their names."""
    return {f"{name}_{side}": option for side in "ab" for name, option in options_of_source().items()}


def of_side(given: Mapping[str, Any], side: str) -> dict[str, Any]:
    """The options of one of two sources, by the names that they have for one.

    Raises:
        TypeError: No option has this name.
    """
    if unknown := next((name for name in given if name not in of_two_sources()), None):
        raise TypeError(f"got an unexpected keyword argument {unknown!r}")
    return {n.removesuffix(f"_{side}"): value for n, value in given.items() if n.endswith(f"_{side}")}


def request_of(given: Mapping[str, Any], fix: str, *, to_service: bool, named: Mapping[str, Any]) -> ConvertRequest:
    """The wire model of a conversion, from the arguments of a function.

    Args:
        given: The options by the names of their keyword arguments.
        fix: The fix of an error that has none of its own.
        to_service: True if another process will read and write.
        named: The other arguments: `source`, `target`, `to`, `options`.

    Raises:
        RequestError: `request.invalid`.
        TypeError: No option has this name.
    """
    of_source = options_of_source()
    source, target = (for_service(named[n]) if to_service else _text_of(named[n]) for n in ("source", "target"))
    others = {n: v for n, v in given.items() if n not in of_source}
    said = _fields_of(others, declared_options(), to_service=to_service)
    said |= {"to": named["to"], "options": dict[str, Any](named["options"] or {}), "target": target}
    said["source"] = source_of(source, {n: v for n, v in given.items() if n in of_source})
    try:
        return ConvertRequest.model_validate(nested(said))
    except ValidationError as error:
        found = invalid(error, keywords(), keywords=True)
        found.fix = fix if found.fix == SEE_HELP else found.fix
        raise found from None


def _fields_of(given: Mapping[str, Any], known: Mapping[str, Declared], *, to_service: bool = False) -> dict[str, Any]:
    """The values of fields, from keyword arguments; None stands for the default of its field."""
    if unknown := next((name for name in given if name not in known), None):
        raise TypeError(f"got an unexpected keyword argument {unknown!r}")
    said = {known[name]: value for name, value in given.items() if value is not None}
    return {
        option.field: for_service(value) if to_service and option.names_place else option.value(value)
        for option, value in said.items()
    }


def source_of(place: PathLike, given: Mapping[str, Any]) -> SourceSpec:
    """The wire model of a source.

    Args:
        place: The checkpoint.
        given: The options of the source, by the names of their keyword arguments.

    Raises:
        RequestError: `request.invalid`.
    """
    try:
        return SourceSpec.model_validate({"url": os.fspath(place), **_fields_of(given, options_of_source())})
    except ValidationError as error:
        raise invalid(error, keywords(), keywords=True) from None


def _text_of(place: PathLike) -> str:
    return os.fspath(place)


def for_service(place: PathLike) -> str:
    """A local path as an absolute one: the service may have another working directory and home directory."""
    text = os.fspath(place)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def fraction_of(sample: float | str | None) -> float | None:
    """A fraction that is given as a number, or as a text such as `2%`.

    Raises:
        RequestError: `request.invalid`.
    """
    return parse_percent(sample) if isinstance(sample, str) else sample


def client_of(url: str, token: str | None) -> Client:
    """A client of the service at `url`. It is imported here: httpx takes longer to import than all else."""
    from reshard.client import Client

    return Client(url, token)


def _type_of(name: str, option: Declared) -> Any:
    found = _TYPES.get(name, option.kind)
    return getattr(found, "__forward_arg__", found)


def _meaning(name: str, option: Declared) -> str:
    return option.meaning if name == option.name else f"{name[-1].upper()}: {option.meaning}"
