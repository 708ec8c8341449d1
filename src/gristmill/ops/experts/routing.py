"""Tokens in the order of the experts that serve them, by one launch (kernels/cuda/moe_route.cu).

The sorted position of a slot is its rank among those that take part, by expert, then by slot. A
tile is some positions of one expert; tiles are what the blocks of a grouped product work on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.experts import ids as experts_ids
from gristmill.ops.experts.ids import IdFacts
from gristmill.select.device import Device

MOST_SIZES = 8

# RouteParams: ids, map and what IdFacts packs; x, x_sorted, results; and what is the same for all
# calls of a plan, packed once: where tiles, slot_of, position_of, ends and tile_count begin among
# the results; x_stride; slots, share, chunk, row_bytes; sizes, size_count.
CONSTANTS = struct.Struct(f"<5qq4I{MOST_SIZES}II4x")
PARAMS = struct.Struct(f"<QQ{experts_ids.CONSTANTS.size}s3Q{CONSTANTS.size}s")

MOST_THREADS = 1024
IDS_PER_THREAD = 4  # that a thread counts at once
# Slots of a block in shared memory at a time.
CHUNK = 2048
# Slots that one warp puts in order at once: fewer are not worth a block, unless rows are moved.
WARP = 32
# In shared memory: counts of slots before a block's share and of the others, the next position.
WORDS_PER_EXPERT = 3


class Places:
    """Where the results of a routing lie in its workspace, in 32-bit words; -1 if nowhere."""

    def __init__(self, routing: Routing) -> None:
        self.words = 0
        most_tiles, slots = routing.most_tiles, routing.slots
        self.most_tiles, self.slots, self.experts = most_tiles, slots, routing.experts
        # Tiles first: they are written 16 bytes at a time.
        self.tiles = self._take(4 * most_tiles)
        self.slot_of = self._take(slots)
        self.position_of = self._take(slots if routing.positions else 0)
        self.ends = self._take(max(1, self.experts))
        self.tile_count = self._take(1 if routing.sizes else 0)

    def _take(self, words: int) -> int:
        first = self.words
        self.words += words
        return first if words else -1


class Routed:
    """The results of a routing. Addresses are plain numbers; tensors are made when asked for.

    All but `x_sorted` are int32; what was not asked for has the address 0 and no elements.
    """

    __slots__ = ("_at", "_places", "_workspace", "x_sorted")

    def __init__(
        self, places: Places, workspace: torch.Tensor, x_sorted: torch.Tensor | None
    ) -> None:
        self._places, self._workspace = places, workspace
        self._at = workspace.data_ptr()
        self.x_sorted = x_sorted

    @property
    def slot_of(self) -> torch.Tensor:
        """``(slots,)``: the slot at a sorted position; undefined behind the last one there is."""
        return self._part(self._places.slot_of, self._places.slots)

    @property
    def position_of(self) -> torch.Tensor:
        """``(slots,)``: the sorted position of a slot; -1 where it takes no part."""
        return self._part(self._places.position_of, self._places.slots)

    @property
    def ends(self) -> torch.Tensor:
        """``(E,)``: the position behind the last one of each expert."""
        return self._part(self._places.ends, self._places.experts)

    @property
    def tiles(self) -> torch.Tensor:
        """``(most_tiles, 4)``: expert, first position, count, size; `tile_count` are written."""
        count = self._places.most_tiles
        return self._part(self._places.tiles, 4 * count).view(count, 4)

    @property
    def tile_count(self) -> torch.Tensor:
        """``(1,)``."""
        return self._part(self._places.tile_count, 1)

    @property
    def x_sorted_at(self) -> int:
        return 0 if self.x_sorted is None else self.x_sorted.data_ptr()

    @property
    def slot_of_at(self) -> int:
        return self._address(self._places.slot_of)

    @property
    def position_of_at(self) -> int:
        return self._address(self._places.position_of)

    @property
    def ends_at(self) -> int:
        return self._address(self._places.ends)

    @property
    def tiles_at(self) -> int:
        return self._address(self._places.tiles)

    @property
    def tile_count_at(self) -> int:
        return self._address(self._places.tile_count)

    def _part(self, first: int, count: int) -> torch.Tensor:
        return self._workspace[first : first + count] if first >= 0 else self._workspace[:0]

    def _address(self, first: int) -> int:
        return self._at + 4 * first if first >= 0 else 0


Route = Callable[..., Routed]


@dataclass(frozen=True)
class Routing:
    """What is known of a routing before it runs; `prepare` makes it callable.

    `sizes` of tiles are ascending. An expert's positions are cut into as few tiles as the last size
    allows, equal but for the rest, each of the smallest size that holds it. None: no tiles.
    `row_bytes` of x are moved, by `access` bytes at a time; 0: x stays where it is.
    `positions`: whether `position_of` is wanted.
    """

    device: Device
    ids: IdFacts
    experts: int
    sizes: tuple[int, ...] = ()
    row_bytes: int = 0
    row_stride: int = 0
    access: int = 16
    positions: bool = False

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip((0, *self.sizes), self.sizes, strict=False))
        if len(self.sizes) > MOST_SIZES or not ascending:
            raise ValueError(
                f"sizes of tiles must be at most {MOST_SIZES} ascending positive numbers, "
                f"got {self.sizes}"
            )
        if self.slots < 1 or self.slots >= 1 << 31:
            raise ValueError(f"a routing needs 1 to 2^31 - 1 slots, got {self.slots}")

    @property
    def slots(self) -> int:
        return self.ids.slots

    @property
    def most_tiles(self) -> int:
        """As many as there can be, however slots are spread over experts."""
        if not self.sizes:
            return 0
        return self.slots // self.sizes[-1] + min(self.experts, self.slots)

    @property
    def share(self) -> int:
        """Slots of a block: every multiprocessor has one.

        Beside the largest blocks there is no room on one for the block that lists tiles.
        """
        blocks = self.device.multiprocessors - (self.threads == MOST_THREADS)
        share = math.ceil(self.slots / max(1, blocks))
        return share if self.row_bytes else max(WARP, share)

    @property
    def threads(self) -> int:
        """Of a block: so many that few have to count slots a second time."""
        threads = 256
        while threads < MOST_THREADS and threads * IDS_PER_THREAD < self.slots:
            threads *= 2
        return threads

    @property
    def shared(self) -> int:
        return _shared(self.experts, min(self.share, CHUNK))

    def program(self) -> Program:
        return Program("moe_route.cu", (f"moe_route<{self.ids.template},{self.access}>",))

    def programs(self) -> tuple[Program, ...]:
        return (self.program(),)

    def prepare(self) -> Route:
        """``route(stream, topk_ids, expert_map, x=None) -> Routed``.

        With the device current, on tensors that are like those that this routing was made for.
        """
        program, places = self.program(), Places(self)
        # And one that lists tiles.
        start = launch.prepare(
            launch.KernelCall(
                program,
                program.names[0],
                grid=math.ceil(self.slots / self.share) + 1,
                block=self.threads,
                shared=self.shared,
                params=PARAMS,
                dependent=self.device.capability >= (9, 0),
            ),
            self.device.index,
        )
        of_ids, constants = self.ids.pack(self.experts), self._constants(places)
        slots, words, moves = self.slots, places.words, self.row_bytes
        empty, int32 = torch.empty, torch.int32

        def route(
            stream: int,
            topk_ids: torch.Tensor,
            expert_map: torch.Tensor | None,
            x: torch.Tensor | None = None,
        ) -> Routed:
            workspace = empty(words, dtype=int32, device=topk_ids.device)
            x_at, x_sorted, sorted_at = 0, None, 0
            if moves and x is not None:
                x_sorted = empty((slots, x.shape[1]), dtype=x.dtype, device=x.device)
                x_at, sorted_at = x.data_ptr(), x_sorted.data_ptr()
            start(
                stream,
                topk_ids.data_ptr(),
                0 if expert_map is None else expert_map.data_ptr(),
                of_ids,
                x_at,
                sorted_at,
                workspace.data_ptr(),
                constants,
            )
            return Routed(places, workspace, x_sorted)

        return route

    def _constants(self, places: Places) -> bytes:
        sizes = (*self.sizes, *(0 for _ in range(MOST_SIZES - len(self.sizes))))
        return CONSTANTS.pack(
            *(places.tiles, places.slot_of, places.position_of),
            *(places.ends, places.tile_count, self.row_stride),
            *(self.slots, self.share, min(self.share, CHUNK), self.row_bytes),
            *(*sizes, len(self.sizes)),
        )


def misfit(device: Device, experts: int) -> str | None:
    """Why the device cannot route among so many experts."""
    if device.kind == "cuda" and device.capability < (8, 0):
        return f"needs compute capability 8.0 or later, not {device.arch}"
    most = (device.shared_per_block - _shared(0, CHUNK)) // (4 * WORDS_PER_EXPERT)
    if experts > most:
        return f"counts at most {most} experts in a block's shared memory, not {experts}"
    return None


def _shared(experts: int, chunk: int) -> int:
    """Bytes: beside what experts need a word for each warp of a block and for each slot."""
    return 4 * (WORDS_PER_EXPERT * experts + WARP + chunk)
