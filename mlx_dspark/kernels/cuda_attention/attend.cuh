// Attention of few queries over many keys, on tensor cores (mma.m16n8k16, float32 sums).
//
// A block holds queries that share a key-value head and takes a range of its keys, by tiles of 16, each with an
// online softmax (Milakov & Gimelshein 2018; split over keys as in flash decoding). A tile comes into shared
// memory some stages before it is used and is read once by each warp of a team; a team meets no other until
// its last tile. Neither dims nor keys are shuffled: of a key, lane c of a quad takes the 8 dims from 8 * (4 * j + c)
// on, so that the contraction merely runs in another order; of a value, group g takes those from 8 * (8 * h + g) on.
namespace few_queries {

using namespace lanes;

constexpr int TILE = 16, PIECES = D / 8, HALF_STAGE = TILE * PIECES, STAGE = 2 * HALF_STAGE;

// Where 16 bytes of key `key` of a tile lie, those of dims from 8 * (8 * eight + one) on: such that lanes that read at
// once, of keys and of values, read from different banks.
__device__ __forceinline__ int place_of(int key, int eight, int one) {
  return key * PIECES + 8 * eight + (one ^ (key & 6) ^ ((key & 1) << 2));
}

// Eight numbers of 16 bits from `from` on, `stride` apart.
__device__ __forceinline__ uint4 eight(const unsigned short* from, long long stride, bool together) {
  if (together) return *reinterpret_cast<const uint4*>(from);
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = from[2 * i * stride] | unsigned(from[(2 * i + 1) * stride]) << 16;
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Keys or values of one head: the first number, and how far apart keys and dims are.
struct Rows {
  const unsigned short* first;
  int each, dim;
  bool together;

  __device__ __forceinline__ Rows(const void* all, long long from, long long each, long long dim)
      : first((const unsigned short*)all + from), each(int(each)), dim(int(dim)),
        together(dim == 1 && each % 8 == 0 && reinterpret_cast<unsigned long long>(first) % 16 == 0) {}

  // Copies keys [begin, begin + TILE) by COUNT threads, zeros from `length` on.
  template <int COUNT>
  __device__ __forceinline__ void copy(uint4* to, int begin, int length, int thread) const {
    constexpr int STEP = COUNT / PIECES;
    const int piece = thread % PIECES, key = thread / PIECES;
    const unsigned short* const from = first + (long long)(begin + key) * each + 8LL * piece * dim;
    auto place = [&](int i) { return to + place_of(i * STEP + key, piece / 8, piece % 8); };
    if (together) {
#pragma unroll
      for (int i = 0; i < TILE / STEP; i++)
        fetch<16>(place(i), from + (long long)i * STEP * each, begin + i * STEP + key < length);
    } else {
#pragma unroll 1
      for (int i = 0; i < TILE / STEP; i++)
        *place(i) = begin + i * STEP + key < length ? eight(from + (long long)i * STEP * each, dim, false)
                                                    : make_uint4(0, 0, 0, 0);
    }
  }
};

__device__ __forceinline__ float over_quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float over_quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace few_queries
