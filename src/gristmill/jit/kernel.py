"""A kernel on a device, and its launch.

Every CUDA kernel of gristmill takes exactly one parameter, a struct by value, so that a launch is
one `struct.pack` and one driver call. Those in Triton and in the CuTe DSL take several, which are
packed the same way and handed over by their places (`Kernel.prepare_separate`). What does not
change between calls (grid, block, shared memory, attributes) is settled in `prepare`; what is left
to a launch is a stream and the values.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gristmill.errors import ArgumentError, CompileError
from gristmill.jit import counters
from gristmill.jit.cache import load_or_compile
from gristmill.jit.compilers import Compilable
from gristmill.jit.driver import (
    INVALID_CONTEXT,
    adopt_device,
    architecture,
    bindings,
    checked,
    current_device,
    driver_error,
    launch_function,
)
from gristmill.jit.once import Once
from gristmill.locks import Lock

# Called with a stream handle and the values of the parameter struct. A function and not an object
# with __call__, which would cost 0.12 us more at each call; immutable, for any thread.
Launch: TypeAlias = Callable[..., None]

# Dynamic shared memory that a kernel may use without asking, and the largest cluster that every
# device with clusters can run.
_SHARED_UNASKED = 48 * 1024
_CLUSTER_PORTABLE = 8
# Programs have a handful; but handles of streams that come and go are any numbers.
_STREAMS_KEPT = 128

_kernels: Once[tuple[Compilable, str, int], Kernel] = Once()
_modules: Once[tuple[str, int], Any] = Once()


def kernel(program: Compilable, name: str, device_index: int) -> Kernel:
    """The kernel `name` of `program` on a CUDA device, compiled and loaded at the first call."""
    return _kernels.get(
        (program, name, device_index), functools.partial(_load, program, name, device_index)
    )


@dataclass(frozen=True)
class _Shape:
    """All of a launch but its stream and values."""

    grid: int
    block: int
    shared: int
    cluster: int
    cooperative: bool
    dependent: bool

    def config(self, stream: int) -> Any:
        driver = bindings()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block, 1, 1
        config.sharedMemBytes = self.shared
        config.hStream = driver.CUstream(stream)
        config.attrs = self._attributes(driver)
        config.numAttrs = len(config.attrs)
        return config

    def _attributes(self, driver: Any) -> list[Any]:
        identity = driver.CUlaunchAttributeID
        attributes = []
        if self.cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = identity.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = self.cluster, 1, 1
            attributes.append(attribute)
        if self.cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = identity.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if self.dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = identity.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        return attributes


class Kernel:
    """One `__global__` function on one device, with what it uses. Made by `kernel()`.

    `facts` are those of its `Binary`.
    """

    def __init__(
        self, name: str, function: Any, device_index: int, facts: Mapping[str, int] | None = None
    ) -> None:
        self.name = name
        self.facts: Mapping[str, int] = facts or {}
        self.device_index = device_index
        self._function = function
        self._lock = Lock()
        self._shared_allowed = 0
        attribute = bindings().CUfunction_attribute
        self.registers = self._attribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self.local_bytes = self._attribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        self.static_shared_bytes = self._attribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self.max_threads = self._attribute(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, device {self.device_index})"

    def occupancy(self, threads: int, shared: int = 0) -> int:
        """How many blocks of this size one multiprocessor holds at once."""
        self._allow(shared, cluster=1)
        with current_device(self.device_index):
            result = bindings().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._function, threads, shared
            )
        return int(checked(result, f"{self.name}: occupancy of {threads} threads"))

    def max_active_clusters(self, threads: int, shared: int, cluster: int) -> int:
        """How many clusters of `cluster` blocks the whole device holds at once."""
        self._allow(shared, cluster)
        shape = _Shape(cluster, threads, shared, cluster, cooperative=False, dependent=False)
        with current_device(self.device_index):
            result = bindings().cuOccupancyMaxActiveClusters(self._function, shape.config(0))
        return int(checked(result, f"{self.name}: occupancy of clusters of {cluster}"))

    def prepare(
        self,
        *,
        grid: int,
        block: int,
        shared: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
        dependent: bool = False,
        params: struct.Struct,
    ) -> Launch:
        """Settle all of a launch but its stream and values.

        `grid` blocks (a multiple of `cluster`) of `block` threads with `shared` bytes of dynamic
        shared memory each. `cooperative`: all blocks run at once, or the launch fails.
        `dependent`: the kernel may begin before the one before it in the stream has ended, and
        waits for it by itself. `params` packs the kernel's parameter struct.
        """
        self._allow(shared, cluster)
        shape = _Shape(grid, block, shared, cluster, cooperative, dependent)
        return self._launcher(shape, self._padded(params))

    def prepare_separate(
        self, *, grid: int, params: struct.Struct, dependent: bool = False
    ) -> Launch:
        """As `prepare`, for a kernel of several parameters whose block the compiler has settled.

        `params` packs them all, each at the offset that C would give it in a struct.
        """
        shared = self.facts["shared"]
        self._allow(shared, cluster=1)
        shape = _Shape(
            grid, self.facts["threads"], shared, 1, cooperative=False, dependent=dependent
        )
        return self._separate_launcher(shape, params, self._offsets(params))

    def _separate_launcher(
        self, shape: _Shape, params: struct.Struct, offsets: tuple[int, ...]
    ) -> Launch:
        call = launch_function()
        function = ctypes.c_void_p(int(self._function))
        pack_into = params.pack_into
        configs, add = _per_stream(shape)
        # Buffers that no launch is using: taken and given back in one step each, so a thread, or a
        # finalizer that launches in the middle of a launch, never writes into another's.
        free: list[tuple[Any, Any]] = []

        def launch(stream: int, *values: Any) -> None:
            try:
                config = configs[stream]
            except KeyError:
                config = add(stream)
            try:
                buffer, places = free.pop()
            except IndexError:
                buffer, places = make()
            pack_into(buffer, 0, *values)
            code = call(config, function, places, None)
            if code == INVALID_CONTEXT and adopt_device(self.device_index):
                code = call(config, function, places, None)
            free.append((buffer, places))
            if code:
                raise driver_error(code, f"launching {self.name} as {shape}")

        def make() -> tuple[Any, Any]:
            buffer = ctypes.create_string_buffer(params.size)
            start = ctypes.addressof(buffer)
            places = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
            return buffer, places

        return launch

    def _offsets(self, params: struct.Struct) -> tuple[int, ...]:
        """Where the driver wants each parameter, checked against what `params` packs."""
        forms = params.format
        packed = [
            (struct.calcsize(f"{forms[:at]}0{form}"), struct.calcsize(form))
            for at, form in enumerate(forms)
        ]
        wanted = self._parameters()
        if packed != wanted:
            # A compiler of another convention: the caller can do without its kernel.
            raise CompileError(
                f"{self.name}: the launch packs parameters at (offset, size) {packed}, "
                f"but the kernel takes them at {wanted}"
            )
        return tuple(offset for offset, _ in packed)

    def _parameters(self) -> list[tuple[int, int]]:
        """Offset and size of each parameter, as the driver tells."""
        found: list[tuple[int, int]] = []
        with current_device(self.device_index):
            while True:
                status, offset, size = bindings().cuFuncGetParamInfo(self._function, len(found))
                if int(status) != 0:  # there are no more
                    return found
                found.append((int(offset), int(size)))

    def _launcher(self, shape: _Shape, params: struct.Struct) -> Launch:
        call = launch_function()
        function = ctypes.c_void_p(int(self._function))
        pack = params.pack
        byref, pointer = ctypes.byref, ctypes.c_char_p
        configs, add = _per_stream(shape)

        def launch(stream: int, *values: Any) -> None:
            try:
                config = configs[stream]
            except KeyError:
                config = add(stream)
            # The packed bytes are the struct; a c_char_p that points at them is, in memory, the
            # array of one parameter that the driver wants. Both are this call's own.
            code = call(config, function, byref(pointer(pack(*values))), None)
            if code:
                recover(code, config, values)

        def recover(code: int, config: ctypes.c_void_p, values: tuple[Any, ...]) -> None:
            if code == INVALID_CONTEXT and adopt_device(self.device_index):
                code = call(config, function, byref(pointer(pack(*values))), None)
            if code:
                raise driver_error(code, f"launching {self.name} as {shape}")

        return launch

    def _attribute(self, attribute: Any) -> int:
        result = bindings().cuFuncGetAttribute(attribute, self._function)
        return int(checked(result, f"{self.name}: reading its attributes"))

    def _allow(self, shared: int, cluster: int) -> None:
        """Ask for what a kernel may not use unasked: much shared memory, large clusters."""
        driver = bindings()
        attribute = driver.CUfunction_attribute
        with self._lock, current_device(self.device_index):
            if cluster > _CLUSTER_PORTABLE:
                checked(
                    driver.cuFuncSetAttribute(
                        self._function,
                        attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
                        1,
                    ),
                    f"{self.name}: allowing clusters of {cluster} blocks",
                )
            # The limit belongs to the function, not to a launch: it must never shrink.
            if shared + self.static_shared_bytes > max(_SHARED_UNASKED, self._shared_allowed):
                checked(
                    driver.cuFuncSetAttribute(
                        self._function,
                        attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        shared,
                    ),
                    f"{self.name}: allowing {shared} bytes of shared memory per block",
                )
                self._shared_allowed = shared + self.static_shared_bytes

    def _padded(self, params: struct.Struct) -> struct.Struct:
        """`params` with the padding that C puts at the end of a struct and Python does not."""
        with current_device(self.device_index):
            result = bindings().cuFuncGetParamInfo(self._function, 0)
        _, size = checked(result, f"{self.name}: reading the size of its parameter")
        padding = size - params.size
        if not 0 <= padding < 16:
            raise ArgumentError(
                f"{self.name}: the launch packs {params.size} bytes ({params.format!r}), "
                f"but the parameter of the kernel has {size}"
            )
        return struct.Struct(f"{params.format}{padding}x") if padding else params


class _Config(ctypes.c_void_p):
    """The address of a launch configuration, which it keeps alive.

    So the dict that it stands in may forget it while another thread launches with it.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__(owner.getPtr())
        self.owner = owner


