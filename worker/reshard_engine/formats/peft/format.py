"""The format of PEFT's LoRA adapters. They are written, merged into weights, and read only from a training run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from reshard.choices import TargetFormat
from reshard.errors import RequestError, ReshardError, counted, listed, printable
from reshard.models.jobs import ConvertRequest, PossibleTarget
from reshard.options import Options, PeftOptions
from reshard_engine.checkpoint import OF_TRAINING, Checkpoint, Question
from reshard_engine.containers.safetensors import safetensors_template
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats import carried
from reshard_engine.formats.format import Completion, Discovery, DryRun, Format, Presentation, Writer
from reshard_engine.formats.model_card import with_card
from reshard_engine.formats.model_weights import Weight, check_written, unloadable, weights_of
from reshard_engine.formats.peft.adapter_config import CONFIG, adapter_config, adapter_files, assumptions
from reshard_engine.formats.peft.adapters import merged
from reshard_engine.formats.peft.names import (
    TOKENS,
    WRAPPED,
    AdapterPart,
    adapter_names,
    adapter_part,
    adapter_parts,
    chosen_adapter,
    lacks_base,
    refuse_broken_factors,
    refuse_other_methods,
)
from reshard_engine.formats.weight_files import parse_safetensors
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import read_bytes
from reshard_engine.tensors.layout import KnownFiles, TargetFile, TargetLayout, literal_template

_ANY_ALPHA = 1.0
_MERGED_INTO = (TargetFormat.SAFETENSORS, TargetFormat.TORCH)


class _Discovery(Discovery):
    """The directories and files that are checkpoints of this format."""

    files = KnownFiles(needed=(CONFIG,))


class _Completion(Completion):
    """The checkpoint that a request means, in the terms of this format."""

    takes_model_files = True

    def base_model(self, request: ConvertRequest) -> str | None:
        """The directory of `--base`."""
        return request.options.peft.base

    def completes(self, request: ConvertRequest) -> bool:
        """True if the request merges an adapter, which needs the base model's weights."""
        return request.options.peft.merge_adapter

    def indifferent(self, checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Question, ...]:
        """All but the model. The optimizer tells frozen parameters from others, if those are to be left out."""
        return (Question.SCHEDULER, Question.GROUPS, Question.MEMBERS) if request.exclude_frozen else OF_TRAINING

    def completed(self, checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
        """The checkpoint with its adapter's configuration, or with the adapter merged."""
        merges = self.completes(request)
        if request.to not in Peft.targets and not merges:
            return checkpoint
        checkpoint = replace(checkpoint, model_files=adapter_files(checkpoint, request))
        if not merges:
            return checkpoint
        return replace(merged(checkpoint, request, base), model_files={})


class _Presentation(Presentation):
    """The answers for people about checkpoints of this format."""

    def left_out(self, checkpoint: Checkpoint) -> str | None:
        """A note if the base model's weights are missing, because the run was saved without frozen parameters.

        Source: transformers 5.23.0 `integrations/deepspeed.py` and `trainer.py` (Trainer saves PEFT models so).
        """
        if not lacks_base(checkpoint):
            return None
        return "the base model's weights are not in the checkpoint: it was saved without its frozen parameters"

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """The export of an adapter. Runs without LoRA get no entry."""
        names = adapter_names(adapter_parts(p.fqn for p in tried.checkpoint.parameters))
        if not names:
            return []
        # Several adapters are exported one at a time.
        chosen: dict[str, Any] = {"adapter": names[0]} if len(names) > 1 else {}
        flags = f" --adapter {names[0]}" if chosen else ""
        refusal = _refusal(tried, TargetFormat.PEFT, chosen)
        needs = ""
        if refusal is not None:
            scaled = {**chosen, "lora_alpha": _ANY_ALPHA}
            if _refusal(tried, TargetFormat.PEFT, scaled) is not None:
                return [tried.impossible("peft", refusal)]
            chosen, flags, needs = scaled, f"{flags} --model-files DIR", f"; {refusal.message}: {refusal.fix}"
        return [tried.possible("peft", f"{listed(names)}; {_merged(tried, chosen)}{needs}", f"--to peft{flags}")]


class Peft(Format):
    """`adapter_model.safetensors` and `adapter_config.json`."""

    name = "peft"
    discovery = _Discovery()
    completion = _Completion()
    presentation = _Presentation()
    targets = (TargetFormat.PEFT,)
    model_only = True

    def writer(self, target: str) -> Writer:
        """The writer of adapters."""
        return PeftWriter()

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse options of adapters in a request that neither writes nor merges one."""
        options = request.options.peft
        if options.merge_adapter and request.to not in _MERGED_INTO:
            raise RequestError(
                "request.invalid", "an adapter is merged into consolidated weights", fix="--to safetensors"
            )
        adapts = request.to in self.targets or options.merge_adapter
        if not adapts and (options.adapter is not None or options.lora_alpha is not None or options.rslora):
            raise RequestError(
                "request.invalid",
                "--adapter, --lora-alpha and --rslora are for adapters",
                fix="--to peft, or --merge-adapter",
            )
        if options.rslora and options.lora_alpha is None:
            raise RequestError(
                "request.invalid",
                f"--rslora works only with --lora-alpha: {CONFIG} has `use_rslora` itself",
                fix="leave --rslora out, or give --lora-alpha N",
            )
        if options.base is not None and not options.merge_adapter:
            raise RequestError(
                "request.invalid",
                "--base works only with --merge-adapter: it names the weights to merge into",
                fix="leave it out",
            )
        if request.exclude_frozen and options.merge_adapter:
            raise RequestError(
                "request.invalid",
                "--exclude-frozen and --merge-adapter: a merged model is whole",
                fix="leave out one",
            )

    def check_names(self, place: Location, checkpoint: Checkpoint, request: ConvertRequest) -> None:
        """Refuse an adapter that PEFT would load in part: one of two factors, or a module that no target names.

        Source: peft 0.21.2 `tuners/tuners_utils.py` (`check_target_module_exists`: a module's whole name, or its end
        after a dot, is in `target_modules`); expressions and layers are left to PEFT.
        """
        listing = place.store.list_directory(place.path).by_name
        shapes = {
            t.name: t.shape for t in parse_safetensors(SourceFile(place.store, WEIGHTS, (listing[WEIGHTS],))).tensors
        }
        check_written(shapes, checkpoint, request)
        factors = {(m["module"], m["kind"]) for name in shapes if (m := _FACTOR.fullmatch(name)) is not None}
        if single := [module for module, kind in factors if (module, _PARTNER[kind]) not in factors]:
            raise unloadable(f"one of two factors would be missing in the target: {listed(sorted(single))}")
        config: dict[str, Any] = json.loads(read_bytes(place.store, listing[CONFIG]))
        wanted: Any = config.get("target_modules")
        if not isinstance(wanted, list) or config.get("target_parameters"):
            return
        ends = tuple(f".{name}" for name in cast("list[object]", wanted))
        modules = {module.removeprefix(WRAPPED) for module, _ in factors}
        if lost := sorted(module for module in modules if not f".{module}".endswith(ends)):
            raise RequestError(
                "request.unsatisfiable",
                f"`target_modules` of {CONFIG} name {counted(len(modules) - len(lost), 'adapted module')} of "
                f"{len(modules)}, and PEFT loads no others: {listed(lost)}",
                fix=f"name the directory with the run's own {CONFIG}: --model-files DIR",
            )


def _refusal(tried: DryRun, to: str, options: dict[str, Any]) -> ReshardError | None:
    return tried.refusal(to, options=Options(peft=PeftOptions.model_validate(options)))


def _merged(tried: DryRun, chosen: dict[str, Any]) -> str:
    """A sentence on how to merge the adapter into weights, or on why it cannot be merged."""
    from reshard_engine.formats.peft.names import lacks_base

    if lacks_base(tried.checkpoint):
        text = "merged: safetensors --merge-adapter --base DIR"
        return f"{text} (the base model's weights are not in the checkpoint)"
    refusal = _refusal(tried, TargetFormat.SAFETENSORS, {**chosen, "merge_adapter": True})
    return "merged: safetensors --merge-adapter" if refusal is None else f"not merged: {refusal.message}"


# LoRA adapters as PEFT saves them: `adapter_model.safetensors` and `adapter_config.json`.
#
# Source: peft 0.21.2 `utils/save_and_load.py` (`get_peft_model_state_dict`: which entries, names without the
# adapter's), `tuners/lora/model.py` (DoRA's magnitudes without `.weight`), `utils/other.py` (`ModulesToSaveWrapper`),
# `tuners/tuners_utils.py` (`_get_learnable_bias_state_dict`).

WEIGHTS = "adapter_model.safetensors"
_FACTOR = re.compile(r"(?P<module>.+)\.(?P<kind>lora_(?:embedding_)?[AB])(?:\.weight)?")
_PARTNER = {f"lora_{of}{one}": f"lora_{of}{other}" for of in ("", "embedding_") for one, other in ("AB", "BA")}
_EMBEDDINGS = ("embed_tokens", "lm_head")
"""`EMBEDDING_LAYER_NAMES` of PEFT's `utils/constants.py`."""


class PeftWriter:
    """Lays out one adapter."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """The adapter's weights and its configuration.

        Raises:
            RequestError: `request.unsatisfiable` if there is no LoRA adapter, or several and none was named, or trained
                parameters that are not part of it, or an unknown scale.
        """
        if request.exclude_frozen:
            raise RequestError(
                "request.invalid", "an adapter is one file of all that it has", fix="leave --exclude-frozen out"
            )
        held = [p.fqn for p in checkpoint.parameters]
        buffers = [b.fqn for b in checkpoint.buffers]
        parts = adapter_parts([*held, *buffers])
        adapter = chosen_adapter(held, parts, request.options.peft.adapter)
        mine = [p for p in parts if p.adapter == adapter]
        refuse_other_methods([*held, *buffers])
        refuse_broken_factors(mine, checkpoint.shapes())
        text, config = _config(checkpoint, request, mine)
        names = {p.fqn: p.saved_as for p in mine} | _biases(checkpoint, mine, str(config.get("bias", "none")))
        embeddings, absent = _embeddings(checkpoint, mine)
        _refuse_rest(checkpoint, {p.fqn for p in parts} | set(names))
        wanted = [(name, fqn) for fqn, name in names.items()] + embeddings + _tied(checkpoint, adapter)
        by_name = {w.fqn: w for w in weights_of(checkpoint, request)}
        weights = sorted((replace(by_name[fqn], fqn=name) for name, fqn in wanted), key=lambda w: w.fqn)
        files = (_weights_file(weights), TargetFile(CONFIG, literal_template(text), (), commit=True))
        rest = sorted(by_name.keys() - {fqn for _, fqn in wanted})
        left = (
            *carried.training_state(checkpoint),
            *carried.extra_states(checkpoint),
            *carried.named((f"module.{fqn}" for fqn in rest), "no part of the adapter"),
        )
        layout = TargetLayout(files, None, warnings=(*absent, *assumptions(request)), not_carried=left)
        return with_card(layout, checkpoint, request, weights=weights)


def _weights_file(weights: Sequence[Weight]) -> TargetFile:
    template = safetensors_template([(w.fqn, w.dtype, w.shape, w.numel) for w in weights], {"format": "pt"})
    return TargetFile(WEIGHTS, template, tuple(w.tensor for w in weights))


def _config(
    checkpoint: Checkpoint, request: ConvertRequest, mine: Sequence[AdapterPart]
) -> tuple[bytes, Mapping[str, Any]]:
    """The configuration of the run, or one made from the tensors and `--lora-alpha`."""
    found = adapter_config(checkpoint, request)
    if found is not None:
        return found.data, found.facts
    config = _made(checkpoint, mine, request.options.peft)
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n", config


def _made(checkpoint: Checkpoint, mine: Sequence[AdapterPart], options: PeftOptions) -> dict[str, Any]:
    alpha = options.lora_alpha or 0.0
    shapes = checkpoint.shapes()
    # The rank is the first length of A, of embeddings too.
    ranks = {p.module: shapes[p.fqn][0] for p in mine if p.kind in ("lora_A", "lora_embedding_A")}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    # Whole names: PEFT takes every module whose name ends so.
    saved = sorted({p.module.removeprefix(WRAPPED) for p in mine if p.kind == "modules_to_save"})
    if any(p.kind == TOKENS for p in mine):
        raise RequestError(
            "request.unsatisfiable",
            "the run trained some tokens of an embedding, and it is unknown which",
            fix=f"--model-files DIR with the run's {CONFIG} (`trainable_token_indices`)",
        )
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": usual,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "lora_bias": any(p.kind == "lora_B" and p.tail == ".bias" for p in mine),
        "use_rslora": options.rslora,
        "use_dora": any(p.kind == "lora_magnitude_vector" for p in mine),
        "rank_pattern": {m.removeprefix(WRAPPED): r for m, r in sorted(ranks.items()) if r != usual},
        # Whole names: the last parts alone could mean modules that were not adapted.
        "target_modules": sorted(m.removeprefix(WRAPPED) for m in ranks),
        "modules_to_save": saved or None,
    }


def _embeddings(checkpoint: Checkpoint, mine: Sequence[AdapterPart]) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Adapted embeddings and heads. PEFT saves their base weights, too, which may contain added tokens.

    Returns:
        Names to write, each with the stored one; and warnings for those that are not stored.
    """
    if any(p.kind == TOKENS for p in mine):
        return [], ()
    stored = {p.fqn for p in checkpoint.parameters}
    modules = {p.module for p in mine if p.of_lora and p.module.rpartition(".")[2] in _EMBEDDINGS}
    wanted = {f"{m}.base_layer.weight": m for m in sorted(modules)}
    found = [(n, fqn) for n in wanted if (fqn := checkpoint.shared.get(n, n)) in stored]
    absent = [m for n, m in wanted.items() if checkpoint.shared.get(n, n) not in stored]
    if not absent:
        return found, ()
    what = f"{listed(absent)} are adapted and were not saved themselves (exclude_frozen_parameters)"
    return found, (f"{what}: the adapter fits the base model only as it was before training, added tokens included",)


def _tied(checkpoint: Checkpoint, adapter: str) -> list[tuple[str, str]]:
    """Modules that were saved whole and tied to another one: PEFT writes both."""
    found: list[tuple[str, str]] = []
    for alias, owner in checkpoint.shared.items():
        part = adapter_part(alias)
        if part is not None and part.kind == "modules_to_save" and part.adapter == adapter:
            found.append((part.saved_as, owner))
    return found


def _biases(checkpoint: Checkpoint, mine: Sequence[AdapterPart], which: str) -> dict[str, str]:
    """Biases that were trained beside the adapter, under their own names."""
    names = [p.fqn for p in checkpoint.parameters]
    if which == "all":
        return {n: n for n in names if (n == "bias" or n.endswith(".bias")) and adapter_part(n) is None}
    if which == "lora_only":
        modules = {p.module for p in mine if p.kind != "modules_to_save"}
        held = {f"{m}{inner}.bias" for m in modules for inner in ("", ".base_layer")}
        return {n: n for n in names if n in held}
    return {}


def _refuse_rest(checkpoint: Checkpoint, taken: set[str]) -> None:
    """Refuse trained parameters that the adapter does not contain."""
    rest = [p.fqn for p in checkpoint.trained if p.fqn not in taken]
    if rest:
        raise RequestError(
            "request.unsatisfiable",
            f"{len(rest)} trained parameters are not part of a LoRA adapter: {listed(rest)}",
            fix="--to safetensors writes them all; biases go along if adapter_config.json says so (`bias`)",
            details={"parameters": [printable(n) for n in rest[:64]]},
        )
