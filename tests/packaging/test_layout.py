"""pyproject.toml, the folders and the installed distribution say the same."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from house.repository import ROOT, SOURCE_ROOTS, packages_on_disk, pyproject


def test_the_wheel_lists_the_packages_that_are_there() -> None:
    listed = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(listed) == packages_on_disk()


def test_boundaries_know_every_package() -> None:
    named = pyproject()["tool"]["importlinter"]["root_packages"]
    assert sorted(named) == sorted(path.split("/")[1] for path in packages_on_disk())


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_a_source_root_is_no_package(root: str) -> None:
    # All three roots are on sys.path: `worker/utils.py` would be `import utils`.
    assert [path.name for path in (ROOT / root).glob("*.py")] == []


@pytest.mark.parametrize(
    ("group", "names"), [("reshard.engine", {"local"}), ("reshard.commands", {"db", "gc", "serve", "worker"})]
)
def test_entry_points_resolve(group: str, names: set[str]) -> None:
    found = entry_points(group=group)
    assert {point.name for point in found} == names
    for point in found:
        assert point.load() is not None


def test_the_lower_bounds_are_pinned() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = pyproject()["project"]
    wanted = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    names = {text.split(";")[0].split("[")[0].split(">")[0].strip().lower().replace("_", "-") for text in wanted}
    assert names - {"reshard"} - pinned == set()


# What DeepSpeed's files and keys are called stands in its own package, and nowhere else in the engine.


ENGINE = ROOT / "worker" / "reshard_engine"
OWN = ("formats/deepspeed/", "testing/")
OF_OTHERS = {
    # Names of the Trainer, of torchtitan and of Lightning, too.
    "formats/trainer_files.py": {
        "global_step",
        "lr_schedulers",
        r"(?:rng_state|random_states)(?:_(\d{1,7}))?\.(?:pth|pkl)",
    },
    "formats/dcp/writer/writer.py": {
        *("global_step", "lr_schedulers", "rng_state", ".pth"),
        *("lr_scheduler", "lr_scheduler_", "lr_scheduler[", "skipped_steps"),
    },
    # Names of Lightning and of usual scripts, too.
    "formats/dcp/state_tree.py": {"lr_scheduler", "lr_schedulers"},
    # Names of verl's and SkyRL's extra state, too.
    "formats/fsdp_ranks/files.py": {"lr_scheduler", "client_state"},
    # Names of Megatron-LM, too.
    "formats/megatron/common.py": {"checkpoint_version"},
    "formats/megatron/across.py": {
        *("clip_grad", "lr_scheduler", "checkpoint_version", "padded_vocab_size"),
        r"(?:tied_modules\.embed|1)\.((?:word|position)_embeddings\.weight)",
    },
    "formats/megatron/placement.py": {"mp_rank_"},
    "formats/megatron/ranks_writer.py": {"padded_vocab_size"},
    # Names of Lightning and of Megatron-LM, too.
    "formats/full_state_dict/files.py": {"global_step", "checkpoint_version"},
    # The usual name of an item of torch_checkpointing, too.
    "formats/torch_checkpointing/writer.py": {"lr_scheduler"},
    # Names of Megatron-LM, of verl and of SkyRL, too.
    "formats/sources.py": {
        r"mp_rank_\d+(_\d+)?(_\d+)?",
        *(r"global_step_\d+", "global_step_", "latest_ckpt_global_step.txt"),
    },
    # The name of a counter in the model of a checkpoint, too.
    "operations/proof/fingerprint.py": {"skipped_steps"},
    # Names of Megatron-core, too.
    "formats/megatron/legacy.py": {
        *("checkpoint_version", "mp_rank_"),
        r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?",
    },
    "formats/megatron/model.py": {"padded_vocab_size", "rng_state"},
    "pickles/policy.py": {  # the reviewed allow-list is one list
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    },
}
NAMES = re.compile(
    r"_states\.pt|mp_rank_|zero_pp_rank|optim_states|latest_universal|universal_checkpoint_info|param_shapes|ds_config"
    r"|ds_version|frozen_param|frozen_param_fragments|rng_state|lr_scheduler|loss_scaler|optimizer_state_dict"
    r"|tied_modules|deepspeed_experts|global_step|dp_world_size|mp_world_size|client_state|single_partition_of_fp32"
    r"|global_samples|skipped_steps|buffer_names|shared_params|autoep|random_ltd|data_sampler|checkpoint_parallel_dim"
    r"|base_optimizer_state|fp32_flat_groups|fp32_groups|clip_grad|partition_count|param_slice_mappings|reshard_layout"
    r"|zero_optimization|padded_vocab_size|checkpoint_version"
)


def strings_of(path: Path) -> Iterator[str]:
    """The strings of a module that are neither documentation nor text for people, which have blanks."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def constants_of(path: Path) -> set[str]:
    """The strings that a module gives names to."""
    assigned = [n.value for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.Assign)]
    values = (v for node in assigned for v in (node.elts if isinstance(node, ast.Tuple) else [node]))
    return {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}


