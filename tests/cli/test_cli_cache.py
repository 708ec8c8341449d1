"""`gristmill cache export|import|verify`, as a user types them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.cli.app import app
from gristmill.jit import bundle, cache, entry, nvrtc
from gristmill.jit.binary import Binary
from gristmill.jit.program import Program
from gristmill.log import forget_warnings
from gristmill.select.device import KNOWN
from gristmill.select.table import Table
from gristmill.select.tables import reset_tables, table_name, tables_for, user_table_path
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
    for command in ("import", "verify"):
        said = gristmill("cache", command, path, code=1).replace("\n", " ")
        assert "or not the one that its name says" in said


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
    assert "is not a kernel, or not the one that its name says" in said
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
        assert "not a regular file" in gristmill("cache", "export", place, code=2)
    assert (tmp_path / "pipe").is_fifo()


# ---- files from elsewhere ----

H200_TABLE = {"schema": 3, "gpu": H200.name, "arch": H200.arch, "multiprocessors": 132, "rows": []}
# Other tables are in tests/select/test_select_table_files.py.
BAD_TABLES = {
    "not JSON": (b"{", "is not JSON"),
    "large": (random.Random(0).randbytes(9 << 20).hex().encode(), "more than 16777216"),
    "a terminal's": (json.dumps({**H200_TABLE, "gpu": "\x1b[31m"}).encode(), r"'\x1b[31m'"),
    "of another GPU": (json.dumps({**H200_TABLE, "gpu": "a GPU"}).encode(), "a-gpu.json"),
}


@pytest.mark.parametrize(("content", "words"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_bundle_with_a_bad_table_is_not_imported(
    content: bytes, words: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, name = tmp_path / "tables.bundle", table_name(H200)
    kernels = [(file.name, file.read_bytes()) for file in (home / "kernels").glob("*.kernel")]
    bundle.write(path, kernels, [(name, content)])
    elsewhere(monkeypatch, tmp_path / "other")
    for command in ("import", "verify"):
        said = gristmill("cache", command, path, code=1).replace("\n", " ")
        assert f"{path}: tables/{name}: " in said
        assert words in said
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("content", "words"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_bad_table_of_the_user_is_named_and_not_exported(
    content: bytes, words: str, home: Path, tmp_path: Path
) -> None:
    (home / "tables").mkdir(mode=0o700)
    name = table_name(H200)
    (home / "tables" / name).write_bytes(content)
    (home / "tables" / name).chmod(0o600)
    said = gristmill("cache", "verify", code=1)
    assert "4 programs, 1 problem" in said
    assert name in said
    assert words in said
    said = gristmill("cache", "export", tmp_path / "a.bundle")
    assert f"left out: table {name}" in said
    assert "4 programs and 0 tables" in said


def test_a_folder_in_the_place_of_a_kernel_stops_an_import_before_it_begins(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gristmill("cache", "export", tmp_path / "a.bundle")
    last = max((home / "kernels").glob("*.kernel")).name
    elsewhere(monkeypatch, tmp_path / "other")
    (tmp_path / "other" / "kernels" / last).mkdir(parents=True)
    for place in (tmp_path / "other", tmp_path / "other" / "kernels"):
        place.chmod(0o700)
    said = gristmill("cache", "import", tmp_path / "a.bundle", code=1).replace("\n", " ")
    assert f"kernels/{last}: " in said
    assert "is a folder" in said
    assert [one.name for one in (tmp_path / "other" / "kernels").iterdir()] == [last]


def test_an_export_leaves_out_what_is_not_a_file(home: Path, tmp_path: Path) -> None:
    (home / "tables").mkdir(mode=0o700)
    os.mkfifo(home / "tables" / "a.json", 0o600)
    said = gristmill("cache", "export", tmp_path / "a.bundle")
    assert "left out: table a.json: " in said
    assert "not a regular file" in said
    assert "4 programs and 0 tables" in said


def test_verify_of_a_folder_names_files_of_another_kind(home: Path) -> None:
    (home / "tables").mkdir(mode=0o700)
    os.mkfifo(home / "tables" / "a.json", 0o600)
    os.mkfifo(home / "kernels" / "a.kernel", 0o600)
    said = gristmill("cache", "verify", code=1)
    for name in ("a.json", "a.kernel"):
        assert re.search(rf"{home}: (table )?{name}: cannot be read .*not a regular file", said)


@pytest.mark.parametrize("kind", ["pipe", "zeros", "large"])
@pytest.mark.parametrize("words", [("import",), ("import", "--sha256", "0" * 64), ("verify",)])
def test_what_is_no_bundle_is_not_read_to_its_end(
    kind: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("/dev/zero") if kind == "zeros" else tmp_path / "a.bundle"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        path.touch(0o600)
        os.truncate(path, 100 * 2**30)  # takes no room on the disk
    elsewhere(monkeypatch, tmp_path / "other")
    said = gristmill("cache", words[0], path, *words[1:], code=1)
    assert str(path) in said
    assert not (tmp_path / "other").exists()


def test_ls_takes_nothing_for_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = cache.entries()[0]
    odd = entry.Entry(kept.entry.key, source="[/a]", names=("[b]",), arch="[/c]", compiler="[d]")
    monkeypatch.setattr(cache, "entries", lambda: [dataclasses.replace(kept, entry=odd)])
    said = gristmill("cache", "ls")
    assert all(word in said for word in ("[/a]", "[b]", "[/c]", "[d]"))


def test_a_folder_that_is_not_utf_8_is_shown(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gristmill", "cache", "ls"],
        env={
            **os.environ,
            "GRISTMILL_CACHE_DIR": str(tmp_path / "a\udcff"),
            "PYTHONIOENCODING": "utf-8:strict",
        },
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(rb"a\udcff/kernels" + os.linesep.encode())
