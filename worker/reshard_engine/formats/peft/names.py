"""PEFT's names for the parameters of a LoRA run, and the stored tensors and factors that they mean.

Source: peft 0.21.2 `tuners/lora/layer.py` (`adapter_layer_names`), `utils/other.py` (`ModulesToSaveWrapper`,
`TrainableTokensWrapper`), `tuners/lora/model.py` (DoRA's magnitudes are saved without `.weight`), and
`adapter_layer_names` of the layers of every other method below `tuners`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.errors import RequestError, SourceError, listed, printable
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.model_weights import name_without_adapter

WRAPPED = "base_model.model."
"""The prefix that PEFT adds to every name of the model."""
_LORA = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.(?P<adapter>[^.]+)(?P<tail>\.weight|\.bias)?"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<tail>.+)")
TOKENS = "trainable_tokens_delta"
_TOKENS = re.compile(rf"(?P<module>.+)\.token_adapter\.{TOKENS}\.(?P<adapter>[^.]+)")
_KEPT = re.compile(r"\.(?:token_adapter\.base_layer|base_layer|original_module)(?=\.)")
"""Attributes in which a wrapper keeps the wrapped module."""
SHOWN_NAMES = 8
_FACTORS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})
_OTHERS = {
    "AdaLoRA": ("lora_E", "ranknum"),
    "AdaMSS": ("adamss_A", "adamss_B"),
    "Adaption Prompt": ("adaption_prompt", "adaption_gate"),
    "BEFT": ("beft_bias",),
    "BOFT": ("boft_R", "boft_s"),
    "C3A": ("c3a_kernel",),
    "DEFT": ("deft_P", "deft_R"),
    "DeLoRA": ("delora_A", "delora_B", "delora_lambda"),
    "FourierFT": ("fourierft_spectrum",),
    "FRoD": ("frod_lambda_l", "frod_lambda_s_values"),
    "GLoRA": ("glora_A", "glora_B", "glora_C", "glora_D", "glora_E"),
    "GraLoRA": ("gralora_A", "gralora_B", "gralora_A_general", "gralora_B_general"),
    "HiRA": ("hira_A", "hira_B", "hira_embedding_A", "hira_embedding_B"),
    "HRA": ("hra_u",),
    "IA3": ("ia3_l",),
    "KaSA": ("lora_diag",),
    "Lily": ("lily_A", "lily_B", "lily_router"),
    "LN tuning": ("ln_tuning_layers",),
    "LoHa": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    "LoKr": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    "MiSS": ("miss_block",),
    "OFT": ("oft_R", "oft_embedding_R"),
    "OSF": ("osf_svd_params", "osf_U_low", "osf_S_low", "osf_V_low"),
    "PEANuT": ("peanut_A", "peanut_B", "peanut_encoders", "peanut_decoders"),
    "Poly": ("poly_lora_A", "poly_lora_B", "poly_router"),
    "prompt learning": ("prompt_encoder",),
    "PSOFT": ("psoft_R",),
    "PVeRA": ("pvera_lambda_b", "pvera_lambda_d"),
    "RandLoRA": ("randlora_lambda", "randlora_gamma"),
    "RoAd": ("road_theta", "road_alpha"),
    "Shadow": ("shadow_down", "shadow_up", "shadow_update_transform", "shadow_update_gate"),
    "SHiRA": ("shira_weight",),
    "SuperTuning": ("supertuning_values", "supertuning_lora_A", "supertuning_lora_B"),
    "TinyLoRA": ("tinylora_v",),
    "trainable tokens": ("trainable_tokens_delta", "trainable_tokens_original", "token_adapter"),
    "UniLoRA": ("unilora_theta_d",),
    "VB-LoRA": ("vblora_logits_A", "vblora_logits_B", "vblora_vector_bank"),
    "VeRA": ("vera_lambda_b", "vera_lambda_d", "vera_A", "vera_B"),
    "WaveFT": ("waveft_spectrum",),
    "X-LoRA": ("internal_xlora_classifier",),
}
_MARKS = {mark: method for method, marks in _OTHERS.items() for mark in marks}
_OF_PEFT = frozenset({"base_layer", "original_module", "modules_to_save"})


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """A parameter that belongs to an adapter."""

    fqn: str
    adapter: str
    saved_as: str
    """Its name in `adapter_model.safetensors`."""
    module: str
    """The module that is adapted, or saved whole."""
    kind: str
    """`lora_A`, ..., `trainable_tokens_delta`, or `modules_to_save`."""
    tail: str
    """`.weight`, `.bias` or nothing; of a saved module the name within it."""

    @property
    def of_lora(self) -> bool:
        """True if it is one of LoRA's factors, or what goes with them."""
        return self.kind.startswith("lora_")


def adapter_part(fqn: str) -> AdapterPart | None:
    """The part of an adapter that a parameter is; None if it belongs to no adapter."""
    if (found := _SAVED.fullmatch(fqn)) is not None:
        kind, tail = "modules_to_save", found["tail"]
    elif (found := _TOKENS.fullmatch(fqn)) is not None:
        kind, tail = TOKENS, ""
    elif (found := _LORA.fullmatch(fqn)) is not None:
        kind, tail = found["kind"], found["tail"] or ""
    else:
        return None
    adapter = found["adapter"]
    return AdapterPart(fqn, adapter, name_without_adapter(fqn, adapter), found["module"], kind, tail)


