"""Options with a closed list of values: they take what people type, and suggest the value that was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar

import typer

from reshard.errors import printable

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)

TARGET_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("ucp", "deepspeed-universal"), "universal"),
    **dict.fromkeys(("hf", "huggingface", "transformers"), "safetensors"),
    **dict.fromkeys(("pytorch", "pt"), "torch"),
    **dict.fromkeys(("deepspeed", "native"), "zero"),
    **dict.fromkeys(("fsdp", "fsdp2", "distcp"), "dcp"),
    "lora": "peft",
}
"""Other names of targets that mean one of ours and no other. A misspelling is none: it is asked back."""
_WITH_FRAMEWORKS = {
    name: f"--to dcp --grammar {name} (FSDP), or --to zero --dp N (DeepSpeed)"
    for name in ("accelerate", "trainer", "lightning")
}
TARGET_FIXES: Mapping[str, str] = {
    **_WITH_FRAMEWORKS,
    **{f"zero{stage}": f"--to zero --zero-stage {stage} --dp N" for stage in range(4)},
    "gguf": "--to safetensors --model-files DIR, then llama.cpp's convert_hf_to_gguf.py (DIR: config and tokenizer)",
    "torchtitan": "--to dcp --grammar torchtitan",
    "megatron": "--to zero --dp N, or --to universal (Megatron-DeepSpeed); files of Megatron Core are not written",
}
"""Names that people type for a target and that need more words, and these words."""


def choice(kind: type[ChoiceT], *names: str, also: Mapping[str, str] | None = None, **settings: Any) -> Any:
    """A typer option whose values are the members of a list.

    Args:
        kind: The list.
        names: Names of the option, if it has another than its parameter.
        also: Other words for values, and the values.
        settings: Other settings of `typer.Option`.
    """
    values = tuple(member.value for member in kind)
    parser = _parser(kind, values, also or {})
    completed = {"autocompletion": _completion(values)}
    return typer.Option(*names, parser=parser, metavar="|".join(values), **completed, **settings)


def chosen(text: str, values: Iterable[str], also: Mapping[str, str]) -> str:
    """The value that a text names, in any case of letters, or by another of its names.

    Raises:
        BadParameter: None of the values; the message names the one that is most like it.
    """
    listed = tuple(values)
    by_name = {value.lower(): value for value in listed} | {k: v for k, v in also.items() if v in listed}
    word = text.strip().lower()
    if (found := by_name.get(word)) is not None:
        return found
    close = get_close_matches(word, by_name, n=1, cutoff=0.6)
    meant = f"; did you mean {by_name[close[0]]}?" if close else ""
    raise typer.BadParameter(f"{printable(text, max_chars=64)!r} is not one of {', '.join(listed)}{meant}")


def _parser(kind: type[ChoiceT], values: tuple[str, ...], also: Mapping[str, str]) -> Callable[[str], ChoiceT]:
    def parse(text: str) -> ChoiceT:
        return kind(chosen(text, values, also))

    return parse


def _completion(values: tuple[str, ...]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete
