// Fibers of a threadgroup: where they meet, in which order they run, and what is a fault.
#include "group.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace shim {

thread_local Group* running = nullptr;

namespace {

constexpr size_t STACK = 128 * 1024;
constexpr size_t ARENA = 64 * 1024;
constexpr size_t SYNCS = size_t(1) << 30;  // addresses only
constexpr uint32_t ZONE = 64;
constexpr uint32_t LANES = 32;
const char* const NAMES[] = {"nothing", "simd operation", "simdgroup_matrix operation", "simdgroup_barrier",
                             "threadgroup_barrier"};

const char* name_of(Meeting kind) { return NAMES[static_cast<int>(kind)]; }

char* mapped(size_t size, void* at = nullptr) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  void* found = mmap(at, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (found == MAP_FAILED) abort();
  return static_cast<char*>(found);
}

void fiber_entry() { running->main(); }

bool is_random(const Options& options) { return options.schedule >= static_cast<int>(Schedule::RANDOM); }
bool is_reverse(const Options& options) { return options.schedule == static_cast<int>(Schedule::REVERSE); }
bool is_interleaved(const Options& options) { return options.schedule == static_cast<int>(Schedule::INTERLEAVED); }

}  // namespace

Group::Group(Body body, void* arguments, const Options& options, uint32_t threads)
    : body_(body), arguments_(arguments), options_(options), capacity_(threads), fibers_(threads) {
  stacks_ = mapped(STACK * threads);
  arena_ = mapped(ARENA);
  syncs_ = mapped(SYNCS);
  variables_.reserve(64);
  for (uint32_t i = 0; i < threads; i++) mprotect(stacks_ + STACK * i, getpagesize(), PROT_NONE);
}

Group::~Group() {
  unpoison(arena_, ARENA);
#ifndef SHIM_TSAN  // TSan may yet report an access to them
  munmap(stacks_, STACK * capacity_);
  munmap(arena_, ARENA);
  munmap(syncs_, SYNCS);
#endif
}

void Group::place(Three position, Three threadgroup, Three grid, uint64_t number) {
  const Three size{std::min(threadgroup.x, grid.x - position.x * threadgroup.x),
                   std::min(threadgroup.y, grid.y - position.y * threadgroup.y),
                   std::min(threadgroup.z, grid.z - position.z * threadgroup.z)};
  size_ = size.x * size.y * size.z;
  number_ = number;
  random_ = (options_.seed + 1) * 0x9E3779B97F4A7C15ull + number * 0xD1B54A32D192ED03ull + 1;
  const Three all{(grid.x + threadgroup.x - 1) / threadgroup.x, (grid.y + threadgroup.y - 1) / threadgroup.y,
                  (grid.z + threadgroup.z - 1) / threadgroup.z};
  for (uint32_t i = 0; i < size_; i++) {
    Fiber& fiber = fibers_[i];
    fiber.stack = stacks_ + STACK * i;
    const Three at{i % size.x, i / size.x % size.y, i / size.x / size.y};
    fiber.self = {{position.x * threadgroup.x + at.x, position.y * threadgroup.y + at.y, position.z * threadgroup.z + at.z},
                  at,
                  position,
                  size,
                  threadgroup,
                  all,
                  grid,
                  i % LANES,
                  i / LANES,
                  i,
                  (size_ + LANES - 1) / LANES};
  }
  counts.threads = std::max(counts.threads, size_);
}

void Group::shuffle(std::vector<uint32_t>& order, size_t first, size_t last) {
  for (size_t i = last - first; i > 1; i--) {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    std::swap(order[first + i - 1], order[first + random_ % i]);
  }
}

uint32_t Group::last_of(uint32_t simdgroup) const { return std::min(size_, simdgroup * LANES + LANES); }

void Group::order_lanes() {
  for (uint32_t s = 0; s < simdgroups_.size(); s++) shuffle(lane_order_, s * LANES, last_of(s));
  shuffle(simdgroup_order_, 0, simdgroup_order_.size());
}

void Group::start() {
  running = this;
  failed = false;
  live_ = size_;
  arrived_ = epoch_ = arena_bytes_ = 0;
  arena_used_ = ZONE;
  variables_.clear();
  unpoison(arena_, ARENA);
#ifdef SHIM_TSAN
  // Fresh pages: what the threadgroup before did there is no race with this one.
  mapped(ARENA, arena_);
  mapped(STACK * size_, stacks_);
#endif
  memset(arena_, 0xff, ARENA);
  poison(arena_, ARENA);
  scheduler_thread_.be_current();
  const uint32_t groups = (size_ + LANES - 1) / LANES;
  simdgroups_.assign(groups, {});
  sync_start_ = number_ * (2 + 2 * groups) % (SYNCS - 4096);
  lane_order_.resize(size_), simdgroup_order_.resize(groups);
  for (uint32_t s = 0; s < groups; s++) {
    const uint32_t first = s * LANES, last = last_of(s);
    simdgroups_[s].live = last - first;
    simdgroup_order_[s] = is_reverse(options_) ? groups - 1 - s : s;
    for (uint32_t i = first; i < last; i++) lane_order_[i] = is_reverse(options_) ? last - 1 - (i - first) : i;
  }
  if (is_random(options_)) order_lanes();
  for (uint32_t i = 0; i < size_; i++) {
    Fiber& fiber = fibers_[i];
    fiber.context.start(fiber.stack, STACK, fiber_entry);
    fiber.stack_view = {nullptr, fiber.stack, STACK};
    fiber.state = State::READY;
    fiber.kind = Meeting::NONE;
    fiber.thread_view.renew();
  }
}

