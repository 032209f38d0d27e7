"""Maps each name of the model without PEFT to a stored tensor of a PEFT run, and to the factors that adapt it.

A *place* is a tensor of the model that was trained, under its owner's name: tied names have one place. A name of the
plain model means the place of its module that was saved whole, if there is one, and else that of the base model.

Source: peft 0.21.2 `utils/other.py` (`ModulesToSaveWrapper`, `TrainableTokensWrapper`), deepspeed 0.19.8
`runtime/engine.py` (`_get_shared_params`: tied names are listed also where frozen parameters are not saved).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.errors import RequestError, SourceError, printable
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.peft.names import (
    TOKENS,
    AdapterPart,
    adapter_part,
    adapter_parts,
    chosen_adapter,
    plain_name,
    refuse_broken_factors,
    refuse_other_methods,
)


@dataclass
class PeftRun:
    """One adapter of a run, and the model that it adapts."""

    values: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    """The stored parameters, by place."""
    means: dict[str, str] = field(default_factory=dict[str, str])
    """Place by name of the plain model; in the order of the checkpoint."""
    base: dict[str, str] = field(default_factory=dict[str, str])
    """Names of the model as it was before PEFT: without modules that were saved whole."""
    factors: dict[str, dict[str, Parameter]] = field(default_factory=dict[str, dict[str, Parameter]])
    """Factors of LoRA, by adapted module."""
    tokens: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    """Trained rows, by module of an embedding."""
    saved: set[str] = field(default_factory=set[str])
    """Names of the plain model that were saved whole."""
    buffers: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def adapted(self) -> dict[str, str]:
        """Names of weights that factors or tokens change, each with the module."""
        return {f"{m}.weight": m for m in (*self.factors, *self.tokens)} | {
            f"{m}.bias": m for m, held in self.factors.items() if "lora_B.bias" in held
        }

    @property
    def missing(self) -> list[str]:
        """Names that the merged model needs and whose values are not stored."""
        names = dict.fromkeys((*self.means, *self.adapted))
        return [n for n in names if self.means.get(n) not in self.values]

    @property
    def untied(self) -> list[list[str]]:
        """Groups of names that were tied before PEFT and are separate tensors now."""
        before: dict[str, list[str]] = {}
        for name, place in self.base.items():
            before.setdefault(place, []).append(name)
        return [names for names in before.values() if len({self.means[n] for n in names}) > 1]


def peft_run(checkpoint: Checkpoint, wanted: str | None) -> PeftRun:
    """The requested adapter, with the model that it adapts.

    Raises:
        RequestError: `request.unsatisfiable` if there is no LoRA adapter, several and none named, or parameters of
            another method.
        SourceError: `checkpoint.malformed` if two parameters would have one name.
    """
    stored = {p.fqn: p for p in checkpoint.parameters}
    _refuse_adapter_file(checkpoint)
    names = [*stored, *checkpoint.shared, *(o for o in checkpoint.shared.values() if o not in stored)]
    refuse_other_methods([*names, *(b.fqn for b in checkpoint.buffers)])
    parts = adapter_parts(stored)
    adapter = chosen_adapter(list(stored), parts, wanted)
    refuse_broken_factors((p for p in parts if p.adapter == adapter), checkpoint.shapes())
    run = PeftRun()
    for fqn in dict.fromkeys(names):
        place = checkpoint.shared.get(fqn, fqn)
        if place in stored:
            run.values.setdefault(place, stored[place])
        part = adapter_part(fqn)
        if part is None:
            _put_base(run, fqn, place)
        elif part.adapter == adapter:
            _put_part(run, part, place, stored=fqn in stored)
    _put_buffers(run, checkpoint, adapter)
    return run


def _refuse_adapter_file(checkpoint: Checkpoint) -> None:
    """Refuse a source that `save_pretrained` wrote, which is an adapter and not a run."""
    if any(p.fqn.endswith((".lora_A.weight", ".lora_embedding_A")) for p in checkpoint.parameters):
        raise RequestError(
            "request.unsatisfiable",
            "the source is an adapter as PEFT saved it, no run: there is nothing here to merge it into",
            fix="PEFT's own: PeftModel.from_pretrained(base, DIR).merge_and_unload()",
        )


def _put_base(run: PeftRun, fqn: str, place: str) -> None:
    name = plain_name(fqn)
    if run.base.setdefault(name, place) != place:
        raise SourceError("checkpoint.malformed", f"two parameters are {printable(name)} in the model without PEFT")
    run.means.setdefault(name, place)


def _put_part(run: PeftRun, part: AdapterPart, place: str, *, stored: bool) -> None:
    module = plain_name(part.module)
    if part.kind == "modules_to_save":
        name = plain_name(part.saved_as)
        run.means[name] = place
        run.saved.add(name)
        return
    if not stored and part.kind == TOKENS:
        return  # a tied layer follows the one that it is tied to
    if not stored or part.module.endswith(".base_layer"):
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(part.fqn)} adapts what another adapter adapts already (tied, or `target_parameters`): no rule "
            "merges it here",
            fix="--to peft, then PEFT's merge_and_unload",
        )
    if part.kind == TOKENS:
        run.tokens[module] = run.values[place]
        return
    kind = f"{part.kind}{part.tail if part.tail == '.bias' else ''}"
    run.factors.setdefault(module, {})[kind] = run.values[place]


def _put_buffers(run: PeftRun, checkpoint: Checkpoint, adapter: str) -> None:
    saved: dict[str, int] = {}
    for buffer in checkpoint.buffers:
        part = adapter_part(buffer.fqn)
        if part is None:
            run.buffers[plain_name(buffer.fqn)] = buffer.tensor
        elif part.adapter == adapter and part.kind == "modules_to_save":
            saved[plain_name(part.saved_as)] = buffer.tensor
    run.buffers |= saved


def lacks_base(checkpoint: Checkpoint) -> bool:
    """True if a LoRA run was saved without its frozen parameters; of tied ones DeepSpeed keeps a name all the same."""
    if not checkpoint.frozen_left_out and any(adapter_part(p.fqn) is None for p in checkpoint.frozen):
        return False
    return bool(checkpoint.trained) and any(p.of_lora for p in adapter_parts(p.fqn for p in checkpoint.parameters))


def with_base(run: PeftRun, weights: Mapping[str, Parameter], ties: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Add the base model's weights for places without a value; stored values of the run stay.

    Args:
        run: The run; it is changed.
        weights: The base model's, by name.
        ties: Tied names of the base model with their owners.

    Returns:
        Names whose values must be alike, each with another name that gave the place its value.

    Raises:
        RequestError: `request.unsatisfiable` if the base model does not fit this run, with the numbers.
    """
    held = set(run.values)
    given: dict[str, str] = {}
    alike: list[tuple[str, str, str]] = []
    for name, weight in weights.items():
        place = run.base.setdefault(name, name)
        run.means.setdefault(name, place)
        if place in held:
            continue
        if place in given:
            alike.append((name, given[place], place))
            continue
        given[place] = name
        run.values[place] = weight
    for alias, owner in ties.items():
        if owner in run.base and alias not in run.base:
            run.base[alias] = run.base[owner]
            run.means.setdefault(alias, run.base[owner])
    _refuse_misfits(run, weights, held)
    return alike


