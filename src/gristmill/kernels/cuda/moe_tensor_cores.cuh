// What the expert kernel needs of a warpgroup beyond tensor_cores.cuh: the matrix instruction for more numbers of columns, and
// for one that is known at run time.
//
// That is written out as branches around the instructions of each size, all in one piece of assembly: so they share one set
// of registers, which the compiler would give to each size anew.
#pragma once
#include "tensor_cores.cuh"

#ifdef GRISTMILL_EMULATION
#include "emulation_moe_tensor.h"
#else

#define PLACES_12 \
    PLACES_8 \
    ", %8, %9, %10, %11"
#define PLACES_20 \
    PLACES_16 \
    ", %16, %17, %18, %19"
#define PLACES_24 \
    PLACES_20 \
    ", %20, %21, %22, %23"
#define PLACES_40 \
    PLACES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PLACES_56 \
    PLACES_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PLACES_72 \
    PLACES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PLACES_80 \
    PLACES_72 \
    ", %72, %73, %74, %75, %76, %77, %78, %79"

// As multiply_group, also for 48 columns.
template <class T, int TOKENS>
DEVICE void multiply_tokens(float (&d)[TOKENS / 2], const unsigned (&a)[4], Matrix b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MULTIPLY_48(TYPE)                                                                                                  \
    asm volatile("{ .reg .b64 matrix; mov.b64 matrix, {%28, 0x40000040}; wgmma.mma_async.sync.aligned.m64n48k16.f32." TYPE "." TYPE \
                 " {" PLACES_24 "}, {%24, %25, %26, %27}, matrix, 1, 1, 1, 0; }"                                            \
                 : SLOTS_16(0), SLOTS_8(16)                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
    if constexpr (TOKENS != 48) multiply_group<T, TOKENS>(d, a, b);
    else if constexpr (IS_BF16<T>) MULTIPLY_48("bf16");
    else MULTIPLY_48("f16");
#undef MULTIPLY_48
#endif
}

// One instruction, of 16 columns of the weight; A: its operand's registers.
#define STEP_OF(TYPE, COLUMNS, COUNT, A, MATRIX) \
    "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" PLACES_##COUNT "}, {" A "}, " MATRIX ", 1, 1, 1, 0;\n"
#define FOUR_STEPS(TYPE, COLUMNS, COUNT, A)                                                                  \
    "wgmma.fence.sync.aligned;\n" STEP_OF(TYPE, COLUMNS, COUNT, A(0), "m0") STEP_OF(TYPE, COLUMNS, COUNT, A(1), "m1") \
    STEP_OF(TYPE, COLUMNS, COUNT, A(2), "m2") STEP_OF(TYPE, COLUMNS, COUNT, A(3), "m3") "wgmma.commit_group.sync.aligned;\n"
// Who has this many columns jumps, once: what a branch costs is to be taken.
#define TO_COLUMNS(COLUMNS, LIMIT) "setp.eq.u32 so, " LIMIT ", " #COLUMNS ";\n@so bra.uni HAS_" #COLUMNS ";\n"
#define AT_COLUMNS(TYPE, COLUMNS, COUNT, A) "bra.uni DONE;\nHAS_" #COLUMNS ":\n" FOUR_STEPS(TYPE, COLUMNS, COUNT, A)

// Behind the sums come the 16 registers of the operand, the matrix and the number of columns.
#define A_32(i) A_32_##i
#define A_32_0 "%32, %33, %34, %35"
#define A_32_1 "%36, %37, %38, %39"
#define A_32_2 "%40, %41, %42, %43"
#define A_32_3 "%44, %45, %46, %47"
#define A_64(i) A_64_##i
#define A_64_0 "%64, %65, %66, %67"
#define A_64_1 "%68, %69, %70, %71"
#define A_64_2 "%72, %73, %74, %75"
#define A_64_3 "%76, %77, %78, %79"

#define A_96(i) A_96_##i
#define A_96_0 "%96, %97, %98, %99"
#define A_96_1 "%100, %101, %102, %103"
#define A_96_2 "%104, %105, %106, %107"
#define A_96_3 "%108, %109, %110, %111"

#define SIZES_32(TYPE, SIZE) \
    TO_COLUMNS(8, SIZE) TO_COLUMNS(16, SIZE) TO_COLUMNS(24, SIZE) TO_COLUMNS(32, SIZE) \
    TO_COLUMNS(40, SIZE) TO_COLUMNS(48, SIZE) \
    FOUR_STEPS(TYPE, 64, 32, A_32) \
    AT_COLUMNS(TYPE, 8, 4, A_32) AT_COLUMNS(TYPE, 16, 8, A_32) AT_COLUMNS(TYPE, 24, 12, A_32) \
    AT_COLUMNS(TYPE, 32, 16, A_32) AT_COLUMNS(TYPE, 40, 20, A_32) AT_COLUMNS(TYPE, 48, 24, A_32)
#define SIZES_64(TYPE, SIZE) \
    TO_COLUMNS(16, SIZE) TO_COLUMNS(32, SIZE) TO_COLUMNS(48, SIZE) TO_COLUMNS(64, SIZE) \
    TO_COLUMNS(80, SIZE) TO_COLUMNS(96, SIZE) TO_COLUMNS(112, SIZE) \
    FOUR_STEPS(TYPE, 128, 64, A_64) \
    AT_COLUMNS(TYPE, 16, 8, A_64) AT_COLUMNS(TYPE, 32, 16, A_64) AT_COLUMNS(TYPE, 48, 24, A_64) \
    AT_COLUMNS(TYPE, 64, 32, A_64) AT_COLUMNS(TYPE, 80, 40, A_64) AT_COLUMNS(TYPE, 96, 48, A_64) \
    AT_COLUMNS(TYPE, 112, 56, A_64)
#define SIZES_96(TYPE, SIZE) \
    TO_COLUMNS(32, SIZE) TO_COLUMNS(64, SIZE) TO_COLUMNS(96, SIZE) TO_COLUMNS(112, SIZE) \
    TO_COLUMNS(128, SIZE) TO_COLUMNS(144, SIZE) TO_COLUMNS(160, SIZE) \
    FOUR_STEPS(TYPE, 192, 96, A_96) \
    AT_COLUMNS(TYPE, 32, 16, A_96) AT_COLUMNS(TYPE, 64, 32, A_96) AT_COLUMNS(TYPE, 96, 48, A_96) \
    AT_COLUMNS(TYPE, 112, 56, A_96) AT_COLUMNS(TYPE, 128, 64, A_96) AT_COLUMNS(TYPE, 144, 72, A_96) \
    AT_COLUMNS(TYPE, 160, 80, A_96)

#define MULTIPLY_COLUMNS(TYPE, COUNT, MATRIX, SIZE)                                                                              \
    asm volatile("{ .reg .b64 m0, m1, m2, m3; .reg .b32 next; .reg .pred so;\n"                                               \
                 "mov.b64 m0, {" MATRIX ", 0x40000040};\nadd.u32 next, " MATRIX ", 2;\nmov.b64 m1, {next, 0x40000040};\n"         \
                 "add.u32 next, " MATRIX ", 4;\nmov.b64 m2, {next, 0x40000040};\nadd.u32 next, " MATRIX ", 6;\n"                   \
                 "mov.b64 m3, {next, 0x40000040};\n" SIZES_##COUNT(TYPE, SIZE) "DONE: }"                                          \
                 : SLOTS_##COUNT(0)                                                                                              \
                 : "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]), "r"(a[1][3]), \
                   "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "r"(a[3][0]), "r"(a[3][1]), "r"(a[3][2]), "r"(a[3][3]), \
                   "r"(tile), "r"(columns)                                                                                     \
                 : "memory")
#define MULTIPLY_COLUMNS_OF(MOST_, COUNT, MATRIX, SIZE)                      \
    if constexpr (MOST == MOST_) {                                           \
        if constexpr (IS_BF16<T>) MULTIPLY_COLUMNS("bf16", COUNT, MATRIX, SIZE); \
        else MULTIPLY_COLUMNS("f16", COUNT, MATRIX, SIZE);                   \
    }

// d (64 x columns) += a (64 x 64) times the 64 numbers of each of `columns` rows at `tile` (matrix_of its first step): begun,
// handed over and ended, to be waited for by wait_for_matrices. (To begin and end outside would be a group more, behind the
// branches.) `columns` is at most MOST: of 64 a multiple of 8 but 56, of 128 a multiple of 16, of 192 also 32, 64, 96, 112, 128,
// 144 and 160.
template <class T, int MOST>
DEVICE void multiply_columns(float (&d)[MOST / 2], const unsigned (&a)[4][4], Matrix tile, unsigned columns) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    MULTIPLY_COLUMNS_OF(64, 32, "%48", "%49")
    MULTIPLY_COLUMNS_OF(128, 64, "%80", "%81")
    MULTIPLY_COLUMNS_OF(192, 96, "%112", "%113")
#endif
}

#undef MULTIPLY_COLUMNS_OF
#undef MULTIPLY_COLUMNS
#undef TO_COLUMNS
#undef AT_COLUMNS
#undef FOUR_STEPS
#undef STEP_OF

#endif
