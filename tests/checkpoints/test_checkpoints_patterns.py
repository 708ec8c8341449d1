"""Patterns of a checkpoint's config: what they match, and that none takes long."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gristmill.checkpoints import QuantizationConfig, patterns
from gristmill.checkpoints.patterns import MAX_CHARACTERS, MAX_TOTAL, Patterns
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
    r".*(?<!shared_expert_)gate$",
    r"(?i).*LM_HEAD",
    r".*(q|k|v)_proj$",
    r".*shared_expert(_gate)?$",
    r".*layers\.\d{1,2}\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    r"(?:.*\.)?mtp\.?.*",
    r".*\.(?P<which>[qkv]|kv_b)_proj\b",
    r"model\.layers\.([0-9]|1[0-9])\..*?gate",
    r"[^.]+(\.[^.]+)+\.gate\Z",
)


def matcher(*given: str, inner: bool = False) -> Patterns:
    return Patterns("config.json: ignore", given, inner=inner)


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_expressions_of_published_checkpoints(pattern: str) -> None:
    expected = [re.match(pattern, name) is not None for name in NAMES]
    config = QuantizationConfig("compressed-tensors", False, ignore=(f"re:{pattern}",))
    assert [config.is_ignored(name) for name in NAMES] == expected


ONE = st.sampled_from(
    [*"ab1.^$", r"\.", r"\d", r"\w", r"\W", r"\b", r"\B", "[ab]", "[^a]", "[a-b1]", r"[\d.]"]
)
TIMES = st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{,2}", "{0,3}", "*?", "+?", "{1,2}?"])
GROUPS = st.sampled_from(["(", "(?:", "(?=", "(?!", "(?i:"])


def deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.tuples(GROUPS, st.lists(inner, min_size=1, max_size=3).map("|".join)).map(
            lambda two: f"{''.join(two)})"
        ),
        st.tuples(inner, TIMES).map(lambda two: f"(?:{two[0]}){two[1]}"),
        st.tuples(st.sampled_from(["a", ".", "[ab]", r"\w"]), TIMES).map("".join),
    )


@settings(max_examples=300, deadline=None)
@given(
    pattern=st.recursive(ONE, deeper, max_leaves=8),
    names=st.lists(st.text("ab1._ \n", min_size=1, max_size=8), min_size=1, max_size=6),
)
def test_expressions_match_as_in_re(pattern: str, names: list[str]) -> None:
    try:
        ours = matcher(f"re:{pattern}")
    except CheckpointError as problem:
        assume("is too long" not in str(problem))
        raise
    for name in names:
        assert ours.match(name) == (re.match(pattern, name) is not None), name


@given(
    pattern=st.text("ab.*?[]!-", max_size=8),
    names=st.lists(st.text("ab.[]!-", max_size=8), min_size=1, max_size=6),
)
def test_wildcards_match_as_in_fnmatch(pattern: str, names: list[str]) -> None:
    ours = matcher(pattern)
    for name in names:
        expected = fnmatchcase(name, pattern) or fnmatchcase(f"{name}.", pattern)
        assert ours.match(name) == expected, name


@given(pattern=st.text("ab.", max_size=5), name=st.text("ab.", max_size=8))
def test_names_match_inner_parts(pattern: str, name: str) -> None:
    expected = name == pattern or f"{name}." == pattern
    assert matcher(pattern).match(name) == expected
    inner = f".{pattern.strip('.')}." in f".{name}."
    assert matcher(pattern, inner=True).match(name) == (expected or inner)


# Keep `re` busy for years, on a name that does not match.
SLOW = (
    "(a+)+$",
    "(a|a)*$",
    "(a|aa)+$",
    "(?:a|a|b)*?c",
    "(.*a){25}$",
    "(a?){10}(.*a){5}b",
    f"{'.*' * 20}c",
    f"(?:{'(?!a.*b.*c)' * 60}.)*c",
    f"({'a?' * 300})*c",
    "(?:a{0,60000}){0,60000}c",
    "(?=(a|a)*$)c|(?:(?:a|a)*|(?:a|a)*)*$",
    "(a*)*" * 100 + "c",
)


@pytest.mark.parametrize("pattern", SLOW, ids=lambda one: one[:20])
def test_no_expression_takes_long(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do many together: the time is that of a whole list."""
    monkeypatch.setattr(patterns, "MATCH_TIMEOUT_S", 0.1)
    ours = matcher(*[f"re:{pattern}"] * 10)
    start = time.perf_counter()
    with suppress(CheckpointError):
        ours.match("a" * 1000 + "b")
    assert time.perf_counter() - start < 2


