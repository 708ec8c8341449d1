from __future__ import annotations

import math
from typing import Any

import pytest

from gristmill.bench.layers import FEW, MODELS
from gristmill.bench.shapes import OF_TASKS, SETS
from gristmill.bench.suites import (
    CPU_LIMIT,
    KERNEL_SUITES,
    KINDS,
    SUITES,
    Task,
    layers_of,
    tasks,
    written,
)
from gristmill.errors import ArgumentError
from gristmill.ops.registry import OPS as REGISTRY

FAMILIES = {
    "rms_norm": ["rms_norm", "add_rms_norm", "rms_norm_bwd"],
    "layer_norm": ["layer_norm", "add_layer_norm", "layer_norm_bwd"],
    "softmax": ["softmax", "softmax_bwd", "softmax_causal", "softmax_causal_bwd"],
    "cross_entropy": [
        "cross_entropy",
        "cross_entropy_bwd",
        "cross_entropy_fwd_bwd",
        "cross_entropy_train",
    ],
    "linear": ["linear", "linear_relu", "linear_silu", "linear_gelu"],
    "nvfp4_linear": ["nvfp4_linear", "nvfp4_linear_fp8"],
    "nvfp4_moe": ["nvfp4_moe"],
    "moe": ["moe"],
    "topk_router": ["topk_router", "topk_router_grouped"],
}
EXPERTS = ("nvfp4_moe", "moe")
# N x K of others' recorded results, which the goals are about.
RECORDED = ((4096, 4096), (8192, 8192), (28672, 4096), (57344, 8192))


def test_a_gpu_runs_every_shape_of_every_task() -> None:
    found, notes = tasks("cuda")
    assert len(found) == len(set(found))
    assert {task.dtype for task in found} == {"bfloat16"}
    assert notes == []
    for name in KINDS:
        shapes = {task.shape for task in found if task.name == name}
        assert shapes == {shape for one in OF_TASKS[name] for shape in SETS[one].shapes}


def test_the_causal_softmax_is_judged_by_the_plain_one() -> None:
    shapes: dict[str, set[object]] = {}
    for task in tasks("cuda", suites=["softmax"])[0]:
        shapes.setdefault(task.name, set()).add(task.shape)
    assert shapes["softmax_causal"] <= shapes["softmax"]
    assert shapes["softmax_causal_bwd"] <= shapes["softmax_bwd"]


def test_the_layers_over_nvfp4() -> None:
    """Those of recorded results; rounded activations where they can pay."""
    shapes = {task.shape for task in tasks("cuda", names=["nvfp4_linear"])[0]}
    assert shapes == {(rows, *layer) for rows in (1, 16, 64, 256, 1024) for layer in RECORDED}
    assert set(FEW) == set(RECORDED)
    rounded = {task.shape for task in tasks("cuda", names=["nvfp4_linear_fp8"])[0]}
    assert rounded == {(rows, *layer) for rows in (1024, 4096) for layer in RECORDED}
    of_models = layers_of("qwen3_32b")
    found = tasks("cuda", names=["nvfp4_linear"], layers=of_models)[0]
    assert {task.shape[1:] for task in found} == set(MODELS["qwen3_32b"])


def test_products_by_layer_and_by_rows() -> None:
    names = ["nvfp4_linear", "linear"]
    found, _ = tasks("cuda", names=names, layers=[(8192, 8192), (48, 32)], rows=[3, 64])
    assert [(task.name, written(task.shape)) for task in found] == [
        (name, shape)
        for name in names
        for shape in ("3x8192x8192", "64x8192x8192", "3x48x32", "64x48x32")
    ]
    found, _ = tasks("cuda", suites=["nvfp4_linear"], layers=[(48, 32)])
    assert [task.rows for task in found if task.name == "nvfp4_linear"] == [1, 16, 64, 256, 1024]
    assert [task.rows for task in found if task.name == "nvfp4_linear_fp8"] == [1024, 4096]
    found, _ = tasks("cuda", rows=[16])
    products = {*FAMILIES["linear"], *FAMILIES["nvfp4_linear"]}
    assert {task.name for task in found} == {*products, *EXPERTS}
    assert sum(task.name == "nvfp4_linear" for task in found) == 4
    found, _ = tasks("cuda", names=["nvfp4_linear"], layers=FEW, rows=[1], quick=True)
    assert [task.shape for task in found] == [(1, *layer) for layer in FEW]


@pytest.mark.parametrize("filters", [{"layers": [(64, 64)]}, {"rows": [3]}])
def test_layers_and_rows_of_what_has_none(filters: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="none of these tasks has them"):
        tasks("cuda", suites=["softmax"], **filters)
    with pytest.raises(ArgumentError, match="a shape by hand has both"):
        tasks("cuda", names=["linear"], shapes=[(4, 64, 64)], **filters)


