"""Loss scaling: the object that stages 1 to 3 keep, and the plain entries that stage 0 keeps.

Source: deepspeed 0.19.8 `runtime/fp16/loss_scaler.py` (attributes), `runtime/fp16/fused_optimizer.py` (`state_dict`),
`runtime/config.py` (`fp16`: scale 2**16, window 1000, hysteresis 2, smallest scale 1),
`runtime/zero/stage_1_and_2.py` and `stage3.py` (`load_state_dict`, `_rigid_load_state_dict`: required entries).
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.errors import RequestError
from reshard_engine.formats.deepspeed.config import RunConfig
from reshard_engine.formats.deepspeed.writer.native.target import Target
from reshard_engine.pickles.nodes import Global, Node, PObject, PTuple, is_mapping, mapping_items, mapping_of

_MODULE = "deepspeed.runtime.fp16.loss_scaler"
_PLAIN_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def _object(name: str, state: dict[str | int, Node]) -> PObject:
    return PObject("newobj", Global(_MODULE, name), PTuple(), state=mapping_of(state), has_state=True)


def _facts(extras: Mapping[str, Node], config: RunConfig) -> dict[str | int, Node]:
    """The dynamic scaler's attributes: the fp16 source's own, in any of DeepSpeed's forms, or those of its config."""
    fp16 = config.fp16
    found: dict[str | int, Node] = {
        "cur_scale": 2.0 ** int(fp16.get("initial_scale_power", 16)),
        "dynamic": True,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": fp16.get("loss_scale_window", 1000),
        "min_scale": fp16.get("min_loss_scale", 1),
        "delayed_shift": fp16.get("hysteresis", 2),
        "cur_hysteresis": fp16.get("hysteresis", 2),
        "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dtype": Global("torch", "float16"),
    }
    scaler = extras.get("loss_scaler")
    if isinstance(scaler, PObject) and is_mapping(scaler.state):
        found |= mapping_items(scaler.state, what="loss_scaler")
    return found | {k: extras[k] for k in _PLAIN_KEYS if k in extras}


def scaler_entries(target: Target) -> dict[str | int, Node]:
    """`loss_scaler`, `dynamic_loss_scale` and `overflow`, as stages 1 to 3 keep them, for this target.

    Nothing for an fp16 target whose source says no scale: stages 1 and 2 then keep the scaler of the run's config.

    Raises:
        RequestError: `request.unsatisfiable` at stage 3, whose loader takes the scaler of the file in any case.
    """
    extras, config = target.extras, target.source
    overflow = extras.get("overflow", False)
    if target.dtype.name != "float16":
        # Only fp16 scales its loss. An engine with another dtype would take over and use any scale that it finds.
        plain = _object("LossScaler", {"cur_scale": 1.0, "dynamic": False})
        return {"loss_scaler": plain, "dynamic_loss_scale": False, "overflow": overflow}
    if not target.scale_said:
        _refuse_unsaid(target)
        return {}
    dynamic = bool(extras.get("dynamic_loss_scale", not config.fp16.get("loss_scale")))
    scaler = extras.get("loss_scaler")
    if isinstance(scaler, PObject) and isinstance(scaler.cls, Global) and dynamic == (scaler.cls.name != "LossScaler"):
        return {"loss_scaler": scaler, "dynamic_loss_scale": dynamic, "overflow": overflow}
    if not dynamic:
        scale = extras.get("cur_scale", config.fp16.get("loss_scale", 1.0))
        static = _object("LossScaler", {"cur_scale": scale, "dynamic": False, "dtype": Global("torch", "float16")})
        return {"loss_scaler": static, "dynamic_loss_scale": False, "overflow": overflow}
    dynamic_scaler = _object("DynamicLossScaler", _facts(extras, config))
    return {"loss_scaler": dynamic_scaler, "dynamic_loss_scale": True, "overflow": overflow}


def plain_entries(target: Target) -> dict[str | int, Node]:
    """The entries of the loss scale that 16-bit optimizers of stage 0 keep; unfused ones keep them in bf16 too.

    Raises:
        RequestError: `request.unsatisfiable` for an fp16 target whose source says no scale: its loader requires one.
    """
    extras, config = target.extras, target.source
    if target.dtype.name != "float16":
        return {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 0}
    if not target.scale_said:
        _refuse_unsaid(target)
    dynamic = bool(extras.get("dynamic_loss_scale", not config.fp16.get("loss_scale")))
    facts = _facts(extras, config)
    kept = _PLAIN_KEYS if dynamic else _PLAIN_KEYS[:2]
    return {"dynamic_loss_scale": dynamic, **{k: facts[k] for k in kept}}


def _refuse_unsaid(target: Target) -> None:
    if target.stage in (1, 2):
        return
    raise RequestError(
        "request.unsatisfiable",
        f"the source's run was not in fp16, so that it says no loss scale, and DeepSpeed's loader of stage "
        f"{target.stage} takes the scale of the file in place of the run's own",
        fix="--zero-stage 1, or 2: their loaders keep the scale that the run's config gives; or --dtype bf16",
    )


def scaler_attributes_left(target: Target) -> list[str]:
    """Attributes of the source's loss scaler that are lost, because the target's scaler has no such attributes."""
    scaler = target.extras.get("loss_scaler")
    if not isinstance(scaler, PObject) or not is_mapping(scaler.state):
        return []
    if target.stage > 0 and not target.bf16_optimizer and scaler_entries(target).get("loss_scaler") is scaler:
        return []
    known = _facts({}, target.source)
    return [f"loss_scaler.{k}" for k in mapping_items(scaler.state, what="loss_scaler") if k not in known]


def scale_warnings(target: Target) -> list[str]:
    """The warning that the loss scale starts anew, for a source whose run was not in fp16."""
    if target.dtype.name != "float16" or target.scale_said:
        return []
    return ["the source says no loss scale: the run's config gives it, and the first steps may be skipped"]