def found(root: Path) -> set[tuple[str, str]]:
    """(module, string) of every name of DeepSpeed's outside its package."""
    return {
        (module, text)
        for path in root.rglob("*.py")
        if not (module := path.relative_to(root).as_posix()).startswith(OWN)
        for text in strings_of(path)
        if NAMES.search(text) and " " not in text and text not in OF_OTHERS.get(module, ())
    }


def test_the_rest_of_the_engine_knows_no_name_of_deepspeeds() -> None:
    assert found(ENGINE) == set()


def test_a_name_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "budget.py").write_text('"""mp_rank_00 is fine here."""\nSUFFIX = "_optim_states.pt"\n')
    assert found(tmp_path) == {("plan/budget.py", "_optim_states.pt")}


def test_a_name_that_has_a_constant_is_not_written_out_again() -> None:
    package = ENGINE / "formats" / "deepspeed"
    names = constants_of(package / "files.py")
    assert {"ds_config", "frozen_param_shapes"} <= names
    others = [p for p in package.rglob("*.py") if p.name != "files.py"]
    twins = {(p.relative_to(package).as_posix(), text) for p in others for text in strings_of(p) if text in names}
    assert twins == set()


# Conversion on a machine without a GPU never imports torch: the CPU image has none.


CHECKPOINT = ROOT / "tests" / "data" / "zero3_tiny"
CODE = """
import sys
sys.modules["torch"] = None
from reshard.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "options", [("universal",), ("safetensors", "--dtype", "bf16"), ("torch", "--dtype", "fp16")], ids=lambda o: o[0]
)
def test_convert_and_verify(tmp_path: Path, options: tuple[str, ...]) -> None:
    target = tmp_path / "out" / "result"
    env = {**os.environ, "RESHARD_DEVICE": "cpu"}
    for arguments in (["convert", str(CHECKPOINT), str(target), "--to", *options], ["verify", str(target)]):
        done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr


# The first line of each docstring is a whole statement: it ends with a period. How it reads is in CONTRIBUTING.md.


SOURCES = ("client", "service", "worker")


def unfinished_lines(text: str) -> Iterator[tuple[int, str]]:
    """The line number and the first line of each docstring whose first line does not end with a period."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and not docstring.splitlines()[0].endswith("."):
                yield node.body[0].lineno, docstring.splitlines()[0]


def test_first_lines_are_whole_statements() -> None:
    files = [path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))]
    assert len(files) > 100
    wrong = [(str(p), *line) for p in files for line in unfinished_lines(p.read_text(encoding="utf-8"))]
    assert wrong == []


@pytest.mark.parametrize(("first", "wrong"), [("Offsets of records", True), ("Offsets of records.", False)])
def test_an_unfinished_line_is_found(first: str, wrong: bool) -> None:
    text = f'"""A module."""\n\n\nasync def function():\n    """{first}\n\n    More.\n    """\n'
    assert list(unfinished_lines(text)) == ([(5, first)] if wrong else [])
