"""The commands of other projects with the arguments of the originals: DeepSpeed's scripts and Accelerate's merge.

Source: deepspeed 0.19.8 `utils/zero_to_fp32.py`, `utils/zero_to_torch.py`, `checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from reshard.cli.help_pages import SCRIPTS
from reshard.cli.local import run_conversion

Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT_DIR", help="Save directory or tag directory; a path or a URL.")
]
Output = Annotated[
    str, typer.Argument(metavar="OUTPUT_DIR", help="Directory for the weights; other files in it are kept.")
]
MaxShardSize = Annotated[
    str, typer.Option("--max_shard_size", "--max-shard-size", metavar="SIZE", help="Largest file, such as 5GB.")
]
Safe = Annotated[
    bool, typer.Option("--safe_serialization", "--safe-serialization", help="Write safetensors instead of torch files.")
]
Tag = Annotated[
    str | None,
    typer.Option("-t", "--tag", metavar="NAME", help="Tag, such as global_step14; default: what `latest` names."),
]
NoFrozen = Annotated[
    bool,
    typer.Option("--exclude_frozen_parameters", "--exclude-frozen-parameters", help="Leave out frozen parameters."),
]
Debug = Annotated[bool, typer.Option("-d", "--debug", help="Ignored: errors always say what is wrong.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the app."""
    for command in (zero_to_fp32, zero_to_torch, ds_to_universal):
        app.command(rich_help_panel=SCRIPTS)(command)


def zero_to_fp32(
    checkpoint_dir: Checkpoint,
    output_dir: Output,
    *,
    max_shard_size: MaxShardSize = "5GB",
    safe_serialization: Safe = False,
    tag: Tag = None,
    exclude_frozen_parameters: NoFrozen = False,
    debug: Debug = False,
) -> None:
    """Replace DeepSpeed's `zero_to_fp32.py`: same arguments, same file names."""
    del debug
    zero_to_torch(
        checkpoint_dir,
        output_dir,
        dtype="fp32",
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def zero_to_torch(
    checkpoint_dir: Checkpoint,
    output_dir: Output,
    *,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Type of weights: fp32, fp16 or bf16; also float32, float16, bfloat16.")
    ],
    max_shard_size: MaxShardSize = "5GB",
    safe_serialization: Safe = False,
    tag: Tag = None,
    exclude_frozen_parameters: NoFrozen = False,
    debug: Debug = False,
) -> None:
    """Replace DeepSpeed's `zero_to_torch.py`: same arguments, same file names."""
    del debug
    from reshard.deepspeed import weights_request

    request = weights_request(
        checkpoint_dir,
        output_dir,
        dtype,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )
    run_conversion(request, into=True)


def ds_to_universal(
    *,
    input_folder: Annotated[
        str, typer.Option("--input_folder", "--input-folder", metavar="DIR", help="The tag directory, or a URL.")
    ],
    output_folder: Annotated[
        str,
        typer.Option(
            "--output_folder", "--output-folder", metavar="DIR", help="The universal tag directory to create."
        ),
    ],
    num_extract_workers: Annotated[
        int | None, typer.Option("--num_extract_workers", "--num-extract-workers", min=1, help="Not needed.")
    ] = None,
    num_merge_workers: Annotated[
        int | None, typer.Option("--num_merge_workers", "--num-merge-workers", min=1, help="Not needed.")
    ] = None,
    keep_temp_folder: Annotated[
        bool, typer.Option("--keep_temp_folder", "--keep-temp-folder", help="Ignored: there is no temporary folder.")
    ] = False,
    no_strict: Annotated[bool, typer.Option("--no_strict", "--no-strict", help="Not needed.")] = False,
    inject_missing_state: Annotated[
        bool, typer.Option("--inject_missing_state", "--inject-missing-state", help="Ignored: it is always done.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output folder.")] = False,
) -> None:
    """Replace DeepSpeed's `ds_to_universal.py`: same arguments, same files, one pass over the data."""
    notes = {
        "--num_extract_workers": (num_extract_workers, "bytes are copied once, with one thread per core"),
        "--num_merge_workers": (num_merge_workers, "there is no merge step: bytes are copied once"),
        "--keep_temp_folder": (keep_temp_folder, "there is no temporary folder"),
        "--no_strict": (no_strict, "missing or contradicting state is always an error"),
        "--inject_missing_state": (inject_missing_state, "checkpoints without that state are read as they are"),
    }
    for flag, (given, why) in notes.items():
        if given:
            sys.stderr.write(f"note: {flag} is not needed: {why}\n")
    from reshard.api.wire import convert_request

    called = {"url": "--input_folder", "target": "--output_folder"}

    run_conversion(
        convert_request(
            input_folder, output_folder, "universal", {"overwrite": overwrite, "pointer": True}, flags=called
        )
    )


# Accelerate's command that merges the shards of FSDP, with the arguments of the original.
#
# Source: accelerate 1.15.0 `commands/merge.py`.


def register_merging(app: typer.Typer) -> None:
    """Add the command of this module to the app."""
    app.command(rich_help_panel=SCRIPTS)(merge_weights)


def merge_weights(
    checkpoint_directory: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT_DIRECTORY", help="Shards of FSDP, or the directory of `save_state` that holds them."
        ),
    ],
    output_path: Annotated[
        str, typer.Argument(metavar="OUTPUT_PATH", help="Directory for the weights; other files in it are kept.")
    ],
    *,
    unsafe_serialization: Annotated[
        bool, typer.Option("--unsafe_serialization", "--unsafe-serialization", help="Write pytorch_model.bin.")
    ] = False,
    remove_checkpoint_dir: Annotated[
        bool,
        typer.Option("--remove_checkpoint_dir", "--remove-checkpoint-dir", help="Remove the shards after success."),
    ] = False,
) -> None:
    """Replace `accelerate merge-weights`: same arguments, same file names."""
    from reshard.dcp import merge_request, refuse_remote_removal, remove

    refuse_remote_removal(checkpoint_directory, wanted=remove_checkpoint_dir)
    request = merge_request(checkpoint_directory, output_path, safe_serialization=not unsafe_serialization)
    run_conversion(request, into=True)
    if remove_checkpoint_dir:
        remove(checkpoint_directory)
