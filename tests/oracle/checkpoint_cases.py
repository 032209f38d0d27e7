"""The checkpoints of parallel runs that other ranks load. Each case is described once, and is loaded in three ways.

`test_convert_parallel` loads the files of a conversion, `test_direct` and `test_direct_engines` load from the source
itself, and `test_ensure_frameworks` loads the path that `reshard.ensure` returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import reshard
from house.tiers import rest_full
from oracle.driver import ParallelOracle, Saved
from oracle.outputs import convert
from oracle.parallel_cases import PARALLEL_CASES, GptCase, Layout, ParallelCase, gpt_rules_yaml
from oracle.truth import Resumed, differences, meta_differences

LOSS_TOLERANCE = 2e-6  # of losses around 3: six digits
PIPELINE_LAYERS = 8  # embedding, positions, four blocks, the last norm, the head


@dataclass(frozen=True)
class CheckpointCase:
    """A checkpoint of one run, and the run that loads it.

    Attributes:
        name: the case of the run that saved the checkpoint.
        source: the ranks of that run.
        target: the ranks of the run that loads.
        loads_as: the case of the run that loads, where its ZeRO stage differs.
        zero_stage: that stage, as an option of the conversion.
        groups: the number of param groups after loading, for cases whose experts are split by size.
    """

    name: str
    source: Layout
    target: Layout
    loads_as: str | None = None
    zero_stage: str | None = None
    groups: int | None = None

    def __str__(self) -> str:
        """The id of tests with this case, such as `moe_fp32_z1-dp4ep2-dp2`."""
        return "-".join((self.name, *map(_axes, (self.source, self.target)), *filter(None, [self.loads_as])))

    @property
    def case(self) -> ParallelCase:
        """The run that loads."""
        return PARALLEL_CASES[self.loads_as or self.name]

    @property
    def losses_stay(self) -> bool:
        """True if the next losses do not depend on the ranks: those of fp32."""
        return bool(asdict(self.case)["dtype"] == "fp32")

    @property
    def layout(self) -> dict[str, Any]:
        """The options of the layout that a conversion writes for the run that loads."""
        case, target = self.case, self.target
        if isinstance(case, GptCase):
            return gpt_layout(case, target)
        return {"dp": target.dp, "tp": target.tp, "ep": target.ep, "zero_stage": self.zero_stage}

    @property
    def rules(self) -> str | None:
        """The user's rules for a source that does not say how its parameters are cut.

        DeepSpeed's lists leave out what is cut along dimension 0; rules of a user have to say that they mean it.
        """
        case = self.case
        return f"default: column\n{gpt_rules_yaml(case)}" if isinstance(case, GptCase) and not case.info else None

    def converted(self, run: Saved, parallel: ParallelOracle, tmp_path: Path) -> Resumed:
        """The run after DeepSpeed's plain load of converted files."""
        with self._group_limit():
            convert(run.dir, tmp_path / "to" / run.tag, "zero", **self.layout, rules=self.rules)
        return parallel.resume(self.case, self.target, tmp_path / "to", tmp_path / "plainly")

    def direct(self, run: Saved, parallel: ParallelOracle, tmp_path: Path) -> Resumed:
        """The run after `reshard.deepspeed.load_checkpoint` of the source."""
        options: dict[str, Any] = {"vocab_divisor": self.case.pad_to} if isinstance(self.case, GptCase) else {}
        return parallel.resume(self.case, self.target, run.dir, tmp_path / "directly", direct=options)

    def ensured(self, run: Saved, parallel: ParallelOracle, tmp_path: Path) -> Resumed:
        """The run after DeepSpeed's plain load of the path that `reshard.ensure` returns."""
        target = self.target
        sizes = {"dp": target.dp, "tp": target.tp, "ep": target.ep}
        with self._group_limit():
            path = reshard.ensure(run.dir, **sizes, zero_stage=self.zero_stage, out=tmp_path / "ensured")
        return parallel.resume(self.case, target, Path(path), tmp_path / "by_one_call")

    @contextmanager
    def _group_limit(self) -> Iterator[None]:
        """Lower the limit of a group of experts in the engine, as the run of a case with `groups` does."""
        with pytest.MonkeyPatch.context() as patch:
            if self.groups is not None:
                largest = asdict(self.case)["largest_group"]
                assert largest is not None
                patch.setattr("reshard_engine.formats.deepspeed.param_groups.MAX_GROUP_ELEMS", largest)
            yield

    def assert_resumed(self, run: Saved, again: Resumed) -> None:
        """Fail unless the run that loaded has the state of the source in every bit, and in fp32 its next losses."""
        assert_resumed(run, again, losses=self.losses_stay)
        assert self.groups in (None, len(again.state.meta["groups"]))


