// Saves what the calling convention of x86-64 asks to be kept, and changes the stack.
#include "fiber.hpp"

#if defined(__x86_64__) && defined(__ELF__) && !defined(SHIM_UCONTEXT)
asm(R"(
.text
.globl shim_switch
.hidden shim_switch
.type shim_switch,@function
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shim_switch,.-shim_switch
)");
#endif
