"""What `gristmill doctor` finds out about the cache: the user's folder and the layers below it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gristmill.errors import BundleError
from gristmill.jit import cache
from gristmill.jit.bundle import damages
from gristmill.jit.layers import damaged_in, is_bundle, open_layer
from gristmill.names import counted
from gristmill.settings import settings

Report = dict[str, Any]


def default_folder() -> str:
    """Where the cache is if nothing is set; "" where there is no home."""
    try:
        return str(Path("~/.cache/gristmill").expanduser())
    except RuntimeError:
        return ""


def folder_report() -> Report:
    """The user's folder: `problem` says why it is not used for reading or for writing."""
    folder = cache.folder()
    untrusted = cache.why_unusable()
    place = folder
    while place is not None and not place.exists() and place != place.parent:
        place = place.parent
    writable = place is not None and os.access(place, os.W_OK)
    problem = untrusted
    if problem is None and not writable:
        problem = f"{place} cannot be written to"
    found = cache.entries()
    return {
        "folder": None if folder is None else str(folder),
        "trusted": untrusted is None,
        "writable": writable,
        "problem": problem,
        "programs": len(found),
        "bytes": sum(kept.size for kept in found),
    }


def layer_reports() -> list[Report]:
    """Every layer in order: `problem` says why it is passed over, `damaged` what in it is."""
    return [_layer(path) for path in settings().cache_layers]


def _layer(path: Path) -> Report:
    report: Report = {
        "path": str(path),
        "kind": "bundle" if is_bundle(path) else "folder",
        "problem": None,
        "programs": 0,
        "damaged": [],
    }
    layer = open_layer(path)
    if isinstance(layer, str):
        report["problem"] = layer
        return report
    report["programs"] = layer.count()
    try:
        report["damaged"] = damages(path) if is_bundle(path) else damaged_in(path / "kernels")
    except (OSError, BundleError) as error:
        report["problem"] = str(error)
    return report


def folder_warnings(folder: Report) -> list[str]:
    """What is slower than it should be, a sentence each."""
    return [f"kernels are kept in memory only: {folder['problem']}"] if folder["problem"] else []


def layer_problems(layers: list[Report]) -> list[str]:
    """What is wrong with layers, a sentence each."""
    found = []
    for layer in layers:
        if layer["problem"]:
            found.append(f"layer {layer['path']} is passed over: {layer['problem']}")
        elif layer["damaged"]:
            count, first = len(layer["damaged"]), layer["damaged"][0]
            files = "1 file is" if count == 1 else f"{count} files are"
            found.append(f"layer {layer['path']}: {files} damaged and passed over: {first}")
    return found


def folder_line(folder: Report) -> str:
    if folder["folder"] is None:
        return f"none: {folder['problem']}"
    size = f"{counted(folder['programs'], 'program')}, {folder['bytes'] / 1e6:.1f} MB"
    trusted = "trusted" if folder["trusted"] else "not trusted"
    writable = "writable" if folder["writable"] else "not writable"
    return f"{folder['folder']} ({size}; {trusted}, {writable})"


def layer_line(layer: Report) -> str:
    if layer["problem"]:
        return f"{layer['path']} (not used)"
    damaged = f", {len(layer['damaged'])} damaged" if layer["damaged"] else ""
    programs = counted(layer["programs"], "program")
    return f"{layer['path']} ({layer['kind']}, {programs}{damaged}; trusted)"
