"""Experts of MoE layers: the expert-parallel rank, the local name and the file of each.

Expert-parallel rank e of EP holds the experts [e * local, (e + 1) * local) of each layer and counts them from 0;
data-parallel rank d is expert-parallel rank d mod EP, and the ranks of one e share its experts' optimizer state. Files
of weights carry global numbers.

Source: deepspeed 0.19.8 `utils/groups.py` (E + D order), `runtime/engine.py` (`_save_moe_checkpoint`,
`_get_expert_ckpt_name`), `moe/utils.py` (param groups named `ep_size_N`); verified by loading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reshard.errors import RequestError, printable
from reshard_engine.checkpoint import ParamGroup
from reshard_engine.formats.deepspeed.names import EXPERT
from reshard_engine.formats.deepspeed.writer.native.autoep import slice_of
from reshard_engine.formats.deepspeed.writer.native.model import LocalModel, LocalParameter

_GROUP_NAME = re.compile(r"ep_size_[0-9]+")


@dataclass(frozen=True, slots=True)
class Expert:
    """The parts of the name of an expert's parameter."""

    head: str
    """The prefix that the names of a layer's experts share."""
    number: int
    tail: str


def expert_of(name: str) -> Expert | None:
    """The expert that a parameter belongs to; None for all others."""
    match = EXPERT.fullmatch(name)
    return Expert(match["head"], int(match["number"]), match["tail"]) if match else None


def is_expert_group(group: ParamGroup) -> bool:
    """True if a param group holds experts."""
    return group.hyper_parameters.get("moe") is True


def renamed_group(group: ParamGroup, ep: int) -> ParamGroup:
    """A param group of experts under the name for `ep` expert-parallel ranks; other groups unchanged."""
    if is_expert_group(group) and _GROUP_NAME.fullmatch(group.name or ""):
        return ParamGroup({**group.hyper_parameters, "name": f"ep_size_{ep}"})
    return group


def experts_by_layer(names: Iterable[str]) -> dict[str, int]:
    """The number of experts in each layer, by the prefix of their names, in the model's order.

    Raises:
        RequestError: `request.unsatisfiable` if a layer lacks some of its experts.
    """
    seen: dict[str, set[int]] = {}
    for expert in filter(None, map(expert_of, names)):
        seen.setdefault(expert.head, set()).add(expert.number)
    for head, numbers in seen.items():
        if numbers != set(range(len(numbers))):
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(head)} has only experts {sorted(numbers)[:8]}: others are missing",
                fix="copy the files of all experts of the tag, then run the same command again",
            )
    return {head: len(numbers) for head, numbers in seen.items()}


def require_divisible(counts: Iterable[int], ep: int, dp: int) -> None:
    """Refuse a number of expert-parallel ranks that does not divide experts or ranks.

    Raises:
        RequestError: `request.unsatisfiable`, with a number that divides both.
    """
    wanted = set(counts)
    if ep > 1 and not wanted:
        raise RequestError("request.unsatisfiable", f"--ep {ep}: the model has no experts", fix="--ep 1")
    wrong = [n for n in wanted if n % ep]
    if wrong or dp % ep:
        works = max(e for e in range(1, ep + 1) if dp % e == 0 and all(n % e == 0 for n in wanted))
        what = f"{wrong[0]} experts" if wrong else f"{dp} data-parallel ranks"
        raise RequestError("request.unsatisfiable", f"{what} do not divide by --ep {ep}", fix=f"--ep {works}")


def held_by(members: Sequence[LocalParameter], model: LocalModel, ep: int, rank: int) -> list[LocalParameter]:
    """A group's parameters on one expert-parallel rank: experts under local numbers, fused parameters cut."""
    counts = experts_by_layer(p.fqn for p in model.parameters)
    found: list[LocalParameter] = []
    for parameter in members:
        expert = expert_of(parameter.fqn)
        if expert is None:
            found.append(slice_of(parameter, ep, rank) if parameter.fqn in model.fused else parameter)
            continue
        local = counts[expert.head] // ep
        if expert.number // local == rank:
            found.append(replace(parameter, fqn=f"{expert.head}{expert.number % local}{expert.tail}"))
    return found
