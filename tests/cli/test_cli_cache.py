"""`gristmill cache export|import|verify`, as a user types them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.cli.app import app
from gristmill.jit import bundle, cache, nvrtc
from gristmill.jit.binary import Binary
from gristmill.jit.program import Program
from gristmill.log import forget_warnings
from gristmill.select.device import KNOWN
from gristmill.select.table import Table
from gristmill.select.tables import reset_tables, tables_for, user_table_path
from gristmill.settings import reload_settings

NORM = Program("norm.cu", ("norm_forward<A>",))
SOFTMAX = Program("softmax.cu", ("softmax_forward<A>",))
H200 = KNOWN["sm_90a"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with four kernels in it, by a compiler that knows every kernel."""
    path = tmp_path / "cache"
    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(path))
    reload_settings()
    _forget()

    def compile_program(program: Program, arch: str) -> Binary:
        return Binary(
            f"{program.source} {arch}".encode(), {program.names[0]: "_Z"}, "", "nvrtc 13.0"
        )

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compile_program", compile_program)
        patch.setattr(nvrtc, "compiler_version", lambda: "nvrtc 13.0")
        patch.setattr(nvrtc, "headers_version", lambda program: "")
        for program in (NORM, SOFTMAX):
            for arch in ("sm_90a", "sm_100a"):
                cache.load_or_compile(program, arch)
    _forget()
    yield path
    monkeypatch.undo()
    reload_settings()
    _forget()


def _forget() -> None:
    cache.forget()
    reset_tables()
    forget_warnings()


def gristmill(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def names(path: Path) -> list[str]:
    with bundle.Bundle.open(path) as opened:
        return sorted(opened.names)


def elsewhere(monkeypatch: pytest.MonkeyPatch, path: Path, **more: str) -> None:
    """As on another machine, where nothing may be compiled."""
    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(path))
    monkeypatch.setenv("GRISTMILL_JIT", "off")
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    reload_settings()
    _forget()


def test_export_and_import(home, tmp_path, monkeypatch) -> None:
    out = gristmill("cache", "export", tmp_path / "all.bundle")
    assert "4 programs and 0 tables" in out
    assert len(names(tmp_path / "all.bundle")) == 4
    elsewhere(monkeypatch, tmp_path / "other")
    assert "4 programs and 0 tables imported into" in gristmill(
        "cache", "import", tmp_path / "all.bundle"
    )
    assert cache.load_or_compile(NORM, "sm_90a").cubin == b"norm.cu sm_90a"
    assert {path.name for path in (tmp_path / "other" / "kernels").iterdir()} == {
        path.name for path in (home / "kernels").iterdir()
    }


def test_export_of_a_part(tmp_path) -> None:
    gristmill("cache", "export", tmp_path / "a", "--arch", "sm_90a")
    assert [name.split("-")[0] for name in names(tmp_path / "a")] == [
        "kernels/norm",
        "kernels/softmax",
    ]
    gristmill("cache", "export", tmp_path / "b", "--source", "soft*", "--arch", "sm_100a")
    (name,) = names(tmp_path / "b")
    assert name.startswith("kernels/softmax-sm_100a-")
    where = tmp_path / "no_such_folder"
    assert f"there is no folder {where}" in gristmill("cache", "export", where / "d", code=2)
    out = gristmill("cache", "export", tmp_path / "c", "--arch", "sm_80", code=1)
    assert "holds no such kernel" in out
    assert not (tmp_path / "c").exists()


def test_tables_travel_and_take_part(home, tmp_path, monkeypatch) -> None:
    table = user_table_path(H200)
    assert table is not None
    Table.for_device(H200).save(table)
    gristmill("cache", "export", tmp_path / "without", "--no-tables")
    assert not any(name.startswith("tables/") for name in names(tmp_path / "without"))
    assert "and 1 table," in gristmill("cache", "export", tmp_path / "with")
    elsewhere(monkeypatch, tmp_path / "o1", GRISTMILL_CACHE_LAYERS=str(tmp_path / "with"))
    assert [source.label for source in tables_for(H200)][:2] == [
        "tuning of this process",
        "table of a layer",
    ]
    elsewhere(monkeypatch, tmp_path / "o2", GRISTMILL_CACHE_LAYERS="")
    gristmill("cache", "import", tmp_path / "with")
    assert [source.label for source in tables_for(H200)][1] == "user table"
    # What this machine has measured itself is worth more.
    (tmp_path / "o2" / "tables" / table.name).write_text("mine")
    assert "stays as it is" in gristmill("cache", "import", tmp_path / "with")
    assert (tmp_path / "o2" / "tables" / table.name).read_text() == "mine"