def test_an_expression_that_takes_long_is_named() -> None:
    source = "model/config.json: quantization_config"
    content = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["re:(a|a)*$"]}
    config = QuantizationConfig.from_dict(content, source)
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        config.is_ignored("a" * 40 + ".b")
    assert str(caught.value) == (
        f"{source}: ignore: 're:(a|a)*$' takes too long to match module '{'a' * 40}.b': "
        f"the limit is 1 s for a module and 60 s in total"
    )
    assert 0.5 < time.perf_counter() - start < 10


def test_many_modules_do_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes less than its own limit."""
    monkeypatch.setattr(patterns, "TOTAL_TIMEOUT_S", 0.5)
    ours = matcher("re:(a|a)*$", "re:c")
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match="in total"):
        any(ours.match("a" * 16 + f".{number}") for number in range(1000))
    assert time.perf_counter() - start < 5
    # What takes no time can still be matched.
    assert ours.match("c")
    assert not ours.match("b")


@pytest.mark.parametrize("pattern", ["*a" * 400 + "*b", "?*" * 400, "[ab]*" * 190 + "c"])
def test_no_wildcard_takes_long(pattern: str) -> None:
    start = time.perf_counter()
    matcher(pattern, inner=True).match("ab" * 500 + "d")
    assert time.perf_counter() - start < 2


def test_many_wildcards_do_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a microsecond; all of them, by all modules, would take minutes."""
    monkeypatch.setattr(patterns, "TOTAL_TIMEOUT_S", 0.2)
    ours = matcher(*(f"*{number}*x" for number in range(2000)))
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"ignore: '\*1999\*x' takes too long .* in total"):
        any(ours.match(f"model.layers.{number}.up_proj") for number in range(10_000))
    assert time.perf_counter() - start < 5


def test_a_stopped_process_is_no_slow_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = matcher("*b", "re:.*c$")
    clock = iter(range(0, 10_000, 1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    assert not ours.match("a")
    assert ours.match("a.c")


# `regex` writes counted repeats out: these would take gigabytes.
COUNTED = (
    "a{1000000000}",
    "(a{1000}){1000}",
    "((a{30}){30}){30}",
    "[ab]{70000,}",
    f"a{{{'9' * 800}}}",
)


@pytest.mark.parametrize("pattern", COUNTED, ids=lambda one: one[:20])
def test_counted_repeats_are_bounded(pattern: str) -> None:
    with pytest.raises(CheckpointError, match=r"ignore: 're:.* with counted repeats written out"):
        matcher(f"re:{pattern}")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", r"missing \), unterminated subpattern at position 0"),
        ("[\33-\0]", r"bad character range \\x1b-\\x00 at position 1"),
        ("a**", "multiple repeat at position 2"),
        ("a{,99999999999}", "repetition number is too large"),
        # Syntax of `regex` alone.
        (r"\p{L}", "has a brace that is not a count"),
        ("(?:ab){e<=2}", "has a brace that is not a count"),
        (r"\m", r"bad escape \\m"),
        ("(?R)", "unknown extension"),
        ("(?e)a", "unknown extension"),
        ("(?V1)a", "unknown extension"),
        ("a{2", "has a brace that is not a count"),
        ("model[[:digit:]]", "has a POSIX class, which is not read"),
        ("model[^a[:digit:]]", "has a POSIX class, which is not read"),
    ],
    ids=lambda one: one[:20],
)
def test_what_is_not_an_expression(pattern: str, words: str) -> None:
    content = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [f"re:{pattern}"]}
    with pytest.raises(CheckpointError, match=rf"quantization_config: ignore: 're:.*{words}"):
        QuantizationConfig.from_dict(content)


def test_an_expression_that_is_nested_too_deeply() -> None:
    """`re` parses groups recursively. The limit is that of the process, which others may raise."""
    matcher("re:(?:a)")  # imports `regex`, which needs some depth itself
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 200)
    try:
        with pytest.raises(CheckpointError) as caught:
            matcher("re:" + "(?:" * 240 + ")" * 240)
    finally:
        sys.setrecursionlimit(before)
    assert isinstance(caught.value.__cause__, RecursionError)
    assert str(caught.value).startswith("config.json: ignore: 're:(?:")
    assert " cannot be compiled: maximum recursion depth exceeded" in str(caught.value)


