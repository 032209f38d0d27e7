"""The dashboard without a browser: who may see and do what, where forms may come from, what pages let through."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Generator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from house.expected import some
from house.repository import ROOT
from house.waiting import PATIENCE_S
from servers.scripted import scripted
from servers.stack import Stack

OPERATOR = "the token of the operator"
HTML = {"Accept": "text/html"}


class Service:
    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self._count = 0

    def ask(self, method: str, path: str, token: str = OPERATOR, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}", **more.pop("headers", {})}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=PATIENCE_S, verify=False, **more)

    def token(self, *scopes: str, tenant: str | None = None) -> str:
        body = {"name": "test", "scopes": scopes, **({"tenant": tenant} if tenant else {})}
        answer = self.ask("POST", "/v1/tokens", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["secret"]

    def target(self) -> str:
        self._count += 1
        return f"{self.directory}/out{self._count}"

    def job(self, token: str = OPERATOR, **more: Any) -> str:
        body = {"source": {"url": scripted(units=3)}, "target": self.target(), "to": "universal", **more}
        answer = self.ask("POST", "/v1/jobs", token, json=body)
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def browser(self, token: str = OPERATOR) -> Browser:
        browser = Browser(self.url)
        assert browser.client.post("/login", data={"token": token}).status_code == 303
        return browser


class Client:
    """An HTTP client that keeps cookies, but no connections."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._cookies = httpx.Cookies()

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        with httpx.Client(
            base_url=self._url, headers=HTML, verify=False, cookies=self._cookies, timeout=PATIENCE_S
        ) as client:
            answer = client.request(method, path, **more)
            self._cookies = client.cookies
            return answer

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self.request("POST", path, **more)


class Browser:
    """Sends forms as a browser does."""

    def __init__(self, url: str) -> None:
        self.origin = url
        self.client = Client(url)

    def page(self, path: str, status: int = 200) -> str:
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"].startswith("text/html")
        return answer.text

    def form_token(self) -> str:
        return _token_in(self.page("/docs"))

    def send(self, path: str, fields: dict[str, str] | None = None, **headers: str) -> httpx.Response:
        data = {"form_token": self.form_token(), **(fields or {})}
        return self.client.post(path, data=data, headers=headers or {"Sec-Fetch-Site": "same-origin"})


def _token_in(page: str) -> str:
    found = some(re.search(r'name="form_token" value="([0-9a-f]{64})"', page))
    return found[1]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    directory = tmp_path_factory.mktemp("dashboard")
    stack = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db", extra={"RESHARD_TOKEN": OPERATOR})
    with stack.api() as url:
        found = Service(url, directory)
        for tenant in ("team-a", "team-b"):
            assert found.ask("POST", "/v1/tenants", json={"name": tenant}).status_code == 201
        yield found


def test_a_login_leads_to_the_page_that_was_asked_for_and_to_no_other_host(service: Service) -> None:
    with httpx.Client(base_url=service.url, headers=HTML) as browser:
        asked = browser.get("/?state=failed")
        assert (asked.status_code, asked.headers["location"]) == (303, "/login?next=/%3Fstate%3Dfailed")
        assert 'value="/?state=failed"' in browser.get(asked.headers["location"]).text
        for place, leads in (
            ("/?state=failed", "/?state=failed"),
            ("/jobs/job_x", "/jobs/job_x"),
            ("https://evil.example/", "/"),
            ("//evil.example/", "/"),
            ("/\\evil.example/", "/"),
            ("/\t/evil.example", "/"),
            ("/v1/jobs", "/"),
            ("/logout", "/"),
            ("javascript:alert(1)", "/"),
        ):
            answer = browser.post("/login", data={"token": OPERATOR, "next": place})
            assert (answer.status_code, answer.headers["location"]) == (303, leads), place


def test_a_link_of_another_site_finds_the_login_that_is_there(service: Service) -> None:
    """A strict cookie is not sent after a click on another site, so that our own page must ask again."""
    with httpx.Client(base_url=service.url, headers=HTML) as browser:
        address = browser.get("/jobs/job_x", headers={"Sec-Fetch-Site": "cross-site"}).headers["location"]
        page = browser.get(address, headers={"Sec-Fetch-Site": "cross-site"}).text
        assert 'content="0;url=/jobs/job_x"' in page
        assert "password" not in page
        assert "password" in browser.get(address, headers={"Sec-Fetch-Site": "same-origin"}).text


