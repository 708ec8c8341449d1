"""NVFP4 linear layers of vLLM: what they load, what they compute, what they refuse."""

from __future__ import annotations

import copy
import gc
import io
import re
from typing import Any

import pytest
import torch
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm_layers import PRODUCERS, load, quantization, rank, tensors_of

from gristmill.errors import ArgumentError, CheckpointError, UnknownRunner
from gristmill.formats.nvfp4.tensor import PackedNVFP4
from gristmill.integrations.vllm.weights import HELD, NAMES, Loading
from gristmill.nvfp4 import NVFP4Tensor, dequantize, quantize

HIDDEN, HEADS, KV_HEADS, HEAD = 64, 4, 2, 32


@pytest.fixture(autouse=True)
def _no_leftovers() -> None:
    """A runner of an earlier test would keep its name."""
    gc.collect()


def matrix(rows: int, columns: int, std: float, seed: int = 0) -> NVFP4Tensor:
    generator = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(rows, columns, generator=generator) * std)


def qkv() -> dict[str, NVFP4Tensor]:
    return {
        "q": matrix(HEADS * HEAD, HIDDEN, 0.08, 1),
        "k": matrix(KV_HEADS * HEAD, HIDDEN, 0.3, 2),
        "v": matrix(KV_HEADS * HEAD, HIDDEN, 0.02, 3),
    }


def qkv_layer(producer: str = "modelopt", prefix: str = "model.layers.0.qkv_proj") -> Any:
    return QKVParallelLinear(
        HIDDEN,
        HEAD,
        HEADS,
        KV_HEADS,
        bias=False,
        quant_config=quantization(producer),
        prefix=prefix,
        params_dtype=torch.float32,
    )


