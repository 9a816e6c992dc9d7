// Grouped GEMM over expert-sorted rows, bf16, swap-AB: out[t, w] = sum over k of W[w, k] * x[t, k].
//
// Macros: GATED, and BLOCKS (of 64 weight rows of a consumer warp group, 1 or 2). The host puts the
// wgmma of every width at WGMMA. See cuda_tokens.py for what was measured.
//
// A tile is 128 * BLOCKS weight rows by the tokens of an expert, at most MOST, as many as it has in
// steps of 8. Two clustered programs compute two weight tiles of the same tokens: each loads half of
// the tokens' rows for both. The warps of a program:
//
//   warps 0 to 3    warp 0 loads (producer); warp 1 of the first program schedules tiles for both
//   warps 4 to 11   two warp groups multiply half of the weight rows each and store the results
//
// With a gate, eight weight rows of gate and eight of up alternate, so that a thread holds both of an
// output. Rows of x beyond an expert's last one may hold anything: their results are undefined.

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int PROGRAMS = 2;                     // of a cluster
constexpr int WEIGHTS = 128 * BLOCKS;           // weight rows of a tile
constexpr int OUTPUTS = GATED ? WEIGHTS / 2 : WEIGHTS;
constexpr int MOST = 288 / BLOCKS;              // tokens of a tile
constexpr int STEP = 64;                        // columns of K
constexpr int ROW = 128;                        // bytes of a row in a step
constexpr int STAGES = 4;
constexpr int W_BYTES = WEIGHTS * ROW;
constexpr int STAGE_BYTES = W_BYTES + MOST * ROW;
constexpr int COLUMNS = GATED ? 32 : 64;        // of out that 64 weight rows make
constexpr int PART_BYTES = 4096;                // of results stored at once; two buffers a warp group
constexpr int PART = PART_BYTES / 2 / COLUMNS;  // tokens of it
constexpr int TILES = 8;                        // scheduled tiles in flight
constexpr int BARRIERS = STAGES * STAGE_BYTES + 4 * PART_BYTES;

// ---- PTX ----------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ u32 cluster_rank() {
  u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r;
}
__device__ __forceinline__ u32 in_program(u32 address, u32 rank) {  // of the cluster
  u32 r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 phase) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, 0x989680;\n"
      "@p bra done;\nbra again;\ndone:\n}" :: "r"(bar), "r"(phase) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_cluster(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(bar) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
__device__ __forceinline__ void group_sync(int group) {  // the 128 threads of a consumer warp group
  asm volatile("bar.sync %0, 128;" :: "r"(group + 1) : "memory");
}
__device__ __forceinline__ void load_2d(u32 to, const TensorMap* map, int x, int y, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
__device__ __forceinline__ void load_2d_both(u32 to, const TensorMap* map, int x, int y, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar), "h"((unsigned short)3) : "memory");
}
__device__ __forceinline__ void load_4d(u32 to, const TensorMap* map, int x, int block, u32 bar) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3, %3, %4}], [%5];"
               :: "r"(to), "l"(map), "r"(x), "r"(0), "r"(block), "r"(bar) : "memory");
}
__device__ __forceinline__ u64 matrix(u32 address) {  // K-major, rows of 128 swizzled bytes
  return u64(address >> 4) | u64(1) << 16 | u64(64) << 32 | u64(1) << 62;
}
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}
template <int N> struct Wgmma;  // multiply(sums, w, x, accumulate)
// WGMMA

__device__ __forceinline__ u32 swizzled(int token, int chunk) {  // 16 bytes of a part
  return token * COLUMNS * 2 + (chunk ^ (GATED ? token / 2 % 4 : token % 8)) * 16;
}

// ---- arithmetic ---------------------------------------------------------------------------------

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float silu_divisor(float gate) {  // at most 2 ** 60: a product of two is finite
  float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(fminf(gate * -1.4426950408889634f, 60.0f)));
  return 1.0f + r;
}
__device__ __forceinline__ u32 silu_mul(const float* gate, const float* up) {
  // Two values share a reciprocal.
  float a = silu_divisor(gate[0]), b = silu_divisor(gate[1]), inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a * b));
  return pack(gate[0] * up[0] * (inverse * b), gate[1] * up[1] * (inverse * a));
}

// ---- tiles --------------------------------------------------------------------------------------

struct Tile { int row, units, expert, column; };  // units of 8 tokens, 0: none; column of out

struct Ring {  // the stages and barriers, by address
  u32 stages, parts, full, empty, known, taken, tiles;  // in the order of their initializers
  __device__ explicit Ring(u32 base)
      : stages(base), parts(base + STAGES * STAGE_BYTES), full(base + BARRIERS),
        empty(full + 8 * STAGES), known(empty + 8 * STAGES), taken(known + 8 * TILES),
        tiles(taken + 8 * TILES) {}
};

__device__ __forceinline__ Tile wait_tile(const Ring& ring, int position) {
  const u32 slot = position % TILES;
  barrier_wait(ring.known + 8 * slot, position / TILES & 1);
  Tile t;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(t.row), "=r"(t.units), "=r"(t.expert), "=r"(t.column)
               : "r"(ring.tiles + 16 * slot) : "memory");
  return t;
}

