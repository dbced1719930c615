// Rows of a small matrix: halves, or 4- and 8-bit codes with a scale and a bias for each group.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace chain {

template <typename T>
__device__ __forceinline__ float half_of(unsigned word, int which) {
  const unsigned short bits = (unsigned short)(word >> (16 * which));
  return float(*reinterpret_cast<const T*>(&bits));
}

// Number `i` of a row that begins at `words`, without scale and bias.
template <typename T, int BITS>
__device__ __forceinline__ float code(const unsigned* words, int i) {
  if constexpr (BITS == 16) return half_of<T>(words[i / 2], i % 2);
  constexpr int EACH = 32 / BITS;
  return float((words[i / EACH] >> (BITS * (i % EACH))) & ((1u << (BITS % 32)) - 1u));
}

__device__ __forceinline__ bool better(float value, int index, float best, int best_index) {
  return value > best || (value == best && index < best_index);
}

}  // namespace chain
