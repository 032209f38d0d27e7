"""The checkpoint that a launch loads: the formats decide what it is, and whether a checkpoint is it already."""

from __future__ import annotations

from reshard.choices import TargetFormat
from reshard.errors import RequestError, printable
from reshard.models.resume import ResumeLayout, RunLaunch
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import format_of, format_writing, formats


def resume_layout(checkpoint: Checkpoint, launch: RunLaunch) -> ResumeLayout:
    """The checkpoint that the launch loads in place of this one.

    Raises:
        RequestError: `request.invalid` for a launch that no run is, or whose number of ranks nothing says.
    """
    own = format_of(checkpoint)
    wanted = own.layout_for(checkpoint, launch) if launch.to is None else _named(launch.to, checkpoint, launch)
    if wanted is None:
        # Weights and full files are no checkpoint that a run of their own format resumes from.
        wanted = _named(TargetFormat.ZERO, checkpoint, launch)
    if launch.megatron_args is not None and wanted.to != TargetFormat.MEGATRON:
        raise RequestError("request.invalid", "--megatron-args is for runs of Megatron-core", fix="leave it out")
    fits = format_writing(wanted.to) is own and own.fits(checkpoint, wanted)
    return wanted.model_copy(update={"fits": fits})


def _named(to: str, checkpoint: Checkpoint, launch: RunLaunch) -> ResumeLayout:
    """The checkpoint that a launch loads whose loader reads this target.

    Raises:
        RequestError: `request.invalid` for a target from which no run resumes, and as `Format.layout_for`.
    """
    found = next((known for known in formats() if to in known.targets), None)
    wanted = None if found is None else found.layout_for(checkpoint, launch)
    if wanted is None or wanted.to != to:
        raise RequestError(
            "request.invalid",
            f"launch.to is {printable(to)!r}, and no run resumes from that",
            fix="name zero or dcp, or leave `to` out: --to zero",
        )
    return wanted
