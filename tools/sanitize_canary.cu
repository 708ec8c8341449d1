// Kernels with one fault each, which a tool of compute-sanitizer has to find: if it does not, it looks at other kernels than
// ours, or at none, and that it finds nothing there means nothing.

struct CanaryParams {
    const int* in;
    int* out;
    unsigned count;
};

// Writes behind the end of `out`.
template <int VALUE>
__global__ void canary_memcheck(const CanaryParams p) {
    p.out[p.count + threadIdx.x] = VALUE;
}

// Reads what another warp writes, with no barrier between.
template <int VALUE>
__global__ void canary_racecheck(const CanaryParams p) {
    __shared__ int slots[64];
    slots[threadIdx.x] = VALUE + threadIdx.x;
    p.out[threadIdx.x] = slots[63 - threadIdx.x];
}

// Reads what nobody has written.
template <int VALUE>
__global__ void canary_initcheck(const CanaryParams p) {
    p.out[threadIdx.x] = p.in[threadIdx.x] + VALUE;
}

// A thread comes to a barrier of sixteen others.
template <int VALUE>
__global__ void canary_synccheck(const CanaryParams p) {
    __shared__ int slots[64];
    slots[threadIdx.x] = VALUE;
    if (threadIdx.x < 17) {
        slots[threadIdx.x] += p.count;
        __syncwarp(0xffff);
        p.out[threadIdx.x] = slots[16 - threadIdx.x];
    }
}

// ---- a ring: a thread copies rows into two slots in turn, 64 others read them and give the slots back ----
//
// Which of these racecheck reports says what its reports about rings mean. Every barrier is used once, so that nothing hangs
// where nobody waits.

constexpr int ROUNDS = 6, READERS = 64, SLOTS = 2, ROW = READERS * 16;

static __device__ unsigned address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

static __device__ void init(unsigned long long* barrier, unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}

static __device__ void arrive(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

static __device__ void wait(unsigned long long* barrier) {
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(address(barrier))
                     : "memory");
}

// By bulk copy: `barrier` has come when all bytes have.
static __device__ void copy(void* to, const void* from, unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(ROW) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
                 "l"(from), "r"(ROW), "r"(address(barrier))
                 : "memory");
}

// EVERY: each reader arrives for itself, else one lane for its warp. WAITING: slots are filled again when they are free.
template <bool EVERY, bool WAITING>
static __device__ void ring(const CanaryParams& p) {
    __shared__ __align__(128) char slots[SLOTS][ROW];
    __shared__ unsigned long long full[ROUNDS], empty[ROUNDS];
    if (threadIdx.x == 0) {
        for (int i = 0; i < ROUNDS; i++) init(full + i, 1), init(empty + i, EVERY ? READERS : READERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == READERS) {
        for (int i = 0; i < ROUNDS; i++) {
            if (WAITING && i >= SLOTS) wait(empty + i - SLOTS);
            copy(slots[i % SLOTS], p.in + i * (ROW / 4), full + i);
        }
    } else if (threadIdx.x < READERS) {
        int total = 0;
        for (int i = 0; i < ROUNDS; i++) {
            wait(full + i);
            const int4 mine = *reinterpret_cast<const int4*>(slots[i % SLOTS] + threadIdx.x * 16);
            total += mine.x + mine.y + mine.z + mine.w;
            if (!EVERY) __syncwarp();
            if (EVERY || threadIdx.x % 32 == 0) arrive(empty + i);
        }
        p.out[threadIdx.x] = total;
    }
}

template <int VALUE>
__global__ void canary_ring_every(const CanaryParams p) { ring<true, true>(p); }

template <int VALUE>
__global__ void canary_ring_lane(const CanaryParams p) { ring<false, true>(p); }

template <int VALUE>
__global__ void canary_ring_broken(const CanaryParams p) { ring<true, false>(p); }
