// A program around one kernel, for the sanitizers: reads a job from a file, launches, writes counts and outputs.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "runtime.hpp"

extern "C" int shim_entry(void** buffers, const uint32_t* grid, const uint32_t* threadgroup, const shim::Options*,
                          shim::Counts*, char* error, size_t room);

namespace {

struct Buffer {
  uint64_t size, written;
  void* data;
};

void read_all(void* at, size_t size, FILE* file) {
  if (size && fread(at, 1, size, file) != size) exit(9);
}

}  // namespace

int main(int, char** paths) {
  FILE* file = fopen(paths[1], "rb");
  if (!file) return 9;
  uint32_t head[5], shape[6];
  read_all(head, sizeof head, file);
  read_all(shape, sizeof shape, file);
  const shim::Options options{int(head[1]), head[2], int(head[3]), head[4]};
  std::vector<Buffer> buffers(head[0]);
  std::vector<void*> data;
  for (Buffer& each : buffers) {
    read_all(&each.size, 8, file);
    read_all(&each.written, 8, file);
    each.data = malloc(each.size ? each.size : 1);
    read_all(each.data, each.size, file);
    data.push_back(each.data);
  }
  fclose(file);
  shim::Counts counts{};
  char error[512] = "";
  const int failed = shim_entry(data.data(), shape, shape + 3, &options, &counts, error, sizeof error);
  if (failed) fprintf(stderr, "FAULT %s\n", error);
  file = fopen(paths[2], "wb");
  fwrite(&counts, sizeof counts, 1, file);
  for (const Buffer& each : buffers)
    if (each.written) fwrite(each.data, 1, each.size, file);
  fclose(file);
  return failed ? 3 : 0;
}
