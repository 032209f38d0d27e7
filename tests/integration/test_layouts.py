"""Virtual layouts of a service: bytes as a conversion writes them, ranges, killed engines, walls, expiry."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import httpx
import psutil
import pytest

import reshard
from house.database_time import let_pass
from house.expected import raised
from house.measured import say
from house.waiting import PATIENCE_S, at_once, wait_until
from reshard.engine import load_engine
from reshard.errors import JobError, RequestError, ReshardError
from reshard.models.access import TenantSettings
from reshard.models.jobs import ConvertRequest, Layout, LayoutRequest
from reshard.options import RunLayout, SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.layouts import MOST_LAYOUTS, Layouts, PlannedLayout, UsedLayout
from reshard_jobs.limits import TenantLimits
from reshard_jobs.queue.reaper import Reaper
from reshard_jobs.queue.store import JobStore
from reshard_jobs.settings import JobSettings
from reshard_service.api.engine import MOST_RANGES, ranges_in
from reshard_service.probes.layout_engines import LayoutEngines
from reshard_service.probes.process import _serve  # pyright: ignore[reportPrivateUsage]
from reshard_service.settings import ServiceSettings
from servers.process import ServerProcess
from servers.stack import Stack, tree_of

TINY = Path(__file__).parents[1] / "data" / "zero3_tiny"
OPERATOR = "the token of the operator"
LAYOUT = {"to": "zero", "layout": {"dp": 3}}


@dataclass
class Service:
    """A service with two tenants, and a checkpoint with files of tens of megabytes."""

    url: str
    root: Path
    process: ServerProcess
    database_url: str
    tokens: dict[str, str]

    def ask(self, method: str, path: str, *, by: str = "anna", **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.tokens[by]}", **more.pop("headers", {})}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=PATIENCE_S, **more)

    def make(self, source: Path | str, *, by: str = "anna", **more: Any) -> dict[str, Any]:
        answer = self.ask("POST", "/v1/layouts", by=by, json={"source": str(source), **LAYOUT, **more})
        assert answer.status_code == 201, answer.text
        assert answer.headers["Location"] == answer.json()["links"]["self"]
        return answer.json()

    def file(self, layout: dict[str, Any], path: str) -> str:
        return f"{layout['links']['files']}/{path}"

    def address(self, layout: dict[str, Any], path: str) -> tuple[str, dict[str, str]]:
        """The URL of a file, and the headers with which Anna gets it."""
        return f"{self.url}{self.file(layout, path)}", {"Authorization": f"Bearer {self.tokens['anna']}"}

    def engines(self) -> list[psutil.Process]:
        """The engine processes of layouts."""
        found: list[psutil.Process] = []
        for process in tree_of(self.process.pid)[1:]:
            with suppress(psutil.NoSuchProcess):
                found += [process] if process.cmdline()[-1:] == ["layout"] else []
        return found

    @contextmanager
    def database(self) -> Generator[Database]:
        with closing(Database(self.database_url)) as database:
            yield database


@contextmanager
def serving(directory: Path, **settings: str) -> Generator[Service]:
    extra = {"RESHARD_ANONYMOUS": "", "RESHARD_TOKEN": OPERATOR, "RESHARD_ROOTS": str(directory), **settings}
    stack = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db", scripted=False, extra=extra)
    with stack.api_process() as (url, process), reshard.Client(url, token=OPERATOR) as client:
        made = {}
        for tenant in ("anna", "bert"):
            client.admin.create_tenant(tenant)
            scopes = ["submit", "read", "cancel"]
            made[tenant] = client.admin.create_token(tenant, scopes, tenant=tenant).secret
        yield Service(url, directory, process, stack.database_url, {"operator": OPERATOR, **made})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    directory = tmp_path_factory.mktemp("layouts")
    with serving(directory) as found:
        yield found


@pytest.fixture
def tiny(service: Service, request: pytest.FixtureRequest) -> Path:
    place = service.root / request.node.name / "run"
    shutil.copytree(TINY, place)
    return place


@pytest.fixture(scope="module")
def large(service: Service) -> Path:
    from checkpoints import gpt_parameters, write_zero_checkpoint

    place = service.root / "large"
    write_zero_checkpoint(place, gpt_parameters(256, 6, 8_000), stage=3, ranks=2)
    return place


@pytest.fixture(scope="module")
def converted(large: Path, service: Service) -> Path:
    """The target that nobody writes, written."""
    target = service.root / "written" / "global_step7"
    reshard.convert(large, target, to="zero", dp=3)
    return target


@pytest.fixture(scope="module")
def layout(service: Service, large: Path) -> dict[str, Any]:
    return service.make(large)


def rank_file(layout: dict[str, Any]) -> str:
    """The path of the largest file."""
    return max(layout["files"], key=lambda file: file["size_bytes"])["path"]


# Bytes.


def test_every_file_is_the_converted_one(service: Service, layout: dict[str, Any], converted: Path) -> None:
    written = {p.name: p for p in converted.iterdir() if p.name != "reshard.json"}
    assert {f["path"]: f["size_bytes"] for f in layout["files"]} == {n: p.stat().st_size for n, p in written.items()}
    assert layout["files_count"] == len(written)
    assert layout["compared"] is not None
    listed = service.ask("GET", layout["links"]["files"]).json()["files"]
    assert listed == layout["files"] == service.ask("GET", layout["links"]["self"]).json()["files"]
    for name, path in written.items():
        answer = service.ask("GET", service.file(layout, name))
        assert (answer.status_code, int(answer.headers["Content-Length"])) == (200, path.stat().st_size)
        assert answer.content == path.read_bytes(), name
        head = service.ask("HEAD", service.file(layout, name), headers={"Range": "bytes=0-1"})
        # Only GET has ranges (RFC 9110, section 14.2).
        assert (head.status_code, head.content) == (200, b"")
        for header in ("Content-Length", "ETag", "Accept-Ranges", "Content-Type"):
            assert head.headers[header] == answer.headers[header]
        assert answer.headers["ETag"].startswith('"')


def test_curl_takes_ranges_and_resumes(
    service: Service, layout: dict[str, Any], converted: Path, tmp_path: Path
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    name = rank_file(layout)
    whole = (converted / name).read_bytes()
    url, token = f"{service.url}{service.file(layout, name)}", f"Authorization: Bearer {service.tokens['anna']}"

    def curl(*arguments: str) -> bytes:
        command = ["curl", "--silent", "--show-error", "--fail", "--header", token, *arguments, url]
        return subprocess.run(command, check=True, capture_output=True).stdout

    assert curl("--range", "1000000-1000999") == whole[1_000_000:1_001_000]
    assert curl("--range", "-22") == whole[-22:]
    place = tmp_path / name
    place.write_bytes(whole[:5_000_001])
    curl("--continue-at", "-", "--output", str(place))
    assert place.read_bytes() == whole


def test_file_systems_of_fsspec_read_it(
    service: Service, layout: dict[str, Any], converted: Path, tmp_path: Path
) -> None:
    name = rank_file(layout)
    url, bearer = service.address(layout, name)
    http: Any = fsspec.filesystem("http", client_kwargs={"headers": bearer}, skip_instance_cache=True)
    whole = (converted / name).read_bytes()
    assert http.info(url)["size"] == len(whole)
    assert http.cat_file(url, start=-100, end=None) == whole[-100:]
    with http.open(url, block_size=1 << 20) as file:
        file.seek(len(whole) // 2)
        assert file.read(3_000_000) == whole[len(whole) // 2 :][:3_000_000]
        file.seek(10)
        assert file.read(10) == whole[10:20]
    http.get_file(url, str(tmp_path / name))
    assert (tmp_path / name).read_bytes() == whole


def test_conditions_and_ranges_as_in_rfc_9110(service: Service, layout: dict[str, Any], converted: Path) -> None:
    name = rank_file(layout)
    whole, path = (converted / name).read_bytes(), service.file(layout, name)
    tag = service.ask("HEAD", path).headers["ETag"]

    def get(**headers: str) -> httpx.Response:
        return service.ask("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    one = get(Range="bytes=10-19")
    assert (one.status_code, one.content) == (206, whole[10:20])
    assert one.headers["Content-Range"] == f"bytes 10-19/{len(whole)}"
    assert one.headers["ETag"] == tag
    assert get(Range="bytes=0-9", If_Range=tag).status_code == 206
    # Of another file: the whole comes, not a part that would be joined to it. Weak tags never match here.
    begin = {"Range": f"bytes={len(whole) - 9}-"}
    for other in ('"other"', f"W/{tag}", "Thu, 26 Nov 2026 10:00:00 GMT"):
        answer = get(**begin, If_Range=other)
        assert (answer.status_code, len(answer.content)) == (200, len(whole)), other
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = get(If_None_Match=known, Range="bytes=0-9")
        assert (answer.status_code, answer.content, answer.headers["ETag"]) == (304, b"", tag), known
    assert get(If_None_Match='"other"', Range="bytes=0-9").status_code == 206
    assert get(If_Match=f'"other", {tag}', Range="bytes=0-9").status_code == 206
    for wanted in ('"other"', f"W/{tag}"):
        answer = get(If_Match=wanted, Range="bytes=0-9")
        assert (answer.status_code, answer.json()["code"]) == (412, "request.precondition"), wanted
    for refused in (f"bytes={len(whole)}-", "bytes=-0", f"bytes=0-,{len(whole) // 2}-"):
        answer = get(Range=refused)
        assert (answer.status_code, answer.json()["code"]) == (416, "request.range"), refused
        assert answer.headers["Content-Range"] == f"bytes */{len(whole)}"


def test_several_ranges_are_the_parts_of_one_body(service: Service, layout: dict[str, Any], converted: Path) -> None:
    from email import message_from_bytes, policy

    name = rank_file(layout)
    whole = (converted / name).read_bytes()
    answer = service.ask("GET", service.file(layout, name), headers={"Range": "bytes=-5, 7-1000007, 0-0, 999999999-"})
    kind = answer.headers["Content-Type"]
    assert (answer.status_code, kind.partition(";")[0]) == (206, "multipart/byteranges")
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    boundary = kind.partition("boundary=")[2].encode()
    found = []
    for part in answer.content.split(b"\r\n--" + boundary)[1:-1]:
        head, _, body = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        found.append((message_from_bytes(head, policy=policy.HTTP)["Content-Range"], body))
    size = len(whole)
    wanted = [(size - 5, size), (7, 1_000_008), (0, 1)]
    assert found == [(f"bytes {b}-{e - 1}/{size}", whole[b:e]) for b, e in wanted]
    assert answer.content.endswith(b"\r\n--" + boundary + b"--\r\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bytes=0-0", [(0, 1)]),
        ("BYTES = 2-", [(2, 10)]),
        ("bytes=2-99", [(2, 10)]),
        ("bytes=-3", [(7, 10)]),
        ("bytes=-30", [(0, 10)]),
        ("bytes= 1-2 ,, 4-4", [(1, 3), (4, 5)]),
        ("bytes=5-5,1-2", [(5, 6), (1, 3)]),
        ("bytes=10-,0-1", [(0, 2)]),
        ("bytes=10-", []),
        ("bytes=-0", []),
        (f"bytes={'9' * 900}-", []),
        ("bytes=0-,0-", []),
        ("bytes=" + ",".join(["0-0"] * (MOST_RANGES + 1)), []),
        ("bytes=3-2", None),
        ("bytes=a-b", None),
        ("bytes=-", None),
        ("bytes=", None),
        ("bytes", None),
        ("rows=0-1", None),
        ("bytes=0-1,x", None),
        ("bytes=٣-", None),
    ],
)
def test_ranges(text: str, found: list[tuple[int, int]] | None) -> None:
    assert ranges_in(text, 10) == found


def test_an_empty_file_has_no_range() -> None:
    assert ranges_in("bytes=0-", 0) == []
    assert ranges_in("bytes=-5", 0) == []


# Processes.


def test_two_clients_at_once(service: Service, layout: dict[str, Any], converted: Path) -> None:
    names = [file["path"] for file in layout["files"]]
    got: dict[tuple[int, str], bytes] = {}

    def fetch(client: int) -> None:
        for name in names if client else reversed(names):
            got[client, name] = service.ask("GET", service.file(layout, name)).content

    at_once([lambda: fetch(0), lambda: fetch(1)])
    for (client, name), content in got.items():
        assert content == (converted / name).read_bytes(), (client, name)
    assert len(got) == 2 * len(names)
    assert len(service.engines()) >= 1


def test_a_killed_engine_cuts_its_response_and_the_next_request_works(
    service: Service, layout: dict[str, Any], converted: Path
) -> None:
    name = rank_file(layout)
    whole = (converted / name).read_bytes()
    url, bearer = service.address(layout, name)
    with httpx.stream("GET", url, headers=bearer, timeout=PATIENCE_S) as response:
        pieces = response.iter_bytes(1 << 16)
        begin = next(pieces)
        for engine in (engines := service.engines()):
            engine.send_signal(signal.SIGKILL)
        assert engines
        raised(httpx.RemoteProtocolError, list, pieces)
    assert begin == whole[: len(begin)]
    # A client that kept the first bytes goes on from there.
    answer = service.ask("GET", service.file(layout, name), headers={"Range": f"bytes={len(begin)}-"})
    assert (answer.status_code, answer.content) == (206, whole[len(begin) :])
    # An engine that is killed between two requests is replaced.
    for engine in service.engines():
        engine.send_signal(signal.SIGKILL)
        engine.wait(30)
    assert service.ask("GET", service.file(layout, name), headers={"Range": "bytes=5-9"}).content == whole[5:10]


def test_the_memory_of_the_api_is_flat(service: Service, layout: dict[str, Any], converted: Path) -> None:
    """Responses that nobody reads wait; those that are read pass through. The engine makes the bytes, not the API."""
    name = rank_file(layout)
    size = (converted / name).stat().st_size
    url, bearer = service.address(layout, name)
    api = psutil.Process(service.process.pid)
    service.ask("GET", service.file(layout, name))
    base, marks, done = api.memory_info().rss, [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            marks[0] = max(marks[0], api.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with httpx.Client(headers=bearer, timeout=PATIENCE_S) as client:
            waiting = [client.send(client.build_request("GET", url), stream=True) for _ in range(5)]
            for _ in range(4):
                with client.stream("GET", url) as read:
                    assert sum(map(len, read.iter_bytes(1 << 16))) == size
            for response in waiting:
                response.close()
    finally:
        done.set()
        watcher.join()
    grown = marks[0] - base
    say(
        f"layouts: API {base >> 20} MiB, {grown / (1 << 20):.1f} MiB more while 9 responses of {size >> 20} MiB went on"
    )
    assert grown < 24 << 20
    assert 9 * size > 10 * (24 << 20)


def test_an_idle_engine_ends_and_begins_again(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "run")
    with serving(tmp_path, RESHARD_LAYOUT_IDLE_S="0.2") as service:
        made = service.make(tmp_path / "run")
        wait_until(lambda: not service.engines())
        assert service.ask("GET", service.file(made, rank_file(made))).status_code == 200
        wait_until(lambda: not service.engines())


def test_engines_end_with_the_api(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "run")
    with serving(tmp_path) as service:
        service.make(tmp_path / "run")
        # The engine of the layout, and the process for the next one.
        wait_until(lambda: len(service.engines()) == 2)
        engines = service.engines()
        service.process.kill()
        assert not psutil.wait_procs(engines, timeout=60)[1]


def test_any_process_of_the_api_serves_a_layout(service: Service, layout: dict[str, Any], converted: Path) -> None:
    stack = Stack(service.root / "logs-of-the-second", service.database_url, scripted=False)
    extra = {"RESHARD_ANONYMOUS": "", "RESHARD_TOKEN": OPERATOR, "RESHARD_ROOTS": str(service.root)}
    name = rank_file(layout)
    with replace(stack, extra=extra).api() as url:
        second = replace(service, url=url)
        answer = second.ask("GET", service.file(layout, name))
        assert answer.content == (converted / name).read_bytes()
        assert answer.headers["ETag"] == service.ask("HEAD", service.file(layout, name)).headers["ETag"]


# The source.


def test_a_source_that_changed_is_refused_by_every_engine(service: Service, tiny: Path) -> None:
    made = service.make(tiny)
    name = next(file["path"] for file in made["files"] if "optim_states" in file["path"])
    for state in (tiny / "global_step3").glob("*optim_states.pt"):
        os.utime(state, ns=(1, 1))
    for kill in (False, True):
        if kill:
            for engine in service.engines():
                engine.send_signal(signal.SIGKILL)
        answer = service.ask("GET", service.file(made, name))
        assert (answer.status_code, answer.json()["code"]) == (409, "source.changed")
    again = service.make(tiny)
    assert again["digest"] != made["digest"]
    assert service.ask("GET", service.file(again, name)).status_code == 200


def test_equal_requests_have_equal_tags(service: Service, tiny: Path) -> None:
    made = [service.make(tiny), service.make(tiny), service.make(tiny, layout={"dp": 4})]
    assert len({layout["id"] for layout in made}) == 3
    tags = [service.ask("HEAD", service.file(layout, rank_file(layout))).headers["ETag"] for layout in made]
    assert tags[0] == tags[1] != tags[2]


def test_copies_that_differ_are_found_before_the_answer(service: Service, tmp_path: Path) -> None:
    from checkpoints import gpt_parameters, write_tensor_parallel_checkpoint

    place, rules = service.root / "differing", tmp_path / "rules.yaml"
    write_tensor_parallel_checkpoint(place, gpt_parameters(16, 1, 32), tp=2, ranks=1)
    rules.write_text("default: column\ntp_replicated_parameter_patterns: ['.*']\n")
    body = {"source": str(place), "to": "universal", "options": {"deepspeed": {"rules": rules.read_text()}}}
    answer = service.ask("POST", "/v1/layouts", json=body)
    converting = raised(ReshardError, reshard.convert, place, tmp_path / "out", to="universal", rules=rules)
    assert converting.code == "checkpoint.disagreement"
    assert (answer.json()["code"], answer.json()["detail"]) == (converting.code, converting.message)
    # Without the comparison, the answer says that there was none.
    assert service.ask("POST", "/v1/layouts", json={**body, "compare": False}).json()["compared"] is None


# Walls.


def test_a_tenant_does_not_see_the_layouts_of_another(service: Service, tiny: Path) -> None:
    made = service.make(tiny)
    name = rank_file(made)
    absent = "lay_" + "a" * 24
    for method, path in (
        ("GET", made["links"]["self"]),
        ("DELETE", made["links"]["self"]),
        ("GET", made["links"]["files"]),
        ("GET", service.file(made, name)),
        ("HEAD", service.file(made, name)),
        ("GET", service.file(made, "nothing")),
    ):
        for headers in ({}, {"Range": "bytes=0-1"}, {"If-None-Match": "*"}):
            answer = service.ask(method, path, by="bert", headers=headers)
            other = service.ask(method, path.replace(made["id"], absent), by="bert", headers=headers)
            assert answer.status_code == other.status_code == 404, (method, path)
            assert answer.text.replace(made["id"], absent) == other.text
    assert service.ask("GET", "/v1/layouts", by="bert").json() == {"layouts": []}
    listed = service.ask("GET", "/v1/layouts").json()["layouts"]
    assert listed[0] == {name: value for name, value in made.items() if name in listed[0]}
    assert "files" not in listed[0]
    assert service.ask("GET", service.file(made, name)).status_code == 200
    assert service.ask("GET", service.file(made, "no/such")).json()["code"] == "request.not_found"
    assert service.ask("GET", made["links"]["self"], headers={"Authorization": ""}).status_code == 401


def test_a_source_outside_of_the_roots_is_refused(service: Service, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "outside")
    bodies: list[dict[str, Any]] = [
        {"source": str(tmp_path / "outside")},
        {"source": str(tiny), "to": "safetensors", "options": {}, "model_files": str(tmp_path)},
    ]
    for body in bodies:
        answer = service.ask("POST", "/v1/layouts", json={**LAYOUT, **body})
        assert (answer.status_code, answer.json()["code"]) == (403, "request.root_forbidden")
    # A link that leads out is found where it is opened: in the engine.
    inner = tiny / "global_step3" / min(p.name for p in (tiny / "global_step3").glob("*optim*"))
    shutil.move(inner, tmp_path / "away.pt")
    inner.symlink_to(tmp_path / "away.pt")
    answer = service.ask("POST", "/v1/layouts", json={"source": str(tiny), **LAYOUT})
    assert (answer.status_code, answer.json()["code"]) == (403, "request.root_forbidden")


def test_roots_of_a_tenant_hold_for_layouts_that_were_made_before(service: Service, tiny: Path) -> None:
    made = service.make(tiny, by="bert")
    path = service.file(made, rank_file(made))
    assert service.ask("GET", path, by="bert").status_code == 200
    with reshard.Client(service.url, token=OPERATOR) as client:
        client.admin.set_tenant("bert", TenantSettings(read_roots=(str(service.root / "elsewhere"),)))
        answer = service.ask("GET", path, by="bert")
        others = [
            service.ask("HEAD", path, by="bert"),
            service.ask("GET", path, by="bert", headers={"If-None-Match": "*"}),
            service.ask("GET", path, by="bert", headers={"Range": "bytes=999999999999-"}),
            service.ask("GET", made["links"]["self"], by="bert"),
            service.ask("GET", made["links"]["files"], by="bert"),
        ]
        client.admin.set_tenant("bert", TenantSettings())
    assert [other.status_code for other in others] == [403] * 5
    assert (answer.status_code, answer.json()["code"]) == (403, "request.root_forbidden")
    service.ask("DELETE", made["links"]["self"], by="bert")


def test_bytes_of_layouts_count_in_the_quota_of_a_day(service: Service, tiny: Path) -> None:
    total = service.make(tiny)["total_bytes"]
    with reshard.Client(service.url, token=OPERATOR) as client:
        client.admin.create_tenant("limited", TenantSettings(bytes_per_day=2 * total + 1))
        token = client.admin.create_token("limited", ["submit", "read"], tenant="limited").secret
    limited = replace(service, tokens={"anna": token})
    # One that is removed has counted.
    limited.ask("DELETE", limited.make(tiny)["links"]["self"])
    limited.make(tiny)
    layouts = limited.ask("POST", "/v1/layouts", json={"source": str(tiny), **LAYOUT})
    jobs = limited.ask("POST", "/v1/jobs", json={"source": str(tiny), "target": str(tiny.parent / "out"), **LAYOUT})
    for answer in (layouts, jobs):
        assert (answer.status_code, answer.json()["code"]) == (429, "request.quota_bytes")
        assert answer.json()["details"]["used"] == 2 * total


def test_a_layout_of_too_many_ranks_is_rejected_before_it_is_planned(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        for options in ({"dp": 20_000}, {"dp": 150_000}, {"dp": 2, "tp": 64, "pp": 64}):
            answer = service.ask(
                "POST", "/v1/layouts", json={"source": str(TINY), "to": "zero", "options": {"deepspeed": options}}
            )
            assert (answer.status_code, answer.json()["code"]) == (422, "request.above_maximum"), answer.text
            assert answer.json()["details"] == {"field": "layout.dp", "maximum": 4096}
        assert not service.engines()


def test_options_of_a_run_have_no_place(service: Service, tiny: Path) -> None:
    for name, value in {"threads": 2, "overwrite": True, "target": "/x", "verify": "full"}.items():
        answer = service.ask("POST", "/v1/layouts", json={"source": str(tiny), **LAYOUT, name: value})
        assert answer.status_code == 422, name
        assert answer.json()["details"]["problems"][0]["where"].endswith(name)
    misplaced = service.ask("POST", "/v1/layouts", json={"source": str(tiny), "to": "zero", "dp": 3})
    assert "layout.dp" in misplaced.text
    assert (
        service.ask("POST", "/v1/layouts", json={"source": f"{tiny}x", **LAYOUT}).json()["code"] == "source.not_found"
    )


def test_the_client_makes_lists_and_removes(service: Service, tiny: Path) -> None:
    async def ask(layout_id: str) -> Layout:
        async with reshard.AsyncClient(service.url, token=service.tokens["anna"]) as client:
            return await client.layouts.get(layout_id)

    with reshard.Client(service.url, token=service.tokens["anna"]) as client:
        made = client.layouts.create(str(tiny), to="zero", tag="global_step3", dp=3, name="named", compare=False)
        assert (made.tag, made.compared, len(made.files)) == ("global_step3", None, 6)
        assert client.layouts.list()[0].id == made.id
        assert asyncio.run(ask(made.id)) == client.layouts.get(made.id) == made
        client.layouts.remove(made.id)
        assert raised(RequestError, client.layouts.get, made.id).code == "request.gone"
        assert raised(RequestError, client.layouts.create, str(tiny), to="zero", threads=2).code == "request.invalid"


# Expiry.


def test_layouts_expire_unless_they_are_used(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "run")
    with serving(tmp_path) as service, service.database() as database:
        used, unused = service.make(tmp_path / "run"), service.make(tmp_path / "run", compare=False)
        assert (used["compared"], unused["compared"]) == (0, None)
        path = service.file(used, rank_file(used))
        let_pass(database, 3000)
        before = service.ask("GET", used["links"]["self"]).json()["expires_at"]
        assert service.ask("HEAD", path).status_code == 200
        assert service.ask("GET", used["links"]["self"]).json()["expires_at"] > before
        let_pass(database, 1000)
        assert service.ask("GET", path).status_code == 200
        ids = [layout["id"] for layout in service.ask("GET", "/v1/layouts").json()["layouts"]]
        assert ids == [used["id"]]
        removed = service.ask("DELETE", used["links"]["self"])
        assert (removed.status_code, removed.content) == (204, b"")
        # Its engine is gone; that of the other layout may be there, and the process for the next layout.
        wait_until(lambda: len(service.engines()) <= 2)
        for made in (used, unused):
            for method, place in (
                ("GET", made["links"]["self"]),
                ("GET", made["links"]["files"]),
                ("GET", service.file(made, rank_file(made))),
                ("DELETE", made["links"]["self"]),
            ):
                answer = service.ask(method, place)
                assert (answer.status_code, answer.json()["code"]) == (410, "request.gone"), place
            assert service.ask("HEAD", service.file(made, rank_file(made))).status_code == 410
        assert service.ask("GET", "/v1/layouts").json() == {"layouts": []}
        reaper = Reaper(database, lease_s=60)
        reaper.sweep()
        assert service.ask("GET", used["links"]["self"]).status_code == 410
        let_pass(database, 86_401)
        reaper.sweep()
        assert service.ask("GET", used["links"]["self"]).status_code == 404


def test_a_removed_layout_cuts_what_is_being_read(service: Service, large: Path) -> None:
    made = service.make(large)
    url, bearer = service.address(made, rank_file(made))
    with httpx.stream("GET", url, headers=bearer, timeout=PATIENCE_S) as response:
        pieces = response.iter_bytes(1 << 16)
        next(pieces)
        assert service.ask("DELETE", made["links"]["self"]).status_code == 204
        raised(httpx.RemoteProtocolError, list, pieces)


# The records, on each kind of database.


def planned(**files: int) -> PlannedLayout:
    facts: dict[str, Any] = {"content_digest": "c", "source_digest": "s", "source_format": "f", "tag": None}
    entries = [{"path": path, "size_bytes": size} for path, size in files.items()]
    return PlannedLayout.model_validate(
        {**facts, "compared": 1, "files": entries, "warnings": ["w"], "not_carried": [{"path": "a", "reason": "b"}]}
    )


def test_records(database_url: str) -> None:
    with closing(Database(database_url)) as database:
        layouts, others = Layouts(database, keep_s=100), Layouts(database, "other", keep_s=100)
        request = LayoutRequest(source=SourceSpec(url="/in"), to="zero").conversion()
        begun = layouts.begin(request)
        made = layouts.create(begun, planned(b=2, a=1, empty=0))
        assert layouts.get(made.id) == made
        assert [f.path for f in layouts.files(made.id)] == ["b", "a", "empty"]
        assert (made.total_bytes, made.files_count, made.warnings) == (3, 3, ("w",))
        assert [layout.id for layout in layouts.list()] == [made.id]
        used = layouts.use(made.id, "b")
        assert (used.size_bytes, used.content_digest, used.request) == (2, "c", request)
        assert raised(RequestError, layouts.use, made.id, "c").code == "request.not_found"
        for call in (others.get, others.files, others.remove):
            assert raised(RequestError, call, made.id).code == "request.not_found"
        assert others.list() == ()
        assert not others.renew(made.id)
        let_pass(database, 50)
        before = layouts.get(made.id).expires_at
        assert layouts.renew(made.id)
        moved = layouts.get(made.id).expires_at
        assert moved > before
        assert layouts.renew(made.id)
        # A use just after another one writes nothing.
        assert layouts.get(made.id).expires_at == moved
        let_pass(database, 101)
        assert not layouts.renew(made.id)
        assert raised(RequestError, layouts.get, made.id).code == "request.gone"
        for _ in range(MOST_LAYOUTS):
            layouts.create(layouts.begin(request), planned(a=1))
        assert raised(RequestError, layouts.begin, request).code == "request.above_maximum"
        others.begin(request)
        assert JobStore(database).list().jobs == ()


# The pool of engines.


def used_layout(source: Path, layout_id: str = "lay", **more: Any) -> UsedLayout:
    request = LayoutRequest(source=SourceSpec(url=str(source)), to="zero").conversion()
    layout = RunLayout(dp=3)
    made = UsedLayout(layout_id, "t", request.model_copy(update={"layout": layout}), TenantLimits(), None)
    return replace(made, **more)


def with_engines(call: Callable[[LayoutEngines], Any], **settings: Any) -> Any:
    async def run() -> Any:
        engines = LayoutEngines(ServiceSettings(jobs=JobSettings(), **settings))
        try:
            return await call(engines)
        finally:
            await engines.close()

    return asyncio.run(run())


async def read_all(engines: LayoutEngines, layout: UsedLayout, path: str, length: int) -> bytes:
    found = b""
    async with engines.reading(layout, path, 0, length) as stream:
        while data := await stream.read():
            found += data
    return found


def test_engines_make_room_for_one_another() -> None:
    async def run(engines: LayoutEngines) -> None:
        first, second = used_layout(TINY, "first"), used_layout(TINY, "second")
        path = (await engines.plan(first, compare=True)).files[0].path
        async with engines.reading(first, path, 0, 10):
            for limited in (second, replace(second, max_running=1)):
                with pytest.raises(JobError) as caught:
                    await engines.plan(limited, compare=True)
                assert caught.value.code == "service.busy"
                assert caught.value.retryable
        await engines.plan(second, compare=True)
        assert await read_all(engines, first, path, 4) == b"PK\x03\x04"

    with_engines(run, layout_engines=1, layout_queue_s=0.2)


def test_a_tenant_has_only_so_many_engines() -> None:
    async def run(engines: LayoutEngines) -> None:
        first, second = (used_layout(TINY, name, max_running=1) for name in ("first", "second"))
        path = (await engines.plan(first, compare=True)).files[0].path
        async with engines.reading(first, path, 0, 10):
            with pytest.raises(JobError):
                await engines.plan(second, compare=True)
            await engines.plan(replace(second, tenant="another"), compare=True)

    with_engines(run, layout_engines=4, layout_queue_s=0.2)


def test_a_tenant_with_its_share_of_engines_leaves_one_to_others() -> None:
    async def run(engines: LayoutEngines) -> None:
        path = (await engines.plan(used_layout(TINY, "0"), compare=False)).files[0].path
        async with AsyncExitStack() as held:
            # Downloads that go on: nothing ends them before another tenant is admitted.
            for number in range(2):
                layout = used_layout(TINY, str(number))
                await held.enter_async_context(engines.reading(layout, path, 0, 10))
            with pytest.raises(JobError) as caught:
                await engines.plan(used_layout(TINY, "more"), compare=False)
            assert caught.value.code == "service.busy"
            await engines.plan(used_layout(TINY, "other", tenant="another"), compare=False)

    with_engines(run, layout_engines=3, layout_queue_s=0.2)


def layout_processes() -> dict[int, psutil.Process]:
    """The processes that serve layouts for this one, or wait for a layout."""
    running = {}
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if process.status() != psutil.STATUS_ZOMBIE and process.cmdline()[-1:] == ["layout"]:
                running[process.pid] = process
    return running


def with_one_layout(call: Callable[[LayoutEngines, psutil.Process], Any]) -> None:
    """Read from a layout, and call with the process that waits for the next layout meanwhile."""

    async def run(engines: LayoutEngines) -> None:
        first = used_layout(TINY, "first")
        path = (await engines.plan(first, compare=False)).files[0].path
        async with engines.reading(first, path, 0, 10):
            await asyncio.to_thread(wait_until, lambda: len(layout_processes()) == 2)
            # The process that was started last waits.
            await call(engines, max(layout_processes().values(), key=lambda p: (p.create_time(), p.pid)))
        # Without use, the engines end, and no process waits for a layout any more.
        await asyncio.to_thread(wait_until, lambda: not layout_processes())

    assert not layout_processes()
    with_engines(run, layout_idle_s=0.2)


def test_the_next_layout_begins_in_a_process_that_has_imported_the_engine() -> None:
    async def run(engines: LayoutEngines, waiting: psutil.Process) -> None:
        second = used_layout(TINY, "second")
        path = (await engines.plan(second, compare=False)).files[0].path
        async with engines.reading(second, path, 0, 10):
            await asyncio.to_thread(wait_until, lambda: len(layout_processes()) == 3)
            assert waiting.pid in layout_processes()

    with_one_layout(run)


def test_a_process_that_was_killed_while_it_waited_costs_no_layout() -> None:
    async def run(engines: LayoutEngines, waiting: psutil.Process) -> None:
        # Stopped first: it dies after the layout has taken it.
        waiting.suspend()
        planned = asyncio.create_task(engines.plan(used_layout(TINY, "second"), compare=False))
        for _ in range(10):
            await asyncio.sleep(0)
        waiting.kill()
        assert (await planned).files

    with_one_layout(run)


def test_a_process_that_could_not_be_started_ahead_costs_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(engines: LayoutEngines) -> None:
        first = used_layout(TINY, "first")
        path = (await engines.plan(first, compare=False)).files[0].path
        async with engines.reading(first, path, 0, 10):
            await asyncio.to_thread(wait_until, lambda: len(layout_processes()) == 2)
            real, failures = asyncio.create_subprocess_exec, [OSError(errno.EAGAIN, "no more processes")]
            asked = asyncio.Event()

            async def start(*words: Any, **more: Any) -> Any:
                if failures:
                    asked.set()
                    raise failures.pop()
                return await real(*words, **more)

            monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
            # It takes the process that waits. The next process cannot be started.
            await engines.plan(used_layout(TINY, "second"), compare=False)
            await asked.wait()
            assert (await engines.plan(used_layout(TINY, "third"), compare=False)).files

    with_engines(run)


def test_a_layout_that_cannot_be_planned_starts_no_process_ahead(tmp_path: Path) -> None:
    async def run(engines: LayoutEngines) -> None:
        for number in range(3):
            with pytest.raises(ReshardError) as caught:
                await engines.plan(used_layout(tmp_path / "nothing", str(number)), compare=False)
            assert caught.value.code == "source.not_found"
            assert engines._ahead is None  # pyright: ignore[reportPrivateUsage]

    with_engines(run)


def test_an_engine_serves_only_the_layout_that_was_planned() -> None:
    async def run(engines: LayoutEngines) -> list[str]:
        said = await engines.plan(used_layout(TINY, "first"), compare=True)
        path, known = said.files[0].path, {"content_digest": said.content_digest, "source_digest": said.source_digest}
        assert await read_all(engines, used_layout(TINY, "second", **known), path, 2) == b"PK"
        codes = []
        for changed in ({"source_digest": "other"}, {"content_digest": "other"}):
            with pytest.raises(ReshardError) as caught:
                await read_all(engines, used_layout(TINY, "third", **{**known, **changed}), path, 2)
            codes.append(caught.value.code)
        return codes

    assert with_engines(run) == ["source.changed", "request.gone"]


def test_an_engine_that_crashes_or_takes_too_long_is_said() -> None:
    async def run(engines: LayoutEngines) -> str:
        with pytest.raises(JobError) as caught:
            await engines.plan(used_layout(TINY), compare=True)
        return caught.value.code

    assert with_engines(run, layout_command=(sys.executable, "-c", "")) == "internal.error"
    never = (sys.executable, "-c", "import signal; signal.pause()")
    assert with_engines(run, layout_command=never, layout_plan_s=0.5) == "job.wait_timeout"


def test_the_memory_of_an_engine_is_limited() -> None:
    async def run(engines: LayoutEngines) -> ReshardError:
        with pytest.raises(ReshardError) as caught:
            await engines.plan(used_layout(TINY), compare=True)
        return caught.value

    error = with_engines(run, engine_memory_bytes=1 << 20)
    # Where the limit is reached in native code, the process aborts, and Python's compiler raises other errors; which
    # code reaches the limit first differs.
    ended = error.code == "internal.error" and error.details.get("status", -signal.SIGABRT) == -signal.SIGABRT
    assert error.code == "checkpoint.too_large" or ended, error


# Readers that have gone.


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> ConvertRequest:
    """A layout of one rank, whose optimizer states are one torch file of tens of megabytes."""
    from checkpoints import gpt_parameters, write_zero_checkpoint

    place = tmp_path_factory.mktemp("exact")
    write_zero_checkpoint(place, gpt_parameters(256, 6, 8_000), stage=3, ranks=2)
    body = {"source": str(place), "to": "zero", "layout": {"dp": 1}}
    return LayoutRequest.model_validate(body).conversion()


def test_a_reader_that_has_gone_stops_the_sum_of_its_file(exact: ConvertRequest) -> None:
    """The tail of a torch file needs the CRC-32 of records before it, which nobody has read."""
    opened = partial(load_engine().open_layout, exact, compare=False)
    with opened(exact_crcs=True) as layout, opened(exact_crcs=False) as plain:
        file = max(layout.files, key=lambda f: f.size_bytes)
        assert file.size_bytes > 32 << 20
        tail, at = bytearray(3_000), file.size_bytes - 3_000
        asked = itertools.count()
        with pytest.raises(ReshardError) as caught:
            layout.read_into(file.path, at, memoryview(tail), should_stop=lambda: next(asked) >= 4)
        assert caught.value.code == "job.cancelled"
        stopped_bytes = layout.read_bytes
        assert stopped_bytes <= 16 << 20
        # Readers that stay make the sum together, and continue where the other one stopped.
        parts = [bytearray(3_000) for _ in range(4)]
        at_once([partial(layout.read_into, file.path, at, memoryview(part)) for part in parts])
        assert layout.read_bytes <= file.size_bytes + (16 << 20)
        whole = layout.read(file.path)
        assert {bytes(part) for part in parts} == {whole[at:]}
        assert whole != plain.read(file.path), "without sums, these are other bytes"


class _Endless:
    """A layout whose bytes are never done: it reads until its reader has gone."""

    def __init__(self) -> None:
        self.reading = threading.Event()
        self.stopped = threading.Event()

    def read_into(self, path: str, offset: int, buffer: memoryview, *, should_stop: Callable[[], bool]) -> None:
        self.reading.set()
        wait_until(should_stop)
        self.stopped.set()
        raise JobError("job.cancelled", "stopped")


def test_an_engine_stops_reading_when_its_connection_is_closed() -> None:
    layout = _Endless()
    ours, theirs = socket.socketpair()
    serving_it = threading.Thread(target=_serve, args=(layout, theirs), daemon=True)
    serving_it.start()
    with ours:
        ours.sendall(json.dumps({"path": "x", "offset": 0, "length": 3_000}).encode() + b"\n")
        assert layout.reading.wait(PATIENCE_S)
        assert not layout.stopped.is_set()
    serving_it.join(PATIENCE_S)
    assert layout.stopped.is_set()