def exact(parts: list[NVFP4Tensor], x: torch.Tensor) -> torch.Tensor:
    weight = torch.cat([dequantize(part, torch.float64) for part in parts])
    return x.double() @ weight.T


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def inputs(columns: int = HIDDEN, *leading: int) -> torch.Tensor:
    return torch.randn(*(leading or (5,)), columns, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("producer", PRODUCERS)
def test_each_part_of_a_fused_layer_keeps_its_scale(producer: str) -> None:
    parts, x = qkv(), inputs()
    with rank():
        layer = qkv_layer(producer)
        load(layer, producer, parts)
        y, _ = layer(x)
    close(y, exact(list(parts.values()), x))


@pytest.mark.parametrize("producer", PRODUCERS)
def test_gate_and_up_keep_their_scales(producer: str) -> None:
    parts = {0: matrix(96, HIDDEN, 0.3, 1), 1: matrix(96, HIDDEN, 0.03, 2)}
    x = inputs()
    with rank():
        layer = MergedColumnParallelLinear(
            HIDDEN,
            [96, 96],
            bias=False,
            quant_config=quantization(producer),
            prefix="mlp.gate_up_proj",
            params_dtype=torch.float32,
        )
        load(layer, producer, parts)
        y, _ = layer(x)
    close(y, exact(list(parts.values()), x))


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_layer_that_is_fused_on_disk_has_one_scale(producer: str) -> None:
    whole, x = matrix((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, 0.1), inputs()
    with rank():
        layer = qkv_layer(producer)
        load(layer, producer, {None: whole})
        y, _ = layer(x)
    close(y, exact([whole], x))


@pytest.mark.parametrize("producer", PRODUCERS)
def test_tensor_parallel_ranks_have_their_shares(producer: str) -> None:
    parts, x = qkv(), inputs()
    want = exact(list(parts.values()), x).split([128, 64, 64], dim=-1)
    for index in range(2):
        with rank(index, of=2):
            layer = qkv_layer(producer)
            load(layer, producer, parts)
            y, _ = layer(x)
        close(y, torch.cat([part.chunk(2, dim=-1)[index] for part in want], dim=-1))


@pytest.mark.parametrize("producer", PRODUCERS)
def test_row_parallel_ranks_sum_to_the_whole(producer: str) -> None:
    weight, x = matrix(48, 128, 0.1), inputs(128, 3, 2)
    total = torch.zeros(3, 2, 48)
    for index in range(2):
        with rank(index, of=2):
            layer = RowParallelLinear(
                128,
                48,
                bias=False,
                quant_config=quantization(producer),
                prefix="mlp.down_proj",
                params_dtype=torch.float32,
                reduce_results=False,
            )
            load(layer, producer, {None: weight})
            y, _ = layer(x.chunk(2, dim=-1)[index])
        total += y
    close(total, exact([weight], x))


@pytest.mark.parametrize("kind", [ColumnParallelLinear, ReplicatedLinear])
def test_bias_is_added(kind: Any) -> None:
    weight, x = matrix(48, HIDDEN, 0.1), inputs()
    with rank():
        layer = kind(
            HIDDEN,
            48,
            bias=True,
            quant_config=quantization("modelopt"),
            prefix="proj",
            params_dtype=torch.float32,
        )
        layer.bias.data.copy_(torch.arange(48.0))
        load(layer, "modelopt", {None: weight})
        y, _ = layer(x)
    close(y, exact([weight], x) + torch.arange(48.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_result_has_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    parts, x = qkv(), inputs().to(dtype)
    with rank():
        layer = qkv_layer()
        load(layer, "modelopt", parts)
        y, _ = layer(x)
    assert y.dtype == dtype
    want = exact(list(parts.values()), x)
    # One rounding of the result, of a sum that was made in fp32.
    limit = torch.finfo(dtype).eps * want.abs() + 1e-5
    assert bool(((y.double() - want).abs() <= limit).all())


def test_it_is_one_node_of_a_full_graph() -> None:
    with rank():
        layer = qkv_layer()
        load(layer, "modelopt", qkv())
        nodes: list[Any] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            nodes.extend(node for node in graph.graph.nodes if node.op == "call_function")
            return graph

        compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
        for rows in (5, 3):
            x = inputs(HIDDEN, rows)
            torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    called = [node.target for node in nodes]
    assert called.count(torch.ops.gristmill.nvfp4_linear_gemm) == 1
    assert not [target for target in called if "aten" in str(target)]


@pytest.mark.parametrize("producer", PRODUCERS)
def test_weights_live_once(producer: str) -> None:
    """The loaded tensors are the runner's, and nothing else of their size is left."""
    with rank():
        layer = qkv_layer(producer)
        loaded = {name: p.data_ptr() for name, p in layer.named_parameters() if p.dim() == 2}
        load(layer, producer, qkv())
    kept = {name: p.data_ptr() for name, p in layer.named_parameters() if p.dim() == 2}
    assert kept == loaded
    packed = getattr(layer, HELD).runner.weight
    assert isinstance(packed, PackedNVFP4)
    assert {packed.codes.data_ptr(), packed.scales.data_ptr()} == set(loaded.values())
    assert sum(p.nbytes for p in layer.parameters()) == packed.nbytes


def test_processing_twice_changes_nothing() -> None:
    with rank():
        layer = qkv_layer()
        load(layer, "modelopt", qkv())
        before, runner_id = layer(inputs())[0], getattr(layer, HELD).runner_id
        layer.quant_method.process_weights_after_loading(layer)
        assert getattr(layer, HELD).runner_id == runner_id
        assert torch.equal(layer(inputs())[0], before)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_dense_weight_is_named(producer: str) -> None:
    with rank():
        layer = qkv_layer(producer)
        name = "weight" if producer == "modelopt" else "weight_packed"
        parameter = getattr(layer, name)
        dense = torch.randn(HEADS * HEAD, HIDDEN, dtype=torch.bfloat16)
        with pytest.raises(
            CheckpointError, match=rf"qkv_proj\.{name}: .* weight of torch.bfloat16"
        ):
            parameter.weight_loader(parameter, dense, "q")


@pytest.mark.parametrize("producer", PRODUCERS)
def test_block_scales_of_another_dtype_are_named(producer: str) -> None:
    """The loader would convert the bytes as if they were numbers."""
    with rank():
        parameter = qkv_layer(producer).weight_scale
        given = torch.ones(HEADS * HEAD, HIDDEN // 16, dtype=torch.uint8)
        message = r"qkv_proj\.weight_scale: the checkpoint has torch\.uint8 in"
        with pytest.raises(CheckpointError, match=message):
            parameter.weight_loader(parameter, given, "q")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_global_scales_of_another_dtype_are_named(producer: str, dtype: torch.dtype) -> None:
    with rank():
        layer = qkv_layer(producer)
        name = "weight_scale_2" if producer == "modelopt" else "weight_global_scale"
        parameter = getattr(layer, name)
        message = rf"qkv_proj\.{name}: the checkpoint has {dtype} in the"
        with pytest.raises(CheckpointError, match=message):
            parameter.weight_loader(parameter, torch.ones((), dtype=dtype), "q")


CODES = {"modelopt": "weight", "compressed-tensors": "weight_packed"}
WHOLE = {"codes": (48, 32), "scales": (48, 4)}


@pytest.mark.parametrize(
    ("which", "change"),
    [
        ("codes", lambda t: t[:32]),
        ("codes", lambda t: t[:, :16]),
        ("codes", lambda t: torch.cat([t, t])),
        ("codes", lambda t: torch.cat([t, t], dim=1)),
        ("codes", lambda t: t.T),
        ("codes", lambda t: t[0, 0]),
        ("scales", lambda t: t.reshape(-1)),
        ("scales", lambda t: t[None]),
        ("scales", lambda t: torch.zeros(128, 4).to(t.dtype)),  # padded to tiles of 128 x 4
    ],
)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, ReplicatedLinear])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_tensors_of_another_shape_are_named(
    producer: str, kind: Any, which: str, change: Any
) -> None:
    """vLLM's loaders would take a slice of a larger one."""
    name = CODES[producer] if which == "codes" else "weight_scale"
    given = change(tensors_of(producer, matrix(48, HIDDEN, 0.1))[name])
    with rank():
        layer = kind(HIDDEN, 48, bias=False, quant_config=quantization(producer), prefix="mlp.proj")
        parameter = getattr(layer, name)
        message = f"mlp.proj.{name}: the checkpoint has shape {tuple(given.shape)} in the place "
        with pytest.raises(CheckpointError, match=re.escape(f"{message}of {WHOLE[which]}")):
            parameter.weight_loader(parameter, given)


@pytest.mark.parametrize("shard", ["k", None])
def test_parts_of_another_shape_are_named(shard: str | None) -> None:
    with rank():
        parameter = qkv_layer().weight
        given = torch.zeros(HEADS * HEAD * 4, HIDDEN // 2, dtype=torch.uint8)
        arguments = () if shard is None else (shard,)
        with pytest.raises(CheckpointError, match=r"qkv_proj\.weight: the checkpoint has shape"):
            parameter.weight_loader(parameter, given, *arguments)


@pytest.mark.parametrize("shape", [(3,), (1, 1), (0,)])
def test_global_scales_of_another_shape_are_named(shape: tuple[int, ...]) -> None:
    with rank():
        parameter = qkv_layer().weight_scale_2
        message = r"qkv_proj\.weight_scale_2: .* shape .* in the place of one value"
        with pytest.raises(CheckpointError, match=message):
            parameter.weight_loader(parameter, torch.ones(shape), "q")


def test_what_was_cut_for_fewer_ranks_is_named() -> None:
    with rank(1, of=2):
        parameter = qkv_layer().weight
        given = torch.zeros(HEADS * HEAD // 2, HIDDEN // 2, dtype=torch.uint8)
        message = r"qkv_proj\.weight: vLLM cannot load shape \(64, 32\): "
        with pytest.raises(CheckpointError, match=message):
            parameter.weight_loader(parameter, given, "q")


def test_a_lack_of_memory_is_not_the_fault_of_a_checkpoint() -> None:
    def loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        raise torch.OutOfMemoryError

    loading = Loading("a", NAMES["modelopt"], "")
    checked = loading.checked(None, "weight", loader, torch.uint8, lambda shape: None)
    with pytest.raises(torch.OutOfMemoryError):
        checked(torch.nn.Parameter(torch.zeros(1)), torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize("fused", [False, True])
def test_ranks_share_heads_of_keys(fused: bool) -> None:
    """Four ranks, two heads of keys: each has one, and the checkpoint has both."""
    parts, x = qkv(), inputs()
    if fused:
        codes, scales = (
            torch.cat([getattr(part, name).view(torch.uint8) for part in parts.values()])
            for name in ("codes", "scales")
        )
        factor = torch.tensor(0.01)
        whole = NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), factor)
        parts = {name: NVFP4Tensor(p.codes, p.scales, factor) for name, p in parts.items()}
    exactly = exact(list(parts.values()), x).split([128, 64, 64], dim=-1)
    want = dict(zip("qkv", exactly, strict=True))
    for index in range(4):
        with rank(index, of=4):
            layer = qkv_layer()
            load(layer, "modelopt", {None: whole} if fused else parts)
            y, _ = layer(x)
        mine = [want["q"].chunk(4, dim=-1)[index]]
        mine += [want[name].chunk(2, dim=-1)[index // 2] for name in "kv"]
        close(y, torch.cat(mine, dim=-1))


def test_ids_follow_from_the_name_and_live_layers_do_not_share_them() -> None:
    def one(config: VllmConfig) -> Any:
        with rank(config=config):
            layer = qkv_layer()
            load(layer, "modelopt", qkv())
        return layer

    configs = VllmConfig(), VllmConfig()
    first, second = map(one, configs)
    ids = [getattr(layer, HELD).runner_id for layer in (first, second)]
    assert ids[0] != ids[1]
    # The compiled graphs of the two are kept apart in vLLM's cache, and from those of no gristmill.
    hashes = {config.compute_hash() for config in (*configs, VllmConfig())}
    assert len(hashes) == 3
    del first, second
    gc.collect()
    again = VllmConfig()
    layer = one(again)
    assert getattr(layer, HELD).runner_id == ids[0]
    assert again.compute_hash() == configs[0].compute_hash()


def saved_and_loaded(layer: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded])
def test_a_copy_runs_its_own_weights(duplicate: Any) -> None:
    weight, x = matrix(48, HIDDEN, 0.1), inputs()
    with rank():
        layer = torch.nn.Module()
        layer.logical_widths = [48]
        method = quantization("modelopt").get_quant_method(_linear(), "proj")
        method.create_weights(layer, HIDDEN, [48], HIDDEN, 48, torch.float32)
        for name, tensor in tensors_of("modelopt", weight).items():
            getattr(layer, name).data.copy_(tensor)
        method.process_weights_after_loading(layer)
        twin = duplicate(layer)
        twin.weight_row_scale.data.mul_(2)
        close(method.apply(twin, x), 2 * exact([weight], x))
        close(method.apply(layer, x), exact([weight], x))
        # One set of tensors in the copy as well.
        assert getattr(twin, HELD).runner.weight.codes is twin.weight
        old = getattr(layer, HELD)
        number, width = old.runner_id, old.width
        del layer, old
        gc.collect()
        close(method.apply(twin, x), 2 * exact([weight], x))
        with pytest.raises(UnknownRunner, match="was freed"):
            torch.ops.gristmill.nvfp4_linear_gemm(x, number, width)


def _linear() -> Any:
    return ReplicatedLinear(16, 16, bias=False, prefix="other", params_dtype=torch.float32)


def test_dummy_weights_run() -> None:
    config = VllmConfig(load_config=LoadConfig(load_format="dummy"))
    with rank(config=config):
        from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

        layer = qkv_layer()
        for parameter in layer.parameters():
            initialize_single_dummy_weight(parameter)
        layer.quant_method.process_weights_after_loading(layer)
        y, _ = layer(inputs())
    assert bool(y.isfinite().all())
    assert float(y.std()) > 0


def test_a_layer_that_was_never_loaded_is_named() -> None:
    with rank():
        layer = qkv_layer(prefix="model.layers.7.self_attn.qkv_proj")
        with pytest.raises(CheckpointError, match=r"layers\.7\..*qkv_proj\.weight_scale_2: 3 of 3"):
            layer.quant_method.process_weights_after_loading(layer)


def test_a_part_that_was_never_loaded_is_noticed() -> None:
    parts = qkv()
    with rank():
        layer = qkv_layer()
        with pytest.raises(CheckpointError, match="weight_scale_2: 1 of 3 were never loaded"):
            load(layer, "modelopt", {"q": parts["q"], "v": parts["v"]})


@pytest.mark.parametrize(("missing", "count"), [("k", 1), ("qkv", 3)])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_codes_that_were_never_loaded_are_noticed(producer: str, missing: str, count: int) -> None:
    with rank():
        layer = qkv_layer(producer)
        for shard, weight in qkv().items():
            for name, tensor in tensors_of(producer, weight).items():
                if name != CODES[producer] or shard not in missing:
                    parameter = getattr(layer, name)
                    parameter.weight_loader(parameter, tensor, shard)
        message = rf"qkv_proj\.{CODES[producer]}: {count} of 3 were never loaded"
        with pytest.raises(CheckpointError, match=message):
            layer.quant_method.process_weights_after_loading(layer)


def test_block_scales_that_were_never_loaded_are_noticed() -> None:
    with rank():
        layer = qkv_layer()
        layer.weight_scale_2.data.fill_(1.0)
        with pytest.raises(CheckpointError, match=r"qkv_proj\.weight_scale: .* nan at"):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: NVFP4Tensor(w.codes, (-w.scales.float()).to(w.scales.dtype), w.global_scale),
            "neither negative nor NaN",
        ),
        (lambda w: NVFP4Tensor(w.codes, w.scales, -w.global_scale), "must be finite and"),
        (lambda w: NVFP4Tensor(w.codes, w.scales, w.global_scale / 0), "must be finite and"),
    ],
)
@pytest.mark.parametrize("producer", PRODUCERS)
def test_damaged_scales_are_refused(producer: str, change: Any, message: str) -> None:
    with rank():
        layer = qkv_layer(producer)
        parts = {name: change(weight) for name, weight in qkv().items()}
        with pytest.raises(CheckpointError, match=rf"qkv_proj\..*{message}"):
            load(layer, producer, parts)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_scale_of_zero_is_right_where_it_multiplies(producer: str) -> None:
    zeros = {
        name: NVFP4Tensor(weight.codes, weight.scales, weight.global_scale * 0)
        for name, weight in qkv().items()
    }
    with rank():
        layer = qkv_layer(producer)
        if producer == "compressed-tensors":  # on disk it is a divisor: infinity
            with pytest.raises(CheckpointError, match="must be finite and above zero"):
                load(layer, producer, zeros)
            return
        load(layer, producer, zeros)
        assert not layer.quant_method.apply(layer, inputs()).any()


@pytest.mark.parametrize(
    ("columns", "ranks", "message"),
    [
        (72, 1, r"down_proj: its input is 72; NVFP4 needs a multiple of 16"),
        (96, 4, r"its input of 96 leaves 24 for each of 4 ranks.*fewer tensor-parallel"),
    ],
)
def test_blocks_must_not_be_cut(columns: int, ranks: int, message: str) -> None:
    with rank(0, of=ranks), pytest.raises(ArgumentError, match=message):
        RowParallelLinear(
            columns, 48, bias=False, quant_config=quantization("modelopt"), prefix="mlp.down_proj"
        )


def test_ignored_layers_are_vllms_own() -> None:
    with rank():
        layer = RowParallelLinear(
            64,
            48,
            bias=False,
            quant_config=quantization("modelopt", ("*down_proj",)),
            prefix="mlp.down_proj",
        )
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)


def test_vllm_itself_takes_one_scale_for_a_fused_layer() -> None:
    """What is kept here: its own ModelOpt method takes the largest of the three scales for q, k, v.

    On a CPU vLLM has no NVFP4 kernel, so it gets one here that does what its weights say, exactly.
    """
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.kernels.linear import NvFp4LinearKernel
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.platforms import PlatformEnum, current_platform
    from vllm_models import modelopt_config

    if not current_platform.is_cpu():
        pytest.skip("vLLM takes a kernel of its own here, which needs its weights on the GPU")

    class Exact(NvFp4LinearKernel):  # type: ignore[misc]
        @classmethod
        def is_supported(cls, compute_capability: Any = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            pass

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            weight = NVFP4Tensor(layer.weight, layer.weight_scale, layer.weight_global_scale)
            return x @ dequantize(weight).T

    parts, x = qkv(), inputs()
    largest = max(float(part.global_scale) for part in parts.values())
    collapsed = [
        NVFP4Tensor(part.codes, part.scales, torch.tensor(largest)) for part in parts.values()
    ]
    known = {key: list(value) for key, value in kernels._POSSIBLE_NVFP4_KERNELS.items()}
    try:
        kernels.register_linear_kernel(Exact, PlatformEnum.CPU, "nvfp4")
        with rank():
            theirs = QKVParallelLinear(
                HIDDEN,
                HEAD,
                HEADS,
                KV_HEADS,
                bias=False,
                quant_config=ModelOptNvFp4Config.from_config(modelopt_config([])),
                prefix="qkv_proj",
                params_dtype=torch.float32,
            )
            load(theirs, "modelopt", parts)
            wrong, _ = theirs(x)
            ours = qkv_layer()
            load(ours, "modelopt", parts)
            right, _ = ours(x)
    finally:
        kernels._POSSIBLE_NVFP4_KERNELS.clear()
        kernels._POSSIBLE_NVFP4_KERNELS.update(known)
    want = exact(list(parts.values()), x)
    close(right, want)
    close(wrong, exact(collapsed, x))
    assert float((wrong - want).norm() / want.norm()) > 0.1