def test_a_login_from_another_site_is_refused(service: Service) -> None:
    """Otherwise a page could log its visitor in as somebody else, who would then see what the visitor submits."""
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        answer = httpx.post(f"{service.url}/login", data={"token": OPERATOR}, headers=headers)
        assert answer.status_code == 403, headers
        assert "set-cookie" not in answer.headers


def test_the_cookie_and_the_headers_of_pages_are_strict(service: Service) -> None:
    browser = service.browser()
    answer = browser.client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "form-action 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["cache-control"] == "no-store"
    for page in ("/", "/submit", "/workers", "/docs", "/login"):
        text = browser.page(page)
        assert not re.search(r"<style|style=|<script(?! src=\"/static/)|\son\w+=|https?://(?!www\.w3\.org)", text), page
    for address in re.findall(r'(?:href|src)="(/static/[^"]+)"', browser.page("/docs")):
        file = httpx.get(f"{service.url}{address}")  # without the cookie: the page of the login needs them
        assert file.status_code == 200
        assert "immutable" in file.headers["cache-control"]
    assert httpx.get(f"{service.url}/static/..%2Frendering.py").status_code == 404


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": "OWN"}, True),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "OWN"}, True),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "OWN"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://["}, False),
        ({"Referer": "http://127.0.0.1/"}, False),
    ],
)
def test_a_form_must_come_from_a_page_of_the_service(service: Service, headers: dict[str, str], passes: bool) -> None:
    browser, job = service.browser(), service.job()
    sent = {name: browser.origin if value == "OWN" else value for name, value in headers.items()}
    answer = browser.send(f"/jobs/{job}/cancel", **sent)
    assert answer.status_code == (303 if passes else 403)
    assert service.ask("GET", f"/v1/jobs/{job}").json()["state"] == ("CANCELLED" if passes else "QUEUED")


def test_a_form_needs_the_token_of_its_own_login(service: Service) -> None:
    browser, other, job = service.browser(), service.browser(service.token("read", "cancel")), service.job()
    own = {"Sec-Fetch-Site": "same-origin", "Origin": browser.origin}
    for fields in ({}, {"form_token": ""}, {"form_token": "0" * 64}, {"form_token": other.form_token()}):
        for path in (f"/jobs/{job}/cancel", f"/jobs/{job}/retry", "/submit", "/logout"):
            answer = browser.client.post(path, data=fields, headers=own)
            assert answer.status_code == 403, (path, fields)
            assert "request.forbidden" in answer.text
    assert service.ask("GET", f"/v1/jobs/{job}").json()["state"] == "QUEUED"
    assert browser.page("/")  # it is still logged in


def test_the_cookie_changes_nothing_but_by_forms(service: Service) -> None:
    browser, job = service.browser(), service.job()
    own = {"Sec-Fetch-Site": "same-origin", "Origin": browser.origin}
    fields = {"form_token": browser.form_token()}
    for method, path in (
        ("POST", f"/v1/jobs/{job}/cancel"),
        ("POST", "/v1/jobs"),
        ("POST", "/v1/tokens"),
        ("PUT", "/v1/jobs/mine"),
        ("DELETE", "/v1/tenants/team-a"),
        ("POST", f"/jobs/{job}/cancel/../../../v1/jobs/{job}/cancel"),
    ):
        answer = browser.client.request(method, path, data=fields, headers=own)
        assert answer.status_code in (401, 404, 405), (method, path)
    assert service.ask("GET", f"/v1/jobs/{job}").json()["state"] == "QUEUED"


