"""The layout that a training run wants: from what the caller says, what the launcher says, and what the source has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic import ValidationError

from reshard.errors import RequestError, printable
from reshard.models import Inspection, NativeLayout, OpaquePolicy, WeightDtype, ZeroStage

_BF16_OPTIMIZER = "deepspeed-bf16-optimizer"
_DTYPES = {WeightDtype.FP32: "float32", WeightDtype.BF16: "bfloat16", WeightDtype.FP16: "float16"}
_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Who says how many processes there are, nearest to the processes first: torchrun, Accelerate and DeepSpeed set the
first one, also inside an allocation of Slurm."""


def visible_processes(environ: Mapping[str, str]) -> int | None:
    """How many processes the launcher started, or None if none says so.

    One task of Slurm says nothing: `srun -n1 reshard ensure ...` before the run looks the same.

    Raises:
        RequestError: `request.invalid` for a variable that is no count.
    """
    for name in _LAUNCHERS:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if not text.isdecimal() or int(text) < 1:
            raise RequestError("request.invalid", f"{name} is {printable(text)!r}, not a number of processes")
        if name != "SLURM_NTASKS" or int(text) > 1:
            return int(text)
    return None


@dataclass(frozen=True)
class Wanted:
    """What the caller asks for; None is as in the source, and for `dp` what the world leaves."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    zero_stage: ZeroStage | None = None
    dtype: WeightDtype | None = None
    rules: str | None = None
    """How parameters are cut, as YAML, where the source does not say."""
    family: str | None = None
    opaque: OpaquePolicy = OpaquePolicy.REFUSE
    """What happens to objects of classes that are not on the allow-list."""
    processes: int | None = None
    """Of the visible world; asked for where `dp` is None."""

    @classmethod
    def of(
        cls,
        axes: Mapping[str, int | None],
        *,
        zero_stage: ZeroStage | str | int | None,
        dtype: WeightDtype | str | None,
        rules: str | None = None,
        family: str | None = None,
        opaque: OpaquePolicy | str = OpaquePolicy.REFUSE,
        environ: Mapping[str, str],
    ) -> Wanted:
        """What was asked for, checked.

        Args:
            axes: `dp`, `tp`, `pp`, `ep`.
            zero_stage: 0 to 3 or `bf16`.
            dtype: The model's element type.
            rules: How parameters are cut, as YAML.
            family: A named pack of such rules.
            opaque: `refuse`, `keep` or `drop`.
            environ: Where launchers leave the size of the world.

        Raises:
            RequestError: `request.invalid`, also where `dp` is not given and no world is visible.
        """
        for axis, size in axes.items():
            if size is not None and size < 1:
                raise RequestError("request.invalid", f"{axis} is {size}", fix=f"--{axis} is 1 or more")
        try:
            stage = None if zero_stage is None else ZeroStage(str(zero_stage))
            chosen = None if dtype is None else WeightDtype(dtype)
            policy = OpaquePolicy(opaque)
        except ValueError as error:
            raise RequestError("request.invalid", str(error), fix="see reshard ensure --help") from None
        processes = visible_processes(environ) if axes.get("dp") is None else None
        if axes.get("dp") is None and processes is None:
            raise RequestError(
                "request.invalid",
                f"no launcher says how many processes there are (none of {', '.join(_LAUNCHERS)}), and no dp was given",
                fix="say how many data-parallel ranks the run will have: --dp N, or reshard.ensure(src, dp=N)",
            )
        return cls(
            **axes,
            zero_stage=stage,
            dtype=chosen,
            rules=rules,
            family=family,
            opaque=policy,
            processes=processes,
        )

    def key(self) -> str:
        """A text that is the same for equal wishes."""
        return repr(sorted(asdict(self).items()))

    def layout(self, found: Inspection) -> NativeLayout:
        """The layout for a source.

        Raises:
            RequestError: `request.invalid` if the processes cannot be shared out.
        """
        sizes = {axis: getattr(self, axis) or found.world.get(axis, 1) for axis in ("tp", "pp", "ep")}
        dp = self.dp
        if dp is None:
            per_replica, processes = sizes["tp"] * sizes["pp"], self.processes or 1
            dp, rest = divmod(processes, per_replica)
            if rest or not dp:
                raise RequestError(
                    "request.invalid",
                    f"{processes} processes cannot be shared out over tp={sizes['tp']} x pp={sizes['pp']}",
                    fix=f"start a multiple of {per_replica} processes, or name other sizes: --tp N --pp N",
                )
        # One layout is one text: the source's own stage is not asked for.
        stage = None if self.zero_stage is stage_of(found) else self.zero_stage
        try:
            return NativeLayout.model_validate({"dp": dp, "zero_stage": stage, **sizes})
        except ValidationError as error:
            first = error.errors()[0]
            raise RequestError("request.invalid", f"{first['loc'][0]}: {first['msg']}") from None


def fits(found: Inspection, layout: NativeLayout, dtype: WeightDtype | None) -> bool:
    """Whether a checkpoint can be loaded in this layout as it is."""
    stage = stage_of(found)
    if stage is None or (layout.zero_stage is not None and layout.zero_stage is not stage):
        return False
    if any(found.world.get(axis, 1) != getattr(layout, axis) for axis in ("tp", "pp", "ep")):
        return False
    if stage is not ZeroStage.STAGE_0 and found.world.get("dp") != layout.dp:
        # Without ZeRO every rank loads the same file, however many there are.
        return False
    return dtype is None or _model_dtypes(found) == {_DTYPES[dtype]}


def stage_of(found: Inspection) -> ZeroStage | None:
    """The stage as users name it; None for what DeepSpeed cannot load without options, the universal form for one."""
    if found.format == _BF16_OPTIMIZER:
        return ZeroStage.BF16
    return None if found.zero_stage is None else ZeroStage(str(found.zero_stage))


def _model_dtypes(found: Inspection) -> set[str]:
    """Element types of the trained weights; empty at stage 3, where only masters are stored."""
    if found.zero_stage == 3:
        return set()
    return {t.dtype for t in found.tensors if not t.frozen and not t.shared_with and "buffer" not in t.states}


def name_of(tag: str, layout: NativeLayout, dtype: WeightDtype | None, key: str) -> str:
    """The name of a result: what it is, and a key of everything that it depends on."""
    parts = [tag.replace("/", "_"), f"dp{layout.dp}"]
    parts += [f"{axis}{size}" for axis in ("tp", "pp", "ep") if (size := getattr(layout, axis)) > 1]
    parts += [] if layout.zero_stage is None else [f"zero{layout.zero_stage.value}"]
    parts += [] if dtype is None else [dtype.value]
    return "-".join((*parts, key[:8]))