def adapter_parts(names: Iterable[str]) -> list[AdapterPart]:
    """The adapter parts among some parameters."""
    return [p for p in map(adapter_part, names) if p is not None]


def adapter_names(parts: Iterable[AdapterPart]) -> list[str]:
    """The names of the LoRA adapters of these parts, sorted."""
    return sorted({p.adapter for p in parts if p.of_lora})


def plain_name(fqn: str) -> str:
    """The name of a parameter in the model without PEFT."""
    return _KEPT.sub("", fqn.removeprefix(WRAPPED))


def own_name(fqn: str) -> str:
    """The name of a parameter in the model without PEFT, also for a module that was saved whole."""
    part = adapter_part(fqn)
    return plain_name(fqn if part is None else part.saved_as)


def refuse_other_methods(names: Iterable[str]) -> None:
    """Refuse parameters that PEFT added and that are not part of a LoRA adapter.

    Every attribute of a wrapper except the wrapped module belongs to PEFT, also if its name is unknown.

    Raises:
        RequestError: `request.unsatisfiable` with their method, where the names say it.
    """
    held = list(names)
    wrappers = {head for n in held for head in _wrappers_of(n)}
    rest = [n for n in held if adapter_part(n) is None]
    marked = {n: mark for n in rest if (mark := _mark_of(n, wrappers)) is not None}
    if not marked:
        return
    methods = sorted({_MARKS.get(mark, f"`{mark}`") for mark in marked.values()})
    raise RequestError(
        "request.unsatisfiable",
        f"{len(marked)} parameters are of another PEFT method than LoRA ({', '.join(map(printable, methods))}): "
        f"{listed(list(marked))}",
        fix="merge with PEFT itself (merge_and_unload); --to safetensors without --merge-adapter writes all as it is",
    )


def refuse_broken_factors(parts: Iterable[AdapterPart], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse factors that are not matrices, and single factors, whose other one was frozen and not saved.

    Raises:
        RequestError: `request.unsatisfiable`.
        SourceError: `checkpoint.malformed`.
    """
    held: dict[str, set[str]] = {}
    for part in parts:
        if not part.of_lora:
            continue
        held.setdefault(part.module, set()).add(part.kind)
        if part.kind in _FACTORS and part.tail != ".bias" and len(shapes[part.fqn]) < 2:
            raise SourceError(
                "checkpoint.malformed",
                f"{printable(part.fqn)} has the shape {shapes[part.fqn]}: a factor of a LoRA adapter is a matrix",
                fix="write all weights as they are: --to safetensors",
            )
    whole = ({"lora_A", "lora_B"}, {"lora_embedding_A", "lora_embedding_B"})
    halves = [m for m, kinds in held.items() if not any(pair <= kinds for pair in whole)]
    if halves:
        raise RequestError(
            "request.unsatisfiable",
            f"{len(halves)} of {len(held)} adapted modules have one of their two factors only: {listed(halves)}",
            fix="save the checkpoint with its frozen parameters: the other factor was frozen (init_lora_weights: mica)",
        )


def _wrappers_of(fqn: str) -> list[str]:
    return [fqn[: m.start()] for m in re.finditer(r"\.(?:base_layer|original_module)(?=\.)", fqn)]


def _mark_of(fqn: str, wrappers: set[str]) -> str | None:
    """The part of a name that shows that PEFT added it."""
    steps = plain_name(fqn).split(".")
    if (known := next((s for s in steps if s in _MARKS or s in _OF_PEFT or s.startswith("lora_")), None)) is not None:
        return known
    at = fqn.find(".")
    while at >= 0:
        step = fqn[at + 1 :].partition(".")[0]
        if fqn[:at] in wrappers and step not in ("base_layer", "original_module"):
            return step
        at = fqn.find(".", at + 1)
    return None


def chosen_adapter(names: Sequence[str], parts: Iterable[AdapterPart], wanted: str | None) -> str:
    """The name of the requested adapter.

    Raises:
        RequestError: `request.unsatisfiable` if there is none, or several and none is named.
    """
    adapters = adapter_names(parts)
    shown = ", ".join(printable(a) for a in adapters[:SHOWN_NAMES])
    if not adapters:
        refuse_other_methods(names)
        raise RequestError(
            "request.unsatisfiable",
            f"there is no LoRA adapter among {len(names)} parameters: {listed(names, SHOWN_NAMES)}",
            fix="--to safetensors writes all weights; other PEFT methods than LoRA are not exported",
        )
    if wanted is not None and wanted not in adapters:
        raise RequestError("request.unsatisfiable", f"there is no adapter {printable(wanted)}", fix=f"one of: {shown}")
    if wanted is None and len(adapters) > 1:
        several = f"there are {len(adapters)} adapters: {shown}"
        raise RequestError("request.unsatisfiable", several, fix="--adapter NAME")
    return wanted or adapters[0]


# Maps each name of the model without PEFT to a stored tensor of a PEFT run, and to the factors that adapt it.
#
# A *place* is a tensor of the model that was trained, under its owner's name: tied names have one place. A name of the
# plain model means the place of its module that was saved whole, if there is one, and else that of the base model.
#
# Source: peft 0.21.2 `utils/other.py` (`ModulesToSaveWrapper`, `TrainableTokensWrapper`), deepspeed 0.19.8
# `runtime/engine.py` (`_get_shared_params`: tied names are listed also where frozen parameters are not saved).


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
