"""A training state in the fields that all formats share: enough for a writer of another family, and from one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from house.requests import asked
from reshard.choices import NameScheme, OpaquePolicy, TargetFormat
from reshard.engine import load_engine
from reshard.errors import RequestError, SourceError
from reshard.models.jobs import ConvertResult
from reshard.models.reports import DifferenceKind, DiffOptions
from reshard.options import SourceSpec
from reshard_engine.checkpoint import Checkpoint, Counters, FormatFacts, OptimizerState, ParamGroup, Question, Undecided
from reshard_engine.formats.deepspeed.facts import facts_of, model_states
from reshard_engine.formats.deepspeed.relabel import relabelled
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.formats.torch_files import files_of, read_torch_files
from reshard_engine.operations import requested
from reshard_engine.operations.diff import diff_checkpoints
from reshard_engine.pickles.nodes import mapping_items, mapping_of, plain_value
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

DATA = Path(__file__).parents[2] / "data"
SOURCES = ("zero2_tiny", "zero3_tiny")
TARGETS: tuple[Mapping[str, Any], ...] = (
    *({"to": "zero", "dp": 3, "zero_stage": s, "dtype": "bf16"} for s in ("1", "2", "3", "bf16")),
    {"to": "universal"},
)


def _read(name: str) -> Checkpoint:
    return read_checkpoint(open_location(str(DATA / name), None), None, OpaqueLedger(OpaquePolicy.REFUSE))


def _other_family(checkpoint: Checkpoint) -> Checkpoint:
    """The same state as the reader of another format would leave it."""
    return replace(checkpoint, facts=FormatFacts(), family="other", format="other", framework_version=None)


def _convert(
    checkpoint: Checkpoint, target: Path, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> ConvertResult:
    monkeypatch.setattr(requested, "named_checkpoint", lambda *_, **__: checkpoint)
    request = {"source": {"url": checkpoint.url}, "target": str(target), **options}
    return load_engine().convert(asked(**request))


def _flat(checkpoint: Checkpoint) -> dict[str, Any]:
    """Keys as PyTorch's distributed checkpoints have them, made without looking at any format's facts.

    Source: torch 2.13.0 `distributed/checkpoint/state_dict.py` (`flatten_optimizer_state_dict`).
    """
    assert checkpoint.optimizer is not None
    found: dict[str, Any] = {f"model.{p.fqn}": p.best for p in checkpoint.parameters}
    found |= {f"model.{b.fqn}": b.tensor for b in checkpoint.buffers}
    for index, group in enumerate(checkpoint.optimizer.groups):
        for parameter in checkpoint.members(index):
            states = {**parameter.states, **{k: v.value for k, v in parameter.scalars.items()}}
            found |= {f"optim.state.{parameter.fqn}.{k}": v for k, v in states.items() if k != "fp32"}
            values = plain_value(mapping_of({**group.hyper_parameters}), what="group")
            found |= {f"optim.param_groups.{parameter.fqn}.{k}": v for k, v in values.items()}
    found |= {f"scheduler.{i}": plain_value(s, what="scheduler") for i, s in enumerate(checkpoint.schedulers)}
    return found | {"train_state.step": checkpoint.counters.steps, "train_state.samples": checkpoint.counters.samples}


@pytest.mark.parametrize("name", SOURCES)
def test_a_writer_of_another_family_finds_the_whole_state(name: str) -> None:
    checkpoint, truth = _read(name), json.loads((DATA / name / "expected.json").read_text())
    found = _flat(_other_family(checkpoint))
    (group,) = truth["groups"]
    for fqn in group["names"]:
        assert found[f"optim.state.{fqn}.step"] == truth["scalars"]["step"][fqn]
        for state in ("exp_avg", "exp_avg_sq"):
            stored = checkpoint.shard_map.tensors[found[f"optim.state.{fqn}.{state}"]]
            assert (stored.fqn, stored.state) == (fqn, state)
        for key, value in group.items():
            wanted = tuple(value) if key == "betas" else value
            assert key == "names" or found[f"optim.param_groups.{fqn}.{key}"] == wanted
    assert found["scheduler.0"] == truth["lr_scheduler"]
    assert (found["train_state.step"], found["train_state.samples"]) == (truth["global_steps"], truth["global_samples"])
    assert plain_value(mapping_of({**checkpoint.client_state}), what="client state") == truth["client_state"]
    assert {n.partition(".")[2] for n in found if n.startswith("model.")} <= set(checkpoint.module_names)
    assert set(truth["aliases"]) <= set(checkpoint.module_names)


@pytest.mark.parametrize("options", TARGETS, ids=lambda o: "-".join([o["to"], *filter(None, [_stage_of(o)])]))
@pytest.mark.parametrize("name", SOURCES)
def test_what_is_written_of_another_family_is_the_run(
    name: str, options: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _convert(_other_family(_read(name)), tmp_path / "out" / "step", options, monkeypatch)
    sides = (SourceSpec(url=str(DATA / name)), SourceSpec(url=str(tmp_path / "out" / "step")))
    found = load_engine().diff(*sides, DiffOptions())
    assert found.equal
    assert found.values > 10


def _stage_of(options: Mapping[str, Any]) -> str:
    return options.get("zero_stage", "")


def test_two_families_are_compared_by_what_both_know() -> None:
    mine, theirs = _read("zero2_tiny"), _other_family(_read("zero2_tiny"))
    theirs = replace(theirs, counters=Counters(steps=3))  # it counts no samples
    assert diff_checkpoints(mine, theirs, DiffOptions()).equal
    found = diff_checkpoints(mine, replace(theirs, counters=Counters(steps=4)), DiffOptions()).differences
    assert [(d.kind, d.name, d.a, d.b) for d in found] == [(DifferenceKind.STATE, "steps", "3", "4")]


def test_a_choice_among_schedulers_that_nobody_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _other_family(_read("zero2_tiny"))
    question = Undecided(Question.SCHEDULER, "it has 2 schedulers", "--scheduler-key a|b|none")
    source = replace(source, schedulers=source.schedulers * 2, scheduler_keys=("a", "b"), undecided=(question,))
    for options in TARGETS:
        with pytest.raises(SourceError, match="it has 2 schedulers") as caught:
            _convert(source, tmp_path / "out" / "step", options, monkeypatch)
        assert (caught.value.code, caught.value.fix) == ("checkpoint.ambiguous", question.fix)


@pytest.mark.parametrize("own", [1, None])
def test_schedulers_that_are_not_the_optimizers_are_named(
    own: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _other_family(_read("zero2_tiny"))
    (mine,) = source.schedulers
    other = mapping_of({"last_epoch": 70})
    source = replace(source, schedulers=(other, mine), scheduler_keys=("critic", "mine"), own_scheduler=own)
    for number, options in enumerate(TARGETS):
        target = tmp_path / str(number) / "step"
        found = _convert(source, target, options, monkeypatch)
        left = {n.path for n in found.not_carried if n.path in source.scheduler_keys}
        assert left == ({"critic"} if own else {"critic", "mine"})
        written = read_checkpoint(open_location(str(target), None), None, OpaqueLedger(OpaquePolicy.REFUSE))
        state = plain_value(written.scheduler or facts_of(written).entries["lr_scheduler"], what="lr_scheduler")
        # None would end the load of a run with a scheduler: a state that goes on by the count of updates stands in.
        assert state == plain_value(mine, what="mine") if own else state["last_epoch"] == source.counters.steps


def test_client_state_does_not_take_the_place_of_deepspeeds_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = replace(_other_family(_read("zero2_tiny")), client_state={"epoch": 1, "module": mapping_of({})})
    for options in TARGETS:
        with pytest.raises(RequestError, match="client state has module") as caught:
            _convert(source, tmp_path / "out" / "step", options, monkeypatch)
        assert caught.value.code == "request.unsatisfiable"


def test_groups_without_hyper_parameters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = replace(_other_family(_read("zero2_tiny")), optimizer=OptimizerState(()))
    for options in TARGETS:
        with pytest.raises(RequestError, match="no hyper-parameters of its param groups") as caught:
            _convert(source, tmp_path / "out" / "step", options, monkeypatch)
        assert caught.value.code == "request.unsatisfiable"


def test_buffers_keep_their_places_under_other_names() -> None:
    old = _read("zero2_tiny")
    block, inner = "language_model.encoder.layers.0.", {"weight": "mlp.weight", "buffer": "self_attention.inv_freq"}
    source = replace(
        old,
        parameters=(replace(old.trained[0], fqn=block + inner["weight"]),),
        buffers=(replace(old.buffers[0], fqn=block + inner["buffer"]),),
        extra_states={},
        shared={},
    )
    request = asked(
        source=SourceSpec(url=old.url), target="x", to=TargetFormat.UNIVERSAL, names=NameScheme.MEGATRON_PIPELINE
    )
    states = model_states(relabelled(source, request))
    assert list(mapping_items(states["module"], what="module")) == [f"2.{name}" for name in inner.values()]
    assert plain_value(states["buffer_names"], what="names") == [f"2.{inner['buffer']}"]


@pytest.mark.parametrize("options", [TARGETS[1], TARGETS[-1]], ids=["zero", "universal"])
def test_what_deepspeed_does_not_keep_is_named(
    options: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _other_family(_read("zero2_tiny"))
    source = replace(source, counters=replace(source.counters, tokens=4096))
    result = _convert(source, tmp_path / "out" / "step", options, monkeypatch)
    assert [(n.path, n.reason) for n in result.not_carried] == [("tokens", "DeepSpeed counts no tokens")]


def test_steps_that_nothing_counts_are_the_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = replace(_other_family(_read("zero3_tiny")), counters=Counters())
    for options in (TARGETS[1], TARGETS[-1]):
        target = tmp_path / options["to"] / "step"
        _convert(source, target, options, monkeypatch)
        assert load_engine().inspect(SourceSpec(url=str(target))).step == 3


def test_an_fp16_run_keeps_its_own_loss_scale_where_the_source_says_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, options in enumerate(TARGETS[:2]):
        target = tmp_path / str(number) / "step"
        result = _convert(_other_family(_read("zero2_tiny")), target, {**options, "dtype": "fp16"}, monkeypatch)
        assert [w for w in result.warnings if "no loss scale: the run's config gives it" in w]
        written = read_checkpoint(open_location(str(target), None), None, OpaqueLedger(OpaquePolicy.REFUSE))
        assert facts_of(written).optimizer_entries.keys().isdisjoint({"loss_scaler", "dynamic_loss_scale"})
    with pytest.raises(RequestError, match="says no loss scale"):
        _convert(_other_family(_read("zero2_tiny")), tmp_path / "3", {**TARGETS[2], "dtype": "fp16"}, monkeypatch)


def _fused(checkpoint: Checkpoint, *more: str) -> Checkpoint:
    """The same run with FusedAdam, by its hyper-parameters, and more of these."""
    assert checkpoint.optimizer is not None
    gone = {"amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
    groups = tuple(
        ParamGroup(
            {k: v for k, v in g.hyper_parameters.items() if k not in gone}
            | dict.fromkeys(("bias_correction", *more), True)
        )
        for g in checkpoint.optimizer.groups
    )
    return replace(checkpoint, optimizer=replace(checkpoint.optimizer, groups=groups))


@pytest.mark.parametrize(
    ("version", "written"), [("0.14.0", 0.0), ("0.19.2", 0.0), ("0.19.3", 1.0), ("0.19.8+cu12", None), (None, None)]
)
def test_the_clipping_of_stage_0_is_the_runs_or_refused(
    version: str | None, written: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _fused(_read("zero2_tiny"))
    facts = facts_of(source)
    config = {k: v for k, v in mapping_items(facts.entries["ds_config"], what="").items() if k != "gradient_clipping"}
    entries = {**facts.entries, "ds_config": mapping_of(config)}
    entries = {**entries, "ds_version": version} if version else {k: v for k, v in entries.items() if k != "ds_version"}
    beside = {k: v for k, v in facts.optimizer_entries.items() if k != "clip_grad"}
    source = replace(source, facts=replace(facts, entries=entries, optimizer_entries=beside))
    options = {"to": "zero", "dp": 2, "zero_stage": "0"}
    if written is None:
        with pytest.raises(RequestError, match="at which norm its run clipped") as refused:
            _convert(source, tmp_path / "step", options, monkeypatch)
        assert refused.value.fix.startswith("--zero-stage 1, 2 or 3")  # type: ignore[union-attr]
        return
    _convert(source, tmp_path / "step", options, monkeypatch)
    assert _optimizer_entry(tmp_path / "step")["clip_grad"] == written


def _optimizer_entry(folder: Path) -> Mapping[str | int, Any]:
    """The `optimizer` of the model states of stage 0."""
    files = files_of(read_torch_files(open_location(str(folder), None), OpaqueLedger(OpaquePolicy.REFUSE)))
    return mapping_items(mapping_items(files["mp_rank_00_model_states.pt"], what="file")["optimizer"], what="optimizer")


def test_optimizers_that_deepspeed_does_not_fuse_get_the_other_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP16_UnfusedOptimizer, which holds FusedLamb, fails on the form of FusedAdam, and keeps no clipping."""
    source = _fused(_other_family(_read("zero2_tiny")), "max_coeff", "max_grad_norm")
    _convert(source, tmp_path / "step", {"to": "zero", "dp": 2, "zero_stage": "0"}, monkeypatch)
    entry = _optimizer_entry(tmp_path / "step")
    assert "fp32_groups" in entry
    assert entry.keys().isdisjoint({"fp32_groups_flat", "clip_grad"})