def test_no_page_shows_or_touches_a_job_of_another_tenant(service: Service) -> None:
    secrets = {team: service.token("submit", "read", "cancel", tenant=team) for team in ("team-a", "team-b")}
    theirs = service.job(secrets["team-b"], labels={"whose": "of-team-b"})
    names = (
        theirs,
        "of-team-b",
        service.ask("GET", f"/v1/jobs/{theirs}", secrets["team-b"]).json()["request"]["target"],
    )
    for browser in (service.browser(secrets["team-a"]), service.browser()):
        never = f"/jobs/job_{'a' * 24}"
        for path in ("/", "/?label=whose%3Dof-team-b", "/workers", "/submit?source=/scripted/x"):
            text = browser.page(path)
            assert not any(name in text.replace('value="whose=of-team-b"', "") for name in names), path
        for way in ("", "/layout"):
            refused, unknown = browser.page(f"/jobs/{theirs}{way}", 404), browser.page(f"{never}{way}", 404)
            # What belongs to another tenant is answered as what does not exist.
            assert refused.replace(theirs, "ID") == unknown.replace(never.rpartition("/")[2], "ID")
        assert browser.page(f"/submit?clone={theirs}", 404)
        for way in ("cancel", "retry"):
            assert browser.send(f"/jobs/{theirs}/{way}").status_code == 404
    mine = service.browser(secrets["team-b"])
    assert theirs in mine.page("/")
    assert theirs in mine.page(f"/jobs/{theirs}")
    assert service.ask("GET", f"/v1/jobs/{theirs}", secrets["team-b"]).json()["state"] == "QUEUED"


def test_pages_do_and_offer_what_the_scopes_allow(service: Service) -> None:
    job = service.job()
    with_scopes = {scope: service.browser(service.token(scope)) for scope in ("read", "submit", "cancel")}
    for scope, browser in with_scopes.items():
        status = 200 if scope == "read" else 403
        for path in ("/", f"/jobs/{job}", "/workers"):
            assert ("request.forbidden" in browser.page(path, status)) == (scope != "read"), path
        assert browser.client.get("/submit").status_code == (200 if scope == "submit" else 403)
        assert browser.send(f"/jobs/{job}/retry").status_code == (409 if scope == "submit" else 403)
    shown = with_scopes["read"].page(f"/jobs/{job}")
    assert 'id="cancel"' not in shown
    assert 'id="clone"' not in shown
    assert "Submit a job" not in with_scopes["read"].page("/")
    assert 'id="cancel"' in service.browser(service.token("read", "cancel")).page(f"/jobs/{job}")
    submitted = with_scopes["submit"].send(
        "/submit", {"source": scripted(), "target": service.target(), "to": "universal", "key": "k1"}
    )
    assert submitted.status_code == 200  # it may not read the job
    assert "Submitted" in submitted.text
    assert with_scopes["submit"].client.get(f"/submit?clone={job}").status_code == 403
    assert with_scopes["cancel"].send(f"/jobs/{job}/cancel").status_code == 303


def words_of(page: str) -> str:
    """The text that a reader of a page sees, without values of fields."""
    return unescape(re.sub(r"<(?:script|style).*?</(?:script|style)>|<[^>]*>", " ", page, flags=re.DOTALL))


FLAG = re.compile(r"(?<![\w-])--[a-z]")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    """A service whose inspections read real checkpoints; no worker."""
    directory = tmp_path_factory.mktemp("real")
    shutil.copytree(ROOT / "tests" / "data" / "zero2_tiny", directory / "runs" / "run1")
    extra = {"RESHARD_TOKEN": OPERATOR, "RESHARD_ROOTS": f"{directory}/runs,{directory}/out"}
    stack = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db", scripted=False, extra=extra)
    with stack.api() as url:
        yield Service(url, directory)


def test_targets_and_fields_have_names_for_people(real: Service) -> None:
    page = real.browser().page(f"/submit?source={real.directory}/runs/run1")
    shown = words_of(page)
    for name in ("DeepSpeed, for N GPUs", "FSDP and torchtitan (DCP)", "Weights (safetensors", "DeepSpeed ZeRO-2"):
        assert name in shown, name
    assert not FLAG.search(shown), FLAG.findall(shown)
    assert not re.search(r"<strong>(?:zero|dcp|universal|torch)</strong>", page)
    for name, label in (("tp", "Tensor-parallel ranks"), ("memory_limit", "Memory limit"), ("framework", "Framework")):
        assert re.search(rf'<label for="{name}">{label}', page), name
    for place in ("tp", "pp"):
        assert re.search(rf'id="{place}"[^>]* placeholder="1: no', page), place
    # Fields of distributed checkpoints are asked for where there is one.
    assert 'id="model_key"' not in page


