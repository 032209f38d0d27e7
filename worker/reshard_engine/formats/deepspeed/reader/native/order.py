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
    count = len(names)
    dealt = round_robin_order(count, ranks)
    back = sorted(range(count), key=dealt.__getitem__)
    place = {name: i for i, name in enumerate(model_order)}

    def rising(order: Sequence[int]) -> bool:
        places = [place[names[i]] for i in order if names[i] in place]
        return places == sorted(places)

    flat = list(range(count))
    return flat if rising(flat) and not rising(back) else back