def _per_stream(
    shape: _Shape,
) -> tuple[dict[int, ctypes.c_void_p], Callable[[int], ctypes.c_void_p]]:
    """Launch configurations by stream, and what adds one at a stream's first launch."""
    configs: dict[int, ctypes.c_void_p] = {}

    def add(stream: int) -> ctypes.c_void_p:
        if len(configs) >= _STREAMS_KEPT:
            configs.clear()
        return configs.setdefault(stream, _Config(shape.config(stream)))

    return configs, add


def _load(program: Compilable, name: str, device_index: int) -> Kernel:
    if name not in program.names:
        raise ArgumentError(
            f"{program.source}: {name!r} is not among the kernels of this program: "
            f"{', '.join(program.names)}"
        )
    arch = architecture(device_index)
    binary = load_or_compile(program, arch)
    driver = bindings()

    def load_module() -> Any:
        start = time.perf_counter()
        module = checked(driver.cuModuleLoadData(binary.cubin), f"loading {program.source}")
        counters.add("loads")
        counters.add("load_seconds", time.perf_counter() - start)
        return module

    with current_device(device_index):
        module = _modules.get((program.key(arch), device_index), load_module)
        function = checked(
            driver.cuModuleGetFunction(module, binary.lowered[name].encode()),
            f"{program.source}: looking for {name}",
        )
        return Kernel(name, function, device_index, binary.facts)
