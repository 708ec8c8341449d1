// From the experts that a router chose for each token to tokens in the order of experts, in one launch.
//
// Blocks do not talk to each other: each one counts all slots (there are few, next to the rows that are moved) and so knows
// where its own share of them begins in each expert's list. The first block has no share and writes where experts end and the
// list of tiles. Everything is in the order of slots, whatever the blocks' order: the same at every run.
#include "moe_ids.cuh"

constexpr int MOST_SIZES = 8;
constexpr int WARP = 32;
constexpr int IDS_AHEAD = 8;            // loads of a thread that are under way together: of ids,
constexpr int AHEAD = 4;                // and of a row
constexpr int PIECE = WARP * AHEAD;     // of a row, in accesses: what a warp moves at a time

struct RouteParams {
    Ids ids;
    const char* x;          // [tokens]: rows of row_bytes, x_stride bytes apart
    char* x_sorted;         // [slots]: rows side by side
    int* results;           // where the following begin, in words; negative: not wanted
    long long tiles;        // [][4]: expert, first position, count, size
    long long slot_of;      // [slots]: by position
    long long position_of;  // [slots]: by slot; -1 for one that takes no part
    long long ends;         // [experts]: the position behind the last one
    long long tile_count;   // [1]
    long long x_stride;
    unsigned slots;
    unsigned share;         // slots of a block
    unsigned chunk;         // slots that a block has in shared memory at a time
    unsigned row_bytes;     // 0: x is not moved
    unsigned sizes[MOST_SIZES], size_count;   // of tiles, ascending
};

struct Room {
    unsigned* counts;   // [2][experts]: of slots before this block's share, and of all others
    unsigned* next;     // [experts]: the position of the expert's next slot
    unsigned* warps;    // [32]
    unsigned* places;   // [chunk]: experts of slots, then their positions

    DEVICE explicit Room(unsigned experts)
        : counts(reinterpret_cast<unsigned*>(shared_memory())), next(counts + 2 * experts), warps(next + experts), places(warps + WARP) {}
};

DEVICE void store_word(int* pointer, unsigned value) { store_global<4>(pointer, &value); }

