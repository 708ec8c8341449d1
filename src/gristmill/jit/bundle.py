"""A bundle: many kernels (and tuned tables) in one file that is never written to again.

It is a zip, so that any tool can list it, with a manifest that any tool can read. gristmill itself
goes by the manifest alone: the zip's comment says where that is and what its hash is, and it says
where every member is and what its hash is. So one kernel of ten thousand is one read, and whatever
was changed in the file since is not found in it.
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gristmill.errors import BundleError
from gristmill.jit import entry
from gristmill.jit.folder import MOST_BYTES, UntrustedError, open_file, open_folder, write_whole
from gristmill.version import __version__

FORMAT = 1
KERNELS, TABLES = "kernels/", "tables/"

_MANIFEST = "manifest.json"
_COMMENT = re.compile(
    rb"gristmill bundle (\d+) at (\d+) packed (\d+) size (\d+) sha256 ([0-9a-f]{64})"
)
_COMMENT_BYTES = 256  # no comment of ours is longer
_LOCAL_HEADER = 30  # bytes of a zip's, before a name and an extra field
_NAME = re.compile(r"(kernels/[A-Za-z0-9_.-]+\.kernel|tables/[A-Za-z0-9_.-]+\.json)")
_MOST_MANIFEST = 256 * 1024 * 1024


@dataclass(frozen=True)
class Member:
    """Where the deflated bytes of a file stand in the bundle, and what they must inflate to."""

    at: int
    packed: int
    size: int
    sha256: str

    def check(self) -> None:
        """ValueError if these are not numbers of bytes and a hash."""
        for number in (self.at, self.packed, self.size):
            if type(number) is not int or not 0 <= number < 2**62:
                raise ValueError(f"{number!r} is no number of bytes")
        if not isinstance(self.sha256, str):
            raise ValueError(f"{self.sha256!r} is no hash")


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
        """A private copy of the file at `path`, if that is its hash; whoever can write there."""
        total = hashlib.sha256()
        with path.open("rb") as source, tempfile.TemporaryFile() as copy:
            while piece := source.read(1 << 20):
                total.update(piece)
                copy.write(piece)
            copy.flush()
            if total.hexdigest() != sha256.strip().lower():
                raise BundleError(f"bundle {path}: its sha256 is {total.hexdigest()}, not {sha256}")
            return cls._adopt(path, os.dup(copy.fileno()))

    @classmethod
    def open_unchecked(cls, path: Path) -> Bundle:
        """As `open`, of a file that need not be trusted: nothing of it may be run."""
        return cls._adopt(path, os.open(path, os.O_RDONLY))

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

    def sha256(self) -> str:
        """The hash of the whole file."""
        total, at = hashlib.sha256(), 0
        while piece := os.pread(self._handle, 1 << 20, at):
            total.update(piece)
            at += len(piece)
        return total.hexdigest()

    def _read_manifest(self) -> tuple[dict[str, Member], Mapping[str, Any]]:
        end = os.fstat(self._handle).st_size
        tail = os.pread(self._handle, _COMMENT_BYTES, max(0, end - _COMMENT_BYTES))
        found = list(_COMMENT.finditer(tail))
        if not found or found[-1].end() != len(tail):
            raise BundleError(f"bundle {self.path}: is no bundle of gristmill, or not a whole one")
        form, at, packed, size = (int(number) for number in found[-1].groups()[:4])
        if form != FORMAT:
            raise BundleError(
                f"bundle {self.path}: has format {form}, and gristmill {__version__} reads {FORMAT}"
            )
        member = Member(at, packed, size, found[-1][5].decode())
        if at + packed > end:
            raise BundleError(f"bundle {self.path}: is no bundle of gristmill, or not a whole one")
        content = self._inflated(member, _MOST_MANIFEST)
        if content is None:
            raise BundleError(f"bundle {self.path}: its manifest is damaged")
        try:
            manifest = json.loads(content)
            members = {name: Member(**about) for name, about in manifest.pop("files").items()}
            for one in members.values():
                one.check()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BundleError(f"bundle {self.path}: its manifest is damaged ({error})") from error
        for name in members:
            if not is_name(name):
                raise BundleError(f"bundle {self.path}: has a member named {name!r}")
        return members, manifest

    def _inflated(self, member: Member, most: int = MOST_BYTES) -> bytes | None:
        if max(member.size, member.packed) > most:
            return None
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
    _write_zip(made, dict(sorted(files.items())))
    content = made.getvalue()
    write_whole(path, content, mode=0o644)
    return hashlib.sha256(content).hexdigest()


def damages(path: Path) -> list[str]:
    """What is wrong with the bundle at `path`, member by member; BundleError if it is none."""
    found = []
    with Bundle.open_unchecked(path) as bundle:
        for name in bundle.names:
            content = bundle.read(name)
            if content is None:
                found.append(f"{name}: is not what the manifest says")
            elif name.startswith(KERNELS) and not is_kernel(name.removeprefix(KERNELS), content):
                found.append(f"{name}: holds no kernel, or another one")
    return found


def is_name(name: str) -> bool:
    """Whether a member may have this name, as in "kernels/x.kernel"."""
    return _NAME.fullmatch(name) is not None


def is_kernel(name: str, content: bytes) -> bool:
    """Whether `content` is a whole kernel, and the one that a file of this name must hold."""
    about = entry.describe(content)
    return about is not None and about.key == entry.key_in(name)


def _write_zip(file: BinaryIO, files: Mapping[str, bytes]) -> None:
    members = {}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            members[name] = vars(_add(archive, file, name, content))
        keys = [entry.key_in(name) for name in files if name.startswith(KERNELS)]
        manifest = {
            "gristmill": __version__,
            "archs": sorted({word for key in keys for word in key.split("-")[-2:-1]}),
            "kernels": len(keys),
            "files": members,
        }
        content = json.dumps(manifest, indent=0).encode()
        own = _add(archive, file, _MANIFEST, content)
        archive.comment = (
            f"gristmill bundle {FORMAT} at {own.at} packed {own.packed} size {own.size} "
            f"sha256 {own.sha256}"
        ).encode()


def _add(archive: zipfile.ZipFile, file: BinaryIO, name: str, content: bytes) -> Member:
    info = zipfile.ZipInfo(name)  # with the date that zip begins at: the same files, the same bytes
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    archive.writestr(info, content)
    # A zip of more than 4 GB, or a name that is not plain, would have an extra field; ours are not.
    at = info.header_offset + _LOCAL_HEADER + len(name.encode())
    return Member(at, info.compress_size, len(content), hashlib.sha256(content).hexdigest())
