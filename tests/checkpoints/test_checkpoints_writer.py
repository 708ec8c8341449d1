"""What save_modelopt writes: names and values on disk, the way back, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import matrix, same_bits
from safetensors.torch import load_file

from gristmill.checkpoints import Checkpoint, QuantizationConfig, save_modelopt
from gristmill.checkpoints import writer as writer_module
from gristmill.checkpoints.files import INDEX_FILE
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4 import NVFP4Tensor, dequantize, quantize


def weight(rows: int, columns: int, seed: int = 0, scale: float = 0.01) -> NVFP4Tensor:
    return NVFP4Tensor(**matrix(rows, columns, seed, scale))


def below(*weights: NVFP4Tensor) -> NVFP4Tensor:
    return NVFP4Tensor(
        torch.cat([one.codes for one in weights]),
        torch.cat([one.scales.view(torch.uint8) for one in weights]).view(torch.float8_e4m3fn),
        torch.cat([one.row_scale for one in weights]),
    )


def stacked(*weights: NVFP4Tensor) -> NVFP4Tensor:
    return NVFP4Tensor(
        torch.stack([one.codes for one in weights]),
        torch.stack([one.scales.view(torch.uint8) for one in weights]).view(torch.float8_e4m3fn),
        torch.stack([one.row_scale for one in weights]),
    )


def same(one: NVFP4Tensor, other: NVFP4Tensor) -> bool:
    return (
        same_bits(one.codes, other.codes)
        and same_bits(one.scales, other.scales)
        and same_bits(one.row_scale, other.row_scale)
    )


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_names_and_values_on_disk(tmp_path: Path) -> None:
    one, dense = weight(8, 32), torch.randn(4, 6).bfloat16()
    save_modelopt(tmp_path / "new", {"a.b": one, "lm_head.weight": dense, "n.weight": dense[0]})
    folder = tmp_path / "new"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "hf_quant_config.json",
        "model.safetensors",
    ]
    stored = load_file(folder / "model.safetensors")
    assert set(stored) == {
        "a.b.weight",
        "a.b.weight_scale",
        "a.b.weight_scale_2",
        "lm_head.weight",
        "n.weight",
    }
    assert same_bits(stored["a.b.weight"], one.codes)
    assert same_bits(stored["a.b.weight_scale"], one.scales)
    assert same_bits(stored["a.b.weight_scale_2"], torch.tensor(0.01))
    assert same_bits(stored["lm_head.weight"], dense)
    assert read_json(folder / "hf_quant_config.json")["quantization"] == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    config = read_json(folder / "config.json")["quantization_config"]
    assert config["quant_method"] == "modelopt"
    assert config["quant_algo"] == "W4A16_NVFP4"
    assert config["ignore"] == ["lm_head"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 16
    assert config["config_groups"]["group_0"]["input_activations"] is None


def test_there_and_back(tmp_path: Path) -> None:
    original = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    quantized = quantize(original, method="scale_sweep")
    save_modelopt(tmp_path, {"a.weight": quantized, "b": weight(16, 16)})
    checkpoint = Checkpoint(tmp_path)
    assert same(checkpoint.linear("a"), quantized)
    assert same(checkpoint.linear("b"), weight(16, 16))
    assert torch.equal(dequantize(checkpoint.linear("a")), dequantize(quantized))
    assert list(checkpoint.modules()) == ["a", "b"]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a", "sm_100a"])
def test_what_is_prepared_for_a_gpu_is_unpacked(tmp_path: Path, arch: str, pairs: bool) -> None:
    q, k = weight(64, 64), weight(40, 64, 1, 0.5)
    experts = stacked(weight(16, 32, 4), weight(16, 32, 3, 0.5))
    assert experts.scales.view(torch.uint8).all()  # beside zeros codes come back as zeros
    packed = {
        "a.qk_proj": below(q, k).prepare(arch),
        "b.experts.down_proj": experts.prepare(arch, pairs=pairs),
    }
    shards = {"a.qk_proj": {"q_proj": 64, "k_proj": 40}}
    save_modelopt(tmp_path, {**packed, "n.weight": torch.ones(3)}, shards=shards)
    checkpoint = Checkpoint(tmp_path)
    assert same(checkpoint.linear("a.q_proj"), q)
    assert same(checkpoint.linear("a.k_proj"), k)
    for number in range(2):
        found = checkpoint.linear(f"b.experts.{number}.down_proj")
        assert same_bits(found.codes, experts.codes[number])
        assert same_bits(found.scales, experts.scales[number])
        assert same_bits(found.row_scale, experts.row_scale[number])


def test_a_fused_weight_is_split_into_its_shards(tmp_path: Path) -> None:
    parts = [weight(rows, 32, rows, scale) for rows, scale in ((16, 0.5), (8, 0.01), (8, 3.0))]
    fused = below(*parts)
    rows = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
    save_modelopt(tmp_path, {"l.0.qkv_proj": fused}, shards={"l.0.qkv_proj": rows})
    checkpoint = Checkpoint(tmp_path)
    assert list(checkpoint.modules()) == ["l.0.k_proj", "l.0.q_proj", "l.0.v_proj"]
    assert same(checkpoint.linear("l.0.k_proj"), parts[1])
    assert same(checkpoint.fused([f"l.0.{name}" for name in rows]), fused)


def test_shards_are_named_as_weights_are(tmp_path: Path) -> None:
    fused = below(weight(16, 32, 0, 0.5), weight(8, 32, 1, 0.25))
    rows = {"q": 16, "kv": 8}
    for name in ("a.b", "a.b.weight"):
        for key in ("a.b", "a.b.weight"):
            save_modelopt(tmp_path, {name: fused}, shards={key: rows})
            assert same(Checkpoint(tmp_path).fused(["a.q", "a.kv"]), fused)


def test_a_layer_of_zeros(tmp_path: Path) -> None:
    zeros = weight(8, 32, scale=0.0)
    save_modelopt(tmp_path, {"a": zeros})
    assert same(Checkpoint(tmp_path).linear("a"), zeros)


def test_experts_there_and_back(tmp_path: Path) -> None:
    experts = []
    for e in range(3):
        gate, up = weight(32, 64, e, 2.0**e), weight(32, 64, e + 5, 3.0)
        experts.append((below(gate, up), weight(64, 32, e + 9, 0.1 * (e + 1))))
    w13, w2 = stacked(*(one for one, _ in experts)), stacked(*(two for _, two in experts))
    save_modelopt(
        tmp_path,
        {"m.experts.gate_up_proj": w13, "m.experts.down_proj": w2},
        shards={"m.experts.gate_up_proj": {"gate_proj": 32, "up_proj": 32}},
    )
    checkpoint = Checkpoint(tmp_path)
    assert "m.experts.2.up_proj.weight_scale_2" in checkpoint
    back = checkpoint.experts("m.experts")
    assert same(back[0], w13)
    assert same(back[1], w2)
    some = checkpoint.experts("m.experts", local=[2])
    assert same(some[1], stacked(experts[2][1]))


def test_several_files_and_an_index(tmp_path: Path) -> None:
    weights = {f"l.{number}": weight(32, 64, number, 0.5 + number) for number in range(5)}
    layer = 32 * 32 + 32 * 4 + 4
    save_modelopt(tmp_path, weights, max_shard_bytes=2 * layer)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == names
    index = read_json(tmp_path / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == 5 * layer
    for name in names:
        stored = load_file(tmp_path / name)
        assert stored
        assert all(index["weight_map"][tensor] == name for tensor in stored)
    assert len(index["weight_map"]) == 15
    # A layer's tensors stay together.
    assert len({index["weight_map"][f"l.2.{part}"] for part in ("weight", "weight_scale")}) == 1
    checkpoint = Checkpoint(tmp_path)
    assert all(same(checkpoint.linear(name), value) for name, value in weights.items())


def test_the_config_is_kept(tmp_path: Path) -> None:
    base = {"architectures": ["X"], "unknown": {"a": [1]}, "quantization_config": {"old": 1}}
    save_modelopt(
        tmp_path,
        {"a": weight(8, 32), "a.input_scale": torch.tensor(0.5), "b.weight": torch.ones(2, 2)},
        config=base,
        activations=True,
        kv_cache="fp8",
        ignore=["c*", "b"],
    )
    assert base["quantization_config"] == {"old": 1}
    content = read_json(tmp_path / "config.json")
    assert content["architectures"] == ["X"]
    assert content["unknown"] == {"a": [1]}
    expected = QuantizationConfig("modelopt", True, 16, ("c*", "b"), (), "fp8")
    assert QuantizationConfig.from_dict(content["quantization_config"]) == expected
    legacy = read_json(tmp_path / "hf_quant_config.json")
    assert QuantizationConfig.from_hf_quant_config(legacy) == expected
    # Without one, what is in the folder stays.
    save_modelopt(tmp_path, {"a": weight(8, 32)})
    again = read_json(tmp_path / "config.json")
    assert again["architectures"] == ["X"]
    assert not QuantizationConfig.from_dict(again["quantization_config"]).activations


def test_what_is_not_quantized_is_ignored_by_name(tmp_path: Path) -> None:
    dense = torch.ones(4, 4)
    weights = {
        "l.0.mlp.gate.weight": dense,
        "l.0.norm.weight": dense[0],
        "l.0.q_proj": weight(8, 32),
        "l.0.q_proj.bias": dense[0],
        "lm_head.weight": dense,
    }
    save_modelopt(tmp_path, weights, ignore=["*head"])
    config = QuantizationConfig.read(tmp_path)
    assert config is not None
    assert config.ignore == ("*head", "l.0.mlp.gate")
    assert not config.is_ignored("l.0.q_proj")


def test_tied_and_strided_tensors(tmp_path: Path) -> None:
    table = torch.randn(4, 6)
    save_modelopt(tmp_path, {"a.weight": table, "b.weight": table, "c": table.t(), "d": table[1:]})
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.tensor("a.weight"), checkpoint.tensor("b.weight"))
    assert torch.equal(checkpoint.tensor("c"), table.t())
    assert torch.equal(checkpoint.tensor("d"), table[1:])


def test_rows_of_different_scales_are_refused(tmp_path: Path) -> None:
    fused = below(weight(16, 32, 0, 0.5), weight(8, 32, 1, 0.25), weight(8, 32, 1, 0.125))
    with pytest.raises(
        CheckpointError,
        match=r"a\.qkv would have rows of different .*: 0\.5 and from row 16, 24 another\. Give "
        r"shards .*'q_proj': 16",
    ):
        save_modelopt(tmp_path, {"a.qkv": fused})
    with pytest.raises(CheckpointError, match=r"a\.kv would .*0\.25 and from row 24 another"):
        save_modelopt(tmp_path, {"a.qkv": fused}, shards={"a.qkv": {"q": 16, "kv": 16}})
    # Rows that all say the same are one scale.
    each = NVFP4Tensor(fused.codes, fused.scales, torch.full((32,), 0.5))
    save_modelopt(tmp_path, {"a": each})
    assert same(Checkpoint(tmp_path).linear("a"), each)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ({"a": 3}, {}, "a must be an NVFP4Tensor or a tensor, got int"),
        ({"a": weight(8, 32)}, {"kv_cache": "int8"}, "kv_cache must be None or 'fp8', got 'int8'"),
        ({"a": weight(8, 32)}, {"activations": True}, r"there is no a\.input_scale"),
        (
            {"a": weight(8, 32)},
            {"shards": {"b": {"c": 8}}},
            "shards names modules that are not .*: b",
        ),
        ({"a": weight(8, 32)}, {"shards": {"a": {"b": 4, "c": 3}}}, "add up to its 8 rows, got"),
        ({"a": weight(8, 32)}, {"shards": {"a": {"b": 9, "c": -1}}}, "add up to its 8 rows, got"),
        ({"a": weight(8, 32), "a.weight": torch.ones(1)}, {}, r"a\.weight would be there twice"),
        ({"a": weight(8, 32, scale=-1.0)}, {}, "a: a global scale must be finite and not negat"),
        ({"a": weight(8, 32, scale=float("nan"))}, {}, "a: a global scale .* got nan"),
        ({"a": weight(1, 32, scale=float("nan"))}, {}, "finite and not negative, got nan"),
        ({"a": weight(8, 32, scale=float("inf"))}, {}, "finite and not negative, got inf"),
        (
            {"a": weight(8, 32)},
            {"shards": {"a": {"b": 8}, "a.weight": {"c": 8}}},
            "shards names a twice",
        ),
        ({"a": weight(8, 32)}, {"ignore": "lm_head"}, "ignore must be a list of strings"),
        (
            {"a": torch.ones(2, device="meta")},
            {},
            "a must be a dense tensor .* on the meta device",
        ),
        ({"a": weight(8, 32).to("meta")}, {}, "a must be a dense tensor .* on the meta device"),
        (
            {"a": torch.eye(3).to_sparse()},
            {},
            r"a must be a dense .* layout torch\.sparse_c",
        ),
        ({"__metadata__": torch.ones(2)}, {}, "no tensor can have the name '__metadata__'"),
        ({"a" * 990: weight(8, 32)}, {}, "the name of a tensor may have 1000 characters"),
        ({"a": quantize(torch.ones(2, 2, 2, 16))}, {}, r"a matrix or a stack .* \(2, 2, 2, 16\)"),
    ],
)
def test_what_cannot_be_written(
    tmp_path: Path, weights: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"save_modelopt: .*{message}"):
        save_modelopt(tmp_path, weights, **options)
    assert not list(tmp_path.iterdir())


def test_negative_block_scales_are_refused(tmp_path: Path) -> None:
    bad = weight(8, 32)
    bad.scales.view(torch.uint8)[2, 1] = 0xB8
    with pytest.raises(
        CheckpointError, match=r"save_modelopt: a: block scales .* -1\.0 at \[2, 1\]"
    ):
        save_modelopt(tmp_path, {"a": bad})


def everything_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("sizes", [(1e9, 1.0), (1.0, 1e9), (1.0, 1.0), (1e9, 1e9)])
def test_a_new_checkpoint_takes_the_place_of_an_old_one(
    tmp_path: Path, sizes: tuple[float, float]
) -> None:
    old = {f"l.{number}": weight(16, 32, number) for number in range(3)}
    new = {f"l.{number}": weight(16, 32, number + 7) for number in range(2)}
    save_modelopt(tmp_path, old, max_shard_bytes=sizes[0])
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not ours")
    save_modelopt(tmp_path, new, max_shard_bytes=sizes[1])
    checkpoint = Checkpoint(tmp_path)
    assert list(checkpoint.modules()) == ["l.0", "l.1"]
    assert same(checkpoint.linear("l.1"), new["l.1"])
    files = {name for name in everything_in(tmp_path) if name.startswith("model")}
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    index = {"model.safetensors.index.json"}
    assert files == ({"model.safetensors"} if sizes[1] > 1 else shards | index)
    assert (tmp_path / "tokenizer.json").exists()
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("broken", ["_write_tensors", "_write_json"])
def test_a_failure_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    weights = {f"l.{number}": weight(16, 32, number) for number in range(3)}
    save_modelopt(tmp_path, weights, max_shard_bytes=1)
    before = everything_in(tmp_path)
    right = getattr(writer_module, broken)

    def fails(*args: Any) -> None:
        right(*args)
        raise OSError("no space left")

    monkeypatch.setattr(writer_module, broken, fails)
    with pytest.raises(OSError, match="no space left"):
        save_modelopt(tmp_path, {"l.0": weight(16, 32, 9)}, max_shard_bytes=1)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, PermissionError])
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("sizes", [(1e9, 1.0), (1.0, 1e9), (1.0, 1.0), (1e9, 1e9)])
def test_a_failure_at_any_move_leaves_the_old_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[float, float],
    is_done: bool,
    error: type[BaseException],
) -> None:
    """Before the move, or just after it, as an interrupt may come."""
    old = {f"l.{number}": weight(16, 32, number) for number in range(3)}
    new = {f"l.{number}": weight(16, 32, number + 7) for number in range(2)}
    save_modelopt(tmp_path, old, max_shard_bytes=sizes[0])
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not ours")
    before = everything_in(tmp_path)
    right, left = os.replace, 0

    def fails(source: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if left == 0 and not is_done:
            raise error("at a move")
        right(source, target)
        if left == 0:
            raise error("at a move")

    monkeypatch.setattr(os, "replace", fails)
    errors = 0
    while True:
        left = errors + 1
        try:
            save_modelopt(tmp_path, new, max_shard_bytes=sizes[1])
        except error:
            assert everything_in(tmp_path) == before
            errors += 1
        else:
            break
    assert errors >= 4  # a file goes, three come
    assert list(Checkpoint(tmp_path).modules()) == list(new)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX_FILE])
def test_a_folder_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").write_text("not ours")
    with pytest.raises(CheckpointError, match=f"save_modelopt: .*{name} is not a regular file"):
        save_modelopt(tmp_path, {"a": weight(8, 32)}, config={})
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "file").read_text() == "not ours"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX_FILE])
def test_a_pipe_is_not_replaced(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"save_modelopt: .*{name} is not a regular file"):
        save_modelopt(tmp_path, {"a": weight(8, 32)}, config={})
    assert (tmp_path / name).is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == [name]