def test_a_target_is_suggested_outside_of_the_run(real: Service) -> None:
    runs = f"{real.directory}/runs"
    for source, to, wanted in (
        (f"{runs}/run1", "", f"{runs}/run1_global_step3_converted"),
        (f"{runs}/run1/global_step3", "universal", f"{runs}/run1_universal/global_step3"),
        (f"{runs}/run1", "dcp", f"{runs}/run1_global_step3_fsdp"),
    ):
        page = real.browser().page(f"/submit?source={source}&to={to}")
        target = some(re.search(r'id="target" [^>]*value="([^"]*)"', page))
        assert unescape(target[1]) == wanted
        assert "readonly" not in target[0]
    kept = real.browser().page(f"/submit?source={runs}/run1&to=dcp&target={runs}/mine")
    assert f'value="{runs}/mine"' in kept


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        ({"to": "zero"}, "dp", "Data-parallel ranks"),
        ({"to": "zero", "dp": "0"}, "dp", "is below 1"),
        ({"to": "zero", "dp": "2", "memory_limit": "lots"}, "memory_limit", "is not a size"),
        ({"to": "universal", "labels": "team"}, "labels", "no `=`"),
        ({"to": "universal", "more": "[1]"}, "more", "not a JSON object"),
        ({"to": "universal", "target": "RUN/global_step3/inside"}, "target", "inside"),
        ({"to": "universal", "target": "/elsewhere/x"}, "target", "outside the storage"),
        ({"to": "zero", "dp": "2", "tp": "2"}, "family", "how tensor parallelism cuts"),
    ],
)
def test_errors_stand_at_their_field_without_flags(
    real: Service, fields: dict[str, str], field: str, told: str
) -> None:
    run = f"{real.directory}/runs/run1"
    given = {"source": run, "target": f"{real.directory}/out/new", **fields}
    given["target"] = given["target"].replace("RUN", run)
    browser = real.browser()
    seen = {"GET": browser.page(f"/submit?{urlencode({**given, 'plan': '1'})}")}
    posted = browser.send("/submit", given)
    if posted.status_code >= 400:  # what takes a plan to see is admitted or refused by the job
        seen["POST"] = posted.text
    for page in seen.values():
        assert re.search(rf'id="{field}"[^>]* aria-invalid="true"', page), words_of(page)
        at_field = some(re.search(rf'id="{field}-error">(.*?)</div></div>', page, re.DOTALL))
        assert told in words_of(at_field[1]), words_of(at_field[1])
        assert not FLAG.search(words_of(page))
        assert f'value="{given["target"]}"' in page  # nothing that was written is lost


def test_an_unreadable_source_is_told_at_its_field(real: Service) -> None:
    page = real.browser().page(f"/submit?source={real.directory}/runs/nothing")
    at_field = some(re.search(r'id="source-error">(.*?)</div></div>', page, re.DOTALL))
    assert "source.not_found" in at_field[1]
    # The fields of the target are not there, so that their errors cannot hide the one of the source.
    refused = real.browser().send("/submit", {"source": "", "to": "zero", "dp": "0", "target": "/x"})
    assert refused.status_code == 422
    assert 'id="source-error"' in refused.text


def test_the_form_names_the_newest_complete_checkpoint_of_a_run(real: Service) -> None:
    run = real.directory / "runs" / "without-latest"
    shutil.copytree(real.directory / "runs" / "run1" / "global_step3", run / "global_step3")
    shutil.copytree(run / "global_step3", run / "global_step9")
    next((run / "global_step9").glob("*_1_*")).unlink()
    page = real.browser().page(f"/submit?source={run}")
    assert f'value="{run}/global_step3"' in page
    assert "its newest complete checkpoint is global_step3 (not complete: global_step9" in words_of(page)
    fields = {"source": str(run), "to": "universal", "target": f"{real.directory}/out/u"}
    refused = real.browser().send("/submit", fields)
    assert refused.status_code == 422
    assert f"{run}/global_step3" in words_of(refused.text)


