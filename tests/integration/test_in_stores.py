"""Commands in object stores: what one writes is a source of the next, `ensure` finds it again, and seals hold."""

from __future__ import annotations

from pathlib import Path

from house.conversions import convert
from house.keys import key_pair
from house.promises import command
from house.repository import DATA
from oracle.outputs import contents
from reshard.choices import TargetFormat
from servers.stores import ObjectServer


def test_from_store_to_store(store: ObjectServer, store_bucket: str, tmp_path: Path) -> None:
    root, source = f"{store.scheme}://{store_bucket}", DATA / "zero3_tiny"
    convert(source, f"{root}/run/first", TargetFormat.UNIVERSAL)
    convert(f"{root}/run", f"{root}/again/first", TargetFormat.UNIVERSAL)
    convert(f"{root}/again", f"{root}/shards", TargetFormat.TORCH, max_shard_bytes=600)
    convert(f"{root}/shards", tmp_path / "weights", TargetFormat.SAFETENSORS)
    convert(source, tmp_path / "direct", TargetFormat.SAFETENSORS)
    assert contents(tmp_path / "weights") == contents(tmp_path / "direct")
    first, again = store.read_all(store_bucket, "run"), store.read_all(store_bucket, "again")
    for found in (first, again):
        del found["first/reshard.json"]
    assert again == first


def test_ensure_finds_its_result_again(store: ObjectServer, store_bucket: str) -> None:
    store.upload(DATA / "zero3_tiny", store_bucket, "run")
    run = f"{store.scheme}://{store_bucket}/run"
    words = ("ensure", run, "--dp", "3", "--out", f"{run}-of-3")
    code, made, said = command(*words)
    assert code == 0, said
    before = store.read_all(store_bucket, "")
    assert made.startswith(f"{run}-of-3")
    assert command(*words)[:2] == (0, made)
    assert store.read_all(store_bucket, "") == before, "the second one writes nothing"
    assert command("verify", made.strip())[0] == 0


def test_a_seal_tells_a_checkpoint_that_was_changed(store: ObjectServer, store_bucket: str, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "seal")
    store.upload(DATA / "zero3_tiny", store_bucket, "run")
    run, certificate = f"{store.scheme}://{store_bucket}/run", str(tmp_path / "run.sealed.json")
    code, _, said = command("seal", run, "--key", str(private), "--out", certificate)
    assert code == 0, said
    check = ("verify", run, "--cert", certificate, "--key", str(public))
    assert command(*check)[0] == 0
    name, data = next((n, d) for n, d in store.read_all(store_bucket, "run").items() if n.endswith("_states.pt"))
    middle = len(data) // 2
    store.put(store_bucket, f"run/{name}", data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    assert command(*check)[0] != 0
