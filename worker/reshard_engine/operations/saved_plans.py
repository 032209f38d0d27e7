"""Saved plans: a request may name the plan that it must lead to, which is compared before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from reshard.errors import (
    RequestError,
    ReshardError,
    SourceError,
    counted,
    listed,
    printable,
)
from reshard.models.jobs import (
    ConvertRequest,
    PinnedFile,
    SavedPlan,
)
from reshard_engine.plan.model import Plan
from reshard_engine.storage.locations import Location

_MOST_NAMED = 256
"""Files that the details of an error name, of each kind."""


def pinned_files(plan: Plan) -> tuple[PinnedFile, ...]:
    """The objects of the source with the pins that they have in a plan."""
    return tuple(PinnedFile(name=n, part=k, size_bytes=s, pin=p) for n, k, s, p in plan.source["objects"])


def refuse_other_plan(saved: SavedPlan | None, plan: Plan) -> None:
    """Refuse a plan that does not write the bytes of the saved one.

    Units may differ: they follow from the memory limit and the store.

    Raises:
        RequestError: `request.plan_changed`.
    """
    if saved is None or saved.content_digest == plan.content_digest:
        return
    if saved.source_digest != plan.source_digest:
        raise _source_changed(saved, {(f.name, f.part): f for f in pinned_files(plan)})
    here = version("reshard")
    made = f"reshard {printable(saved.reshard_version, max_chars=64)}"
    text = (
        f"reshard {here} lays the target out in another way than {made}, with which the plan was made"
        if saved.reshard_version != here
        else f"the request is not the one that the plan was made for, or a package of a format is another one; {made}"
    )
    raise RequestError(
        "request.plan_changed",
        f"{text}, and the source is the same: the saved plan writes {saved.layout_digest[:12]}, and this one "
        f"{plan.layout_digest[:12]}",
        fix=_PLAN_AGAIN,
        details={"saved": saved.content_digest, "now": plan.content_digest},
    )


_PLAN_AGAIN = "plan again, and look at the new plan: `reshard plan` with --out"


def _source_changed(saved: SavedPlan, there: Mapping[tuple[str, int], PinnedFile], why: str = "") -> RequestError:
    """The error that names the difference between the files of a saved plan and those that are there now."""
    planned = {(f.name, f.part): f for f in saved.files}
    both = planned.keys() & there.keys()
    found = {
        "gone": sorted(planned.keys() - there.keys()),
        "new": sorted(there.keys() - planned.keys()),
        "changed": sorted(key for key in both if planned[key] != there[key]),
    }
    said = [
        f"{counted(len(keys), 'file')} {kind}: " + listed([_told(key, planned, there) for key in keys], most=4)
        for kind, keys in found.items()
        if keys
    ]
    text = "; ".join(said) if planned else "the plan does not name its files"
    return RequestError(
        "request.plan_changed",
        f"the source has changed since the plan was made: {text}{why and f'; read now, it is refused: {why}'}",
        fix=_PLAN_AGAIN,
        details={kind: [printable(n) for n, _ in keys[:_MOST_NAMED]] for kind, keys in found.items()},
    )


def _told(key: tuple[str, int], *states: Mapping[tuple[str, int], PinnedFile]) -> str:
    """A file with its sizes in the plan and now, where it has two."""
    sizes = [state[key].size_bytes for state in states if key in state]
    if len(sizes) < 2:
        return key[0]
    how = f"{sizes[0]:,} -> {sizes[1]:,} bytes" if sizes[0] != sizes[1] else "written again, as long as before"
    return f"{key[0]} ({how})"


def explained(error: SourceError, request: ConvertRequest, source: Location) -> ReshardError:
    """The error of a source that cannot be read any more: what has changed since its plan was saved, if that shows."""
    if request.plan is None or not request.plan.files:
        return error
    place = source if request.source.tag is None else source.child(*request.source.tag.split("/"))
    try:
        there = {i.path.removeprefix(f"{place.path.rstrip('/')}/"): i for i in place.store.list_tree(place.path)}
    except ReshardError:
        return error
    named = {f.name for f in request.plan.files}
    # A file in several objects has other names there; those are not compared.
    whole = {f.name for f in request.plan.files if f.part == 0} - {f.name for f in request.plan.files if f.part}
    if not any(name in there for name in whole):
        return error
    found = {(n, 0): PinnedFile(name=n, size_bytes=there[n].size_bytes, pin=there[n].pin) for n in whole & there.keys()}
    found |= {(f.name, f.part): f for f in request.plan.files if f.name in named - whole}
    if found == {(f.name, f.part): f for f in request.plan.files}:
        return error
    return _source_changed(request.plan, found, f"{error.code}: {error.message}")
