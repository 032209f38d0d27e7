"""Finds and reads `adapter_config.json`, the only file of a run with the scale of its LoRA adapter.

Source: peft 0.21.2 `config.py` (`PeftConfigMixin`), `tuners/lora/config.py` (`LoraConfig`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from reshard.errors import RequestError, SourceError, printable
from reshard.models.jobs import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.storage.locations import Location, open_location, refuse_hub_link_elsewhere
from reshard_engine.storage.protocol import parent_and_name, read_bytes
from reshard_engine.storage.urls import is_allowed

CONFIG = "adapter_config.json"
_OWN_BASE = frozenset({True, False, "gaussian", "eva", "orthogonal", "mica"})
"""Values of `init_lora_weights` that do not change the base weights. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA
subtract the first factors from them."""
_CHANGE_BASE = "PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA"
_UNDERSTOOD = frozenset(
    {
        # Keys that name the run, or that chose its modules and ranks: the tensors show these.
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("task_type", "runtime_config", "r", "rank_pattern", "target_modules", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "modules_to_save", "ensure_weight_tying", "bias", "lora_dropout"),
        # Keys for the initial factors: the checkpoint has the present factors and base weights.
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        # Keys that are used only with another option.
        *("megatron_core", "qalora_group_size"),
        # Keys that decide a merge.
        *("lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"),
        "trainable_token_indices",
    }
)
"""Keys of peft 0.21.2's `LoraConfig` under which a merge is what `reshard_engine.formats.peft.adapters` computes."""

_MOST_RANK = (1 << 31) - 1
"""A rank is the length of a tensor's dimension."""
_MOST_NUMBER = 3.4e38
"""Numbers become factors of fp32."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A parsed configuration, and its bytes."""

    data: bytes
    facts: Mapping[str, Any]

    @property
    def changed_base(self) -> str | None:
        """The initialisation of the adapter, if it changed the base weights; else None."""
        begun = self.facts.get("init_lora_weights", True)
        if isinstance(begun, (bool, str)) and begun in _OWN_BASE:
            return None
        return printable(begun)


def adapter_config(checkpoint: Checkpoint, request: ConvertRequest) -> AdapterConfig | None:
    """The configuration beside the source or in `--model-files`; None if the request gives the scale instead.

    Raises:
        RequestError: `request.unsatisfiable` if the scale is unknown, or the adapter is of another method than LoRA.
        SourceError: `checkpoint.malformed` if the configuration describes no adapter.
    """
    data = checkpoint.model_files.get(CONFIG)
    if data is None:
        if request.options.peft.lora_alpha is None:
            raise RequestError(
                "request.unsatisfiable",
                f"the scale of the adapter is unknown: there is no {CONFIG}, and the checkpoint does not have it",
                fix=f"--model-files DIR (with {CONFIG}, as PEFT's save_pretrained wrote it), or --lora-alpha N",
            )
        return None
    facts = _facts_in(data)
    kind = facts.get("peft_type")
    if isinstance(kind, str) and kind != "LORA":
        raise RequestError(
            "request.unsatisfiable",
            f"{CONFIG} is of the PEFT method {printable(kind)}: only LoRA is exported and merged",
            fix="merge with PEFT itself (merge_and_unload); --to safetensors writes all weights as they are",
        )
    if kind != "LORA":
        raise _wrong("peft_type", kind, "LORA")
    _refuse_wrong_values(facts)
    return AdapterConfig(data, facts)


def assumptions(request: ConvertRequest) -> tuple[str, ...]:
    """What a result assumes of a run whose configuration the request replaces by `--lora-alpha`: empty if it does not.

    No tensor shows these facts (peft 0.21.2 `tuners/lora/layer.py`: `update_layer`, `scaling`).
    """
    peft = request.options.peft
    if peft.lora_alpha is None:
        return ()
    root = "sqrt(rank)" if peft.rslora else "rank"
    others = "" if peft.rslora else "a run with use_rslora needs --rslora; "
    text = (
        f"the scale of every module is assumed to be {peft.lora_alpha:g} / {root}: {others}a run with alpha_pattern, "
        f"or an init_lora_weights that changes base weights ({_CHANGE_BASE}), needs its {CONFIG}: --model-files DIR"
    )
    return (text,)


