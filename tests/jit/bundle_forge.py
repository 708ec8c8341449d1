"""Bundles that `bundle.write` would not make."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def deflated(content: bytes, level: int = 9) -> bytes:
    """As a zip holds it."""
    packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def about(content: bytes, packed: bytes, at: int = 0) -> dict[str, Any]:
    """What a manifest says of a member."""
    return {
        "at": at,
        "packed": len(packed),
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def forge(path: Path, files: Mapping[str, Any] | Iterable[Any], body: bytes = b"") -> Path:
    """A file with `body` and a whole manifest that says this of its members."""
    return forge_manifest(path, json.dumps({"files": files}).encode(), body)


def forge_manifest(path: Path, manifest: bytes, body: bytes = b"", **changes: int) -> Path:
    """A file with `body` and this manifest, which the last bytes lead to."""
    packed = deflated(manifest)
    own = {**about(manifest, packed, len(body)), **changes}
    words = " ".join(f"{name} {value}" for name, value in own.items())
    path.write_bytes(body + packed + f"gristmill bundle 1 {words}".encode())
    return path
