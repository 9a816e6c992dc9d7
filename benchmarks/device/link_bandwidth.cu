// Measure the bandwidth of the links between this host's GPUs, in all directions at once.
//
//     nvcc -arch=sm_90a -O3 -std=c++17 -o link_bandwidth benchmarks/device/link_bandwidth.cu
//     ./link_bandwidth
//
// Each GPU sends 4096 rows of 14336 bytes (7168 columns of bf16) to every other GPU, or reads them
// there: with loads and stores of 16 bytes (plain), or with the bulk copy engine through shared
// memory (bulk). Blocks begin with different GPUs, and each takes another one for its next row. "By
// destination" all blocks of a GPU write to the next GPU first, then to the one after it. The time
// is that of the slowest GPU, the least of three means of 20 launches.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(call)                                                      \
  do {                                                                   \
    cudaError_t error = (call);                                          \
    if (error != cudaSuccess) {                                          \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));     \
      exit(1);                                                           \
    }                                                                    \
  } while (0)

constexpr int kRow = 14336, kVectors = kRow / 16, kUnroll = 4, kMost = 8;

struct Peers {
  char* memory[kMost];
  int count;
};

__device__ int peer_of(int row, const Peers& peers) {
  return (row / gridDim.x + blockIdx.x) % peers.count;
}

// Copies a row by all threads of a block: each loads all of its vectors before it stores one.
template <bool REMOTE>
__device__ void copy_row(char* to_row, const char* from_row) {
  const uint4* from = (const uint4*)from_row;
  uint4* to = (uint4*)to_row;
  uint4 held[kUnroll];
  for (int c = threadIdx.x; c < kVectors; c += blockDim.x * kUnroll) {
#pragma unroll
    for (int u = 0; u < kUnroll; u++)
      if (c + u * blockDim.x < kVectors)
        held[u] = REMOTE ? __ldcg(from + c + u * blockDim.x) : from[c + u * blockDim.x];
#pragma unroll
    for (int u = 0; u < kUnroll; u++)
      if (c + u * blockDim.x < kVectors) to[c + u * blockDim.x] = held[u];
  }
}

__global__ void plain_push(const char* from, Peers to, int rows, bool by_destination) {
  for (int i = blockIdx.x; i < rows; i += gridDim.x) {
    int peer = by_destination ? (int)((long)i * to.count / rows) : peer_of(i, to);
    copy_row<false>(to.memory[peer] + (size_t)i * kRow, from + (size_t)i * kRow);
  }
}

__global__ void plain_pull(char* to, Peers from, int rows) {
  for (int i = blockIdx.x; i < rows; i += gridDim.x)
    copy_row<true>(to + (size_t)i * kRow, from.memory[peer_of(i, from)] + (size_t)i * kRow);
}

