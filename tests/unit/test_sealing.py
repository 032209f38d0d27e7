"""Signed statements about checkpoints: others' verifiers accept them, and each kind of forgery has its own refusal."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from google.protobuf import json_format
from in_toto_attestation.v1 import statement as in_toto
from model_signing import verifying
from moto.server import ThreadedMotoServer
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner, SSlibKey

import reshard
from house.fingerprint_checker import read_safetensors
from house.keys import key_pair
from house.launchers import forget_launchers
from house.repository import ROOT
from reshard.cli.main import run
from reshard.errors import IntegrityError, RequestError, ReshardError, SourceError
from reshard.models.jobs import Progress
from reshard.models.reports import SealCheck, SealReport
from reshard_engine.operations.proof import sealing, statements
from reshard_engine.storage.urls import confine

TINY = ROOT / "tests" / "data" / "zero2_tiny"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a checkpoint `run`, its certificate, and the keys `seal.key` and `seal.pub`."""
    shutil.copytree(TINY, tmp_path / "run")
    key_pair(tmp_path, "seal")
    written(tmp_path, seal(tmp_path))
    return tmp_path


def seal(place: Path, key: str = "seal.key") -> SealReport:
    return reshard.seal(place / "run", key=place / key, progress=False)


def written(place: Path, report: SealReport, name: str = "run.sealed.json") -> Path:
    (place / name).write_text(report.certificate)
    return place / name


def check(place: Path, what: str = "run", *certificates: str) -> SealCheck:
    found = [place / name for name in certificates or (f"{what}.sealed.json",)]
    return reshard.verify_sealed(place / what, found, [place / "seal.pub"])


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ReshardError) as raised:
        call()
    return raised.value.code


def edited(certificate: Path, change: Callable[[dict[str, Any]], None], key: Path | None = None) -> None:
    """Change the statement of a certificate, and sign it again if a key is given."""
    bundle = json.loads(certificate.read_text())
    envelope = bundle["dsseEnvelope"]
    body = json.loads(base64.b64decode(envelope["payload"]))
    change(body)
    payload = json.dumps(body).encode()
    envelope["payload"] = base64.b64encode(payload).decode()
    if key is not None:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
        keyid = envelope["signatures"][0]["keyid"]
        signer = CryptoSigner(private, SSlibKey.from_crypto(private.public_key(), keyid=keyid))
        again = Envelope(payload, envelope["payloadType"], {})
        again.sign(signer)
        bundle["dsseEnvelope"] = again.to_dict()
    certificate.write_text(json.dumps(bundle))


# -- what is sealed, by others' verifiers ---------------------------------------------------------------


def test_a_sealed_checkpoint_is_the_one_that_was_sealed(place: Path) -> None:
    report, found = seal(place), check(place)
    assert found.ok
    assert found.problems == ()
    (step,) = found.chain
    assert (step.contents, step.fingerprint) == (report.contents, report.fingerprint)
    assert report.fingerprint == reshard.fingerprint(TINY).digest
    assert report.files == 3
    assert not report.weights_only
    assert step.plan_digest is None


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1()], ids=lambda c: c.name)
def test_the_verifier_of_model_signing_accepts_a_seal(curve: Any, place: Path) -> None:
    _, public = key_pair(place, "ec", ec.generate_private_key(curve))
    certificate = written(place, seal(place, "ec.key"), "ec.json")
    config = verifying.Config().use_elliptic_key_verifier(public_key=public)
    config.verify(place / "run" / "global_step3", certificate)
    (place / "run" / "global_step3" / "more").write_text("x")
    with pytest.raises(ValueError, match="Extra files"):
        config.verify(place / "run" / "global_step3", certificate)


def test_the_libraries_of_in_toto_accept_a_seal(place: Path) -> None:
    """Theirs verify ed25519, which model-signing does not."""
    envelope = Envelope.from_dict(json.loads((place / "run.sealed.json").read_text())["dsseEnvelope"])
    (keyid,) = envelope.signatures
    public = serialization.load_pem_public_key((place / "seal.pub").read_bytes())
    assert envelope.verify([SSlibKey.from_crypto(public, keyid=keyid)], 1).keys() == {keyid}
    parsed = in_toto.Statement.copy_from_pb(json_format.Parse(envelope.payload, in_toto.Statement([], "", {}).pb))
    parsed.validate()
    assert parsed.pb.predicate_type == "https://model_signing/signature/v1.0"
    assert [s.name for s in parsed.pb.subject] == ["global_step3"]


