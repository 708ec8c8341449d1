"""Bundles: what is written is read back, and what was changed since is not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from jit_helpers import ARCH

from gristmill.errors import BundleError
from gristmill.jit import bundle, cache
from gristmill.jit.binary import Binary
from gristmill.jit.bundle import Bundle
from gristmill.jit.entry import encode, file_name


@pytest.fixture
def kernels(make_program) -> list[tuple[str, bytes]]:
    """Three kernels as files: two programs, one of them of two compilers."""
    one, two = make_program(("a",), a__cu="// a\n"), make_program(("b",), b__cu="// b\n")
    made = []
    for program, compiler in ((one, "nvrtc 13.0"), (one, "nvrtc 13.1"), (two, "nvrtc 13.0")):
        binary = Binary(os.urandom(300), {program.names[0]: "_Z"}, "", compiler)
        name = file_name(program.key(ARCH), compiler, "")
        made.append((name, encode(program, ARCH, binary)))
    return made


@pytest.fixture
def written(tmp_path, kernels) -> Path:
    path = tmp_path / "three.bundle"
    bundle.write(path, kernels, [("nvidia-h200.json", b"{}")])
    return path


def test_everything_is_read_back(written, kernels) -> None:
    with Bundle.open(written) as opened:
        assert set(opened.names) == {f"kernels/{name}" for name, _ in kernels} | {
            "tables/nvidia-h200.json"
        }
        for name, content in kernels:
            assert opened.read(f"kernels/{name}") == content
        assert opened.read("tables/nvidia-h200.json") == b"{}"
        assert opened.read("kernels/other.kernel") is None
        key = kernels[0][0].split(".")[0]
        assert {opened.read(name) for name in opened.named(key)} == {kernels[0][1], kernels[1][1]}
        assert opened.manifest["archs"] == [ARCH]
        assert opened.manifest["kernels"] == 3
        assert opened.sha256() == hashlib.sha256(written.read_bytes()).hexdigest()
    assert bundle.damages(written) == []


def test_it_is_a_zip_that_every_tool_reads(written, kernels) -> None:
    with zipfile.ZipFile(written) as archive:
        assert archive.testzip() is None
        manifest = json.loads(archive.read("manifest.json"))
        for name, content in kernels:
            assert archive.read(f"kernels/{name}") == content
            hashed = hashlib.sha256(content).hexdigest()
            assert manifest["files"][f"kernels/{name}"]["sha256"] == hashed


def test_the_same_files_give_the_same_bytes(tmp_path, written, kernels) -> None:
    again = tmp_path / "again.bundle"
    digest = bundle.write(again, reversed(kernels), [("nvidia-h200.json", b"{}")])
    assert again.read_bytes() == written.read_bytes()
    assert digest == hashlib.sha256(again.read_bytes()).hexdigest()


def test_a_write_that_fails_leaves_what_was_there(tmp_path, written) -> None:
    before = written.read_bytes()
    with pytest.raises(TypeError):
        bundle.write(written, [("x.kernel", "not bytes")])  # type: ignore[list-item]
    assert written.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [written.name]


def test_no_changed_byte_is_ever_taken_for_a_kernel(written, kernels, tmp_path) -> None:
    """Each byte of the file in turn: a member reads back as it was, or not at all."""
    content = written.read_bytes()
    expected = dict(kernels)
    changed = tmp_path / "changed.bundle"
    noticed = 0
    for at in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[at] ^= 0x10
        changed.write_bytes(flipped)
        try:
            opened = Bundle.open(changed)
        except BundleError:
            noticed += 1
            continue
        with opened:
            for name in opened.names:
                found = opened.read(name)
                noticed += found is None
                if found is not None and name.startswith("kernels/"):
                    assert found == expected[name.removeprefix("kernels/")]
    assert noticed > len(content) // 6  # the rest are headers of the zip, which nobody reads


@pytest.mark.parametrize("keep", [0, 1, 100, 300, 0.5, -1])
def test_a_cut_file_is_no_bundle(written, keep) -> None:
    content = written.read_bytes()
    size = int(len(content) * keep) if isinstance(keep, float) else keep
    written.write_bytes(content[:size])
    with pytest.raises(BundleError, match=r"three\.bundle: is not a bundle"):
        Bundle.open(written)


def test_a_bundle_that_is_cut_while_open_has_no_kernel(written, kernels) -> None:
    with Bundle.open(written) as opened:
        os.truncate(written, 10)
        assert all(opened.read(name) is None for name in opened.names)


def test_a_bundle_that_is_replaced_while_open_is_still_read(written, kernels, tmp_path) -> None:
    with Bundle.open(written) as opened:
        bundle.write(written, [], [])
        assert opened.read(f"kernels/{kernels[0][0]}") == kernels[0][1]


def test_another_format_is_named(written) -> None:
    content = written.read_bytes()
    written.write_bytes(content.replace(b"gristmill bundle 1 at", b"gristmill bundle 9 at"))
    with pytest.raises(BundleError, match="has format 9, and gristmill"):
        Bundle.open(written)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_bundle_others_can_write_is_refused(written, mode) -> None:
    written.chmod(mode)
    with pytest.raises(BundleError, match="can be written to by others"):
        Bundle.open(written)


def test_a_bundle_where_others_can_write_is_refused(written) -> None:
    written.parent.chmod(0o777)
    with pytest.raises(BundleError, match="can be written to by others"):
        Bundle.open(written)


def test_a_fork_shares_it(written, kernels) -> None:
    with Bundle.open(written) as opened:
        child = os.fork()
        if child == 0:
            same = opened.read(f"kernels/{kernels[1][0]}") == kernels[1][1]
            os._exit(0 if same else 1)
        assert opened.read(f"kernels/{kernels[0][0]}") == kernels[0][1]
        assert os.waitpid(child, 0)[1] == 0


def test_opening_a_large_one_is_quick_enough(tmp_path) -> None:
    """Ten thousand members: the manifest is read, nothing is inflated but that."""
    files = [(f"norm-sm_90a-{number:032x}.0123abcd.kernel", b"x") for number in range(10_000)]
    path = tmp_path / "large.bundle"
    bundle.write(path, files)
    code = (
        "import sys, time; sys.path[:0] = eval(sys.argv[1]); from pathlib import Path\n"
        "from gristmill.jit.bundle import Bundle\n"
        "start = time.perf_counter(); Bundle.open(Path(sys.argv[2]))\n"
        "print(time.perf_counter() - start)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, repr(sys.path), str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(out.stdout) < 2.0


def test_what_is_encoded_is_what_a_folder_holds(tiny, home) -> None:
    name, content = cache.encoded(tiny, ARCH)
    (file,) = home.files()
    assert (file.name, file.read_bytes()) == (name, content)
