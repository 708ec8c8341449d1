// Cooperative contexts for the emulation: one per CUDA thread, switched by hand.
//
// swapcontext() makes a system call for the signal mask at every switch (about 300 ns); a kernel of 1024 threads
// with a few reductions switches tens of thousands of times, so the two common architectures save exactly the
// registers that their calling convention asks a function to preserve. Elsewhere (or with
// -DEMULATION_UCONTEXT, so that the fallback is tested too) ucontext does the same job.
#pragma once

#if !defined(EMULATION_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define EMULATION_UCONTEXT
#endif

#ifdef EMULATION_UCONTEXT

#include <ucontext.h>

namespace emulation {

struct Context {
  ucontext_t state;
};

inline void prepare_context(Context& context, char* stack, unsigned long bytes, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

}  // namespace emulation

#else

#include <cstdint>

namespace emulation {

struct Context {
  void* stack_pointer;
};

// Defined below for the assembler alone, once in each file that includes this.
extern "C" void emulation_switch(void** save_stack_pointer, void* load_stack_pointer);

#ifdef __x86_64__

asm(R"(
.text
.p2align 4
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, . - emulation_switch
)");

// The first switch pops six registers and returns into `entry`, which must then see the stack as after a call:
// 8 bytes past a multiple of 16.
inline void prepare_context(Context& context, char* stack, unsigned long bytes, void (*entry)()) {
  auto top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) & ~std::uintptr_t(15);
  auto* frame = reinterpret_cast<std::uintptr_t*>(top) - 8;
  for (int slot = 0; slot < 8; ++slot) frame[slot] = 0;
  frame[6] = reinterpret_cast<std::uintptr_t>(entry);
  context.stack_pointer = frame;
}

#else  // __aarch64__

asm(R"(
.text
.p2align 4
.type emulation_switch, @function
emulation_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulation_switch, . - emulation_switch
)");

inline void prepare_context(Context& context, char* stack, unsigned long bytes, void (*entry)()) {
  auto top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) & ~std::uintptr_t(15);
  auto* frame = reinterpret_cast<std::uintptr_t*>(top) - 20;
  for (int slot = 0; slot < 20; ++slot) frame[slot] = 0;
  frame[11] = reinterpret_cast<std::uintptr_t>(entry);  // x30, where `ret` goes
  context.stack_pointer = frame;
}

#endif

inline void switch_context(Context& from, Context& to) {
  emulation_switch(&from.stack_pointer, to.stack_pointer);
}

}  // namespace emulation

#endif