def test_a_layer_is_shown_and_serves(home, tmp_path, monkeypatch) -> None:
    gristmill("cache", "export", tmp_path / "all.bundle")
    layers = os.pathsep.join([str(tmp_path / "all.bundle"), str(home), str(tmp_path / "gone")])
    elsewhere(monkeypatch, tmp_path / "other", GRISTMILL_CACHE_LAYERS=layers)
    out = gristmill("cache", "ls").replace("\n", "")
    assert f"4 programs in layer {tmp_path / 'all.bundle'}" in out
    assert f"4 programs in layer {home}" in out
    assert f"{tmp_path / 'gone'}: is not there" in out
    found = json.loads(gristmill("cache", "ls", "--json"))
    assert [layer["kernels"] for layer in found["layers"]] == [4, 4, 0]
    assert cache.load_or_compile(SOFTMAX, "sm_100a").cubin == b"softmax.cu sm_100a"


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_nothing_of_a_damaged_bundle_is_imported(at, tmp_path, monkeypatch) -> None:
    path = tmp_path / "all.bundle"
    gristmill("cache", "export", path)
    content = bytearray(path.read_bytes())
    with bundle.Bundle.open(path) as opened:
        members = list(opened._members.values())
    member = members[int(at * len(members))]
    content[member.at + member.packed // 2] ^= 1
    path.write_bytes(content)
    elsewhere(monkeypatch, tmp_path / "other")
    out = gristmill("cache", "import", path, code=1)
    assert "is not what the manifest says" in out.replace("\n", " ")
    assert not (tmp_path / "other").exists()
    assert "1 problem\n" in gristmill("cache", "verify", path, code=1)


def test_a_kernel_under_another_name_is_not_imported(home, tmp_path, monkeypatch) -> None:
    """Every hash is right, but the file is not what it is called."""
    files = sorted((home / "kernels").iterdir())
    path = tmp_path / "swapped.bundle"
    bundle.write(path, [(files[0].name, files[1].read_bytes())])
    elsewhere(monkeypatch, tmp_path / "other")
    assert "or another one" in gristmill("cache", "import", path, code=1).replace("\n", " ")
    assert "or another one" in gristmill("cache", "verify", path, code=1).replace("\n", " ")


def test_what_others_could_have_written_needs_its_hash(tmp_path, monkeypatch) -> None:
    path = tmp_path / "all.bundle"
    out = gristmill("cache", "export", path)
    digest = out.split("sha256 ")[1].split()[0]
    path.chmod(0o666)
    elsewhere(monkeypatch, tmp_path / "other")
    assert "can be written to by others" in gristmill("cache", "import", path, code=1).replace(
        "\n", " "
    )
    wrong = gristmill("cache", "import", path, "--sha256", "0" * 64, code=1)
    assert digest in wrong.replace("\n", "")
    assert not (tmp_path / "other").exists()
    assert "4 programs" in gristmill("cache", "import", path, "--sha256", digest.upper())


def test_verify(home, tmp_path) -> None:
    assert "4 programs, 0 problems" in gristmill("cache", "verify")
    files = sorted((home / "kernels").iterdir())
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].chmod(0o666)
    part = home / "kernels" / f".{files[2].name}.abc.part"
    part.touch()
    os.utime(part, (0, 0))
    out = gristmill("cache", "verify", code=1)
    assert f"{files[0].name}: is damaged" in out
    assert f"{files[1].name}: cannot be read" in out
    assert f"{part.name}: was left by a writer that was killed" in out
    assert "4 programs, 3 problems" in out
    (home / "kernels").chmod(0o777)
    assert "is not used" in gristmill("cache", "verify", home, code=1)
    assert "is not there" in gristmill("cache", "verify", tmp_path / "nothing", code=1)


def test_without_a_folder_there_is_nothing_to_export(home, tmp_path) -> None:
    (home / "kernels").chmod(0o777)
    for words in (("export", tmp_path / "x"), ("import", tmp_path / "x")):
        out = gristmill("cache", *words, code=1)
        assert "can be written to by others" in out.replace("\n", " ")


def test_files_under_names_of_somebodys_own_are_in_no_bundle(home: Path, tmp_path: Path) -> None:
    first = next((home / "kernels").glob("*.kernel"))
    for name in ("a copy (1).kernel", "copy.kernel"):
        first.with_name(name).write_bytes(first.read_bytes())
        first.with_name(name).chmod(0o600)
    (home / "tables").mkdir(mode=0o700)
    (home / "tables" / "old table.json").write_text("{}")
    path = tmp_path / "some.bundle"
    assert "4 programs and 0 tables" in gristmill("cache", "export", path)
    assert len(names(path)) == 4


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    said = gristmill("cache", "import", tmp_path / "none.bundle", code=1)
    assert said.count("\n") == 1
    assert "none.bundle" in said


def test_verify_says_all_that_is_wrong_with_a_bundle(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.bundle"
    files = sorted((home / "kernels").glob("*.kernel"))
    bundle.write(path, [(files[0].name, files[1].read_bytes())])
    path.chmod(0o666)
    said = gristmill("cache", "verify", path, code=1)
    assert "holds no kernel, or another one" in said
    assert "can be written to by others" in said


def test_ls_shows_whole_names(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two kernels may differ in the last letter only."""
    name = f"norm_forward<{'A' * 300},Z>"
    kept = cache.entries()[0]
    long = dataclasses.replace(kept, entry=dataclasses.replace(kept.entry, names=(name,)))
    monkeypatch.setattr(cache, "entries", lambda: [long])
    text = re.sub(r"[│\s]", "", gristmill("cache", "ls"))
    assert text.count("A") == 300
    assert "…" not in text
    assert "1program,0.0MB" in text


def test_a_bundle_takes_the_place_of_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        assert "no plain file" in gristmill("cache", "export", place, code=2)
    assert (tmp_path / "pipe").is_fifo()