void Group::resume(Fiber& fiber) {
  current = &fiber;
  scheduler_stack_.leave(fiber.stack_view, false);
  fiber.thread_view.enter();
  scheduler_.switch_to(fiber.context);
  scheduler_stack_.enter(nullptr);
}

void Group::to_scheduler() {
  Fiber& fiber = *current;
  fiber.stack_view.leave(scheduler_stack_, fiber.state == State::RETURNED);
  scheduler_thread_.enter();
  fiber.context.switch_to(scheduler_);
  fiber.stack_view.enter(nullptr);
}

void Group::main() {
  StackView().enter(&scheduler_stack_);
  Fiber& fiber = *current;
  body_(arguments_, fiber.self);
  release(&end_);
  fiber.state = State::RETURNED;
  live_--;
  simdgroups_[fiber.self.simdgroup].live--;
  to_scheduler();
  abort();
}

void Group::fail(const char* format, ...) {
  if (!failed) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, sizeof error, format, arguments);
    va_end(arguments);
  }
  failed = true;
  to_scheduler();
  abort();
}

void Group::complete(uint32_t simdgroup, void** payloads, Operation operation) {
  if (operation) operation(payloads);
  simdgroups_[simdgroup].arrived = 0;
  simdgroups_[simdgroup].epoch++;
  for (uint32_t i = simdgroup * LANES; i < last_of(simdgroup); i++)
    if (fibers_[i].state != State::RETURNED) fibers_[i].state = State::READY;
}

void Group::meet(Meeting kind, int site, Operation operation, void* payload, bool needs_all_lanes) {
  Fiber& self = *current;
  const uint32_t at = self.self.simdgroup, first = at * LANES;
  self.kind = kind, self.site = site, self.operation = operation, self.payload = payload;
  if (kind == Meeting::MATRIX) counts.matrix_products++;
  if (kind == Meeting::SIMD) counts.simd_operations++;
  if (++simdgroups_[at].arrived < simdgroups_[at].live) {
    self.state = State::IN_SIMDGROUP;
    to_scheduler();
    return;
  }
  void* payloads[LANES] = {};
  uint32_t mask = 0;
  for (uint32_t i = 0; i < last_of(at) - first; i++) {
    Fiber& other = fibers_[first + i];
    if (other.state == State::RETURNED) continue;
    const bool waits = &other == &self || other.state == State::IN_SIMDGROUP;
    if (!waits || other.kind != kind || other.site != site || other.operation != operation)
      fail("lanes of simdgroup %u parted: lane %u is at a %s (line %d), lane %u at a %s (line %d)", at, self.self.lane,
           name_of(kind), site, i, name_of(other.kind), other.site);
    payloads[i] = other.payload;
    mask |= 1u << i;
  }
  if (mask != 0xffffffffu) {
    if (needs_all_lanes) fail("%s at line %d without all lanes (mask %08x)", name_of(kind), site, mask);
    counts.partial_operations++;
  }
  complete(at, payloads, operation);
}

void Group::simdgroup_meet(int site, bool orders_memory) {
  const uint32_t at = current->self.simdgroup;
  char* place = sync(2 + 2 * at + (simdgroups_[at].epoch & 1));
  counts.simdgroup_barriers++;
  if (orders_memory) release(place);
  meet(Meeting::SIMDGROUP_BARRIER, site, nullptr, nullptr, false);
  if (orders_memory) acquire(place);
}

void Group::threadgroup_meet(int site, bool orders_memory) {
  Fiber& self = *current;
  char* place = sync(epoch_ & 1);
  self.kind = Meeting::THREADGROUP_BARRIER, self.site = site;
  counts.threadgroup_barriers++;
  if (orders_memory) release(place);
  if (live_ != size_)
    fail("threadgroup_barrier at line %d after %u of %u threads returned", site, size_ - live_, size_);
  self.state = State::IN_THREADGROUP;
  if (++arrived_ == size_) {
    for (uint32_t i = 0; i < size_; i++)
      if (fibers_[i].state != State::IN_THREADGROUP || fibers_[i].site != site)
        fail("threads wait at different threadgroup barriers: lines %d and %d", site, fibers_[i].site);
    arrived_ = 0;
    epoch_++;
    for (uint32_t i = 0; i < size_; i++) fibers_[i].state = State::READY;
    if (is_random(options_)) order_lanes();
  }
  to_scheduler();
  if (orders_memory) acquire(place);
}

