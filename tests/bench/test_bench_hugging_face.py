"""The suite `transformers`: on a CPU with a tiny model, and what its answers become."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from gristmill.bench.fresh import beyond_the_first
from gristmill.bench.hugging_face import child as hugging_face_child
from gristmill.bench.hugging_face import suite as hugging_face
from gristmill.bench.hugging_face.models import TINY, llama, tokens
from gristmill.bench.hugging_face.report import tables
from gristmill.bench.hugging_face.steps import Steps, difference
from gristmill.bench.hugging_face.suite import CASES, Case
from gristmill.bench.results import Results
from gristmill.cli.app import app
from gristmill.errors import GristmillError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = {(case.op, case.impl): case for case in CASES}


def measured(op: str, impl: str) -> dict[str, Any]:
    """As the child does it, in this process."""
    pytest.importorskip("transformers")
    spec = hugging_face.spec(CASE[op, impl], CPU, 2)
    return hugging_face_child.measure(json.loads(json.dumps(spec)))


def measured_at_last(op: str, impl: str) -> dict[str, Any]:
    """The same; a machine that is busy with other tests may be too busy for six tokens."""
    for _ in range(4):
        try:
            return measured(op, impl)
        except GristmillError as error:
            if "too busy" not in str(error):
                raise
    return measured(op, impl)


def test_a_machine_that_is_too_busy_gives_no_time() -> None:
    assert beyond_the_first([26.0, 25.0, 90.0], [6.0, 5.0, 4.0], 6) == (26.0 - 5.0) / 5
    with pytest.raises(GristmillError, match=r"6 tokens took 25, and one took 26: .* too busy"):
        beyond_the_first([25.0], [26.0], 6)


@pytest.mark.parametrize("impl", ["patched", "patched_linear_cross_entropy"])
def test_training_tracks_the_model_as_it_is(impl: str) -> None:
    eager = measured("training", "eager")
    assert eager["losses"][0] > eager["losses"][-1] > 0  # it learns
    ours = measured("training", impl)
    row = hugging_face.row_of(CASE["training", impl], CPU, ours, eager["losses"])
    assert row["error"] is None
    assert row["loss_off"] < 0.001
    assert row["replaced"] == 6  # five norms and the loss
    assert row["ms"] > 0
    assert "peak_gib" not in row
    assert any(name.startswith("rms_norm:") for name in row["choices"])


@pytest.mark.long
@pytest.mark.parametrize("impl", ["compiled", "patched_compiled", "patched_compiled_inline"])
def test_compiled_training_tracks_the_model_as_it_is(impl: str) -> None:
    eager, ours = measured("training", "eager"), measured("training", impl)
    row = hugging_face.row_of(CASE["training", impl], CPU, ours, eager["losses"])
    assert (row["error"], row["graph_breaks"]) == (None, 0)


def test_all_losses_are_one() -> None:
    losses = {
        impl: measured("loss", impl)["losses"]
        for impl in ("eager", "cross_entropy", "linear_cross_entropy")
    }
    assert losses["cross_entropy"] == pytest.approx(losses["eager"], rel=1e-4)
    assert losses["linear_cross_entropy"] == pytest.approx(losses["eager"], rel=1e-4)


def test_generation_with_nvfp4_weights() -> None:
    row = measured_at_last("generation", "nvfp4_norms")
    assert row["replaced"] == 14 + 5
    assert any(name.startswith("nvfp4_linear:") for name in row["choices"])
    assert row["ms"] > 0
    assert row["steady_ms"] > 0


@pytest.mark.parametrize("impl", ["bf16_graph", "nvfp4_head_graph"])
def test_generation_by_steps(impl: str) -> None:
    row = measured("generation", impl)
    assert row["captured"] is False  # no CUDA graph of a CPU's steps
    assert row.get("replaced", 0) == (15 + 5 if impl == "nvfp4_head_graph" else 0)
    assert min(row["ms"], row["steady_ms"], row["prefill_ms"]) > 0


def prepared(device: torch.device = CPU, *, compiled: bool = False) -> tuple[Any, Any, Steps]:
    pytest.importorskip("transformers")
    model = llama(TINY, device, use_cache=True).eval()
    ids = tokens((1, TINY.prompt), TINY.vocabulary, device)
    return model, ids, Steps(model, ids, TINY.tokens, compiled=compiled)


def test_steps_make_the_tokens_that_generate_makes() -> None:
    model, ids, steps = prepared()
    made = model.generate(ids, max_new_tokens=TINY.tokens, do_sample=False)[0, TINY.prompt :]
    for _ in range(2):  # a second text does not see the first
        steps.start()
        steps.steps()
        assert steps.tokens() == made.tolist()
        assert difference(steps, made.tolist()) is None


class Capturable(TorchDispatchMode):
    """Refuses what no CUDA graph takes: values that are read, and tensors made by the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "lift_fresh"), name
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, steps = prepared()
    steps.start()
    with Capturable():
        steps.steps()
    reads = model.forward

    def reading(**words: Any) -> Any:
        return reads(**words) if words["position_ids"].item() else None

    steps.start()
    monkeypatch.setattr(model, "forward", reading)
    with Capturable(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        steps.steps()


def test_other_tokens_than_expected_are_told() -> None:
    _, _, steps = prepared()
    steps.start()
    steps.steps()
    made = steps.tokens()
    expected = [*made[:3], made[3] + 1, *made[4:]]
    assert difference(steps, expected) == (
        f"token 3 of 6 is {made[3]}, and that of the same steps without a graph is {made[3] + 1}; "
        "neither do those steps repeat themselves"
    )


@pytest.mark.gpu
def test_a_step_is_captured() -> None:
    _, _, steps = prepared(CUDA, compiled=True)
    steps.start()
    steps.steps()
    expected = steps.tokens()
    steps.capture()
    for _ in range(2):
        steps.start()
        steps.steps()
        assert difference(steps, expected) is None


def test_a_patch_that_leaves_what_the_row_is_about_is_an_error() -> None:
    pytest.importorskip("transformers")
    case = Case("generation", "x", {"norms": True, "loss": None}, needs=("lm_head",))
    with pytest.raises(RuntimeError, match=r"left lm_head as it was"):
        hugging_face_child.measure(hugging_face.spec(case, CPU, 1))


def test_a_child_tells_its_errors(capsys: pytest.CaptureFixture[str]) -> None:
    spec = {**hugging_face.spec(CASE["loss", "eager"], CPU, 1), "loss": "none of these"}
    pytest.importorskip("transformers")
    hugging_face_child.main([json.dumps(spec)], {})
    assert json.loads(capsys.readouterr().out) == {"error": "KeyError: 'none of these'"}


@pytest.mark.parametrize("losses", [[6.0, 5.0], [6.0, float("nan")]])
def test_a_loss_that_strays_is_an_error(losses: list[float]) -> None:
    case = CASE["training", "patched"]
    row = hugging_face.row_of(case, CUDA, {"ms": 1.0, "losses": losses}, [6.0, 5.9])
    assert "losses are off" in row["error"]
    assert hugging_face.row_of(case, CUDA, {"losses": losses}, None)["error"] is None


def test_rows_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {
        "eager": {"ms": 220.0, "peak_gib": 40.0, "losses": [12.0, 11.0]},
        "patched": {"ms": 200.0, "peak_gib": 30.0, "losses": [12.0, 11.011]},
        "compiled": GristmillError("compiled gave no answer"),
    }

    def child(module: str, words: Any, environment: Any, what: str) -> dict[str, Any]:
        assert environment == {"HF_HUB_OFFLINE": "1"}
        assert json.loads(words[0])["sizes"]["layers"] == 4
        said = answers[what.removeprefix("training, ")]
        if isinstance(said, GristmillError):
            raise said
        return dict(said)

    monkeypatch.setattr(hugging_face, "in_fresh_process", child)
    monkeypatch.setattr(hugging_face, "missing", lambda: None)
    results = Results({})
    chosen = hugging_face.cases(["training"], list(answers))
    hugging_face.run(CUDA, results, lambda text: None, chosen)
    ((title, (header, body)),) = tables(results.rows)
    assert title == "transformers, training step (4 layers, 4x2048)"
    lines = {line[0]: dict(zip(header, line, strict=True)) for line in body}
    assert lines["patched"]["ms"] == "200"
    assert (lines["patched"]["vs eager"], lines["patched"]["of eager's"]) == ("1.10x", "0.75")
    assert lines["patched"]["off eager's"] == "0.100%"
    assert lines["compiled"]["ms"] == "failed"
    assert lines["patched"]["vs compiled"] == ""
    # A run that goes on has eager's losses from before, and starts what is not there.
    gone_on = Results({}, [row for row in results.rows if row["impl"] != "patched"])
    answers["eager"] = answers["compiled"] = None
    hugging_face.run(CUDA, gone_on, lambda text: None, chosen)
    assert [row["impl"] for row in gone_on.rows] == ["eager", "compiled", "patched"]
    assert gone_on.rows[-1]["loss_off"] == results.rows[1]["loss_off"] == 0.001


def test_generation_and_loss_as_tables() -> None:
    said = {
        ("loss", "eager"): {"ms": 30.0, "peak_gib": 12.0},
        ("loss", "linear_cross_entropy"): {"ms": 33.0, "peak_gib": 3.0},
        ("generation", "bf16"): {"ms": 5.0, "steady_ms": 4.0},
        ("generation", "nvfp4_norms"): {"ms": 2.5, "steady_ms": 1.6},
        ("generation", "bf16_graph"): {"ms": 4.2, "steady_ms": 4.2},
        ("generation", "nvfp4_norms_graph"): {"ms": 1.4, "steady_ms": 1.4},
    }
    rows = [hugging_face.row_of(CASE[key], CUDA, value, None) for key, value in said.items()]
    found = {title: body for title, (_, body) in tables(rows)}
    loss = found["transformers, head and loss, forward and backward (4x2048)"]
    assert loss[1][:5] == ["linear_cross_entropy", "33.0", "0.91x", "3.00", "0.25"]
    generation = found["transformers, generation, batch 1 (32 layers, 128 tokens)"]
    assert generation[1][:5] == ["nvfp4_norms", "2.50", "2.00x", "1.60", "2.50x"]
    # Replays beside replays.
    assert generation[3][:5] == ["nvfp4_norms_graph", "1.40", "3.00x", "1.40", "3.00x"]


def test_rows_can_be_chosen() -> None:
    assert [case.impl for case in hugging_face.cases(["generation"], ["nvfp4"])] == ["nvfp4"]
    assert len(hugging_face.cases()) == len(CASES)
    quick = hugging_face.cases(quick=True)
    assert {case.op for case in quick} == set(hugging_face.OPS)
    assert not any(case.compiled for case in quick)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--op", "trainin"], "did you mean training?"),
        (["--impls", "patchd"], "did you mean patched?"),
        (["--op", "loss", "--impls", "patched"], "unknown implementation 'patched'"),
    ],
)
def test_mistakes_are_told(words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "missing", lambda: None)
    done = CliRunner().invoke(app, ["bench", "transformers", "--device", "cpu", *words])
    assert done.exit_code == 2
    assert says in done.output


def test_without_transformers_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face.importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["bench", "transformers", "--device", "cpu"])
    assert done.exit_code == 2
    assert "pip install" in done.output


@pytest.mark.long
def test_the_whole_command_on_a_cpu(tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    words = ["transformers", "--op", "loss", "--device", "cpu", "--samples", "1"]
    done = CliRunner().invoke(app, ["bench", *words, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == ["eager", "cross_entropy", "linear_cross_entropy"]
    assert all(row["error"] is None and row["loss_off"] < 1e-3 for row in rows[1:])
