"""Checkpoints of Megatron-core that lie: its description, its tracker, common data, and files of ranks.

The smallest that every command reads: an embedding and a norm in fp32, with masters and Adam's moments, as a distributed
checkpoint (`torch_dist`), and as the directory of one rank with the distributed optimizer's vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adversarial.corpus import distributed, opcodes as op
from adversarial.corpus.carriers import Build, TorchFile, f32, floats
from adversarial.corpus.distributed import Saved, tensor_record
from adversarial.corpus.entry import OK, Entry
from adversarial.corpus.pickle_code import CALL, COMMAND, SYSTEM

_INCOMPLETE, _MALFORMED, _MIXED = "checkpoint.incomplete", "checkpoint.malformed", "checkpoint.mixed"
_AMBIGUOUS, _UNKNOWN, _UNSUPPORTED = "checkpoint.ambiguous", "source.unknown_kind", "source.unsupported"
STEP, TRACKER = "iter_0000003", "latest_checkpointed_iteration.txt"
MODEL, OPTIMIZER = "mp_rank_00/model_optim_rng.pt", "mp_rank_00/distrib_optim.pt"
SHAPES = {"embedding.word_embeddings.weight": (4, 3), "decoder.layers.mlp.linear_fc1.layer_norm_weight": (1, 3)}
"""The entries of the distributed checkpoint; the second has an axis of layers in front."""
STATES = {"param": 0.0, "exp_avg": 1000.0, "exp_avg_sq": 2000.0}
"""The optimizer's states, and by how much their values exceed the weights."""
EMBEDDING, NORM = SHAPES
_OF_RANK: dict[str, tuple[int, ...]] = {EMBEDDING: (4, 3), "decoder.layers.0.pre_mlp_layernorm.weight": (3,)}
"""The same parameters in the file of a rank."""
_SLOTS = ((64, 76), (0, 3))
"""Where the parameters lie in a buffer: in the reverse order of the model, at multiples of 64."""


def namespace(values: Mapping[str, Any]) -> op.Code:
    """An `argparse.Namespace`."""
    return op.Code(op.name("argparse", "Namespace") + b")\x81" + op.push(dict(values)) + b"b")


def args(**more: Any) -> dict[str, Any]:
    """The arguments of the run that are needed."""
    return {
        "num_layers": 1, "hidden_size": 3, "vocab_size": 4, "padded_vocab_size": 4, "optimizer": "adam",
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "data_parallel_size": 1,
        "untie_embeddings_and_output_weights": False, "overlap_grad_reduce": False, "transformer_impl": "local",
        **more,
    }  # fmt: skip


def groups() -> list[dict[str, Any]]:
    """The param groups: with weight decay, and without."""
    same = {"lr": 0.001, "lr_mult": 1.0, "betas": (0.9, 0.95), "eps": 1e-8, "step": 3, "is_expert_parallel": False}
    return [{**same, "wd_mult": decays, "weight_decay": 0.1 * decays} for decays in (1.0, 0.0)]


def common(sharding: str) -> TorchFile:
    """`common.pt`."""
    entries = {
        "args": namespace(args()), "checkpoint_version": 3.0, "iteration": 3,
        "optimizer": {"optimizer": {"param_groups": groups()}, "param_state_sharding_type": sharding},
        "content_metadata": {"distrib_optim_sharding_type": sharding},
    }  # fmt: skip
    return TorchFile(entries, {})


def _entries() -> dict[str, Saved]:
    found: dict[str, Saved] = {}
    for number, (key, shape) in enumerate(SHAPES.items()):
        stored = {key: 0.0} | {f"optimizer.state.{state}.{key}": more for state, more in STATES.items()}
        for name, more in stored.items():
            record = tensor_record(shape, first=100.0 * number + more)
            found[name] = Saved((name,), {((0, 0), shape): record}, shape)
    return found


def _model() -> TorchFile:
    tensors = {name: f32(str(at), *shape) for at, (name, shape) in enumerate(_OF_RANK.items())}
    entries = {
        "args": namespace(args()), "checkpoint_version": 3.0, "iteration": 3, "model": op.ordered(tensors),
        "optimizer": {"optimizer": {"param_groups": groups()}},
    }  # fmt: skip
    data = {str(at): floats(_numel(name), first=100.0 * at) for at, name in enumerate(SHAPES)}
    return TorchFile(entries, data)


