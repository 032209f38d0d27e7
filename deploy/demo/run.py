"""The headline on one machine: `make demo`. Needs no root, no GPU and no running service.

DeepSpeed trains a small model with ZeRO-2 on two ranks and saves a checkpoint, which it refuses on three. That
goes into a bucket of an S3 server (SeaweedFS), a job of `reshard serve` rewrites it for three ranks, DeepSpeed resumes
from the result, and the losses are those of the run that was not interrupted. Both servers run on free loopback ports
and stop at the end. Exits 0 only if all of it worked, 1 if something did not, and 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Never

import boto3  # pyright: ignore[reportMissingTypeStubs]
import headline
from jobs import SOURCE, WEIGHTS, convert_by_cli, convert_by_client, download, tag_of, upload
from playground import Playground, PlaygroundError, playground
from processes import BUCKET, reshard_service, s3_server
from screen import run, say, shown, step

import reshard
from reshard.api.service_token import token_for

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDED = REPOSITORY / "tests" / "data" / "zero3_tiny"


def main() -> int:
    """Run the demo; returns the exit code."""
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with playground(options.directory.absolute()) as place:
            _isolate(place)
            _show(place, options)
    except PlaygroundError as error:
        say(f"the demo did not start: {error}")
        return 1
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be gone
            say("\ninterrupted; everything is stopped")
        return 130
    except (reshard.ReshardError, RuntimeError) as error:
        say(f"\nthe demo failed: {error}\nnothing is left running; logs: {shown(options.directory / 'logs')}")
        return 1
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo ARGS=...", description="The headline on one machine.")
    parser.add_argument("--stay", action="store_true", help="keep both servers running until Ctrl-C")
    parser.add_argument("--open", action="store_true", help="open the dashboard in a browser; with --stay")
    parser.add_argument("--recorded", action="store_true", help="train nothing: take a checkpoint of tests/data")
    parser.add_argument("--directory", type=Path, default=REPOSITORY / ".demo", help="default: .demo")
    options = parser.parse_args()
    if options.open and not options.stay:
        parser.error("--open needs --stay: without it, the service has stopped before you have logged in")
    return options


def _isolate(place: Playground) -> None:
    """Keep the demo away from the services and buckets that this shell is set up for."""
    for name in list(os.environ):
        if name.startswith(("RESHARD_", "AWS_")):
            del os.environ[name]
    # `reshard serve` writes its token there, and the commands find it: the home directory stays as it is.
    os.environ["XDG_STATE_HOME"] = str(place.servers / "state")
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"


def _show(place: Playground, options: argparse.Namespace) -> None:
    losses = make_checkpoint(place, recorded=options.recorded)
    with s3_server(place) as settings:
        os.environ.update(settings)
        bucket = boto3.client("s3")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        upload(bucket, place)
        with reshard_service(place) as url:
            os.environ["RESHARD_URL"] = url
            place.write_settings({**settings, "RESHARD_URL": url, "RESHARD_TOKEN": token_for(url)})
            name_dashboard(url, place, stay=options.stay)
            convert_by_client(url, place)
            convert_by_cli()
            download(bucket, place)
            check(place, losses)
            done(place, trained=losses is not None)
            if options.stay:
                stay(url, place, opened=options.open)
    say("\nBoth servers are stopped; nothing is left running.")


def make_checkpoint(place: Playground, *, recorded: bool) -> headline.Losses | None:
    """Train, or take the recorded checkpoint; returns the losses of the uninterrupted run."""
    if not recorded and not headline.has_deepspeed():
        say("DeepSpeed is not installed here: nothing is trained, and no losses are compared")
    if recorded or not headline.has_deepspeed():
        step("A recorded ZeRO-3 checkpoint of two ranks (tests/data/zero3_tiny)")
        place.source.mkdir()
        shutil.copy(RECORDED / "latest", place.source)
        shutil.copytree(RECORDED / "global_step3", place.source / "global_step3")
        return None
    step("DeepSpeed trains a small model on 2 ranks: 5 steps, save, 3 more")
    losses = headline.train(place)
    step("DeepSpeed itself does not resume that checkpoint on 3 ranks")
    say(f"  {headline.refusal(place)}")
    return losses


def name_dashboard(url: str, place: Playground, *, stay: bool) -> None:
    """Say where the dashboard is, and how to log in."""
    say(f"  dashboard  {url}")
    say(f"  log in     with the token {token_for(url)}")
    say(f"  a shell    source {shown(place.settings)}")
    if not stay:
        say("  They stop at the end of the demo; `make demo ARGS=--stay` keeps them.")


def check(place: Playground, losses: headline.Losses | None) -> None:
    """Compare source and result: tensors, checksums, and the losses of what DeepSpeed makes of them."""
    step("Source and result hold the same, bit for bit")
    run("reshard", "diff", "-q", SOURCE, f"s3://{BUCKET}/{place.result.name}")
    for target in (f"s3://{BUCKET}/{place.result.name}/{tag_of(place)}", WEIGHTS):
        run("reshard", "verify", target)
    if losses is None:
        return
    step(f"DeepSpeed resumes from the result on {headline.OTHER_RANKS} ranks")
    resumed = headline.resume(place)
    step("The losses of the same steps, before and after")
    headline.compare(losses, resumed)


def done(place: Playground, *, trained: bool) -> None:
    """Say what was shown, what is left, and what to try next."""
    proof = "the same losses" if trained else "the same bits"
    step(f"Done: {headline.RANKS} ranks became {headline.OTHER_RANKS}, with {proof}")
    left = {
        place.source: f"the checkpoint of {headline.RANKS} ranks",
        place.result: f"the same for {headline.OTHER_RANKS} ranks",
        place.weights: "its weights as safetensors",
        place.logs: "what the servers and the training said",
    }
    width = max(len(shown(path)) for path in left)
    for path, what in left.items():
        say(f"  {shown(path):<{width}}  {what}")
    say("\nTry next:")
    for command in next_commands(place, trained=trained):
        say(f"  {command}")


def next_commands(place: Playground, *, trained: bool) -> list[str]:
    """Three commands for the directory that is left."""
    programs, source = shown(Path(sys.executable).parent), shown(place.source)
    target, page = place.root / "dp4", place.root / "see.html"
    last = f"{programs}/reshard diff {source} {shown(target)}"
    if trained:
        last = f"{programs}/python {shown(headline.SCRIPT)} --ranks 4 --load {shown(target)}"
    return [
        f"{programs}/reshard inspect {source} --beside {shown(place.result)} --html {shown(page)}",
        f"{programs}/reshard convert {source} {shown(target)}/{tag_of(place)} --to zero --dp 4",
        last,
    ]


def stay(url: str, place: Playground, *, opened: bool) -> None:
    """Keep the servers until Ctrl-C."""
    say("\nBoth servers keep running. Ctrl-C stops them.")
    say(f"  dashboard  {url}")
    say(f"  log in     with the token {token_for(url)}")
    say(f"  a shell    source {shown(place.settings)}; reshard jobs list")
    if opened and not webbrowser.open(url):
        say("  no browser can be opened here")
    while True:
        signal.pause()


def _interrupt(_number: int, _frame: object) -> Never:
    # The servers are being stopped now: a second Ctrl-C must not leave them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
