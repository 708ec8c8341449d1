"""Loading and launching against a driver that only keeps what it was given (fake_driver.c).

Each script runs in a Python of its own, whose libcuda.so.1 is the fake one. So this part of the
jit is tested without a GPU; that a real driver does the right thing with it is in test_jit_gpu.py.
"""

from __future__ import annotations

import pytest
from jit_helpers import SOURCES, WITH_FAKE_DRIVER, run_python

PROLOGUE = (
    WITH_FAKE_DRIVER
    + """
import pathlib
from gristmill.jit import counters
from gristmill.jit.program import Program
from gristmill.jit.tensor_map import maps_of_rows

class LastMap(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64 * count) for name, count in (("address", 1), ("dims", 2))),
        *((name, ctypes.c_uint64) for name in ("stride", "context")),
        *((name, ctypes.c_uint32) for name in ("type", "rank")),
        *((name, ctypes.c_uint32 * 2) for name in ("box", "steps")),
        *((name, ctypes.c_uint32) for name in ("interleave", "swizzle", "promotion", "fill")),
    ]

last_map = LastMap.in_dll(fake, "last_map")

PARAMS = struct.Struct("QQqf")
program = Program("probe.cu", ("fill<2>", "fill<3>"), root=pathlib.Path(sys.argv[1]))
fill = kernel(program, "fill<2>", 0)
"""
)


@pytest.fixture
def run(fake_driver, home):
    def run(body: str) -> None:
        run_python(
            PROLOGUE + body,
            SOURCES,
            LD_LIBRARY_PATH=str(fake_driver),
            GRISTMILL_CACHE_DIR=str(home.path),
        )

    return run


def test_a_launch_hands_over_everything(run) -> None:
    run("""
launch = fill.prepare(grid=7, block=128, shared=1000, params=PARAMS)
launch(0, 11, 12, -13, 1.5)
assert last.context == 0xC0
assert (last.grid, last.block, last.shared, last.stream) == (7, 128, 1000, 0)
assert attributes() == {}
# 28 bytes of values and the 4 that C adds.
assert bytes(last.params)[:32] == PARAMS.pack(11, 12, -13, 1.5) + bytes(4)
launch(0x7000, 1, 2, 3, 4.0)
assert (last.stream, last.grid) == (0x7000, 7)
launch(0, 5, 6, 7, 8.0)
assert last.stream == 0
assert PARAMS.unpack_from(bytes(last.params)) == (5, 6, 7, 8.0)
assert number("launches").value == 3
assert number("pushes").value == number("pops").value > 0
""")


def test_attributes(run) -> None:
    run("""
fill.prepare(grid=8, block=32, cluster=4, params=PARAMS)(0, 1, 2, 3, 4.0)
assert attributes() == {4: [4, 1, 1]} and number("nonportable").value == 0
fill.prepare(grid=8, block=32, cooperative=True, params=PARAMS)(0, 1, 2, 3, 4.0)
assert attributes() == {2: [1, 0, 0]}
fill.prepare(grid=8, block=32, dependent=True, params=PARAMS)(0, 1, 2, 3, 4.0)
assert attributes() == {6: [1, 0, 0]}
fill.prepare(grid=16, block=32, cluster=16, dependent=True, params=PARAMS)(0, 1, 2, 3, 4.0)
assert attributes() == {4: [16, 1, 1], 6: [1, 0, 0]} and number("nonportable").value == 1
""")


def test_the_limit_of_shared_memory_never_shrinks(run) -> None:
    run("""
fill.prepare(grid=1, block=32, shared=40_000, params=PARAMS)
assert number("largest_shared").value == 0
fill.prepare(grid=1, block=32, shared=200_000, params=PARAMS)
assert number("largest_shared").value == 200_000
fill.prepare(grid=1, block=32, shared=100_000, params=PARAMS)
assert fill.occupancy(1024, 150_000) == 1
assert (number("largest_shared").value, number("shared_settings").value) == (200_000, 1)
with pytest.raises(DriverError, match="fill<2>: allowing 300000 bytes of shared memory") as caught:
    fill.prepare(grid=1, block=32, shared=300_000, params=PARAMS)
assert (caught.value.code, caught.value.name) == (1, "CUDA_ERROR_INVALID_VALUE")
""")