__device__ uint32_t shared(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

// One thread of a block keeps up to STAGES rows in flight, which it loads and stores as a whole.
template <int STAGES>
__global__ void bulk(char* mine, Peers peers, int rows, bool pull) {
  extern __shared__ __align__(128) char held[];
  __shared__ __align__(8) uint64_t arrived[STAGES];
  if (threadIdx.x != 0) return;
  for (int s = 0; s < STAGES; s++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&arrived[s])));
  asm volatile("fence.mbarrier_init.release.cluster;");
  asm volatile("fence.proxy.async.shared::cta;");
  int steps = (rows - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
  auto load = [&](int step) {
    int i = blockIdx.x + step * gridDim.x, s = step % STAGES;
    const char* from = (pull ? peers.memory[peer_of(i, peers)] : mine) + (size_t)i * kRow;
    uint32_t barrier = shared(&arrived[s]), to = shared(held + s * kRow);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(kRow));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(kRow), "r"(barrier) : "memory");
  };
  for (int step = 0; step < STAGES - 1 && step < steps; step++) load(step);
  for (int step = 0; step < steps; step++) {
    int i = blockIdx.x + step * gridDim.x, s = step % STAGES;
    uint32_t turn = (step / STAGES) & 1, done = 0;
    while (!done)
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                   " selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(shared(&arrived[s])), "r"(turn)
                   : "memory");
    char* to = (pull ? mine : peers.memory[peer_of(i, peers)]) + (size_t)i * kRow;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared(held + s * kRow)), "r"(kRow) : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    if (step + STAGES - 1 < steps) {  // into the memory that the step before has stored
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      load(step + STAGES - 1);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

int main() {
  int gpus;
  CHECK(cudaGetDeviceCount(&gpus));
  if (gpus < 2 || gpus > kMost) {
    fprintf(stderr, "needs 2 to %d GPUs (CUDA sees %d); set CUDA_VISIBLE_DEVICES\n", kMost, gpus);
    return 1;
  }
  int rows = 4096 * (gpus - 1);
  size_t bytes = (size_t)rows * kRow;
  std::vector<char*> source(gpus), target(gpus);
  std::vector<cudaStream_t> stream(gpus);
  std::vector<cudaEvent_t> start(gpus), end(gpus);
  for (int d = 0; d < gpus; d++) {
    CHECK(cudaSetDevice(d));
    for (int other = 0; other < gpus; other++)
      if (other != d) CHECK(cudaDeviceEnablePeerAccess(other, 0));
    CHECK(cudaMalloc(&source[d], bytes));
    CHECK(cudaMalloc(&target[d], bytes));
    CHECK(cudaMemset(source[d], d + 1, bytes));
    CHECK(cudaStreamCreate(&stream[d]));
    CHECK(cudaEventCreate(&start[d]));
    CHECK(cudaEventCreate(&end[d]));
    CHECK(cudaFuncSetAttribute(bulk<4>, cudaFuncAttributeMaxDynamicSharedMemorySize, 4 * kRow));
    CHECK(cudaDeviceSynchronize());
  }
  auto others = [&](int d, std::vector<char*>& of) {
    Peers peers{};
    for (int i = 1; i < gpus; i++) peers.memory[peers.count++] = of[(d + i) % gpus];
    return peers;
  };
  auto timed = [&](const std::string& name, std::function<void(int)> launch) {
    constexpr int kLaunches = 20, kAround = 3;
    float least = 1e9f;
    for (int turn = 0; turn < 3; turn++) {
      for (int d = 0; d < gpus; d++) {
        CHECK(cudaSetDevice(d));
        for (int i = 0; i < kAround; i++) launch(d);
        CHECK(cudaEventRecord(start[d], stream[d]));
        for (int i = 0; i < kLaunches; i++) launch(d);
        CHECK(cudaEventRecord(end[d], stream[d]));
        for (int i = 0; i < kAround; i++) launch(d);
        CHECK(cudaGetLastError());
      }
      float slowest = 0, each;
      for (int d = 0; d < gpus; d++) {
        CHECK(cudaSetDevice(d));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventElapsedTime(&each, start[d], end[d]));
        slowest = std::max(slowest, each / kLaunches);
      }
      least = std::min(least, slowest);
    }
    printf("| %s | %.1f | %.1f |\n", name.c_str(), least * 1e3, bytes / least / 1e6);
    fflush(stdout);
  };

  printf("| %d GPUs, %.1f MB from each | us | GB/s |\n|---|---|---|\n", gpus, bytes / 1e6);
  timed("copy engine, to the next GPU", [&](int d) {
    CHECK(cudaMemcpyAsync(target[(d + 1) % gpus], source[d], bytes, cudaMemcpyDeviceToDevice,
                          stream[d]));
  });
  for (int blocks : {16, 32, 64, 128, 264}) {
    std::string of = ", " + std::to_string(blocks) + " blocks";
    timed("plain push" + of, [&](int d) {
      plain_push<<<blocks, 512, 0, stream[d]>>>(source[d], others(d, target), rows, false);
    });
    if (gpus > 2)
      timed("plain push by destination" + of, [&](int d) {
        plain_push<<<blocks, 512, 0, stream[d]>>>(source[d], others(d, target), rows, true);
      });
    timed("plain pull" + of, [&](int d) {
      plain_pull<<<blocks, 512, 0, stream[d]>>>(target[d], others(d, source), rows);
    });
    timed("bulk push" + of, [&](int d) {
      bulk<4><<<blocks, 32, 4 * kRow, stream[d]>>>(source[d], others(d, target), rows, false);
    });
    timed("bulk pull" + of, [&](int d) {
      bulk<4><<<blocks, 32, 4 * kRow, stream[d]>>>(target[d], others(d, source), rows, true);
    });
  }
  return 0;
}
