"""The checkpoint that a launch loads: the formats decide what it is, and whether a checkpoint is it already."""

from __future__ import annotations

from reshard.choices import TargetFormat
from reshard.errors import RequestError
from reshard.models.resume import ResumeLayout, RunLaunch
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import format_of, format_writing


def resume_layout(checkpoint: Checkpoint, launch: RunLaunch) -> ResumeLayout:
    """What the launch loads in place of the checkpoint.

    Raises:
        RequestError: `request.invalid` for a launch that no run is, or whose number of ranks nothing says.
    """
    own = format_of(checkpoint)
    asked = own if launch.to is None else format_writing(launch.to)
    wanted = asked.layout_for(checkpoint, launch)
    if wanted is None:
        # Weights, full files and the universal form are no checkpoint that a run resumes from as it is.
        wanted = format_writing(TargetFormat.ZERO).layout_for(checkpoint, launch)
    assert wanted is not None, "DeepSpeed lays out every launch"
    if launch.megatron_args is not None and wanted.to != TargetFormat.MEGATRON:
        raise RequestError("request.invalid", "--megatron-args is for runs of Megatron-core", fix="leave it out")
    fits = format_writing(wanted.to) is own and own.fits(checkpoint, wanted)
    return wanted.model_copy(update={"fits": fits})