def test_a_wrong_address_is_a_page_for_people_and_json_for_programs(service: Service) -> None:
    browser = service.browser()
    for path in ("/nothing", "/jobs/a/b/c", "/submit/nothing", "/jobs/job_nothing", "/static/nothing.css"):
        page = browser.page(path, 404) if path != "/static/nothing.css" else browser.client.get("/nothing").text
        assert "This page does not exist" in page, path
        assert re.search(r'<a class="button main" href="/">All jobs</a>', page), path
    for path in ("/nothing", "/jobs/a/b/c"):
        for accept in ("application/json", "*/*"):
            answer = service.ask("GET", path, headers={"Accept": accept})
            assert (answer.status_code, answer.json()["code"]) == (404, "request.not_found"), (path, accept)
    assert browser.client.get("/v1/jobs/job_nothing").headers["content-type"] == "application/problem+json"
    assert browser.client.post("/nothing").status_code == 401  # the cookie is for pages and their forms
    unknown = httpx.get(f"{service.url}/nothing", headers=HTML)
    assert (unknown.status_code, unknown.headers["location"]) == (303, "/login?next=/nothing")
    assert httpx.get(f"{service.url}/nothing").status_code == 401


def test_pages_work_below_a_path(tmp_path: Path) -> None:
    """The proxy takes the path off, or leaves it on."""
    extra = {"RESHARD_TOKEN": OPERATOR, "RESHARD_ROOT_PATH": "/tools/reshard"}
    with Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", extra=extra).api() as url:
        job = Service(url, tmp_path).job()
        for seen in ("/tools/reshard", ""):
            browser = Browser(url)
            asked = browser.client.get(f"{seen}/submit")
            assert asked.headers["location"] == "/tools/reshard/login?next=/submit"
            entered = browser.client.post(f"{seen}/login", data={"token": OPERATOR, "next": "/submit"})
            assert entered.headers["location"] == "/tools/reshard/submit"
            for path in ("/", "/submit", "/workers", "/docs", f"/jobs/{job}", "/nothing"):
                page = browser.client.get(f"{seen}{path}").text
                places = re.findall(r'\b(?:href|src|action|data-load|data-watch|data-document)="(/[^"]*)"', page)
                assert len(places) > 5, path
                assert [p for p in places if not p.startswith("/tools/reshard/")] == [], path
            token = _token_in(browser.page(f"{seen}/docs"))
            own = {"Sec-Fetch-Site": "same-origin"}
            left = browser.client.post(f"{seen}/logout", data={"form_token": token}, headers=own)
            assert left.headers["location"] == "/tools/reshard/login"
        document = httpx.get(f"{url}/openapi.json").json()
        assert document["servers"] == [{"url": "/tools/reshard"}]
        asked = {"source": scripted(), "target": str(tmp_path / "again"), "to": "universal"}
        told = httpx.post(f"{url}/v1/jobs", json=asked, headers={"Authorization": f"Bearer {OPERATOR}"})
        assert told.headers["location"] == f"/tools/reshard/v1/jobs/{told.json()['id']}"


def test_a_form_that_is_sent_twice_makes_one_job(service: Service) -> None:
    browser = service.browser()
    fields = {"source": scripted(), "target": service.target(), "to": "universal", "key": "twice", "labels": "a=1, b=2"}
    first, second = browser.send("/submit", fields), browser.send("/submit", fields)
    assert first.status_code == second.status_code == 303
    assert first.headers["location"] == second.headers["location"]
    job = service.ask("GET", f"/v1{first.headers['location']}").json()
    assert job["labels"] == {"a": "1", "b": "2"}


