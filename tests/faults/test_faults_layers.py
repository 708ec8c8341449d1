"""Layers and bundles that are damaged, missing, replaced or not to be trusted."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import zipfile
import zlib
from pathlib import Path

import pytest
from fault_helpers import ARCH, VERSION, is_right, program, use_fake_compiler, write_source

from gristmill.errors import BundleError, KernelNotCached
from gristmill.jit import bundle, cache, counters, entry
from gristmill.jit.bundle import Bundle
from gristmill.jit.program import Program
from gristmill.log import forget_warnings
from gristmill.settings import reload_settings

COUNT = 3


@pytest.fixture
def programs(tmp_path, home, monkeypatch) -> list[Program]:
    use_fake_compiler(put=monkeypatch.setattr)
    sources = write_source(tmp_path / "sources")
    return [program(sources, number) for number in range(COUNT)]


@pytest.fixture
def kernels(programs) -> list[tuple[str, bytes]]:
    """What a bundle is made of; the user's folder is empty again."""
    made = [cache.encoded(one, ARCH) for one in programs]
    cache.clear()
    cache.forget()
    counters.reset()
    return made


@pytest.fixture
def file(tmp_path, kernels) -> Path:
    path = tmp_path / "layers" / "kernels.bundle"
    path.parent.mkdir(mode=0o755)
    bundle.write(path, kernels)
    return path


@pytest.fixture
def folder(tmp_path, kernels) -> Path:
    top = tmp_path / "layer"
    (top / "kernels").mkdir(parents=True)
    for name, content in kernels:
        (top / "kernels" / name).write_bytes(content)
    return top


@pytest.fixture
def use(monkeypatch):
    """Begin anew with these layers."""

    def use(*paths: Path, jit: str = "on") -> None:
        monkeypatch.setenv("GRISTMILL_CACHE_LAYERS", os.pathsep.join(map(str, paths)))
        monkeypatch.setenv("GRISTMILL_JIT", jit)
        reload_settings()
        cache.forget()
        counters.reset()
        forget_warnings()

    return use


def counted(*names: str) -> list[float]:
    values = counters.snapshot()
    return [values[name] for name in names]


def load_all(programs: list[Program]) -> None:
    for one in programs:
        assert is_right(cache.load_or_compile(one, ARCH), one)


def test_a_whole_layer_is_all_that_is_needed(programs, file, folder, use, home, caplog) -> None:
    """What the rest of this file takes away."""
    for layer in (file, folder):
        use(layer, jit="off")
        load_all(programs)
        assert counted("layer_hits", "compiles", "rejected") == [COUNT, 0, 0]
        assert caplog.messages == []
    assert list((home / "kernels").glob("*")) == []


# ---- bundles that are not whole ----


def check_harmless(content: bytes, programs: list[Program], path: Path) -> int:
    """Whatever is wrong with a bundle: right kernels, or none, or BundleError. How many it has."""
    path.write_bytes(content)
    found, message = 0, str(path)
    try:
        with Bundle.open(path) as opened:
            for one in programs:
                for name in opened.named(one.key(ARCH)):
                    binary = entry.decode(opened.read(name) or b"", one, ARCH)
                    assert binary is None or is_right(binary, one)
                    found += binary is not None
        bundle.damages(path)
    except BundleError as error:
        message = str(error)
    assert str(path) in message
    return found


@pytest.mark.parametrize("step", [211, pytest.param(1, marks=pytest.mark.long)])
def test_a_bundle_that_is_cut_off_is_none(step, programs, file, tmp_path) -> None:
    content = file.read_bytes()
    assert check_harmless(content, programs, file) == COUNT
    for length in (*range(0, len(content), step), *range(len(content) - 300, len(content))):
        assert check_harmless(content[:length], programs, file) == 0
    for more in (b"\0", b"\n", content[-100:]):
        assert check_harmless(content + more, programs, file) in (0, COUNT)


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.long)])
def test_a_bundle_with_another_byte_gives_nothing_wrong(step, programs, file) -> None:
    content = bytearray(file.read_bytes())
    chance = random.Random(step)
    lost = 0
    tail = range(len(content) - 500, len(content))  # the manifest's end, the directory, the comment
    for place in (*range(0, len(content), step), *tail):
        before = content[place]
        content[place] ^= 1 << chance.randrange(8)
        lost += check_harmless(bytes(content), programs, file) < COUNT
        content[place] = before
    assert lost > len(content) // step // 2
    assert check_harmless(bytes(content), programs, file) == COUNT


