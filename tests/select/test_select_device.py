from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gristmill.jit.program import arch_of
from gristmill.select import KNOWN, device, device_of
from gristmill.select.device import data_sheet


@pytest.fixture
def two_fake_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs of different kinds, the second one current; counts the questions to the driver."""
    asked: list[int] = []
    cards = [
        SimpleNamespace(name="NVIDIA A100", major=8, minor=0, shared_memory_per_block_optin=166912),
        SimpleNamespace(
            name="NVIDIA B200", major=10, minor=0, shared_memory_per_block_optin=232448
        ),
    ]
    for card in cards:
        card.multi_processor_count, card.L2_cache_size = 100, 50 << 20

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return cards[index]

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(device, "_SEEN", {})
    return asked


def test_cuda_device_is_asked_once(two_fake_gpus: list[int]) -> None:
    found = device_of(torch.device("cuda", 0))
    assert (found.kind, found.name, found.arch) == ("cuda", "NVIDIA A100", "sm_80")
    assert (found.multiprocessors, found.l2_bytes, found.shared_per_block) == (
        100,
        50 << 20,
        166912,
    )
    assert device_of("cuda:0") is found
    assert two_fake_gpus == [0]


def test_the_data_sheet_goes_before_the_clock(two_fake_gpus: list[int]) -> None:
    assert (device_of("cuda:0").bandwidth, device_of("cuda:0").flops) == (1555e9, 312e12)
    assert device_of("cuda:1").bandwidth == 8000e9


def test_an_unknown_card_has_the_bandwidth_of_its_memory_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = SimpleNamespace(
        name="NVIDIA Z1",
        major=9,
        minor=0,
        multi_processor_count=10,
        L2_cache_size=1,
        memory_clock_rate=2_619_000,
        memory_bus_width=5120,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(device, "_SEEN", {})
    assert device_of("cuda:0").bandwidth == pytest.approx(3352.3e9, rel=1e-4)
    assert device_of("cuda:0").flops == 0
    del card.memory_clock_rate
    monkeypatch.setattr(device, "_SEEN", {})
    assert device_of("cuda:0").bandwidth == 0


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2039),
        ("NVIDIA H100 NVL", 3938),
        ("NVIDIA H200", 4800),
        ("NVIDIA H20", 4000),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA L4", 300),
        ("NVIDIA L40", 864),
        ("NVIDIA L40S", 864),
        ("NVIDIA GB200", 8000),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 1597),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 1792),
        ("NVIDIA A4000", 0),
        ("cpu", 0),
    ],
)
def test_data_sheets_are_found_by_whole_words(name: str, gigabytes: float) -> None:
    assert data_sheet(name)[0] == gigabytes * 1e9
    assert (data_sheet(name)[1] > 0) == (gigabytes > 0)


def test_what_only_draws_the_roof_takes_no_part_in_comparisons() -> None:
    from dataclasses import replace

    known = KNOWN["sm_90a"]
    assert replace(known, bandwidth=1.0, flops=1.0) == known
    assert hash(replace(known, bandwidth=1.0, flops=1.0)) == hash(known)


def test_device_without_index_is_the_current_one(
    two_fake_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device_of("cuda").name == "NVIDIA B200"
    assert device_of("cuda").index == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device_of("cuda").name == "NVIDIA A100"


def test_rocm_devices_are_not_cuda(
    two_fake_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (device_of("cuda:0").kind, device_of("cuda:0").arch) == ("hip", "")


def test_cpu_and_meta() -> None:
    assert device_of("cpu").kind == "cpu"
    assert device_of(torch.device("meta")).kind == "meta"
    assert device_of("cpu").arch == ""


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_arch_of(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(capability) == arch


def test_known_devices_are_consistent() -> None:
    assert list(KNOWN) == ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]
    for arch, known in KNOWN.items():
        assert arch_of(known.capability) == arch == known.arch
        assert 48 << 10 < known.shared_per_block < 228 << 10
        assert known.multiprocessors > 100
        assert (known.bandwidth, known.flops) == data_sheet(known.name)
        assert 5e11 < known.bandwidth < 1e13 < known.flops < 1e16


@pytest.mark.gpu
def test_this_gpu_matches_what_is_known_of_its_kind() -> None:
    here = device_of("cuda")
    known = KNOWN.get(here.arch)
    if known is None or known.name != here.name:
        pytest.skip(f"no data sheet values for {here.name}")
    assert here == known
