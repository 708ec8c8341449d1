"""Malicious checkpoints: each is rejected at once, before memory is allocated, with an error that
names the file and the entry.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    assert_rejected,
    experts,
    matrix,
    modelopt,
    read,
    whole,
    write,
    write_shards,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gristmill.checkpoints import Checkpoint, QuantizationConfig, config, reader
from gristmill.checkpoints.files import INDEX_FILE
from gristmill.errors import CheckpointError
from gristmill.nn import NVFP4Linear

NO_PIPES = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
FILES = ("config.json", "hf_quant_config.json", INDEX_FILE, "model.safetensors")


def whole_but(name: str, folder: Path) -> None:
    """A checkpoint without one of `FILES`, and without the file that would be read before it."""
    whole(folder)
    (folder / name).unlink(missing_ok=True)
    if name == "hf_quant_config.json":
        (folder / "config.json").unlink()


# Other things than regular files.


@contextmanager
def released(pipe: Path) -> Iterator[None]:
    """Open and close the writing end of a pipe after some seconds, so that a test that waits for
    it fails and does not hang. In another process: safetensors holds the GIL while it opens a file.
    """
    script = (
        "import os, sys, time\n"
        "time.sleep(6)\n"
        "while True:\n"
        "    try:\n"
        "        os.close(os.open(sys.argv[1], os.O_WRONLY | os.O_NONBLOCK))\n"
        "    except OSError:\n"
        "        pass\n"
        "    time.sleep(0.1)\n"
    )
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", script, str(pipe)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@NO_PIPES
@pytest.mark.parametrize("name", FILES)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    whole_but(name, tmp_path)
    os.mkfifo(tmp_path / name)
    with released(tmp_path / name):
        assert_rejected(tmp_path, rf"{name} cannot be read: .*not a regular file")


@NO_PIPES
@pytest.mark.parametrize("with_index", [False, True])
def test_a_pipe_among_files_is_not_waited_for(with_index: bool, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    if with_index:
        names = {"a": "one.safetensors", "b": "two.safetensors"}
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    os.mkfifo(tmp_path / "two.safetensors")
    with released(tmp_path / "two.safetensors"):
        assert_rejected(tmp_path, r"two\.safetensors cannot be read: it is not a regular file")
    assert_rejected(tmp_path / "two.safetensors", "it is not a regular file")


@pytest.mark.parametrize("name", FILES)
def test_a_folder_is_no_file(name: str, tmp_path: Path) -> None:
    whole_but(name, tmp_path)
    (tmp_path / name).mkdir()
    assert_rejected(tmp_path, f"{name} cannot be read")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no such device")
@pytest.mark.parametrize("name", FILES)
def test_a_device_is_no_file(name: str, tmp_path: Path) -> None:
    whole_but(name, tmp_path)
    (tmp_path / name).symlink_to("/dev/zero")
    assert_rejected(tmp_path, f"{name} cannot be read: .*not a regular file")


# JSON.


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number has 5000 digits"),
        (b'{"a": -' + b"9" * 3_000_000 + b"}", "a number has 3000001 digits"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": "\xff"}', "utf-8"),
        (b"\0", "cannot be read"),
        (b"", "cannot be read"),
        (b"[]", "expected an object, got list"),
        (b"3", "expected an object, got int"),
        (b"NaN", "expected an object, got float"),
        (b'{"a": 1', "cannot be read"),
    ],
    ids=lambda one: repr(one)[:16],
)
@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_damaged_json(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    whole_but(name, tmp_path)
    (tmp_path / name).write_bytes(content)
    assert_rejected(tmp_path, words)
    assert_rejected(tmp_path / name if name == INDEX_FILE else tmp_path, name)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_how_large_json_may_be(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_but(name, tmp_path)
    monkeypatch.setattr(config, "MOST_JSON", 10_000)
    (tmp_path / name).write_text(json.dumps({"weight_map": {}, "a": "b" * 10_000}))
    assert_rejected(tmp_path, rf"{name} cannot be read: .* has 100\d\d bytes, more than 10000")
    monkeypatch.undo()
    assert config.MOST_JSON == 64 << 20


def test_numbers_that_published_configs_have(tmp_path: Path) -> None:
    """Those of models with Mamba layers: ``"time_step_limit": [0.0, Infinity]``."""
    whole(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content |= {"time_step_limit": [0.0, math.inf], "odd": math.nan, "large": 1 << 200}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert Checkpoint(tmp_path).config == QuantizationConfig.from_dict(MODELOPT)


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "../../etc/passwd",
        "a/model.safetensors",
        "a\\model.safetensors",
        "C:model.safetensors",
        "/model.safetensors",
        "model.safetensors\0.safetensors",
        "\0",
        "",
        ".",
        "..",
        "model.bin",
        3,
        None,
        True,
        [],
        ["model.safetensors"],
        {},
    ],
)
def test_an_index_names_files_beside_it(file: Any, tmp_path: Path) -> None:
    whole(tmp_path)
    inside = tmp_path / "inside"
    save_file({"a": torch.ones(1)}, whole(inside) / "a.safetensors")
    content = {"weight_map": {"b": "a.safetensors", "odd": file}}
    if file == "/model.safetensors":
        content["weight_map"]["odd"] = str(tmp_path / "model.safetensors")
    (inside / INDEX_FILE).write_text(json.dumps(content))
    assert_rejected(
        inside, f"{INDEX_FILE}: weight_map must name safetensors files in the .* for 'odd'"
    )
    assert_rejected(inside / INDEX_FILE, "for 'odd'")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("\ud800.safetensors", "lists files that are not there"),
        ("a" * 300 + ".safetensors", "not there|cannot be read"),
        ("a" * 1_000_000 + ".safetensors", "not there|cannot be read"),
        ("other.safetensors", r"lists files that are not there: \['other\.safetensors"),
        ("folder.safetensors", "folder.safetensors cannot be read: it is not a regular file"),
    ],
    ids=lambda one: one[:10],
)
def test_an_index_names_files_that_are_there(file: str, words: str, tmp_path: Path) -> None:
    whole(tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    assert_rejected(tmp_path, words)


def test_an_index_names_tensors_that_are_there(tmp_path: Path) -> None:
    whole(tmp_path)
    names = dict.fromkeys(["a.weight", "a.weight_scale", "a.weight_scale_2"], "model.safetensors")
    (tmp_path / INDEX_FILE).write_text(
        json.dumps({"weight_map": {**names, "b": names["a.weight"]}})
    )
    assert read(tmp_path).shape == (16, 32)
    words = r"model\.safetensors cannot be read: b: .*not contain tensor"
    assert_rejected(tmp_path, words, lambda path: Checkpoint(path).tensor("b"))


@pytest.mark.parametrize("name", FILES)
def test_links_in_a_circle(name: str, tmp_path: Path) -> None:
    whole_but(name, tmp_path)
    (tmp_path / name).symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / name)
    assert_rejected(tmp_path, f"{name} cannot be read")


@pytest.mark.parametrize("weight_map", [3, None, [], "model.safetensors"])
def test_an_index_without_a_map(weight_map: Any, tmp_path: Path) -> None:
    whole(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert_rejected(tmp_path, "there is no weight_map in it")


# Values of wrong types in configs.

WRONG = [None, True, False, 0, -1, 7, 16.0, math.inf, math.nan, 10**80, "", "16", "odd", "\ud800"]
WRONG += ["x" * 100_000, [], [1], ["re:(a+)+$"], ["re:("], [None], [[]], [{}], {}, {"a": 1}]
WRONG += [{"a": {"b": []}}, json.loads("[" * 500 + "]" * 500)]
CONFIGS: list[tuple[str, Any]] = [
    ("config.json", {"quantization_config": MODELOPT}),
    ("config.json", {"quantization_config": {**COMPRESSED, "targets": ["Linear"]}}),
    ("config.json", {"text_config": {"quantization_config": COMPRESSED}}),
    ("config.json", {"quantization_config": {**HF_QUANT, "quant_method": "modelopt"}}),
    ("hf_quant_config.json", HF_QUANT),
]
for _, one in CONFIGS[:2]:
    one["quantization_config"] = {
        **one["quantization_config"],
        "group_size": 16,
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "transform_config": None,
    }
# What messages may say in place of the name of an entry.
CALLED = {
    "num_bits": ["weights of"],
    "quantization": ["quant_algo"],
    "quantization_config": ["quant_method"],
}


def paths_in(value: Any) -> Iterator[tuple[Any, ...]]:
    for key in value if isinstance(value, dict) else range(len(value)):
        yield (key,)
        if isinstance(value[key], (dict, list)):
            yield from ((key, *others) for others in paths_in(value[key]))


def with_value(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return content


def judged(folder: Path, name: str, content: Any) -> CheckpointError | None:
    (folder / name).write_text(json.dumps(content))
    try:
        found = QuantizationConfig.read(folder)
    except CheckpointError as error:
        problem = error
    else:
        if found is not None:
            with suppress(CheckpointError):  # in part
                found.is_ignored("model.layers.0.mlp.gate_up_proj")
        return None
    assert str(folder / name) in str(problem)
    assert len(str(problem)) < 2000
    return problem


@pytest.mark.parametrize("which", range(len(CONFIGS)))
def test_no_value_of_a_config_is_believed(which: int, tmp_path: Path) -> None:
    """Every entry gets every wrong value: the config is read, or the error names the entry."""
    name, content = CONFIGS[which]
    errors = 0
    for path in paths_in(content):
        keys = [key for key in path if isinstance(key, str)]
        for value in WRONG:
            problem = judged(tmp_path, name, with_value(content, path, value))
            if problem is not None:
                errors += 1
                entries = [keys[-1], *CALLED.get(keys[-1], ())]
                assert any(entry in str(problem) for entry in entries), (path, value, problem)
    assert errors > 60


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group_size", "16"),
        ("group_size", 16.0),
        ("group_size", True),
        ("ignore", {"a": 1}),
        ("ignore", [1]),
        ("ignore", "lm_head"),
        ("config_groups", []),
        ("config_groups", {"group_0": None}),
        ("quant_algo", 7),
        ("quant_algo", ["NVFP4"]),
        ("quant_method", 7),
        ("kv_cache_scheme", 3),
        ("kv_cache_scheme", {"num_bits": True, "type": "float"}),
    ],
)
def test_values_that_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    problem = judged(tmp_path, "config.json", {"quantization_config": {**MODELOPT, key: value}})
    assert problem is not None
    assert key in str(problem)


@pytest.mark.parametrize(
    ("path", "values", "words"),
    [
        (("weights",), (3, [], "odd", True), "config_groups 'group_0': weights must be an object"),
        (("input_activations",), (3, [], "odd", True), "input_activations must be an object"),
        (("weights", "num_bits"), (True, 4.0, "4"), "bits"),
    ],
)
def test_parts_of_groups_that_are_refused(
    path: tuple[str, ...], values: tuple[Any, ...], words: str, tmp_path: Path
) -> None:
    for one, value in itertools.product((MODELOPT, COMPRESSED), values):
        content = with_value(one, ("config_groups", "group_0", *path), value)
        assert words in str(judged(tmp_path, "config.json", {"quantization_config": content}))


def test_the_config_of_a_text_model_is_an_object(tmp_path: Path) -> None:
    assert "text_config must be an object, got 3" in str(
        judged(tmp_path, "config.json", {"text_config": 3})
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(
    which=st.integers(0, len(CONFIGS) - 1),
    places=st.lists(st.tuples(st.integers(0, 1 << 16), JSON), min_size=1, max_size=4),
)
def test_configs_of_anything(
    which: int, places: list[tuple[int, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, content = CONFIGS[which]
    for number, value in places:
        paths = list(paths_in(content))
        if paths:
            content = with_value(content, paths[number % len(paths)], value)
    judged(tmp_path_factory.mktemp("anything"), name, content)


# Names of tensors.


@pytest.mark.parametrize("number", ["99999999999", "9" * 500, "2", "01", "00", "٣"])
def test_experts_are_counted_not_believed(number: str, tmp_path: Path) -> None:
    write(tmp_path, experts("0", number))
    assert_rejected(
        tmp_path,
        r"m\.experts has no experts \[1\], but others that are called",
        lambda path: Checkpoint(path).experts("m.experts"),
    )
    assert not NVFP4Linear.from_checkpoint(tmp_path, f"m.experts.{number}.up_proj").bias


# The first of several is large, the others are small or not there.
LARGE_FIRST = experts("0", inner=1024) | experts(*map(str, range(1, 50)), inner=16)
Q, K = modelopt("a.q_proj", matrix(1024, 64)), modelopt("a.k_proj", matrix(16, 32))
FUSED = ("a.q_proj", "a.k_proj")
PART = {name: tensor for name, tensor in Q.items() if not name.endswith("_scale")}


@pytest.mark.parametrize(
    ("tensors", "words", "what"),
    [
        (
            LARGE_FIRST,
            r"experts\.1\.gate_proj .* have shape \(32, 64\), those of the first",
            lambda one: one.experts("m.experts"),
        ),
        (Q | K, r"a\.k_proj has K = 32, a\.q_proj has", lambda one: one.fused(FUSED)),
        (Q, r"a\.k_proj", lambda one: one.fused(FUSED)),
        (PART, r"a\.q_proj", lambda one: one.linear("a.q_proj")),
        (
            {**Q, "a.q_proj.weight_scale": K["a.k_proj.weight_scale"]},
            r"a\.q_proj\.weight_scale must have",
            lambda one: one.linear("a.q_proj"),
        ),
    ],
    ids=["experts", "fused of two shapes", "fused in part", "linear in part", "linear, few scales"],
)
def test_memory_is_taken_for_what_is_there(
    tensors: dict[str, torch.Tensor],
    words: str,
    what: Callable[[Checkpoint], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every header is checked first."""
    write(tmp_path, tensors)

    def never(*args: Any) -> Any:
        raise AssertionError("memory of the size of the first")

    monkeypatch.setattr(reader, "_empty", never)
    monkeypatch.setattr(reader, "_empty_scale", never)
    with pytest.raises(CheckpointError, match=words):
        what(Checkpoint(tmp_path))


