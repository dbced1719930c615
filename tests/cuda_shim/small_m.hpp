// The instructions of kernels/cuda_small_m for a CPU. A copy's bytes are garbage until its lane has waited for it,
// and each 16 bytes of weights that a copy reads are counted.
#pragma once
#include <unordered_map>

#include "shim.hpp"

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
inline void __syncwarp() { shim::meet(nullptr, 0); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(bits); }

template <typename X>
inline X __shfl_sync(unsigned, X x, int source) {
  static_assert(sizeof(X) == 4);
  unsigned word;
  std::memcpy(&word, &x, 4);
  const shim::Lane* warp = shim::meet(&word, 1);
  std::memcpy(&x, shim::of(warp, source), 4);
  return x;
}

namespace mlx::core::cu {
struct Shape {
  int at[10];
  int operator[](int i) const { return at[i]; }
};
}  // namespace mlx::core::cu

namespace small_m {

using few_queries::mma;

template <typename T>
inline void mma_first(float* sum, const unsigned* a, unsigned b0, unsigned b1, T kind) {
  for (int i = 0; i < 4; i++) sum[i] = 0.f;
  mma(sum, a, b0, b1, kind);
}

struct Copy {
  unsigned char* to;
  const void* from;
  bool real;
  int commit, bytes;
};
struct Copies {
  std::vector<Copy> open;
  int commits = 0;
};
inline std::vector<Copies> of_lane;
inline std::vector<unsigned char> shared;
inline std::unordered_map<const void*, int> reads;  // of the weights, which lie from `counted` on
inline const void *counted, *counted_end;
constexpr int GUARD = 64;

inline unsigned char* arena() { return shared.data(); }

inline Copies& mine() { return of_lane[shim::running->thread]; }

template <int BYTES>
inline void fetch(void* to, const void* from, bool real) {
  unsigned char* const place = static_cast<unsigned char*>(to);
  if (place < shared.data() || place + BYTES > shared.data() + shared.size() - GUARD)
    throw std::runtime_error("a copy leaves shared memory");
  std::memset(to, 0xa5, BYTES);
  if (reinterpret_cast<std::size_t>(to) % BYTES || (real && reinterpret_cast<std::size_t>(from) % BYTES))
    throw std::runtime_error("a copy is not aligned");
  if (real && from >= counted && from < counted_end) reads[from]++;
  mine().open.push_back({place, from, real, mine().commits, BYTES});
}

inline void commit() { mine().commits++; }

template <int LATER>
inline void arrived() {
  std::vector<Copy> left;
  for (const Copy& each : mine().open) {
    if (each.commit >= mine().commits - LATER) {
      left.push_back(each);
    } else if (each.real) {
      std::memcpy(each.to, each.from, each.bytes);
    } else {
      std::memset(each.to, 0, each.bytes);
    }
  }
  mine().open = left;
}

// Runs a kernel block by block; what went wrong, or nothing.
inline const char* launch(void (*kernel)(), Dim grid, int threads, int bytes) {
  static std::string said;
  said.clear();
  reads.clear();
  for (int block = 0; block < grid.x * grid.y && said.empty(); block++) {
    of_lane.assign(threads, {});
    shared.assign(bytes + GUARD, 0xff);
    const Dim place = {block % grid.x, block / grid.x, 0};
    if (const char* wrong = shim::launch_one(kernel, place, grid, threads)) said = wrong;
    for (int i = bytes; i < bytes + GUARD; i++)
      if (shared[i] != 0xff) said = "a store leaves shared memory";
  }
  return said.empty() ? nullptr : said.c_str();
}

}  // namespace small_m
