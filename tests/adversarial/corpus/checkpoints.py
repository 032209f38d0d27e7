"""Directories whose files do not belong together, name what must not be named, or are not all there."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from adversarial.corpus import archives, carriers, opcodes as op
from adversarial.corpus.carriers import MODEL, OPTIM, TAG, Draft, edited, ranked
from adversarial.corpus.entry import OK, Entry
from adversarial.corpus.pickle_code import CALL, COMMAND, SYSTEM

_LATEST, _INCOMPLETE, _AMBIGUOUS = "checkpoint.bad_latest", "checkpoint.incomplete", "checkpoint.ambiguous"
_MIXED, _COVERAGE, _MALFORMED = "checkpoint.mixed", "checkpoint.coverage", "checkpoint.malformed"


def _latest(name: str, text: bytes, expected: str = _LATEST, *, why: str = "") -> Entry:
    return Entry(108, f"latest-{name}", expected, edited(lambda d: setattr(d, "latest", text)), why=why)


def _linked_latest(directory: Path) -> None:
    edited(lambda d: setattr(d, "latest", None))(directory)
    (directory / "latest").symlink_to("/etc/hostname")


def _files(
    number: int, name: str, expected: str, *, why: str = "", dropped: tuple[str, ...] = (), **more: bytes
) -> Entry:
    def change(draft: Draft) -> None:
        draft.dropped = [f"{TAG}/{n}" for n in dropped]
        draft.others = {f"{TAG}/{n}": data for n, data in more.items()}

    return Entry(number, name, expected, edited(change), why=why)


def _rank_file(name: str, rank: int) -> dict[str, bytes]:
    return {name: carriers.optim_states(rank).bytes()}


def _ranks(number: int, name: str, expected: str, change: Any, *, why: str = "") -> Entry:
    return Entry(number, name, expected, ranked(change), why=why)


def _only(rank_wanted: int, **values: Any) -> Any:
    def change(state: dict[str, Any], rank: int) -> None:
        if rank == rank_wanted:
            state.update(values)

    return change


def _later(state: dict[str, Any], rank: int) -> None:
    if rank == 1:
        state["base_optimizer_state"]["state"][0]["step"] = 4


def _no_moment(state: dict[str, Any], rank: int) -> None:
    if rank == 1:
        del state["base_optimizer_state"]["state"][0]["exp_avg"]


def _flat_of(rank_wanted: int, numel: int) -> Any:
    def change(draft: Draft) -> None:
        file = draft.optim[rank_wanted]
        state = file.entries["optimizer_state_dict"]
        state["single_partition_of_fp32_groups"] = [carriers.f32("9", numel)]
        file.storages["9"] = carriers.floats(numel)

    return edited(change)


def _state_named(name: str) -> Any:
    def change(state: dict[str, Any], _rank: int) -> None:
        entry = state["base_optimizer_state"]["state"][0]
        entry[name] = entry.pop("exp_avg")

    return change


def _shapes(**shapes: Any) -> Any:
    return carriers.entry("param_shapes", [op.ordered(shapes)])


def _named(*names: str) -> carriers.Build:
    """`w` and `b` under other names."""

    def change(draft: Draft) -> None:
        draft.model.entries["module"] = op.ordered({names[0]: carriers.f32("0", 4, 3), names[1]: carriers.f32("1", 3)})
        draft.model.entries["param_shapes"] = [op.ordered({names[0]: op.size(4, 3), names[1]: op.size(3)})]

    return edited(change)


def _patterns(draft: Draft) -> None:
    patterns = {"parameter_with_row_parallelism_patterns": ["(a+)+$", "(a|a)*b"], "universal_checkpoint_version": 0.2}
    draft.model.entries["universal_checkpoint_info"] = {
        **patterns,
        "vocabulary_parameter_patterns": [f"(x+x+)+y{n}" for n in range(1_000)],
        "original_vocab_size": 4,
        "names": ["a" * 40] * 100_000,
    }


def _index(text: str) -> carriers.Build:
    """A directory of consolidated weights whose index lies."""

    def build(directory: Path) -> None:
        directory.mkdir(parents=True)
        weights = archives.archive(
            archives.torch_records(op.stream({"w": carriers.f32("0", 3)}), {"0": carriers.floats(3)})
        )
        (directory / "pytorch_model-00001-of-00001.bin").write_bytes(weights)
        (directory / "pytorch_model.bin.index.json").write_text(text)

    return build


def _renamed_model(name: str) -> bytes:
    model = carriers.model_states()
    model.entries["param_shapes"] = [op.ordered({name: op.size(4, 3), "b": op.size(3)})]
    return model.bytes()


def _archived(value: Any, storages: dict[str, bytes]) -> bytes:
    return archives.archive(archives.torch_records(op.stream(value), storages))


def _universal(change: Callable[[dict[str, bytes]], None]) -> carriers.Build:
    """A universal checkpoint after a change of its files, by path below the tag directory."""

    def build(directory: Path) -> None:
        model = carriers.model_states()
        group = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
        inner = {"state": {0: {"step": 3}}, "param_groups": [group]}
        optimizer = {"optimizer_state_dict": inner, "param_groups": [group], "ds_version": "0.19.8"}
        files = {MODEL: model.bytes(), "zero/optimizer_state.pt": _archived(optimizer, {})}
        for name, shape in carriers.SHAPES.items():
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                numel = prod(shape)
                files[f"zero/{name}/{state}.pt"] = _archived(
                    {"param": carriers.f32("0", *shape)}, {"0": carriers.floats(numel)}
                )
            files[f"zero/{name}/step.pt"] = _archived(3, {})
        change(files)
        for path, data in files.items():
            (directory / "universal" / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / "universal" / path).write_bytes(data)
        (directory / "latest_universal").write_text("universal")

    return build


def _atom(path: str, value: Any, numel: int = 12) -> carriers.Build:
    return _universal(lambda files: files.update({path: _archived(value, {"0": carriers.floats(numel)})}))


def _script(draft: Draft) -> None:
    code = b"import os; os.system('touch reshard-canary')\n"
    draft.others = {
        "zero_to_fp32.py": code,
        f"{TAG}/__init__.py": code,
        f"{TAG}/conftest.py": code,
        "sitecustomize.py": code,
    }


def _empty(directory: Path) -> None:
    directory.mkdir(parents=True)


ENTRIES = (
    _latest("parent", b"../../x"),
    _latest("absolute", b"/etc"),
    _latest("long", b"a" * 1_000_000),
    _latest("carriage-return", b"global_step3\r\n", OK, why="white space around the name is what editors add; it names the same directory"),
    _latest("carriage-return-inside", b"global_step3\r\nx"),
    _latest("empty", b""),
    _latest("two-lines", b"global_step3\nglobal_step4"),
    _latest("nul", b"global_step3\0"),
    _latest("not-utf8", b"\xff\xfe"),
    _latest("backslash", b"..\\x"),
    _latest("dot", b"."),
    _latest("terminal", b"\x1b[2Jglobal_step3"),
    Entry(108, "latest-link-outside", _LATEST, _linked_latest, why=""),
    *(
        Entry(109, f"index-{label}", "checkpoint.bad_index", _index(text), to="safetensors")
        for label, text in {
            "parent": json.dumps({"metadata": {"total_size": 12}, "weight_map": {"w": "../../etc/passwd"}}),
            "url": json.dumps({"metadata": {"total_size": 12}, "weight_map": {"w": "http://127.0.0.1/x"}}),
            "missing-file": json.dumps({"metadata": {"total_size": 12}, "weight_map": {"w": "absent.bin"}}),
            "absolute": json.dumps({"weight_map": {"w": "/etc/passwd"}}),
            "hidden-file": json.dumps({"weight_map": {"w": ".hidden.bin"}}),
            "not-json": "{'weight_map': {}}",
            "key-twice": '{"weight_map": {"w": "pytorch_model-00001-of-00001.bin", "w": "x.bin"}}',
            "name-not-in-shard": json.dumps({"weight_map": {"v": "pytorch_model-00001-of-00001.bin"}}),
            "map-is-list": json.dumps({"weight_map": ["w"]}),
            "deep": '{"weight_map":' + "[" * 100_000,
        }.items()
    ),
    Entry(109, "index-wrong-size", OK, _index(json.dumps({"metadata": {"total_size": 1 << 60}, "weight_map": {"w": "pytorch_model-00001-of-00001.bin"}})), to="safetensors", why="a sum that is wrong harms nobody: it is said in a warning"),
    _files(110, "rank-missing", _INCOMPLETE, dropped=(OPTIM[1],)),
    _files(110, "first-rank-missing", _INCOMPLETE, dropped=(OPTIM[0],)),
    _files(110, "model-states-missing", _INCOMPLETE, dropped=(MODEL,)),
    _files(110, "rank-twice", _AMBIGUOUS, **_rank_file("zero_pp_rank_1_mp_rank_00optim_states.pt", 1)),
    _files(110, "rank-in-another-script", OK, **_rank_file("zero_pp_rank_\u0663_mp_rank_00_optim_states.pt", 1), why="not a name that DeepSpeed gives: the file is left alone, and the ranks are complete without it"),
    _files(110, "rank-in-another-script-only", _INCOMPLETE, dropped=(OPTIM[1],), **_rank_file("zero_pp_rank_\uff11_mp_rank_00_optim_states.pt", 1)),
    _files(110, "rank-padded-twice", OK, **_rank_file("zero_pp_rank_01_mp_rank_00_optim_states.pt", 1), why="as above: DeepSpeed pads no data-parallel rank"),
    _files(110, "prefix-twice", _AMBIGUOUS, **_rank_file("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", 0)),
    _files(110, "rank-far-beyond", "checkpoint.too_large", **_rank_file("zero_pp_rank_99999999_mp_rank_00_optim_states.pt", 1)),
    _files(110, "part-of-a-million", _INCOMPLETE, dropped=(OPTIM[1],), **{OPTIM[1] + "-0.999999": b"\x80\x02"}),
    _ranks(111, "steps-mixed", _MIXED, _later),
    _ranks(111, "stages-mixed", _MIXED, _only(1, zero_stage=1)),
    _ranks(111, "worlds-mixed", _MIXED, lambda s, _: s.update(partition_count=[1])),
    _ranks(111, "states-missing-on-a-rank", _INCOMPLETE, _no_moment, why="a tensor that one rank lacks"),
    Entry(111, "shapes-of-another-model", _COVERAGE, _shapes(w=op.size(40, 30), b=op.size(3)), why="the flat tensors do not add up to them"),
    Entry(111, "weights-of-another-model", _MIXED, carriers.entry("module", op.ordered({"w": carriers.f32("0", 3, 4), "b": carriers.f32("1", 3)}))),
    _ranks(112, "world-2-31", "checkpoint.too_large", lambda s, _: s.update(partition_count=[1 << 31])),
    _ranks(112, "world-2-70", "checkpoint.too_large", lambda s, _: s.update(partition_count=[1 << 70])),
    _ranks(112, "world-zero", _MALFORMED, lambda s, _: s.update(partition_count=[0])),
    _ranks(112, "world-million-missing", _INCOMPLETE, lambda s, _: s.update(partition_count=[1 << 20])),
    _ranks(112, "padding-2-40", _MALFORMED, lambda s, _: s.update(param_alignment_paddings=[[1 << 40, 0]])),
    Entry(112, "shape-2-80", _MALFORMED, _shapes(w=op.size(1 << 80), b=op.size(3)), why="no dimension has so many elements: the metadata is malformed"),
    Entry(112, "shape-product-2-62", "checkpoint.too_large", _shapes(w=op.size(1 << 40, 1 << 40), b=op.size(3))),
    Entry(112, "shape-65-dims", _MALFORMED, _shapes(w=op.size(*[1] * 65), b=op.size(3)), why="as above"),
    Entry(113, "partition-short", _COVERAGE, _flat_of(1, 4)),
    Entry(113, "partition-long", _COVERAGE, _flat_of(1, 80)),
    Entry(113, "first-partition-short", _COVERAGE, _flat_of(0, 4)),
    Entry(113, "partition-empty", _COVERAGE, _flat_of(1, 0)),
    _ranks(113, "states-of-no-group", _MALFORMED, lambda s, _: s["base_optimizer_state"]["state"].update({7: {}}), why="states of a group that does not exist are malformed, not uncovered"),
    _ranks(113, "group-of-no-parameters", _MALFORMED, lambda s, _: s["base_optimizer_state"]["param_groups"][0].update(params=[]), why="as above"),
    *(
        Entry(114, f"optimizer-state-{label}", "name.invalid", ranked(_state_named(name)))
        for label, name in {"parent": "../../../../w", "absolute": "/tmp/w", "slash": "a/b", "taken": "fp32", "nul": "a\0", "long": "x" * 300}.items()
    ),
    Entry(114, "universal-good", OK, _universal(lambda files: None)),
    Entry(114, "universal-name-parent", "name.invalid", _universal(lambda files: files.update({MODEL: _renamed_model("../../w")}))),
    Entry(114, "universal-folder-right-to-left", "name.invalid", _atom("zero/w\u202e/fp32.pt", {"param": carriers.f32("0", 4, 3)})),
    Entry(114, "universal-file-taken", "name.invalid", _atom("zero/w/a b.pt", {"param": carriers.f32("0", 4, 3)})),
    Entry(114, "universal-stranger", _MIXED, _atom("zero/other/fp32.pt", {"param": carriers.f32("0", 4, 3)})),
    Entry(114, "universal-atom-of-another-shape", _MIXED, _atom("zero/w/fp32.pt", {"param": carriers.f32("0", 3, 4)})),
    Entry(114, "universal-atom-is-number", _MALFORMED, _atom("zero/w/fp32.pt", 3)),
    Entry(114, "universal-atom-of-hostile-keys", "source.unsupported", _atom("zero/w/fp32.pt", {"param": carriers.f32("0", 4, 3), "../../w": 1})),
    Entry(114, "universal-atom-that-calls", CALL, _atom("zero/w/fp32.pt", {"param": carriers.f32("0", 4, 3), "x": op.call(SYSTEM, COMMAND)}), inspect="source.unsupported"),
    Entry(114, "universal-step-is-text", _MALFORMED, _atom("zero/w/step.pt", "three")),
    Entry(114, "universal-atom-missing", _INCOMPLETE, _universal(lambda files: files.pop("zero/w/fp32.pt"))),
    Entry(114, "universal-optimizer-missing", _INCOMPLETE, _universal(lambda files: files.pop("zero/optimizer_state.pt"))),
    Entry(116, "patterns-catastrophic", OK, edited(_patterns), why="patterns of the source are matched in linear time"),
    Entry(117, "names-by-case", OK, _named("W", "w"), why="names are never changed, and every place that we write to tells case apart"),
    Entry(117, "names-by-normal-form", OK, _named("\u00e9", "e\u0301"), why="as above"),
    Entry(117, "name-twice-in-two-groups", _AMBIGUOUS, carriers.entry("param_shapes", [op.ordered({"w": op.size(4, 3), "b": op.size(3)}), op.ordered({"w": op.size(4, 3)})])),
    Entry(117, "name-below-another", "name.invalid", _named("a", "a/fp32.pt"), inspect=OK),
    Entry(118, "target-in-source", "request.overlap", carriers.plain, inspect=OK, target=f"source/{TAG}/out"),
    Entry(118, "target-is-source", "request.overlap", carriers.plain, inspect=OK, target=f"source/{TAG}"),
    Entry(118, "source-in-target", "request.overlap", carriers.plain, inspect=OK, target="."),
    Entry(121, "object-replaced-mid-job", "source.changed", carriers.plain, inspect=OK, tamper=f"{TAG}/{OPTIM[1]}"),
    Entry(121, "model-states-replaced-mid-job", "source.changed", carriers.plain, inspect=OK, tamper=f"{TAG}/{MODEL}"),
    Entry(122, "scripts-in-the-directory", OK, edited(_script)),
    Entry(122, "nothing-at-all", "source.not_found", _empty),
)  # fmt: skip