def test_layers_by_name() -> None:
    assert layers_of("few") == FEW
    assert layers_of("qwen3_32b") == MODELS["qwen3_32b"]
    assert layers_of("48x32") == ((48, 32),)
    with pytest.raises(ArgumentError, match=r"set of layers 'lama3_8b' \(did you mean llama3_8b"):
        layers_of("lama3_8b")
    for text in ("48", "48x", "1x2x3", "0x16", "4x-1"):
        with pytest.raises(ArgumentError, match=f"'{text}': a layer is N x K"):
            layers_of(text)


@pytest.mark.parametrize("suite", FAMILIES)
def test_a_suite_is_a_family(suite: str) -> None:
    found, _ = tasks("cuda", suites=[suite])
    assert list(dict.fromkeys(task.name for task in found)) == FAMILIES[suite]
    assert suite in SUITES


def test_every_suite_has_a_summary_and_every_task_a_suite() -> None:
    assert tuple(FAMILIES) == KERNEL_SUITES
    assert list(SUITES) == [
        *KERNEL_SUITES,
        *("host_cost", "cold_start", "regret", "choice", "end_to_end", "vllm", "transformers"),
    ]
    assert all(suite.summary for suite in SUITES.values())


def test_every_task_names_an_op_that_exists() -> None:
    assert {task.op for task in tasks("cuda")[0]} <= set(REGISTRY)
    for kind in KINDS.values():
        names = [one.name for one in REGISTRY[kind.op].overload._schema.arguments]
        assert set(kind.options) <= set(names)


def test_rows_are_all_leading_dims() -> None:
    task = Task("softmax_causal", (16, 4096, 2048), "bfloat16")
    assert (task.rows, task.columns) == (65536, 2048)
    assert str(task) == "softmax_causal 16x4096x2048 bfloat16"


def test_a_product_has_rows_columns_and_a_depth() -> None:
    task = Task("linear_silu", (16, 4096, 2048), "bfloat16")
    assert (task.rows, task.columns, task.depth) == (16, 4096, 2048)
    square = Task("linear", (16, 64), "bfloat16")
    assert (square.rows, square.columns, square.depth) == (16, 64, 64)
    assert Task("softmax", (16, 64), "bfloat16").depth is None


def test_a_cpu_leaves_the_large_shapes_out_and_says_so() -> None:
    found, notes = tasks("cpu")
    assert Task("rms_norm", (256, 4096), "bfloat16") in found
    assert not [task for task in found if math.prod(task.shape) > CPU_LIMIT]
    assert {task.model.name for task in found if task.model is not None} == {"tiny"}
    (note,) = notes
    for shape in ("8192x262144", "8x16384x16384", "4096x50257"):
        assert note.count(shape) == 1
    assert "--shape" in note


def test_a_shape_given_by_hand_is_run_on_a_cpu_too() -> None:
    found, notes = tasks("cpu", names=["rms_norm"], shapes=[(2048, 262144)])
    assert [written(task.shape) for task in found] == ["2048x262144"]
    assert notes == []


def test_filters() -> None:
    found, _ = tasks(
        "cuda",
        names=["rms_norm_bwd", "softmax"],
        shapes=[(3, 5), (2, 7, 9)],
        dtypes=["float16", "float32"],
    )
    assert [str(task) for task in found] == [
        "rms_norm_bwd 3x5 float16",
        "rms_norm_bwd 2x7x9 float16",
        "softmax 3x5 float16",
        "softmax 2x7x9 float16",
        "rms_norm_bwd 3x5 float32",
        "rms_norm_bwd 2x7x9 float32",
        "softmax 3x5 float32",
        "softmax 2x7x9 float32",
    ]


@pytest.mark.parametrize(("device", "most"), [("cpu", 4), ("cuda", 8)])
def test_quick_is_a_few_shapes_of_every_task(device: str, most: int) -> None:
    found, notes = tasks(device, quick=True)
    counts = {name: sum(task.name == name for task in found) for name in KINDS}
    assert all(1 <= count <= most for count in counts.values())
    assert notes == []


def test_a_misspelt_op_is_guessed() -> None:
    with pytest.raises(ArgumentError, match=r"unknown op 'rms_nrom' \(did you mean rms_norm\?\)"):
        tasks("cuda", names=["rms_nrom"])


def test_an_op_of_another_suite_is_told() -> None:
    with pytest.raises(ArgumentError, match=r"unknown op 'rms_norm'.*: there are softmax,"):
        tasks("cuda", suites=["softmax"], names=["rms_norm"])


