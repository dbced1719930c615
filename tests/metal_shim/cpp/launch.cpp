// A launch: threadgroups handed to workers, and accesses outside a buffer named.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "group.hpp"

namespace shim {
namespace {

struct Buffer {
  const char* name;
  char *start, *end;
};
std::vector<Buffer> buffers;

void on_bad_access(int number, siginfo_t* info, void*) {
  Group* group = running;
  if (!group || !group->current) {
    signal(number, SIG_DFL);
    return;
  }
  auto* at = static_cast<char*>(info->si_addr);
  const Self& self = group->current->self;
  const Three place = self.threadgroup_position;
  if (group->owns_stack(at)) {
    snprintf(group->error, sizeof group->error, "stack overflow in thread %u", self.thread_index);
  } else {
    const Buffer* nearest = nullptr;
    long distance = 0;
    for (const Buffer& each : buffers) {
      const long from = at < each.start ? each.start - at : at >= each.end ? at - each.end : 0;
      if (!nearest || from < distance) nearest = &each, distance = from;
    }
    snprintf(group->error, sizeof group->error,
             "out of bounds: byte %ld of buffer '%s' (%ld bytes), threadgroup (%u,%u,%u) thread %u",
             nearest ? long(at - nearest->start) : 0, nearest ? nearest->name : "?",
             nearest ? long(nearest->end - nearest->start) : 0, place.x, place.y, place.z, self.thread_index);
  }
  group->failed = true;
  siglongjmp(group->escape, 1);
}

// Takes bad accesses for as long as it lives; sanitizers have handlers of their own.
class Guard {
 public:
#if defined(SHIM_ASAN) || defined(SHIM_TSAN)
  Guard() {}
#else
  Guard() {
    struct sigaction action {};
    action.sa_sigaction = on_bad_access;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &segv_);
    sigaction(SIGBUS, &action, &bus_);
  }
  ~Guard() {
    sigaction(SIGSEGV, &segv_, nullptr);
    sigaction(SIGBUS, &bus_, nullptr);
  }

 private:
  struct sigaction segv_ {}, bus_ {};
#endif
};

// A stack for the handler, as the fiber's own may be what is full.
class SignalStack {
 public:
  SignalStack() : memory_(64 * 1024) {
    stack_t stack{};
    stack.ss_sp = memory_.data();
    stack.ss_size = memory_.size();
    sigaltstack(&stack, &before_);
  }
  ~SignalStack() { sigaltstack(&before_, nullptr); }

 private:
  std::vector<char> memory_;
  stack_t before_{};
};

struct Job {
  Three grid, threadgroup, threadgroups;
  const Options* options;
  Body body;
  void* arguments;
  uint32_t threads;
  uint64_t total;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  char* error;
  size_t room;
};

Counts work(Job& job) {
  SignalStack stack;
  // Not destroyed under TSan, whose reports may name its memory.
  auto group = std::make_unique<Group>(job.body, job.arguments, *job.options, job.threads);
  for (;;) {
    uint64_t number = job.next.fetch_add(1);
    if (number >= job.total || job.failed) break;
    if (job.options->schedule == static_cast<int>(Schedule::REVERSE)) number = job.total - 1 - number;
    const Three at{uint32_t(number % job.threadgroups.x), uint32_t(number / job.threadgroups.x % job.threadgroups.y),
                   uint32_t(number / job.threadgroups.x / job.threadgroups.y)};
    group->place(at, job.threadgroup, job.grid, number);
    const bool done = sigsetjmp(group->escape, 1) ? false : group->run();
    if (done) continue;
    if (!job.failed.exchange(true))
      snprintf(job.error, job.room, "threadgroup (%u,%u,%u): %s", at.x, at.y, at.z, group->error);
    break;
  }
  group->finish();
  return group->counts;
}

}  // namespace

int launch(Three grid, Three threadgroup, const Options& options, Body body, void* arguments, Counts* counts,
           char* error, size_t room) {
  Job job;
  job.grid = grid;
  job.threadgroup = {std::min(threadgroup.x, grid.x), std::min(threadgroup.y, grid.y), std::min(threadgroup.z, grid.z)};
  job.threads = job.threadgroup.x * job.threadgroup.y * job.threadgroup.z;
  if (!job.threads) {
    snprintf(error, room, "the grid is empty");
    return 1;
  }
  job.threadgroups = {(grid.x + job.threadgroup.x - 1) / job.threadgroup.x,
                      (grid.y + job.threadgroup.y - 1) / job.threadgroup.y,
                      (grid.z + job.threadgroup.z - 1) / job.threadgroup.z};
  job.total = uint64_t(job.threadgroups.x) * job.threadgroups.y * job.threadgroups.z;
  job.options = &options, job.body = body, job.arguments = arguments, job.error = error, job.room = room;
  Guard guard;
  std::vector<Counts> each(std::max(1, options.workers));
  std::vector<std::thread> workers;
  for (Counts& one : each) workers.emplace_back([&job, &one] { one = work(job); });
  for (auto& worker : workers) worker.join();
  *counts = {};
  for (const Counts& one : each) {
    counts->matrix_products += one.matrix_products;
    counts->simd_operations += one.simd_operations;
    counts->simdgroup_barriers += one.simdgroup_barriers;
    counts->threadgroup_barriers += one.threadgroup_barriers;
    counts->partial_operations += one.partial_operations;
    counts->threadgroup_bytes = std::max(counts->threadgroup_bytes, one.threadgroup_bytes);
    counts->threads = std::max(counts->threads, one.threads);
  }
  return job.failed ? 1 : 0;
}

}  // namespace shim

void shim_clear_buffers() { shim::buffers.clear(); }
void shim_add_buffer(const char* name, void* start, size_t size) {
  shim::buffers.push_back({name, static_cast<char*>(start), static_cast<char*>(start) + size});
}
