"""What documents derive from the code and from the committed run is in step: tools/pages.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import pages  # noqa: E402
import pages_coverage  # noqa: E402
import pages_measured  # noqa: E402
from pages_settings import MORE, table  # noqa: E402
from pages_text import Page, filled, joined  # noqa: E402

from gristmill.bench.results import Results  # noqa: E402
from gristmill.bench.suites import tasks  # noqa: E402
from gristmill.settings import VARIABLES  # noqa: E402

PINNED = re.search(r"^TORCH \?= torch==([\d.]+)$", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.skipif(
    PINNED is None or not torch.__version__.startswith(PINNED[1]),
    reason="what torch's own ops take depends on torch: the pages are those of the pinned one",
)
def test_everything_derived_is_in_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Settings, support, variants; figures and plots, byte by byte, from the committed JSON."""
    assert pages.main(["--check"]) == 0, capsys.readouterr().out


def test_a_change_is_found_and_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a copy of one page in which a line was changed by hand."""
    page = tmp_path / "docs" / "settings.md"
    page.parent.mkdir()
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    changed = text.replace("forbids compiling", "allows compiling")
    page.write_text(changed, encoding="utf-8")

    assert pages.main(["--check"], tmp_path) == 1
    assert "docs/settings.md" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == changed != text
    assert pages.main([], tmp_path) == 0
    assert page.read_text(encoding="utf-8") == text
    assert pages.main(["--check"], tmp_path) == 0


def test_settings_have_a_row_and_a_page_each() -> None:
    assert set(MORE) == {variable.name for variable in VARIABLES}
    rows = table(Page(ROOT / "docs" / "settings.md", ROOT)).splitlines()[2:]
    for variable, row in zip(VARIABLES, rows, strict=True):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        words = variable.values.split("|") if "|" in variable.values else [variable.values]
        assert cells[0] == f"`{variable.name}`"
        assert cells[1].replace("`", "") == ", ".join(words)
        assert cells[2].replace("`", "") == (variable.default or "nothing")
        assert cells[3].replace("`", "") == variable.help
        assert cells[4].startswith("[")


def test_blocks_are_filled_and_the_rest_left_alone() -> None:
    one, two = (
        "<!-- one: begin -->\n{}<!-- one: end -->\n",
        "<!-- two: it -->\n{}<!-- two: end -->\n",
    )
    text = "before\n" + one.format("old\n") + "between\n" + two.format("")
    parts = {"one": lambda page: "new\n", "two": lambda page: page.subject}
    page = Page(ROOT / "docs" / "ops" / "x.md", ROOT)
    wanted = "before\n" + one.format("new\n") + "between\n" + two.format("it\n")
    assert filled(text, page, parts, known=parts) == wanted
    assert filled("no block", page, parts, known=parts) is None
    assert filled(text, page, {}, known=parts) == text  # nothing was measured: left as it is
    with pytest.raises(ValueError, match="no part 'one'"):
        filled(text, page, {}, known=["two"])
    assert page.link("docs/plots/a.svg") == "../plots/a.svg"
    assert joined(["a"]) == "a"
    assert joined(["a", "b", "c"]) == "a, b and c"


def timed(shape: str, impl: str, us: float) -> dict[str, object]:
    rows, columns = map(int, shape.split("x"))
    size = {"M": rows, "N": columns, "shape": shape, "bytes": 4 * rows * columns}
    sure = {"spread_us": 0.1, "samples": 7, "method": "graph", "roof_us": us / 2, "roof_share": 0.5}
    return {"op": "softmax", "dtype": "bfloat16", "impl": impl, "us": us, **size, **sure}


def test_figures_are_those_of_the_run() -> None:
    """One problem is won against both peers, one lost to one: 0.5 and 2 make a mean of 1."""
    rows = [
        *(timed("64x4096", "gristmill", 10), timed("64x4096", "quack", 20)),
        *(timed("64x4096", "eager", 40), timed("16x8192", "gristmill", 10)),
        *(timed("16x8192", "quack", 5), timed("16x8192", "eager", 10)),
    ]
    results = Results({"gpu": "a GPU", "date": "2026-11-16", "device": "cuda"}, rows)
    on_op_page = pages_measured.measured(Page(ROOT / "docs/ops/softmax.md", ROOT), results)
    assert "One a GPU, 2026-11-16" in on_op_page
    assert "| `softmax` | bfloat16 | 2 of 44 | 1.00x | 1.00x | 2.00x | 50% |" in on_op_page
    assert (
        "not in that run: `softmax_bwd`, `softmax_causal` and `softmax_causal_bwd`." in on_op_page
    )
    assert "fastest peer: `softmax` 16x8192 in bfloat16, 0.50x (quack)." in on_op_page
    assert "](../plots/softmax.svg)" in on_op_page
    lost = pages_measured.losses(Page(ROOT / "docs/results.md", ROOT), results)
    assert lost.startswith("On 1 of 2 problems")
    assert "| `softmax` | 16x8192 | bfloat16 | 10.0 | 5.00 | quack | 0.50x |" in lost
    assert "64x4096" not in lost
    nothing = pages_measured.measured(Page(ROOT / "docs/ops/moe.md", ROOT), results)
    assert nothing == "Nothing of this page was measured in the committed run."


OURS_WINS, OURS_LOSES = {"gristmill": 10.0, "quack": 20.0}, {"gristmill": 10.0, "quack": 5.0}


def test_what_a_run_lacks_and_loses_is_told() -> None:
    """Of two softmaxes one is lost; the rest of the suites is missing, and one step was wrong."""
    rows = [
        *({**timed("64x4096", name, us), "sets": ["decode"]} for name, us in OURS_WINS.items()),
        *({**timed("33x65537", name, us), "sets": ["odd"]} for name, us in OURS_LOSES.items()),
        {"suite": "end_to_end", "op": "training", "shape": "2x8", "impl": "eager", "ms": 12.34},
        {
            "suite": "end_to_end",
            "op": "training",
            "shape": "2x8",
            "impl": "liger",
            "error": "WrongResultError: the loss is 1, not 2",
        },
    ]
    rows[0]["source"] = "shipped table"
    meta = {"gpu": "a GPU", "date": "2026-11-16", "device": "cuda", "finished": False}
    results, page = Results(meta, rows), Page(ROOT / "docs/results.md", ROOT)

    told = pages_coverage.coverage(page, results)
    whole = len(tasks("cuda", suites=("softmax",))[0])
    assert f"| `softmax` | 2 of {whole} | `softmax` 2 of 44, `softmax_bwd` none," in told
    assert "| `moe` | none | `moe` none |  |" in told
    assert "| `regret` | not in this run |  |  |" in told
    assert "| `end_to_end` | 2 rows |  |  |" in told
    assert "On 1 of the 2 problems gristmill ran a launch of its shipped table, on 1 one by" in told

    sets = pages_coverage.by_set(page, results).splitlines()
    assert sets[2:] == ["| `odd` | 1 | 0.50x | 1 | 0.50x |", "| `decode` | 1 | 2.00x | 0 | 2.00x |"]

    steps = pages_coverage.blocks(page, results)
    assert "| `training`, 2x8 | 12.3 | not timed |" in steps
    assert "`liger` in `training`: the loss is 1, not 2." in steps

    short = pages_measured.measured(Page(ROOT / "README.md", ROOT), results)
    assert "2 of 460 problems, and none of `rms_norm`" in short
    assert "a time limit cut the run short" in short
    assert f"| softmax | 2 of {whole} | 1.00x | 1 | 0.50x | quack 1.00x |  |" in short
    assert "#shapes): `odd` 1 of 1 (worst 0.50x)\n" in short