def test_a_single_file_can_be_sealed(place: Path) -> None:
    reshard.convert(place / "run", place / "out", to="torch_save", progress=False)
    (alone,) = (place / "out").glob("*.pt")
    certificate = written(place, reshard.seal(alone, key=place / "seal.key", progress=False), "file.json")
    assert reshard.verify_sealed(alone, [certificate], [place / "seal.pub"]).ok


# -- forgeries ------------------------------------------------------------------------------------------


def lighter(body: dict[str, Any]) -> None:
    body["predicate"]["reshard"]["step"] = 4


@pytest.mark.parametrize("what", ["statement", "signature", "envelope", "another statement of the key"])
def test_a_tampered_statement_is_refused(what: str, place: Path) -> None:
    certificate = place / "run.sealed.json"
    bundle = json.loads(certificate.read_text())
    if what == "statement":
        edited(certificate, lighter)
    elif what == "another statement of the key":
        edited(certificate, lambda body: body["predicate"].pop("reshard"), place / "seal.key")
    elif what == "signature":
        bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(bytes(64)).decode()
        certificate.write_text(json.dumps(bundle))
    else:
        certificate.write_text(json.dumps({**bundle, "dsseEnvelope": []}))
    assert refusal(lambda: check(place)) == "integrity.signature"


