"""The tensors of `module`: weights in the model's dtype, buffers, frozen parameters, tied aliases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import SourceError, printable
from reshard.models import NotCarried
from reshard_engine.checkpoint import Buffer, Parameter
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_tensors import add_whole_tensor, place_of
from reshard_engine.formats.deepspeed.names import FROZEN_SHAPES
from reshard_engine.formats.deepspeed.reader.native.flat_groups import Partition
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates
from reshard_engine.formats.deepspeed.reader.native.run_config import may_be_quantized
from reshard_engine.formats.deepspeed.reader.native.sharded_params import add_sharded_tensor
from reshard_engine.formats.not_carried import NotCarriedKeys
from reshard_engine.pickles.nodes import PTensor, is_mapping, mapping_items
from reshard_engine.pickles.state_dict import is_extra_state
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMapBuilder


class ModuleTensors:
    """Sorts the entries of `module` into weights, buffers, frozen parameters and aliases.

    Source: deepspeed 0.19.8 `runtime/engine.py` (`_get_zero_frozen_param_attributes`: fragments at stage 2
    are whole, at stage 3 each rank's share; below stage 2 frozen parameters are only in `module`).
    """

    def __init__(
        self,
        builder: ShardMapBuilder,
        models: Sequence[ModelStates],
        number: Mapping[SourceFile, int],
        *,
        owned: Mapping[str, tuple[int, ...]],
        sharded: bool,
        whole: bool = True,
    ) -> None:
        """Register everything that `module` and the frozen fragments hold.

        Args:
            builder: Collects tensors and pieces.
            models: Model states of all ranks that are needed, rank 0 first.
            number: File numbers of the shard map.
            owned: Names and shapes of the parameters that the optimizer owns.
            sharded: True if parameters are sharded (ZeRO-3), so that `module` holds empty placeholders.
            whole: True if its tensors are whole. If they are one rank's parts, only buffers are read.

        Raises:
            SourceError: `checkpoint.*` if names or shapes do not fit.
        """
        self._builder = builder
        self._model = models[0]
        self._file = number[models[0].torch_file.file]
        self.buffers: dict[str, int] = {}
        self.unregistered: set[str] = set()
        """Names of the tensors that the module does not call buffers: extra states, and what hooks of the model add."""
        self.weights: dict[str, int] = {}
        self.shared: dict[str, str] = dict(self._model.shared)
        self.frozen_late = frozenset(n for n, _ in self._model.frozen_shapes if n in owned)
        """Parameters that the run froze after the optimizer was made."""
        self.frozen_parameters: list[Parameter] = []
        self.undescribed: list[str] = []
        """Empty placeholders of ZeRO-3 that stand for no known parameter."""
        self._frozen = dict(self._model.frozen_shapes)
        shapes = self._model.entries.get(FROZEN_SHAPES)
        # The names in the file itself: `frozen_shapes` lacks fused experts, which `autoep` puts together.
        self._listed = frozenset(mapping_items(shapes, what=FROZEN_SHAPES)) if is_mapping(shapes) else None
        self._frozen_numbers: dict[str, int] = {}
        self._add_buffers()
        if not whole:
            self._refuse_frozen_parts(owned)
            return
        if sharded:
            self._add_frozen_shares(models, number, owned)
        self._add_rest(owned, sharded=sharded)
        if not sharded:
            self._add_left_aliases()

    def _whole(self, name: str, state: str, tensor: PTensor) -> int:
        return add_whole_tensor(self._builder, name, state, tensor, torch_file=self._model.torch_file, file=self._file)

    def _add_buffers(self) -> None:
        for name in self._model.buffer_names:
            tensor = self._model.module.get(name)
            if tensor is not None:
                self.buffers[name] = self._whole(name, "value", tensor)

    def _refuse_frozen_parts(self, owned: Mapping[str, tuple[int, ...]]) -> None:
        frozen = [n for n in self._model.module if n not in owned and n not in self.buffers and n not in self.shared]
        if frozen:
            raise SourceError(
                "source.unsupported",
                f"{len(frozen)} frozen parameters ({printable(frozen[0])}, ...) are stored only as one rank's parts",
                fix="convert the original checkpoint",
            )

    def _add_frozen_shares(
        self,
        models: Sequence[ModelStates],
        number: Mapping[SourceFile, int],
        owned: Mapping[str, tuple[int, ...]],
    ) -> None:
        for name, shape in self._model.frozen_shapes:
            if owned.get(name, shape) != shape:
                raise SourceError(
                    "checkpoint.mixed",
                    f"{printable(name)} is {shape} in `frozen_param_shapes`, {owned[name]} in `param_shapes`",
                )
            shares: list[Partition] = []
            dtypes: set[str] = set()
            for rank, model in enumerate(models):
                share = model.frozen_fragments.get(name)
                if share is not None and not share.shape and shape:
                    raise SourceError(
                        "source.unsupported",
                        f"frozen {printable(name)} was on NVMe (offload_param): DeepSpeed did not save it",
                        fix="save with offload_param.device cpu, or with exclude_frozen_parameters=True and take the "
                        "frozen weights from the base model",
                    )
                if share is None or len(share.shape) != 1:
                    raise SourceError(
                        "checkpoint.incomplete", f"rank {rank} holds no share of frozen {printable(name)}"
                    )
                dtypes.add(share.dtype)
                shares.append(
                    Partition(number[model.torch_file.file], model.torch_file.tensor_offset(share), share.numel)
                )
            if dtypes == {"int8"} and may_be_quantized(self._model):
                raise SourceError(
                    "source.unsupported",
                    f"frozen {printable(name)} was saved in 8 bits without its scales "
                    "(zero_quantized_nontrainable_weights)",
                    fix="save with exclude_frozen_parameters=True and take the frozen weights from the base model",
                )
            if len(dtypes) != 1:
                raise SourceError("checkpoint.mixed", f"frozen {printable(name)} has several element types")
            dtype = BY_NAME[dtypes.pop()]
            index = self._builder.tensor(name, "weight", dtype, shape)
            add_sharded_tensor(
                self._builder,
                index,
                partitions=shares,
                itemsize_bytes=dtype.itemsize_bytes,
                what=f"frozen {printable(name)}",
            )
            if name in owned:
                # The run froze it after the optimizer was made. The optimizer still steps its master.
                # This weight is the rounding of the master.
                self.weights[name] = index
            else:
                self._add_frozen(name, shape, index)

    def _add_frozen(self, name: str, shape: tuple[int, ...], index: int) -> None:
        self.frozen_parameters.append(Parameter(name, shape, None, index))
        self._frozen_numbers[name] = index

    def _add_rest(self, owned: Mapping[str, tuple[int, ...]], *, sharded: bool) -> None:
        places: dict[tuple[object, ...], str] = {}
        owners: dict[str, str] = {}
        module = {**self._model.frozen_fragments, **self._model.module} if not sharded else self._model.module
        for name, tensor in module.items():
            place = place_of(tensor)
            if name in self.buffers or name in self._frozen_numbers:
                continue
            if name in owned:
                if not sharded:
                    places[place] = name
                    self.weights[name] = self._whole(name, "weight", tensor)
                owners[tensor.storage.key] = name
                continue
            if name in self.shared:
                continue
            if not sharded and tensor.numel and place in places:
                # Before 0.9.0 aliases were not listed; they share their owner's storage.
                self.shared[name] = places[place]
                continue
            if is_extra_state(name) or self._is_hooks_own(name, tensor, sharded=sharded):
                self.buffers[name] = self._whole(name, "value", tensor)
                self.unregistered.add(name)
                continue
            if sharded and self._is_placeholder(tensor) and name not in self._frozen:
                if not self._lists_shared and tensor.storage.key in owners:
                    # Each parameter has a placeholder of its own; an alias has the placeholder of its owner.
                    self.shared[name] = owners[tensor.storage.key]
                else:
                    self.undescribed.append(name)
                continue
            places[place] = name
            self._add_frozen(name, tensor.shape, self._whole(name, "weight", tensor))

    def _add_left_aliases(self) -> None:
        """Take frozen weights from names that they are tied to, where the save left out their own names."""
        for name in self._model.aliases_left:
            owner = self.shared[name]
            if owner not in self._frozen_numbers:
                tensor = self._model.module[name]
                self._add_frozen(owner, tensor.shape, self._whole(owner, "weight", tensor))

    def _is_hooks_own(self, name: str, tensor: PTensor, *, sharded: bool) -> bool:
        """True for a tensor that is no parameter, in a run that lists its frozen parameters (stages 2 and 3)."""
        if self._listed is None or name in self._listed:
            return False
        return not (sharded and self._is_placeholder(tensor))

    @property
    def _lists_shared(self) -> bool:
        return "shared_params" in self._model.entries

    def _is_placeholder(self, tensor: PTensor) -> bool:
        # ZeRO-3 leaves `torch.empty(0)` in `module`; up to 0.5 it left `torch.ones(1)`.
        return tensor.numel == 0 or (FROZEN_SHAPES not in self._model.entries and tensor.shape == (1,))

    def weight_of(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The tensor number of an owned parameter's weight in the model's dtype, where it is stored.

        Raises:
            SourceError: as `weight_of`.
        """
        return weight_of(self._builder, self.weights, name, shape)

    @property
    def numbers(self) -> dict[str, int]:
        """The tensor numbers of all entries of `module` but aliases."""
        return {**self.weights, **self.buffers, **self._frozen_numbers}

    def buffer_entries(self) -> tuple[Buffer, ...]:
        """The buffers."""
        return tuple(Buffer(n, t, registered=n not in self.unregistered) for n, t in self.buffers.items())

    @property
    def warnings(self) -> list[str]:
        """Warnings about weights that the files do not hold."""
        return [f"{printable(n)} is an empty placeholder that nothing describes; left out" for n in self.undescribed]

    def not_carried(self) -> tuple[NotCarried, ...]:
        """The placeholders that stand for no known parameter."""
        noted = NotCarriedKeys()
        noted.add_all((f"module.{n}" for n in self.undescribed), "an empty placeholder that nothing describes")
        return noted.found()

    @property
    def frozen_numbers(self) -> Mapping[str, int]:
        """Tensor numbers of frozen parameters by name."""
        return self._frozen_numbers


def weight_of(builder: ShardMapBuilder, weights: Mapping[str, int], name: str, shape: tuple[int, ...]) -> int | None:
    """The tensor number of a parameter's weight in `module`; None where no weight is stored.

    Raises:
        SourceError: `checkpoint.mixed` if the weight has another shape than the optimizer knows.
    """
    index = weights.get(name)
    if index is not None and builder.tensors[index].shape != shape:
        raise SourceError(
            "checkpoint.mixed",
            f"{printable(name)} is {builder.tensors[index].shape} in `module`, {shape} in `param_shapes`",
        )
    return index