def test_what_a_kernel_tells_about_itself(run) -> None:
    run("""
assert (fill.max_threads, fill.static_shared_bytes) == (10, 11)
assert (fill.local_bytes, fill.registers) == (13, 14)
assert fill.occupancy(512) == 4
assert fill.max_active_clusters(256, 0, 8) == 108
""")


def test_one_module_per_device_for_all_its_kernels(run) -> None:
    run("""
assert kernel(program, "fill<2>", 0) is fill
other = kernel(program, "fill<3>", 0)
second = kernel(program, "fill<2>", 1)
assert number("loads").value == 2
assert counters.snapshot()["loads"] == 2 and counters.snapshot()["compiles"] == 1
other.prepare(grid=1, block=32, params=PARAMS)(0, 1, 2, 3, 4.0)
assert last.function == 0xA1 * 16 + 3
fill.prepare(grid=1, block=32, params=PARAMS)(0, 1, 2, 3, 4.0)
assert last.function == 0xA1 * 16 + 2
second.prepare(grid=1, block=32, params=PARAMS)(0, 1, 2, 3, 4.0)
assert last.function == 0xA2 * 16 + 2
""")


def test_a_thread_without_a_context_gets_that_of_the_kernel(run) -> None:
    run("""
launch = kernel(program, "fill<2>", 1).prepare(grid=1, block=32, params=PARAMS)
for _ in range(2):
    thread = threading.Thread(target=launch, args=(0, 21, 22, 23, 2.5))
    thread.start()
    thread.join()
assert number("launches").value == 2
assert last.context == 0xC1
assert PARAMS.unpack_from(bytes(last.params)) == (21, 22, 23, 2.5)
""")


def test_a_context_of_another_device_is_left_alone(run) -> None:
    run("""
fake.cuCtxSetCurrent(ctypes.c_uint64(0xC1))
number("next_result").value = 201
with pytest.raises(DriverError) as caught:
    fill.prepare(grid=3, block=32, params=PARAMS)(0, 1, 2, 3, 4.0)
assert (caught.value.code, caught.value.name) == (201, "CUDA_ERROR_INVALID_CONTEXT")
context = ctypes.c_uint64()
fake.cuCtxGetCurrent(ctypes.byref(context))
assert context.value == 0xC1 and number("launches").value == 0
""")


def test_errors_of_a_launch_are_named_and_not_sticky(run) -> None:
    run("""
launch = fill.prepare(grid=3, block=32, cluster=2, params=PARAMS)
launch(0, 1, 2, 3, 4.0)
for code, name in ((1, "CUDA_ERROR_INVALID_VALUE"), (98765, "CUDA error 98765")):
    number("next_result").value = code
    with pytest.raises(DriverError, match=r"launching fill<2> as .*grid=3.*cluster=2") as caught:
        launch(0, 1, 2, 3, 4.0)
    assert (caught.value.code, caught.value.name) == (code, name)
launch(0, 9, 9, 9, 9.0)
assert number("launches").value == 2
""")


def test_a_device_that_is_not_there(run) -> None:
    run("""
with pytest.raises(DriverError, match="CUDA device 9: CUDA_ERROR_INVALID_DEVICE") as caught:
    kernel(program, "fill<2>", 9)
assert caught.value.code == 101
fill.prepare(grid=1, block=32, params=PARAMS)(0, 1, 2, 3, 4.0)
""")


def test_a_struct_that_does_not_fit_is_refused(run) -> None:
    run("""
for form in ("QQ", "QQqff4f", "QQqf5f"):
    with pytest.raises(ArgumentError, match="fill<2>: the launch packs .* has 32"):
        fill.prepare(grid=1, block=32, params=struct.Struct(form))
""")


def test_a_kernel_that_is_not_in_the_program(run) -> None:
    run("""
with pytest.raises(ArgumentError, match=r"probe.cu: 'fill<9>' is not among .*: fill<2>, fill<3>"):
    kernel(program, "fill<9>", 0)
""")


def test_threads_do_not_mix_their_values(run) -> None:
    run("""
launch = fill.prepare(grid=1, block=32, params=struct.Struct("QQQQ"))

def work(value):
    for _ in range(3000):
        launch(value % 3, value, value, value, value)

threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert (number("launches").value, number("mixed").value) == (12000, 0)
launch(0, 1, 1, 1, 2)
assert number("mixed").value == 1  # so the fake does notice
""")


