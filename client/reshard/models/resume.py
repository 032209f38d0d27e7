"""Wire models of a resume: a run that is about to start, and the checkpoint that it loads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from reshard.choices import WeightDtype, ZeroStage
from reshard.errors import RequestError
from reshard.installed_formats import TargetName
from reshard.options import RunLayout, is_none
from reshard.wire_model import RequestModel, WireModel

LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Variables in which launchers tell the number of processes, in order of precedence. torchrun, Accelerate and DeepSpeed
set the first one, also inside an allocation of Slurm."""
SAY_DP = "say how many data-parallel ranks the run will have: --dp N, or reshard.ensure(src, dp=N)"
_Ranks = Annotated[int | None, Field(ge=1, le=1 << 20)]
_RanksOfModel = Annotated[int | None, Field(ge=1, le=1 << 12)]
"""The bounds of `RunLayout`."""


def ranks_unknown() -> RequestError:
    """The error for a run whose number of ranks is not known."""
    return RequestError(
        "request.invalid",
        f"no launcher says how many processes there are (none of {', '.join(LAUNCHERS)}), and no dp was given",
        fix=SAY_DP,
    )


class RunLaunch(RequestModel):
    """A run that is about to start, as its script, its command line and its launcher describe it.

    A field that is None is as in the checkpoint.
    """

    to: TargetName | None = None
    """The target that the run's loader reads; None for the checkpoint's own kind."""
    framework: str | None = Field(default=None, max_length=64)
    """The framework that loads a distributed checkpoint."""
    dp: _Ranks = None
    """Data-parallel ranks; None for what `processes` leaves."""
    tp: _RanksOfModel = None
    pp: _RanksOfModel = None
    ep: _RanksOfModel = None
    processes: _Ranks = None
    """Processes that the launcher starts; None where no launcher tells."""
    zero_stage: ZeroStage | None = None
    dtype: WeightDtype | None = None
    """Element type of the model."""
    megatron_args: str | None = Field(default=None, max_length=1 << 16)
    """Arguments of Megatron-LM as JSON, for what a run of Megatron-core does not say and its conversion needs."""

    def sizes(self, world: Mapping[str, int], axes: Sequence[str] = ("tp", "pp", "ep")) -> dict[str, int]:
        """The sizes of these axes, by name: as given, else as in a checkpoint's `world`, where that has them."""
        found = {axis: getattr(self, axis) or world.get(axis) for axis in axes}
        return {axis: size for axis, size in found.items() if size is not None}

    def data_ranks(self, model_ranks: int = 1, *, of: str = "") -> int:
        """The data-parallel ranks: as given, else the processes divided by the ranks of one copy of the model.

        Args:
            model_ranks: Ranks of one copy.
            of: These ranks in words, for the error: `tp=2 x pp=1`.

        Raises:
            RequestError: `request.invalid`: nothing says the number, or the ranks of a copy do not divide it.
        """
        if self.dp is not None:
            return self.dp
        if self.processes is None:
            raise ranks_unknown()
        dp, rest = divmod(self.processes, model_ranks)
        if rest or not dp:
            raise RequestError(
                "request.invalid",
                f"{self.processes} processes cannot be shared out over {of}",
                fix=f"start a multiple of {model_ranks} processes, or name other sizes: --tp N --pp N",
            )
        return dp


class ResumeLayout(WireModel):
    """The checkpoint that a launch loads, as `Format.layout_for` describes it."""

    to: TargetName
    layout: RunLayout
    """The layout of the run. An axis that neither the launch nor the checkpoint names is unset in it."""
    free: tuple[str, ...] = ()
    """Axes of the layout that the checkpoint does not depend on: a conversion is not asked for their sizes."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of the conversion beside the layout, by format, as requests nest them."""
    dtype: WeightDtype | None = Field(default=None, exclude_if=is_none)
    """Element type that the launch asks for."""
    identity: str
    """A text that is equal for launches that load one result. Results of earlier releases are known by it: it stays."""
    label: str
    """The layout as a part of a directory's name: `dp4-tp2`."""
    fits: bool = False
    """True if the launch loads the checkpoint as it is."""

    @property
    def asked(self) -> RunLayout:
        """The layout that a conversion is asked for."""
        sizes = {n: v for n, v in self.layout.model_dump(exclude_unset=True).items() if n not in self.free}
        return RunLayout.model_validate(sizes)


def identity_of(facts: Mapping[str, Any]) -> str:
    """The identity of a result with these facts, whose names and order stay from release to release."""
    return json.dumps(facts, separators=(",", ":"))