# safetensors files.

Kind = tuple[str, list[int], int]


def by_hand(folder: Path, *, cut: int = 0, **kinds: Kind) -> Path:
    """A file with these dtypes, shapes and numbers of bytes, right or wrong."""
    wanted: dict[str, Kind] = {
        "weight": ("U8", [16, 16], 256),
        "weight_scale": ("F8_E4M3", [16, 2], 32),
        "weight_scale_2": ("F32", [], 4),
        **kinds,
    }
    header, at = {}, 0
    for name, (dtype, shape, size) in wanted.items():
        header[f"a.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(at - cut)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_a_file_by_hand(tmp_path: Path) -> None:
    assert read(by_hand(tmp_path)).shape == (16, 32)


EMPTY = {"weight_scale": ("F8_E4M3", [0, 2], 0)}


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"weight": ("U8", [0, 16], 0), **EMPTY}, r"a\.weight must have .* not empty"),
        ({"weight": ("U8", [16, 0], 0)}, r"a\.weight must have .* not empty"),
        ({"weight": ("U8", [2**62, 0], 0)}, r"a\.weight must have .* not empty"),
        ({"weight": ("U8", [2**64 - 1, 0], 0)}, r"a\.weight must have .* not empty"),
        ({"weight": ("U8", [256], 256)}, r"a\.weight must have .*got \(256,\)"),
        ({"weight": ("U8", [16, 12], 192)}, r"a\.weight must have .*got \(16, 12\)"),
        ({"weight": ("I8", [16, 16], 256)}, r"a\.weight must have dtype U8, got I8"),
        ({"weight": ("U8", [2**62, 2**62], 256)}, "overflow"),
        ({"weight": ("U8", [16, 17], 256)}, "cannot be read"),
        ({"weight": ("XX", [16, 16], 256)}, "cannot be read"),
        ({"weight": ("X" * 1_000_000, [16, 16], 256)}, "cannot be read"),
        ({"weight": ("\0\33[31m\u202e", [16, 16], 256)}, r"`\\x00\\x1b\[31m\\u202e`"),
        ({"weight": ("U8", [16, 16] + [1] * 100_000, 256)}, r"a\.weight has 100002 dims"),
        ({"weight_scale": ("F8_E4M3", [0, 2**64 - 1], 0)}, r"a\.weight_scale must have shape"),
        ({"weight_scale": ("F8_E4M3", [32, 1], 32)}, r"a\.weight_scale must have shape"),
        ({"weight_scale": ("F6_E2M3", [16, 2], 24)}, "must have dtype F8_E4M3, got F6_E2M3"),
        ({"weight_scale_2": ("F32", [0, 2**64 - 1], 0)}, r"a\.weight_scale_2"),
        ({"weight_scale_2": ("F32", [2], 8)}, r"a\.weight_scale_2 must be one value"),
        ({"weight_scale_2": ("F64", [], 8)}, r"a\.weight_scale_2 must have dtype F32"),
    ],
)
def test_headers(kinds: dict[str, Kind], words: str, tmp_path: Path) -> None:
    assert_rejected(by_hand(tmp_path, **kinds), words)
    assert_rejected(tmp_path, words, lambda path: Checkpoint(path).fused(["a", "a"]))


