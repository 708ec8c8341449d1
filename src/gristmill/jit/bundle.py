"""A bundle: many kernels (and tuned tables) in one file that is never written to again.

It is a zip, so that any tool can list it, with a manifest that any tool can read. gristmill itself
goes by the manifest alone: the zip's comment says where that is and what its hash is, and it says
where every member is and what its hash is. So one kernel of ten thousand is one read, and whatever
was changed in the file since is not found in it.

A bundle may come from anywhere, so the cost of reading it is bounded before it is read: no two
members share a byte, and none inflates to more than `_MOST_RATIO` times its size in the file.
Members are read one at a time.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gristmill.errors import BundleError
from gristmill.jit import entry
from gristmill.jit.folder import (
    MOST_BYTES,
    UntrustedError,
    open_file,
    open_folder,
    open_plain,
    write_whole,
)
from gristmill.log import one_line
from gristmill.version import __version__

FORMAT = 1
KERNELS, TABLES = "kernels/", "tables/"

_MANIFEST = "manifest.json"
_COMMENT = re.compile(
    rb"gristmill bundle (\d+) at (\d+) packed (\d+) size (\d+) sha256 ([0-9a-f]{64})"
)
_COMMENT_BYTES = 256  # no comment of ours is longer
_LOCAL_HEADER = 30  # bytes of a zip's, before a name and an extra field
# File names have at most 255 bytes, and a temporary file's name is longer than the final one.
_NAME = re.compile(r"(kernels/[A-Za-z0-9_.-]{1,220}\.kernel|tables/[A-Za-z0-9_.-]{1,220}\.json)")
# All kernels for one GPU are 14,000 files of 110 MB: enough for almost twenty GPUs.
MOST_FILE = 2 * 1024**3
# A member takes 220 bytes of it: enough for 150,000.
_MOST_MANIFEST = 32 * 1024 * 1024
# A parsed value takes up to 100 bytes of memory, so JSON with many short ones takes 50 times its
# size. The manifest has 40 bytes a value.
_VALUE_BYTES = 16
# Kernels deflate to a third or a fifth of their size, tables to a twentieth.
_MOST_RATIO = 100


@dataclass(frozen=True)
class Member:
    """Where the deflated bytes of a file stand in the bundle, and what they must inflate to."""

    at: int
    packed: int
    size: int
    sha256: str

    def check(self, most: int = MOST_BYTES) -> None:
        """ValueError if a value has another type or is out of bounds."""
        for number in (self.at, self.packed, self.size):
            if type(number) is not int or not 0 <= number < 2**62:
                raise ValueError(f"{number!r} is not a number of bytes")
        if not isinstance(self.sha256, str):
            raise ValueError(f"{self.sha256!r} is not a sha256")
        if max(self.size, self.packed) > most:
            raise ValueError(f"{max(self.size, self.packed)} bytes are more than {most}")
        if self.size > self.packed * _MOST_RATIO:
            raise ValueError(
                f"{self.packed} bytes inflate to {self.size}, more than {_MOST_RATIO} times as many"
            )


_FIELDS = Member.__annotations__.keys()


class Bundle:
    """An open bundle. Reads by `pread`, so that threads and forked processes can share it."""

    def __init__(self, path: Path, handle: int) -> None:
        """Takes over `handle`. BundleError if there is no whole manifest."""
        self.path = path
        self._handle = handle
        self._members, self.manifest = self._read_manifest()
        self._by_key: dict[str, list[str]] = {}
        for name in self._members:
            if name.startswith(KERNELS):
                key = entry.key_in(name.removeprefix(KERNELS))
                self._by_key.setdefault(key, []).append(name)

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """The bundle at `path`, if nobody but the user and root could have written it.

        BundleError says what is wrong otherwise; OSError if it cannot be opened at all.
        """
        try:
            place = path.resolve(strict=True)  # a link is as good as what it leads to
            os.close(open_folder(place.parent))
            handle = open_file(place)
        except (UntrustedError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
            raise BundleError(f"bundle {path}: {error}") from error
        return cls._adopt(path, handle)

    @classmethod
    def open_pinned(cls, path: Path, sha256: str) -> Bundle:
        """A private copy of the file at `path` if this is its hash, whoever can write to it."""
        total = hashlib.sha256()
        with os.fdopen(open_plain(path), "rb") as source, tempfile.TemporaryFile() as copy:
            _size(path, source.fileno())
            for piece in _pieces(source.fileno()):
                total.update(piece)
                copy.write(piece)
            copy.flush()
            if total.hexdigest() != sha256.strip().lower():
                raise BundleError(f"bundle {path}: its sha256 is {total.hexdigest()}, not {sha256}")
            return cls._adopt(path, os.dup(copy.fileno()))

    @classmethod
    def open_unchecked(cls, path: Path) -> Bundle:
        """As `open`, without checking who can write to the file. Do not run its kernels."""
        return cls._adopt(path, open_plain(path))

    @classmethod
    def _adopt(cls, path: Path, handle: int) -> Bundle:
        try:
            return cls(path, handle)
        except BaseException:
            os.close(handle)
            raise

    def close(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """All members but the manifest: "kernels/...", "tables/..."."""
        return tuple(self._members)

    def named(self, key: str) -> list[str]:
        """The members that hold the kernel of this key, of whichever compiler."""
        return self._by_key.get(key, [])

    def read(self, name: str) -> bytes | None:
        """The content of a member; None if there is none, or not as the manifest says."""
        member = self._members.get(name)
        return None if member is None else self._inflated(member)

    def fault(self, name: str) -> str | None:
        """What is wrong with a member, or None. What a table says is not checked."""
        content = self.read(name)
        if content is None:
            return "is not what the manifest says"
        if name.startswith(KERNELS) and not is_kernel(name.removeprefix(KERNELS), content):
            return "is not a kernel, or not the one that its name says"
        return None

    def sha256(self) -> str:
        """The hash of the whole file."""
        total = hashlib.sha256()
        for piece in _pieces(self._handle):
            total.update(piece)
        return total.hexdigest()

    def _read_manifest(self) -> tuple[dict[str, Member], Mapping[str, Any]]:
        end = _size(self.path, self._handle)
        tail = os.pread(self._handle, _COMMENT_BYTES, max(0, end - _COMMENT_BYTES))
        found = list(_COMMENT.finditer(tail))
        if not found or found[-1].end() != len(tail):
            raise BundleError(f"bundle {self.path}: is not a bundle of gristmill, or was cut off")
        form, at, packed, size = (int(number) for number in found[-1].groups()[:4])
        if form != FORMAT:
            raise BundleError(
                f"bundle {self.path}: has format {form}, and gristmill {__version__} reads {FORMAT}"
            )
        own = Member(at, packed, size, found[-1][5].decode())
        try:
            own.check(_MOST_MANIFEST)
            members, manifest = _parsed(self._inflated(own))
            _check(members, own, end)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BundleError(
                f"bundle {self.path}: its manifest is damaged ({one_line(error, 300)})"
            ) from error
        return members, manifest

    def _inflated(self, member: Member) -> bytes | None:
        try:
            packed = os.pread(self._handle, member.packed, member.at)
            content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, member.size + 1)
        except (OSError, zlib.error):
            return None
        same = hashlib.sha256(content).hexdigest() == member.sha256
        return content if same and len(content) == member.size else None


def write(
    path: Path, kernels: Iterable[tuple[str, bytes]], tables: Iterable[tuple[str, bytes]] = ()
) -> str:
    """Write a bundle of files (name, content) in one step, and return its sha256.

    The same files give the same bytes.
    """
    files = {KERNELS + name: content for name, content in kernels}
    files |= {TABLES + name: content for name, content in tables}
    made = io.BytesIO()
    members, own = _write_zip(made, dict(sorted(files.items())))
    content = made.getvalue()
    try:
        _check(members, own, len(content))
    except ValueError as error:
        raise BundleError(f"bundle {path}: cannot be written: {error}") from error
    write_whole(path, content, mode=0o644)
    return hashlib.sha256(content).hexdigest()


def damages(path: Path) -> list[str]:
    """What is wrong with each member of a bundle; BundleError if there is no whole manifest."""
    with Bundle.open_unchecked(path) as bundle:
        faults = ((name, bundle.fault(name)) for name in bundle.names)
        return [f"{name}: {fault}" for name, fault in faults if fault is not None]


def is_name(name: str) -> bool:
    """Whether a member may have this name, as in "kernels/x.kernel"."""
    return _NAME.fullmatch(name) is not None


def is_kernel(name: str, content: bytes) -> bool:
    """Whether `content` is a whole kernel, and the one that a file of this name must hold."""
    about = entry.describe(content)
    return about is not None and about.key == entry.key_in(name)


def _size(path: Path, handle: int) -> int:
    size = os.fstat(handle).st_size
    if size > MOST_FILE:
        raise BundleError(f"bundle {path}: has {size} bytes, more than {MOST_FILE}")
    return size


def _pieces(handle: int) -> Iterator[bytes]:
    """The content of a file, bounded: the file may grow while it is read."""
    at = 0
    while at <= MOST_FILE and (piece := os.pread(handle, 1 << 20, at)):
        yield piece
        at += len(piece)


def _parsed(content: bytes | None) -> tuple[dict[str, Member], Mapping[str, Any]]:
    """The members of a manifest, not yet checked, and the rest of it."""
    if content is None:
        raise ValueError("its size or sha256 is another")
    if sum(map(content.count, (b",", b"[", b"{"))) * _VALUE_BYTES > len(content) + 1000:
        raise ValueError("it has too many values for its size")
    manifest = json.loads(content)
    members = {}
    for name, about in manifest.pop("files").items():
        if not isinstance(about, dict) or about.keys() != _FIELDS:
            raise ValueError(f"{name!r} is not an object of {', '.join(_FIELDS)}")
        members[name] = Member(**about)
    return members, manifest


def _check(members: Mapping[str, Member], own: Member, end: int) -> None:
    """ValueError if a file of `end` bytes cannot have these members and the manifest `own`."""
    if end > MOST_FILE:
        raise ValueError(f"{end} bytes are more than {MOST_FILE}")
    own.check(_MOST_MANIFEST)
    for name, one in members.items():
        if not is_name(name):
            raise ValueError(f"it has a member named {name!r}")
        try:
            one.check()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    before, after = "", 0
    for name, one in sorted({**members, _MANIFEST: own}.items(), key=lambda item: item[1].at):
        if one.at < after:
            raise ValueError(f"{name} and {before} share bytes")
        before, after = name, one.at + one.packed
        if after > end:
            raise ValueError(f"{name} ends beyond the file")


def _write_zip(file: BinaryIO, files: Mapping[str, bytes]) -> tuple[dict[str, Member], Member]:
    """The members that were written, and the manifest."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        members = {name: _add(archive, name, content) for name, content in files.items()}
        keys = [entry.key_in(name) for name in files if name.startswith(KERNELS)]
        manifest = {
            "gristmill": __version__,
            "archs": sorted({word for key in keys for word in key.split("-")[-2:-1]}),
            "kernels": len(keys),
            "files": {name: vars(member) for name, member in members.items()},
        }
        content = json.dumps(manifest, indent=0).encode()
        own = _add(archive, _MANIFEST, content)
        archive.comment = (
            f"gristmill bundle {FORMAT} at {own.at} packed {own.packed} size {own.size} "
            f"sha256 {own.sha256}"
        ).encode()
    return members, own


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> Member:
    info = zipfile.ZipInfo(name)  # with the date that zip begins at: the same files, the same bytes
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    archive.writestr(info, content)
    # A zip of more than 4 GB, or a name that is not plain, would have an extra field; ours are not.
    at = info.header_offset + _LOCAL_HEADER + len(name.encode())
    return Member(at, info.compress_size, len(content), hashlib.sha256(content).hexdigest())
