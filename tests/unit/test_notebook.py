"""Results in notebooks: tables whose texts are escaped, and pictures that never change what a result is."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest

import reshard
from house.repository import ROOT
from house.requests import asked
from reshard.draw.notebook import MAX_ROWS
from reshard.engine import load_engine
from reshard.models.jobs import (
    ConvertRequest,
    ConvertResult,
    Inspection,
    Job,
    JobList,
    PlanSummary,
    Problem,
    VerifyReport,
)
from reshard.models.reports import DifferenceKind, DiffReport
from reshard.options import SourceSpec
from reshard.wire_model import Drawn, ShownModel, WireModel

DATA = ROOT / "tests" / "data"
EVIL = "</td></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\x1b[31m\u202e\udcff"
TAGS = {
    *("div", "table", "thead", "tbody", "tr", "th", "td", "p", "b", "br", "details", "summary", "progress"),
    *("svg", "g", "path", "text", "rect", "title", "desc", "style"),
}


class _Page(HTMLParser):
    """The tags, the attributes and the text of a page, as a browser reads it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def _checked(html: str) -> _Page:
    page = _Page(html)
    assert page.open == []
    assert page.tags <= TAGS
    assert not any(name.startswith("on") or name in ("href", "src", "xlink:href") for name in page.attributes)
    return page


def _evil(kind: Any) -> Any:
    """A value of a type, in which every text is hostile."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is str:
        return EVIL
    if origin in (Union, UnionType):
        return _evil(next((a for a in arguments if a is not type(None)), str))
    if origin is tuple:
        return tuple(_evil(a) for a in arguments if a is not Ellipsis)
    if origin is dict:
        return {EVIL: _evil(arguments[1])}
    if origin is not None and origin.__name__ == "Literal":
        return arguments[0]
    if isinstance(kind, type) and issubclass(kind, WireModel):
        return _evil_model(kind)
    known: Mapping[Any, Any] = {int: 3, float: 0.5, bool: False, datetime: datetime(2026, 1, 2, tzinfo=UTC)}
    if kind in known:
        return known[kind]
    return next(iter(kind)) if hasattr(kind, "__members__") else EVIL


def _evil_model(kind: type[WireModel]) -> WireModel:
    if kind is ConvertRequest:
        return ConvertRequest(source=SourceSpec.model_construct(url=EVIL, tag=EVIL), target="x", to=EVIL[:64])
    return kind.model_construct(**{name: _evil(field.annotation) for name, field in kind.model_fields.items()})


KINDS = (Inspection, PlanSummary, ConvertResult, VerifyReport, DiffReport, Job, JobList)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_hostile_texts_stay_text(kind: type[ShownModel]) -> None:
    page = _checked(_evil_model(kind)._repr_html_())
    assert "<script>alert(1)</script>" in page.words, "the text is there, as text"
    assert "\x1b" not in page.words
    assert "\u202e" not in page.words


def test_every_model_that_shows_itself_is_tried() -> None:
    assert set(ShownModel.__subclasses__()) == set(KINDS)


def test_a_hostile_checkpoint_is_shown_as_text(tmp_path: Path) -> None:
    """Real files: a directory whose name is markup, and a tensor whose name is."""
    import numpy as np
    from safetensors.numpy import save_file

    evil = '<script>alert(1)</script> onload="x"'
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    save_file({evil: np.ones((4, 3), dtype=np.float32)}, folder / "model.safetensors")
    for shown in (
        reshard.inspect(folder),
        reshard.picture(folder, tensor=evil),
        reshard.plan(folder, tmp_path / "out", to="torch"),
        reshard.diff(folder, folder, progress=False),
    ):
        page = _checked(shown._repr_html_())
        assert "<img src=x" in page.words or "script" in page.words


def _plan(tmp_path: Path) -> PlanSummary:
    return reshard.plan(DATA / "zero2_tiny", tmp_path / "out", to="zero", dp=4)


def test_plans_and_results_show_source_and_target(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    planned = _checked(plan._repr_html_()).words
    assert not (tmp_path / "out").exists()
    done = _checked(reshard.convert(DATA / "zero2_tiny", tmp_path / "out", to="zero", dp=4)._repr_html_()).words
    for words in (planned, done):
        assert "taken by 3 ranks" in words, "the fourth rank holds other tensors"
        assert "embed.weight/fp32" in words
    assert "nothing is written yet" in planned


def test_a_picture_is_no_part_of_a_result(tmp_path: Path) -> None:
    plan, other = _plan(tmp_path), _plan(tmp_path)
    plain = load_engine().plan(
        asked(source={"url": str(DATA / "zero2_tiny")}, target=str(tmp_path / "out"), to="zero", dp=4)
    )
    assert plan == other == plain
    assert plan.model_dump() == plain.model_dump()
    assert "drawn" not in str(PlanSummary.model_json_schema())
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert "<svg" in pickle.loads(pickle.dumps(plan))._repr_html_()
    assert "<svg" not in plain._repr_html_()


def test_without_the_checkpoint_the_table_stands_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(DATA / "zero2_tiny", source)
    found = reshard.inspect(source)
    assert "<svg" in found._repr_html_()
    shutil.rmtree(source)
    shown = _checked(found._repr_html_())
    assert "svg" not in shown.tags
    assert "deepspeed-zero2" in shown.words


def test_long_tables_are_cut_and_counted() -> None:
    report = reshard.diff(DATA / "zero2_tiny", DATA / "zero3_tiny", progress=False)
    one = report.differences[0] if report.differences else None
    assert one is not None, "the two runs differ"
    many = report.model_copy(update={"differences": (one,) * (MAX_ROWS + 7)})
    page = _checked(many._repr_html_())
    assert "... and 7 more" in page.words
    assert f"different: {MAX_ROWS + 7} tensors differ" in page.words
    assert DifferenceKind(one.kind).value in page.words


def test_a_failed_job_shows_its_error_and_the_fix() -> None:
    request = ConvertRequest.model_validate({"source": {"url": "/a"}, "target": "/b", "to": "universal"})
    problem = Problem(
        type="t", title="t", status=422, detail="no file", code="checkpoint.incomplete", fix="copy it again"
    )
    job = Job(
        id="job_1", state="FAILED", done=True, attempt=1, max_attempts=3, request=request, error=problem,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
    )  # fmt: skip
    words = _checked(job._repr_html_()).words
    assert "checkpoint.incomplete" in words
    assert "fix: copy it again" in words
    assert "job_1" in _checked(JobList(jobs=(job,))._repr_html_()).words


def test_what_stands_for_a_picture_compares_equal() -> None:
    assert Drawn() == Drawn(SourceSpec(url="/a"))
    assert hash(Drawn()) == hash(Drawn(SourceSpec(url="/a")))
    assert Drawn() != "picture"
