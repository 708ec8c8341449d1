// 64 live values in at most 32 registers: some must be spilled. One static array of 132 bytes.
struct Params {
    float* out;
    long long count;
};

__global__ void __launch_bounds__(1024, 2) spilling(const Params p) {
    __shared__ float held[33];
    float value[64];
#pragma unroll
    for (int i = 0; i < 64; i++) value[i] = p.out[i * p.count + threadIdx.x];
    if (threadIdx.x < 33) held[threadIdx.x] = value[0];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; i++) p.out[(63 - i) * p.count + threadIdx.x] = value[i] * value[63 - i] + held[i % 33];
}