def _optimizer() -> TorchFile:
    """Vectors of all parameters, one for each state, with gaps between the parameters."""
    vectors: dict[str, Any] = {state: f32(str(at), 76) for at, state in enumerate(STATES)}
    kind = op.name("torch", "float32")
    held = {"buckets_coalesced": True, 0: _keyed((kind, kind), {**vectors, "numel_unpadded": 76})}
    data: dict[str, bytes] = {}
    for at, more in enumerate(STATES.values()):
        vector = bytearray(4 * 76)
        for number, (begin, end) in enumerate(_SLOTS):
            vector[4 * begin : 4 * end] = floats(end - begin, first=100.0 * number + more)
        data[str(at)] = bytes(vector)
    return TorchFile(held, data)


def _keyed(key: tuple[op.Code, ...], value: Any) -> op.Code:
    """A dict of one entry whose key is a tuple of names."""
    return op.Code(b"}(" + op.push(key) + op.push(value) + b"u")


def _numel(name: str) -> int:
    rows, width = SHAPES[name]
    return rows * width


@dataclass
class Draft:
    """A run with one distributed checkpoint, which is about to be written."""

    shards: distributed.Draft = field(default_factory=lambda: distributed.Draft(_entries()))
    common: TorchFile = field(default_factory=lambda: common("fully_reshardable"))
    description: bytes = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    tracker: bytes = b"3"
    dropped: tuple[str, ...] = ()
    others: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def write(self, directory: Path) -> None:
        """Write the directory of the run."""
        files = {**self.shards.files(), "common.pt": self.common.bytes(), "metadata.json": self.description}
        _write(directory, self.tracker, {n: f for n, f in (files | self.others).items() if n not in self.dropped})


@dataclass
class RankDraft:
    """A run with the directory of one rank."""

    model: TorchFile = field(default_factory=_model)
    optimizer: TorchFile = field(default_factory=_optimizer)
    tracker: bytes = b"3"
    dropped: tuple[str, ...] = ()
    others: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def write(self, directory: Path) -> None:
        """Write the directory of the run."""
        files = {MODEL: self.model.bytes(), OPTIMIZER: self.optimizer.bytes()} | self.others
        _write(directory, self.tracker, {n: f for n, f in files.items() if n not in self.dropped})


