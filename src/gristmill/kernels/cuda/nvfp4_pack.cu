// NVFP4 weights from the rows of checkpoints into fragments, and back (formats/nvfp4/fragments.py says where every bit lies).
//
// A block takes up to CHUNKS chunks of a slab: their part of 64 rows, and pieces that lie one behind the other. Both sides
// are read and written in runs of at least 32 bytes; between them, in shared memory, lie the codes of the checkpoint's rows.
// In layout "pairs" these are 32 rows of gate and 32 of up. The matrices of a stack are packed by one launch.
#include "machine.cuh"

constexpr unsigned ROWS = 64, CHUNKS = 8, THREADS = 256, WARPS = THREADS / 32;
constexpr unsigned CHUNK_BYTES = 32, VECTORS = CHUNKS * CHUNK_BYTES / 16;   // of codes of one row
constexpr unsigned PIECE_CODES = 2048, PIECE_SCALES = 256;                  // bytes
// Of rows in shared memory: eight rows, read 16 bytes at a time, are in different banks. Likewise words of scales.
constexpr unsigned PITCH = CHUNKS * CHUNK_BYTES + 16, SCALES_PITCH = CHUNKS + 1;

struct PackParams {
    unsigned char *codes, *scales;                   // of rows
    unsigned char *packed_codes, *packed_scales;     // of pieces
    long long stride, scales_stride;                 // bytes from row to row
    long long matrix_stride, scales_matrix_stride;   // bytes from matrix to matrix; those of pieces lie one behind the other
    unsigned rows, blocks, chunks, groups;           // blocks: of 16 columns in a row; groups: of CHUNKS chunks in a slab
    unsigned slabs, half;                            // slabs: of a matrix; half, for pairs: rows of gate, and as many of up; else 0
};

// What this block has to do, and where.
struct Part {
    unsigned first_row, first_chunk, count;   // count: of chunks
    unsigned char *codes, *scales_of_rows;    // of the matrix
    unsigned char *packed_codes, *packed_scales;
    char* rows;
    unsigned* scales;

    DEVICE explicit Part(const PackParams& p) {
        const unsigned slab = blockIdx.x / p.groups, matrix = slab / p.slabs;   // slab: of the stack
        first_row = slab % p.slabs * ROWS;
        first_chunk = blockIdx.x % p.groups * CHUNKS;
        count = p.chunks - first_chunk < CHUNKS ? p.chunks - first_chunk : CHUNKS;
        const unsigned long long piece = static_cast<unsigned long long>(slab) * p.chunks + first_chunk;
        codes = p.codes + matrix * p.matrix_stride;
        scales_of_rows = p.scales + matrix * p.scales_matrix_stride;
        packed_codes = p.packed_codes + piece * PIECE_CODES;
        packed_scales = p.packed_scales + piece * PIECE_SCALES;
        rows = shared_memory();
        scales = reinterpret_cast<unsigned*>(rows + ROWS * PITCH);
    }

    // Where in the checkpoint lies what is packed as `row`.
    DEVICE unsigned char* codes_at(const PackParams& p, unsigned row, unsigned at) const { return codes + source_row(p, row) * p.stride + at; }
    DEVICE unsigned char* scales_at(const PackParams& p, unsigned row, unsigned at) const {
        return scales_of_rows + source_row(p, row) * p.scales_stride + at;
    }
    DEVICE static long long source_row(const PackParams& p, unsigned row) {
        return p.half ? row / 16 * 8 + row % 8 + (row & 8 ? p.half : 0) : row;
    }

    DEVICE uint4* vector(unsigned row, unsigned number) const { return reinterpret_cast<uint4*>(rows + row * PITCH + number * 16); }
    DEVICE unsigned* scale(unsigned row, unsigned chunk) const { return scales + row * SCALES_PITCH + chunk; }
};

DEVICE unsigned rotated_left(unsigned word, int by) { return word << by | word >> (32 - by); }

// ---- codes: two to a byte in rows, spread over two words of 16 in fragments ----

constexpr unsigned SHARED_BITS = 0x60306030u;   // of the first word, that belong to the last two pairs
constexpr unsigned PAIR_BITS = 0x81c081c0u;     // of a word that holds one pair

// The two values of a byte where a pair of bf16 numbers has their bits.
DEVICE unsigned spread(unsigned byte) {
    return (byte & 0x07u) << 6 | (byte & 0x08u) << 12 | (byte & 0x70u) << 18 | (byte & 0x80u) << 24;
}

