// Which expert a slot belongs to. A slot is one entry of the ids that a router chose: slot = token * topk + j.
#pragma once
#include "moe_machine.cuh"

constexpr unsigned NOBODY = 0xffffffffu;   // the expert, or the place, of a slot that takes no part

struct Ids {
    const void* ids;                       // [tokens][topk]
    const void* map;                       // [mapped]: an id's place among the experts here, or a number that is none
    long long row_stride, column_stride;   // all strides in elements
    long long map_stride;
    unsigned topk, experts, mapped;
    unsigned dense;                        // ids lie side by side: that of a slot is at its number
};

// SETTLED: written by a kernel before the previous one in the stream, see load_settled.
template <int BYTES, bool SETTLED>
DEVICE unsigned load_index(const void* base, long long at) {
    const void* pointer = static_cast<const char*>(base) + at * BYTES;
    unsigned words[2] = {0, 0};
    if constexpr (SETTLED) load_settled<BYTES>(words, pointer);
    else load_global<BYTES>(words, pointer);
    // Whatever is negative or too large becomes a number that is beyond every limit here.
    return BYTES == 8 && words[1] != 0 ? NOBODY : words[0];
}

// The id as it was chosen; ID: its bytes.
template <int ID, bool SETTLED = false>
DEVICE unsigned id_of_slot(const Ids& p, unsigned slot) {
    long long at = slot;
    if (!p.dense) {
        const unsigned token = slot / p.topk;
        at = token * p.row_stride + (slot - token * p.topk) * p.column_stride;
    }
    return load_index<ID, SETTLED>(p.ids, at);
}

// The expert here that an id stands for, or NOBODY; MAP: bytes of the map's entries, 0 if there is no map.
template <int MAP, bool SETTLED = false>
DEVICE unsigned expert_of_id(const Ids& p, unsigned id) {
    if constexpr (MAP != 0) id = id < p.mapped ? load_index<MAP, SETTLED>(p.map, id * p.map_stride) : NOBODY;
    return id < p.experts ? id : NOBODY;
}
