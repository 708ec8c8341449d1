"""Patterns of a checkpoint's config: what they match, and that no one of them takes long."""

from __future__ import annotations

import copy
import pickle
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.checkpoints import QuantizationConfig
from gristmill.checkpoints.patterns import (
    MOST_CHARACTERS,
    MOST_TOGETHER,
    Expression,
    Patterns,
)
from gristmill.errors import CheckpointError

NAMES = (
    "lm_head",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.gate_proj",
    "model.layers.2.self_attn.q_proj",
    "model.layers.10.self_attn.kv_b_proj",
    "model.layers.7.mlp.experts.12.down_proj",
    "model.layers.7.mlp.shared_expert",
    "model.layers.7.mlp.shared_expert_gate",
    "model.layers.3.block_sparse_moe.gate",
    "language_model.model.layers.11.mlp.gate",
    "visual.blocks.3.attn.qkv",
    "mtp.fc",
)
PUBLISHED = (
    r".*lm_head",
    r".*mlp.gate$",
    r"visual.*",
    r".*self_attn.*",
    r"model\.layers\.(0|1|2)\..*",
    r"model\.layers\.(?:0|[12])\.(?:mlp|self_attn)\..*",
    r".*\.block_sparse_moe\.gate",
    r"^language_model\.model\.layers\.\d+\.mlp\.gate$",
    r"(?!.*experts).*",
    r"^(?!.*experts).*self_attn.*",
    r"^((?!experts).)*$",
    r".*(q|k|v)_proj$",
    r".*shared_expert(_gate)?$",
    r".*layers\.\d{1,2}\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    r"(?:.*\.)?mtp\.?.*",
    r".*\.(?P<which>[qkv]|kv_b)_proj\b",
    r"model\.layers\.([0-9]|1[0-9])\..*?gate",
    r"[^.]+(\.[^.]+)+\.gate\Z",
)


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_expressions_of_published_checkpoints(pattern: str) -> None:
    ours, theirs = Expression(pattern), re.compile(pattern)
    for name in NAMES:
        assert ours.match(name) == (theirs.match(name) is not None), name
    config = QuantizationConfig("compressed-tensors", False, ignore=(f"re:{pattern}",))
    assert [config.is_ignored(name) for name in NAMES] == [*map(ours.match, NAMES)]


ONE = st.sampled_from(
    [*"ab1.^$", r"\.", r"\d", r"\w", r"\W", r"\b", r"\B", "[ab]", "[^a]", "[a-b1]", r"[\d.]"]
)
TIMES = st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{,2}", "{0,3}", "*?", "+?", "{1,2}?"])


def deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: f"({'|'.join(some)})"),
        st.tuples(st.sampled_from(["(?:", "(?=", "(?!"]), inner).map(lambda two: f"{''.join(two)})"),
        st.tuples(inner, TIMES).map(lambda two: f"(?:{two[0]}){two[1]}"),
        st.tuples(st.sampled_from(["a", ".", "[ab]", r"\w"]), TIMES).map("".join),
    )


@settings(max_examples=400, deadline=None)
@given(
    pattern=st.recursive(ONE, deeper, max_leaves=8),
    names=st.lists(st.text("ab1._ \n", min_size=1, max_size=8), min_size=1, max_size=6),
)
def test_expressions_match_as_in_re(pattern: str, names: list[str]) -> None:
    """Whatever is taken; and what `re` takes is refused for its cost alone."""
    try:
        ours = Expression(pattern)
    except ValueError as problem:
        if "which is not taken" not in str(problem):
            with pytest.raises(re.error):
                re.compile(pattern)
        return
    theirs = re.compile(pattern)
    for name in names:
        assert ours.match(name) == (theirs.match(name) is not None), name


# What keeps `re` busy for years, on a name that does not match.
SLOW = (
    "(a+)+$",
    "(a|a)*$",
    "(a|aa)+$",
    "(.*a){25}$",
    "(a?){30}a{60}b",
    f"{'.*' * 20}c",
    f"(?:{'(?!a.*b.*c)' * 60}.)*c",
    f"({'a?' * 300})*c",
    "a{1000000000}",
    "(?:a{0,60000}){0,60000}c",
)


