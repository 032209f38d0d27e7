"""Every source format, and the examples that are drawn of it."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from laws.dcp_source import DCP_SOURCES, DcpSource
from laws.dcp_target import DcpTarget
from laws.deepspeed_source import STAGES
from laws.native_target import NativeTarget
from laws.rank_source import RANK_SOURCES
from laws.targets import UniversalTarget, WeightsTarget
from laws.universal_source import UniversalSource
from laws.weights_source import WeightsSource
from laws.whole_source import WHOLE_SOURCES
from laws.whole_target import WholeTarget
from reshard.choices import TargetFormat
from reshard_engine.testing.laws import Trial
from reshard_engine.testing.logical import SourceFormat, TargetOracle
from reshard_engine.testing.strategies import evenly, execution_options

TARGETS: tuple[TargetOracle, ...] = (
    UniversalTarget(),
    NativeTarget(),
    WeightsTarget(TargetFormat.SAFETENSORS),
    WeightsTarget(TargetFormat.TORCH),
    DcpTarget(),
    WholeTarget(),
)
SOURCES: tuple[SourceFormat, ...] = (
    *STAGES,
    UniversalSource(),
    WeightsSource("safetensors"),
    WeightsSource("torch"),
    *DCP_SOURCES,
    *RANK_SOURCES,
    *WHOLE_SOURCES,
)


@st.composite
def trials(draw: st.DrawFn, source: SourceFormat, targets: tuple[TargetOracle, ...] = TARGETS) -> Trial:
    """Checkpoints of a source format with a conversion of them to one of some targets."""
    oracle: TargetOracle = draw(evenly(*[t for t in targets if source.full or not t.wants_full_state]))
    options = dict(draw(oracle.options()))
    if not source.full:
        options["exclude_frozen"] = False  # weights do not say which of them were frozen
    execution = draw(execution_options())
    random: Random = draw(st.randoms(use_true_random=False))
    cases = source.cases()
    if isinstance(oracle, DcpTarget):
        # Each hyper-parameter of each parameter may be an archive, which takes some kilobytes to plan.
        execution["memory_limit_bytes"] = max(execution["memory_limit_bytes"], 1 << 23)
        cases = cases.filter(oracle.takes)
    case = draw(cases)
    scaled = case.state.dtype == "float16" and not isinstance(source, DcpSource)
    if options.get("dtype") == "fp16" and options.get("zero_stage") == "3" and not scaled:
        options["dtype"] = "bf16"  # DeepSpeed's loader takes a loss scale of the file, and there is none: refused
    return Trial(source, case, oracle, options, execution, random)
