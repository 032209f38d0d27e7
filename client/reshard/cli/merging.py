"""Accelerate's command that merges the shards of FSDP, with the arguments of the original.

Source: accelerate 1.15.0 `commands/merge.py`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from reshard.cli.help_pages import SCRIPTS
from reshard.cli.local import run_conversion


def register(app: typer.Typer) -> None:
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
