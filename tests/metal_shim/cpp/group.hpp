// A running threadgroup: one fiber a thread, scheduled by one worker.
#pragma once
#include <csetjmp>
#include <vector>

#include "fiber.hpp"
#include "runtime.hpp"
#include "sanitizers.hpp"

namespace shim {

enum class State : uint8_t { READY, IN_SIMDGROUP, IN_THREADGROUP, RETURNED };

struct Fiber {
  Context context;
  StackView stack_view;
  ThreadView thread_view;
  char* stack = nullptr;
  Self self{};
  State state = State::READY;
  Meeting kind = Meeting::NONE;
  int site = 0;
  Operation operation = nullptr;
  void* payload = nullptr;
};

struct Variable {
  int key;
  uint32_t start, size;
  const char* name;
};

struct Simdgroup {
  uint32_t arrived = 0, live = 0, epoch = 0;
};

class Group {
 public:
  Group(Body body, void* arguments, const Options& options, uint32_t threads);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void place(Three position, Three threadgroup, Three grid, uint64_t number);
  bool run();
  void finish();

  // Called on a fiber.
  void meet(Meeting kind, int site, Operation operation, void* payload, bool needs_all_lanes);
  void simdgroup_meet(int site, bool orders_memory);
  void threadgroup_meet(int site, bool orders_memory);
  void* memory(int key, size_t size, size_t alignment, const char* name);
  void main();

  bool owns(const void* at) const;
  bool owns_stack(const void* at) const;

  Counts counts{};
  char error[512] = "";
  bool failed = false;
  Fiber* current = nullptr;
  sigjmp_buf escape;

 private:
  void start();
  void order_lanes();
  void shuffle(std::vector<uint32_t>& order, size_t first, size_t last);
  void resume(Fiber& fiber);
  void to_scheduler();
  bool step();
  bool complete_without_the_returned();
  void complete(uint32_t simdgroup, void** payloads, Operation operation);
  void tell_deadlock();
  bool zones_intact();
  uint32_t last_of(uint32_t simdgroup) const;
  char* sync(uint32_t which) { return syncs_ + sync_start_ + which; }
  [[noreturn]] __attribute__((format(printf, 2, 3))) void fail(const char* format, ...);

  Body body_;
  void* arguments_;
  Options options_;
  uint32_t capacity_;
  uint32_t size_ = 0, live_ = 0, arrived_ = 0, epoch_ = 0;
  std::vector<Fiber> fibers_;
  std::vector<Simdgroup> simdgroups_;
  std::vector<uint32_t> lane_order_, simdgroup_order_;
  char* stacks_;
  char* arena_;
  char* syncs_;
  uint64_t sync_start_ = 0, number_ = 0, random_ = 0;
  uint32_t arena_used_ = 0, arena_bytes_ = 0;
  std::vector<Variable> variables_;
  Context scheduler_;
  StackView scheduler_stack_;
  ThreadView scheduler_thread_;
  char end_ = 0;
};

extern thread_local Group* running;

}  // namespace shim