__device__ __forceinline__ void send_tile(const Ring& ring, int position, u32 rank, Tile t) {
  const u32 slot = position % TILES;
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
               " [%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(in_program(ring.tiles + 16 * slot, rank)), "r"(t.row), "r"(t.units),
                  "r"(t.expert), "r"(t.column), "r"(in_program(ring.known + 8 * slot, rank))
               : "memory");
}

// Take tiles from the counter, which the last one resets, and send them to both programs.
__device__ __forceinline__ void schedule(const Ring& ring, const int* list, int* counter, int n, int group) {
  const int lists = list[0], pairs = (n + PROGRAMS * OUTPUTS - 1) / (PROGRAMS * OUTPUTS);
  const int tiles = lists * pairs, clusters = gridDim.x / PROGRAMS;
  int tile = blockIdx.x / PROGRAMS, position = 0;
  while (true) {
    Tile t = {0, 0, 0, 0};
    if (tile < tiles) {
      const int first = tile / (group * pairs) * group, high = min(group, lists - first);
      const int inside = tile % (group * pairs), entry = first + inside % high;
      const int word = list[2 + 2 * entry];
      t = {list[1 + 2 * entry], word % 64, word / 64, inside / high * PROGRAMS * OUTPUTS};
    }
    if (position >= 3) barrier_wait(ring.taken + 8 * ((position - 3) % TILES), (position - 3) / TILES & 1);
    for (int rank = 0; rank < PROGRAMS; ++rank) send_tile(ring, position, rank, t);
    if (t.units == 0) break;
    const int next = atomicAdd(counter, 1);
    if (next == tiles - 1) *counter = 0;
    tile = next + clusters;
    ++position;
  }
}

__device__ __forceinline__ void produce(const Ring& ring, const TensorMap* x64, const TensorMap* x8,
                                        const TensorMap* w, int n, int k) {
  const u32 rank = cluster_rank();
  const int steps = (k + STEP - 1) / STEP;
  for (int position = 0, it = 0;; ++position) {
    barrier_expect(ring.known + 8 * (position % TILES), 16);
    const Tile t = wait_tile(ring, position);
    if (rank == 0) barrier_arrive_cluster(in_program(ring.taken + 8 * (position % TILES), 0));
    if (t.units == 0) return;
    const int column = t.column + rank * OUTPUTS;
    const int middle = (t.units + 1) / 2 * 8, end = t.units * 8;
    const int from = rank ? middle : 0, to = rank ? end : middle;
    const u32 bytes = W_BYTES + end * ROW;
    for (int step = 0; step < steps; ++step, ++it) {
      const u32 slot = it % STAGES, stage = ring.stages + slot * STAGE_BYTES, full = ring.full + 8 * slot;
      barrier_wait(ring.empty + 8 * slot, (it / STAGES & 1) ^ 1);
      barrier_expect(full, bytes);
#if GATED
      load_4d(stage, w, step * STEP, (t.expert * 2 * n + column) / 8, full);
#else
      load_2d(stage, w, step * STEP, t.expert * n + column, full);
#endif
      const u32 tokens = stage + W_BYTES;
      int row = from;
      for (; row + 64 <= to; row += 64) load_2d_both(tokens + row * ROW, x64, step * STEP, t.row + row, full);
      for (; row < to; row += 8) load_2d_both(tokens + row * ROW, x8, step * STEP, t.row + row, full);
    }
  }
}

struct Output { char* out; int n; };

// Transpose a part of an m64 block's sums, PART tokens from ``first`` on, to shared memory.
__device__ __forceinline__ void transpose(const float* sums, int first, u32 part) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int j = 0; j < PART / 8; j += GATED ? 4 : 2) {
    // Four matrices of 8 columns x 8 tokens, stored transposed. The lane gives a row's address.
    const int which = lane / 8, token = 8 * (GATED ? j + which : j + which / 2) + lane % 8;
    const int chunk = GATED ? warp : 2 * warp + which % 2;  // of 8 columns
    u32 value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first / 8 + (GATED ? j + i : j + i / 2);  // of 8 tokens
      if (at >= MOST / 8) { value[i] = 0; continue; }
#if GATED
      value[i] = silu_mul(sums + 4 * at, sums + 4 * at + 2);
#else
      value[i] = pack(sums[4 * at + 2 * (i % 2)], sums[4 * at + 2 * (i % 2) + 1]);
#endif
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(part + swizzled(token, chunk)), "r"(value[0]), "r"(value[1]), "r"(value[2]),
                    "r"(value[3]) : "memory");
  }
}