def of_the_bundle(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def write(certificate: Path) -> None:
        bundle = json.loads(certificate.read_text())
        change(bundle)
        certificate.write_text(json.dumps(bundle))

    return write


def of_the_statement(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda certificate: edited(certificate, change, certificate.parent / "seal.key")


DEEP = "[" * 200_000 + "]" * 200_000
BROKEN: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda c: c.write_bytes(b"\xff{"),
    "a list": lambda c: c.write_text("[]"),
    "deep": lambda c: c.write_text(DEEP),
    "keyid null": of_the_bundle(lambda b: b["dsseEnvelope"]["signatures"][0].update(keyid=None)),
    "keyid a list": of_the_bundle(lambda b: b["dsseEnvelope"]["signatures"][0].update(keyid=[1])),
    "signature a number": of_the_bundle(lambda b: b["dsseEnvelope"]["signatures"][0].update(sig=1)),
    "signatures an object": of_the_bundle(lambda b: b["dsseEnvelope"].update(signatures={"a": 1})),
    "payload a number": of_the_bundle(lambda b: b["dsseEnvelope"].update(payload=5)),
    "type a surrogate": of_the_bundle(lambda b: b["dsseEnvelope"].update(payloadType="\ud800")),
    "type null": of_the_bundle(lambda b: b["dsseEnvelope"].update(payloadType=None)),
    "file names are numbers": of_the_statement(lambda s: [r.update(name=1) for r in s["predicate"]["resources"]]),
    "the subject's name is a number": of_the_statement(lambda s: s["subject"][0].update(name=7)),
    "two subjects": of_the_statement(lambda s: s["subject"].append(s["subject"][0])),
    "the statement's type is a list": of_the_statement(lambda s: s.update(_type=[])),
    "another version": of_the_statement(lambda s: s["predicate"]["reshard"].update(version=99)),
    "another algorithm": of_the_statement(lambda s: s["predicate"]["resources"][0].update(algorithm="md5")),
    "no algorithm": of_the_statement(lambda s: s["predicate"]["resources"][0].pop("algorithm")),
    "a digest is a number": of_the_statement(lambda s: s["predicate"]["resources"][0].update(digest=1)),
    "choices of another version": of_the_statement(lambda s: s["predicate"]["reshard"].update(choices={"opaque": 3})),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_certificate_that_is_none_is_named_and_hides_no_other(what: str, place: Path) -> None:
    certificate = written(place, seal(place), "strange.sealed.json")
    BROKEN[what](certificate)
    assert check(place).ok
    assert refusal(lambda: check(place, "run", "strange.sealed.json")) == "integrity.signature"


def test_a_deep_statement_that_is_signed_is_refused(place: Path) -> None:
    key = serialization.load_pem_private_key((place / "seal.key").read_bytes(), None)
    keyid = json.loads((place / "run.sealed.json").read_text())["dsseEnvelope"]["signatures"][0]["keyid"]
    envelope = Envelope(DEEP.encode(), "application/vnd.in-toto+json", {})
    envelope.sign(CryptoSigner(key, SSlibKey.from_crypto(key.public_key(), keyid=keyid)))  # type: ignore[arg-type, union-attr]
    (place / "run.sealed.json").write_text(json.dumps({"dsseEnvelope": envelope.to_dict()}))
    assert refusal(lambda: check(place)) == "integrity.signature"


@pytest.mark.parametrize("part", ["resources", "lines", "components", "kind"])
def test_a_statement_that_contradicts_itself_is_refused_even_if_it_is_signed(part: str, place: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        state = body["predicate"]["reshard"]["state"]
        if part == "resources":
            body["predicate"]["resources"][0]["digest"] = "0" * 64
        elif part == "kind":
            body["predicateType"] = "https://example.com/another"
        elif part == "lines":
            state["lines"]["moments"] = state["lines"]["moments"][1:]
        else:
            state["components"]["counters"] = None

    edited(place / "run.sealed.json", change, place / "seal.key")
    assert refusal(lambda: check(place)) == "integrity.signature"


def test_a_wrong_key_is_refused(place: Path) -> None:
    key_pair(place, "other")
    assert (
        refusal(lambda: reshard.verify_sealed(place / "run", [place / "run.sealed.json"], [place / "other.pub"]))
        == "integrity.wrong_key"
    )
    both = [place / "other.pub", place / "seal.pub"]
    assert reshard.verify_sealed(place / "run", [place / "run.sealed.json"], both).ok


def test_a_swapped_file_is_named_with_its_tensors(place: Path) -> None:
    (moment,) = (held[2] for n, held in read_safetensors(TINY / "expected.safetensors").items() if n == _MOMENT)
    shards = (place / "run" / "global_step3").glob("*optim_states.pt")
    # The moment lies in a file as it lies in memory.
    shard = next(path for path in shards if moment[:16] in path.read_bytes())
    data = bytearray(shard.read_bytes())
    data[data.index(moment[:16])] ^= 1
    shard.write_bytes(data)
    found = check(place)
    assert not found.ok
    assert [p.path for p in found.problems if p.path] == [shard.name]
    assert {p.tensor for p in found.problems if p.tensor} == {"layers.0.up.weight"}
    shutil.copy(ROOT / "tests" / "data" / "zero3_tiny" / "expected.json", shard)
    assert [p.path for p in check(place).problems if p.path] == [shard.name]


def test_a_damaged_checkpoint_is_not_sealed(tmp_path: Path) -> None:
    key_pair(tmp_path, "seal")
    place = tmp_path / "run"
    place.mkdir()
    torch.save({"w": torch.arange(1000.0)}, place / "model.pt")
    data = bytearray((place / "model.pt").read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes())] ^= 1
    (place / "model.pt").write_bytes(data)
    assert refusal(lambda: seal(tmp_path)) == "zip.crc"


_MOMENT = "exp_avg/layers.0.up.weight"


def linked(place: Path) -> Path:
    """A universal checkpoint `run`, one of whose directories of parameters is a link to `elsewhere`."""
    key_pair(place, "seal")
    reshard.convert(TINY, place / "run", to="universal", progress=False)
    parameter = min(p for p in (place / "run").glob("**/zero/*") if p.is_dir())
    parameter.rename(place / "elsewhere")
    parameter.symlink_to(place / "elsewhere")
    return parameter


def test_the_files_of_a_linked_directory_are_sealed_under_the_paths_that_a_reader_opens(tmp_path: Path) -> None:
    """They were in no statement: whoever changed what the fingerprint does not cover was not found."""
    parameter = linked(tmp_path)
    written(tmp_path, seal(tmp_path))
    assert check(tmp_path).ok
    names = {path.name for path in (tmp_path / "elsewhere").iterdir()}
    file = tmp_path / "elsewhere" / min(names)
    file.write_bytes(file.read_bytes() + b"\0")
    problems = {problem.path for problem in check(tmp_path).problems}
    top = next(p for p in parameter.parents if p.parent == tmp_path)
    assert str(file.name) in {path.rpartition("/")[2] for path in problems}
    assert f"{(parameter / file.name).relative_to(top)}" in problems


def test_a_directory_that_becomes_a_link_to_another_is_not_the_sealed_one(place: Path) -> None:
    shutil.copytree(place / "run", place / "forged")
    (place / "forged" / "global_step3" / "added.txt").write_text("x")
    shutil.rmtree(place / "run" / "global_step3")
    (place / "run" / "global_step3").symlink_to(place / "forged" / "global_step3")
    assert [problem.path for problem in check(place).problems] == ["added.txt"]


def test_a_part_of_a_checkpoint_that_no_seal_lists_is_rejected_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifiers of model-signing leave some names out, such as `.git`: a reader must open none of these files."""
    key_pair(tmp_path, "seal")
    reshard.convert(TINY, tmp_path / "run", to="safetensors", progress=False)
    monkeypatch.setattr(sealing, "NOT_SEALED", ("model.safetensors",))
    with pytest.raises(RequestError, match=r"model\.safetensors is a part of the checkpoint") as raised:
        seal(tmp_path)
    assert raised.value.code == "request.unsatisfiable"


def test_missing_and_added_files_are_named(place: Path) -> None:
    directory = place / "run" / "global_step3"
    (directory / "added.txt").write_text("x")
    assert [(p.path, p.problem) for p in check(place).problems] == [("added.txt", "was not sealed")]
    gone = min(directory.glob("*optim_states.pt"))
    gone.unlink()
    problems = {p.path: p.problem for p in check(place).problems}
    assert {path for path in problems if path} == {gone.name, "added.txt"}
    assert problems[gone.name] == "is missing"
    assert problems[""].startswith("the state cannot be read: checkpoint.incomplete")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # the path of a socket may have 107 bytes
        server.bind(path.name)


NO_FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "FIFO": ("is a FIFO", os.mkfifo),
    "socket": ("is a socket", listening),
    "dead link": ("is a dead link", lambda path: path.symlink_to("/nonexistent/states.pt")),
    "link to itself": ("is a dead link", lambda path: path.symlink_to(path.name)),
    "in a directory": ("is a FIFO", lambda path: (path.mkdir(), os.mkfifo(path / "inner"))),
    "in a linked directory": (
        "is a FIFO",
        lambda path: ((d := path.parents[2] / "there").mkdir(), os.mkfifo(d / "inner"), path.symlink_to(d)),
    ),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_and_can_be_opened_by_its_name_is_neither_sealed_nor_accepted(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    what, make = NO_FILES[kind]
    path = place / "run" / "global_step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    make(path)
    (place / "run" / "global_step3" / "empty").mkdir()
    name = f"{path.name}/inner" if path.is_dir() else path.name
    assert [(p.path, p.problem) for p in check(place).problems] == [(name, f"{what}, which no seal lists")]
    with pytest.raises(RequestError, match=f"{name} {what}") as raised:
        seal(place)
    assert raised.value.code == "request.unsatisfiable"
    with pytest.raises(RequestError, match=f"{name} {what}"):
        reshard.convert(place / "run", place / "out", to="universal", sign=place / "seal.key")
    assert not (place / "out").exists()


def test_a_fifo_in_the_place_of_a_sealed_file_is_named_once(place: Path) -> None:
    shard = min((place / "run" / "global_step3").glob("*optim_states.pt"))
    shard.unlink()
    os.mkfifo(shard)
    assert [(p.path, p.problem) for p in check(place).problems if p.path] == [
        (shard.name, "is a FIFO, which no seal lists")
    ]


# -- chains ---------------------------------------------------------------------------------------------


@pytest.fixture
def chain(place: Path) -> Path:
    """The place with `zero/global_step3`, made from `run`, and with `weights`, made from that; both are sealed."""
    key = str(place / "seal.key")
    (place / "zero").mkdir()
    native, weights = place / "zero" / "global_step3", place / "weights"
    first = ["convert", str(place / "run"), str(native), "--to", "zero", "--dp", "3", "-q"]
    assert run([*first, "--sign", key, "--cert", str(place / "run.sealed.json")]) == 0
    second = ["convert", str(native), str(weights), "--to", "safetensors", "--dtype", "bf16", "-q", "--sign", key]
    assert run([*second, "--cert", f"{native}.sealed.json"]) == 0
    return place


def test_a_chain_is_walked_to_its_first_source(chain: Path) -> None:
    found = check(chain, "weights", "weights.sealed.json", "zero/global_step3.sealed.json")
    assert found.ok
    weights, native, source = found.chain
    assert source.plan_digest is None
    assert native.changed == ()
    assert native.fingerprint == source.fingerprint
    assert weights.dtype == "bf16"
    assert set(weights.changed) == {"model", "moments", "counters", "groups"}
    assert {entry.path for entry in weights.not_carried} >= {"lr_scheduler"}
    manifest = json.loads((chain / "weights" / "reshard.json").read_text())
    assert weights.plan_digest == manifest["plan_digest"]


def test_a_truncated_chain_is_refused(chain: Path) -> None:
    assert refusal(lambda: check(chain, "weights")) == "integrity.chain"
    (chain / "run.sealed.json").unlink()
    both = ("weights.sealed.json", "zero/global_step3.sealed.json")
    assert refusal(lambda: check(chain, "weights", *both)) == "integrity.chain"


def test_a_link_to_a_statement_about_another_source_is_refused(chain: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["predicate"]["reshard"]["origin"]["contents"] = "0" * 64

    edited(chain / "zero" / "global_step3.sealed.json", change, chain / "seal.key")
    both = ("zero/global_step3.sealed.json", "run.sealed.json")
    assert refusal(lambda: check(chain, "zero/global_step3", *both)) == "integrity.chain"


def test_without_a_certificate_the_source_is_sealed_as_well(place: Path) -> None:
    target = place / "universal"
    words = ["convert", str(place / "run"), str(target), "--to", "universal", "-q", "--sign", str(place / "seal.key")]
    assert run(words) == 0
    (place / "run.sealed.json").unlink()
    one, other = check(place, "universal").chain
    assert one.fingerprint == other.fingerprint
    assert (place / "universal.source.sealed.json").exists()


def test_a_source_that_is_not_the_sealed_one_is_not_converted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run" / "global_step3" / "added.txt").write_text("x")
    words = ["convert", str(place / "run"), str(place / "out"), "--to", "universal", "--sign", str(place / "seal.key")]
    assert run([*words, "--cert", str(place / "run.sealed.json")]) == 7
    assert "integrity.sealed" in capsys.readouterr().err
    assert not (place / "out").exists()


def test_a_source_that_changes_during_the_conversion_gets_no_certificate(place: Path) -> None:
    def change(progress: Progress) -> None:
        if progress.phase == "committing":
            (place / "run" / "global_step3" / "added.txt").write_text("x")

    with pytest.raises(SourceError, match="changed while") as raised:
        reshard.convert(place / "run", place / "out", to="universal", sign=place / "seal.key", on_progress=change)
    assert raised.value.code == "source.changed"
    assert not list(place.glob("out*.sealed.json"))


def added(target: Path) -> str:
    (target / "added.txt").write_text("x")
    return "added.txt was added"


def opened_by_its_name(target: Path) -> str:
    os.mkfifo(target / "model-2.safetensors")
    return "model-2.safetensors (a FIFO) was added"


def flipped(target: Path) -> str:
    data = bytearray((target / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (target / "model.safetensors").write_bytes(data)
    return "model.safetensors was changed"


def changed_under_its_crc(target: Path) -> str:
    """Another tensor whose last four bytes keep the CRC-32 of its file, and the time of the last change as it was."""
    file = target / "model.safetensors"
    before, status = file.read_bytes(), file.stat()
    data = bytearray(before)
    data[-16] ^= 1
    # CRC-32 is linear: the four bytes are the sum of those that change single bits of it.
    wanted = zlib.crc32(before) ^ zlib.crc32(data)
    basis: dict[int, tuple[int, int]] = {}
    for bit in range(32):
        crc, mask = zlib.crc32((1 << bit).to_bytes(4, "little")) ^ zlib.crc32(bytes(4)), 1 << bit
        while crc and crc.bit_length() in basis:
            other, bits = basis[crc.bit_length()]
            crc, mask = crc ^ other, mask ^ bits
        if crc:
            basis[crc.bit_length()] = crc, mask
    bits = 0
    while wanted:
        crc, mask = basis[wanted.bit_length()]
        wanted, bits = wanted ^ crc, bits ^ mask
    data[-4:] = (int.from_bytes(data[-4:], "little") ^ bits).to_bytes(4, "little")
    assert zlib.crc32(data) == zlib.crc32(before)
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    return "model.safetensors was changed (the elements of"


def touched(target: Path) -> str:
    os.utime(target / "model.safetensors", (1, 1))
    return "model.safetensors was written again"


def forged(target: Path) -> str:
    """Other weights with the manifest of their own conversion, under which `verify` finds nothing wrong."""
    shutil.copytree(TINY, target.parent / "other")
    states = target.parent / "other" / "global_step3" / "mp_rank_00_model_states.pt"
    values = torch.load(states, weights_only=False)
    torch.save({**values, "global_steps": 7}, states)
    reshard.convert(target.parent / "other", target, to="safetensors", overwrite=True, dtype="fp16", progress=False)
    return "model.safetensors"


@pytest.mark.parametrize("change", [added, opened_by_its_name, flipped, changed_under_its_crc, touched, forged])
def test_a_target_that_changes_between_its_commit_and_its_seal_is_not_signed(
    place: Path, change: Callable[[Path], str]
) -> None:
    said: list[str] = []

    def meanwhile(progress: Progress) -> None:
        if progress.phase == "done" and not said and (place / "out" / "reshard.json").exists():
            said.append(change(place / "out"))

    with pytest.raises(IntegrityError) as raised:
        reshard.convert(place / "run", place / "out", to="safetensors", sign=place / "seal.key", on_progress=meanwhile)
    assert raised.value.code == "integrity.mismatch"
    assert said[0] in raised.value.message
    assert not list(place.glob("out*.sealed.json"))


def test_a_finished_target_whose_files_were_copied_is_read_and_signed(place: Path) -> None:
    """Its files have other times than at the commit, and the same bytes."""
    reshard.convert(place / "run", place / "out", to="safetensors")
    touched(place / "out")
    done = reshard.convert(place / "run", place / "out", to="safetensors", sign=place / "seal.key")
    assert done.already_done
    assert check(place, "out").ok
    changed_under_its_crc(place / "out")
    with pytest.raises(ReshardError):
        reshard.convert(place / "run", place / "out", to="safetensors", sign=place / "seal.key")


def test_the_function_signs_as_the_command_does(place: Path) -> None:
    native = reshard.convert(
        place / "run", place / "zero3", to="zero", dp=3, sign=place / "seal.key", cert=place / "run.sealed.json"
    )
    assert native.certificates == (f"{place}/zero3.sealed.json",)
    key_pair(place, "other")
    done = reshard.convert(
        place / "zero3",
        place / "weights",
        to="safetensors",
        sign=place / "other.key",
        cert=place / "zero3.sealed.json",
        trust=[place / "seal.pub"],
    )
    found = reshard.verify_sealed(place / "weights", done.certificates, [place / "other.pub", place / "seal.pub"])
    assert found.ok
    assert len(found.chain) == 3
    assert refusal(lambda: check(place, "weights")) == "integrity.wrong_key"


def test_workers_that_share_a_conversion_leave_one_pair_of_certificates(place: Path) -> None:
    words = ["convert", str(place / "run"), str(place / "out"), "--to", "universal", "-q", "--workers", "2"]
    signed = [*words, "--sign", str(place / "seal.key")]
    others = subprocess.Popen([Path(sys.executable).with_name("reshard"), *signed, "--worker", "1"])
    try:
        assert run([*signed, "--worker", "0"]) == 0
        assert others.wait(120) == 0
    finally:
        others.kill()
    assert check(place, "out").ok
    assert sorted(path.name for path in place.glob("*.sealed.json")) == [
        "out.sealed.json", "out.source.sealed.json", "run.sealed.json"
    ]  # fmt: skip


# -- a key in the environment ---------------------------------------------------------------------------


@pytest.fixture
def configured(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place, with a key that signs all conversions of this process."""
    monkeypatch.setenv("RESHARD_SIGNING_KEY", (place / "seal.key").read_text())
    return place


def test_a_key_in_the_environment_signs_all_conversions(configured: Path) -> None:
    done = reshard.convert(configured / "run", configured / "out", to="universal")
    assert done.certificates == tuple(f"{configured}/out{end}.sealed.json" for end in ("", ".source"))
    assert check(configured, "out").ok


def test_ensure_signs_with_the_key_in_the_environment(configured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_launchers(monkeypatch)
    made = Path(reshard.ensure(configured / "run", dp=3))
    assert reshard.ensure(configured / "run", dp=3) == str(made)
    tag = made / (made / "latest").read_text()
    found = reshard.verify_sealed(tag, [f"{tag}.sealed.json"], [configured / "seal.pub"])
    assert found.ok
    assert [step.changed for step in found.chain] == [(), ()]


def test_a_bad_key_in_the_environment_is_refused_and_not_shown(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_SIGNING_KEY", "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n")
    with pytest.raises(RequestError, match="the text of the key is not a private key in PEM") as raised:
        reshard.convert(place / "run", place / "out", to="universal")
    assert "c2VjcmV0" not in str(raised.value)
    assert not (place / "out").exists()


AROUND = {
    "a newline": lambda pem: f"\n{pem}",
    "spaces": lambda pem: f"  {pem} ",
    "quotes": lambda pem: f"'{pem}'",
    "a byte order mark": lambda pem: f"\ufeff{pem}",
    "no newline": str.strip,
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_a_key_as_text_may_have_around_it_what_copying_leaves(
    around: Callable[[str], str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESHARD_SIGNING_KEY", around((place / "seal.key").read_text()))
    reshard.convert(place / "run", place / "out", to="universal")
    assert check(place, "out").ok


DAMAGED = {
    "Base64 of the file": lambda pem: base64.b64encode(pem.encode()).decode(),
    "Base64 with its name": lambda pem: f"base64:{base64.b64encode(pem.encode()).decode()}",
    "the line between the headers": lambda pem: pem.splitlines()[1],
    "all but the first line": lambda pem: pem.partition("\n")[2],
    "hexadecimal digits": lambda pem: base64.b64decode(pem.splitlines()[1]).hex(),
    "the name of a variable before it": lambda pem: f"KEY={pem}",
    "one line": lambda pem: f"key: {pem}".replace("\n", "\\n"),
    "a word before it in a long line": lambda pem: f"k.{'x' * 300}{pem.splitlines()[1]}",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_value_that_may_be_a_private_key_is_named_and_not_shown(
    damage: Callable[[str], str], place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    value = damage((place / "seal.key").read_text())
    secret = max(value.replace("\\n", "\n").splitlines(), key=len)[-40:]
    commands = {
        ("seal", "run", "--key", value, "--out", "c.json"): "--key",
        ("convert", "run", "out", "--to", "universal", "--sign", value): "--sign",
        ("verify", "run", "--cert", "run.sealed.json", "--key", value): "--key",
        ("verify", "run", "--cert", value, "--key", "seal.pub"): "--cert",
    }
    monkeypatch.chdir(place)
    for words, option in commands.items():
        assert run(words) == 2
        text = "".join(capfd.readouterr())
        assert option in text
        assert secret not in text
    monkeypatch.setenv("RESHARD_SIGNING_KEY", value)
    with pytest.raises(RequestError, match="the value of RESHARD_SIGNING_KEY is neither") as raised:
        reshard.convert(place / "run", place / "out", to="universal")
    assert secret not in json.dumps(raised.value.to_problem())


def test_a_private_key_given_as_a_public_one_or_a_certificate_is_not_shown(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    pem = (place / "seal.key").read_text()
    assert run(["verify", "run", "--cert", "run.sealed.json", "--key", pem]) == 2
    assert run(["verify", "run", "--cert", pem, "--key", "seal.pub"]) == 2
    assert pem.splitlines()[1] not in "".join(capfd.readouterr())


def test_the_path_of_a_key_that_is_not_there_is_shown(place: Path) -> None:
    for missing in ("no.key", "seal"):
        with pytest.raises(SourceError, match=f"{missing}, the value of the private key") as raised:
            seal(place, missing)
        assert raised.value.code == "source.not_found"
    deep = place / ("a" * 60) / "seal"
    deep.parent.mkdir()
    shutil.copy(place / "seal.key", deep)
    assert seal(place, str(deep.relative_to(place))).certificate


def test_a_service_that_may_not_write_beside_the_target_does_not_begin(configured: Path) -> None:
    (configured / "out").mkdir()
    confine([str(configured)], [str(configured / "out")])
    try:
        assert refusal(
            lambda: reshard.convert(configured / "run", configured / "out", to="universal")
        ) == "request.root_forbidden"  # fmt: skip
    finally:
        confine([])
    assert not list((configured / "out").iterdir())


# -- keys and the command line --------------------------------------------------------------------------


def test_keys_that_cannot_sign_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="not a private key in PEM"):
        seal(place, "seal.pub")
    with pytest.raises(RequestError, match="not a public key in PEM"):
        reshard.verify_sealed(place / "run", [place / "run.sealed.json"], [place / "seal.key"])
    with pytest.raises(SourceError, match="no key or certificate"):
        seal(place, "none.key")
    with pytest.raises(RequestError, match="kept by a service"):
        reshard.seal(place / "run", key="awskms:alias/seal", progress=False)
    hidden = ed25519.Ed25519PrivateKey.generate()
    key_pair(place, "hidden", hidden, b"open sesame")
    with pytest.raises(RequestError, match="not a private key in PEM"):
        seal(place, "hidden.key")
    monkeypatch.setenv(statements.PASSPHRASE, "open sesame")
    certificate = written(place, seal(place, "hidden.key"))
    assert reshard.verify_sealed(place / "run", [certificate], [place / "hidden.pub"]).ok


@pytest.mark.parametrize("kind", ["rsa", "secp256k1"])
def test_keys_of_other_kinds_neither_sign_nor_verify(kind: str, place: Path) -> None:
    key = rsa.generate_private_key(65537, 2048) if kind == "rsa" else ec.generate_private_key(ec.SECP256K1())
    key_pair(place, "other", key)
    for call in (
        lambda: seal(place, "other.key"),
        lambda: reshard.seal(place / "run", key=(place / "other.key").read_text(), progress=False),
        lambda: reshard.verify_sealed(place / "run", [place / "run.sealed.json"], [place / "other.pub"]),
    ):
        with pytest.raises(RequestError, match=kind.upper() if kind == "rsa" else kind) as caught:
            call()
        assert caught.value.code == "request.invalid"
        assert "BEGIN" not in caught.value.message


def test_a_key_of_another_service_signs_through_its_library(place: Path) -> None:
    """`file2:` is a scheme of securesystemslib, as `awskms:` is: the library finds the signer, not reshard."""
    report = reshard.seal(
        place / "run", key=f"file2:{place / 'seal.key'}", public_key=place / "seal.pub", progress=False
    )
    written(place, report)
    assert check(place).ok


def test_a_key_of_aws_signs_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's KMS hashes the digest that it is sent once more, which it says it does: so does this check."""
    server = ThreadedMotoServer(port=0, ip_address="127.0.0.1", verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        service = boto3.client("kms")
        number = service.create_key(KeySpec="ECC_NIST_P256", KeyUsage="SIGN_VERIFY")["KeyMetadata"]["KeyId"]
        public: Any = serialization.load_der_public_key(service.get_public_key(KeyId=number)["PublicKey"])
        spki = serialization.PublicFormat.SubjectPublicKeyInfo
        (place / "kms.pub").write_bytes(public.public_bytes(serialization.Encoding.PEM, spki))
        report = reshard.seal(place / "run", key=f"awskms:{number}", public_key=place / "kms.pub", progress=False)
    finally:
        server.stop()
    envelope = Envelope.from_dict(json.loads(report.certificate)["dsseEnvelope"])
    (signature,) = envelope.signatures.values()
    public.verify(bytes.fromhex(signature.signature), sha256(envelope.pae()).digest(), ec.ECDSA(hashes.SHA256()))


def test_the_commands(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert run(["seal", "run", "--key", "seal.key", "-q"]) == 0
    assert capsys.readouterr().out == "global_step3.sealed.json\n"
    assert run(["verify", "run", "--cert", "global_step3.sealed.json", "--key", "seal.pub"]) == 0
    assert capsys.readouterr().out.startswith("ok: 3 files and the state are as sealed")
    (place / "run" / "global_step3" / "added.txt").write_text("x")
    assert run(["verify", "run", "--cert", "global_step3.sealed.json", "--key", "seal.pub"]) == 7
    printed = capsys.readouterr()
    assert printed.out.startswith("added.txt: was not sealed\n")
    assert "error: integrity.sealed: 1 difference between run and its certificate" in printed.err
    assert run(["verify", "run", "--cert", "global_step3.sealed.json"]) == 2


def test_the_files_beside_a_tag_are_named_as_not_covered(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Trainer resumes from them, and a statement is about the directory of the tag alone."""
    (place / "run").rename(place / "checkpoint-3")
    top = place / "checkpoint-3"
    for path in top.glob("*.*"):
        path.unlink()
    names = sorted(
        [*(f"rng_state_{rank}.pth" for rank in range(7)), "model.safetensors", "scheduler.pt", "config.json"]
    )
    for name in names:
        (top / name).write_text("{}")
    words = ["seal", str(top), "--key", str(place / "seal.key"), "--out", str(place / "c.json")]
    assert run([*words]) == 0
    sentence = (
        f"the seal covers {top}/global_step3, and not the 10 files beside it: {', '.join(names[:8])} and 2 more\n"
    )
    assert sentence in capsys.readouterr().err
    assert run([*words, "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["url"], report["not_covered"], report["not_covered_count"]) == (
        f"{top}/global_step3", names[:8], 10
    )  # fmt: skip
    (top / "model.safetensors").write_text("changed")
    (top / "a.pt").write_text("added")
    checked = ["verify", str(top), "--cert", str(place / "c.json"), "--key", str(place / "seal.pub")]
    assert run(checked) == 0
    assert "and not the 11 files beside it: a.pt, config.json" in capsys.readouterr().out
    assert run([*checked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["covered"], found["not_covered_count"]) == (f"{top}/global_step3", 11)
    assert found["not_covered"] == ["a.pt", *names[:7]]


@pytest.mark.parametrize("way", ["tag directory", "link to the tag directory"])
def test_a_directory_that_is_covered_itself_has_nothing_beside_it(way: str, place: Path) -> None:
    tag = place / "run" / "global_step3"
    if way != "tag directory":
        (place / "link").symlink_to(tag)
        tag = place / "link"
    report = reshard.seal(tag, key=place / "seal.key", progress=False)
    assert report.not_covered_count == 0
    certificate = written(place, report, "tag.json")
    found = reshard.verify_sealed(tag, [certificate], [place / "seal.pub"])
    assert found.ok
    assert (found.covered, found.not_covered_count) == (report.url, 0)


def test_the_pointer_may_be_a_link_and_files_beside_the_tag_are_named(place: Path) -> None:
    (place / "run" / "latest").unlink()
    (place / "run" / "latest").symlink_to("global_step3")
    assert seal(place).not_covered == ("README.md", "expected.json", "expected.safetensors")
    (place / "link").symlink_to(place / "run")
    report = reshard.seal(place / "link", key=place / "seal.key", progress=False)
    assert report.not_covered_count == 3
    shutil.rmtree(place / "run")
    assert not reshard.verify_sealed(place / "run", [place / "run.sealed.json"], [place / "seal.pub"]).ok


def test_without_the_extra_the_missing_library_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "securesystemslib", None)
    with pytest.raises(RequestError, match="signatures need 'securesystemslib'") as raised:
        seal(place)
    assert "[sign]" in raised.value.fix
    assert isinstance(IntegrityError("integrity.chain", "x"), ReshardError)
