"""What we write to an object store is a source there: universal by its pointer, weights by their index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from house.requests import asked
from oracle.outputs import contents
from reshard.choices import TargetFormat
from reshard.local import load_engine
from reshard.options import SourceSpec
from servers.s3 import S3Server

DATA = Path(__file__).parent.parent / "data"


def _convert(source: Path | str, target: Path | str, to: TargetFormat, **options: Any) -> None:
    load_engine().convert(asked(source=SourceSpec(url=str(source)), target=str(target), to=to, **options))


def test_from_store_to_store(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    root, source = f"s3://{bucket}", DATA / "zero3_tiny"
    _convert(source, f"{root}/run/first", TargetFormat.UNIVERSAL)
    _convert(f"{root}/run", f"{root}/again/first", TargetFormat.UNIVERSAL)
    _convert(f"{root}/again", f"{root}/shards", TargetFormat.TORCH, max_shard_bytes=600)
    _convert(f"{root}/shards", tmp_path / "weights", TargetFormat.SAFETENSORS)
    _convert(source, tmp_path / "direct", TargetFormat.SAFETENSORS)
    assert contents(tmp_path / "weights") == contents(tmp_path / "direct")
    first, again = s3.read_all(bucket, "run"), s3.read_all(bucket, "again")
    for found in (first, again):
        del found["first/reshard.json"]
    assert again == first
