"""Bundles that were made to cost or to do harm: bounded, and a BundleError with file and entry."""

from __future__ import annotations

import json
import os
import random
import re
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_forge import about, deflated, forge, forge_manifest
from jit_helpers import ALONE

from gristmill.errors import BundleError
from gristmill.jit import bundle
from gristmill.jit.bundle import Bundle

MIB = 1024 * 1024
NAME = "tables/a.json"


def rejected(path: Path, words: str) -> None:
    """It cannot be opened in any way; the error names the file and says `words`."""
    opens: tuple[Callable[[Path], Bundle], ...] = (Bundle.open, Bundle.open_unchecked)
    for opened in opens:
        with pytest.raises(BundleError, match=re.escape(words)) as caught:
            opened(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000


NAMES = [
    *("", "x", "../evil", "/etc/evil", "kernels/../../evil.kernel", "kernels/a/b.kernel"),
    *("tables/.json", "tables/a.json\n", "tables/a.json\0", "tables\\a.json", "kernels/é.kernel"),
    f"kernels/{'a' * 300}.kernel",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_no_file_of_the_cache(name: str, tmp_path: Path) -> None:
    path = forge(tmp_path / "a.bundle", {name: about(b"x", deflated(b"x"))}, deflated(b"x"))
    rejected(path, "has a member named")
    with pytest.raises(BundleError, match="has a member named"):
        bundle.write(tmp_path / "b.bundle", [], [(name, b"x")])
    assert not (tmp_path / "b.bundle").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": bundle.MOST_BYTES + 1, "packed": bundle.MOST_BYTES}, "are more than 67108864"),
        ({"packed": bundle.MOST_BYTES + 1}, "are more than 67108864"),
        ({"size": 1001}, "10 bytes inflate to 1001, more than 100 times as many"),
        ({"at": 1, "packed": 2**40, "size": 0}, "are more than 67108864"),
        ({"at": 2**61}, "ends beyond the file"),
        ({"at": 10**30}, f"{10**30} is not a number of bytes"),
        ({"at": -1}, "-1 is not a number of bytes"),
        ({"size": 1.0}, "1.0 is not a number of bytes"),
        ({"size": float("nan")}, "nan is not a number of bytes"),
        ({"size": True}, "True is not a number of bytes"),
        ({"packed": None}, "None is not a number of bytes"),
        ({"packed": "1"}, "'1' is not a number of bytes"),
        ({"sha256": 3}, "3 is not a sha256"),
        ({"sha256": ["a"]}, "['a'] is not a sha256"),
        ({"more": 1}, "is not an object of at, packed, size, sha256"),
    ],
)
def test_a_member_that_cannot_be(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    said = {"at": 0, "packed": 10, "size": 10, "sha256": "", **changes}
    path = forge(tmp_path / "a.bundle", {NAME: said}, b"x" * 10)
    rejected(path, words)
    rejected(path, "its manifest is damaged")
    rejected(path, NAME)


@pytest.mark.parametrize("kind", [[], 3, None, "text", {}])
def test_a_member_of_another_kind(kind: Any, tmp_path: Path) -> None:
    rejected(forge(tmp_path / "a.bundle", {NAME: kind}), NAME)


@pytest.mark.parametrize(
    "manifest",
    [
        *(b"", b"{", b"[]", b"3", b"null", b'"files"', b"{}", b'{"files": 3}', b'{"files": [[1]]}'),
        *(b"\xff\xfe{}", b'{"files": {"a": {"at": ' + b"9" * 5000 + b"}}}", b'{"files": {}} more'),
    ],
)
def test_a_manifest_that_is_none(manifest: bytes, tmp_path: Path) -> None:
    rejected(forge_manifest(tmp_path / "a.bundle", manifest), "its manifest is damaged")


@pytest.mark.parametrize("level", [b"[", b'{"%032x":'], ids=["lists", "objects"])
def test_a_manifest_that_is_nested_deeply(level: bytes, tmp_path: Path) -> None:
    """Lists have too many values for the size, objects with long names do not."""
    levels = [level % number if b"%" in level else level for number in range(100_000)]
    rejected(forge_manifest(tmp_path / "a.bundle", b"".join(levels)), "its manifest is damaged")


@pytest.mark.parametrize(
    "changes",
    [
        *({"size": 32 * MIB + 1}, {"size": 10**200}, {"packed": 10**9}, {"packed": 2**63}),
        *({"at": 10**9}, {"at": 2**64}, {"size": 1}, {"size": 0}, {"packed": 0}),
    ],
    ids=str,
)
def test_a_manifest_that_is_not_where_or_what_it_should_be(
    changes: dict[str, int], tmp_path: Path
) -> None:
    path = forge_manifest(tmp_path / "a.bundle", b'{"files": {}}', **changes)
    rejected(path, "bundle")


def test_members_that_share_bytes(tmp_path: Path) -> None:
    """The same megabyte a thousand times would be a gigabyte to inflate, of a small file."""
    noise = random.Random(0).randbytes(1000)
    one = about(noise, noise, 0)
    path = forge(tmp_path / "a.bundle", {f"tables/{n}.json": one for n in range(1000)}, noise)
    rejected(path, "tables/1.json and tables/0.json share bytes")
    two = {NAME: one, "tables/b.json": {**one, "at": 999}}
    rejected(forge(tmp_path / "b.bundle", two, noise), f"tables/b.json and {NAME} share bytes")
    # A member that holds the manifest itself.
    rejected(forge(tmp_path / "c.bundle", {NAME: {**one, "at": 1}}, noise), "share bytes")


def test_a_name_that_is_there_twice_is_the_last(tmp_path: Path) -> None:
    """As JSON has it: each name is one member, whichever it is."""
    first, last = (json.dumps(about(text, text, at)) for at, text in ((0, b"x"), (1, b"y")))
    manifest = f'{{"files": {{"{NAME}": {first}, "{NAME}": {last}}}}}'.encode()
    with Bundle.open(forge_manifest(tmp_path / "a.bundle", manifest, b"xy")) as opened:
        assert opened.names == (NAME,)
        assert opened._members[NAME].at == 1


def test_a_stream_is_inflated_no_further_than_the_manifest_says(tmp_path: Path) -> None:
    packed = deflated(bytes(64 * MIB), level=1)
    said = {**about(b"", packed), "size": 1000}
    with Bundle.open(forge(tmp_path / "a.bundle", {NAME: said}, packed)) as opened:
        tracemalloc.start()
        assert opened.read(NAME) is None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * len(packed) < 2 * MIB
        assert opened.fault(NAME) == "is not what the manifest says"


def test_a_member_that_says_how_far_it_inflates_is_not_opened(tmp_path: Path) -> None:
    content = bytes(bundle.MOST_BYTES)
    packed = deflated(content, level=1)
    path = forge(tmp_path / "a.bundle", {NAME: about(content, packed)}, packed)
    rejected(path, f"{NAME}: {len(packed)} bytes inflate to {len(content)}")
    with pytest.raises(BundleError, match=r"a\.json: .* more than 67108864"):
        bundle.write(tmp_path / "b.bundle", [], [("a.json", bytes(bundle.MOST_BYTES + 1))])


# Reads all of a bundle, and prints the seconds and the MiB that this took.
COST = """
import time
from pathlib import Path
from gristmill.errors import BundleError
from gristmill.jit import bundle

def peak():  # of this process alone: ru_maxrss begins with what the parent had
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

before, start = peak(), time.process_time()
try:
    bundle.damages(Path(sys.argv[1]))
except BundleError as error:
    assert "manifest is damaged" in str(error), error
print(time.process_time() - start, peak() - before)
"""


def cost(path: Path) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", ALONE + COST, str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seconds, mib = map(float, done.stdout.split())
    return seconds, mib


def repeated(most: int, text: str) -> bytes:
    """`text` many times, each time with another number in it, so that it does not deflate well."""
    noise = random.Random(0)
    parts = [text % noise.getrandbits(48) for _ in range(most // len(text % (1 << 47)))]
    return ",".join(parts).encode()


@pytest.mark.parametrize("kind", ["members", "values", "overlaps"])
def test_a_small_bundle_costs_little(kind: str, tmp_path: Path) -> None:
    """At most 300 KB each, that would take gigabytes and minutes if nothing were bounded."""
    path = tmp_path / "a.bundle"
    if kind == "members":
        said = json.dumps(about(b"", b""))
        forge_manifest(path, b'{"files":{%s}}' % repeated(3 * MIB, f'"tables/%x.json":{said}'))
    elif kind == "values":
        forge_manifest(path, b'{"files":{},"x":[%s]}' % repeated(16 * MIB, "%d" + ",[]" * 250))
        rejected(path, "too many values")
    else:
        content = b"".join(bytes([one]) * 200 for one in random.Random(0).randbytes(50_000))
        packed = deflated(content)
        assert len(content) < 100 * len(packed)
        said = about(content, packed)
        forge(path, {f"tables/{number}.json": said for number in range(2000)}, packed)
    assert path.stat().st_size < 300_000
    seconds, mib = cost(path)
    assert seconds < 2
    assert mib < 40


def test_a_manifest_that_is_too_large(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(17 * MIB).hex().encode()
    path = forge_manifest(tmp_path / "a.bundle", b'{"files":{},"x":"%s"}' % noise)
    rejected(path, "bytes are more than 33554432")


def test_a_bundle_that_would_be_too_large_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MOST_FILE", 1000)
    path = tmp_path / "a.bundle"
    with pytest.raises(BundleError, match=r"cannot be written: .* bytes are more than 1000"):
        bundle.write(path, [], [("a.json", random.Random(0).randbytes(1000))])
    assert not path.exists()


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "large.bundle"
    forge_manifest(path, b'{"files": {}}')
    os.truncate(path, bundle.MOST_FILE + 1)  # takes no room on the disk
    words = f"has {bundle.MOST_FILE + 1} bytes, more than {bundle.MOST_FILE}"
    rejected(path, words)
    with pytest.raises(BundleError, match=words):
        Bundle.open_pinned(path, "0" * 64)


@pytest.mark.parametrize("kind", ["pipe", "zeros", "folder", "socket"])
def test_a_file_of_another_kind(kind: str, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "zeros" else tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o600 | stat.S_IFSOCK)
    for opened in (Bundle.open, Bundle.open_unchecked, lambda path: Bundle.open_pinned(path, "0")):
        with pytest.raises((BundleError, OSError)) as caught:
            opened(path)
        assert str(path) in str(caught.value)


def test_a_file_that_grows_while_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = forge_manifest(tmp_path / "a.bundle", b'{"files": {}}')
    monkeypatch.setattr(bundle, "MOST_FILE", 3 * MIB)
    read = os.pread

    def growing(handle: int, size: int, at: int) -> bytes:
        return read(handle, size, 0)[:1] * size  # never the end

    monkeypatch.setattr(os, "pread", growing)
    with pytest.raises(BundleError, match="its sha256 is"):
        Bundle.open_pinned(path, "0" * 64)
