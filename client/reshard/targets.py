"""The formats that a conversion writes, as users meet them: names, contents, and where each has its place.

The help of commands, documents, docstrings, the dashboard and errors are made of these records. The module imports
no library, because `--help` needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from reshard.choices import POINTERS


@dataclass(frozen=True, slots=True)
class Load:
    """The line by which a user's script loads a target."""

    line: str
    """`{dir}` stands for the target's directory as a literal of Python, `{save}` and `{tag}` for its two parts, and
    `{file}` for the only file of weights."""
    having: str = ""
    """A pattern of names: the line is for targets with such a file. Empty for all."""
    alone: bool = False
    """True if it is for targets with exactly one such file."""
    on_hub: bool = False
    """True if the line also loads the target from the Hugging Face hub."""

    def takes(self, files: Iterable[str]) -> bool:
        """True if a target with these files is loaded by the line."""
        if not self.having:
            return True
        matching = sum(fnmatchcase(name, self.having) for name in files)
        return matching == 1 if self.alone else matching > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One format that `--to` names."""

    name: str
    label: str
    """A few words for lists and forms."""
    contains: str
    """The files that are written, and the programs that load them: a clause without a full stop."""
    use: str = ""
    """The use of the target in two or three words, as `inspect` lists the targets of a checkpoint."""
    also: tuple[str, ...] = ()
    """Other names that mean this target and no other. A misspelling is none: it is asked back."""
    tracker: str = ""
    """The file beside the target's directory that names the checkpoint from which its run resumes; empty for none."""
    is_weights: bool = False
    """True if it holds weights alone, and nothing of the state of a training run."""
    options: tuple[str, ...] = ()
    """The options that this target takes and not every target does, by the names of their keyword arguments. An option
    that some target lists is refused where another target does not list it."""
    needs: tuple[str, ...] = ()
    """Those options without which it cannot be written."""
    loads: tuple[Load, ...] = ()
    """The ways to load the target. A conversion prints the first that takes the target's files, as its `next:` line."""
    before_load: str = ""
    """The setting that the run's configuration needs first, in a line of its own."""
    ending: str = ""
    """The word at the end of the names that are suggested for it; empty for its own name."""

    @property
    def is_tag(self) -> bool:
        """True if the last name of the target's directory is a tag of DeepSpeed, which `latest` names."""
        return self.tracker in POINTERS

    def load(self, files: Collection[str], *, on_hub: bool = False) -> Load | None:
        """The way to load a target of these files, from a directory or from the hub; None if none is known."""
        return next((way for way in self.loads if way.takes(files) and (way.on_hub or not on_hub)), None)


def options_of_others(name: str, targets: Mapping[str, Target]) -> set[str]:
    """The options that some of these targets take, and the target of this name does not."""
    return {option for target in targets.values() for option in target.options} - {*targets[name].options}


_DEEPSPEED_GROUPS = ("vocab_divisor", "weight_decay_groups", "megatron_args")
_OF_ONE_ADAPTER = ("adapter", "lora_alpha", "rslora")
_OF_WEIGHTS = ("max_shard_size", "card", "base_model", "merge_adapter", "base", *_OF_ONE_ADAPTER)

_BY_DEEPSPEED = (Load("engine.load_checkpoint({save}, tag={tag})"),)
_BY_TRANSFORMERS = Load("AutoModelForCausalLM.from_pretrained({dir})", having="config.json", on_hub=True)
_BY_ACCELERATE = Load("accelerate.load_checkpoint_in_model(model, {dir})")

TARGETS = (
    Target(
        name="universal",
        label="DeepSpeed universal checkpoint, for any number of GPUs",
        contains="DeepSpeed universal checkpoint: a file for each parameter and state, for any layout",
        use="DeepSpeed universal",
        also=("ucp", "deepspeed-universal"),
        options=_DEEPSPEED_GROUPS,
        tracker="latest_universal",
        before_load='in the DeepSpeed config: "checkpoint": {"load_universal": true}',
        loads=_BY_DEEPSPEED,
    ),
    Target(
        name="safetensors",
        label="Weights (safetensors, as Hugging Face has them)",
        contains="weights in safetensors files, as from_pretrained of transformers loads them",
        use="Weights",
        also=("hf", "huggingface", "transformers"),
        options=(*_OF_WEIGHTS, "quantize", "quantize_layers"),
        loads=(
            _BY_TRANSFORMERS,
            Load("safetensors.torch.load_model(model, {file})", having="*.safetensors", alone=True),
            _BY_ACCELERATE,
        ),
        is_weights=True,
        ending="weights",
    ),
    Target(
        name="torch",
        label="Weights (pytorch_model.bin)",
        contains="weights in pytorch_model.bin",
        use="Weights",
        also=("pytorch", "pt", "bin", "pytorch_bin"),
        options=_OF_WEIGHTS,
        loads=(
            _BY_TRANSFORMERS,
            Load("model.load_state_dict(torch.load({file}, weights_only=True))", having="*.bin", alone=True),
            _BY_ACCELERATE,
        ),
        is_weights=True,
        ending="weights",
    ),
    Target(
        name="zero",
        label="DeepSpeed, for N GPUs",
        contains="DeepSpeed's own files for one layout (--dp, --tp, --pp, --ep)",
        also=("deepspeed", "native"),
        options=(
            "dp",
            "tp",
            "pp",
            "ep",
            "rng",
            *_DEEPSPEED_GROUPS,
            "zero_stage",
            "partition_method",
            "pipeline_layers",
            "round_robin_gradients",
            "parameter_alignment",
            "sub_group_size",
        ),
        needs=("dp",),
        tracker="latest",
        loads=_BY_DEEPSPEED,
        ending="deepspeed",
    ),
    Target(
        name="peft",
        label="LoRA adapter (PEFT)",
        contains="one LoRA adapter, as PEFT loads it",
        use="LoRA adapter",
        also=("lora",),
        options=("card", "base_model", *_OF_ONE_ADAPTER),
        loads=(Load("PeftModel.from_pretrained(base_model, {dir})", on_hub=True),),
        is_weights=True,
        ending="adapter",
    ),
    Target(
        name="fsdp_ranks",
        label="A file for each rank of FSDP2 (verl, SkyRL, Accelerate)",
        contains="a file for each rank of FSDP2, as verl, SkyRL and Accelerate without DCP load them",
        also=("fsdp-ranks",),
        options=("dp", "rng", "rank_framework", "device_type", "fsdp_size", "fsdp_version"),
        needs=("dp",),
    ),
    Target(
        name="megatron",
        label="Megatron-core, for any number of GPUs",
        contains="Megatron-core's distributed checkpoint (torch_dist), or its files for one layout",
        use="Megatron-core",
        tracker="latest_checkpointed_iteration.txt",
        options=(
            "dp",
            "tp",
            "pp",
            "ep",
            "virtual_pipeline",
            "vocab_divisor",
            "rng",
            "ckpt_format",
            "optimizer_sharding",
            "common_state",
            "megatron_args",
        ),
    ),
    Target(
        name="torch_checkpointing",
        label="Items of ranks of FSDP2 (torch_checkpointing)",
        contains="items of ranks of FSDP2, as torch_checkpointing loads them",
        also=("torch-checkpointing",),
        options=("dp", "rng", "device_type", "fsdp_size"),
        needs=("dp",),
    ),
    Target(
        name="slim",
        label="The same files without unused bytes",
        contains="SRC's files, with torch files without bytes that no tensor uses (reshard slim)",
    ),
)
"""The targets of reshard itself, in the order of `TargetFormat`. Formats of packages bring theirs."""