def test_a_clone_asks_for_the_same_job(service: Service) -> None:
    asked = {
        "to": "zero",
        "dtype": "bf16",
        "overwrite": True,
        "threads": 3,
        "verify": "full",
        "layout": {"dp": 6, "tp": 2},
        "rng": "drop",
        "options": {"deepspeed": {"zero_stage": "1"}},
        "labels": {"team": "x"},
        "priority": 5,
        "max_workers": 2,
    }
    job, browser = service.job(**asked), service.browser()
    page = browser.page(f"/submit?clone={job}")
    hidden = dict(re.findall(r'<input[^>]* name="(\w+)"[^>]* value="([^"]*)"', page))
    rest = re.search(r'<textarea[^>]*name="more"[^>]*>(.*?)</textarea>', page, re.DOTALL)
    chosen = re.findall(r'<select[^>]*name="(\w+)".*?</select>', page, re.DOTALL)
    assert {"dtype", "zero_stage", "verify"} <= set(chosen)
    fields = {**{n: unescape(v) for n, v in hidden.items()}, "more": unescape(rest[1]) if rest else ""}
    for select in re.finditer(r'<select[^>]*name="(\w+)".*?</select>', page, re.DOTALL):
        option = re.search(r'<option value="([^"]*)" selected>', select[0])
        fields[select[1]] = option[1] if option else ""
    for switch in ("overwrite", "exclude_frozen", "merge_adapter"):
        fields[switch] = "true" if re.search(rf'id="{switch}"[^>]* checked', page) else ""
    fields |= {"to": "zero", "key": "clone-test"}
    answer = browser.send("/submit", fields)
    assert answer.status_code == 303, answer.text
    new, old = (service.ask("GET", f"/v1/jobs/{i}").json() for i in (answer.headers["location"][6:], job))
    assert new["id"] != old["id"]
    assert new["request"] == old["request"]
    assert [new[name] for name in ("labels", "priority", "max_workers")] == [{"team": "x"}, 5, 2]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"to": "universal", "target": "/x", "dp": "many"}, "dp"),
        ({"to": "universal", "target": "/x", "memory_limit": "lots"}, "is not a size"),
        ({"to": "universal", "target": "/x", "more": "[1]"}, "not a JSON object"),
        ({"to": "universal", "target": "/x", "more": '{"threads": "x"}'}, "threads"),
        ({"to": "universal", "target": "/x", "more": '{"options": 3}', "dp": "2"}, "options"),
        ({"to": "universal", "target": "/x", "labels": "team"}, "no `=`"),
        ({"to": "universal", "target": "a\0b"}, "NUL"),
        ({"to": "universal"}, "target"),
    ],
)
def test_wrong_fields_are_told_with_what_to_do(service: Service, fields: dict[str, str], told: str) -> None:
    answer = service.browser().send("/submit", {"source": scripted(), **fields})
    assert answer.status_code == 422
    assert answer.headers["content-type"].startswith("text/html")
    assert told in unescape(answer.text)
    assert "What to do" in answer.text


def test_hostile_names_are_text(service: Service) -> None:
    nasty = '"><script>alert(1)</script>{{7*7}}\u202e'
    job = service.job(target=f"{service.directory}/{nasty}", labels={nasty: nasty})
    for path in ("/", f"/jobs/{job}", f"/submit?clone={job}", "/?label=" + "%22%3E%3Cscript%3Ealert(1)%3D1"):
        text = service.browser().page(path)
        assert "<script>alert" not in text, path
        assert "49" not in re.findall(r"alert\(1\)&lt;/script&gt;(\S\S)", text)
    assert "\u202e" not in service.browser().page("/")