def test_a_tensor_that_torch_cannot_have_is_named(tmp_path: Path) -> None:
    by_hand(tmp_path, odd=("F32", [0, 2**64 - 1], 0))
    assert_rejected(
        tmp_path, r"cannot be read: a\.odd: ", lambda path: Checkpoint(path).tensor("a.odd")
    )


@pytest.mark.parametrize(
    "kind",
    [
        {"shape": [-1]},
        {"shape": [True]},
        {"shape": [1.0]},
        {"shape": ["1"]},
        {"shape": [10**30]},
        {"shape": 1},
        {"shape": None},
        {"dtype": 3},
        {"dtype": None},
        {"data_offsets": [-1, 0]},
        {"data_offsets": [1, 0]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 1, 2]},
        {"data_offsets": [0, 10**30]},
        {"data_offsets": [1 << 40, (1 << 40) + 1]},
        {"data_offsets": None},
    ],
    ids=str,
)
def test_values_of_headers(kind: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], **kind}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0")
    assert_rejected(tmp_path, r"model\.safetensors cannot be read")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 5) + b"\xff\xff\xff\xff\xff",
    ],
    ids=repr,
)
def test_files_without_a_header(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert_rejected(tmp_path, r"model\.safetensors cannot be read")


def test_a_header_beyond_its_bound(tmp_path: Path) -> None:
    size = 101_000_000
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"{" + b" " * size)
    assert_rejected(tmp_path, "header too large")