DEVICE unsigned gathered(unsigned pair) {
    return (pair >> 6 & 0x07u) | (pair >> 12 & 0x08u) | (pair >> 18 & 0x70u) | (pair >> 24 & 0x80u);
}

DEVICE void to_words(unsigned& first, unsigned& second, const unsigned (&pairs)[8]) {
    const unsigned rest = rotated_left(pairs[6], 8) | pairs[7] >> 2;
    first = pairs[0] | rotated_left(pairs[1], 4) | pairs[2] >> 6 | (rest & SHARED_BITS);
    second = pairs[3] | rotated_left(pairs[4], 4) | pairs[5] >> 6 | rotated_left(rest & ~SHARED_BITS, 30);
}

DEVICE void to_pairs(unsigned (&pairs)[8], unsigned first, unsigned second) {
    const unsigned rest = (first & SHARED_BITS) | (rotated_left(second, 2) & ~SHARED_BITS);
    const unsigned raw[8] = {first, rotated_left(first, 28), first << 6, second, rotated_left(second, 28), second << 6, rotated_left(rest, 24), rest << 2};
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = raw[i] & PAIR_BITS;
}

// ---- scales: four to a word ----

// A byte of E4M3 by its meaning: 0 stays 0 (of either sign), numbers below 2^-6 get an exponent of their own, no number is 255.
DEVICE unsigned scale_code(unsigned byte) {
    constexpr unsigned long long SMALL = 0x6e6c6a6864605800ull;   // bytes for 0 to 7
    if (byte < 8) return static_cast<unsigned>(SMALL >> byte * 8) & 0xffu;
    if (byte < 127) return byte + 104;
    return byte == 128 ? 0 : 255;
}

DEVICE unsigned scale_byte(unsigned code) {
    if (code >= 112) return code <= 230 ? code - 104 : 127;
    if (code < 88) return code ? 127 : 0;
    const unsigned shift = 14 - (code >> 3), digits = 8 | (code & 7);   // 3, 2 or 1: so many digits must be 0
    return digits & ((1u << shift) - 1) ? 127 : digits >> shift;
}

template <class Byte>
DEVICE unsigned each_byte(unsigned word, Byte change) {
    return change(word & 255) | change(word >> 8 & 255) << 8 | change(word >> 16 & 255) << 16 | change(word >> 24) << 24;
}

// The row of the scales in word `slot` of a piece.
DEVICE unsigned row_of_slot(unsigned slot) { return (slot & ~15u) + (slot & 1) * 8 + (slot >> 1 & 7); }

// ---- what is inside of the rows, `bytes` of 16 or 4, by accesses of ACCESS; elsewhere it is 0 ----

template <int ACCESS, int BYTES>
DEVICE void read_inside(unsigned* out, const unsigned char* pointer, unsigned bytes) {
    constexpr int STEP = ACCESS < BYTES ? ACCESS : BYTES;
    if (bytes == BYTES && STEP > 1) {
#pragma unroll
        for (int i = 0; i < BYTES; i += STEP) load_global<STEP>(out + i / 4, pointer + i);
        return;
    }
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++) out[i] = 0;
    if constexpr (BYTES == 16 && STEP >= 8) {
        if (bytes == 8) load_global<8>(out, pointer);
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; i++) {
            unsigned byte = 0;
            if (i < bytes) load_global<1>(&byte, pointer + i);
            out[i / 4] |= byte << i % 4 * 8;
        }
    }
}

template <int ACCESS, int BYTES>
DEVICE void write_inside(unsigned char* pointer, const unsigned* in, unsigned bytes) {
    constexpr int STEP = ACCESS < BYTES ? ACCESS : BYTES;
    if (bytes == BYTES && STEP > 1) {
#pragma unroll
        for (int i = 0; i < BYTES; i += STEP) store_global<STEP>(pointer + i, in + i / 4);
        return;
    }
    if constexpr (BYTES == 16 && STEP >= 8) {
        if (bytes == 8) store_global<8>(pointer, in);
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; i++) {
            const unsigned byte = in[i / 4] >> i % 4 * 8 & 255;
            if (i < bytes) store_global<1>(pointer + i, &byte);
        }
    }
}

// How many of `most` bytes from `begin` on are before `end`.
DEVICE unsigned inside(unsigned begin, unsigned end, unsigned most) {
    if (begin >= end) return 0;
    return end - begin < most ? end - begin : most;
}

// ---- the kernels: ACCESS and SCALES_ACCESS are what the addresses and strides of the rows allow, in bytes ----

