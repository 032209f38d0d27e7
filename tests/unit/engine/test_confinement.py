"""An engine with roots reads nothing outside of them: not behind a link, and not above its source."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from house.saves import make_save
from reshard.choices import TargetFormat
from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest
from reshard.options import RunLayout, SourceSpec
from reshard_engine.formats.peft.adapter_config import adapter_files
from reshard_engine.operations.conversion import Conversion
from reshard_engine.storage.local import LocalStore
from reshard_engine.storage.protocol import read_bytes
from reshard_engine.storage.urls import confine
from reshard_engine.tensors.layout import Pointer


@pytest.fixture
def root(tmp_path: Path) -> Generator[Path]:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "elsewhere").mkdir()
    yield tmp_path / "root"
    confine(())


def test_links_lead_nowhere_else(root: Path) -> None:
    (root / "file").write_bytes(b"own")
    (root / "own").symlink_to(root / "file")
    (root / "foreign").symlink_to(root.parent / "secret")
    (root / "directory").symlink_to(root.parent / "elsewhere")
    store = LocalStore()
    confine([str(root)])
    read = {os.path.basename(info.path): info for info in store.list_directory(str(root)).files}
    assert read_bytes(store, read["file"]) == read_bytes(store, read["own"]) == b"own"
    with pytest.raises(RequestError, match=r"request\.root_forbidden"):
        read_bytes(store, read["foreign"])
    for outside in (root / "directory", root.parent, root.parent / "elsewhere"):
        with pytest.raises(RequestError, match=r"request\.root_forbidden"):
            store.list_directory(str(outside))
    # A link that is changed after it was listed.
    (root / "own").unlink()
    (root / "own").symlink_to(root.parent / "secret")
    with pytest.raises(RequestError, match=r"request\.root_forbidden"):
        read_bytes(store, read["own"])
    confine(())
    assert read_bytes(store, read["foreign"]) == b"secret"


def test_latest_is_not_written_above_the_places_that_may_be_written(root: Path) -> None:
    """A tag may have slashes: where a target ends with it, the save directory lies further up."""
    make_save(root / "run" / "saves")
    os.renames(root / "run" / "saves" / "global_step3", root / "run" / "saves" / "out" / "x")
    (root / "run" / "saves" / "latest").write_text("out/x")

    def prepared(source: Path) -> Conversion:
        layout = RunLayout(dp=3)
        target, spec = str(root / "run" / "out" / "x"), SourceSpec(url=str(source))
        return Conversion.prepare(ConvertRequest(source=spec, target=target, to=TargetFormat.ZERO, layout=layout))

    confine([str(root)], [str(root / "run")])
    assert prepared(root / "run" / "saves").layout.pointer == Pointer("latest", b"out/x")
    assert Pointer("latest", b"out/x").directory(str(root / "run" / "out" / "x")) == str(root / "run")
    confine([str(root)], [str(root / "run" / "out")])
    with pytest.raises(RequestError, match=r"request\.root_forbidden: .* its save directory: .*/run is outside"):
        prepared(root / "run" / "saves")
    # The tag directory itself tells no tag: `latest` lies beside the target.
    assert prepared(root / "run" / "saves" / "out" / "x").layout.pointer == Pointer("latest", b"x")


def test_an_adapters_configuration_above_the_root_is_not_read(root: Path) -> None:
    (root / "tag").mkdir()
    (root.parent / "adapter_config.json").write_bytes(b"above")

    def found(source: Path) -> Any:
        request = ConvertRequest(source=SourceSpec(url=str(source)), target="/out", to=TargetFormat.PEFT)
        return adapter_files(cast("Any", SimpleNamespace(url=str(source))), request)

    assert found(root) == {"adapter_config.json": b"above"}
    confine([str(root)])
    assert found(root) == {}
    (root / "adapter_config.json").write_bytes(b"own")
    assert found(root / "tag") == {"adapter_config.json": b"own"}