@pytest.mark.parametrize("pattern", SLOW, ids=lambda one: one[:20])
def test_no_expression_takes_long(pattern: str) -> None:
    name = "a" * 1000 + "b"
    start = time.perf_counter()
    try:
        assert not Expression(pattern).match(name)
    except ValueError as problem:
        assert "which is not taken" in str(problem)
    assert time.perf_counter() - start < 2  # 0.15 s at most, where nothing else runs


@pytest.mark.parametrize("pattern", ["*a" * 400 + "*b", "?*" * 400, "[ab]*" * 190 + "c"])
def test_no_wildcard_takes_long(pattern: str) -> None:
    start = time.perf_counter()
    Patterns("ignore", [pattern], inner=True).match("ab" * 500 + "d")
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("((a+)+b)+", "a repeat of a group with a repeated group in it at position 8"),
        ("((a|b)*)*", "a repeat of a group with a repeated group in it"),
        ("(?!(ab)*c)", "a repeated group in the lookahead"),
        (r"(a)\1", r"the escape '\\1'"),
        (r"a\n", r"the escape '\\n'"),
        ("(?<=a)b", r"the group '\(\?<='"),
        ("(?i)a", r"the group '\(\?i\)'"),
        ("(?P=a)", r"the group '\(\?P='"),
        ("(?>a)", r"the group '\(\?>a'"),
        ("a*+", "a possessive repeat"),
        ("(" * 30 + ")" * 30, "more than 20 groups inside of each other"),
        ("(", "no regular expression: unterminated group at position 0"),
        ("a)", "no regular expression: unbalanced parenthesis at position 1"),
        ("[a", "no regular expression: unterminated character set at position 0"),
        ("[b-a]", "no regular expression: bad character range"),
        ("*a", "no regular expression: nothing to repeat at position 0"),
        ("a**", "no regular expression: multiple repeat"),
        ("a{3,2}", "no regular expression: min repeat greater than max repeat"),
        ("a\\", "the escape"),
    ],
)
def test_what_is_refused_is_said(pattern: str, words: str) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [f"re:{pattern}"]}
    with pytest.raises(CheckpointError, match=rf"quantization_config: ignore: 're:.*{words}"):
        QuantizationConfig.from_dict(config)


def test_expressions_of_targets_are_refused_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"targets: 're:\(' is no regular expression"):
        QuantizationConfig("compressed-tensors", False, targets=("re:(",))


def test_how_long_patterns_may_be() -> None:
    for pattern in ("re:" + "a" * (MOST_CHARACTERS - 3), "*" + "a" * (MOST_CHARACTERS - 1)):
        Patterns("ignore", [pattern], inner=False)
        with pytest.raises(CheckpointError, match=r"ignore: patterns may have 1000 characters"):
            Patterns("ignore", [f"{pattern}a"], inner=False)
    many = ["*" + "a" * 999] * (MOST_TOGETHER // 1000)
    Patterns("ignore", many, inner=False)
    with pytest.raises(CheckpointError, match="65536 together"):
        Patterns("ignore", [*many, *many], inner=False)


def test_names_may_be_many() -> None:
    """An export that lists every expert that it left."""
    names = [f"model.layers.{a}.mlp.experts.{b}" for a in range(100) for b in range(1000)]
    config = QuantizationConfig("modelopt", False, ignore=tuple(names))
    start = time.perf_counter()
    for number in range(1000):
        assert config.is_ignored(f"model.layers.50.mlp.experts.{number}.up_proj")
        assert not config.is_ignored(f"model.layers.100.mlp.experts.{number}.up_proj")
    assert time.perf_counter() - start < 5  # 50 ms; as patterns each: ten minutes


def test_patterns_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = QuantizationConfig("modelopt", False, ignore=("re:.*gate$", "*.x", "lm_head"))
    copies = [config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))]
    monkeypatch.setattr("gristmill.checkpoints.patterns._Parser", None)
    monkeypatch.setattr("gristmill.checkpoints.patterns.translate", None)
    for one in copies:
        assert one == config
        assert one.is_ignored("a.gate")
        assert one.is_ignored("a.x")
        assert one.is_ignored("a.lm_head.b")
        assert not one.is_ignored("a.up_proj")
