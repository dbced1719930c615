// Barriers, SIMD-group functions and 8x8 matrices. Every call takes its source line, which says where lanes meet.
#pragma once
#include "math.hpp"
#include "runtime.hpp"

#define SHIM_SITE int site = __builtin_LINE()
// Runs for all lanes at once, so its accesses are no thread's.
#define SHIM_FOR_ALL __attribute__((no_sanitize("thread"), noinline))

namespace shim {

template <class T> struct Offer {
  T in, out;
  uint argument;
};
template <class T> SHIM_INLINE Offer<T>* offer(void* payload) { return static_cast<Offer<T>*>(payload); }

}  // namespace shim

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
SHIM_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
SHIM_INLINE void threadgroup_barrier(mem_flags flags, SHIM_SITE) { shim::threadgroup_meet(site, uint(flags) & 3); }
SHIM_INLINE void simdgroup_barrier(mem_flags flags, SHIM_SITE) { shim::simdgroup_meet(site, uint(flags) & 3); }

#define SHIM_CALL(function)                                                                                     \
  shim::Offer<T> own;                                                                                           \
  own.in = x, own.argument = argument;                                                                          \
  shim::meet(shim::Meeting::SIMD, site, function<T>, &own, false);                                              \
  return own.out;

#define SHIM_REDUCTION(name, expression)                                                  \
  template <class T> SHIM_FOR_ALL void shim_##name(void** lanes) {                        \
    T sum{};                                                                              \
    bool first = true;                                                                    \
    for (int i = 0; i < 32; ++i) {                                                        \
      if (!lanes[i]) continue;                                                            \
      const T x = shim::offer<T>(lanes[i])->in;                                           \
      sum = first ? x : T(expression);                                                    \
      first = false;                                                                      \
    }                                                                                     \
    for (int i = 0; i < 32; ++i)                                                          \
      if (lanes[i]) shim::offer<T>(lanes[i])->out = sum;                                  \
  }                                                                                       \
  template <class T> SHIM_INLINE T name(T x, SHIM_SITE) {                                 \
    const uint argument = 0;                                                              \
    SHIM_CALL(shim_##name)                                                                \
  }
SHIM_REDUCTION(simd_sum, sum + x) SHIM_REDUCTION(simd_product, sum* x)
SHIM_REDUCTION(simd_max, sum > x ? sum : x) SHIM_REDUCTION(simd_min, sum < x ? sum : x)
SHIM_REDUCTION(simd_and, sum& x) SHIM_REDUCTION(simd_or, sum | x) SHIM_REDUCTION(simd_xor, sum ^ x)
SHIM_REDUCTION(simd_broadcast_first, sum)
#undef SHIM_REDUCTION
SHIM_INLINE bool simd_any(bool x, SHIM_SITE) { return simd_or<uint>(x, site); }
SHIM_INLINE bool simd_all(bool x, SHIM_SITE) { return simd_and<uint>(x, site); }

// A source outside the SIMD-group, or that has returned, gives NaN.
#define SHIM_SHUFFLE(name, source)                                                        \
  template <class T> SHIM_FOR_ALL void shim_##name(void** lanes) {                        \
    for (int i = 0; i < 32; ++i) {                                                        \
      if (!lanes[i]) continue;                                                            \
      auto* own = shim::offer<T>(lanes[i]);                                               \
      const int by = (int)own->argument, from = (source);                                 \
      const bool there = from >= 0 && from < 32 && lanes[from];                           \
      own->out = there ? shim::offer<T>(lanes[from])->in : shim::unwritten<T>();          \
    }                                                                                     \
  }                                                                                       \
  template <class T> SHIM_INLINE T name(T x, ushort argument, SHIM_SITE) { SHIM_CALL(shim_##name) }
SHIM_SHUFFLE(simd_broadcast, by) SHIM_SHUFFLE(simd_shuffle, by) SHIM_SHUFFLE(simd_shuffle_xor, i ^ by)
SHIM_SHUFFLE(simd_shuffle_down, i + by) SHIM_SHUFFLE(simd_shuffle_up, i - by)
SHIM_SHUFFLE(simd_shuffle_rotate_down, (i + by) & 31) SHIM_SHUFFLE(simd_shuffle_rotate_up, (i - by) & 31)
SHIM_SHUFFLE(quad_broadcast, (i & ~3) + by) SHIM_SHUFFLE(quad_shuffle_xor, i ^ by)
#undef SHIM_SHUFFLE
template <class T> SHIM_INLINE T quad_sum(T x, SHIM_SITE) {
  x = T(x + quad_shuffle_xor(x, 1, site));
  return T(x + quad_shuffle_xor(x, 2, site));
}
template <class T> SHIM_INLINE T simd_shuffle_and_fill_down(T x, T fill, ushort by, SHIM_SITE) {
  const T moved = simd_shuffle_down(x, by, site);
  return shim::lane() + by < 32 ? moved : fill;
}
template <class T> SHIM_INLINE T simd_shuffle_and_fill_up(T x, T fill, ushort by, SHIM_SITE) {
  const T moved = simd_shuffle_up(x, by, site);
  return shim::lane() >= by ? moved : fill;
}

template <class T> SHIM_FOR_ALL void shim_scan(void** lanes) {
  T sum(0);
  for (int i = 0; i < 32; ++i) {
    if (!lanes[i]) continue;
    auto* own = shim::offer<T>(lanes[i]);
    const T before = sum;
    sum = T(sum + own->in);
    own->out = own->argument ? before : sum;
  }
}
template <class T> SHIM_INLINE T simd_prefix_inclusive_sum(T x, SHIM_SITE) {
  const uint argument = 0;
  SHIM_CALL(shim_scan)
}
template <class T> SHIM_INLINE T simd_prefix_exclusive_sum(T x, SHIM_SITE) {
  const uint argument = 1;
  SHIM_CALL(shim_scan)
}
#undef SHIM_CALL

}  // namespace metal
