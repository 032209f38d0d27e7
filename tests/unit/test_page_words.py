"""The words of the dashboard: labels for flags, names of targets, what happened to a job, and suggested targets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from reshard.choices import JobState
from reshard.models.jobs import ConvertRequest, Inspection, Job, JobEvent, JobWorker
from reshard.options import SourceSpec
from reshard_jobs.limits import Roots
from reshard_service.pages.job import happenings_of
from reshard_service.pages.submit import suggested_target
from reshard_service.pages.words import format_name, label_of, places_in, target_of, worded

BEGIN = datetime(2026, 11, 25, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("add --dp", "add “Data-parallel ranks”"),
        (
            "give --family gpt-megatron|bloom, or --rules FILE",
            "give “Family of cut rules” (gpt-megatron, bloom), or “Cut rules”",
        ),
        ("--to zero needs the number of ranks", "“DeepSpeed, for N GPUs” needs the number of ranks"),
        ("raise --memory-limit or lower --part-size", "raise “Memory limit” or lower “Size of a unit of work”"),
        ("--some-option of another package", "“some option” of another package"),
        ("a name-with--dashes stays", "a name-with--dashes stays"),
        ("run: reshard convert SRC DST --to zero --dp 4", "run: reshard convert SRC DST --to zero --dp 4"),
    ],
)
def test_flags_become_labels_outside_of_commands(text: str, said: str) -> None:
    assert worded(text) == said


def test_the_format_of_the_target_is_the_last_field_that_a_text_is_about() -> None:
    assert places_in("--to zero needs --dp") == ["layout.dp", "to"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"to": "zero", "layout": {"dp": 4, "tp": 2}}, "DeepSpeed, for 8 GPUs"),
        ({"to": "zero", "layout": {"dp": 1}}, "DeepSpeed, for 1 GPU"),
        ({"to": "dcp"}, "FSDP and torchtitan (DCP)"),
        ({"to": "safetensors"}, "Weights (safetensors, as Hugging Face has them)"),
        ({"to": "torch_save"}, "One file of torch.save"),
    ],
)
def test_a_target_is_named_with_its_gpus(asked: dict[str, object], said: str) -> None:
    request = ConvertRequest.model_validate({"source": {"url": "/in"}, "target": "/out", **asked})
    assert target_of(request) == said


def test_formats_and_unknown_fields_have_names() -> None:
    assert [format_name(n) for n in ("deepspeed-zero2", "dcp-torchtitan", "safetensors")] == [
        "DeepSpeed ZeRO-2",
        "DCP torchtitan",
        "safetensors",
    ]
    assert [format_name(n) for n in ("torch-checkpointing", "fsdp-ranks-skyrl", "torch")] == [
        "torch_checkpointing",
        "FSDP ranks SkyRL",
        "PyTorch",
    ]
    assert label_of("options.tiny.some_choice") == "some choice"


def test_every_event_of_a_job_is_told() -> None:
    states = ["QUEUED", "PLANNING", "RUNNING", "QUEUED", "PLANNING", "RUNNING", "VERIFYING", "FAILED", "QUEUED"]
    states += ["PLANNING", "CANCELLING", "CANCELLED"]
    workers = tuple(
        JobWorker(worker=f"host{n}", role="owner", attempt=n, joined_at=BEGIN, left_at=None) for n in (1, 2, 3)
    )
    job = Job(
        id="j",
        state=JobState.CANCELLED,
        done=True,
        attempt=3,
        max_attempts=3,
        request=ConvertRequest(source=SourceSpec(url="/in"), target="/out", to="universal"),
        workers=workers,
        created_at=BEGIN,
    )
    helper = JobWorker(worker="helper", role="helper", attempt=2, joined_at=BEGIN)
    events = [
        JobEvent(seq=n, job_id="j", at=BEGIN + timedelta(seconds=n), kind="state", state=JobState(state))
        for n, state in enumerate(states)
    ]
    joined = JobEvent(seq=99, job_id="j", at=BEGIN, kind="worker", state=JobState.RUNNING, worker=helper)
    told = [(h.worker, h.text) for h in happenings_of(job, [*events[:6], joined, *events[6:]])]
    assert told == [
        ("", "The job was submitted and waits for a worker."),
        ("host1", "began: it plans."),
        ("", "The plan is made; the target is being written."),
        ("host1", "stopped, failed, or its lease ended. Another worker will go on where it stopped."),
        ("host2", "began, attempt 2: it plans."),
        ("", "The plan is made; the target is being written."),
        ("helper", "joined to help"),
        ("", "Everything is written; it is checked and then published."),
        ("", "The job failed. The reason is at the top of this page."),
        ("", "Somebody asked for a retry. It waits for a worker."),
        ("host3", "began, attempt 3: it plans."),
        ("", "Somebody cancelled the job. What it has written is removed."),
        ("", "The job is cancelled."),
    ]


@pytest.mark.parametrize(
    ("url", "tag", "to", "roots", "wanted"),
    [
        ("/data/run1/global_step3", "global_step3", "zero", (), "/data/run1_deepspeed/global_step3"),
        ("/data/run1/global_step3", "global_step3", "dcp", (), "/data/run1_global_step3_fsdp"),
        ("s3://bucket/run1/checkpoint-500", None, "safetensors", (), "s3://bucket/run1_checkpoint-500_weights"),
        ("s3://bucket/run1", None, "", (), "s3://bucket/run1_converted"),
        # Beside the run nothing may be written: another root, but none within the run.
        ("/data/run1/global_step3", "global_step3", "dcp", ("/data/run1", "/out"), "/out/run1_global_step3_fsdp"),
        ("/data/run1", None, "dcp", ("/data/run1",), ""),
        # There is no place beside a bucket, or beside the root of a machine.
        ("s3://bucket", None, "dcp", (), ""),
        ("/run1", None, "dcp", (), ""),
    ],
)
def test_a_target_is_suggested_outside_of_the_run_and_below_a_root(
    url: str, tag: str | None, to: str, roots: tuple[str, ...], wanted: str
) -> None:
    found = Inspection.model_construct(url=url, tag=tag)
    assert suggested_target(found, to, Roots(roots)) == wanted
