"""The drawing of layouts: well-formed, everything inside of it, names stay text, few rows for thousands of ranks."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from house.repository import ROOT
from reshard.cli.output import html_of, picture_lines
from reshard.draw.layout import MAX_ROWS, STYLE, Part, Side, flows, range_label, render, rows_of, shown_axes, side_of
from reshard.draw.marks import COLOURS
from reshard.local import load_engine
from reshard.models.reports import FileShare, LayoutPicture, Region, TensorPicture
from reshard.options import SourceSpec

DATA = ROOT / "tests" / "data"
SVG = "{http://www.w3.org/2000/svg}"
TAGS = {f"{SVG}{tag}" for tag in ("svg", "g", "path", "text", "rect", "title", "desc", "style")}
EVIL = {
    "markup": "</title></style><script>alert('x')</script>\"&]]>",
    "control": "a\x00b\x1b[31mc\x07\x9b",
    "lines": "a\nb\rc\u2028d",
    "surrogate": "a\udcffb",
    "noncharacter": "a\ufffeb\uffff",
    "direction": "a\u202eb",
}


def flat_run(dp: int, *, rows: int = 11_008, columns: int = 4_096, url: str = "s3://runs/a") -> LayoutPicture:
    """A ZeRO-3 run of `dp` ranks: one tensor in flat, nearly equal intervals, three rectangles at most for each."""
    names = [(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt", f"dp {r} tp 0 pp 0") for r in range(dp)]
    held = {"fp32": 4_000_000, "exp_avg": 4_000_000, "exp_avg_sq": 4_000_000}
    files = [FileShare(file=f, rank=r, size_bytes=12_009_000, bytes_by_state=held) for f, r in names]
    ends = [rows * columns * r // dp for r in range(dp + 1)]
    regions = [
        Region(file=names[r][0], rank=names[r][1], rows=band[:2], columns=band[2:])
        for r, (begin, end) in enumerate(pairwise(ends))
        for band in _bands(begin, end, columns)
    ]
    tensor = TensorPicture(
        fqn="layers.17.down_proj.weight",
        state="fp32",
        dtype="float32",
        shape=(rows, columns),
        cut="",
        regions=tuple(regions),
    )
    files.sort(key=lambda f: f.file)
    world = {"dp": dp, "tp": 1, "pp": 1}
    return LayoutPicture(url=url, format="deepspeed-zero3", world=world, files=tuple(files), tensors=(tensor,))


def _bands(begin: int, end: int, columns: int) -> list[tuple[int, int, int, int]]:
    found = []
    while begin < end:
        row, column = divmod(begin, columns)
        whole = (end - begin) // columns if column == 0 else 0
        stop = begin + whole * columns if whole else min(end, (row + 1) * columns)
        found.append((row, row + whole, 0, columns) if whole else (row, row + 1, column, column + stop - begin))
        begin = stop
    return found


def _texts(svg: str) -> list[str]:
    return [t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}text") if "rl-tip" not in t.attrib["class"]]


def _inside(svg: str) -> None:
    root = ET.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= width + 0.01
        assert float(box.attrib.get("y", 0)) + float(box.attrib["height"]) <= height + 0.01
    for words in root.iter(f"{SVG}text"):
        assert 0 <= float(words.attrib["x"]) <= width
        assert 0 < float(words.attrib["y"]) <= height


@pytest.mark.parametrize("width", [1_080, 390])
@pytest.mark.parametrize(("before", "after"), [(4, 3), (4_096, 96), (96, 4_096), (1, 4_096)])
def test_any_number_of_ranks_is_a_few_rows(before: int, after: int, width: int) -> None:
    source, target = flat_run(before), flat_run(after, url="s3://runs/b")
    started = time.process_time()
    svg = render(source, target, width=width)
    took = time.process_time() - started
    _inside(svg)
    assert len(svg) < 250_000
    assert took < 10
    texts = _texts(svg)
    for count in (before, after):
        shown = [t for t in texts if t.startswith(f"{count:,} ranks in ")]
        assert shown == ([f"{count:,} ranks in {-(-count // -(-count // MAX_ROWS))} rows"] if count > MAX_ROWS else [])
    assert sum(t.endswith(("iB", " B")) for t in texts) <= 2 * MAX_ROWS + 6
    # The whole tensor moves, and nothing twice.
    sides = [side_of(p.tensors[0], shown_axes(p)) for p in (source, target)]
    moved = flows(*sides)
    assert moved is not None
    assert sum(flow.elements for flow in moved) == 11_008 * 4_096
    assert len(sides[0].parts) <= 3 * MAX_ROWS


def test_flows_are_the_shared_intervals() -> None:
    """4 ranks to 3 ranks, by the arithmetic of flat partitions."""
    source, target = flat_run(4, rows=12, columns=5), flat_run(3, rows=12, columns=5)
    moved = flows(*(side_of(p.tensors[0], shown_axes(p)) for p in (source, target)))
    assert moved is not None
    told = {(f.source, f.target): f.elements for f in moved}
    wanted = {}
    for s in range(4):
        for t in range(3):
            both = min(15 * (s + 1), 20 * (t + 1)) - max(15 * s, 20 * t)
            if both > 0:
                wanted[s, t] = both
    assert told == wanted


def test_parts_of_one_group_are_joined() -> None:
    side = side_of(flat_run(4_096).tensors[0], frozenset({"dp"}))
    assert side.labels[:2] == ("dp 0-255", "dp 256-511")
    assert side.counted == "4,096 ranks in 16 groups"
    assert sum(part.elements for part in side.parts) == 11_008 * 4_096
    assert {part.group for part in side.parts} == set(range(16))


def test_too_many_parts_are_said_and_not_compared() -> None:
    stripes = Side(("a",), "1 rank", tuple(Part(0, (0, 9), (2 * c, 2 * c + 1)) for c in range(500)))
    assert flows(stripes, stripes) is None
    regions = [Region(file=f"f{c % 2}", rank="", rows=(0, 9), columns=(c, c + 1)) for c in range(1_000)]
    tensor = TensorPicture(fqn="w", state="fp32", dtype="float32", shape=(9, 1_000), cut="", regions=tuple(regions))
    files = tuple(FileShare(file=f, rank="", size_bytes=9, bytes_by_state={}) for f in ("f0", "f1"))
    picture = LayoutPicture(url="u", format="f", world={}, files=files, tensors=(tensor,))
    assert "It has too many parts to draw its movement." in _texts(render(picture, picture))


def test_real_checkpoints_side_by_side() -> None:
    source, target = (
        load_engine().picture(SourceSpec(url=str(DATA / name)), "embed.weight") for name in ("zero2_tiny", "zero3_tiny")
    )
    svg = render(source, target, "embed.weight/fp32")
    _inside(svg)
    texts = _texts(svg)
    assert texts.count("Source") == texts.count("Target") == 1
    assert {"given by 2 ranks", "float32 [29, 6], 696 B", "embed.weight/fp32"} <= set(texts)
    names = [g.attrib["aria-label"] for g in ET.fromstring(svg).iter(f"{SVG}g") if "tabindex" in g.attrib]
    # 23 of 29 rows lie on the first rank before, and 87 of 174 elements after.
    assert "87 elements: dp 0 to dp 0" in names
    assert "51 elements: dp 0 to dp 1" in names
    assert "36 elements: dp 1 to dp 1" in names
    assert "dp 0: 1 file, exp_avg 584 B, exp_avg_sq 584 B, fp32 584 B, other bytes 4.23 KiB" in names
    described = ET.fromstring(svg).find(f"{SVG}desc")
    assert described is not None
    assert "embed.weight/fp32 moves from 2 ranks to 2 ranks." in (described.text or "")


def test_states_that_lie_alike_are_drawn_once() -> None:
    texts = _texts(render(load_engine().picture(SourceSpec(url=str(DATA / "zero2_tiny")), "embed.weight")))
    assert [t for t in texts if t.startswith("embed.weight/")] == [
        "embed.weight/fp32, exp_avg, exp_avg_sq",
        "embed.weight/weight",
    ]


def test_rows_are_ranks_in_their_order_then_files() -> None:
    files = [
        FileShare(file=f"r{r}.pt", rank=f"dp {r} tp 0", size_bytes=10 + r, bytes_by_state={"fp32": 8})
        for r in range(12)
    ]
    files += [FileShare(file="config.json", rank="", size_bytes=5, bytes_by_state={})]
    picture = LayoutPicture(url="u", format="f", world={"dp": 12}, files=tuple(reversed(files)))
    rows = rows_of(picture)
    assert [row.label for row in rows] == [*(f"dp {r}" for r in range(12)), "config.json"]
    assert sum(row.size_bytes for row in rows) == sum(f.size_bytes for f in files)
    # Many files without a rank share a row by directory, or by number.
    atoms = [
        FileShare(file=f"zero/{p}.w/{s}.pt", rank="", size_bytes=4, bytes_by_state={s: 4})
        for p in range(99)
        for s in "ab"
    ]
    grouped = rows_of(LayoutPicture(url="u", format="f", world={}, files=tuple(atoms)))
    assert len(grouped) <= MAX_ROWS
    assert grouped[0].label == "zero/0-6.w/"
    assert grouped[0].bytes_by_state == {"a": 28, "b": 28}
    assert range_label(["model-00001-of-00004", "model-00002-of-00004"]) == "model-00001-00002-of-00004"


def test_bytes_that_tensors_share_stay_inside() -> None:
    files = tuple(
        FileShare(file=f"{i:05d}/" + "n" * 99, rank="", size_bytes=4, bytes_by_state={"a": 9}) for i in range(5000)
    )
    svg = render(LayoutPicture(url="u", format="f", world={}, files=files))
    _inside(svg)
    assert "5,000 files in 16 rows" in _texts(svg)


def _same_everywhere(text: str) -> LayoutPicture:
    region = Region(file=text, rank=text, rows=(0, 1), columns=(0, 1))
    tensor = TensorPicture(fqn=text, state=text, dtype="float32", shape=(1, 1), cut=text, regions=(region,))
    share = FileShare(file=text, rank=text, size_bytes=3, bytes_by_state={text: 3})
    return LayoutPicture(url=text, format=text, world={text: 1}, files=(share,), tensors=(tensor,))


@pytest.mark.parametrize("kind", EVIL)
def test_names_stay_text(kind: str) -> None:
    whole = _same_everywhere(EVIL[kind])
    for picture, beside in ((whole, None), (whole, whole), (whole.model_copy(update={"tensors": ()}), None)):
        svg = render(picture, beside)
        root = ET.fromstring(svg.encode())
        assert {e.tag for e in root.iter()} <= TAGS
        names = {name for e in root.iter() for name in e.attrib}
        assert not any(name.startswith("on") or "href" in name or name == "style" for name in names)
        assert [e.text for e in root.iter(f"{SVG}style")] == [STYLE]
        page = html_of(picture, beside)
        assert "<script" not in page
        assert page.count("</style>") == 2  # the page's and the picture's
        assert page.encode().count(b"<rect") == svg.count("<rect")
        assert all(line.isprintable() for line in picture_lines(picture))
        assert svg == render(picture.model_copy(deep=True), beside)


def test_the_picture_loads_nothing_and_may_do_without_styles() -> None:
    picture = flat_run(4)
    svg = render(picture, styled=False)
    assert "<style" not in svg
    assert "url(" not in render(picture)
    assert "http" not in render(picture).replace("http://www.w3.org/2000/svg", "")
    # Every colour of the light theme is an attribute, so that nothing is black on black without styles.
    for mark in ET.fromstring(svg).iter():
        if mark.tag in (f"{SVG}text", f"{SVG}rect", f"{SVG}path"):
            assert re.fullmatch(r"#[0-9A-Fa-f]{6}|none", mark.attrib["fill"])


def _luminance(colour: str) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_texts_and_outlines_can_be_told_from_the_paper() -> None:
    """WCAG 2.2: 4.5 for text, 3 for the outlines of what has a colour; in both themes."""
    from reshard.draw import marks

    for theme in (marks._LIGHT, marks._DARK):
        assert min(_contrast(theme["paper"], theme[ink]) for ink in ("ink", "muted")) >= 4.5
        assert _contrast(theme["paper"], theme["edge"]) >= 3
    assert min(_contrast(marks._DARK["paper"], colour) for colour in COLOURS) >= 3
