"""Functions of `import reshard` that look at checkpoints: `inspect`, `picture`, `verify`, `diff`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Unpack

from pydantic import ValidationError

from reshard.arguments import (
    OnProgress,
    client_of,
    for_service,
    fraction_of,
    keywords,
    of_side,
    of_two_sources,
    source_of,
    takes_keywords,
)
from reshard.declared import options_of_source
from reshard.diffs import DiffOptions, DiffReport
from reshard.errors import RequestError, printable
from reshard.keywords import SourceKeywords, TwoSourceKeywords
from reshard.layout_svg import Picture
from reshard.local import load_engine
from reshard.models import Inspection, SourceSpec, VerifyReport
from reshard.option import PathLike
from reshard.option_files import read_rules
from reshard.options import DeepSpeedOptions, Options
from reshard.pictures import LayoutPicture
from reshard.progress import progress_of
from reshard.validation import invalid


@takes_keywords(options_of_source())
def inspect(
    source: PathLike,
    *,
    url: str | None = None,
    token: str | None = None,
    **given: Unpack[SourceKeywords],
) -> Inspection:
    """Describe a checkpoint from its metadata: format, step, ranks, tensors, possible targets. Nothing in it runs.

    Args:
        source: A directory or URL: a save directory, a tag directory, or a directory of weights.
        **given: The options of the source.
        url: URL of a service that reads it, in place of this process.
        token: Token of the service; by default `RESHARD_TOKEN`.

    Returns:
        The description. A notebook shows it with the picture of the layout.

    Raises:
        SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed.
        RequestError: `request.engine_missing` without the `worker` extra.

    Examples:
        >>> found = inspect("tests/data/zero2_tiny")
        >>> found.format, found.world, found.step
        ('deepspeed-zero2', {'dp': 2, 'tp': 1, 'pp': 1}, 3)
    """
    place = source if url is None else for_service(source)
    spec = source_of(place, given)
    if url is not None:
        with client_of(url, token) as client:
            return client.inspect(spec)
    return load_engine().inspect(spec).drawn_from(spec)


@takes_keywords(options_of_source())
def picture(
    source: PathLike,
    *,
    tensor: str | None = None,
    beside: PathLike | None = None,
    **given: Unpack[SourceKeywords],
) -> Picture:
    """Draw what each rank of a checkpoint holds and, with `tensor`, which rank holds which part of a tensor.

    Args:
        source: A checkpoint, as for `inspect`.
        tensor: `NAME` or `NAME/STATE` of a tensor to draw.
        beside: Another checkpoint, such as the one that `source` was converted to, to draw on the right.
        **given: The options of `source`. Its storage profile is that of both.

    Returns:
        The picture. A notebook shows it; `svg()` is its text, and `save("moves.svg")` writes it.

    Raises:
        RequestError: `request.invalid` for a name that `source` does not have.
        ReshardError: As `inspect`.

    Examples:
        >>> drawn = picture("tests/data/zero2_tiny", tensor="embed.weight", beside="tests/data/zero3_tiny")
        >>> drawn.svg()[:5]
        '<svg '
    """
    engine = load_engine()
    here = engine.picture(source_of(source, given), tensor)
    if beside is None:
        return Picture(here)
    return Picture(here, _beside(source_of(beside, {"profile": given.get("profile")}), tensor))


def verify(target: PathLike, *, sample: float | str | None = None, profile: str | None = None) -> VerifyReport:
    """Read every byte of a target and compare its checksums and tensor digests with its manifest.

    Args:
        target: A target that `convert` wrote; or a directory whose `latest` names one.
        sample: Read only a random part of a huge target: a fraction such as `0.02`, or `"2%"`.
        profile: Storage profile of the target.

    Returns:
        The report; `ok` says if everything matches, and `problems` what does not. Nothing is raised for that.

    Raises:
        SourceError: `source.not_found`.
        IntegrityError: `integrity.no_manifest`: it is no output of reshard.
        StorageError: The storage refused or failed.

    Examples:
        >>> import reshard
        >>> done = reshard.convert("tests/data/zero2_tiny", "run-dp3", to="zero", dp=3)
        >>> verify("run-dp3").ok
        True
    """
    return load_engine().verify(os.fspath(target), profile=profile, sample=fraction_of(sample))


@takes_keywords(of_two_sources())
def diff(
    a: PathLike,
    b: PathLike,
    *,
    states: str = "all",
    weights_only: bool = False,
    common: bool = False,
    ignore: Iterable[str] | None = None,
    sample: float | str | None = None,
    rules: PathLike | None = None,
    family: str | None = None,
    on_progress: OnProgress | None = None,
    progress: bool | None = None,
    **given: Unpack[TwoSourceKeywords],
) -> DiffReport:
    """Compare two checkpoints by logical tensor, bit by bit, across layouts and formats.

    Args:
        a: A checkpoint, as for `inspect`.
        b: The checkpoint to compare it with.
        **given: The options of both sources.
        states: `all`, or `weights` to skip optimizer states, counters and client state.
        weights_only: Short for `states="weights"`.
        common: True to ignore tensors and values that only one side has.
        ignore: Patterns of names to leave out, such as `["*.bias", "*/exp_avg*"]`.
        sample: Compare only a random part of the elements: a fraction such as `0.02`, or `"2%"`.
        rules: File of rules (YAML) for tensor-parallel sides that do not say how they are cut.
        family: Built-in set of rules, such as `gpt-megatron`.
        on_progress: Called with each `Progress`, from one thread at a time.
        progress: True for a bar, False for none; by default as for `convert`.

    Returns:
        The report; `equal` is the verdict, and `differences` has the worst first. Nothing is raised for a difference.

    Raises:
        RequestError: `request.invalid`.
        SourceError: A checkpoint is missing, damaged, hostile or of an unsupported kind.
        StorageError: The storage refused or failed.

    Examples:
        >>> diff("tests/data/zero2_tiny", "tests/data/zero2_tiny").equal
        True
    """
    if states not in ("all", "weights"):
        raise RequestError("request.invalid", f"states is {printable(states)!r}", fix="states is one of: all, weights")
    sides = (source_of(a, of_side(given, "a")), source_of(b, of_side(given, "b")))
    deepspeed = DeepSpeedOptions(rules=None if rules is None else read_rules(Path(rules)), family=family)
    try:
        asked = DiffOptions(
            weights_only=weights_only or states == "weights",
            common=common,
            ignore=tuple(ignore or ()),
            sample=fraction_of(sample),
            options=Options(deepspeed=deepspeed),
        )
    except ValidationError as error:
        raise invalid(error, keywords(), keywords=True) from None
    with progress_of(on_progress, progress) as show:
        return load_engine().diff(*sides, asked, on_progress=show)


def _beside(spec: SourceSpec, tensor: str | None) -> LayoutPicture:
    """The layout of another checkpoint, with the tensor of this name in whatever states it has there."""
    engine = load_engine()
    for name in () if tensor is None else (tensor, tensor.rpartition("/")[0]):
        try:
            return engine.picture(spec, name)
        except RequestError as error:
            if error.code != "request.invalid":
                raise
    return engine.picture(spec)