def test_expressions_of_targets_are_checked() -> None:
    with pytest.raises(CheckpointError, match=r"targets: 're:\(' cannot be compiled"):
        QuantizationConfig("compressed-tensors", False, targets=("re:(",))


@pytest.mark.parametrize("start", ["re:", "*"])
def test_how_long_patterns_may_be(start: str) -> None:
    pattern = start + "a" * (MAX_CHARACTERS - len(start))
    matcher(pattern)
    with pytest.raises(CheckpointError, match=r"ignore: .* is too long: a pattern may have 1000"):
        matcher(f"{pattern}a")
    with pytest.raises(CheckpointError, match="and all of them 1048576"):
        matcher(*[pattern] * (MAX_TOTAL // MAX_CHARACTERS + 1))


# What exports list, where some experts are left, and twice that: names are mapped for vLLM.
LISTS = {
    "wildcards": [f"model.layers.{a}.mlp.experts.{b}.*" for a in range(122) for b in range(60)],
    "expressions": [
        f"re:.*layers.{a}.mlp.experts.{b}.(gate|up)_proj$" for a in range(122) for b in range(65)
    ],
}


@pytest.mark.parametrize("kind", LISTS)
def test_patterns_may_be_many(kind: str) -> None:
    ours = matcher(*LISTS[kind], inner=True)
    assert ours.match("model.layers.121.mlp.experts.59.up_proj")
    assert not ours.match("model.layers.121.mlp.experts.65.up_proj")


def test_counted_repeats_of_nothing_are_bounded() -> None:
    """`regex` compiles them in quadratic time: this would take a minute."""
    with pytest.raises(CheckpointError, match="8192 with counted repeats written out"):
        matcher(f"re:(?:{'()' * 400}){{80}}")
    start = time.perf_counter()
    matcher(f"re:(?:{'()' * 400}){{10}}")
    assert time.perf_counter() - start < 5


def test_patterns_that_take_long_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """`re` takes 0.7 s for each of them."""
    monkeypatch.setattr(patterns, "COMPILE_TIMEOUT_S", 0.5)
    with pytest.raises(CheckpointError, match=r"the patterns take too long to compile"):
        matcher(*[f"re:(?i){i:03}" + "[\0-\U0010ffff]" * 190 for i in range(20)])


def test_names_may_be_many() -> None:
    """An export that lists every expert that it left."""
    names = [f"model.layers.{a}.mlp.experts.{b}" for a in range(100) for b in range(1000)]
    config = QuantizationConfig("modelopt", False, ignore=tuple(names))
    start = time.perf_counter()
    for number in range(1000):
        assert config.is_ignored(f"model.layers.50.mlp.experts.{number}.up_proj")
        assert not config.is_ignored(f"model.layers.100.mlp.experts.{number}.up_proj")
    assert time.perf_counter() - start < 5  # 50 ms; as patterns each: ten minutes


def test_a_name_of_many_parts_does_not_take_long() -> None:
    """Only runs as long as a listed name are looked up."""
    ours = matcher("a.b", ".c.d.e.", inner=True)
    start = time.perf_counter()
    for name in ("a.b", "c.d.e"):
        assert ours.match(f"{'x.' * 1000}{name}{'.x' * 1000}")
    assert not ours.match("a." * 2000 + "c.d")
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("ignore", [("re:.*gate$", "*.x", "lm_head"), ("lm_head",)])
def test_copies(ignore: Sequence[str]) -> None:
    config = QuantizationConfig("modelopt", False, ignore=tuple(ignore))
    for one in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert one == config
        assert [one.is_ignored(name) for name in NAMES] == [*map(config.is_ignored, NAMES)]


def test_names_and_wildcards_do_without_regex() -> None:
    script = (
        "import sys\n"
        "from gristmill.checkpoints.patterns import Patterns\n"
        "found = Patterns('ignore', ['lm_head', '*.gate'], inner=True)\n"
        "assert found.match('a.gate') and found.match('a.lm_head.b') and not found.match('a')\n"
        "assert 'regex' not in sys.modules\n"
        "assert Patterns('ignore', ['re:a'], inner=True).match('ab')\n"
        "assert 'regex' in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