DEVICE unsigned sum_up_to(unsigned value) {
    const unsigned lane = threadIdx.x % WARP;
#pragma unroll
    for (unsigned distance = 1; distance < WARP; distance *= 2) {
        const unsigned before = shuffle_up(value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

// The sum of what the threads before this one bring, and that of `all`.
DEVICE unsigned sum_before(unsigned value, unsigned* warps, unsigned& all) {
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned up_to = sum_up_to(value);
    if (lane == WARP - 1) warps[warp] = up_to;
    __syncthreads();
    const unsigned of_warp = lane < blockDim.x / WARP ? warps[lane] : 0;
    const unsigned up_to_warp = sum_up_to(of_warp);
    all = shuffle_from(up_to_warp, WARP - 1);
    const unsigned before = shuffle_from(up_to_warp - of_warp, warp);
    __syncthreads();
    return before + up_to - value;
}

template <int ID, int MAP>
DEVICE void count_slots(const RouteParams& p, const Room& room, unsigned first, unsigned kept) {
    for (unsigned base = threadIdx.x; base < p.slots; base += IDS_AHEAD * blockDim.x) {
        unsigned expert[IDS_AHEAD];
#pragma unroll
        for (int i = 0; i < IDS_AHEAD; i++) {
            const unsigned slot = base + i * blockDim.x;
            expert[i] = slot < p.slots ? id_of_slot<ID>(p.ids, slot) : NOBODY;
        }
#pragma unroll
        for (int i = 0; i < IDS_AHEAD; i++) expert[i] = expert_of_id<MAP>(p.ids, expert[i]);
#pragma unroll
        for (int i = 0; i < IDS_AHEAD; i++) {
            const unsigned slot = base + i * blockDim.x;
            if (slot - first < kept) room.places[slot - first] = expert[i];
            // One is added and nobody looks at the sum: equal addresses of a warp are one access then.
            if (expert[i] != NOBODY) atomic_add_shared(room.counts + (slot < first ? 0 : p.ids.experts) + expert[i], 1);
        }
    }
    __syncthreads();
}

// The first block: all slots are before its share.
DEVICE void list_tiles(const RouteParams& p, const Room& room) {
    const unsigned experts = p.ids.experts;
    const unsigned largest = p.size_count ? p.sizes[p.size_count - 1] : 1;
    unsigned* tile_starts = room.counts + experts;
    unsigned positions = 0, tiles = 0;
    for (unsigned base = 0; base < experts; base += blockDim.x) {
        const unsigned expert = base + threadIdx.x, count = expert < experts ? room.counts[expert] : 0;
        unsigned all, all_tiles;
        const unsigned end = positions + sum_before(count, room.warps, all) + count;
        const unsigned tile = tiles + sum_before((count + largest - 1) / largest, room.warps, all_tiles);
        if (expert < experts) {
            room.next[expert] = end;
            tile_starts[expert] = tile;
            store_word(p.results + p.ends + expert, end);
        }
        positions += all, tiles += all_tiles;
    }
    if (p.size_count == 0) return;
    if (threadIdx.x == 0) store_word(p.results + p.tile_count, tiles);
    __syncthreads();
    for (unsigned tile = threadIdx.x; tile < tiles; tile += blockDim.x) {
        // The last expert that begins no later: those before it that begin there, too, have none.
        unsigned expert = 0, beyond = experts;
        while (beyond - expert > 1) {
            const unsigned middle = (expert + beyond) / 2;
            if (tile_starts[middle] <= tile) expert = middle;
            else beyond = middle;
        }
        // As few as there can be, all alike: a full one and a small one would take longer than two of half the size.
        const unsigned all = room.counts[expert], parts = (all + largest - 1) / largest, each = (all + parts - 1) / parts;
        const unsigned done = (tile - tile_starts[expert]) * each;
        unsigned size = largest;
        for (unsigned i = p.size_count; i-- > 0;)
            if (p.sizes[i] >= each) size = p.sizes[i];
        const unsigned words[4] = {expert, room.next[expert] - all + done, min(all - done, each), size};
        store_global<16>(p.results + p.tiles + 4ll * tile, words);
    }
}

DEVICE void find_starts(const RouteParams& p, const Room& room) {
    const unsigned experts = p.ids.experts;
    unsigned positions = 0;
    for (unsigned base = 0; base < experts; base += blockDim.x) {
        const unsigned expert = base + threadIdx.x;
        unsigned before = 0, count = 0, all;
        if (expert < experts) before = room.counts[expert], count = before + room.counts[experts + expert];
        const unsigned start = positions + sum_before(count, room.warps, all);
        if (expert < experts) room.next[expert] = start + before;
        positions += all;
    }
    __syncthreads();
}

// One warp gives slots [from, from + count) their positions, 32 at a time.
DEVICE void place_slots(const RouteParams& p, const Room& room, unsigned from, unsigned count) {
    const unsigned lane = threadIdx.x % WARP, lanes_before = (1u << lane) - 1;
    for (unsigned base = 0; base < count; base += WARP) {
        const unsigned i = base + lane, expert = i < count ? room.places[i] : NOBODY;
        const unsigned same = match_lanes(expert), rank = count_bits(same & lanes_before);
        unsigned position = NOBODY;
        if (expert != NOBODY) position = room.next[expert] + rank;
        __syncwarp();
        if (expert != NOBODY) {
            if (rank == 0) room.next[expert] = position + count_bits(same);
            store_word(p.results + p.slot_of + position, from + i);
        }
        if (i < count) {
            room.places[i] = position;
            if (p.position_of >= 0) store_word(p.results + p.position_of + from + i, position);
        }
        __syncwarp();
    }
}

// A warp's part of a row of x, on its way.
template <int ACCESS>
struct Piece {
    static constexpr int words_per_access = ACCESS < 4 ? 1 : ACCESS / 4;
    unsigned words[AHEAD][words_per_access];

    DEVICE void load(const char* row, unsigned first, unsigned end) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const unsigned at = first + i * WARP;
            if (at < end) load_global<ACCESS>(words[i], row + static_cast<long long>(at) * ACCESS);
        }
    }

    DEVICE void store(char* row, unsigned first, unsigned end) const {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const unsigned at = first + i * WARP;
            if (at < end) store_global<ACCESS>(row + static_cast<long long>(at) * ACCESS, words[i]);
        }
    }
};

