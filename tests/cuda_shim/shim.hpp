// What the kernels use of CUDA, for a CPU. A block runs as one coroutine a thread, in turns: a thread runs until
// it meets the others (a shuffle, a product of fragments, __syncthreads) and goes on when all of its warp, or of
// the block, are there. Blocks run one after another; of every second
// one, each warp runs as far as it can before the next begins.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __shared__ static

struct Dim { int x = 1, y = 1, z = 1; };
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
using std::max;
using std::min;

// Halves: their bits, and a rounding to nearest even.
struct __half {
  _Float16 value = 0;
  __half() = default;
  explicit __half(float x) : value(static_cast<_Float16>(x)) {}
  operator float() const { return static_cast<float>(value); }
};
struct __nv_bfloat16 {
  std::uint16_t bits = 0;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    std::uint32_t wide;
    std::memcpy(&wide, &x, 4);
    bits = std::isnan(x) ? 0x7fc0 : static_cast<std::uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    const std::uint32_t wide = std::uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
};

namespace shim {

constexpr int WARP = 32;
enum class Wait { NONE, WARP, BLOCK, DONE };

struct Lane {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Wait wait = Wait::NONE;
  int thread = 0;
  int meetings = 0;
  unsigned offered[2][8];  // what it brings to a meeting of the warp; the next meeting writes elsewhere
};

inline std::vector<Lane> lanes;
inline ucontext_t scheduler;
inline Lane* running = nullptr;
inline void (*body)() = nullptr;

inline void pause(Wait wait) {
  running->wait = wait;
  Lane* self = running;
  swapcontext(&self->context, &scheduler);
}

// Brings `n` words to a meeting of the warp; `read(lane)` are those of another lane afterwards.
inline const Lane* meet(const unsigned* words, int n) {
  std::memcpy(running->offered[running->meetings & 1], words, n * sizeof(unsigned));
  pause(Wait::WARP);
  running->meetings++;
  return &lanes[running->thread / WARP * WARP];
}

inline const unsigned* of(const Lane* warp, int lane) { return warp[lane].offered[(running->meetings - 1) & 1]; }

inline void start() {
  body();
  running->wait = Wait::DONE;
  swapcontext(&running->context, &scheduler);
}

inline std::string wrong;  // what a lane did

// Ends the lane, and the block with what it did wrong: an exception does not leave a lane's stack.
[[noreturn]] inline void fail(const char* what) {
  wrong = what;
  pause(Wait::DONE);
  std::abort();
}

inline bool all(int first, int count, Wait wait) {
  for (int i = first; i < first + count; i++)
    if (lanes[i].wait != wait && lanes[i].wait != Wait::DONE) return false;
  return true;
}

// `ahead`: each warp runs as far as it can before the next begins; else all go step by step.
inline void run_block(int threads, bool ahead) {
  lanes = std::vector<Lane>(threads);
  constexpr std::size_t STACK = 1 << 16;
  for (int i = 0; i < threads; i++) {
    Lane& lane = lanes[i];
    lane.thread = i;
    lane.stack = std::make_unique_for_overwrite<char[]>(STACK);
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.get();
    lane.context.uc_stack.ss_size = STACK;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, start, 0);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (int i = 0; i < threads && !(ahead && moved && i % WARP == 0); i++)
      if (lanes[i].wait == Wait::NONE) {
        running = &lanes[i];
        swapcontext(&scheduler, &lanes[i].context);
        if (!wrong.empty()) throw std::runtime_error(std::exchange(wrong, ""));
        moved = true;
      }
    for (int first = 0; first < threads; first += WARP) {
      bool waiting = false;
      for (int i = first; i < first + WARP; i++) waiting |= lanes[i].wait == Wait::WARP;
      if (!waiting) continue;
      for (int i = first; i < first + WARP; i++)
        if (lanes[i].wait != Wait::WARP) throw std::runtime_error("lanes of a warp parted at a meeting");
      for (int i = first; i < first + WARP; i++) lanes[i].wait = Wait::NONE;
      moved = true;
    }
    if (!moved && !all(0, threads, Wait::DONE)) {
      if (!all(0, threads, Wait::BLOCK)) throw std::runtime_error("threads of a block parted at a barrier");
      for (auto& lane : lanes)
        if (lane.wait == Wait::BLOCK) lane.wait = Wait::NONE;
      moved = true;
    }
  }
}

}  // namespace shim

inline Dim blockIdx_, gridDim_;
#define blockIdx blockIdx_
#define gridDim gridDim_
struct ThreadIdx { int x; };
#define threadIdx (ThreadIdx{shim::running->thread})

namespace shim {

// Runs one block of a kernel; what went wrong, or nothing.
inline const char* launch_one(void (*kernel)(), Dim block, Dim grid, int threads) {
  body = kernel;
  gridDim_ = grid;
  blockIdx_ = block;
  try {
    run_block(threads, block.x % 2);
  } catch (const std::exception& error) {
    static std::string said;
    said = error.what();
    return said.c_str();
  }
  return nullptr;
}

// Runs a kernel over a grid; what went wrong, or nothing.
inline const char* launch(void (*kernel)(), Dim grid, int threads) {
  for (int z = 0; z < grid.z; z++)
    for (int y = 0; y < grid.y; y++)
      for (int x = 0; x < grid.x; x++)
        if (const char* said = launch_one(kernel, {x, y, z}, grid, threads)) return said;
  return nullptr;
}

}  // namespace shim

inline void __syncthreads() { shim::pause(shim::Wait::BLOCK); }

template <typename X>
inline X __shfl_xor_sync(unsigned, X x, int other) {
  static_assert(sizeof(X) == 4);
  unsigned word;
  std::memcpy(&word, &x, 4);
  const shim::Lane* warp = shim::meet(&word, 1);
  std::memcpy(&x, shim::of(warp, (shim::running->thread % shim::WARP) ^ other), 4);
  return x;
}

inline bool __any_sync(unsigned, bool mine) {
  const unsigned word = mine;
  const shim::Lane* warp = shim::meet(&word, 1);
  bool any = false;
  for (int lane = 0; lane < shim::WARP; lane++) any |= *shim::of(warp, lane) != 0;
  return any;
}

inline float __int_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t both = (std::uint64_t(b) << 32) | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= unsigned((both >> (8 * ((selector >> (4 * i)) & 7))) & 255) << (8 * i);
  return out;
}