def test_every_changed_byte_that_matters_is_named(programs, file) -> None:
    """By `damages`, for each member: no kernel can change unseen."""
    with Bundle.open(file) as opened:
        members = {name: opened._members[name] for name in opened.names}
    content = file.read_bytes()
    assert bundle.damages(file) == []
    for name, member in members.items():
        # Not the last: it ends with bits that mean nothing.
        for place in range(member.at, member.at + member.packed - 1, member.packed // 9):
            changed = bytearray(content)
            changed[place] ^= 255
            file.write_bytes(bytes(changed))
            (what,) = bundle.damages(file)
            assert name in what


def forged(kernels: list[tuple[str, bytes]], path: Path, change) -> None:
    """A bundle whose manifest is changed and whose hashes hold."""
    bundle.write(path, kernels)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    packer = zlib.compressobj(wbits=-15)
    raw = json.dumps(change(manifest)).encode()
    packed = packer.compress(raw) + packer.flush()
    comment = (
        f"gristmill bundle 1 at {len(content)} packed {len(packed)} size {len(raw)} "
        f"sha256 {hashlib.sha256(raw).hexdigest()}"
    )
    path.write_bytes(content + packed + comment.encode())


def every_member(**values):
    def change(manifest):
        for member in manifest["files"].values():
            member.update(values)
        return manifest

    return change


def renamed(name: str):
    def change(manifest):
        manifest["files"] = {name: next(iter(manifest["files"].values()))}
        return manifest

    return change


def swapped(manifest):
    names = list(manifest["files"])
    values = list(manifest["files"].values())
    manifest["files"] = dict(zip(names, values[1:] + values[:1], strict=True))
    return manifest


FORGED = [
    lambda manifest: [],
    lambda manifest: None,
    lambda manifest: {},
    lambda manifest: {"files": 3},
    lambda manifest: {"files": {"kernels/a.kernel": 3}},
    lambda manifest: {"files": {"kernels/a.kernel": {}}},
    every_member(at="x"),
    every_member(at=-1),
    every_member(at=10**30),
    every_member(packed=10**30),
    every_member(size=-1),
    every_member(size=2**40),
    every_member(size=None),
    every_member(packed=2**40),
    every_member(sha256=None),
    every_member(sha256="0" * 64),
    every_member(more=1),
    renamed("kernels/../../../escaped.kernel"),
    renamed("/etc/escaped.kernel"),
    renamed("kernels/a/b.kernel"),
    renamed("kernels/a\nb.kernel"),
    renamed("tables/../kernels/x.json"),
    renamed("manifest.json"),
    swapped,
]


@pytest.mark.parametrize("which", range(len(FORGED)))
def test_a_manifest_that_says_something_odd(
    which, programs, kernels, tmp_path, use, caplog
) -> None:
    path = tmp_path / "odd.bundle"
    forged(kernels, path, FORGED[which])
    check_harmless(path.read_bytes(), programs, path)
    use(path)
    load_all(programs)
    assert counted("compiles", "layer_hits") == [COUNT, 0]
    assert len(caplog.messages) <= COUNT  # of the bundle, or of each of its files


def test_a_forged_bundle_is_read_where_it_is_right(programs, kernels, tmp_path) -> None:
    """So that the test above tests what it says."""
    path = tmp_path / "same.bundle"
    forged(kernels, path, lambda manifest: manifest)
    assert check_harmless(path.read_bytes(), programs, path) == COUNT


@pytest.mark.parametrize("number", ["9" * 30, "9" * 19, "0", "00000000000000000001"])
@pytest.mark.parametrize("field", ["bundle", "at", "packed", "size"])
def test_a_comment_that_is_odd(field, number, programs, file) -> None:
    content = file.read_bytes()
    at = content.rindex(b"gristmill bundle")
    comment = re.sub(rf"{field} \d+", f"{field} {number}", content[at:].decode()).encode()
    assert comment != content[at:]
    same = (field, int(number)) == ("bundle", 1)
    assert check_harmless(content[:at] + comment, programs, file) == (COUNT if same else 0)


def test_a_damaged_member_is_compiled_and_the_rest_is_used(programs, file, use, caplog) -> None:
    with Bundle.open(file) as opened:
        (name,) = [one for one in opened.names if programs[1].key(ARCH) in one]
        member = opened._members[name]
    content = bytearray(file.read_bytes())
    content[member.at + member.packed // 2] ^= 1
    file.write_bytes(bytes(content))
    use(file)
    load_all(programs)
    assert counted("layer_hits", "compiles") == [COUNT - 1, 1]
    use(file, jit="off")
    cache.clear()
    load_all([programs[0], programs[2]])
    with pytest.raises(KernelNotCached, match=re.escape(str(file))):
        cache.load_or_compile(programs[1], ARCH)


def test_a_bundle_of_another_format_says_so(programs, file, use, caplog) -> None:
    content = file.read_bytes()
    at = content.rindex(b"gristmill bundle 1")
    file.write_bytes(content[:at] + content[at:].replace(b"bundle 1", b"bundle 2"))
    use(file)
    load_all(programs)
    (message,) = caplog.messages
    assert "format 2" in message


def test_a_bundle_that_is_replaced_while_open(programs, file, kernels, use) -> None:
    """The one that was opened is read to its end, whatever takes its place."""
    use(file, jit="off")
    load_all(programs[:1])
    other = file.with_name("other")
    other.write_bytes(b"not a bundle")
    os.replace(other, file)
    load_all(programs)
    assert counted("layer_hits") == [COUNT]


def test_a_bundle_that_is_overwritten_or_cut_while_open(programs, file, use) -> None:
    use(file)
    load_all(programs[:1])
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.write(random.Random(0).randbytes(size))
    load_all(programs[:2])
    os.truncate(file, 0)
    load_all(programs)
    assert counted("layer_hits", "compiles") == [1, COUNT - 1]


# ---- layers that are not there, or are something else ----


def missing(path: Path) -> Path:
    return path / "missing"


def empty_file(path: Path) -> Path:
    (path / "empty").touch()
    return path / "empty"


def no_bundle(path: Path) -> Path:
    (path / "text").write_text("something else" * 100)
    return path / "text"


def plain_zip(path: Path) -> Path:
    with zipfile.ZipFile(path / "plain.zip", "w") as archive:
        archive.writestr("kernels/a.kernel", b"x")
    return path / "plain.zip"


def empty_folder(path: Path) -> Path:
    (path / "folder").mkdir()
    return path / "folder"


def pipe(path: Path) -> Path:
    os.mkfifo(path / "pipe")
    return path / "pipe"


def link_loop(path: Path) -> Path:
    (path / "loop").symlink_to(path / "loop")
    return path / "loop"


def long_name(path: Path) -> Path:
    return path / ("x" * 300)


def in_a_file(path: Path) -> Path:
    return no_bundle(path) / "layer"


def kernels_is_a_file(path: Path) -> Path:
    (path / "odd").mkdir()
    (path / "odd" / "kernels").touch()
    return path / "odd"


def huge(path: Path) -> Path:
    with (path / "huge").open("wb") as file:
        file.truncate(10 * 2**30)
    return path / "huge"


NO_LAYERS = [
    missing,
    empty_file,
    no_bundle,
    plain_zip,
    empty_folder,
    pipe,
    link_loop,
    long_name,
    in_a_file,
    kernels_is_a_file,
    huge,
]


@pytest.mark.parametrize("make", NO_LAYERS)
def test_what_is_no_layer_costs_one_warning(make, programs, folder, use, tmp_path, caplog) -> None:
    wrong = make(tmp_path)
    use(wrong, folder)
    load_all(programs)
    assert counted("layer_hits", "compiles") == [COUNT, 0]
    (message,) = caplog.messages
    assert str(wrong) in message
    assert "passed over" in message


# ---- layers that others could have written ----

WRITABLE = [0o777, 0o775, 0o757]


def check_not_used(programs, layer: Path, place: Path, use, caplog, word: str) -> None:
    use(layer, jit="off")
    for one in programs:
        with pytest.raises(KernelNotCached):
            cache.load_or_compile(one, ARCH)
    assert not cache.is_cached(programs[0], ARCH)
    use(layer)
    caplog.clear()
    load_all(programs)
    assert counted("layer_hits", "compiles") == [0, COUNT]
    (message,) = caplog.messages
    assert str(place) in message
    assert word in message


@pytest.mark.parametrize("mode", WRITABLE)
@pytest.mark.parametrize("which", ["layer", "kernels"])
def test_a_folder_that_others_can_write_to(which, mode, programs, folder, use, caplog) -> None:
    place = folder if which == "layer" else folder / "kernels"
    place.chmod(mode)
    check_not_used(programs, folder, place, use, caplog, "can be written to by others")


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_a_bundle_that_others_can_write_to(mode, programs, file, use, caplog) -> None:
    file.chmod(mode)
    check_not_used(programs, file, file, use, caplog, "can be written to by others")


@pytest.mark.parametrize("mode", WRITABLE)
def test_a_bundle_in_a_folder_that_others_can_write_to(mode, programs, file, use, caplog) -> None:
    file.parent.chmod(mode)
    check_not_used(programs, file, file.parent, use, caplog, "can be written to by others")


def test_a_link_to_a_bundle_in_such_a_folder(programs, file, use, tmp_path, caplog) -> None:
    """The link stands in a good folder; what it leads to does not."""
    file.parent.chmod(0o777)
    (tmp_path / "link").symlink_to(file)
    check_not_used(
        programs, tmp_path / "link", tmp_path / "link", use, caplog, "can be written to by others"
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["bundle", "its folder", "layer", "kernels"])
def test_a_layer_of_another_user(which, programs, file, folder, use, caplog) -> None:
    layer, place = {
        "bundle": (file, file),
        "its folder": (file, file.parent),
        "layer": (folder, folder),
        "kernels": (folder, folder / "kernels"),
    }[which]
    os.chown(place, 4_000_017, -1)
    check_not_used(programs, layer, place, use, caplog, "belongs to another user")


@pytest.mark.parametrize("mode", [0o666, 0o622])
def test_a_file_in_a_layer_that_others_can_write_to(mode, programs, folder, use, caplog) -> None:
    name = entry.file_name(programs[1].key(ARCH), VERSION, "")
    (folder / "kernels" / name).chmod(mode)
    use(folder)
    load_all(programs)
    assert counted("layer_hits", "compiles") == [COUNT - 1, 1]
    (message,) = caplog.messages
    assert name in message


def test_wrong_files_in_a_layer(programs, folder, use) -> None:
    """Another program's, cut off, and one that vanished since the folder was listed."""
    names = [entry.file_name(one.key(ARCH), VERSION, "") for one in programs]
    place = folder / "kernels"
    shutil.copy(place / names[1], place / names[0])
    (place / names[1]).write_bytes((place / names[1]).read_bytes()[:-1])
    use(folder)
    load_all(programs[:2])
    assert counted("layer_hits", "compiles") == [0, 2]
    (place / names[2]).unlink()
    load_all(programs)
    assert counted("layer_hits", "compiles") == [0, 3]


def test_the_first_whole_one_of_several_layers_is_taken(programs, file, folder, use) -> None:
    for path in (folder / "kernels").iterdir():
        path.write_bytes(b"damaged")
    use(folder, file, jit="off")
    load_all(programs)
    assert counted("layer_hits") == [COUNT]