template <int ACCESS, int SCALES_ACCESS>
__global__ void __launch_bounds__(THREADS) pack(const PackParams p) {
    const Part part(p);
#pragma unroll
    for (unsigned i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const unsigned row = part.first_row + i / VECTORS, at = part.first_chunk * CHUNK_BYTES + i % VECTORS * 16;
        const unsigned bytes = row < p.rows ? inside(at, p.blocks * 8, 16) : 0;
        unsigned words[4] = {0, 0, 0, 0};
        if (bytes) read_inside<ACCESS, 16>(words, part.codes_at(p, row, at), bytes);
        *part.vector(i / VECTORS, i % VECTORS) = uint4{words[0], words[1], words[2], words[3]};
    }
#pragma unroll
    for (unsigned i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const unsigned row = part.first_row + i / CHUNKS, at = (part.first_chunk + i % CHUNKS) * 4;
        const unsigned bytes = row < p.rows ? inside(at, p.blocks, 4) : 0;
        unsigned word = 0;
        if (bytes) read_inside<SCALES_ACCESS, 4>(&word, part.scales_at(p, row, at), bytes);
        *part.scale(i / CHUNKS, i % CHUNKS) = word;
    }
    __syncthreads();

    const unsigned lane = threadIdx.x % 32, shift = lane % 4 * 8;
    for (unsigned i = threadIdx.x / 32; i < part.count * 4; i += WARPS) {
        const unsigned chunk = i / 4;
        unsigned out[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned row = i % 4 * 16 + half * 8 + lane / 4, scales = *part.scale(row, chunk);
            const uint4 low = *part.vector(row, chunk * 2), high = *part.vector(row, chunk * 2 + 1);
            const unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            unsigned pairs[8];
#pragma unroll
            for (int pair = 0; pair < 8; pair++)
                pairs[pair] = scales >> pair / 2 * 8 & 0x7fu ? spread(words[pair] >> shift & 0xffu) : 0;   // zeros beside a scale of zero
            to_words(out[half * 2], out[half * 2 + 1], pairs);
        }
        store_global<16>(part.packed_codes + i * 512 + lane * 16, out);
    }
    for (unsigned i = threadIdx.x; i < part.count * ROWS; i += THREADS) {
        const unsigned word = each_byte(*part.scale(row_of_slot(i % ROWS), i / ROWS), [](unsigned byte) { return scale_code(byte); });
        store_global<4>(part.packed_scales + i * 4, &word);
    }
}

template <int ACCESS, int SCALES_ACCESS>
__global__ void __launch_bounds__(THREADS) unpack(const PackParams p) {
    const Part part(p);
    const unsigned lane = threadIdx.x % 32;
    for (unsigned i = threadIdx.x / 32; i < part.count * 4; i += WARPS) {
        unsigned in[4];
        load_global<16>(in, part.packed_codes + i * 512 + lane * 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned row = i % 4 * 16 + half * 8 + lane / 4;
            unsigned pairs[8];
            to_pairs(pairs, in[half * 2], in[half * 2 + 1]);
            char* bytes = reinterpret_cast<char*>(part.vector(row, i / 4 * 2)) + lane % 4;
#pragma unroll
            for (int pair = 0; pair < 8; pair++) bytes[pair * 4] = static_cast<char>(gathered(pairs[pair]));
        }
    }
    for (unsigned i = threadIdx.x; i < part.count * ROWS; i += THREADS) {
        unsigned word;
        load_global<4>(&word, part.packed_scales + i * 4);
        *part.scale(row_of_slot(i % ROWS), i / ROWS) = each_byte(word, [](unsigned code) { return scale_byte(code); });
    }
    __syncthreads();

#pragma unroll
    for (unsigned i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const unsigned row = part.first_row + i / VECTORS, at = part.first_chunk * CHUNK_BYTES + i % VECTORS * 16;
        const unsigned bytes = row < p.rows ? inside(at, p.blocks * 8, 16) : 0;
        if (bytes == 0) continue;
        const uint4 vector = *part.vector(i / VECTORS, i % VECTORS);
        const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
        write_inside<ACCESS, 16>(part.codes_at(p, row, at), words, bytes);
    }
#pragma unroll
    for (unsigned i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const unsigned row = part.first_row + i / CHUNKS, at = (part.first_chunk + i % CHUNKS) * 4;
        const unsigned bytes = row < p.rows ? inside(at, p.blocks, 4) : 0;
        if (bytes) write_inside<SCALES_ACCESS, 4>(part.scales_at(p, row, at), part.scale(i / CHUNKS, i % CHUNKS), bytes);
    }
}
