// A stack that can be left and entered again: 20 instructions on x86-64, ucontext elsewhere.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__ELF__) && !defined(SHIM_UCONTEXT)

extern "C" void shim_switch(void** from, void* to);


namespace shim {

struct Context {
  void* stack_pointer = nullptr;

  void start(char* stack, size_t size, void (*entry)()) {
    auto** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + size) & ~uintptr_t(15));
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    stack_pointer = top;
  }
  void switch_to(Context& other) { shim_switch(&stack_pointer, other.stack_pointer); }
};

}  // namespace shim

#else

#ifdef __APPLE__
#define _XOPEN_SOURCE 700
#endif
#include <ucontext.h>

namespace shim {

struct Context {
  ucontext_t held;

  void start(char* stack, size_t size, void (*entry)()) {
    getcontext(&held);
    held.uc_stack.ss_sp = stack;
    held.uc_stack.ss_size = size;
    held.uc_link = nullptr;
    makecontext(&held, entry, 0);
  }
  void switch_to(Context& other) { swapcontext(&held, &other.held); }
};

}  // namespace shim

#endif
