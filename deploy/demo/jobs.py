"""What the demo does with the two servers: a checkpoint goes into the bucket, jobs rewrite it, results come back."""

from __future__ import annotations

from typing import Any

import headline
from playground import Playground
from processes import BUCKET
from screen import run, say, shown, step

import reshard

SOURCE = f"s3://{BUCKET}/run1"
WEIGHTS = f"s3://{BUCKET}/weights"


def upload(bucket: Any, place: Playground) -> None:
    """Put the checkpoint into a new bucket."""
    step(f"The checkpoint goes into a bucket, as {SOURCE}")
    bucket.create_bucket(Bucket=BUCKET)
    for path in sorted(place.source.rglob("*")):
        if path.is_file():
            key = path.relative_to(place.root).as_posix()
            bucket.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
    run("reshard", "inspect", SOURCE, lines=6)


def convert_by_client(url: str, place: Playground) -> None:
    """Rewrite the checkpoint for other ranks: a job through the Python client."""
    target = f"s3://{BUCKET}/{place.result.name}/{tag_of(place)}"
    step(f"A job rewrites it for {headline.OTHER_RANKS} ranks (Python client)")
    say(f'  client.submit("{SOURCE}",')
    say(f'                "{target}",')
    say(f'                to="zero", dp={headline.OTHER_RANKS})')
    with reshard.Client(url) as client:
        job = client.submit(SOURCE, target, to="zero", dp=headline.OTHER_RANKS, labels={"from": "demo"})
        last = ""
        for event in client.watch(job.id):
            line = f"  {job.id[:12]} {event.state.value:<10} {_share(event.progress)}".rstrip()
            if line != last:
                say(line)
            last = line
        result = client.result(job.id)
    if not isinstance(result, reshard.ConvertResult):
        raise RuntimeError("the job has no conversion as its result")
    say(f"  read {result.read_bytes:,} bytes, wrote {result.write_bytes:,} bytes in {len(result.files)} files")


def convert_by_cli() -> None:
    """Make weights of the checkpoint: a job through the command line."""
    step("Another job, from the shell: the weights as safetensors")
    run("reshard", "submit", SOURCE, WEIGHTS, "--to", "safetensors", "--wait")


def download(bucket: Any, place: Playground) -> None:
    """Fetch both results from the bucket, where DeepSpeed cannot read them."""
    step(f"Both results come back from the bucket, into {shown(place.root)}")
    for result in (place.result, place.weights):
        count = size = 0
        for page in bucket.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{result.name}/"):
            for entry in page.get("Contents", []):
                path = place.root / entry["Key"]
                path.parent.mkdir(parents=True, exist_ok=True)
                bucket.download_file(BUCKET, entry["Key"], str(path))
                count, size = count + 1, size + int(entry["Size"])
        say(f"  {count} files, {size:>9,} bytes  {shown(result)}")


def _share(progress: reshard.Progress | None) -> str:
    """The progress of a job in words."""
    if progress is None or not progress.bytes_total:
        return ""
    percent = 100 * progress.bytes_done / progress.bytes_total
    return f"{percent:3.0f} %  {progress.units_done}/{progress.units_total} units"


def tag_of(place: Playground) -> str:
    """The tag of the checkpoint."""
    return (place.source / "latest").read_text().strip()
