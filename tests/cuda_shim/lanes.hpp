// The instructions of kernels/cuda_common for a CPU. A copy's bytes are garbage until its lane has waited for it,
// it must read
// inputs, and each piece that it reads of some of them is counted.
#pragma once
#include <unordered_map>

#include "shim.hpp"

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

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

namespace shim {

template <typename T>
inline float half_of(unsigned word, int which) {
  const std::uint16_t bits = static_cast<std::uint16_t>(word >> (16 * which));
  T value;
  std::memcpy(&value, &bits, 2);
  return value;
}

}  // namespace shim

namespace mlx::core::cu {
struct Shape {
  int at[10];
  int operator[](int i) const { return at[i]; }
};
struct Strides {
  std::int64_t at[10];
  std::int64_t operator[](int i) const { return at[i]; }
};
}  // namespace mlx::core::cu

namespace lanes {

// The fragments of mma.m16n8k16 as the PTX manual lays them out.
template <typename T>
inline void mma(float* sum, const unsigned* a, unsigned b0, unsigned b1, T) {
  const unsigned words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const shim::Lane* warp = shim::meet(words, 6);
  const int lane = shim::running->thread % shim::WARP, g = lane >> 2, c = lane & 3;
  for (int i = 0; i < 4; i++) {
    const int row = g + 8 * (i >> 1), column = 2 * c + (i & 1);
    for (int k = 0; k < 16; k++) {
      const int quad = (k % 8) / 2, which = k & 1;
      const unsigned* left = shim::of(warp, (row % 8) * 4 + quad);
      const unsigned* right = shim::of(warp, column * 4 + quad);
      sum[i] += shim::half_of<T>(left[(row >= 8 ? 1 : 0) + (k >= 8 ? 2 : 0)], which) * shim::half_of<T>(right[4 + (k >= 8 ? 1 : 0)], which);
    }
  }
}

inline unsigned masked(unsigned word, unsigned mask, unsigned more) { return (word & mask) | more; }

template <typename T>
inline unsigned packed(float low, float high, T) {
  const T pair[2] = {T(low), T(high)};
  unsigned word;
  std::memcpy(&word, pair, 4);
  return word;
}

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
struct Span {
  const void *begin, *end;
  std::int64_t counted;
};
inline std::vector<Span> inputs;
inline std::unordered_map<const void*, int> reads;  // of inputs that are counted
constexpr int GUARD = 64;

inline unsigned char* arena() { return shared.data(); }

inline Copies& mine() { return of_lane[shim::running->thread]; }

inline void seen(const void* from, int bytes) {
  for (const Span& each : inputs)
    if (from >= each.begin && static_cast<const char*>(from) + bytes <= each.end) {
      if (each.counted) reads[from]++;
      return;
    }
  shim::fail("a copy reads what is no input");
}

template <int BYTES>
inline void fetch(void* to, const void* from, bool real) {
  unsigned char* const place = static_cast<unsigned char*>(to);
  if (place < shared.data() || place + BYTES > shared.data() + shared.size() - GUARD)
    shim::fail("a copy leaves shared memory");
  std::memset(to, 0xa5, BYTES);
  if (reinterpret_cast<std::size_t>(to) % BYTES || (real && reinterpret_cast<std::size_t>(from) % BYTES))
    shim::fail("a copy is not aligned");
  if (real) seen(from, BYTES);
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
  for (int block = 0; block < grid.x * grid.y * grid.z && said.empty(); block++) {
    of_lane.assign(threads, {});
    shared.assign(bytes + GUARD, 0xff);
    const Dim place = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    if (const char* wrong = shim::launch_one(kernel, place, grid, threads)) said = wrong;
    for (int i = bytes; i < bytes + GUARD; i++)
      if (shared[i] != 0xff) said = "a store leaves shared memory";
  }
  return said.empty() ? nullptr : said.c_str();
}

}  // namespace lanes
