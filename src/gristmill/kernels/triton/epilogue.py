"""What happens to a tile of sums before it is stored, and what every kernel here does at its start.

Files here import from each other by `from .name import`: that is how a program finds the texts that
its cache key covers.
"""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of fp32 values, in fp32: none, relu, silu, gelu (exact) or gelu_tanh."""
    if ACTIVATION == "relu":
        # Not maximum(x, 0): that would hide a NaN.
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * x * (1 + tanh(u)) is x * sigmoid(2 * u).
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * u))
    else:
        tl.static_assert(ACTIVATION == "none", "unknown activation")
    return x


@triton.jit
def rounded(x, like, EMULATED: tl.constexpr):
    """`x` in the dtype that the pointer `like` points to.

    Triton's interpreter truncates where it makes bf16 of fp32; there, round to the nearest (even)
    by hand first, as the GPU does. NaN stays NaN.
    """
    dtype: tl.constexpr = like.dtype.element_ty
    if EMULATED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def product(a, b, sums, EMULATED: tl.constexpr):
    """`sums + a @ b` in fp32, of fp32 inputs in full precision (no TF32).

    Triton's interpreter has no bf16 products; there, inputs are widened first, which is exact.
    """
    if EMULATED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def tile_of(number, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of the tile with this number.

    GROUP rows of tiles are walked together, column by column: programs that run at the same time
    then share few rows of A and few columns of B, and find them in L2.
    """
    per_group = GROUP * tiles_n
    first = (number // per_group) * GROUP
    height = min(tiles_m - first, GROUP)
    inside = number % per_group
    return first + inside % height, inside // height


@triton.jit
def prefetch(places):
    """Ask for the cache lines at `places` to be brought into L2; nothing waits for them.

    Allowed before `wait_for_predecessor`: L2 is where all writes meet, so what the kernel before
    writes later is seen nevertheless.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [places.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr):
    """Programmatic dependent launch: begin early, touch memory when the kernel before has ended."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def let_successor_begin(DEPENDENT: tl.constexpr):
    """The next kernel may begin once all programs have said so; it will wait for the end of this.

    Its programs go where there is room at that time. Said early, its start is hidden; but where an
    SM has several programs of this kernel, some get more of the next one's than others.
    """
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
