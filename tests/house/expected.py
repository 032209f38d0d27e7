"""What a call must give: an error of a type, or a value that is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pytest

from reshard.errors import ReshardError

_Raised = TypeVar("_Raised", bound=BaseException)
_Value = TypeVar("_Value")
_Arguments = ParamSpec("_Arguments")


def raised(
    expected: type[_Raised], call: Callable[_Arguments, object], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Raised:
    """The error of this type that the call raises."""
    with pytest.raises(expected) as caught:
        call(*args, **kwargs)
    return caught.value


def refused(code: str, call: Callable[[], object]) -> ReshardError:
    """The error of a call, which has this code."""
    error = raised(ReshardError, call)
    assert error.code == code, error
    return error


def some(value: _Value | None) -> _Value:
    """The value, which is not None."""
    assert value is not None
    return value
