"""What a `ds_config` says of a run: read from checkpoints of strangers, so any value may stand anywhere."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from reshard_engine.formats.deepspeed.config import RunConfig
from reshard_engine.pickles.nodes import Node, node_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = ("stage", "sub_group_size", "round_robin_gradients", "parameter_alignment", "enabled", "grad_accum_dtype")
SECTIONS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4) | VALUES
NAMES = (
    *("zero_optimization", "bf16", "fp16", "data_types", "gradient_clipping", "use_data_before_expert_parallelism"),
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first draw loads tables of characters
@given(st.dictionaries(st.sampled_from(NAMES), SECTIONS, max_size=5))
def test_any_config_is_read(config: dict[str, object]) -> None:
    found = RunConfig.of(node_of(config))
    assert found.sub_group_size is None or found.sub_group_size >= 1
    assert found.clip_grad is None or math.isfinite(found.clip_grad)


@pytest.mark.parametrize("size", [math.inf, math.nan, 10**400, -1, 0, "8", None])
def test_a_size_that_is_none_is_not_taken(size: object) -> None:
    config: Node = node_of({"zero_optimization": {"sub_group_size": size, "stage": 3}, "gradient_clipping": size})
    found = RunConfig.of(config)
    assert (found.stage, found.sub_group_size) == (3, None)
    assert found.clip_grad in (None, -1.0, 0.0)
