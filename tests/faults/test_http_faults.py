"""Wrong answers under the clients of object stores: errors are typed, and the next run gives the same bytes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from checkpoints import write_zero_checkpoint

from faults.judge import Ledger, strays
from faults.small import NAME
from house.requests import asked
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.options import SourceSpec
from servers.faulty import FaultyProxy, Wrong, faulty_proxy
from servers.stores import ObjectServer

ENGINE = load_engine()
PARENT = "out"
MANY = 1000

Applies = Callable[[str, str], bool]
ALIKE: dict[str, Applies] = {
    "source read": lambda method, target: method == "GET" and "/run/" in target and "comp=" not in target,
    "head": lambda method, _target: method == "HEAD",
    "claim": lambda method, target: method == "PUT" and "reshard-claim" in target,
    "plan": lambda method, target: method == "PUT" and "plan.json" in target,
    "unit record": lambda method, target: method == "PUT" and "/unit-" in target,
    "small object": lambda method, target: method == "PUT" and target.partition("?")[0].endswith("index.json"),
    "manifest": lambda method, target: method == "PUT" and target.partition("?")[0].endswith("reshard.json"),
    "delete": lambda method, _target: method == "DELETE",
}


def _stages(target: str) -> bytes:
    """The name of the block that a request stages."""
    return base64.b64decode(parse_qs(urlsplit(target).query).get("blockid", [""])[0])


def _puts(end: str) -> Applies:
    """Uploads to gs:// of objects whose name holds this text."""
    return lambda method, target: method == "POST" and end in parse_qs(urlsplit(target).query).get("name", [""])[0]


REQUESTS: dict[str, dict[str, Applies]] = {
    "s3": {
        **ALIKE,
        "listing": lambda method, target: method == "GET" and "list-type" in target,
        "create": lambda method, target: method == "POST" and target.endswith("?uploads"),
        "part": lambda method, target: method == "PUT" and "partNumber" in target,
        "complete": lambda method, target: method == "POST" and "uploadId" in target,
    },
    "gs": {
        "source read": lambda method, target: method == "GET" and "run%2F" in target and "alt=media" in target,
        "listing": lambda method, target: method == "GET" and "maxResults" in target,
        "head": lambda method, target: method == "GET" and "/o/" in target and "alt=media" not in target,
        "claim": _puts("reshard-claim"),
        "plan": _puts("plan.json"),
        "unit record": _puts("/unit-"),
        "small object": _puts("index.json"),
        "manifest": _puts("/reshard.json"),
        "create": _puts("/begun"),
        "part": _puts("/part-"),
        "complete": lambda method, target: method == "POST" and "/compose" in target,
        "delete": lambda method, _target: method == "DELETE",
    },
    "az": {
        **ALIKE,
        "listing": lambda method, target: method == "GET" and "comp=list" in target,
        "create": lambda method, target: method == "PUT" and _stages(target)[19:24] == b"00000",
        "part": lambda method, target: method == "PUT" and _stages(target)[19:24] > b"00000",
        "block list": lambda method, target: method == "GET" and "comp=blocklist" in target,
        "complete": lambda method, target: method == "PUT" and "comp=blocklist" in target,
    },
}
SHORT = [
    ("source read", Wrong.SHORT_BODY),
    ("create", Wrong.LOST),
    ("complete", Wrong.ERROR_IN_200),
    ("manifest", Wrong.RESET_AFTER),
]


class Bench:
    """A source and targets behind the proxy, and what an undisturbed run leaves."""

    def __init__(self, store: ObjectServer, proxy: FaultyProxy, bucket: str) -> None:
        self.store = store
        self.proxy = proxy
        self.bucket = bucket
        self.request = asked(
            source=SourceSpec(url=f"{store.scheme}://{bucket}/run"),
            target=f"{store.scheme}://{bucket}/{PARENT}/{NAME}",
            to=TargetFormat.SAFETENSORS,
            part_bytes=5 << 20,
            max_shard_bytes=6_150_000,
            threads=1,
        )
        assert self.attempt() == "done"
        self.expected = self.content()
        self.clear()

    def attempt(self) -> str:
        try:
            return "recognised" if ENGINE.convert(self.request).already_done else "done"
        except ReshardError as error:
            return error.code

    def content(self) -> dict[str, bytes]:
        found = self.store.read_all(self.bucket, PARENT)
        found.pop(f"{NAME}/reshard.json", None)
        return found

    def clear(self) -> None:
        for key in self.store.read_all(self.bucket, PARENT):
            self.store.delete(self.bucket, f"{PARENT}/{key}")

    def trial(self, kind: str, wrong: Wrong, times: int) -> tuple[str, list[str]]:
        """The disturbed run, then the same request again."""
        self.proxy.break_next(wrong, REQUESTS[self.store.scheme][kind], times=times)
        end = self.attempt()
        hit = len(self.proxy.hit)
        self.proxy.break_next(wrong, lambda _method, _target: False)
        found = self.content()
        index = f"{NAME}/model.safetensors.index.json"
        problems = [
            None if hit else "no request went wrong",
            "a partial result is readable" if index in found and not self.expected.items() <= found.items() else None,
        ]
        again = self.attempt()
        found = self.content()
        uploads = self.store.unfinished(self.bucket)
        problems += [
            None if again in {"done", "recognised"} else f"the next run ended with {again}",
            None if found == self.expected else f"in the end: {sorted(found)}",
            None if not strays(found) and not uploads else f"left: {strays(found)} {uploads}",
            None if ENGINE.verify(self.request.target).ok else "the manifest does not agree",
        ]
        self.clear()
        return end, [p for p in problems if p]


@pytest.fixture
def place(store: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[Bench]:
    bucket = store.new_bucket()
    write_zero_checkpoint(tmp_path / "run", [("embed.weight", (1500, 1024)), ("bias", (64, 64))], stage=3, ranks=2)
    store.upload(tmp_path / "run", bucket, "run")
    with faulty_proxy(store.endpoint) as proxy:
        for name, value in store.env(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield Bench(store, proxy, bucket)


@pytest.mark.timeout(280)
def test_one_wrong_answer(place: Bench) -> None:
    ledger = Ledger(f"one wrong answer of the {place.store.scheme} server")
    for kind, wrong in SHORT:
        ledger.note(wrong, *_named(kind, place.trial(kind, wrong, 1)))
    ledger.settle()


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("times", [1, MANY])
def test_wrong_answers_to_every_kind_of_request(place: Bench, times: int) -> None:
    """Once, which the client repeats by itself, and each time, which it cannot."""
    ledger = Ledger(f"wrong answers of the {place.store.scheme} server, {'once' if times == 1 else 'always'}")
    for kind in REQUESTS[place.store.scheme]:
        for wrong in Wrong:
            if wrong is not Wrong.ERROR_IN_200 or kind in {"complete", "create"}:
                ledger.note(wrong, *_named(kind, place.trial(kind, wrong, times)))
    ledger.settle()


def _named(kind: str, trial: tuple[str, list[str]]) -> tuple[str, str, list[str]]:
    return trial[0], kind, trial[1]
