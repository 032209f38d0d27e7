"""What DeepSpeed's files and keys are called stands in its own package, and nowhere else in the engine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from house.repository import ROOT

ENGINE = ROOT / "worker" / "reshard_engine"
OWN = ("formats/deepspeed/", "testing/")
OF_OTHERS = {
    # Names of the Trainer, of torchtitan and of Lightning, too.
    "formats/dcp/reader/trainer_files.py": {
        "global_step",
        "lr_schedulers",
        r"(?:rng_state|random_states)(?:_(\d{1,7}))?\.(?:pth|pkl)",
    },
    "formats/dcp/writer/writer.py": {
        *("global_step", "lr_schedulers", "rng_state", ".pth"),
        *("lr_scheduler", "lr_scheduler_", "lr_scheduler[", "skipped_steps"),
    },
    # Names of verl's and SkyRL's extra state, too.
    "formats/fsdp_ranks/format.py": {"lr_scheduler", "client_state"},
    # Names of Megatron-LM and of verl, too.
    "formats/sources.py": {r"mp_rank_\d+(_\d+)?(_\d+)?", r"global_step_\d+"},
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