def test_a_file_that_is_cut(tmp_path: Path) -> None:
    assert_rejected(
        by_hand(tmp_path, cut=8), r"model\.safetensors cannot be read: .*not fully covered"
    )


def test_tensors_that_share_bytes(tmp_path: Path) -> None:
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({"a": one, "b": one}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    assert_rejected(tmp_path, r"model\.safetensors cannot be read: .*offset")


# Scales.


@PRODUCERS
@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, -math.inf])
def test_global_scales(name: Namer, config: Any, value: float, tmp_path: Path) -> None:
    tensors = name("a", matrix(16, 32))
    part = next(key for key in tensors if key.endswith(("_scale_2", "weight_global_scale")))
    tensors[part] = torch.full_like(tensors[part], value)
    write(tmp_path, tensors, config)
    words = rf"{part}: a global scale must be finite and .*, got {value}"
    assert_rejected(tmp_path, words)
    assert_rejected(tmp_path, words, lambda path: Checkpoint(path).fused(["a", "a"]))


@pytest.mark.parametrize("code", [0x7F, 0xFF, 0x80, 0x81])
def test_block_scales(code: int, tmp_path: Path) -> None:
    """NaN, and what has a sign, even zero."""
    tensors = modelopt("a", matrix(16, 32))
    tensors["a.weight_scale"].view(torch.uint8)[3, 1] = code
    assert_rejected(
        write(tmp_path, tensors), r"a\.weight_scale: block scales must be .* at \[3, 1\]"
    )


# Writers that were killed (see also tests/faults/test_faults_checkpoints.py).


def test_a_part_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)}, {"c": torch.ones(2)})
    (tmp_path / INDEX_FILE).unlink()
    assert Checkpoint(tmp_path).names() == ["a", "b", "c"]
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert_rejected(
        tmp_path, r"there are 2 of the 3 files model-\.\.\.-of-00003\.safetensors, and no mod"
    )
