"""Examples in the help of commands: a remark and a command line each. A test parses all and runs the local ones."""

from __future__ import annotations

from collections.abc import Mapping

_JOB = "job_3kq7"

EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("What is it, and what can it become?", "reshard inspect run1"),
        ("Resume on 16 GPUs: prints the path to load", "reshard ensure run1 --dp 16"),
        ("Weights in one directory", "reshard convert run1 weights --to safetensors --dtype bf16"),
    ),
    "inspect": (
        ("The checkpoint that `latest` names, in a save directory", "reshard inspect run1"),
        (
            "The files that hold parts of one tensor",
            "reshard inspect s3://bucket/run1 --tensor lm_head.weight --svg head.svg",
        ),
    ),
    "plan": (
        ("Bytes, files and memory of a conversion", "reshard plan run1 weights --to safetensors"),
        ("For a script", "reshard plan run1 run2/global_step100 --to zero --dp 3 --json"),
    ),
    "convert": (
        (
            "Resume on 3 GPUs; `reshard ensure run1 --dp 3` chooses DST itself",
            "reshard convert run1 run2/global_step100 --to zero --dp 3",
        ),
        (
            "One directory for any number of GPUs (DeepSpeed, load_universal)",
            "reshard convert run1 run2/global_step100_universal --to universal",
        ),
        ("Weights in bf16", "reshard convert run1 weights --to safetensors --dtype bf16"),
    ),
    "verify": (
        ("Every byte of a target", "reshard verify weights"),
        ("A random fiftieth of a huge one", "reshard verify s3://bucket/run2 --sample 2%"),
    ),
    "diff": (
        ("Is anything different?", "reshard diff run1 run2/global_step100"),
        ("Only weights, without the biases", "reshard diff run1 weights --weights-only --common --ignore '*.bias'"),
    ),
    "ensure": (
        ("In a job script: a checkpoint for 16 ranks", "CKPT=$(reshard ensure run1 --dp 16)"),
        ("For the ranks of this launch, by a service", "reshard ensure run1 --url http://reshard:8000"),
    ),
    "zero-to-fp32": (
        ("As DeepSpeed's script", "reshard zero-to-fp32 run1 weights"),
        (
            "Safetensors of one step",
            "reshard zero-to-fp32 run1 weights --safe_serialization --tag global_step100",
        ),
    ),
    "zero-to-torch": (
        ("Weights in bf16", "reshard zero-to-torch run1 weights --dtype bf16"),
        ("Files of at most 2 GB", "reshard zero-to-torch run1 weights --dtype fp16 --max_shard_size 2GB"),
    ),
    "ds-to-universal": (
        (
            "As DeepSpeed's script",
            "reshard ds-to-universal --input_folder step5 --output_folder step5_universal",
        ),
        (
            "From a bucket",
            "reshard ds-to-universal --input_folder s3://bucket/step5 --output_folder step5",
        ),
    ),
    "merge-weights": (
        ("As Accelerate's command", "reshard merge-weights run1/pytorch_model_fsdp_0 weights"),
        ("A torch file of the whole directory", "reshard merge-weights run1 weights --unsafe_serialization"),
    ),
    "slim": (
        ("One file", "reshard slim pytorch_model.bin slim.bin"),
        ("A directory; files without torch data are copied", "reshard slim run1 run1-slim"),
    ),
    "clean": (
        ("List what unfinished conversions left", "reshard clean weights --dry-run"),
        ("Remove it", "reshard clean weights"),
    ),
    "doctor": (
        ("Before the first conversion", "reshard doctor"),
        ("With the places that it will read and write", "reshard doctor s3://bucket/run1 weights"),
    ),
    "submit": (
        ("Print the id of the job", "reshard submit s3://bucket/run1 s3://bucket/weights --to safetensors"),
        (
            "Wait for the end; the exit code is the job's",
            "reshard submit s3://bucket/run1 s3://bucket/run2/step5 --to zero --dp 8 --wait",
        ),
    ),
    "serve": (
        ("API, dashboard and workers in one process", "reshard serve"),
        ("Another port and directory", "reshard serve --port 9000 --data-dir reshard-jobs"),
    ),
    "worker": (
        ("One worker for each GPU", "reshard worker --gpu 0"),
        ("A second one on this host", "reshard worker --gpu 1 --name second"),
    ),
    "gc": (
        ("List the jobs whose files would be removed", "reshard gc --dry-run"),
        ("Also of failed jobs that could be retried", "reshard gc --now"),
    ),
    "audit": (
        ("The last 100 entries", "reshard audit"),
        ("The last 1,000 of one tenant, for a script", "reshard audit --tenant vision --limit 1000 --json"),
    ),
    "jobs": (
        ("The newest jobs", "reshard jobs list"),
        ("Follow one to its end", f"reshard jobs watch {_JOB}"),
    ),
    "jobs list": (
        ("Those that failed", "reshard jobs list --state FAILED"),
        ("Ids of a team's jobs, for a script", "reshard jobs list --label team=vision --quiet"),
    ),
    "jobs show": (
        ("One job, by the beginning of its id", f"reshard jobs show {_JOB}"),
        ("For a script", f"reshard jobs show {_JOB} --json"),
    ),
    "jobs watch": (
        ("To its end; Ctrl-C leaves it running", f"reshard jobs watch {_JOB}"),
        ("For ten minutes at most; then exit code 124", f"reshard jobs watch {_JOB} --wait-timeout 600"),
    ),
    "jobs wait": (
        ("In a script; the exit code is the job's", f"reshard jobs wait {_JOB} --quiet"),
        ("For an hour at most; then exit code 124", f"reshard jobs wait {_JOB} --wait-timeout 3600"),
    ),
    "jobs logs": (
        ("What happened until now", f"reshard jobs logs {_JOB}"),
        ("Until the job ends", f"reshard jobs logs -f {_JOB}"),
    ),
    "jobs cancel": (
        ("Stop a job and remove its unfinished output", f"reshard jobs cancel {_JOB}"),
        ("For a script", f"reshard jobs cancel {_JOB} --json"),
    ),
    "jobs retry": (
        ("Go on where a failed job stopped", f"reshard jobs retry {_JOB}"),
        ("Wait for its end", f"reshard jobs retry {_JOB} --wait"),
    ),
    "jobs workers": (
        ("What each worker does", "reshard jobs workers"),
        ("For a script", "reshard jobs workers --json"),
    ),
    "webhooks": (
        ("The endpoints", "reshard webhooks list"),
        ("What was sent to one, and what was not", "reshard webhooks deliveries ID"),
    ),
    "webhooks create": (
        ("Call a URL when a job ends", "reshard webhooks create https://example.org/hook"),
        ("Only when one fails", "reshard webhooks create https://example.org/hook --event job.failed"),
    ),
    "webhooks list": (
        ("The endpoints", "reshard webhooks list"),
        ("For a script", "reshard webhooks list --json"),
    ),
    "webhooks remove": (
        ("The id is in `reshard webhooks list`", "reshard webhooks remove ID"),
        ("By its URL", "reshard webhooks list | grep old.example.org; reshard webhooks remove ID"),
    ),
    "webhooks rotate": (
        ("A new secret; the old one signs for a day, too", "reshard webhooks rotate ID"),
        ("The old one is known to others: end it at once", "reshard webhooks rotate ID --keep-hours 0"),
    ),
    "webhooks enable": (
        ("The receiver answers again", "reshard webhooks enable ID"),
        ("For a script", "reshard webhooks enable ID --json"),
    ),
    "webhooks deliveries": (
        ("The newest deliveries", "reshard webhooks deliveries ID"),
        ("Those that were given up", "reshard webhooks deliveries ID --state dead"),
    ),
    "webhooks redeliver": (
        ("All that were given up", "reshard webhooks redeliver ID"),
        ("One", "reshard webhooks redeliver ID --delivery DELIVERY"),
    ),
    "tokens": (
        ("A token for a training script", "reshard tokens create trainer --scope submit --scope read"),
        ("Who has one", "reshard tokens list"),
    ),
    "tokens create": (
        (
            "For a training script, for 30 days",
            "reshard tokens create trainer --scope submit --scope read --expires 30d",
        ),
        ("For a dashboard that only shows", "reshard tokens create wall --scope read --expires never"),
    ),
    "tokens list": (
        ("Of your tenant", "reshard tokens list"),
        ("Of another one, for the operator", "reshard tokens list --tenant vision"),
    ),
    "tokens revoke": (
        ("The id is in `reshard tokens list`", "reshard tokens revoke ID"),
        ("For a script", "reshard tokens revoke ID --json"),
    ),
    "tenants": (
        ("All tenants with their limits", "reshard tenants list"),
        (
            "A tenant that may write below one place",
            "reshard tenants create vision --write-root s3://bucket/vision",
        ),
    ),
    "tenants create": (
        (
            "A tenant that may write below one place",
            "reshard tenants create vision --write-root s3://bucket/vision",
        ),
        (
            "With limits",
            "reshard tenants create vision --max-running 4 --bytes-per-day 10TiB",
        ),
    ),
    "tenants set": (
        ("Twice the share of the workers", "reshard tenants set vision --weight 2"),
        ("No limit of its own", "reshard tenants set vision --max-running none"),
    ),
    "tenants list": (
        ("All tenants with their limits", "reshard tenants list"),
        ("For a script", "reshard tenants list --json"),
    ),
    "tenants remove": (
        ("When all of its jobs have ended", "reshard tenants remove vision"),
        ("For a script", "reshard tenants remove vision --json"),
    ),
    "db": (
        ("Does the database fit this release?", "reshard db current"),
        ("Upgrade it", "reshard db upgrade"),
    ),
    "db upgrade": (
        ("Upgrade the database", "reshard db upgrade"),
        ("Read the statements first", "reshard db upgrade --sql"),
    ),
    "db current": (
        ("Its revision, and the one that is needed", "reshard db current"),
        ("For a script", "reshard db current --json"),
    ),
    "db history": (
        ("The revisions", "reshard db history"),
        ("For a script", "reshard db history --json"),
    ),
}


def examples_of(words: str) -> tuple[tuple[str, str], ...]:
    """The examples of the command that these words name, without `reshard`."""
    return EXAMPLES.get(words, ())
