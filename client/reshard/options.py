"""The options that formats add to a conversion, nested in a request by the format's name.

The formats that reshard brings are fields of `Options`; `reshard.nested_options` adds those of other packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field

from reshard.choices import NameScheme, RngPolicy, WeightDecayGroups, ZeroStage
from reshard.wire_model import MOST_BYTES, RequestModel


class Place:
    """Marks an option that is a URL from which the engine reads: a service allows it only below its roots."""


class FormatOptions(RequestModel):
    """Base of the options of one format. Every option has a default, so that a request may leave a format out."""

    def places(self) -> dict[str, str]:
        """The values of options that are URLs to read from, by name."""
        marked = (n for n, f in type(self).model_fields.items() if any(isinstance(m, Place) for m in f.metadata))
        return {name: value for name in marked if (value := getattr(self, name)) is not None}

    def given(self) -> dict[str, Any]:
        """The options whose values are not the defaults, as JSON."""
        return self.model_dump(mode="json", exclude_defaults=True)


class NativeLayout(FormatOptions):
    """The layout of a native DeepSpeed target. An option that is None is as in the source, or DeepSpeed's default."""

    zero_stage: ZeroStage | None = None
    dp: int | None = Field(default=None, ge=1, le=1 << 20)
    """Data-parallel ranks; with sequence parallelism, the product of both. A native target needs this option."""
    tp: int = Field(default=1, ge=1, le=1 << 12)
    pp: int = Field(default=1, ge=1, le=1 << 12)
    ep: int = Field(default=1, ge=1, le=1 << 12)
    partition_method: str | None = Field(default=None, max_length=4096)
    """Division into pipeline stages: `uniform`, `parameters`, `type:REGEX`, or each stage's first layer: `0,3,6`."""
    pipeline_layers: int | None = Field(default=None, ge=1, le=4096)
    """Number of layers of the whole pipeline, including those without parameters; `uniform` needs it."""
    vocab_divisor: int | None = Field(default=None, ge=1, le=1 << 20)
    """Megatron's `make_vocab_size_divisible_by`: the vocabulary is padded to a multiple of this value times `tp`."""
    round_robin_gradients: bool | None = None
    parameter_alignment: bool | None = None
    sub_group_size: int | None = Field(default=None, ge=1, le=MOST_BYTES)
    """Stage 3: elements of one rank's partition after which a sub-group is closed."""
    rng: RngPolicy = RngPolicy.KEEP

    @property
    def world_size(self) -> int:
        """Number of processes of a run with this layout."""
        return (self.dp or 1) * self.tp * self.pp


class DeepSpeedOptions(NativeLayout):
    """Options of DeepSpeed's checkpoints: the layout to write, cut rules of the source, and names of parameters."""

    rules: str | None = Field(default=None, max_length=1 << 16)
    """Rules as YAML (docs/rules.md): how tensor parallelism cuts parameters, if the source does not say."""
    family: str | None = Field(default=None, max_length=64)
    """A built-in set of cut rules, such as `gpt-megatron`."""
    names: NameScheme | None = None
    """Naming scheme for the parameters of Megatron-DeepSpeed's GPT and Llama models; None keeps the source's names."""
    weight_decay_groups: WeightDecayGroups = WeightDecayGroups.STAGE

    @property
    def asks_for_layout(self) -> bool:
        """True if an option of the layout is not its default."""
        return not self.given().keys().isdisjoint(NativeLayout.model_fields)


class WeightsOptions(FormatOptions):
    """Options of consolidated weights."""

    max_shard_bytes: int | None = Field(default=None, ge=1, le=MOST_BYTES)
    """Largest size of one weights file; the default is 5 GB."""


class PeftOptions(FormatOptions):
    """Options of LoRA adapters."""

    merge_adapter: bool = False
    """Consolidated weights only: merge an adapter into the weights, and name them as the model without PEFT does."""
    adapter: str | None = Field(default=None, min_length=1, max_length=256)
    """Name of the LoRA adapter to write or to merge, if there are several."""
    lora_alpha: float | None = Field(default=None, gt=0, lt=1e9)
    """The scale of an adapter without `adapter_config.json`."""
    base: Annotated[str | None, Place()] = Field(default=None, min_length=1, max_length=4096)
    """A directory with the base model's weights, or its directory in the cache of the Hugging Face hub. `merge_adapter`
    needs it if the checkpoint has no frozen parameters. It is read with the source's storage profile."""


OptionsT = TypeVar("OptionsT", bound=FormatOptions)


class Options(RequestModel):
    """The options of all formats, by format. The options of a format that is not installed here stay plain JSON."""

    model_config = ConfigDict(extra="allow")

    deepspeed: DeepSpeedOptions = Field(default_factory=DeepSpeedOptions)
    weights: WeightsOptions = Field(default_factory=WeightsOptions)
    peft: PeftOptions = Field(default_factory=PeftOptions)

    def of(self, kind: type[OptionsT]) -> OptionsT:
        """The options of one format, by their model class; the defaults if the request leaves that format out."""
        return next((found for _, found in self.by_format() if isinstance(found, kind)), kind())

    def by_format(self) -> Iterator[tuple[str, FormatOptions]]:
        """The options of every format that is installed here, with its name."""
        for name in (*type(self).model_fields, *(self.model_extra or {})):
            if isinstance(found := getattr(self, name), FormatOptions):
                yield name, found

    def unknown(self) -> list[str]:
        """The names of formats that are not installed here."""
        return [name for name, found in (self.model_extra or {}).items() if not isinstance(found, FormatOptions)]

    def given(self) -> dict[str, dict[str, Any]]:
        """The options whose values are not the defaults, by format, as JSON."""
        return {name: given for name, found in self.by_format() if (given := found.given())}