def assert_resumed(run: Saved, again: Resumed, *, losses: bool = True) -> None:
    """Fail unless a run has the state of the run that saved in every bit; with `losses`, also the next losses."""
    assert differences(run.truth, again.state) == []
    assert meta_differences(run.truth, again.state) == []
    assert again.state.meta["replica_differences"] == []
    assert again.state.meta["wrong_weights"] == []
    if losses:
        assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


def gpt_layout(case: GptCase, layout: Layout, **options: Any) -> dict[str, Any]:
    """The options of the layout that a conversion writes for a run of the small GPT."""
    if layout.pp > 1:
        layers = PIPELINE_LAYERS - (case.positions == "tied")
        options = {"partition_method": case.partition_method, "pipeline_layers": layers} | options
    return {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "vocab_divisor": case.pad_to, **options}


def _axes(layout: Layout) -> str:
    """The axes with several ranks."""
    return "".join(f"{axis}{size}" for axis, size in asdict(layout).items() if size > 1) or "one"


def _expert_ranks(name: str, source: tuple[int, int], target: tuple[int, int], **more: Any) -> CheckpointCase:
    """A case whose layouts are (data-parallel ranks, expert-parallel ranks)."""
    return CheckpointCase(name, *(Layout(dp=dp, ep=ep) for dp, ep in (source, target)), **more)


