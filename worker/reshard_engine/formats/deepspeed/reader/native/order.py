"""The optimizer's order of a group's parameters, also where the flat order is another one.

Under `round_robin_gradients` the flat order, which `param_shapes` lists, deals a group's parameters out over the ranks.
The next run needs the order before that, because another number of ranks deals the parameters out differently.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`_round_robin_reorder`); verified by running.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard_engine.formats.deepspeed.names import round_robin_order


def undealt(names: Sequence[str], ranks: int, model_order: Sequence[str]) -> list[int]:
    """Positions of a group's parameters in its flat order, listed in the order before it was dealt out.

    The config may say `round_robin_gradients` where DeepSpeed does not do it (pipelines, BF16_Optimizer): a flat
    order that already is the model's own is left alone.

    Args:
        names: The group in flat order.
        ranks: Data-parallel ranks that it was dealt out over.
        model_order: All names of `module`.
    """
    flat, back = list(range(len(names))), _back(len(names), ranks)
    return flat if _rising(flat, names, model_order) and not _rising(back, names, model_order) else back


def shown_order(
    names: Sequence[str], ranks: int, model_order: Sequence[str], fragments: Sequence[str]
) -> list[int] | None:
    """Like `undealt`, for a run whose config is not known; None if the files do not show the order.

    `param_slice_mappings` walks a group's parameters in the order before it was dealt out, rank by rank, also under
    `round_robin_gradients`; `param_shapes` has the flat order. Without it (before 0.7), the model's order shows it.

    Args:
        names: The group in flat order.
        ranks: Data-parallel ranks that share it.
        model_order: All names of `module`.
        fragments: The names in `param_slice_mappings` of all ranks, each where it comes first.

    Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`_create_param_mapping`, `_link_all_hp_params`).
    """
    flat, back = list(range(len(names))), _back(len(names), ranks)
    for order in (flat, back):
        if [names[i] for i in order] == [*fragments]:
            return order
    if fragments:
        return None
    return next((order for order in (flat, back) if _rising(order, names, model_order)), None)


def _back(count: int, ranks: int) -> list[int]:
    dealt = round_robin_order(count, ranks)
    return sorted(range(count), key=dealt.__getitem__)


def _rising(order: Sequence[int], names: Sequence[str], model_order: Sequence[str]) -> bool:
    place = {name: i for i, name in enumerate(model_order)}
    places = [place[names[i]] for i in order if names[i] in place]
    return places == sorted(places)