// Store one m64 block of sums, COLUMNS columns of ``end`` tokens, by whole rows. A part is transposed
// while the one before is written; the barrier between the two says that a part is complete, and that
// its memory is free again two parts later. The copy engine is busy with the next tile.
__device__ __forceinline__ void store(const float* sums, u32 parts, const Output& out, int row, int end,
                                      int column) {
  constexpr int CHUNKS = COLUMNS / 8, ROWS = 128 / CHUNKS;  // tokens that are written at once
  const int group = threadIdx.x / 128 - 1, token = threadIdx.x % 128 / CHUNKS, chunk = threadIdx.x % CHUNKS;
  const u32 from = parts + swizzled(token, chunk);
  const int left = column + 8 * chunk < out.n ? end - token : 0;
  const u64 stride = u64(ROWS) * out.n * 2;
  char* to = out.out + (u64(row + token) * out.n + column + 8 * chunk) * 2;
  group_sync(group);  // the last parts before these have been read
  transpose(sums, 0, parts);
#pragma unroll
  for (int first = 0; first < MOST; first += PART) {
    if (first >= end) break;
    group_sync(group);
    const u32 part = first / PART % 2 * PART_BYTES;
    if (first + PART < MOST && first + PART < end)
      transpose(sums, first + PART, parts + PART_BYTES - part);
    u32 v[PART / ROWS][4];
#pragma unroll
    for (int i = 0; i < PART / ROWS; ++i) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[i][0]), "=r"(v[i][1]), "=r"(v[i][2]), "=r"(v[i][3])
                   : "r"(from + part + i * ROWS * COLUMNS * 2) : "memory");
    }
#pragma unroll
    for (int i = 0; i < PART / ROWS; ++i, to += stride) {
      if (first + i * ROWS < left) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "l"(to), "r"(v[i][0]), "r"(v[i][1]), "r"(v[i][2]), "r"(v[i][3]) : "memory");
      }
    }
  }
}

__device__ __forceinline__ void release(const Ring& ring, int it) {
  const int lane = threadIdx.x % 32;
  if (lane < PROGRAMS) barrier_arrive_cluster(in_program(ring.empty + 8 * (it % STAGES), lane));
}

using Sums = float[BLOCKS][MOST / 2];

// Multiply this warp group's half of the weight rows by N tokens.
template <int N>
__device__ __forceinline__ void multiply(Sums& sums, const Ring& ring, int steps, int& it) {
  constexpr int LEFT = N <= 256 ? N : 256, RIGHT = N - LEFT;  // of two products
  const int group = threadIdx.x / 128 - 1;
  for (int step = 0; step < steps; ++step, ++it) {
    const u32 slot = it % STAGES, stage = ring.stages + slot * STAGE_BYTES;
    const u64 w = matrix(stage + group * (W_BYTES / 2)), x = matrix(stage + W_BYTES);
    barrier_wait(ring.full + 8 * slot, it / STAGES & 1);
    wgmma_begin();
#pragma unroll
    for (int j = 0; j < STEP / 16; ++j) {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        const u64 left = w + b * 64 * ROW / 16 + 2 * j;
        Wgmma<LEFT>::multiply(sums[b], left, x + 2 * j, step + j);
        if constexpr (RIGHT > 0)
          Wgmma<RIGHT>::multiply(sums[b] + LEFT / 2, left, x + LEFT * ROW / 16 + 2 * j, step + j);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release(ring, it - 1);
  }
  wgmma_wait<0>();
  release(ring, it - 1);
}

template <int UNITS>
__device__ __forceinline__ void multiply_on(int units, Sums& sums, const Ring& ring, int steps, int& it) {
  if constexpr (UNITS == 1) multiply<8>(sums, ring, steps, it);
  else if (units == UNITS) multiply<8 * UNITS>(sums, ring, steps, it);
  else multiply_on<UNITS - 1>(units, sums, ring, steps, it);
}

__device__ __forceinline__ void consume(const Ring& ring, const Output& out, int k) {
  const int steps = (k + STEP - 1) / STEP, group = threadIdx.x / 128 - 1;
  const u32 parts = ring.parts + group * 2 * PART_BYTES;
  int it = 0;
  for (int position = 0;; ++position) {
    const Tile t = wait_tile(ring, position);
    if (t.units == 0) break;
    Sums sums;
    multiply_on<MOST / 8>(t.units, sums, ring, steps, it);
    const int column = t.column + (cluster_rank() * 2 + group) * (OUTPUTS / 2);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
      store(sums[b], parts, out, t.row, 8 * t.units, column + b * OUTPUTS / (2 * BLOCKS));
  }
}

extern "C" __global__ void __cluster_dims__(PROGRAMS, 1, 1) __launch_bounds__(384, 1)
token_gemm(const __grid_constant__ TensorMap x64, const __grid_constant__ TensorMap x8,
           const __grid_constant__ TensorMap w, char* out, const int* list, int* counter,
           int n, int k, int group_m) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring((shared_address(shared) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, 8 * PROGRAMS);
    }
    for (int i = 0; i < TILES; ++i) {
      barrier_init(ring.known + 8 * i, 1);
      barrier_init(ring.taken + 8 * i, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  cluster_sync();
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) produce(ring, &x64, &x8, &w, n, k);
    if (threadIdx.x == 32 && cluster_rank() == 0) schedule(ring, list, counter, n, group_m);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(ring, {out, n}, k);
  }
  cluster_sync();
}
