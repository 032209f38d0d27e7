"""What the command line says: one unit family, one meaning of a path, and no words of libraries."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

import pytest
import torch

from house.promises import command
from house.saves import DATA
from reshard.errors import counted

SOURCE = str(DATA / "zero2_tiny")


def test_verify_follows_latest_as_inspect_and_diff_do(tmp_path: Path) -> None:
    save = tmp_path / "run2"
    target = str(save / "global_step3")
    assert command("convert", SOURCE, target, "--to", "zero", "--dp", "3", "-q")[0] == 0
    assert command("inspect", str(save))[0] == 0
    assert command("diff", str(save), SOURCE, "-q")[0] == 0
    code, told, said = command("verify", str(save))
    assert code == 0, said
    assert told.startswith("ok: ")
    assert command("verify", target)[0] == 0
    (save / "latest").write_text("global_step4")
    code, _, said = command("verify", str(save))
    assert code == 3
    assert "global_step3" in said  # what is there


@pytest.mark.parametrize(("to", "name"), [("safetensors", "model.safetensors"), ("torch", "pytorch_model.bin")])
def test_a_target_that_is_named_as_a_file_says_that_it_is_a_directory(to: str, name: str, tmp_path: Path) -> None:
    code, _, said = command("convert", SOURCE, str(tmp_path / f"x{Path(name).suffix}"), "--to", to)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert f"name the directory {tmp_path}/x:" in said
    assert command("convert", SOURCE, str(tmp_path / "x"), "--to", to, "-q")[0] == 0
    assert (tmp_path / "x" / name).is_file()


def test_a_path_without_anything_is_not_found(tmp_path: Path) -> None:
    code, _, said = command("verify", str(tmp_path / "nothing"))
    assert (code, "source.not_found" in said) == (3, True)


def test_every_size_is_of_one_family() -> None:
    client = Path(__file__).parents[2] / "client"
    decimal = re.compile(r"TransferSpeedColumn|DownloadColumn|filesize\.decimal|\} ?[kMGT]B\b")
    found = [
        f"{p.name}:{n}"
        for p in client.rglob("*.py")
        for n, t in enumerate(p.read_text().splitlines(), 1)
        if decimal.search(t)
    ]
    assert found == []


# -- words of libraries ---------------------------------------------------------------------------------------------

_LIBRARY = re.compile(
    r"Value error|Input should|String should|valid dictionary|\[Errno|Traceback|pydantic|internal\.error|"
    r"\b[A-Z][A-Za-z]+(Error|Exception)\b|max_shard_bytes|part_bytes|memory_limit_bytes|lora_alpha:|source\.url"
)
ODD: tuple[tuple[str, ...], ...] = (
    ("inspect", ""),
    ("inspect", "hf://x"),
    ("inspect", "s3://"),
    ("inspect", "foo://x/y"),
    ("inspect", "{file}"),
    ("inspect", "{empty}"),
    ("inspect", "{source}", "--tag", ""),
    ("inspect", "{source}", "--tag", "nope"),
    ("inspect", "{source}", "--tag", "../x"),
    ("inspect", "{source}", "--tensor", "nope"),
    ("inspect", "{source}", "--svg", "{empty}"),
    ("inspect", "a\0b"),
    ("inspect", "x" * 5000),
    ("inspect", "{source}", "--nope"),
    ("inspect",),
    ("convert", "{source}", "", "--to", "universal"),
    ("convert", "{source}", "{file}/x", "--to", "universal"),
    ("convert", "{source}", "{file}", "--to", "universal"),
    ("convert", "{source}", "hf://x/y", "--to", "universal"),
    ("convert", "{source}", "/", "--to", "universal"),
    ("convert", "{source}", "/proc/x", "--to", "universal"),
    ("convert", "{source}", "{empty}/" + "x" * 300, "--to", "universal"),
    ("convert", "{source}", "{empty}/o", "--to", "nope"),
    ("convert", "{source}", "{empty}/o"),
    ("convert", "{source}", "{empty}/o", "--to", "zero"),
    ("convert", "{source}", "{empty}/o", "--to", "zero", "--dp", "0"),
    ("convert", "{source}", "{empty}/o", "--to", "zero", "--dp", "x"),
    ("convert", "{source}", "{empty}/o", "--to", "zero", "--dp", "99999999999"),
    ("convert", "{source}", "{empty}/o", "--to", "safetensors", "--max-shard-size", "0"),
    ("convert", "{source}", "{empty}/o", "--to", "safetensors", "--part-size", "1"),
    ("convert", "{source}", "{empty}/o", "--to", "safetensors", "--memory-limit", "0"),
    ("convert", "{source}", "{empty}/o", "--to", "peft", "--lora-alpha", "nan"),
    ("convert", "{source}", "{empty}/o", "--to", "peft", "--lora-alpha", "0"),
    ("convert", "{source}", "{empty}/o", "--to", "peft", "--adapter", ""),
    ("convert", "{source}", "{empty}/o", "--to", "safetensors", "--model-files", ""),
    ("convert", "{source}", "{empty}/o", "--to", "safetensors", "--model-files", "hf://x"),
    ("convert", "{source}", "{empty}/o", "--to", "safetensors", "--merge-adapter", "--base", ""),
    ("convert", "{source}", "{empty}/o", "--to", "universal", "--rules", "{empty}"),
    ("convert", "{source}", "{empty}/o", "--to", "universal", "--rules", "{empty}/none"),
    ("convert", "{source}", "{empty}/o", "--to", "universal", "--rules", "{binary}"),
    ("convert", "{source}", "{empty}/o", "--to", "universal", "--threads", "-1"),
    ("plan", "{source}", "{empty}/o", "--to", "universal", "--memory-limit", "-5"),
    ("verify", ""),
    ("verify", "{file}"),
    ("verify", "hf://x"),
    ("verify", "{source}", "--sample", "nan%"),
    ("diff", "{source}", ""),
    ("diff", "{source}", "{empty}/none"),
    ("diff", "{source}", "{source}", "--tag-a", "nope"),
    ("ensure", "", "--dp", "2"),
    ("ensure", "hf://x", "--dp", "2"),
    ("ensure", "{source}", "--dp", "0"),
    ("ensure", "{source}", "--dp", "2", "--timeout", "nan"),
    ("ensure", "{source}", "--dp", "2", "--rules", "{empty}"),
    ("mount", "", "{empty}/o", "--to", "universal"),
    ("mount", "{source}", "{empty}/none/o", "--to", "universal"),
    ("mount", "{source}", "{file}", "--to", "universal"),
    ("slim", "", "{empty}/o"),
    ("slim", "{source}", ""),
    ("slim", "{empty}/none", "{empty}/o"),
    ("clean", ""),
    ("clean", "hf://x/y"),
    ("zero-to-fp32", "", "{empty}/o"),
    ("zero-to-fp32", "{source}", "{file}"),
    ("zero-to-torch", "{source}", "{empty}/o", "--dtype", "x"),
    ("ds-to-universal", "--input_folder", "", "--output_folder", "{empty}/o"),
    ("ds-to-universal", "--input_folder", "{source}", "--output_folder", ""),
    ("jobs", "list", "--limit", "0"),
    ("jobs", "show", ""),
    ("submit", "{source}", "{empty}/o", "--to", "universal"),
    ("serve", "--port", "99999"),
    ("serve", "--port", "0", "--log-level", "x"),
    ("serve", "--port", "0", "--data-dir", "{file}"),
    ("worker",),
    ("nope",),
    ("--nope",),
)


@pytest.mark.parametrize("words", ODD, ids=lambda words: " ".join(words).replace("\0", "NUL")[:60])
def test_odd_input_is_answered_in_our_own_words(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESHARD_URL", raising=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    shutil.copytree(SOURCE, tmp_path / "source")  # some commands make a directory in it
    places = {name: str(tmp_path / name) for name in ("empty", "file", "binary", "source")}
    code, _, said = command(*(word.format(**places) if "{" in word else word for word in words))
    assert code not in (0, 1), said
    errors = [line for line in said.splitlines() if line.startswith(("error: ", "fix: "))]
    assert len(errors) == 2, said
    assert not _LIBRARY.search(said.replace(str(tmp_path), "")), said


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, said = command("serve", "--port", port, "--data-dir", str(tmp_path))
    assert code == 5
    assert "service.port_in_use" in said
    assert port in said
    assert "--port 0" in said


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model.pt"], "Megatron-LM"),
        (["mp_rank_00_000/model.pt", "mp_rank_00_001/model.pt"], "Megatron-LM"),
    ],
)
def test_other_frameworks_are_recognised(files: list[str], kind: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for words in (["inspect"], ["diff", SOURCE], ["convert", "--to", "universal", str(tmp_path / "out")]):
        place = [words[0], str(tmp_path), *words[1:]]
        code, _, said = command(*place)
        assert code == 8, said
        assert "source.unsupported" in said
        assert kind in said
        assert "recognised, not supported yet" in said


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (0, ("file",), "0 files"),
        (1, ("file",), "1 file"),
        (4096, ("element",), "4,096 elements"),
        (1, ("entry", "entries"), "1 entry"),
        (2, ("entry", "entries"), "2 entries"),
    ],
)
def test_a_number_has_its_noun(count: int, words: tuple[str, ...], said: str) -> None:
    assert counted(count, *words) == said


def test_one_is_never_many(tmp_path: Path) -> None:
    """A checkpoint of one file with one tensor of one element, through every command that counts."""
    said = ""
    for name, value in (("a", 1.0), ("b", 1e30)):
        (tmp_path / name).mkdir()
        torch.save({"bias": torch.full((1,), value)}, tmp_path / name / "pytorch_model.bin")
    a, b, out = (str(tmp_path / name) for name in ("a", "b", "out"))
    for words in (
        ("inspect", a, "--all"),
        ("plan", b, out, "--to", "safetensors"),
        ("convert", b, out, "--to", "safetensors", "--dtype", "fp16"),
        ("verify", out),
        ("verify", out, "--sample", "100%"),
        ("diff", a, b),
        ("inspect", a, "--files"),
        ("inspect", str(tmp_path)),
    ):
        said += "".join(command(*words)[1:])
    assert "1 file" in said
    assert "1 element" in said
    assert "1 tensor differs" in said
    assert re.findall(r"(?<![\d.,/-])1 [a-z-]{2,}s\b", said) == []
