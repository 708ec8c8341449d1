"""Colours, markers and dashes, the same in every picture, for light paper and for dark.

A drawing names colours by CSS custom properties only: `LIGHT` and `DARK` hold their values. Every
implementation has a colour, and beside it a marker and a dash of its own, so that those who see
fewer colours, and print in grey, tell them apart as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gristmill.bench.charts.text import FONT
from gristmill.bench.results import OURS

# Implementation or library: colour on light paper, on dark paper, marker, dash of its line.
_STYLES = {
    OURS: ("#c2410c", "#ff8f52", "circle", ""),
    "eager": ("#6b7280", "#9aa4b2", "square", ""),
    "inductor": ("#1d4ed8", "#7aa7ff", "up", ""),
    "quack": ("#0f766e", "#2dd4bf", "diamond", ""),
    "quack_one_pass": ("#0f766e", "#2dd4bf", "diamond", ""),
    "quack_two_pass": ("#0f766e", "#2dd4bf", "open_diamond", "5 3"),
    "quack_w4a16": ("#0f766e", "#2dd4bf", "open_diamond", ""),
    "liger": ("#a21caf", "#e48cf0", "down", ""),
    "flashinfer": ("#a16207", "#e6b84a", "plus", ""),
    "cublas": ("#6b7280", "#9aa4b2", "open_square", ""),
    "cublas_bf16": ("#6b7280", "#9aa4b2", "open_square", ""),
    "torch": ("#6b7280", "#9aa4b2", "open_square", "5 3"),
    "torch_grouped_mm_bf16": ("#6b7280", "#9aa4b2", "open_square", "5 3"),
    "humming": ("#7c3aed", "#b9a0ff", "open_down", ""),
    "vllm": ("#4d7c0f", "#a6d35f", "cross", ""),
    "vllm_marlin": ("#4d7c0f", "#a6d35f", "cross", ""),
    "vllm_marlin_nvfp4": ("#4d7c0f", "#a6d35f", "cross", "5 3"),
    "vllm_fused_moe": ("#4d7c0f", "#a6d35f", "open_circle", ""),
}
# For names that are not known, in the order of the alphabet.
_OTHERS = (
    ("#be185d", "#ff86b3", "star", ""),
    ("#0369a1", "#56c2f5", "open_up", ""),
    ("#854d0e", "#d9a066", "star", "5 3"),
    ("#374151", "#d1d5db", "open_up", "2 2"),
)
# What a time is made of, and which variant of ours ran: tints that text can stand on.
_PAPER = {
    "ink": ("#1f2937", "#e6edf3"),
    "muted": ("#5b6470", "#9ba5b1"),
    "faint": ("#e5e7eb", "#262c36"),
    "paper": ("#ffffff", "#0d1117"),
    "roof": ("#1f2937", "#e6edf3"),
    "loss": ("#fbe0e0", "#3a181b"),
    "zone": ("#fdf3f3", "#1f141a"),
    "bad": ("#b91c1c", "#ff8a8a"),
    "v0": ("#fbe3d3", "#44291a"),
    "v1": ("#c9d1dc", "#3b4656"),
    "v2": ("#eea67c", "#8a4a22"),
    "v3": ("#d5eae4", "#1d4640"),
    "v4": ("#a9b6c6", "#566477"),
    "v5": ("#f3e3a8", "#5a4a14"),
    "h0": ("#f3f4f6", "#1b212b"),
    "h1": ("#ffedd5", "#3a2413"),
    "h2": ("#fdd0a0", "#5c3313"),
    "h3": ("#fb9d5c", "#8f430f"),
    "h4": ("#c8400c", "#d9651f"),
    "h5": ("#8a2c0d", "#ffb27d"),
    "on-dark": ("#ffffff", "#0d1117"),
    "p0": ("#c2410c", "#ff8f52"),
    "p1": ("#7c3aed", "#b9a0ff"),
    "p2": ("#1d4ed8", "#7aa7ff"),
    "p3": ("#0f766e", "#2dd4bf"),
}
VARIANT_TINTS = 6
HEATS = 6


@dataclass(frozen=True)
class Style:
    """How an implementation is drawn: the name of its colour, its marker, its dash."""

    colour: str
    marker: str
    dash: str


def slug(name: str) -> str:
    """A name as a part of the name of a class or a property."""
    return re.sub(r"[^a-zA-Z0-9_-]+", "-", name) or "-"


class Styles:
    """The style of each name; those not known share what is left, by their order."""

    def __init__(self, names: Iterable[str] = ()):
        unknown = sorted({name for name in names if name not in _STYLES})
        self._others = {name: index % len(_OTHERS) for index, name in enumerate(unknown)}

    def __getitem__(self, name: str) -> Style:
        if name in _STYLES:
            return Style(slug(name), *_STYLES[name][2:])
        index = self._others.get(name, 0)
        return Style(f"other-{index}", *_OTHERS[index][2:])


def _properties(side: int) -> dict[str, str]:
    colours = {f"--gm-{name}": values[side] for name, values in _PAPER.items()}
    colours |= {f"--gm-c-{slug(name)}": values[side] for name, values in _STYLES.items()}
    return colours | {f"--gm-c-other-{index}": values[side] for index, values in enumerate(_OTHERS)}


LIGHT: dict[str, str] = _properties(0)
DARK: dict[str, str] = _properties(1)
KNOWN = tuple(_STYLES)


def _rules() -> str:
    names = [slug(name) for name in _STYLES] + [f"other-{index}" for index in range(len(_OTHERS))]
    rules = [
        f".gm{{font-family:{FONT};font-size:11px;fill:var(--gm-ink);"
        "font-variant-numeric:tabular-nums}",
        ".gm .mu{fill:var(--gm-muted)}",
        ".gm .b{font-weight:700}",
        ".gm .bad{fill:var(--gm-bad)}",
        ".gm .od{fill:var(--gm-on-dark)}",
        ".gm .grid{stroke:var(--gm-faint);stroke-width:1}",
        ".gm .axis{stroke:var(--gm-muted);stroke-width:1}",
        ".gm .roof{stroke:var(--gm-roof);stroke-width:1.4;stroke-dasharray:5 4;fill:none}",
        ".gm .goal{stroke:var(--gm-bad);stroke-width:1.2;stroke-dasharray:5 4;fill:none}",
        ".gm .loss{fill:var(--gm-loss)}",
        ".gm .zone{fill:var(--gm-zone)}",
        ".gm .paper{fill:var(--gm-paper)}",
        ".gm .whisker{stroke:var(--gm-ink);stroke-width:1.2}",
        ".gm .tick{stroke:var(--gm-muted);stroke-width:1;opacity:.6}",
        ".gm .tick-bad{stroke:var(--gm-bad);stroke-width:1.4}",
        ".gm .halo{paint-order:stroke;stroke:var(--gm-paper);stroke-width:3px}",
        ".gm .ln{fill:none;stroke-width:1.4;stroke-linejoin:round}",
        ".gm .ours{stroke-width:2.4}",
        ".gm .mk{stroke:var(--gm-paper);stroke-width:.8}",
        ".gm .op{fill:var(--gm-paper);stroke-width:1.5}",
        ".gm .st{fill:none;stroke-width:2}",
    ]
    for name in names:
        rules.append(f".gm .f-{name}{{fill:var(--gm-c-{name})}}")
        rules.append(f".gm .s-{name}{{stroke:var(--gm-c-{name})}}")
    for kind, count in (("v", VARIANT_TINTS), ("h", HEATS), ("p", 4)):
        rules += [f".gm .{kind}{index}{{fill:var(--gm-{kind}{index})}}" for index in range(count)]
    return "\n".join(rules)


# Inlined drawings come in two layouts; a page shows the one that its width has room for.
CSS = f"""{_rules()}
.gm{{display:block;width:100%;height:auto}}
.gm-chart .gm-narrow{{display:none}}
@media (max-width:640px){{.gm-chart .gm-wide{{display:none}}.gm-chart .gm-narrow{{display:block}}}}
"""


def standalone_css() -> str:
    """The rules of a file of its own: both themes, and which of them the reader has."""
    return (
        f":root{{{_declared(LIGHT)}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{_declared(DARK)}}}}}\n{_rules()}"
    )


def _declared(properties: Mapping[str, str]) -> str:
    return ";".join(f"{name}:{value}" for name, value in properties.items())
