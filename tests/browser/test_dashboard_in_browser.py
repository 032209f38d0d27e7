"""The dashboard in a real browser: from the login to a converted checkpoint, errors, keyboard, accessibility.

`RESHARD_SCREENSHOTS=DIR pytest tests/browser` keeps a picture of each page, at each width and in each scheme.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from browser.conftest import TOKEN, Site
from house.repository import ROOT
from house.waiting import PATIENCE_S
from servers.stack import Stack

WIDTHS = {1280: 800, 390: 844}
SCHEMES = ("light", "dark")
SLOW_MS = 60_000
BACK_OF = """place => {
  for (let part = document.querySelector(place); part; part = part.parentElement) {
    const found = getComputedStyle(part).backgroundColor.match(/[\\d.]+/g).map(Number);
    if (found.length < 4 || found[3] > 0) return found.slice(0, 3);
  }
  return [255, 255, 255];
}"""
NAME_OF_THE_FOCUSED = "(document.activeElement.ariaLabel || document.activeElement.innerText || '').trim()"


@pytest.fixture(scope="module")
def browser(chromium: str) -> Generator[Browser]:
    with sync_playwright() as playwright:
        # Without its sandbox, because CI runs as root; it opens nothing but our own pages.
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@contextmanager
def opened(browser: Browser, site: Site) -> Iterator[Page]:
    """A page of a new profile; what it complains about fails the test."""
    context = browser.new_context(
        base_url=site.url, viewport={"width": 1280, "height": 800}, timezone_id="Asia/Tokyo", locale="en-GB"
    )
    page, said = context.new_page(), list[str]()
    page.set_default_timeout(SLOW_MS)
    expect.set_options(timeout=SLOW_MS)  # else 5 s
    page.on("console", lambda line: said.append(f"{line.text} {page.url}") if line.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: said.append(asked.url) if not _is_own(asked.url, site) else None)
    yield page
    context.close()
    refusals = re.compile(r"status of (401|403|404|409|422|429)")
    assert not [line for line in said if not refusals.search(line)]


def _is_own(url: str, site: Site) -> bool:
    return url.startswith((f"{site.url}/", "data:", "blob:")) or url == "about:blank"


def log_in(page: Page) -> None:
    page.goto("/")
    page.get_by_label("Token of the service").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()


def checkpoint(site: Site, name: str) -> Path:
    place = site.root / name
    shutil.copytree(ROOT / "tests" / "data" / "zero2_tiny", place)
    return place


def plan(page: Page, source: Path, target: Path, **fields: str) -> None:
    """From the page of submissions to the plan."""
    page.goto("/submit")
    page.get_by_label("Checkpoint").fill(str(source))
    page.get_by_role("button", name="Inspect").click()
    page.get_by_role("radio", name=re.compile("^DeepSpeed, for")).check()
    page.get_by_label("Target", exact=True).fill(str(target))
    for name, value in fields.items():
        page.locator(f"[name={name}]:visible").fill(value)
    # Small units, so that there is something to watch.
    page.get_by_text("More options").click()
    page.get_by_label("Other fields, as JSON").fill('{"part_bytes": 1024, "threads": 1}')
    page.get_by_role("button", name="See the plan").click()


def state_of(page: Page) -> str:
    return page.locator("#state").inner_text().strip()


def test_from_the_login_to_a_converted_checkpoint(browser: Browser, site: Site) -> None:
    source = checkpoint(site, "run1")
    with opened(browser, site) as page:
        page.goto("/submit")
        page.get_by_label("Token of the service").fill("wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_have_text("The token is not valid.")
        page.get_by_label("Token of the service").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", name="Submit a job")).to_be_visible()  # where it wanted to go

        page.get_by_label("Checkpoint").fill(str(site.root / "nothing"))
        page.get_by_role("button", name="Inspect").click()
        expect(page.locator(".problem")).to_contain_text("source.not_found")

        plan(page, source, site.root / "run1_dp4", dp="4")
        # The layout of ranks is shown for `zero` alone.
        expect(page.get_by_label("Data-parallel ranks")).to_be_visible()
        page.get_by_role("radio", name=re.compile("^DeepSpeed universal")).check()
        expect(page.get_by_label("Data-parallel ranks")).to_be_hidden()
        expect(page.locator(".choices")).to_contain_text("not possible")
        tiles = page.locator("#plan .tiles")
        for name in ("Read", "Write", "Peak memory", "Time"):
            expect(tiles).to_contain_text(name)
        picture = page.locator("#picture svg:visible")
        expect(picture).to_contain_text("Source")
        expect(picture).to_contain_text("Target")
        expect(picture).to_contain_text("dp 3")  # a rank that the source does not have

        page.get_by_role("button", name="Submit this job").click()
        page.wait_for_url(re.compile("/jobs/job_"))
        page.evaluate("window.notReloaded = true")
        seen: list[int] = []
        while state_of(page) not in ("Succeeded", "Failed"):
            value = page.evaluate("document.querySelector('#run progress')?.value ?? null")
            if value is not None and (not seen or int(value) != seen[-1]):
                seen.append(int(value))
            page.wait_for_timeout(50)
        assert state_of(page) == "Succeeded"
        assert len(seen) >= 3, seen  # it moved while it was watched
        assert seen == sorted(seen)
        assert page.evaluate("window.notReloaded") is True
        expect(page.locator("#outcome")).to_contain_text("Written")
        expect(page.locator("#workers")).to_contain_text("KiB")  # its only worker wrote all
        expect(page.locator("svg.chart")).to_be_visible()
        expect(page.locator("#picture svg:visible")).to_contain_text("Target")
        expect(page.locator("#phases, .phases")).to_contain_text("Checking")
        created = page.locator("#facts time").first
        assert created.inner_text() != created.get_attribute("datetime")
        assert re.search(r"\d\d:\d\d:\d\d", created.get_attribute("title") or "")


def test_an_error_its_fix_a_retry_and_a_cancel(browser: Browser, site: Site) -> None:
    source, target = checkpoint(site, "run2"), site.root / "run2_dp3"
    target.mkdir()
    (target / "of somebody else").write_text("x")
    with opened(browser, site) as page:
        log_in(page)
        plan(page, source, target, dp="3")
        page.get_by_role("button", name="Submit this job").click()
        expect(page.locator("#state")).to_have_text("Failed", timeout=SLOW_MS)
        problem = page.locator("#what-happened .problem")
        expect(problem).to_contain_text("request.target_exists")
        expect(problem).to_contain_text("What to do")
        shutil.rmtree(target)
        page.get_by_role("button", name="Retry").click()
        expect(page.locator("#run progress")).not_to_have_attribute("value", "0", timeout=SLOW_MS)
        page.locator("#cancel-open").click()
        page.get_by_role("button", name="Cancel this job").click()
        expect(page.locator("#state")).to_have_text("Cancelled", timeout=SLOW_MS)
        assert not target.exists()
        page.get_by_role("link", name="Submit again").click()
        expect(page.get_by_label("Target", exact=True)).to_have_value(str(target))
        expect(page.locator("[name=dp]")).to_have_value("3")
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Token of the service")).to_be_visible()
        page.go_back()
        expect(page.get_by_label("Token of the service")).to_be_visible()


def test_the_list_follows_jobs_of_others(browser: Browser, site: Site) -> None:
    source = checkpoint(site, "run3")
    with opened(browser, site) as page:
        log_in(page)
        page.evaluate("window.notReloaded = true")
        page.get_by_label("Label").focus()
        body = {"source": {"url": str(source)}, "target": f"{site.root}/run3_universal", "to": "universal"}
        asked = httpx.post(f"{site.url}/v1/jobs", json=body, headers={"Authorization": f"Bearer {TOKEN}"})
        row = page.locator(f"#row-{asked.json()['id']}")
        expect(row).to_be_visible(timeout=SLOW_MS)
        expect(row).to_contain_text("Succeeded", timeout=2 * SLOW_MS)
        assert page.evaluate("window.notReloaded") is True
        expect(page.get_by_label("Label")).to_be_focused()


@pytest.mark.parametrize(
    "views",
    [
        pytest.param([(1280, "light"), (390, "dark")], id="two"),
        pytest.param([(w, s) for w in WIDTHS for s in SCHEMES], id="all", marks=pytest.mark.full),
    ],
)
def test_every_page_by_width_and_scheme(browser: Browser, site: Site, views: list[tuple[int, str]]) -> None:
    run = f"run-seen-{len(views)}"
    source = checkpoint(site, run)
    head = {"Authorization": f"Bearer {TOKEN}"}
    body = {"source": {"url": str(source)}, "target": f"{site.root}/{run}_dp4", "to": "zero"}
    wanted = {**body, "layout": {"dp": 4}, "part_bytes": 1024, "labels": {"team": "research"}}
    done, failed = (
        httpx.post(f"{site.url}/v1/jobs?", json=asked, headers={**head, "Prefer": "wait=30"}, timeout=PATIENCE_S).json()
        for asked in (wanted, {**wanted, "layout": {"dp": 3}})
    )
    assert (done["state"], failed["state"]) == ("SUCCEEDED", "FAILED")
    query = f"source={source}&to=zero&dp=8&target={site.root}/{run}_dp8&plan=1"
    pages = {
        "jobs": "/",
        "job": f"/jobs/{done['id']}",
        "job-failed": f"/jobs/{failed['id']}",
        "submit-empty": "/submit",
        "submit": f"/submit?{query}",
        "layout": f"/jobs/{done['id']}/layout",
        "workers": "/workers",
        "submit-wrong": f"/submit?source={source}&to=zero&dp=0&memory_limit=lots&target={source}/in&plan=1",
        "source-wrong": f"/submit?source={site.root}/nothing",
        "list-sorted": "/?search=run&sort=-duration",
        "not-found": "/jobs/job_nothing",
        "no-page": "/nothing",
        "docs": "/docs",
    }
    with opened(browser, site) as page:
        page.goto("/login")
        _examine(page, "login", views)
        log_in(page)
        for name, path in pages.items():
            page.goto(path)
            if name in ("job", "submit"):
                expect(page.locator("#picture svg:visible").first).to_be_visible()
            if name == "docs":
                expect(page.locator("#reference")).to_contain_text("/v1/jobs")
                page.locator("#reference .opblock-summary-control").nth(3).click()
                expect(page.locator("#reference .opblock-body")).to_be_visible()
            _examine(page, name, views)


def test_the_form_shows_what_the_choice_needs_and_suggests_a_target(browser: Browser, site: Site) -> None:
    source = checkpoint(site, "run6")
    with opened(browser, site) as page:
        log_in(page)
        page.goto(f"/submit?source={source}")
        target = page.get_by_label("Target", exact=True)
        expect(target).to_have_value(f"{site.root}/run6_global_step3_converted")
        expect(page.get_by_label("Framework that loads it")).to_be_hidden()
        page.get_by_role("radio", name="FSDP and torchtitan (DCP)").check()
        expect(page.get_by_label("Framework that loads it")).to_be_visible()
        expect(page.get_by_label("Data-parallel ranks")).to_be_hidden()
        expect(target).to_have_value(f"{site.root}/run6_global_step3_fsdp")
        page.get_by_role("radio", name=re.compile("^DeepSpeed, for")).check()
        page.get_by_label("Data-parallel ranks").fill("4")
        page.get_by_label("Pipeline stages").fill("2")
        expect(page.locator("#gpus")).to_have_text("For a run on 8 GPUs.")
        expect(target).to_have_value(f"{site.root}/run6_8gpus/global_step3")
        target.fill("/elsewhere/mine")
        page.get_by_role("radio", name="Weights (pytorch_model.bin)").check()
        expect(target).to_have_value("/elsewhere/mine")
        page.get_by_role("button", name="See the plan").click()
        wrong = page.locator("#target-error")
        expect(wrong).to_contain_text("outside the storage")
        expect(wrong).to_be_in_viewport()
        box, field = wrong.bounding_box(), target.bounding_box()
        assert box is not None
        assert field is not None
        assert 0 < box["y"] - field["y"] < 150, (box, field)
        expect(target).to_have_value("/elsewhere/mine")
        # A wrong field is seen, even if the choice does not need it.
        page.goto(f"/submit?source={source}&to=universal&dp=many&target={site.root}/run6_new&plan=1")
        expect(page.locator("#dp-error")).to_be_visible()


def test_colours_of_states_mean_something(browser: Browser, site: Site) -> None:
    with opened(browser, site) as page:
        log_in(page)
        page.goto("/workers")
        idle = page.locator(".state", has_text="Idle").first
        expect(idle).to_be_visible(timeout=2 * SLOW_MS)
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            shades = re.findall(r"\d+", idle.evaluate("element => getComputedStyle(element).backgroundColor"))[:3]
            # Grey: no colour stands out, least of all the amber of warnings.
            assert max(map(int, shades)) - min(map(int, shades)) <= 16, (scheme, shades)


def test_the_list_is_sorted_and_searched_and_tells_the_zone(browser: Browser, site: Site) -> None:
    source = checkpoint(site, "run7")
    head = {"Authorization": f"Bearer {TOKEN}", "Prefer": "wait=30"}
    for to in ("universal", "torch"):
        body = {"source": {"url": str(source)}, "target": f"{site.root}/run7_{to}", "to": to}
        httpx.post(f"{site.url}/v1/jobs", json=body, headers=head, timeout=PATIENCE_S)
    with opened(browser, site) as page:
        log_in(page)
        page.get_by_label("Search").fill("RUN7")
        page.get_by_role("button", name="Find").click()
        expect(page.locator("#total")).to_have_text("2 jobs")
        page.get_by_role("link", name="Target").click()
        expect(page.locator("[aria-sort=ascending]")).to_contain_text("Target")
        rows = page.locator(".job-what")
        expect(rows.first).to_contain_text("run7_torch")
        expect(rows.last).to_contain_text("run7_universal")
        assert re.search(r"GMT\+9|JST", page.locator(".job-when").first.inner_text())
        expect(page.locator("#zone")).to_have_text("Asia/Tokyo (GMT+09:00)")
        # The columns become links in one line, and nothing leaves the window.
        page.set_viewport_size({"width": 390, "height": 844})
        expect(page.get_by_role("link", name="Duration")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        footer = page.locator("footer").bounding_box()
        assert footer is not None
        assert footer["x"] + footer["width"] <= 390


def test_the_reference_is_dark_where_the_rest_is_and_works_below_a_path(browser: Browser, tmp_path: Path) -> None:
    extra = {"RESHARD_TOKEN": TOKEN, "RESHARD_ROOT_PATH": "/tools"}
    stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", extra=extra)
    with stack.api() as url, opened(browser, Site(url, tmp_path)) as page:
        page.goto("/tools/login")
        page.get_by_label("Token of the service").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("link", name="API", exact=True).click()
        page.wait_for_url("**/tools/docs")
        expect(page.locator("#reference")).to_contain_text("/v1/jobs")
        for scheme, wanted in (("light", "light"), ("dark", "dark"), ("light", "light")):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            for place in ("body", "#reference", "#reference .swagger-ui"):
                shades = page.evaluate(BACK_OF, place)
                assert ("light" if sum(shades) > 600 else "dark") == wanted, (place, scheme, shades)


def test_the_keyboard_reaches_everything_and_the_pictures_name_their_parts(browser: Browser, site: Site) -> None:
    source = checkpoint(site, "run5")
    with opened(browser, site) as page:
        log_in(page)
        page.goto(f"/submit?source={source}&to=zero&dp=4&target={site.root}/run5_dp4&plan=1")
        expect(page.locator("#picture svg:visible")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        names: list[str] = []
        for _ in range(150):
            page.keyboard.press("Tab")
            names.append(page.evaluate(NAME_OF_THE_FOCUSED))
            if "Submit this job" in names and any("elements" in name for name in names):
                break
        assert "Submit this job" in names
        assert any(re.search(r"dp \d.*fp32", name) for name in names), names[-20:]
        part = page.locator("#picture svg:visible .rl-part[tabindex]").first
        part.focus()
        expect(part.locator(".rl-tip")).to_be_visible()


def _examine(page: Page, name: str, views: list[tuple[int, str]]) -> None:
    """No page is wider than its window, and axe-core finds nothing in it."""
    kept = os.environ.get("RESHARD_SCREENSHOTS")
    found: list[str] = []
    for width, scheme in views:
        page.set_viewport_size({"width": width, "height": WIDTHS[width]})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        page.wait_for_timeout(60)
        if kept:
            page.screenshot(path=f"{kept}/{name}-{width}-{scheme}.png", full_page=True)
        over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        if over > 0:
            found.append(f"{name} {width}: {over} pixels too wide")
        found += [f"{name} {width} {scheme}: {line}" for line in _axe(page)]
    page.set_viewport_size({"width": 1280, "height": 800})
    assert not found, "\n".join(found)


def _axe(page: Page) -> Iterator[str]:
    spec = find_spec("axe_playwright_python")
    assert spec is not None
    assert spec.origin is not None
    page.evaluate((Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    answer = page.evaluate("axe.run({include: [['html']]}, {resultTypes: ['violations']})")
    for violation in answer["violations"]:
        nodes = "; ".join(f"{n['html'][:160]} {n.get('failureSummary', '')[:300]}" for n in violation["nodes"][:3])
        yield f"{violation['id']}: {violation['help']}: {nodes}"
