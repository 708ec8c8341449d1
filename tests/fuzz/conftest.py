from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

# What the calls are judged by.
sys.path.append(str(Path(__file__).parents[1] / "conformance"))
if importlib.util.find_spec("hypothesis") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzzing")
    group.addoption("--fuzz-cases", type=int, help="how many calls of each op")
    group.addoption("--fuzz-seed", type=int, help="another seed: other calls")


@pytest.fixture
def fuzz_cases(request: pytest.FixtureRequest) -> int | None:
    """What was asked for on the command line. (Late: the option is unknown to a whole run.)"""
    return request.config.getoption("fuzz_cases", None)


@pytest.fixture
def fuzz_seed(request: pytest.FixtureRequest) -> int | None:
    return request.config.getoption("fuzz_seed", None)


@pytest.fixture
def random_seed(fuzz_seed: int | None) -> int:
    return random.SystemRandom().randrange(1 << 30) if fuzz_seed is None else fuzz_seed
