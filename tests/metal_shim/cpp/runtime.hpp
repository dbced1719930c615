// What a kernel's translation unit and the runtime share.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shim {

struct Three {
  uint32_t x, y, z;
};

// What Metal's attributes tell a thread.
struct Self {
  Three position_in_grid, position_in_threadgroup, threadgroup_position, threadgroup_size, full_threadgroup_size,
      threadgroups, grid;
  uint32_t lane, simdgroup, thread_index, simdgroups;
};

enum class Meeting : int { NONE, SIMD, MATRIX, SIMDGROUP_BARRIER, THREADGROUP_BARRIER };

enum class Schedule : int { FORWARD, REVERSE, RANDOM, INTERLEAVED };

struct Options {
  int schedule;
  uint64_t seed;
  int workers;
  uint32_t threadgroup_limit;
};

struct Counts {
  uint64_t matrix_products, simd_operations, simdgroup_barriers, threadgroup_barriers, partial_operations;
  uint32_t threadgroup_bytes, threads;
};

using Body = void (*)(void* arguments, const Self&);

// Computes a SIMD-group operation for all lanes at once; a lane that has returned has no payload.
using Operation = void (*)(void** payloads);

// The lanes of a SIMD-group meet; `site` is the source line, which must be the same for all.
void meet(Meeting kind, int site, Operation operation, void* payload, bool needs_all_lanes);
void simdgroup_meet(int site, bool orders_memory);
void threadgroup_meet(int site, bool orders_memory);
void* threadgroup_memory(int key, size_t size, size_t alignment, const char* name);
uint32_t lane();

int launch(Three grid, Three threadgroup, const Options&, Body, void* arguments, Counts*, char* error, size_t room);

// For counting traffic: the number of the running threadgroup, and whether an address is of its memory.
uint32_t threadgroup_number();
bool is_threadgroup_memory(const void*);

}  // namespace shim

extern "C" {
void shim_clear_buffers();
void shim_add_buffer(const char* name, void* start, size_t size);
}