// Rows of x to where they are wanted: each is read once and written for every slot of its token that is in the share.
template <int ACCESS>
struct Mover {
    const RouteParams& p;
    unsigned accesses, parts;   // of a row
    unsigned token, part;       // of the warp's first piece
    bool ahead;                 // which is on its way
    Piece<ACCESS> piece;

    // `count` slots come first, from `from` on.
    DEVICE Mover(const RouteParams& params, unsigned from, unsigned count)
        : p(params), accesses(params.row_bytes / ACCESS), parts((accesses + PIECE - 1) / PIECE), token(0), part(0) {
        const unsigned warp = threadIdx.x / WARP;
        ahead = count != 0 && warp < pieces(from, count);
        if (ahead) token = from / p.ids.topk + warp / parts, part = warp % parts;
    }

    // What is moved first does not depend on where to.
    DEVICE void load_ahead() {
        if (ahead) load();
    }

    DEVICE void move(const unsigned* places, unsigned from, unsigned count) {
        const unsigned topk = p.ids.topk, all = pieces(from, count), first = from / topk;
        for (unsigned index = threadIdx.x / WARP; index < all; index += blockDim.x / WARP) {
            const unsigned row = index / parts;
            token = first + row, part = index - row * parts;
            unsigned slot = max(token * topk, from) - from;
            const unsigned end = min(token * topk + topk, from + count) - from;
            while (slot < end && places[slot] == NOBODY) slot++;
            const bool loaded = ahead;
            ahead = false;
            if (slot == end) continue;
            if (!loaded) load();
            for (; slot < end; slot++) {
                const unsigned position = places[slot];
                if (position == NOBODY) continue;
                piece.store(p.x_sorted + static_cast<long long>(position) * p.row_bytes, part * PIECE + threadIdx.x % WARP, accesses);
            }
        }
    }

  private:
    DEVICE void load() { piece.load(p.x + token * p.x_stride, part * PIECE + threadIdx.x % WARP, accesses); }

    DEVICE unsigned pieces(unsigned from, unsigned count) const {
        return ((from + count - 1) / p.ids.topk - from / p.ids.topk + 1) * parts;
    }
};

// ID, MAP: bytes of an id and of an entry of the map, 0 if there is none. ACCESS: bytes that x's rows are moved by.
template <int ID, int MAP, int ACCESS>
__global__ void __launch_bounds__(1024) moe_route(const __grid_constant__ RouteParams p) {
    const Room room(p.ids.experts);
    const bool lists = blockIdx.x == 0;
    const unsigned first = lists ? p.slots : min((blockIdx.x - 1) * p.share, p.slots), end = min(first + p.share, p.slots);
    for (unsigned i = threadIdx.x; i < 2 * p.ids.experts; i += blockDim.x) room.counts[i] = 0;
    unsigned count = min(p.chunk, end - first);
    Mover<ACCESS> mover(p, first, count);
    __syncthreads();
    wait_for_previous_grid();
    // The next kernel may start, too: it waits for this one before it touches what is written here.
    launch_next_grid();
    mover.load_ahead();
    count_slots<ID, MAP>(p, room, first, count);
    if (lists) {
        list_tiles(p, room);
        return;
    }
    find_starts(p, room);
    for (unsigned from = first; from < end; from += count) {
        if (from != first) {
            __syncthreads();
            count = min(p.chunk, end - from);
            for (unsigned i = threadIdx.x; i < count; i += blockDim.x)
                room.places[i] = expert_of_id<MAP>(p.ids, id_of_slot<ID>(p.ids, from + i));
            __syncthreads();
        }
        if (threadIdx.x < WARP) place_slots(p, room, from, count);
        __syncthreads();
        mover.move(room.places, from, count);
    }
}
