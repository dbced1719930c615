// Relaxed atomics, the only order that Metal has on device memory.
#pragma once
#include "types.hpp"

namespace metal {

enum memory_order { memory_order_relaxed };
template <class T> struct atomic {
  T held;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<float> atomic_float;

template <class T> SHIM_INLINE T atomic_load_explicit(const atomic<T>* at, memory_order) {
  T found;
  __atomic_load(&at->held, &found, __ATOMIC_RELAXED);
  return found;
}
template <class T> SHIM_INLINE void atomic_store_explicit(atomic<T>* at, shim::plain<T> x, memory_order) {
  __atomic_store(&at->held, &x, __ATOMIC_RELAXED);
}
#define SHIM_ATOMIC(name, expression)                                                                          \
  template <class T> SHIM_INLINE T name(atomic<T>* at, shim::plain<T> x, memory_order) {                       \
    T old, made;                                                                                               \
    __atomic_load(&at->held, &old, __ATOMIC_RELAXED);                                                          \
    do made = T(expression);                                                                                   \
    while (!__atomic_compare_exchange(&at->held, &old, &made, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));      \
    return old;                                                                                                \
  }
SHIM_ATOMIC(atomic_fetch_add_explicit, old + x) SHIM_ATOMIC(atomic_fetch_or_explicit, old | x)
SHIM_ATOMIC(atomic_fetch_max_explicit, old > x ? old : x) SHIM_ATOMIC(atomic_fetch_min_explicit, old < x ? old : x)
SHIM_ATOMIC(atomic_exchange_explicit, x)
#undef SHIM_ATOMIC

}  // namespace metal