def _refuse_misfits(run: PeftRun, weights: Mapping[str, Parameter], held: set[str]) -> None:
    of_base = {n: w.shape for n, w in weights.items()}
    stored = {n: run.values[p].shape for n, p in run.means.items() if p in held}
    other = [n for n, s in stored.items() if n in of_base and s != of_base[n] and n not in run.saved]
    other += run.missing
    unknown = [n for n in stored if n not in of_base and n not in run.saved and run.base.get(n) in held]
    tied = {n for n, p in run.base.items() if any(run.base.get(w) == p for w in weights)}
    other += [n for n in unknown if n not in tied]
    if other:
        first = other[0]
        how = f"{of_base[first]} there and {stored[first]} in the run" if first in of_base else "not there"
        raise RequestError(
            "request.unsatisfiable",
            f"the base model does not fit this run: {len(other)} weights do not fit, such as {printable(first)}, "
            f"which is {how}",
            fix="--base: the model that the run started from",
            details={"parameters": [printable(n) for n in other[:64]]},
        )
    for name in sorted(run.saved & of_base.keys()):
        kept = [n for n, s in of_base.items() if s == of_base[name] and run.means[n] not in held and len(s) == 2]
        kept += [n for n, p in run.means.items() if p == run.base[name] and n not in kept]
        if stored[name] != of_base[name] and kept:
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(name)} was resized: {stored[name]} in the run, {of_base[name]} in the base model; "
                f"{printable(kept[0])} would still have {of_base[name][0]} rows",
                fix="--base: the model after resize_token_embeddings, saved",
            )
