// Counts what a kernel reads and writes, by buffer. The kernel is compiled as for TSan and linked with these hooks.
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime.hpp"

namespace shim {
namespace {

struct Counted {
  char *start, *end;
  std::atomic<uint64_t> loaded{0}, stored{0}, by_threadgroup{0};
  std::vector<uint8_t> seen;
  std::vector<uint32_t> last;  // the threadgroup, from 1, that read a byte last

  Counted(char* from, size_t size) : start(from), end(from + size), seen(size), last(size) {}
};
std::vector<std::unique_ptr<Counted>> counted;
std::atomic<uint64_t> threadgroup_loaded{0}, threadgroup_stored{0};

void read_bytes(Counted& buffer, const char* at, size_t size) {
  buffer.loaded += size;
  const uint32_t group = threadgroup_number() + 1;
  const size_t first = at - buffer.start;
  for (size_t i = first; i < first + size && i < buffer.seen.size(); i++) {
    buffer.seen[i] = 1;
    if (buffer.last[i] != group) buffer.last[i] = group, buffer.by_threadgroup++;
  }
}

void access(const void* address, size_t size, bool write) {
  const char* at = static_cast<const char*>(address);
  for (auto& each : counted)
    if (at >= each->start && at < each->end) {
      if (write) each->stored += size;
      else read_bytes(*each, at, size);
      return;
    }
  if (is_threadgroup_memory(at)) (write ? threadgroup_stored : threadgroup_loaded) += size;
}

}  // namespace
}  // namespace shim

extern "C" {

void traffic_clear() {
  shim::counted.clear();
  shim::threadgroup_loaded = shim::threadgroup_stored = 0;
}
void traffic_add(void* start, size_t size) {
  shim::counted.push_back(std::make_unique<shim::Counted>(static_cast<char*>(start), size));
}
// Loaded, stored, different bytes loaded, bytes loaded first by a threadgroup.
void traffic_of(int buffer, uint64_t* out) {
  const shim::Counted& found = *shim::counted[buffer];
  out[0] = found.loaded, out[1] = found.stored, out[2] = 0, out[3] = found.by_threadgroup;
  for (uint8_t each : found.seen) out[2] += each;
}
void traffic_of_threadgroup_memory(uint64_t* out) {
  out[0] = shim::threadgroup_loaded, out[1] = shim::threadgroup_stored;
}

#define HOOKS(n)                                                              \
  void __tsan_read##n(void* at) { shim::access(at, n, false); }               \
  void __tsan_write##n(void* at) { shim::access(at, n, true); }               \
  void __tsan_unaligned_read##n(void* at) { shim::access(at, n, false); }     \
  void __tsan_unaligned_write##n(void* at) { shim::access(at, n, true); }     \
  void __tsan_volatile_read##n(void* at) { shim::access(at, n, false); }      \
  void __tsan_volatile_write##n(void* at) { shim::access(at, n, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
#undef HOOKS
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memset(void* to, int value, unsigned long size) {
  shim::access(to, size, true);
  return memset(to, value, size);
}
void* __tsan_memcpy(void* to, const void* from, unsigned long size) {
  shim::access(from, size, false);
  shim::access(to, size, true);
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, unsigned long size) {
  shim::access(from, size, false);
  shim::access(to, size, true);
  return memmove(to, from, size);
}
void __tsan_read_range(void* at, unsigned long size) { shim::access(at, size, false); }
void __tsan_write_range(void* at, unsigned long size) { shim::access(at, size, true); }
}