def _write(directory: Path, tracker: bytes, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        place = directory / STEP / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    (directory / TRACKER).write_bytes(tracker)


def plain(directory: Path) -> None:
    """The distributed checkpoint as it should be."""
    Draft().write(directory)


def plain_ranks(directory: Path) -> None:
    """The directory of a rank as it should be."""
    RankDraft().write(directory)


def _edited(change: Callable[[Draft], object]) -> Build:
    def build(directory: Path) -> None:
        draft = Draft()
        change(draft)
        draft.write(directory)

    return build


def _of_ranks(change: Callable[[RankDraft], object]) -> Build:
    def build(directory: Path) -> None:
        draft = RankDraft()
        change(draft)
        draft.write(directory)

    return build


def _common(**values: Any) -> Build:
    return _edited(lambda draft: draft.common.entries.update(values))


def _args(**values: Any) -> Build:
    return _common(args=namespace(args(**values)))


def _described(text: bytes) -> Build:
    return _edited(lambda draft: setattr(draft, "description", text))


def _tracked(text: bytes) -> Build:
    return _edited(lambda draft: setattr(draft, "tracker", text))


def _without(*names: str) -> Build:
    return _edited(lambda draft: setattr(draft, "dropped", names))


def _state(key: str, shape: tuple[int, int], *, first: float = 0.0) -> Build:
    """Another record, of another shape or with other values, in place of an entry's."""
    saved = Saved((key,), {((0, 0), shape): tensor_record(shape, first=first)}, shape)
    return _edited(lambda draft: draft.shards.entries.update({key: saved}))


def _model_of(**values: Any) -> Build:
    return _of_ranks(lambda draft: draft.model.entries.update(values))


def _vectors(key: Any, value: Any) -> Build:
    def change(draft: RankDraft) -> None:
        draft.optimizer.entries[key] = value

    return _of_ranks(change)


def _pair(**values: Any) -> Build:
    kind = op.name("torch", "float32")
    vectors: dict[str, Any] = {state: f32(str(at), 76) for at, state in enumerate(STATES)}
    return _vectors(0, _keyed((kind, kind), {**vectors, "numel_unpadded": 76, **values}))


def _swapped(draft: RankDraft) -> None:
    """The masters of one parameter where those of another lie."""
    draft.optimizer.storages["0"] = floats(76, first=7.0)


_CALLING = op.stream(op.call(SYSTEM, COMMAND))


def _nested(depth: int) -> op.Code:
    """Dicts of one entry in one another."""
    return op.Code(b"}(" + b"".join(op.push("optimizer") + b"}(" for _ in range(depth)) + b"u" * depth + b"u")


def _entry(name: str, code: str, build: Build, *, inspect: str | None = None, runs: bytes | None = None) -> Entry:
    return Entry(115, f"megatron-{name}", code, build, inspect=inspect, runs=runs)


ENTRIES = (
    _entry("good", OK, plain),
    _entry("ranks-good", OK, plain_ranks),
    _entry("common-that-calls", CALL, _edited(lambda d: setattr(d.common, "pickle", _CALLING)), inspect=_MALFORMED, runs=_CALLING),
    _entry("common-holds-a-call", CALL, _common(more=op.call(SYSTEM, COMMAND)), inspect=OK),
    _entry("common-of-a-list", _MALFORMED, _edited(lambda d: setattr(d.common, "pickle", op.stream([1])))),
    _entry("common-is-no-archive", _UNKNOWN, _edited(lambda d: setattr(d.common, "raw", b"x" * 100))),
    _entry("common-empty", _INCOMPLETE, _edited(lambda d: setattr(d.common, "raw", b""))),
    _entry("common-missing", _INCOMPLETE, _without("common.pt")),
    _entry("args-of-a-dict", OK, _common(args=args())),
    _entry("args-of-a-list", OK, _common(args=[1])),
    _entry("args-of-another-class", CALL, _common(args=op.call(op.name("evil", "Gadget"))), inspect=OK),
    _entry("layers-2-70", _MIXED, _args(num_layers=1 << 70)),
    _entry("layers-of-text", OK, _args(num_layers="two")),
    _entry("rows-2-70", OK, _args(vocab_size=1 << 70)),
    _entry("rows-negative", OK, _args(vocab_size=-1)),
    _entry("iteration-of-text", OK, _common(iteration="three")),
    _entry("iteration-2-70", OK, _common(iteration=1 << 70)),
    _entry("groups-of-text", _MALFORMED, _common(optimizer={"optimizer": {"param_groups": "two"}})),
    _entry("groups-that-are-equal", _AMBIGUOUS, _common(optimizer={"optimizer": {"param_groups": [groups()[0]] * 2}}), inspect=OK),
    _entry("groups-of-themselves", _MALFORMED, _common(optimizer={"optimizer": {"param_groups": [[]]}})),
    _entry("optimizers-nested", "pickle.too_deep", _common(optimizer=_nested(2_000))),
    _entry("sharding-of-another-name", OK, _common(content_metadata={"distrib_optim_sharding_type": "../../x"})),
    _entry("sharding-that-the-states-do-not-have", OK, _common(content_metadata={"distrib_optim_sharding_type": "dp_zero_gather_scatter"})),
    _entry("description-missing", _INCOMPLETE, _without("metadata.json")),
    _entry("description-empty", _INCOMPLETE, _described(b"")),
    _entry("description-of-a-list", _INCOMPLETE, _described(b"[1]")),
    _entry("description-deep", _INCOMPLETE, _described(b"[" * 60_000)),
    _entry("description-large", _INCOMPLETE, _described(b" " * 100_000)),
    _entry("description-of-another-backend", _INCOMPLETE, _described(b'{"sharded_backend": "zarr"}')),
    _entry("metadata-missing", _INCOMPLETE, _without(".metadata")),
    _entry("tracker-empty", _UNKNOWN, _tracked(b"")),
    _entry("tracker-of-another-step", _UNKNOWN, _tracked(b"4")),
    _entry("tracker-negative", _UNKNOWN, _tracked(b"-3")),
    _entry("tracker-2-200", _UNKNOWN, _tracked(b"9" * 60)),
    _entry("tracker-of-digits-of-others", _UNKNOWN, _tracked("\u0663".encode())),
    _entry("tracker-path-escape", _UNKNOWN, _tracked(b"../../etc")),
    _entry("tracker-large", _UNKNOWN, _tracked(b"3" * 200_000)),
    _entry("release-missing", _UNKNOWN, _tracked(b"release")),
    _entry("masters-of-another-shape", _MALFORMED, _state(f"optimizer.state.param.{EMBEDDING}", (2, 3))),
    _entry("masters-of-other-values", "checkpoint.damaged", _state(f"optimizer.state.param.{EMBEDDING}", (4, 3), first=50.0), inspect=OK),
    _entry("layers-that-differ", _MIXED, _state(NORM, (2, 3))),
    _entry("a-half-alone", _INCOMPLETE, _state("decoder.layers.mlp.linear_fc1.weight_w", (1, 3))),
    _entry("half-million-layers", _MALFORMED, _state("decoder.layers.mlp.router.weight", (500_000, 1))),
    _entry("name-that-steers", "name.invalid", _state("decoder.\x1b[31m.weight", (1, 3))),
    _entry("ranks-model-that-calls", CALL, _of_ranks(lambda d: setattr(d.model, "pickle", _CALLING)), inspect=_MALFORMED, runs=_CALLING),
    _entry("ranks-vectors-that-call", CALL, _of_ranks(lambda d: setattr(d.optimizer, "pickle", _CALLING)), inspect=_MALFORMED, runs=_CALLING),
    _entry("ranks-model-missing", _UNSUPPORTED, _of_ranks(lambda d: setattr(d, "dropped", (MODEL,)))),
    _entry("ranks-vectors-missing", _INCOMPLETE, _of_ranks(lambda d: setattr(d, "dropped", (OPTIMIZER,)))),
    _entry("ranks-of-one-of-two", _INCOMPLETE, _model_of(args=namespace(args(tensor_model_parallel_size=2)))),
    _entry("ranks-2-31", _UNSUPPORTED, _model_of(args=namespace(args(tensor_model_parallel_size=1 << 31)))),
    _entry("ranks-stages-2-62", _UNSUPPORTED, _model_of(args=namespace(args(pipeline_model_parallel_size=1 << 62)))),
    _entry("ranks-layers-million", _MIXED, _model_of(args=namespace(args(num_layers=1_000_000)))),
    _entry("ranks-another-rank", _MIXED, _of_ranks(lambda d: d.others.update({"mp_rank_01/model_optim_rng.pt": d.model.bytes()}))),
    _entry("ranks-number-2-60", OK, _of_ranks(lambda d: d.others.update({f"mp_rank_{1 << 60}/model_optim_rng.pt": d.model.bytes()}))),
    _entry("ranks-model-of-a-list", _MALFORMED, _model_of(model=[1, 2])),
    _entry("ranks-no-model", _INCOMPLETE, _of_ranks(lambda d: d.model.entries.pop("model"))),
    _entry("ranks-vectors-of-text", _AMBIGUOUS, _vectors(0, "none"), inspect=OK),
    _entry("ranks-vectors-short", _MALFORMED, _pair(param=f32("0", 40))),
    _entry("ranks-vectors-counted-2-62", _MALFORMED, _pair(numel_unpadded=1 << 62)),
    _entry("ranks-vectors-counted-negative", _MALFORMED, _pair(numel_unpadded=-1)),
    _entry("ranks-vectors-of-two-dims", _MALFORMED, _pair(param=f32("0", 2, 38))),
    _entry("ranks-vectors-without-masters", _MALFORMED, _pair(param=None)),
    _entry("ranks-vectors-of-another-buffer", _AMBIGUOUS, _vectors(5, {}), inspect=OK),
    _entry("ranks-masters-of-others", "checkpoint.damaged", _of_ranks(_swapped), inspect=OK),
)  # fmt: skip
