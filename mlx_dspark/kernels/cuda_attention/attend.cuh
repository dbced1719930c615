// Attention of few queries over many keys, on tensor cores (mma.m16n8k16, float32 sums).
//
// A block holds 16 of the queries that share a key-value head and a range of keys. Its warps take tiles of 16
// keys in turn, each with an online softmax of its own (Milakov & Gimelshein 2018; split over keys as in
// flash decoding), and are summed in a fixed order at the end. Nothing is staged in shared memory: within a
// quad of lanes, lane c holds the dims [c * D / 4, (c + 1) * D / 4) of a key, so that keys come in by 16 bytes
// and the contraction merely runs in another order; a lane holds D / 8 neighbouring dims of a value likewise.
namespace few_queries {

// N numbers of 16 bits from `from` on, `stride` apart, as pairs.
template <int N>
__device__ __forceinline__ void load(unsigned* to, const unsigned short* from, long long stride) {
  if (stride == 1 && (reinterpret_cast<unsigned long long>(from) & 15) == 0) {
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      to[i] = from[2 * i * stride] | unsigned(from[(2 * i + 1) * stride]) << 16;
  }
}

__device__ __forceinline__ float over_quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float over_quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace few_queries
