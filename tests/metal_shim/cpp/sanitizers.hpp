// What the sanitizers must be told of fibers and of threadgroup memory; nothing without them.
#pragma once
#include <cstddef>

#ifdef SHIM_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, size_t);
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
void __asan_poison_memory_region(void const volatile*, size_t);
void __asan_unpoison_memory_region(void const volatile*, size_t);
}
#endif
#ifdef SHIM_TSAN
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#endif

namespace shim {

#ifdef SHIM_ASAN
inline void poison(const void* at, size_t size) { __asan_poison_memory_region(at, size); }
inline void unpoison(const void* at, size_t size) { __asan_unpoison_memory_region(at, size); }
#else
inline void poison(const void*, size_t) {}
inline void unpoison(const void*, size_t) {}
#endif

// ASan's view of a stack: `leave` before a switch, `enter` after it.
struct StackView {
  void* fake = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;

#ifdef SHIM_ASAN
  void leave(const StackView& next, bool for_good) {
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, next.bottom, next.size);
  }
  void enter(StackView* from) {
    __sanitizer_finish_switch_fiber(fake, from ? &from->bottom : nullptr, from ? &from->size : nullptr);
  }
#else
  void leave(const StackView&, bool) {}
  void enter(StackView*) {}
#endif
};

// TSan's view of a thread. Switches create no order: only barriers that name memory do.
struct ThreadView {
  void* held = nullptr;

#ifdef SHIM_TSAN
  void be_current() { held = __tsan_get_current_fiber(); }
  void renew() {
    if (held) __tsan_destroy_fiber(held);
    held = __tsan_create_fiber(0);
  }
  void enter() { __tsan_switch_to_fiber(held, 1); }
#else
  void be_current() {}
  void renew() {}
  void enter() {}
#endif
};

#ifdef SHIM_TSAN
inline void release(void* at) { __tsan_release(at); }
inline void acquire(void* at) { __tsan_acquire(at); }
#else
inline void release(void*) {}
inline void acquire(void*) {}
#endif

}  // namespace shim
