"""Runs PTX on a CPU, slowly: what the CuTe DSL has made of a kernel, without a GPU.

All threads of a block go through the text together, each register an array over threads. Where
they part, those that are furthest behind go first; as branches lead forward, they meet again. Only
the instructions that our kernels use are known. Memory is that of given tensors: an access outside
of them, or one that is not aligned to its own size, is an error, as is a shuffle that part of a
warp does not take part in.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_PARAMETER = re.compile(r"\.param \.(\w+)(?: \.ptr[^,]*?)? (\w+)[,\n]")
_SHARED = re.compile(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\]")
_LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*)")
_PART = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_BYTES = {"b16": 2, "u16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8}
_ALL = np.uint64(2**64 - 1)
_WARP = 32

Lanes = Any  # a numpy array with one value for each thread


class Kernel:
    """The one kernel of a PTX text."""

    def __init__(self, text: str) -> None:
        head, _, body = text.partition("\n{\n")
        self.parameters: list[tuple[int, int]] = []  # offset and size
        self._parameter: dict[str, int] = {}
        at = 0
        for kind, name in _PARAMETER.findall(head.partition(".entry")[2]):
            size = _BYTES[kind]
            at = -(-at // size) * size
            self._parameter[name] = len(self.parameters)
            self.parameters.append((at, size))
            at += size
        self._symbols, self._shared = {}, 0
        for name, size in _SHARED.findall(body):
            self._symbols[name] = self._shared
            self._shared += int(size)
        self._code: list[tuple[Any, str, list[str]]] = []
        self._labels: dict[str, int] = {}
        for line in body.splitlines():
            line = line.partition("//")[0].strip().rstrip(";")
            if line.endswith(":"):
                self._labels[line[:-1]] = len(self._code)
            elif line and line != "}" and not line.startswith("."):
                match = _LINE.fullmatch(line)
                assert match is not None, line
                guard = (match[2], match[1] == "!") if match[2] else None
                self._code.append((guard, match[3], _PART.findall(match[4])))

    def run(
        self, grid: int, threads: int, packed: bytes, tensors: Sequence[torch.Tensor | None]
    ) -> None:
        """Launch it with these parameters, on the memory of `tensors`."""
        memory = [_bytes_of(tensor) for tensor in tensors if tensor is not None]
        for block in range(grid):
            _Block(self, block, threads, packed, memory).run()


def _bytes_of(tensor: torch.Tensor) -> tuple[int, Any]:
    """The address and the bytes of the tensor's memory, all of it."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    return storage.data_ptr(), whole.numpy()


