"""Native DeepSpeed files as a target, put together again by torch's safe loader and DeepSpeed's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st

from laws.targets import MANIFEST, overflowed, rounded, together
from laws.torch_values import bits_of, load, tree_of
from reshard.choices import TargetFormat
from reshard.models.jobs import ConvertRequest
from reshard.options import DeepSpeedOptions
from reshard_engine.tensors.dtypes import SHORT_NAMES
from reshard_engine.testing.logical import MASTER, Bits, Content, LogicalState, Saved, Tree

_FLAT = st.fixed_dictionaries(
    {
        "zero_stage": st.sampled_from(["1", "2"]),
        "dp": st.integers(1, 5),
        "round_robin_gradients": st.booleans(),
        "parameter_alignment": st.booleans(),
    }
)
_BF16 = st.fixed_dictionaries({"zero_stage": st.just("bf16"), "dp": st.integers(1, 5)})
_SHARDED = st.fixed_dictionaries(
    {"zero_stage": st.just("3"), "dp": st.integers(1, 5), "sub_group_size": st.sampled_from([1, 50, 10**9])}
)
# What describes the source's layout, and what is put together anew.
_RELAID = {
    *("ds_config", "ds_version", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "optimizer"),
    *("module", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes", "frozen_param_fragments"),
}


def _unnested(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request from fields whose `layout` has the options of DeepSpeed, too."""
    return {"to": drawn["to"], "dtype": drawn["dtype"], **drawn["layout"]}