def _tensor_ranks(name: str, source: tuple[int, int], target: tuple[int, int]) -> CheckpointCase:
    """A case whose layouts are (all ranks, tensor-parallel ranks)."""
    return CheckpointCase(name, *(Layout(tp=tp, dp=world // tp) for world, tp in (source, target)))


FULL = Layout(2, 2, 2)
PIPELINES = tuple(
    CheckpointCase("gpt_fp32", FULL, Layout(*ranks))
    for ranks in ((1, 1, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1), (4, 1, 1))
)
"""A pipeline with tensor parallelism."""
RULES = (
    CheckpointCase("gpt_fp32_bare", FULL, Layout(1, 2, 1)),
    CheckpointCase("gpt_fp32_bare", Layout(1, 1, 1), Layout(2, 1, 1)),
    CheckpointCase("gpt_fp32_glu", FULL, Layout(4, 1, 1)),
    CheckpointCase("gpt_fp32_qkv_blocks", FULL, Layout(1, 1, 2)),
    CheckpointCase("gpt_fp32_gqa", FULL, Layout(1, 2, 1)),
    CheckpointCase("gpt_fp32_by_parameters", FULL, Layout(1, 3, 1)),
    CheckpointCase("gpt_bf16opt_glu", FULL, Layout(4, 1, 1)),
)
"""Each kind of rule by which tensor parallelism cuts a parameter, and each partition of a pipeline."""
NATIVE_EXPERTS = (
    _expert_ranks("moe_fp32_z1", (4, 2), (4, 4)),
    _expert_ranks("moe_fp32_z1", (4, 2), (2, 1)),
    _expert_ranks("moe_fp32_z2", (2, 2), (4, 2)),
    _expert_ranks("moe_fp32_z2", (2, 1), (3, 1)),
    _expert_ranks("moe_bf16opt", (4, 4), (2, 2)),
)
"""DeepSpeed's own experts."""
DATA_FIRST = tuple(_expert_ranks("moe_fp32_z1_data_first", (4, 2), ranks) for ranks in ((4, 4), (6, 2), (2, 1)))
"""DeepSpeed's own experts where the ranks with equal experts follow one another."""
FUSED_EXPERTS = (
    _expert_ranks("autoep_z1", (2, 2), (4, 4)),
    _expert_ranks("autoep_z1", (4, 2), (1, 1)),
    _expert_ranks("autoep_z1", (1, 1), (4, 2)),
    _expert_ranks("autoep_z2", (4, 2), (2, 2)),
    _expert_ranks("autoep_z2", (4, 4), (6, 2)),
    _expert_ranks("autoep_z2_round_robin", (4, 2), (2, 1)),
    _expert_ranks("autoep_z2_bf16", (4, 2), (2, 1)),
    _expert_ranks("autoep_bf16opt", (2, 2), (4, 4)),
    _expert_ranks("autoep_z1_data_first", (4, 2), (6, 2)),
    _expert_ranks("autoep_z1_frozen", (2, 2), (4, 4)),
    _expert_ranks("autoep_z3", (4, 2), (2, 2)),
    _expert_ranks("autoep_z3", (2, 2), (3, 1)),
    _expert_ranks("autoep_z3", (4, 4), (4, 2)),
    _expert_ranks("autoep_z3_sub_groups", (4, 2), (2, 2)),
    _expert_ranks("autoep_z3_bf16", (4, 4), (2, 1)),
)
"""Experts of AutoEP."""
SPLIT_EXPERTS = tuple(
    _expert_ranks(name, source, target, groups=groups)
    for name in ("autoep_z1_split", "autoep_z3_split")
    for source, target, groups in (
        ((2, 2), (1, 1), 3),
        ((2, 2), (4, 4), 2),
        ((1, 1), (4, 4), 2),
        ((4, 4), (2, 1), 3),
        ((4, 2), (2, 2), 2),
    )
)
"""Experts of AutoEP in groups that DeepSpeed splits by size."""
OTHER_STAGES = tuple(
    _expert_ranks(name, (4, 2), (4, 4), zero_stage=stage, loads_as=loads_as)
    for name, stage, loads_as in (
        ("autoep_z1", "3", "autoep_z3"),
        ("autoep_z1", "2", "autoep_z2"),
        ("autoep_z3", "1", "autoep_z1"),
        ("autoep_z3_bf16", "bf16", "autoep_bf16opt"),
        ("autoep_bf16opt", "3", "autoep_z3_bf16"),
    )
)
"""Experts of AutoEP at another ZeRO stage."""
TENSOR_RANKS = (
    _tensor_ranks("autotp_z1", (2, 2), (1, 1)),
    _tensor_ranks("autotp_z1", (2, 2), (4, 4)),
    _tensor_ranks("autotp_z1", (4, 4), (4, 2)),
    _tensor_ranks("autotp_z1_gqa", (2, 2), (2, 1)),
    _tensor_ranks("autotp_z1_uneven", (2, 2), (1, 1)),
    _tensor_ranks("autotp_z1_tied", (2, 2), (1, 1)),
    _tensor_ranks("autotp_z1_vocab", (2, 2), (1, 1)),
    _tensor_ranks("autotp_z2_bf16", (2, 2), (2, 1)),
    _tensor_ranks("autotp_z3", (2, 2), (1, 1)),
    _tensor_ranks("autotp_z3", (2, 2), (4, 4)),
    _tensor_ranks("autotp_z3", (4, 2), (4, 4)),
)
"""AutoTP."""


def sampled(cases: tuple[CheckpointCase, ...], *ids: str) -> list[Any]:
    """The cases as parameters of a test; those whose ids are not named are marked `full`."""
    by_id = {str(case): case for case in cases}
    assert len(by_id) == len(cases), "two cases have one id"
    return rest_full(cases, *(by_id[name] for name in ids))
