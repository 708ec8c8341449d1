"""The pages of docs/ops: every op is on one, with its variants, and costs what its page says."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.ops.op import Cost
from gristmill.ops.registry import OPS
from gristmill.select.device import KNOWN
from gristmill.select.roof import roof_of

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "ops"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
OP_PAGES = {name: text for name, text in PAGES.items() if name != "index"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# | `op(option=value)` | `bytes` | `operations` | dtype M=1 N=2 | roof us |
ROW = re.compile(
    r"^\| `(?P<op>\w+)(?:\((?P<options>.*?)\))?` \| `(?P<bytes>[^`]+)` \| `(?P<operations>[^`]+)` "
    r"\| (?P<dtype>\w+) (?P<sizes>(?:\w=\d+ ?)+) \| (?P<roof>[\d.]+) us \|$",
    re.MULTILINE,
)
BLOCK = re.compile(r"<!-- variants: (\w+) -->\n(.*?)<!-- variants: end -->", re.DOTALL)
SECTIONS = ("Bytes", "Variants", "Gradients", "Measured")


@dataclass(frozen=True)
class Stated:
    """A line of a page: what a call moves and does, by formulas, and what roof that is."""

    op: str
    options: str
    bytes: str
    operations: str
    dtype: str
    sizes: str
    roof: str

    def __str__(self) -> str:
        return f"{self.op}({self.options})"

    def values(self) -> dict[str, int]:
        sizes = dict(pair.split("=") for pair in self.sizes.split())
        return {name: int(value) for name, value in sizes.items()}

    def cost(self) -> Cost:
        """What the op says of its own example of these sizes."""
        op = OPS[self.op]
        options: dict[str, Any] = eval(f"dict({self.options})", {})
        shape = tuple(self.values().values())
        args = op.example_with(options, shape, DTYPES[self.dtype], "meta")
        return op.cost(*args)

    def worth(self, formula: str) -> int:
        names = {**self.values(), "s": DTYPES[self.dtype].itemsize, "min": min}
        return int(eval(formula, {"__builtins__": {}}, names))


STATED = [
    Stated(**{k: v or "" for k, v in m.groupdict().items()})
    for m in ROW.finditer("\n".join(OP_PAGES.values()))
]


@pytest.mark.parametrize("stated", STATED, ids=str)
def test_stated_costs_are_those_of_the_op(stated: Stated) -> None:
    cost = stated.cost()
    assert stated.worth(stated.bytes) == cost.bytes
    assert stated.worth(stated.operations) == cost.operations


@pytest.mark.parametrize("stated", STATED, ids=str)
def test_stated_roofs_are_those_of_explain(stated: Stated) -> None:
    """To three digits, as they are written."""
    roof = roof_of(KNOWN["sm_90a"], stated.cost())
    assert roof is not None
    places = max(0, 2 - math.floor(math.log10(roof.us)))
    assert stated.roof == f"{roof.us:.{places}f}"


def test_every_op_is_costed_on_one_page() -> None:
    assert {stated.op for stated in STATED} == set(OPS)
    assert max(Counter(str(stated) for stated in STATED).values()) == 1
    for name, text in OP_PAGES.items():
        lines = re.findall(r"^\| `.* us \|$", text, re.MULTILINE)
        assert len(lines) == len(ROW.findall(text)), f"{name}: a line that is not understood"


@pytest.mark.parametrize("name", OP_PAGES)
def test_tables_of_variants_are_those_of_the_registry(name: str) -> None:
    (block,) = BLOCK.findall(OP_PAGES[name])
    op, table = block
    listed = re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", table, re.MULTILINE)
    assert listed == [(variant.name, variant.summary) for variant in OPS[op].variants]


def test_what_is_said_of_other_ops_variants() -> None:
    """Sentences such as "the gradient has all but `library`", which the registry can break."""
    names = {name: [variant.name for variant in op.variants] for name, op in OPS.items()}

    def without(op: str, *missing: str) -> list[str]:
        return [name for name in names[op] if name not in missing]

    for op in ("add_rms_norm", "rms_norm_backward"):
        assert names[op] == without("rms_norm", "cutedsl")
    assert names["fused_add_rms_norm_"] == without("rms_norm", "cutedsl", "library")
    assert names["add_layer_norm"] == names["layer_norm_backward"] == names["layer_norm"]
    for op in ("add_rms_norm_fp8", "layer_norm_fp8", "add_layer_norm_fp8"):
        assert names[op] == names["rms_norm_fp8"]
    assert names["log_softmax"] == names["softmax"]
    for op in ("softmax_backward", "log_softmax_backward"):
        assert names[op] == without("softmax", "library")
    for op in ("cross_entropy_one_pass", "cross_entropy_one_pass_", "cross_entropy_shard"):
        assert names[op] == names["cross_entropy"]
    assert names["cross_entropy_backward"] == without("cross_entropy", "cuda_cluster")
    assert names["scale_gradient_"] == ["cuda_block", "reference"]
    assert names["linear_cross_entropy_backward"] == names["linear_cross_entropy"]
    for op in ("matmul", "linear_with_pre"):
        assert names[op] == without("linear", "library_fused")
    assert names["topk_router_backward"] == without("topk_router", "library")
    assert names["moe_backward"] == names["nvfp4_moe_backward"] == ["library", "reference"]
    assert names["nvfp4_linear_backward"] == ["dequantized", "library", "reference"]


@pytest.mark.parametrize("name", OP_PAGES)
def test_pages_have_what_every_page_has(name: str) -> None:
    text = OP_PAGES[name]
    titles = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    for section in SECTIONS:
        assert any(title.startswith(section) for title in titles), section
    first = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert first is not None, "an example"
    assert "assert" in first[1], "an example that shows what is true"
    assert re.search(r"^    \S.* = ", text, re.MULTILINE), "a formula"
    assert re.search(r"batch[_-]invarian", text)
    assert "torch.compile" in text


def test_the_index_links_to_every_page() -> None:
    assert set(re.findall(r"\]\((\w+)\.md\)", PAGES["index"])) == set(OP_PAGES)