def test_a_tensor_map_hands_over_everything(run) -> None:
    run("""
fake.cuCtxSetCurrent(ctypes.c_uint64(0xC0))
map_at = maps_of_rows(0, "bfloat16", 2, 4096, 70, 5000, (32, 64))
assert map_at(0x7F0000000010) == bytes(range(1, 129))
assert last_map.address[0] == 0x7F0000000010
assert (list(last_map.dims), last_map.stride) == ([4096, 70], 10000)
assert (list(last_map.box), list(last_map.steps)) == ([64, 32], [1, 1])
# bf16; not interleaved, 128-byte swizzle, lines of 256 bytes, zeros outside
assert (last_map.type, last_map.rank) == (9, 2)
assert (last_map.interleave, last_map.swizzle) == (0, 3)
assert (last_map.promotion, last_map.fill) == (3, 0)
maps_of_rows(0, "float16", 2, 64, 1, 64, (8, 64))(16)
assert last_map.type == 6
""")


def test_tensor_maps_are_remembered_but_not_without_end(run) -> None:
    run("""
fake.cuCtxSetCurrent(ctypes.c_uint64(0xC0))
map_at = maps_of_rows(0, "float16", 2, 64, 8, 64, (8, 64))
first = map_at(16)
assert map_at(16) is first and number("maps").value == 1
assert map_at(32) != first and number("maps").value == 2
assert map_at(16) is first and number("maps").value == 2
made = [map_at(address) for address in range(16, 16 * 1001, 16)]
assert number("maps").value == 1000
assert map_at(16000) is made[-1] and number("maps").value == 1000
assert map_at(16) is not first and number("maps").value == 1001
# Another shape at the same address has another map.
other = maps_of_rows(0, "float16", 2, 128, 8, 128, (8, 64))
assert other(16000) != map_at(16000) and list(last_map.dims) == [128, 8]
""")


def test_a_thread_without_a_context_makes_tensor_maps(run) -> None:
    run("""
map_at = maps_of_rows(1, "float16", 2, 64, 8, 64, (8, 64))
made = []
thread = threading.Thread(target=lambda: made.append(map_at(16)))
thread.start()
thread.join()
assert made == [bytes(range(1, 129))] and last_map.context == 0xC1
""")


def test_errors_of_a_tensor_map_are_named_and_not_sticky(run) -> None:
    run("""
fake.cuCtxSetCurrent(ctypes.c_uint64(0xC0))
map_at = maps_of_rows(0, "float16", 2, 64, 8, 72, (8, 64))
number("next_result").value = 1
with pytest.raises(DriverError, match="tensor map of 8 rows of 64 float16 at 0x10, 72") as caught:
    map_at(16)
assert (caught.value.code, caught.value.name) == (1, "CUDA_ERROR_INVALID_VALUE")
assert map_at(16) == bytes(range(1, 129))
# A context of another device is left alone.
number("next_result").value = 201
with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
    map_at(32)
assert number("maps").value == 1
""")


def test_without_a_driver_the_error_is_clean(home) -> None:
    code = """
import pathlib, sys
from unittest import mock
from cuda.bindings import driver
from gristmill.errors import DriverError
from gristmill.jit.kernel import kernel
from gristmill.jit.program import Program

def missing(flags):
    raise RuntimeError("no libcuda\\nanywhere")

program = Program("probe.cu", ("fill<2>",), root=pathlib.Path(sys.argv[1]))
for fake in (missing, lambda flags: (driver.CUresult.CUDA_ERROR_NO_DEVICE,)):
    with mock.patch.object(driver, "cuInit", fake):
        try:
            kernel(program, "fill<2>", 0)
        except DriverError as error:
            print(error)
"""
    lines = run_python(code, SOURCES, GRISTMILL_CACHE_DIR=str(home.path)).splitlines()
    assert lines == [
        "the CUDA driver cannot be loaded: no libcuda anywhere",
        "the CUDA driver cannot be initialised: CUDA_ERROR_NO_DEVICE",
    ]
    assert not home.path.exists()
