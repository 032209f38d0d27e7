"""The job database's pure parts: the state machine, roots, settings; and the sizes of the command line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from fsspec.registry import known_implementations, registry

from house.expected import raised
from reshard.choices import JobState, TargetFormat
from reshard.errors import RequestError, format_size
from reshard.models.jobs import ConvertRequest, Progress
from reshard.option import parse_size
from reshard.options import Options, PeftOptions, SourceSpec
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.urls import canonical_url
from reshard_jobs.limits import SERVICE, Roots, TenantLimits, normalized_url
from reshard_jobs.queue.states import ACTIVE, TERMINAL, TRANSITIONS, sources_of, state_of
from reshard_jobs.settings import JobSettings


def test_the_state_machine_is_total_and_ends() -> None:
    assert set(TRANSITIONS) == set(JobState)
    # A FAILED job ends for good unless a user retries it.
    onward = {state: TRANSITIONS[state] for state in TERMINAL if TRANSITIONS[state]}
    assert onward == {JobState.FAILED: frozenset({JobState.QUEUED})}
    for state in JobState:
        reachable, frontier = {state}, {state}
        while frontier := {target for source in frontier for target in TRANSITIONS[source]} - reachable:
            reachable |= frontier
        assert reachable & set(TERMINAL)
        if state is not JobState.QUEUED:
            assert sources_of(state)
    assert JobState.FAILED not in TRANSITIONS[JobState.CANCELLING]
    assert JobState.QUEUED not in TRANSITIONS[JobState.CANCELLING]


def test_every_phase_has_a_state() -> None:
    for phase in ("planning", "running", "verifying", "committing", "done"):
        assert state_of(Progress.model_validate({"phase": phase})) in ACTIVE


@pytest.mark.parametrize(
    "url",
    [
        "relative",
        "./x",
        "~/x",
        "~root/x",
        "file:/etc/passwd",
        "file:///x?y/../z",
        "file:///x#y",
        "file:///x/%2e%2e/y",
        "s3://b%2fteam/x",
        "s3://%62/x",
        "hdfs://b/x%2fy",
        "hdfs://b/team/%2E%2E/x",
        "sftp://b/x%00",
        "file://localhost",
        "s3://b/x?versionId=1",
        "s3://b/x#y",
        "simplecache::s3://b/x",
        "/x://y",
        "://x",
        "",
        "file://host/x",
        "s3://",
        "s3:///x",
        "s3://b//x",
        "s3://b/./x",
        "s3://b/../c",
        "a::s3://b/x",
        "s3://b/x::y",
        "s3://b\\x",
        "/x\0y",
    ],
)
def test_urls_with_several_readings_are_refused(url: str) -> None:
    with pytest.raises(RequestError, match=r"request\.invalid"):
        normalized_url(url)


@pytest.mark.parametrize(
    "key", ["%2e%2e/other", "%2e%2e%2fother", "x%2f..%2f..%2fother", "%00", "%25", "100%", "%zz/x"]
)
def test_an_escape_in_a_key_is_the_name_that_it_is(key: str) -> None:
    roots = Roots.parse("s3://bucket/team")
    assert roots.allowed(f"S3://bucket/team/{key}") == f"s3://bucket/team/{key}"
    for root in ("s3://bucket/t%65am", "s3://bucket/team%2fin", "s3://bucket%2fteam"):
        with pytest.raises(RequestError):
            roots.allowed(f"{root}/x")
    assert Roots.parse("/data").allowed(f"/data/{key}") == f"/data/{key}"


def test_roots_compare_components(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "escape").symlink_to(tmp_path / "out")
    roots = Roots.parse(f" {tmp_path}/in , s3://bucket/team ,")
    for url in (
        f"{tmp_path}/in",
        f"{tmp_path}/in/x/y",
        f"file://{tmp_path}/in/x",
        f"FILE://localhost{tmp_path}/in/x",
        f"//{tmp_path}/./in//x",
        "s3://bucket/team/",
        "S3://bucket/team/x",
        "s3a://bucket/team/x",
    ):
        assert roots.allowed(url) == normalized_url(url)
    for url in (
        f"{tmp_path}/inside",
        f"{tmp_path}/in/../out",
        f"{tmp_path}/in/escape/x",
        "s3://bucket/teams",
        "gs://bucket/team",
    ):
        with pytest.raises(RequestError, match="root_forbidden"):
            roots.allowed(url)
    assert Roots().allowed("/anything//at/../all/") == "/anything/all"


def test_an_engine_learns_what_its_tenant_may_write() -> None:
    """The save directory of a tag with slashes lies further up than the target, which alone is judged before."""
    service = Roots(("s3://bucket/data",))
    tenant = TenantLimits(read_roots=("s3://bucket/data",), write_roots=("s3://bucket/data/out",))
    found = tenant.roots(service)
    assert (set(found.urls), found.writable) == (
        {"s3://bucket/data", "s3://bucket/data/out"},
        ("s3://bucket/data/out",),
    )
    assert SERVICE.roots(service).writable == service.urls
    assert SERVICE.roots(Roots()).writable == ()


def test_a_request_is_rewritten_to_what_was_judged(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    roots = Roots.parse(f"{tmp_path}/link,s3a://bucket/team")
    request = ConvertRequest(
        source=SourceSpec(url=f"file://{tmp_path}/link/ck/", tag="t"),
        target="s3n://bucket/team/out/",
        to=TargetFormat.UNIVERSAL,
        threads=3,
    )
    judged = roots.allowed_request(request)
    assert judged.source.url == f"{tmp_path}/in/ck"
    assert judged.target == "s3://bucket/team/out"
    assert (judged.source.tag, judged.threads) == ("t", 3)
    # What is written beside a target must be below the root too.
    for target in ("s3://bucket/team", f"{tmp_path}/in/"):
        with pytest.raises(RequestError, match="root_forbidden"):
            roots.allowed_request(request.model_copy(update={"target": target}))
    weights = request.model_copy(update={"to": TargetFormat.SAFETENSORS, "model_files": f"{tmp_path}/link/model/"})
    assert roots.allowed_request(weights).model_files == f"{tmp_path}/in/model"
    with pytest.raises(RequestError, match="root_forbidden"):
        roots.allowed_request(weights.model_copy(update={"model_files": str(tmp_path)}))

    def merging(base: str) -> ConvertRequest:
        return weights.model_copy(update={"options": Options(peft=PeftOptions(merge_adapter=True, base=base))})

    judged = roots.allowed_request(merging(f"{tmp_path}/link/base/"))
    assert judged.options.peft == PeftOptions(merge_adapter=True, base=f"{tmp_path}/in/base")
    with pytest.raises(RequestError, match="root_forbidden"):
        roots.allowed_request(merging(f"{tmp_path}/models--org--name"))
    with pytest.raises(RequestError, match=r"request\.invalid"):
        Roots.parse("data,s3://bucket")


def test_jobs_read_a_repository_below_a_root_and_upload_nothing(tmp_path: Path) -> None:
    """A root of an owner has all revisions of its repositories; that of a repository has its branch `main` alone."""
    roots = Roots.parse(f"hf://org,hf://other/name,{tmp_path}")
    assert roots.allowed("hf://org/name@main/run/") == "hf://org/name/run"
    assert roots.allowed("hf://org/name@refs/pr/1") == "hf://org/name@refs%2Fpr%2F1"
    assert roots.allowed("hf://models/other/name") == "hf://other/name"
    for url in ("hf://organ/name", "hf://other/name@exp", "hf://other/name2", "hf://other"):
        with pytest.raises(RequestError, match="root_forbidden"):
            roots.allowed(url)
    request = ConvertRequest(source=SourceSpec(url="hf://org/name"), target="hf://org/new", to=TargetFormat.SAFETENSORS)
    for allowed in (roots, Roots()):
        with pytest.raises(RequestError, match=r"request\.unsatisfiable.*token of its user"):
            allowed.allowed_request(request)
    local = request.model_copy(update={"target": str(tmp_path / "out")})
    assert roots.allowed_request(local).source.url == "hf://org/name"


def test_settings() -> None:
    settings = JobSettings.from_env({"RESHARD_LEASE_S": "6", "RESHARD_HEARTBEAT_S": "1.5", "RESHARD_ROOTS": "s3://b"})
    assert (settings.lease_s, settings.heartbeat_s, settings.roots.urls) == (6.0, 1.5, ("s3://b",))
    for wrong in (
        {"RESHARD_LEASE_S": "0"},
        {"RESHARD_LEASE_S": "x"},
        {"RESHARD_LEASE_S": "inf"},
        {"RESHARD_HEARTBEAT_S": "31"},
    ):
        with pytest.raises(RequestError, match=r"request\.invalid"):
            JobSettings.from_env(wrong)


def test_sizes() -> None:
    for text, size in {
        "0": 0,
        "5GB": 5_000_000_000,
        "1 GiB": 1 << 30,
        "1.5kib": 1536,
        "4096b": 4096,
        "2TiB": 2 << 40,
    }.items():
        assert parse_size(text) == size
    for text in ("", "GB", "-1", "1e9", "5 parsecs", "1.2.3"):
        with pytest.raises(RequestError, match=r"request\.invalid"):
            parse_size(text)
    assert [format_size(n) for n in (0, 1023, 1536, 5 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5 GiB",
        "3.07e+03 TiB",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "ftp://ops:P4SS@host/x",
        "ftp://ops:P4%40SS@host/x",
        "ftp://ops:P4@SS@host/x",
        "github://ops:P4SS@ref/x",
        "hdfs://ops:P4SS@host:9000/x",
        "sftp://ops:P4SS@host/x",
        "s3://ops:P4SS@bucket/x",
        "az://ops:P4SS@container/x",
    ],
)
def test_urls_with_a_password_are_rejected_without_showing_it(url: str) -> None:
    error = raised(RequestError, canonical_url, url)
    assert error.code == "request.invalid"
    assert "SS" not in str(error), error
    assert error.fix.startswith(f"write {url.partition('://')[0]}://")


@pytest.mark.parametrize("scheme", sorted({*known_implementations, *registry}))
def test_every_scheme_of_fsspec_has_a_store_or_a_typed_error(scheme: str) -> None:
    # Any other exception ends a job with `internal.error`.
    with suppress(RequestError):
        assert open_location(f"{scheme}://org/name/x").store.scheme


@pytest.mark.parametrize("scheme", ["ftp", "github", "dbfs", "jupyter", "webhdfs"])
def test_a_scheme_whose_file_system_needs_arguments_names_them(scheme: str) -> None:
    if scheme != "ftp":
        pytest.importorskip("requests", reason="without it, fsspec asks for it first")
    error = raised(RequestError, open_location, f"{scheme}://host/x")
    assert error.code == "request.unknown_scheme"
    assert "which reshard cannot pass" in error.message
    assert error.fix.startswith("copy the checkpoint")
