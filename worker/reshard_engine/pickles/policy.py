"""The reviewed allow-list of classes and functions that a checkpoint may name, and the policy for other names.

No name on the list is imported or called here. A name is listed because DeepSpeed, Megatron, numpy or torch really
write it, and because calling it only builds a value: programs that load *our* output do call it. An opaque value that
is written unchanged is a risk of its own, because it carries the source's names into our output.

Source: names seen in checkpoints written by deepspeed 0.19.8, Megatron-DeepSpeed (July 2025),
torch 2.13.0, torchao 0.18.0, numpy 2.4 and their older spellings (`numpy.core` before numpy 2); plain values of
CPython's standard library as 3.8 to 3.13 write them (`tests/data/pickles`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from reshard.errors import SourceError, printable
from reshard.models import OpaquePolicy
from reshard_engine.pickles.nodes import Global
from reshard_engine.pickles.stdlib import FACTORIES, PATHS
from reshard_engine.tensors.dtypes import BY_NAME, BY_STORAGE_CLASS

_CALLABLE = frozenset(
    {
        "collections.OrderedDict",
        "collections.defaultdict",
        "torch.Size",
        "torch.device",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_wrapper_subclass",
        "torch.serialization._get_layout",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.bf16_optimizer.fragment_address",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "argparse.Namespace",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "numpy.core.numeric._frombuffer",
        "numpy._core.numeric._frombuffer",  # arrays at protocol 5
        "numpy.dtype",
        "numpy.ndarray",
        "_codecs.encode",
        "__builtin__.set",
        "builtins.set",
        "__builtin__.frozenset",
        "builtins.frozenset",
        "__builtin__.bytes",  # the form of empty bytes in protocol 2
        "builtins.bytes",
        "__builtin__.bytearray",
        "builtins.bytearray",
        "__builtin__.complex",
        "builtins.complex",
        "datetime.timedelta",
        "datetime.date",
        "datetime.time",
        "datetime.datetime",
        "datetime.timezone",
        "collections.Counter",
        "collections.deque",
        "types.SimpleNamespace",
        *PATHS,
    }
)
_PLAIN = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.float8_e4m3fn", "torch.storage.UntypedStorage"}
    # Quantized states of optimizers: tensors made of tensors, which nothing here looks into.
    | {
        f"{package}.subclass_{kind}.OptimState{suffix}"
        for package in ("torchao.optim", "torchao.prototype.low_bit_optim")
        for kind, suffix in (("8bit", "8bit"), ("4bit", "4bit"), ("fp8", "Fp8"))
    }
    # The default factories of defaultdicts.
    | {f"{b}.{name}" for b in ("builtins", "__builtin__") for name in FACTORIES}
    | {f"torch.{name}" for name in BY_STORAGE_CLASS}
    | {f"torch.{name}" for name in BY_NAME}
)
# Enumerations of Megatron: pure values, rebuilt by calling the class with an integer or a string.
_ENUMS = re.compile(r"megatron\.(?:core\.)?(?:model\.|transformer\.)?enums\.[A-Z][A-Za-z0-9]{0,63}")


def is_listed(name: Global) -> bool:
    """True if the name is on the allow-list."""
    dotted = name.dotted
    if dotted not in _CALLABLE and dotted not in _PLAIN and _ENUMS.fullmatch(dotted) is None:
        return False
    # No listed name is nested in a class, and before protocol 4 no unpickler follows dots.
    return "." not in name.name


@dataclass(slots=True)
class OpaqueLedger:
    """Applies the policy to names that are not listed, and collects them for the manifest."""

    policy: OpaquePolicy
    foreign: dict[str, None] = field(default_factory=dict[str, None])

    def meet(self, name: Global, *, code: str) -> None:
        """Record a name that is not on the list.

        Raises:
            SourceError: `code` under the policy `refuse`.
        """
        safe = printable(name.dotted)
        self.foreign[safe] = None
        if self.policy is OpaquePolicy.REFUSE:
            raise SourceError(
                code,
                f"the checkpoint names {safe}, which is not on the allow-list; nothing of it was executed",
                fix="if you trust its origin: --opaque keep writes such objects out again, unexecuted; "
                "--opaque drop writes None in their place",
                details={"global": safe},
            )