def test_an_unknown_dtype_lists_those_there_are() -> None:
    with pytest.raises(ArgumentError, match="unknown dtype 'int8': there are bfloat16"):
        tasks("cuda", dtypes=["int8"])


# ----------------------------------------------------------------------------------------- experts


def test_the_experts_of_two_models_and_of_others_by_name() -> None:
    """Model by model, so that all sizes share the weights."""
    found, _ = tasks("cuda", suites=["nvfp4_moe"])
    models = [task.model.name for task in found if task.model is not None]
    assert list(dict.fromkeys(models)) == ["qwen3-30b-a3b", "deepseek-v3"]
    assert models == sorted(models, key=models.index)
    assert {task.rows for task in found} == {1, 16, 128, 1024}
    assert {task.routing for task in found} == {"uniform", "skewed"}
    assert Task("nvfp4_moe", (16, 256, 8, 7168, 2048), "bfloat16", "skewed") in found
    found, _ = tasks("cuda", models=["qwen3-235b-a22b", "gpt-oss-120b"])
    assert {task.name for task in found} == set(EXPERTS)
    assert {task.rows for task in found} == {1, 16, 128, 1024}
    oss = next(model for task in found if (model := task.model) and model.name == "gpt-oss-120b")
    assert (oss.bias, oss.activation, oss.limit, oss.topk) == (True, "swiglu_oai", 7.0, 4)


def test_experts_by_model_rows_and_routing() -> None:
    found, _ = tasks("cuda", models=["deepseek-v3", "tiny"], rows=[3], routings=["skewed"])
    assert [str(task) for task in found] == [
        f"{name} {model} M=3 skewed bfloat16"
        for name in EXPERTS
        for model in ("deepseek-v3", "tiny")
    ]
    found, _ = tasks("cpu", suites=["nvfp4_moe"], models=["gpt-oss-120b"], rows=[1])
    assert [task.shape for task in found] == [(1, 128, 4, 2880, 2880)] * 2
    found, _ = tasks("cuda", suites=["nvfp4_moe"], quick=True)
    assert [str(task) for task in found] == [
        f"nvfp4_moe qwen3-30b-a3b M={rows} uniform bfloat16" for rows in (1, 128, 1024)
    ]


def test_experts_by_hand() -> None:
    found, _ = tasks("cuda", names=["nvfp4_moe"], shapes=[(5, 6, 2, 64, 32)], routings=["skewed"])
    assert [str(task) for task in found] == ["nvfp4_moe 6x2x64x32 M=5 skewed bfloat16"]
    sizes = {"E": 6, "topk": 2, "H": 64, "I": 32, "M": 5, "shape": "5x6x2x64x32"}
    assert found[0].sizes == {"model": "6x2x64x32", "routing": "skewed", **sizes}
    (known,), _ = tasks("cuda", names=["nvfp4_moe"], shapes=[(5, 128, 8, 2048, 768)])
    assert known.model is not None
    assert (known.model.name, known.routing) == ("qwen3-30b-a3b", "uniform")
    # Beside others that the shape fits, experts take no part.
    found, _ = tasks("cuda", shapes=[(4, 64)])
    assert not {task.name for task in found} & set(EXPERTS)


def test_what_experts_do_not_have() -> None:
    with pytest.raises(ArgumentError, match=r"'4x64': a mixture of experts is M x experts x topk"):
        tasks("cuda", names=["nvfp4_moe", "moe"], shapes=[(4, 64)])
    with pytest.raises(ArgumentError, match="9 distinct experts of 8"):
        tasks("cuda", names=["nvfp4_moe"], shapes=[(4, 8, 9, 64, 32)])
    with pytest.raises(ArgumentError, match="models have none"):
        tasks("cuda", layers=[(64, 64)], models=["tiny"])
    with pytest.raises(ArgumentError, match="mixtures of experts: none is here"):
        tasks("cuda", suites=["linear"], models=["tiny"])
    with pytest.raises(ArgumentError, match="none of these tasks has them"):
        tasks("cuda", suites=["nvfp4_moe"], layers=[(64, 64)])
    names, shapes = ["nvfp4_moe"], [(4, 8, 2, 64, 32)]
    with pytest.raises(ArgumentError, match="a shape by hand has both"):
        tasks("cuda", names=names, shapes=shapes, models=["deepseek-v3"])
    with pytest.raises(ArgumentError, match="a shape by hand has both"):
        tasks("cuda", names=names, shapes=shapes, rows=[1], routings=["skewed"])
    with pytest.raises(ArgumentError, match=r"unknown model 'deepseek' \(did you mean deepseek-v3"):
        tasks("cuda", models=["deepseek"])
    with pytest.raises(ArgumentError, match="unknown routing 'odd': there are uniform, skewed"):
        tasks("cuda", routings=["odd"])
