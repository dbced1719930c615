// Pieces of a forward that a grid computes together: products of a few rows, norms, rotation, and meetings.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace block {

constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 8, PATIENCE = 1 << 22;

template <typename T>
__device__ __forceinline__ float half_of(unsigned word, int which) {
  const unsigned short bits = (unsigned short)(word >> (16 * which));
  return float(*reinterpret_cast<const T*>(&bits));
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Eight numbers in a row, as floats.
template <typename T>
__device__ __forceinline__ void eight(const float* from, float* x, T) {
  const uint4* words = reinterpret_cast<const uint4*>(from);
  const uint4 a = words[0], b = words[1];
  const unsigned all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int j = 0; j < 8; j++) x[j] = __int_as_float(all[j]);
}

template <typename T>
__device__ __forceinline__ void eight(const T* from, float* x, T) {
  const uint4 a = *reinterpret_cast<const uint4*>(from);
  const unsigned all[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
  for (int j = 0; j < 8; j++) x[j] = half_of<T>(all[j / 2], j % 2);
}

// Rows of matrices one after another: halves, or codes with a scale and a bias for each group.
template <typename T, int BITS, int GROUP>
struct Weights {
  const unsigned* words;
  const T *scales, *biases;

  // Numbers k to k + 7 of the row that begins at number `begin`.
  __device__ __forceinline__ void eight_of(long long begin, int k, float* w) const {
    const unsigned* from = words + (begin + k) * BITS / 32;
    if constexpr (BITS == 16) {
#pragma unroll
      for (int j = 0; j < 8; j++) w[j] = half_of<T>(from[j / 2], j % 2);
    } else {
      constexpr int EACH = 32 / BITS;
      const long long group = (begin + k) / GROUP;
      const float scale = float(scales[group]), bias = float(biases[group]);
#pragma unroll
      for (int j = 0; j < 8; j++)
        w[j] = scale * float((from[j / EACH] >> (BITS * (j % EACH))) & ((1u << BITS) - 1u)) + bias;
    }
  }
};

// sum[r] = row r of x times the weights' row, for up to ROWS rows; with NORMED each input has a weight first.
template <int K, bool NORMED, typename T, typename W, typename X>
__device__ __forceinline__ void dots(const W& weights, long long begin, const X* x, int rows, const float* norm,
                                     int lane, float* sum) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) sum[r] = 0.f;
  for (int k = lane * 8; k < K; k += 256) {
    float w[8], its[8];
    weights.eight_of(begin, k, w);
    if constexpr (NORMED) {
#pragma unroll
      for (int j = 0; j < 8; j++) w[j] *= norm[k + j];
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (r < rows) {
        eight(x + (long long)r * K + k, its, T{});
#pragma unroll
        for (int j = 0; j < 8; j++) sum[r] += w[j] * its[j];
      }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    if (r < rows) sum[r] = sum_of_warp(sum[r]);
}

template <int N>
__device__ __forceinline__ float pick(const float* values, int which) {
  float found = values[0];
#pragma unroll
  for (int r = 1; r < N; r++)
    if (r == which) found = values[r];
  return found;
}

// Tells each row's columns [0, COLUMNS) of x times the matrix that begins at number `begin`. The grid's warps
// share the columns; the lane that holds a row's number tells it.
template <int K, int COLUMNS, bool NORMED, typename T, typename W, typename X, typename Tell>
__device__ __forceinline__ void product(const W& weights, long long begin, const X* x, int rows, const float* norm,
                                        Tell tell) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int tiles = (rows + ROWS - 1) / ROWS;
  for (int task = blockIdx.x * WARPS + warp; task < COLUMNS * tiles; task += gridDim.x * WARPS) {
    const int column = task % COLUMNS, first = task / COLUMNS * ROWS, some = min(ROWS, rows - first);
    float sum[ROWS];
    dots<K, NORMED, T>(weights, begin + (long long)column * K, x + (long long)first * K, some, norm, lane, sum);
    if (lane < some) tell(first + lane, column, pick<ROWS>(sum, lane));
  }
}

// inverse[r] = 1 / root mean square of row r of x, in every block; ends with all threads of the block together.
template <int K>
__device__ __forceinline__ void root_mean_squares(const float* x, int rows, float eps, float* inverse) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int r = warp; r < rows; r += WARPS) {
    float square = 0.f;
    for (int k = lane; k < K; k += 32) square += x[r * K + k] * x[r * K + k];
    square = sum_of_warp(square);
    if (lane == 0) inverse[r] = 1.f / sqrtf(square / K + eps);
  }
  __syncthreads();
}

// A head's numbers lane, lane + 32, ... normed and rotated to `position`.
template <int D>
__device__ __forceinline__ void rotated(const float* raw, const float* norm, const float* angles, int position,
                                        float eps, int lane, float* x) {
  constexpr int EACH = D / 32;
  float square = 0.f;
#pragma unroll
  for (int j = 0; j < EACH; j++) x[j] = raw[lane + 32 * j], square += x[j] * x[j];
  const float inverse = 1.f / sqrtf(sum_of_warp(square) / D + eps);
#pragma unroll
  for (int j = 0; j < EACH; j++) x[j] *= inverse * norm[lane + 32 * j];
#pragma unroll
  for (int j = 0; j < EACH / 2; j++) {
    const float angle = position * angles[lane + 32 * j], c = cosf(angle), s = sinf(angle);
    const float low = x[j], high = x[j + EACH / 2];
    x[j] = low * c - high * s, x[j + EACH / 2] = high * c + low * s;
  }
}

// Every block of the grid gets here before any goes on. `flags` are this meeting's, one a block; `mark` tells
// this launch's from what an earlier one left there. A grid that cannot all run at once gives up waiting.
__device__ __forceinline__ void meet(unsigned* flags, unsigned mark) {
  __syncthreads();
  volatile unsigned* seen = flags;
  if (threadIdx.x == 0) {
    __threadfence();
    seen[blockIdx.x] = mark;
  }
  for (int b = threadIdx.x; b < gridDim.x; b += THREADS)
    for (int tries = 0; seen[b] != mark && tries < PATIENCE; tries++) {
    }
  __threadfence();
  __syncthreads();
}

}  // namespace block
