"""The layers of each pipeline stage, chosen as DeepSpeed's `PipelineModule` chooses them.

Names give the layer of each parameter, but not the number of all layers: layers without parameters have no names. The
balanced methods do not depend on trailing layers. `uniform` does, so the user must give the number.

Source: deepspeed 0.19.8 `runtime/pipe/module.py` (`_partition_layers`, `_count_layer_params`), `runtime/utils.py`
(`partition_uniform`, `partition_balanced`: the same dynamic program, ties broken towards later cuts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from reshard.errors import RequestError, counted, printable
from reshard.options import NativeLayout

MAX_LAYERS = 4_096
_INFINITY = float("inf")


def boundaries(
    layout: NativeLayout, weights: Mapping[int, int], shapes: Mapping[int, object], *, tied: bool
) -> list[int]:
    """The first layer of each stage, and one past the last: `pp + 1` numbers.

    Args:
        layout: `partition_method`, `pipeline_layers` and `pp`.
        weights: Trainable elements of each layer that has parameters, on one tensor-parallel rank.
        shapes: The kind of each layer: names and shapes of its parameters.
        tied: True if a module of the first layers comes again behind the last layer.

    Raises:
        RequestError: `request.invalid` for boundaries that do not cover the layers, or a method that lacks options.
    """
    method = (layout.partition_method or "").lower()
    last = max(weights, default=0) + (2 if tied else 1)
    count = layout.pipeline_layers or last
    if count < last or count > MAX_LAYERS:
        raise RequestError(
            "request.invalid",
            f"{count} pipeline layers, and parameters are in layers up to {last - 1}",
            fix=f"at least {last}",
        )
    if method[:1].isdigit():
        return _explicit(method, layout.pp, last)
    if layout.pp > count:
        raise RequestError(
            "request.unsatisfiable",
            f"{layout.pp} pipeline stages for {counted(count, 'layer')}",
            fix=f"--pp {count} or less",
        )
    if method == "uniform":
        if layout.pipeline_layers is None:
            raise RequestError(
                "request.invalid",
                "`uniform` depends on the number of layers, those without parameters included: no checkpoint states it",
                fix=f"--pipeline-layers N (at least {last}), or each stage's first layer: --partition-method 0,3,6",
            )
        return _uniform(count, layout.pp)
    if method == "parameters":
        sizes = [weights.get(i, 0) for i in range(count)]
        if tied:
            sizes[last - 1] += weights[min(weights)]
        return _balanced(sizes, layout.pp)
    if method.startswith("type:"):
        kinds = Counter(shapes.values())
        block, repeats = kinds.most_common(1)[0] if kinds else (None, 0)
        if repeats < 2:
            raise RequestError(
                "request.invalid",
                "no two layers are of one kind: `type:` would match one layer at most",
                fix="--partition-method parameters, or each stage's first layer: 0,3,6",
            )
        return _balanced([1 if shapes.get(i) == block else 0 for i in range(count)], layout.pp)
    raise RequestError(
        "request.invalid",
        f"partition_method {printable(method)!r} is not known",
        fix="uniform, parameters, type:REGEX (uniform with --pipeline-layers N), or each stage's first layer: 0,3,6",
    )


def _explicit(text: str, stages: int, last: int) -> list[int]:
    parts = text.split(",")
    if not all(p.strip().isdecimal() and len(p.strip()) < 9 for p in parts):
        raise RequestError("request.invalid", f"boundaries {printable(text)!r}", fix="such as 0,3,6")
    found = [int(p) for p in parts]
    if len(found) == stages:
        found.append(max(last, found[-1] + 1))
    rising = all(a < b for a, b in pairwise(found))
    if len(found) != stages + 1 or found[0] != 0 or found[-1] < last or not rising:
        raise RequestError(
            "request.invalid",
            f"boundaries {found} do not cut layers 0 to {last - 1} into {stages} stages",
            fix=f"{stages} rising numbers, each stage's first layer, from 0 on",
        )
    return found


def _uniform(count: int, stages: int) -> list[int]:
    size, rest = divmod(count, stages)
    return [i * size + min(i, rest) for i in range(stages + 1)]


def _balanced(weights: Sequence[int], stages: int) -> list[int]:
    """DeepSpeed's linear partition, with DeepSpeed's way of breaking ties."""
    n = len(weights)
    if n <= stages:
        return [min(p, n) for p in range(stages + 1)]
    prefix = [0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    most = [[_INFINITY] * (stages + 1) for _ in range(n + 1)]
    least = [[_INFINITY] * (stages + 1) for _ in range(n + 1)]
    cost = [[_INFINITY] * (stages + 1) for _ in range(n + 1)]
    place = [[0] * (stages + 1) for _ in range(n + 1)]
    most[0][0] = cost[0][0] = 0
    for i in range(1, n + 1):
        for j in range(1, min(i, stages) + 1):
            for k in range(i):
                high = max(most[k][j - 1], prefix[i] - prefix[k])
                low = min(least[k][j - 1], prefix[i] - prefix[k])
                # Where no such partition exists, both are infinite: the difference is nan, and the test is False.
                if cost[i][j] >= high - low:
                    cost[i][j], most[i][j], least[i][j], place[i][j] = high - low, high, low, k
    parts = [n]
    for j in range(stages, 0, -1):
        parts.append(place[parts[-1]][j])
    return parts[::-1]
