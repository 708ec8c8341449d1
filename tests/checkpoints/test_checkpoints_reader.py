"""Reading what the two producers write, and refusing what cannot be right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import (
    COMPRESSED,
    HF_QUANT,
    MODELOPT,
    PRODUCERS,
    Namer,
    Tensors,
    assert_rejected,
    compressed,
    experts,
    is_made_of,
    matrix,
    modelopt,
    read,
    same_bits,
    write,
    write_shards,
)
from safetensors.torch import save_file

from gristmill.checkpoints import Checkpoint, files
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4 import NVFP4Tensor, dequantize
from gristmill.nn import NVFP4Linear, NVFP4MoE


@PRODUCERS
def test_one_linear_layer(tmp_path: Path, name: Namer, config: Any) -> None:
    parts = matrix(24, 64, scale=0.25)
    dense = torch.randn(4, 6).bfloat16()
    write(tmp_path, name("a.b", parts) | {"lm_head.weight": dense}, config)
    checkpoint = Checkpoint(tmp_path)
    weight = checkpoint.linear("a.b")
    assert is_made_of(weight, parts)
    assert weight.global_scale.shape == ()
    assert checkpoint.is_quantized("a.b")
    assert not checkpoint.is_quantized("lm_head")
    assert list(checkpoint.modules()) == ["a.b"]
    assert checkpoint.names() == sorted([*name("a.b", parts), "lm_head.weight"])
    assert "lm_head.weight" in checkpoint
    assert "lm_head.bias" not in checkpoint
    assert same_bits(checkpoint.tensor("lm_head.weight"), dense)
    assert checkpoint.config is not None
    assert checkpoint.config.producer == config["quant_method"]
    assert checkpoint.config.is_ignored("lm_head")
    assert repr(checkpoint).startswith(f"Checkpoint({str(tmp_path)!r}, ")


def test_a_divisor_becomes_a_multiplier(tmp_path: Path) -> None:
    parts = matrix(8, 32)
    tensors = compressed("a", parts) | {"a.weight_global_scale": torch.tensor([640.0])}
    weight = Checkpoint(write(tmp_path, tensors, COMPRESSED)).linear("a")
    assert float(weight.global_scale) == float(torch.tensor(1.0) / 640)
    exact = dequantize(NVFP4Tensor(parts["codes"], parts["scales"], torch.tensor(1.0)))
    torch.testing.assert_close(dequantize(weight), exact / 640)


@PRODUCERS
def test_fused_layers_keep_their_scales(tmp_path: Path, name: Namer, config: Any) -> None:
    shards = {
        part: matrix(rows, 48, seed=rows, scale=scale)
        for part, rows, scale in (("q", 32, 0.5), ("k", 8, 0.0625), ("v", 16, 4.0))
    }
    tensors: Tensors = {}
    for part, parts in shards.items():
        tensors |= name(f"a.{part}_proj", parts)
    checkpoint = Checkpoint(write(tmp_path, tensors, config))
    fused = checkpoint.fused([f"a.{part}_proj" for part in "qkv"])
    assert is_made_of(fused, *shards.values())
    assert fused.global_scale.shape == (56,)
    apart = [checkpoint.linear(f"a.{part}_proj") for part in "qkv"]
    for dtype in (torch.float32, torch.float64):
        whole = torch.cat([dequantize(weight, dtype) for weight in apart])
        assert torch.equal(dequantize(fused, dtype), whole)
    assert is_made_of(checkpoint.fused(["a.k_proj"]), shards["k"])
    assert checkpoint.is_quantized("a.qkv_proj")


def expert_tensors(
    name: Namer,
    experts: int,
    *,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Tensors, list[dict[str, Tensors]]]:
    """Experts of hidden size 64 and intermediate size 32, each matrix with a scale of its own."""
    tensors: Tensors = {}
    made = []
    for e in range(experts):
        shapes = ((32, 64), (32, 64), (64, 32))
        expert = {
            part: matrix(*shape, seed=10 * e + number, scale=2.0 ** (number - e))
            for number, (part, shape) in enumerate(zip(parts, shapes, strict=True))
        }
        made.append(expert)
        for part, values in expert.items():
            tensors |= name(f"m.experts.{e}.{part}", values)
    return tensors, made


@PRODUCERS
@pytest.mark.parametrize("parts", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_experts(tmp_path: Path, name: Namer, config: Any, parts: Any) -> None:
    tensors, made = expert_tensors(name, 11, parts=parts)
    checkpoint = Checkpoint(write(tmp_path, tensors, config))
    w13, w2 = checkpoint.experts("m.experts")
    assert w13.shape == (11, 64, 64)
    assert w2.shape == (11, 64, 32)
    assert w13.global_scale.shape == (11, 64)
    assert w2.global_scale.shape == (11, 64)
    gate, up, down = parts
    for e, expert in enumerate(made):
        assert is_made_of(part_of(w13, e), expert[gate], expert[up])
        assert is_made_of(part_of(w2, e), expert[down])
    for local in ([10, 2], range(4, 8), (0,)):
        some13, some2 = checkpoint.experts("m.experts", local=local)
        for place, e in enumerate(local):
            assert is_made_of(part_of(some13, place), made[e][gate], made[e][up])
            assert is_made_of(part_of(some2, place), made[e][down])
        assert some13.shape[0] == len(local)
    assert checkpoint.is_quantized("m.experts")


def part_of(stack: NVFP4Tensor, number: int) -> NVFP4Tensor:
    return NVFP4Tensor(stack.codes[number], stack.scales[number], stack.row_scale[number])


def test_experts_that_cannot_be_stacked(tmp_path: Path) -> None:
    tensors, _ = expert_tensors(modelopt, 3)

    def opened(changes: Tensors, without: str = "-") -> Checkpoint:
        kept = {name: value for name, value in tensors.items() if without not in name}
        return Checkpoint(write(tmp_path, kept | changes))

    with pytest.raises(CheckpointError, match=r"m\.experts has no experts \[1\]"):
        opened({}, without=".1.").experts("m.experts")
    with pytest.raises(CheckpointError, match=r"1\.up_proj\.weight"):
        opened({}, without="1.up_proj").experts("m.experts")
    with pytest.raises(CheckpointError, match=r"has 3 experts, local asks for \[3, 7\]"):
        opened({}).experts("m.experts", local=[7, 0, 3])
    with pytest.raises(CheckpointError, match="local is empty"):
        opened({}).experts("m.experts", local=[])
    with pytest.raises(CheckpointError, match=r"there are no experts n\.experts\.0, "):
        opened({}).experts("n.experts")
    with pytest.raises(CheckpointError, match=r"2.down_proj have shape \(64, 48\), those of the f"):
        opened(modelopt("m.experts.2.down_proj", matrix(64, 48))).experts("m.experts")
    with pytest.raises(CheckpointError, match="layers that are run as one have one K"):
        opened(modelopt("m.experts.0.up_proj", matrix(32, 32))).experts("m.experts")
    uneven = modelopt("m.experts.0.gate_proj", matrix(48, 64))
    uneven |= modelopt("m.experts.0.up_proj", matrix(16, 64))
    with pytest.raises(CheckpointError, match=r"must have the same number of rows, got 48 and 16"):
        opened(uneven).experts("m.experts")
    odd = {}
    for e in range(3):
        odd |= modelopt(f"m.experts.{e}.down_proj", matrix(64, 48))
    with pytest.raises(CheckpointError, match=r"do not fit together: .*\(64, 64\), .*\(64, 48\)"):
        opened(odd).experts("m.experts")


def test_a_model_in_several_files(tmp_path: Path) -> None:
    parts = [matrix(8, 32, seed=seed, scale=2.0**seed) for seed in range(3)]
    one, two, three = (modelopt(f"l.{number}", part) for number, part in enumerate(parts))
    # A layer may be torn apart between files.
    moved = {"l.1.weight_scale": two.pop("l.1.weight_scale")}
    write_shards(tmp_path, one | moved, two | three)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        checkpoint = Checkpoint(path)
        assert is_made_of(checkpoint.fused(["l.2", "l.0", "l.1"]), parts[2], parts[0], parts[1])
        assert list(checkpoint.modules()) == ["l.0", "l.1", "l.2"]
        assert checkpoint.config is not None


def test_one_file_by_itself(tmp_path: Path) -> None:
    parts = matrix(8, 32)
    save_file(modelopt("a", parts), tmp_path / "some.safetensors")
    for path in (tmp_path, tmp_path / "some.safetensors", str(tmp_path)):
        checkpoint = Checkpoint(path)
        assert checkpoint.config is None
        assert is_made_of(checkpoint.linear("a"), parts)


def test_files_without_an_index(tmp_path: Path) -> None:
    save_file(modelopt("a", matrix(8, 32)), tmp_path / "one.safetensors")
    save_file(modelopt("b", matrix(8, 32)), tmp_path / "two.safetensors")
    assert list(Checkpoint(tmp_path).modules()) == ["a", "b"]
    save_file({"a.weight": torch.ones(2)}, tmp_path / "three.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight is both in .*one.* and in .*three"):
        Checkpoint(tmp_path)
    save_file(modelopt("c", matrix(8, 32)), tmp_path / "model.safetensors")
    assert list(Checkpoint(tmp_path).modules()) == ["c"]


def test_only_hf_quant_config(tmp_path: Path) -> None:
    write(tmp_path, modelopt("a", matrix(8, 32)), None)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(HF_QUANT))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config is not None
    assert checkpoint.config.activations
    assert checkpoint.config.kv_cache == "fp8"
    assert checkpoint.linear("a").shape == (8, 32)


def test_an_unsupported_algorithm_is_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path, {"a.weight": torch.ones(2)}, {**MODELOPT, "quant_algo": "FP8"})
    with pytest.raises(CheckpointError, match=r"config\.json: .*quant_algo 'FP8' is not supported"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("make", [lambda path: path, lambda path: path / "x.safetensors"])
def test_no_files(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="there are no safetensors files; found "):
        Checkpoint(make(tmp_path))


def test_broken_files(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    second = tmp_path / "model-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-4])
    assert Checkpoint(tmp_path).tensor("a").tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors cannot be read"):
        Checkpoint(tmp_path).tensor("b")
    save_file({"c": torch.ones(2)}, second)
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors cannot be read: .*b"):
        Checkpoint(tmp_path).tensor("b")
    second.unlink()
    with pytest.raises(CheckpointError, match=r"lists files that are not there: \['model-00002-of"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="there is no weight_map in it"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weight", torch.zeros(8, 16, dtype=torch.int8), "must have dtype U8, got I8"),
        ("weight", torch.zeros(8, 32).to(torch.float8_e4m3fn), "must have dtype U8, got F8_E4M3"),
        ("weight", torch.zeros(8, 12, dtype=torch.uint8), r"K a multiple of 16, got \(8, 12\)"),
        ("weight", torch.zeros(2, 8, 16, dtype=torch.uint8), r"\(N, K / 2\).* got \(2, 8, 16\)"),
        ("weight_scale", torch.zeros(8, 2), "must have dtype F8_E4M3, got F32"),
        ("weight_scale", torch.zeros(8, 2, dtype=torch.uint8), "must have dtype F8_E4M3, got U8"),
        ("weight_scale_2", torch.zeros(()).double(), "must have dtype F32, got F64"),
        ("weight_scale_2", torch.ones(8), r"must be one value, got shape \(8,\)"),
        ("weight_scale_2", torch.tensor(math.nan), "finite and not negative, got nan"),
        ("weight_scale_2", torch.tensor(math.inf), "finite and not negative, got inf"),
        ("weight_scale_2", torch.tensor(-math.inf), "finite and not negative, got -inf"),
        ("weight_scale_2", torch.tensor([-2.0]), "finite and not negative, got -2.0"),
    ],
)
def test_wrong_tensors(tmp_path: Path, part: str, value: torch.Tensor, message: str) -> None:
    tensors = modelopt("a.b", matrix(8, 32)) | {f"a.b.{part}": value}
    checkpoint = Checkpoint(write(tmp_path, tensors))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: a\.b\.{part}.*{message}"):
        checkpoint.linear("a.b")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-40])
def test_wrong_divisors(tmp_path: Path, value: float) -> None:
    """1e-40 is finite, and what it makes of a weight is not."""
    tensors = compressed("a", matrix(8, 32)) | {"a.weight_global_scale": torch.tensor([value])}
    with pytest.raises(
        CheckpointError, match=r"a\.weight_global_scale: .* must be finite and above zero, got"
    ):
        Checkpoint(write(tmp_path, tensors, COMPRESSED)).linear("a")


def test_a_multiplier_may_be_zero(tmp_path: Path) -> None:
    """The scale of a layer of zeros."""
    zeros, parts = matrix(8, 32, scale=0.0), matrix(8, 32, seed=1)
    checkpoint = Checkpoint(write(tmp_path, modelopt("a", zeros) | modelopt("b", parts)))
    assert is_made_of(checkpoint.linear("a"), zeros)
    assert dequantize(checkpoint.linear("a")).eq(0).all()
    assert is_made_of(checkpoint.fused(["a", "b"]), zeros, parts)


@pytest.mark.parametrize(("code", "shown"), [(0x7F, "nan"), (0xFF, "nan"), (0xB8, "-1.0")])
@PRODUCERS
def test_negative_and_nan_scales(
    tmp_path: Path, name: Namer, config: Any, code: int, shown: str
) -> None:
    parts = matrix(8, 64)
    parts["scales"].view(torch.uint8)[5, 3] = code
    checkpoint = Checkpoint(write(tmp_path, name("a", parts), config))
    with pytest.raises(
        CheckpointError,
        match=rf"a\.weight_scale: .*neither negative nor NaN, got {shown} at \[5, 3",
    ):
        checkpoint.linear("a")


@pytest.mark.parametrize("missing", ["weight", "weight_scale", "weight_scale_2"])
def test_missing_tensors(tmp_path: Path, missing: str) -> None:
    tensors = modelopt("a.b", matrix(8, 32))
    del tensors[f"a.b.{missing}"]
    checkpoint = Checkpoint(write(tmp_path, tensors))
    assert checkpoint.is_quantized("a.b")
    with pytest.raises(CheckpointError, match=rf"a\.b lacks {missing}; there are .*input_scale"):
        checkpoint.linear("a.b")


def test_missing_tensors_of_compressed_tensors(tmp_path: Path) -> None:
    tensors = compressed("a", matrix(8, 32))
    del tensors["a.weight_global_scale"]
    with pytest.raises(
        CheckpointError, match="a lacks weight_global_scale; there are weight_scale, weight_packed"
    ):
        Checkpoint(write(tmp_path, tensors, COMPRESSED)).linear("a")


def test_modules_that_are_not_there_or_not_quantized(tmp_path: Path) -> None:
    tensors = modelopt("a.q_proj", matrix(8, 32)) | {"lm_head.weight": torch.ones(4, 4).bfloat16()}
    checkpoint = Checkpoint(write(tmp_path, tensors))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight is not in NVFP4, it is BF16 \(4, 4"
    ):
        checkpoint.linear("lm_head")
    with pytest.raises(
        CheckpointError, match=r"no tensor 'a.p_proj.weight'; did you mean a.q_proj"
    ):
        checkpoint.linear("a.p_proj")
    with pytest.raises(CheckpointError, match=r"no tensor 'a.q_proj.bias'"):
        checkpoint.tensor("a.q_proj.bias")
    with pytest.raises(CheckpointError, match="no tensor of a module 'b'"):
        checkpoint.is_quantized("b")
    with pytest.raises(CheckpointError, match="fused: modules is empty"):
        checkpoint.fused([])


def fp8(module: str) -> Tensors:
    """A layer as FP8 checkpoints have it."""
    weight = torch.ones(8, 32).to(torch.float8_e4m3fn)
    scales = {f"{module}.weight_scale": torch.tensor(0.5), f"{module}.input_scale": torch.ones(())}
    return {f"{module}.weight": weight} | scales


@PRODUCERS
def test_layers_of_other_formats_are_not_quantized(
    tmp_path: Path, name: Namer, config: Any
) -> None:
    tensors = name("a.q_proj", matrix(8, 32)) | fp8("a.k_proj") | fp8("b")
    int4 = {"c.weight_packed": torch.zeros(8, 4).int(), "c.weight_scale": torch.ones(8, 1)}
    checkpoint = Checkpoint(write(tmp_path, tensors | int4, config))
    assert list(checkpoint.modules()) == ["a.q_proj"]
    assert checkpoint.is_quantized("a.q_proj")
    assert not checkpoint.is_quantized("b")
    assert not checkpoint.is_quantized("c")
    with pytest.raises(CheckpointError, match=r"a.qkv_proj is quantized in part: a.q_proj of"):
        checkpoint.is_quantized("a.qkv_proj")
    with pytest.raises(
        CheckpointError, match=r"b\.weight is not in NVFP4, it is F8_E4M3 \(8, 32\) and has no glo"
    ):
        checkpoint.linear("b")
    with pytest.raises(CheckpointError, match=r"c\.weight_packed is not in NVFP4, it is I32"):
        checkpoint.linear("c")


@pytest.mark.parametrize("name", ["gate_up_proj", "gate_up_proj.weight", "down_proj", "w13_weight"])
def test_stacked_experts_are_named_as_such(tmp_path: Path, name: str) -> None:
    stack = {f"m.experts.{name}": torch.zeros(2, 8, 16, dtype=torch.uint8), "m.a": torch.ones(2)}
    checkpoint = Checkpoint(write(tmp_path, stack))
    with pytest.raises(
        CheckpointError,
        match=rf"no experts m\.experts\.0, .*; they are stored stacked \(m\.experts\.{name} has "
        rf"shape \(2, 8, 16\)\), which is not read",
    ):
        checkpoint.experts("m.experts")
    with pytest.raises(CheckpointError, match=r"there are no experts m\.0, m\.1, \.\.\.$"):
        checkpoint.experts("m")


def test_fused_layers_that_do_not_fit(tmp_path: Path) -> None:
    tensors = modelopt("a.q_proj", matrix(8, 32)) | modelopt("a.k_proj", matrix(8, 64))
    tensors |= {"a.v_proj.weight": torch.ones(8, 32)}
    checkpoint = Checkpoint(write(tmp_path, tensors))
    with pytest.raises(CheckpointError, match=r"a.k_proj has K = 64, a.q_proj has K = 32"):
        checkpoint.fused(["a.q_proj", "a.k_proj"])
    with pytest.raises(
        CheckpointError, match=r"qkv_proj is quantized in part: .*q_proj, a.k_proj of"
    ):
        checkpoint.is_quantized("a.qkv_proj")


def test_awq_is_refused(tmp_path: Path) -> None:
    tensors = modelopt("a", matrix(8, 32)) | {"a.pre_quant_scale": torch.ones(32)}
    with pytest.raises(CheckpointError, match=r"a\.pre_quant_scale: .*\(AWQ\), which is not supp"):
        Checkpoint(write(tmp_path, tensors)).linear("a")


def test_another_group_size(tmp_path: Path) -> None:
    tensors = modelopt("a", matrix(8, 128))
    tensors["a.weight_scale"] = matrix(8, 64)["scales"]
    with pytest.raises(
        CheckpointError,
        match=r"must have shape \(8, 8\), .* got \(8, 4\), which is a group size of 32",
    ):
        Checkpoint(write(tmp_path, tensors)).linear("a")
    tensors["a.weight_scale"] = matrix(7, 128)["scales"]
    with pytest.raises(CheckpointError, match=r"got \(7, 8\)$"):
        Checkpoint(write(tmp_path, tensors)).linear("a")


def test_what_was_read_does_not_hang_on_the_file(tmp_path: Path) -> None:
    parts = matrix(8, 32)
    write(tmp_path, modelopt("a", parts) | {"b": torch.ones(3)})
    checkpoint = Checkpoint(tmp_path)
    weight, dense = checkpoint.linear("a"), checkpoint.tensor("b")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (tmp_path / "model.safetensors").stat().st_size)
    assert is_made_of(weight, parts)
    assert dense.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_defaults_of_torch_have_no_say(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors, made = expert_tensors(compressed, 2)
    checkpoint = Checkpoint(write(tmp_path, tensors, COMPRESSED))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            down = checkpoint.linear("m.experts.1.down_proj")
            w13, _ = checkpoint.experts("m.experts")
            both = checkpoint.fused(["m.experts.0.gate_proj", "m.experts.1.gate_proj"])
            dense = checkpoint.tensor("m.experts.1.down_proj.weight_packed")
    finally:
        torch.set_default_dtype(before)
    assert is_made_of(down, made[1]["down_proj"])
    assert is_made_of(part_of(w13, 1), made[1]["gate_proj"], made[1]["up_proj"])
    assert is_made_of(both, made[0]["gate_proj"], made[1]["gate_proj"])
    assert same_bits(dense, made[1]["down_proj"]["codes"])


@pytest.mark.gpu
def test_onto_a_gpu(tmp_path: Path) -> None:
    tensors, made = expert_tensors(modelopt, 3)
    checkpoint = Checkpoint(write(tmp_path, tensors))
    w13, w2 = checkpoint.experts("m.experts", "cuda")
    assert w13.device.type == w2.device.type == "cuda"
    assert is_made_of(part_of(w13.to("cpu"), 1), made[1]["gate_proj"], made[1]["up_proj"])
    assert checkpoint.linear("m.experts.0.down_proj", "cuda").global_scale.is_cuda
    assert checkpoint.tensor("m.experts.0.down_proj.weight", "cuda").is_cuda


@pytest.mark.parametrize(
    "bias",
    [torch.ones(15), torch.ones(16, 1), torch.ones(16).int(), torch.ones(16) > 0],
    ids=lambda one: f"{one.dtype} {tuple(one.shape)}",
)
def test_biases(bias: torch.Tensor, tmp_path: Path) -> None:
    write(tmp_path, modelopt("a", matrix(16, 32)) | {"a.bias": bias})
    words = r"model\.safetensors: a\.bias must have shape \(16,\)"
    assert_rejected(tmp_path, words, lambda path: NVFP4Linear.from_checkpoint(path, "a"))
    stack = experts("0", "1")
    for number in "01":
        for part, rows in (("gate", 32), ("up", 32), ("down", 64)):
            stack[f"m.experts.{number}.{part}_proj.bias"] = torch.ones(rows)
    write(tmp_path, stack)
    assert NVFP4MoE.from_checkpoint(tmp_path, "m.experts").w13_bias is not None
    write(tmp_path, stack | {"m.experts.1.up_proj.bias": bias})
    words = r"m\.experts\.1\.up_proj\.bias must have shape \(32,\)"
    assert_rejected(tmp_path, words, lambda path: NVFP4MoE.from_checkpoint(path, "m.experts"))


def test_names_are_bounded(tmp_path: Path) -> None:
    name = "a" * (files.MAX_CHARACTERS + 1)
    write(tmp_path / "file", {name: torch.ones(1)})
    write_shards(tmp_path / "index", {name: torch.ones(1)})
    for folder in ("file", "index"):
        assert_rejected(
            tmp_path / folder, "the name of a tensor may have 1000 characters, 'aaa.* has 1001"
        )
    Checkpoint(write(tmp_path / "file", {name[1:]: torch.ones(1)}))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40])
def test_global_scales_that_divide(value: float, tmp_path: Path) -> None:
    """Zero and what is too small to have a reciprocal; as multipliers both are taken."""
    tensors = modelopt("a", matrix(16, 32))
    tensors["a.weight_scale_2"] = torch.tensor(value)
    assert float(read(write(tmp_path, tensors)).global_scale) == pytest.approx(value)
    tensors["a.weight_packed"] = tensors.pop("a.weight")
    tensors["a.weight_global_scale"] = tensors.pop("a.weight_scale_2").reshape(1)
    write(tmp_path, tensors, COMPRESSED)
    assert_rejected(
        tmp_path, r"a\.weight_global_scale: a global scale must be finite and above zero, got"
    )


def test_links_to_files_are_taken(tmp_path: Path) -> None:
    """As the cache of Hugging Face has them: snapshots link to blobs."""
    write_shards(tmp_path / "one", modelopt("a", matrix(16, 32)), {"b": torch.ones(2)})
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1234"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "one").iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    found = Checkpoint(snapshot)
    assert found.linear("a").shape == (16, 32)
    assert found.tensor("b").tolist() == [1, 1]
    assert found.config is not None