def _facts_in(data: bytes) -> dict[str, Any]:
    def no_number(name: str) -> float:
        raise ValueError(f"it holds {name}, which JSON has not")

    try:
        found: Any = json.loads(data, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise not_lora(f"it is not JSON ({printable(str(error), max_chars=100)})") from None
    if not isinstance(found, dict):
        raise not_lora(f"it holds no object but {printable(repr(found), max_chars=100)}")
    return cast("dict[str, Any]", found)


def _refuse_wrong_values(facts: Mapping[str, Any]) -> None:
    """Refuse values with which PEFT's `LoraConfig` makes no adapter. True is not a number, and 1 is not True.

    Raises:
        SourceError: `checkpoint.malformed` with the field and its value.
    """
    for field, patterns, is_right, meant in _CHECKS:
        if (value := facts.get(field)) is not None and not is_right(value):
            raise _wrong(field, value, meant)
        by_module: Any = (facts.get(patterns) if patterns else None) or {}
        if not isinstance(by_module, dict):
            raise _wrong(patterns, by_module, "an object")
        for module, value in cast("dict[str, Any]", by_module).items():
            if not is_right(value):
                raise _wrong(f"{patterns}.{module}", value, meant)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_RANK


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST_NUMBER


def _is_share(value: object) -> bool:
    return _is_number(value) and 0 <= cast("float", value) <= 1


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


_CHECKS: tuple[tuple[str, str, Callable[[object], bool], str], ...] = (
    ("r", "rank_pattern", _is_rank, f"a whole number from 1 to {_MOST_RANK}"),
    ("lora_alpha", "alpha_pattern", _is_number, f"a number of at most {_MOST_NUMBER:g}"),
    ("lora_dropout", "", _is_share, "a number from 0 to 1"),
    *((name, "", _is_switch, "true or false") for name in ("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias")),
)
"""Fields, each with the field of its exceptions by module, which of their values are right, and what those are."""


def _wrong(field: str, value: object, meant: str) -> SourceError:
    return not_lora(f"`{printable(field, max_chars=200)}` is {printable(repr(value), max_chars=100)}, and not {meant}")


def refuse_other_rules(config: AdapterConfig) -> None:
    """Refuse unknown options, and options whose adapters are merged by another rule.

    Raises:
        RequestError: `request.unsatisfiable` with the keys.
    """
    others = [k for k, v in sorted(config.facts.items()) if k not in _UNDERSTOOD and not _is_off(v)]
    if config.facts.get("bias", "none") not in ("none", "all", "lora_only"):
        others.append("bias")
    if others:
        raise RequestError(
            "request.unsatisfiable",
            f"{CONFIG} is of an adapter with {', '.join(map(printable, others[:8]))}: no rule merges it here",
            fix="--to peft, then PEFT's merge_and_unload",
            details={"keys": [printable(k) for k in others[:64]]},
        )


def _is_off(value: object) -> bool:
    return value is None or value is False or value in ({}, [])


def not_lora(why: str) -> SourceError:
    """The error for a configuration without a required value."""
    return SourceError(
        "checkpoint.malformed",
        f"{CONFIG} describes no LoRA adapter: {why}",
        fix=f"name the directory with the run's own {CONFIG}: --model-files DIR",
    )


# Finds the `adapter_config.json` of a run: in the named directory, beside the source, or one directory above.

_MAX_BYTES = 1 << 20


def adapter_files(checkpoint: Checkpoint, request: ConvertRequest) -> Mapping[str, bytes]:
    """`adapter_config.json` by its name; empty if the request gives the scale, or if no directory has the file.

    Raises:
        SourceError: `source.not_found` if the directory that the user names has none, `checkpoint.too_large`.
    """
    if request.options.peft.lora_alpha is not None:
        return {}
    # Trainers write the file into their own directory, above that of the tag.
    named = [] if request.model_files is None else [request.model_files]
    # A service may not read above its roots.
    above = [place for place in (parent_and_name(checkpoint.url)[0],) if is_allowed(place)]
    places = dict.fromkeys((*named, request.source.url, *above))
    return _first_config([open_location(url, request.source.profile) for url in places], required=bool(named))


def _first_config(locations: Sequence[Location], *, required: bool) -> Mapping[str, bytes]:
    """`adapter_config.json` of the first directory that has one; empty if none has.

    Raises:
        SourceError: `source.not_found` if it is required and missing, `checkpoint.too_large`.
    """
    for location in locations:
        for info in location.store.list_directory(location.path).files:
            if info.path.rpartition("/")[2] != CONFIG:
                continue
            refuse_hub_link_elsewhere(location, info.path)
            if info.size_bytes > _MAX_BYTES:
                raise SourceError("checkpoint.too_large", f"{CONFIG} has {info.size_bytes} bytes")
            return {CONFIG: read_bytes(location.store, info)}
    if required:
        raise SourceError(
            "source.not_found",
            f"{printable(locations[0].url)} has no {CONFIG}",
            fix="name the directory that PEFT's save_pretrained wrote, or give --lora-alpha instead",
        )
    return {}