class _Block:
    def __init__(
        self,
        kernel: Kernel,
        index: int,
        threads: int,
        packed: bytes,
        memory: list[tuple[int, Any]],
    ) -> None:
        self._kernel, self._packed, self._memory = kernel, packed, memory
        self._threads = threads
        self._own = np.zeros(kernel._shared, np.uint8)
        self._registers: dict[str, Lanes] = {
            "%tid.x": np.arange(threads, dtype=np.uint64),
            "%ctaid.x": np.full(threads, index, np.uint64),
        }
        self._active = np.ones(threads, bool)

    def run(self) -> None:
        end = len(self._kernel._code)
        at = np.zeros(self._threads, np.int64)
        while (here := int(at.min())) < end:
            self._active = at == here
            guard, name, operands = self._kernel._code[here]
            taking = self._active
            if guard is not None:
                register, negated = guard
                taking = taking & (self._registers[register] != negated)
            at[self._active] = here + 1
            if name == "bra":
                target = self._kernel._labels[operands[0]]
                assert target > here, "a branch backwards"
                at[taking] = target
            elif name in ("ret", "exit"):
                at[taking] = end
            else:
                self._active = taking
                self._step(name, operands)

    def _step(self, name: str, operands: list[str]) -> None:
        base, *kinds = name.split(".")
        if base == "griddepcontrol":
            return
        if base == "bar":
            assert self._active.all(), "a barrier that some threads do not reach"
            return
        if base in ("ld", "st"):
            self._access(base, kinds, operands)
            return
        if base == "mov" and "{" in "".join(operands):
            self._regroup(kinds[-1], operands)
            return
        target, *sources = operands
        if base == "shfl":
            self._shuffle(target, sources)
            return
        if base == "setp":
            values = [_typed(self._value(one), kinds[1]) for one in sources]
            self._set(target, _COMPARE[kinds[0]](*values))
            return
        values = [self._value(one) for one in sources]
        self._set(target, _compute(base, kinds, values))

    def _value(self, text: str) -> Lanes:
        if text in self._registers:
            return self._registers[text]
        if text.startswith("0f"):
            return np.full(self._threads, int(text[2:], 16), np.uint64)
        if text in self._kernel._symbols:
            return np.full(self._threads, self._kernel._symbols[text], np.uint64)
        assert re.fullmatch(r"-?\d+", text), f"{text} has no value yet"
        return np.full(self._threads, int(text) % 2**64, np.uint64)

    def _set(self, target: str, values: Lanes) -> None:
        old = self._registers.get(target)
        if old is None or old.dtype != values.dtype:
            old = np.zeros(self._threads, values.dtype)
        self._registers[target] = np.where(self._active, values, old)

    def _access(self, base: str, kinds: list[str], operands: list[str]) -> None:
        size, space = _BYTES[kinds[-1]], kinds[0]
        place = operands[0] if base == "st" else operands[1]
        others = operands[1] if base == "st" else operands[0]
        names = others.strip("{}").replace(" ", "").split(",")
        inside = place.strip("[]")
        if space == "param":
            offset, wide = self._kernel.parameters[self._kernel._parameter[inside]]
            assert wide == size
            value = int.from_bytes(self._packed[offset : offset + size], "little")
            self._set(names[0], np.full(self._threads, value, np.uint64))
            return
        register, _, offset = inside.partition("+")
        addresses = (self._value(register) + np.uint64(int(offset or 0) % 2**64)) & _ALL
        for thread in np.flatnonzero(self._active):
            address = int(addresses[thread])
            assert address % (size * len(names)) == 0, f"{base} at {address:#x} is not aligned"
            where = self._own if space == "shared" else self._found(address, size * len(names))
            start = address if space == "shared" else address - self._base
            piece = where[start : start + size * len(names)]
            assert len(piece) == size * len(names)
            for at, name in enumerate(names):
                part = piece[at * size : (at + 1) * size]
                if base == "st":
                    number = int(self._registers[name][thread]) % 2 ** (8 * size)
                    part[:] = np.frombuffer(number.to_bytes(size, "little"), np.uint8)
                else:
                    if name not in self._registers:
                        self._registers[name] = np.zeros(self._threads, np.uint64)
                    self._registers[name][thread] = int.from_bytes(part.tobytes(), "little")

    def _found(self, address: int, size: int) -> Any:
        for start, data in self._memory:
            if start <= address and address + size <= start + len(data):
                self._base = start
                return data
        raise AssertionError(f"{size} bytes at {address:#x} are outside of all tensors")

    def _regroup(self, kind: str, operands: list[str]) -> None:
        """Several narrow registers as a wide one, or back."""
        target, source = operands
        if target.startswith("{"):
            names = target.strip("{}").replace(" ", "").split(",")
            bits = 8 * _BYTES[kind] // len(names)
            value = self._value(source)
            for at, name in enumerate(names):
                part = (value >> np.uint64(at * bits)) & np.uint64(2**bits - 1)
                self._set(name, part)
            return
        names = source.strip("{}").replace(" ", "").split(",")
        bits = 8 * _BYTES[kind] // len(names)
        total = np.zeros(self._threads, np.uint64)
        for at, name in enumerate(names):
            total |= (self._value(name) & np.uint64(2**bits - 1)) << np.uint64(at * bits)
        self._set(target, total)

    def _shuffle(self, target: str, sources: list[str]) -> None:
        value, mask, *_ = sources
        assert self._active.all(), "a shuffle that some threads do not take part in"
        lane = np.arange(self._threads) ^ int(mask)
        assert (lane // _WARP == np.arange(self._threads) // _WARP).all()
        self._set(target, self._value(value)[lane])


def _typed(bits: Lanes, kind: str) -> Lanes:
    """Raw bits as numbers of a type."""
    if bits.dtype == bool:
        return bits
    return bits.astype(_UNSIGNED[_BYTES[kind]]).view(_TYPES[kind])


def _raw(numbers: Lanes) -> Lanes:
    if numbers.dtype == bool:
        return numbers
    return numbers.view(_UNSIGNED[numbers.dtype.itemsize]).astype(np.uint64)


_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_TYPES: dict[str, Any] = {
    "b16": np.uint16,
    "u16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f32": np.float32,
}
_COMPARE: dict[str, Callable[..., Lanes]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_NARROW = {"bf16": torch.bfloat16, "f16": torch.float16}


def _compute(base: str, kinds: list[str], values: list[Lanes]) -> Lanes:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if base == "cvt":
            return _converted(kinds, values)
        if base == "selp":
            return np.where(values[2], values[0], values[1])
        if base in ("shl", "shr"):
            number, count = _typed(values[0], kinds[-1]), values[1]
            shift = np.left_shift if base == "shl" else np.right_shift
            return _raw(shift(number, count.astype(number.dtype)))
        if kinds[0] == "wide":
            left, right = (_typed(one, kinds[1]).astype(np.int64) for one in values[:2])
            return _raw(left * right)
        numbers = [_typed(one, kinds[-1]) if kinds[-1] != "pred" else one for one in values]
        return _raw(_ARITHMETIC[base](*numbers))


def _fused(left: Lanes, right: Lanes, addend: Lanes) -> Lanes:
    if left.dtype != np.float32:
        return left * right + addend
    exact = left.astype(np.float64) * right.astype(np.float64) + addend.astype(np.float64)
    return exact.astype(np.float32)


def _divided(left: Lanes, right: Lanes) -> Lanes:
    assert (left >= 0).all()
    return left // right


_ARITHMETIC: dict[str, Callable[..., Lanes]] = {
    "mov": lambda value: value,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": _fused,
    "fma": _fused,
    "div": _divided,
    "rem": lambda left, right: left - _divided(left, right) * right,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.logical_not,
    "neg": np.negative,
    "min": np.minimum,
    "max": np.maximum,
    "rsqrt": lambda value: (1.0 / np.sqrt(value.astype(np.float64))).astype(np.float32),
}


def _converted(kinds: list[str], values: list[Lanes]) -> Lanes:
    to, source = [one for one in kinds if one not in ("rn",)]
    if to.endswith("x2"):  # the first operand is the upper half
        upper, lower = (_rounded(one, to[:-2]) for one in values)
        return (upper << np.uint64(16)) | lower
    if to in _NARROW:
        return _rounded(values[0], to)
    if source in _NARROW:
        bits = torch.from_numpy(values[0].astype(np.uint16).view(np.int16).copy())
        return _raw(bits.view(_NARROW[source]).float().numpy())
    return _raw(_typed(values[0], source).astype(_TYPES[to]))


def _rounded(bits: Lanes, to: str) -> Lanes:
    numbers = torch.from_numpy(_typed(bits, "f32").copy())
    return _raw(numbers.to(_NARROW[to]).view(torch.int16).numpy())


def offsets_of(params: struct.Struct) -> list[tuple[int, int]]:
    """Offset and size of each value that `params` packs."""
    return [
        (struct.calcsize(f"{params.format[:at]}0{form}"), struct.calcsize(form))
        for at, form in enumerate(params.format)
    ]