void* Group::memory(int key, size_t size, size_t alignment, const char* name) {
  for (const Variable& each : variables_)
    if (each.key == key) return arena_ + each.start;
  alignment = std::max<size_t>(alignment, 16);
  const auto aligned = [&](uint32_t at) { return uint32_t((at + alignment - 1) / alignment * alignment); };
  const uint32_t start = aligned(arena_used_), bytes = aligned(arena_bytes_) + uint32_t(size);
  if (start + size + ZONE > ARENA || bytes > options_.threadgroup_limit)
    fail("threadgroup memory: %u bytes with '%s', limit %u", bytes, name, options_.threadgroup_limit);
  arena_bytes_ = bytes;
  counts.threadgroup_bytes = std::max(counts.threadgroup_bytes, bytes);
  variables_.push_back({key, start, uint32_t(size), name});
  unpoison(arena_ + start, size);
  arena_used_ = start + uint32_t(size) + ZONE;
  return arena_ + start;
}

// One turn over all lanes that can run; false where there were none.
bool Group::step() {
  bool any = false;
  for (uint32_t s : simdgroup_order_) {
    bool moved;
    do {
      moved = false;
      for (uint32_t i = s * LANES; i < last_of(s); i++) {
        Fiber& fiber = fibers_[lane_order_[i]];
        if (fiber.state != State::READY) continue;
        resume(fiber);
        if (failed) return false;
        moved = any = true;
      }
    } while (moved && !is_interleaved(options_));
  }
  return any;
}

// Lanes returned while the rest of their simdgroup waited: the operation is of those that are left.
bool Group::complete_without_the_returned() {
  for (uint32_t s = 0; s < simdgroups_.size(); s++) {
    if (!simdgroups_[s].arrived || simdgroups_[s].arrived != simdgroups_[s].live) continue;
    void* payloads[LANES] = {};
    const Fiber* one = nullptr;
    for (uint32_t i = s * LANES; i < last_of(s); i++) {
      const Fiber& fiber = fibers_[i];
      if (fiber.state == State::RETURNED) continue;
      if (!one) one = &fiber;
      if (fiber.kind != one->kind || fiber.site != one->site || fiber.operation != one->operation) return false;
      payloads[i - s * LANES] = fiber.payload;
    }
    if (one->kind == Meeting::MATRIX) return false;
    counts.partial_operations++;
    complete(s, payloads, one->operation);
    return true;
  }
  return false;
}

void Group::tell_deadlock() {
  size_t at = snprintf(error, sizeof error, "deadlock (barrier or simd operation not reached by all):");
  const Fiber* last = nullptr;
  int shown = 0;
  for (uint32_t i = 0; i < size_ && shown < 6 && at < 400; i++) {
    const Fiber& fiber = fibers_[i];
    if (last && last->state == fiber.state && last->site == fiber.site) continue;
    at += snprintf(error + at, sizeof error - at, " [simdgroup %u lane %u: %s %s line %d]", fiber.self.simdgroup,
                   fiber.self.lane, fiber.state == State::RETURNED ? "returned, last at" : "waits at",
                   name_of(fiber.kind), fiber.site);
    last = &fiber, shown++;
  }
  failed = true;
}

bool Group::zones_intact() {
#ifndef SHIM_ASAN  // which faults at the access
  for (const Variable& each : variables_)
    for (uint32_t i = 0; i < ZONE; i++)
      if (static_cast<unsigned char>(arena_[each.start + each.size + i]) != 0xff) {
        snprintf(error, sizeof error, "write past the end of threadgroup variable '%s'", each.name);
        return false;
      }
#endif
  return true;
}

bool Group::run() {
  start();
  while (live_) {
    if (step() || (!failed && complete_without_the_returned())) continue;
    if (!failed) tell_deadlock();
    return false;
  }
  return zones_intact();
}

void Group::finish() {
  acquire(&end_);
  running = nullptr;
}

bool Group::owns(const void* at) const { return at >= arena_ && at < arena_ + ARENA; }
bool Group::owns_stack(const void* at) const { return at >= stacks_ && at < stacks_ + STACK * capacity_; }

void meet(Meeting kind, int site, Operation operation, void* payload, bool needs_all_lanes) {
  running->meet(kind, site, operation, payload, needs_all_lanes);
}
void simdgroup_meet(int site, bool orders_memory) { running->simdgroup_meet(site, orders_memory); }
void threadgroup_meet(int site, bool orders_memory) { running->threadgroup_meet(site, orders_memory); }
void* threadgroup_memory(int key, size_t size, size_t alignment, const char* name) {
  return running->memory(key, size, alignment, name);
}
uint32_t lane() { return running->current->self.lane; }
uint32_t threadgroup_number() {
  if (!running) return 0;
  const Self& self = running->current->self;
  const Three at = self.threadgroup_position, all = self.threadgroups;
  return at.x + all.x * (at.y + all.y * at.z);
}
bool is_threadgroup_memory(const void* at) { return running && running->owns(at); }

}  // namespace shim
