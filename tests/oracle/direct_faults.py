"""A direct load under faults of one rank, and into engines that load other files; runs inside the ranks.

Faults come from the store, when the load reads.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

import reshard.deepspeed
from oracle.cases import Case
from oracle.parallel_cases import EXPERT_ROWS, EXPERTS, training_config
from oracle.parallel_moe import WIDTH, Expert, MixtureLM
from oracle.parallel_train import initialized
from oracle.train import RESUME_SEED, build_engine, dump_states, start_world
from reshard.errors import RequestError, ReshardError, StorageError
from reshard_engine.operations.virtual import loading
from reshard_engine.operations.virtual.checkpoint import VirtualCheckpoint
from reshard_engine.storage.local import LocalStore
from reshard_engine.storage.protocol import ObjectInfo

FAULTY = 1
"""The rank whose store fails."""


def _replaced(info: ObjectInfo) -> None:
    Path(info.path).write_bytes(Path(info.path).read_bytes())


def _truncated(info: ObjectInfo) -> None:
    os.truncate(info.path, info.size_bytes // 2)


def _down(_: ObjectInfo) -> None:
    raise StorageError("storage.unavailable", "the store does not answer")


def _killed(_: ObjectInfo) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_FAULTS: dict[str, Callable[[ObjectInfo], None]] = {
    "replaced": _replaced,
    "truncated": _truncated,
    "down": _down,
    "killed": _killed,
}


def _inject(fault: str) -> Callable[[], None]:
    """Has the store fail once, at the first read of the load; returns what takes that back."""
    if fault == "refused":
        prepare = VirtualCheckpoint.prepare

        def refuse(*_: Any, **__: Any) -> Any:
            raise RequestError("request.unsatisfiable", "this rank's plan is refused")

        VirtualCheckpoint.prepare = refuse
        return lambda: setattr(VirtualCheckpoint, "prepare", prepare)
    make, read, armed = loading.StubDirectory.__init__, LocalStore.read_into, [False]

    def arm(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        armed[0] = True

    def fail(self: Any, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        if armed[0]:
            armed[0] = False
            _FAULTS[fault](info)
        read(self, info, offset, buffer)

    loading.StubDirectory.__init__ = arm
    LocalStore.read_into = fail

    def undo() -> None:
        loading.StubDirectory.__init__ = make
        LocalStore.read_into = read

    return undo


def load(case: dict[str, Any], source: str, fault: str, out: str) -> dict[str, Any]:
    """Loads directly while the store of one rank fails, then once more, and dumps ``out/resumed.*``.

    Every rank leaves ``out/RANK.json`` with the ``code`` of the error of its first call, and the seconds it took.
    """
    rank, world = start_world()
    engine = build_engine(Case(**case), world, seed=RESUME_SEED, load_universal=False)
    undo = _inject(fault) if rank == FAULTY else lambda: None
    begun = time.monotonic()
    code = None
    try:
        reshard.deepspeed.load_checkpoint(engine, source)
    except ReshardError as error:
        code = error.code
    finally:
        undo()
    seconds = time.monotonic() - begun
    Path(out, f"{rank}.json").write_text(json.dumps({"code": code, "seconds": seconds}))
    if fault in ("killed", "truncated"):
        return {}
    reshard.deepspeed.load_checkpoint(engine, source)
    dump_states(engine, Path(out), "resumed", {})
    return {}


def refused(case: dict[str, Any], source: str) -> dict[str, dict[str, str | None]]:
    """Loads directly into engines for which there are no native files; code and fix of each refusal, by kind.

    ZenFlow and SuperOffload need a compiler and CUDA: a real engine passes for one of them by what it says of itself.
    """
    _, world = start_world()
    universal, zenflow, superoffload = (
        build_engine(Case(**case), world, seed=RESUME_SEED, load_universal=n == 0) for n in range(3)
    )
    zenflow.zenflow = True
    kind = type(superoffload.optimizer)
    superoffload.optimizer.__class__ = type("SuperOffloadOptimizer_Stage3", (kind,), {})
    found: dict[str, dict[str, str | None]] = {}
    for name, engine in (("universal", universal), ("zenflow", zenflow), ("superoffload", superoffload)):
        try:
            reshard.deepspeed.load_checkpoint(engine, source)
        except RequestError as error:
            found[name] = {"code": error.code, "fix": error.fix}
    return found


def refused_sizes(source: str) -> dict[str, str | None]:
    """Loads directly into a model whose two mixtures have their experts over one and over two ranks; the refusal."""
    start_world()
    sizes = iter((1, 2))
    model = MixtureLM(lambda: MoE(WIDTH, Expert(), EXPERTS, ep_size=next(sizes), k=1, drop_tokens=False, use_rts=False))
    params = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine = initialized(model, params, training_config(1, "fp32", EXPERT_ROWS, 2, rates=None))
    try:
        reshard.deepspeed.load_checkpoint(engine, source)
    except RequestError as error:
        return {"code": error.code, "message": error.message, "fix": error.fix}
    return {}