@dataclass(frozen=True)
class NativeTarget:
    """DeepSpeed's own files at stages 1, 2, 3 and BF16_Optimizer."""

    name: str = "zero"
    wants_full_state: bool = True

    def options(self) -> st.SearchStrategy[Mapping[str, Any]]:
        """A stage, ranks, and the options that move elements."""
        dtypes = st.sampled_from(["fp32", "bf16", "fp16"])
        plain = st.fixed_dictionaries({"to": st.just(TargetFormat.ZERO), "dtype": dtypes, "layout": _FLAT | _SHARDED})
        bf16 = st.fixed_dictionaries({"to": st.just(TargetFormat.ZERO), "dtype": st.just("bf16"), "layout": _BF16})
        return plain.map(_unnested) | bf16.map(_unnested)

    def expected(self, saved: Saved, request: ConvertRequest) -> Content:
        """Masters and moments as they were, weights as stored, or rounded from masters, and what surrounds them."""
        saved = saved.in_the_run()
        state, zero = saved.state, request.options.of(DeepSpeedOptions)
        assert request.dtype is not None
        late = saved.frozen_late
        content = together(self._weights(state, SHORT_NAMES[request.dtype], late, sharded=zero.zero_stage == "3"))
        if zero.zero_stage == "3":
            owners = [replace(state.parameter(state.aliases[a]), fqn=a, group=None) for a in saved.copies]
            copied = self._weights(
                replace(state, parameters=tuple(owners)), SHORT_NAMES[request.dtype], late, sharded=True
            )
            content = together([content, *copied])
        tensors = {**content.tensors, **{f"buffer/{n}": b for n, b in state.buffers.items()}}
        for parameter in state.trained:
            tensors |= {f"{key}/{parameter.fqn}": bits for key, bits in parameter.states.items()}
        values: dict[str, Tree] = {f"state/{k}": v for k, v in state.values.items() if k not in _RELAID}
        values["aliases"] = dict(sorted(state.aliases.items()))
        for parameter in state.trained:
            step = state.steps[parameter.group or 0]
            if step is not None:
                values[f"step/{parameter.fqn}"] = step
        for index, group in enumerate(state.groups or ()):
            values |= {f"group/{index}/{k}": v for k, v in group.items()}
        return Content(tensors, content.cast, values, content.overflows)

    @staticmethod
    def _weights(state: LogicalState, dtype: str, frozen_late: frozenset[str], *, sharded: bool) -> Iterator[Content]:
        for parameter in state.parameters:
            stored = parameter.weight
            value = stored if stored is not None and stored.dtype == dtype else parameter.value
            unsaid = sharded and parameter.group is not None
            if value is None or (unsaid and parameter.fqn not in frozen_late):
                continue
            keeps = parameter.group is None and (not value.floating or value.dtype.startswith("float8"))
            after = value if keeps or value.dtype == dtype else rounded(value, dtype)
            lost = 0 if after is value else overflowed(value, after)
            key = f"weight/{parameter.fqn}"
            cast = frozenset() if after is value else frozenset({key})
            overflows = {parameter.fqn: lost} if lost else {}
            # What was frozen late is among the frozen, too, where nobody looks: its master says its value.
            yield Content({}, overflows=overflows) if unsaid else Content({key: after}, cast, overflows=overflows)

    def read(self, files: Mapping[str, bytes]) -> Content:
        """Tensors by state and name, whole again."""
        rest = {name: data for name, data in files.items() if name != MANIFEST}
        optim = {n: d for n, d in rest.items() if n.endswith("_optim_states.pt")}
        models = {n: d for n, d in rest.items() if n.endswith("_model_states.pt")}
        assert optim.keys() | models.keys() == rest.keys()
        world = len(optim)
        prefix = "bf16_" if all(n.startswith("bf16_") for n in optim) else ""
        ranks = [load(optim[f"{prefix}zero_pp_rank_{r}_mp_rank_00_optim_states.pt"]) for r in range(world)]
        states = [r["optimizer_state_dict"] for r in ranks]
        sharded = "fp32_flat_groups" in states[0]
        names = [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(world)]
        loaded = [load(models[n]) for n in (names if sharded else ["mp_rank_00_model_states.pt"])]
        assert len(models) == len(loaded)
        model = loaded[0]
        assert (model["dp_world_size"], model["mp_world_size"]) == (world, 1)
        tensors: dict[str, Bits] = {}
        values: dict[str, Tree] = {f"state/{k}": tree_of(v) for k, v in model.items() if k not in _RELAID}
        values["aliases"] = dict(sorted(model["shared_params"].items()))
        base = [s["optimizer_state_dict" if sharded else "base_optimizer_state"] for s in states]
        flats = [s["fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"] for s in states]
        for index, group in enumerate(base[0]["param_groups"]):
            values |= {f"group/{index}/{k}": tree_of(v) for k, v in group.items() if k != "params"}
        for index, shapes in enumerate(model["param_shapes"]):
            pads = states[0].get("param_alignment_paddings")
            kept = {MASTER: [f[index] for f in flats]}
            for key, value in base[0]["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() == 1:
                    kept[key] = [b["state"][index][key] for b in base]
                else:
                    values |= {f"step/{name}": tree_of(value) for name in shapes}
            for key, pieces in kept.items():
                whole = _sharded(pieces, shapes) if sharded else _flat(pieces, shapes, pads[index] if pads else None)
                tensors |= {f"{key}/{name}": bits for name, bits in whole}
        tensors |= dict(_module(model, loaded, sharded=sharded))
        return Content(tensors, values=values)


def _flat(pieces: list[Any], shapes: Mapping[str, Any], pads: list[int] | None) -> Iterator[tuple[str, Bits]]:
    """The ranks' partitions joined are the group; behind its last parameter nothing but zeros."""
    flat = torch.cat([p.detach() for p in pieces])
    at = 0
    for place, (name, shape) in enumerate(shapes.items()):
        numel = prod(shape)
        yield name, bits_of(flat[at : at + numel].reshape(tuple(shape)))
        pad = pads[place] if pads else 0
        assert not flat[at + numel : at + numel + pad].any()
        at += numel + pad
    assert not flat[at:].any()


def _sharded(pieces: list[Any], shapes: Mapping[str, Any]) -> Iterator[tuple[str, Bits]]:
    """Each parameter is cut over the ranks by itself, its last share filled up with zeros."""
    ranks, at = len(pieces), 0
    for name, shape in shapes.items():
        numel = prod(shape)
        share = -(-numel // ranks)
        joined = torch.cat([p.detach()[at : at + share] for p in pieces])
        yield name, bits_of(joined[:numel].reshape(tuple(shape)))
        assert not joined[numel:].any()
        at += share
    assert all(p.numel() == at for p in pieces)


def _module(model: dict[str, Any], ranks: list[dict[str, Any]], *, sharded: bool) -> Iterator[tuple[str, Bits]]:
    buffers, aliases = set(model["buffer_names"]), model["shared_params"]
    # As DeepSpeed's loader asks: a source of stages 0 and 1 does not say that it left no frozen weights out.
    shares: dict[str, Any] = model.get("frozen_param_shapes") or {}
    for name, tensor in model["module"].items():
        if name in aliases:
            owner = model["module"][aliases[name]]
            assert bits_of(owner) == bits_of(tensor)
        elif name in buffers:
            yield f"buffer/{name}", bits_of(tensor)
        elif not sharded:
            yield f"weight/{name}", bits_of(tensor)
    trained = {name for group in model["param_shapes"] for name in group}
    for name, shape in shares.items() if sharded else ():
        joined = torch.cat([rank["frozen_param_fragments"][name] for rank in ranks])
        if name in trained:
            # Frozen when the optimizer had it already: its master, which is read above, is stepped and says its value.
            assert joined.numel() >= prod(shape)
            continue
        yield f"weight/{name}", bits_of(joined[: prod(shape)].reshape(tuple(shape)))