def test_a_page_that_did_not_change_is_not_sent_again(service: Service) -> None:
    browser, job = service.browser(), service.job()
    for path in ("/", f"/jobs/{job}"):
        first = browser.client.get(path)
        again = browser.client.get(path, headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"]
    before = browser.client.get("/").headers["etag"]
    browser.send(f"/jobs/{job}/cancel")
    assert browser.client.get("/", headers={"If-None-Match": before}).status_code == 200


def test_pages_of_jobs_and_their_filters(service: Service) -> None:
    secret = service.token("submit", "read", "cancel", tenant="team-a")
    browser = service.browser(secret)
    jobs = [service.job(secret, labels={"row": str(number % 2)}) for number in range(27)]
    first = browser.page("/?label=row%3D1") and browser.page("/")
    shown = re.findall(r'id="row-(\w+)"', first)
    older = some(re.search(r'id="older" rel="next" href="([^"]+)"', first))
    rest = re.findall(r'id="row-(\w+)"', browser.page(unescape(older[1])))
    assert shown + rest == jobs[::-1]
    assert re.findall(r'id="row-(\w+)"', browser.page("/?label=row%3D1")) == jobs[1::2][::-1]
    browser.send(f"/jobs/{jobs[3]}/cancel")
    assert re.findall(r'id="row-(\w+)"', browser.page("/?state=cancelled")) == [jobs[3]]
    assert jobs[3] not in browser.page("/?state=active")
    assert "there is no such state" in browser.page("/?state=nonsense", 422)
    assert "no such column" in browser.page("/?sort=nonsense", 422)
    wrong = browser.page("/?label=row", 422)
    assert 'id="label-error"' in wrong
    assert "write name=value" in wrong


def test_the_list_has_search_order_totals_duration_and_owner(service: Service) -> None:
    secret = service.token("submit", "read", "cancel", tenant="team-b")
    browser = service.browser(secret)
    jobs = [service.job(secret, labels={"which": "listed"}, target=f"/found/by{n}") for n in range(3)]
    page = browser.page("/?label=which%3Dlisted")
    assert "3 jobs" in words_of(page)
    found = browser.page("/?search=/FOUND/by1")
    assert re.findall(r'id="row-(\w+)"', found) == [jobs[1]]
    assert "1 job" in words_of(found)
    assert re.findall(r'id="row-(\w+)"', browser.page("/?label=which%3Dlisted&sort=target")) == jobs
    assert re.findall(r'id="row-(\w+)"', browser.page("/?label=which%3Dlisted&sort=-target")) == jobs[::-1]
    assert 'aria-sort="descending"' in page
    for column in ("state", "source", "target", "created", "duration"):
        assert f'id="sort-{column}"' in page, column
    for head in ("Duration", "Submitted by"):
        assert head in words_of(page)
    assert "test" in words_of(page)  # the name of the token
    assert "Submitted by test" in re.sub(r"\s+", " ", words_of(browser.page(f"/jobs/{jobs[0]}")))
    assert re.search(r'<option value="queued">Queued \(\d+\)</option>', page)
    # Waiting and doing nothing are not warnings.
    assert 'class="state off">Queued' in page
    assert "Times are in" in words_of(page)


def test_a_logout_takes_the_cookie(service: Service) -> None:
    browser = service.browser()
    answer = browser.send("/logout")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert browser.client.get("/").status_code == 303


def test_a_revoked_token_ends_its_login(service: Service) -> None:
    made = service.ask("POST", "/v1/tokens", json={"name": "x", "scopes": ["read"]}).json()
    browser = service.browser(made["secret"])
    assert browser.page("/")
    assert service.ask("DELETE", f"/v1/tokens/{made['token']['id']}").status_code == 200
    assert browser.client.get("/").headers["location"] == "/login"


def test_a_failed_job_says_why_in_the_list_and_what_to_do_on_its_page(tmp_path: Path) -> None:
    extra = {"RESHARD_TOKEN": OPERATOR}
    stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", extra=extra)
    with stack.api() as url, stack.worker():
        service = Service(url, tmp_path)
        job = service.job(source={"url": scripted(units=4, fail="checkpoint.incomplete", at=2)})
        for _ in range(200):
            if service.ask("GET", f"/v1/jobs/{job}?wait=5").json()["done"]:
                break
            time.sleep(0.05)
        browser = service.browser()
        assert "checkpoint.incomplete" in browser.page("/")
        page = browser.page(f"/jobs/{job}")
        assert "change the script" in page
        shown = re.sub(r"\s+", " ", words_of(page))
        for told in (
            "The job was submitted and waits for a worker.",
            "began: it plans.",
            "The plan is made; the target is being written.",
            "The job failed.",
        ):
            assert told in shown, told
        assert re.search(r"Worker \S+ began: it plans", shown)
        idle = browser.page("/workers")
        assert 'class="state off">Idle' in idle or 'class="state busy">Working' in idle
        assert "state wait" not in idle
        for word in ("Planning", "Running", "Failed", 'id="retry"', "Delete its unfinished files"):
            assert word in page, word
        assert browser.send(f"/jobs/{job}/retry").headers["location"] == f"/jobs/{job}"
        assert service.ask("GET", f"/v1/jobs/{job}").json()["retries"] == 1


def test_an_open_service_needs_no_login_but_its_forms_are_still_its_own(tmp_path: Path) -> None:
    with Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db").api() as url:
        browser = Browser(url)
        fields = {"source": scripted(), "target": f"{tmp_path}/out", "to": "universal"}
        assert "Log out" not in browser.page("/")
        seen = browser.page(f"/submit?{urlencode({**fields, 'plan': '1'})}")
        fields["form_token"] = _token_in(seen)
        assert (
            browser.client.post("/submit", data=fields, headers={"Origin": "https://evil.example"}).status_code == 403
        )
        assert browser.client.post("/submit", data=fields, headers={"Origin": url}).status_code == 303
        assert "<h1>Jobs</h1>" in browser.page("/")
