// Codes become halves inside a word, two at a time, plus a known offset that the sums of x take away again.
namespace small_m {

using namespace lanes;

template <int BITS, typename T>
struct Codes;

// Eight codes of one word: pair i holds codes i and i + 4.
template <>
struct Codes<4, __nv_bfloat16> {
  static constexpr float OFFSET = 128.f;
  __device__ __forceinline__ static void pairs(unsigned* out, const unsigned* words) {
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = masked(words[0] >> (4 * i), 0x000f000fu, 0x43004300u);
  }
};

template <>
struct Codes<4, __half> {
  static constexpr float OFFSET = 64.f;
  __device__ __forceinline__ static void pairs(unsigned* out, const unsigned* words) {
    out[0] = masked(words[0] << 4, 0x00f000f0u, 0x54005400u);
#pragma unroll
    for (int i = 1; i < 4; i++) out[i] = masked(words[0] >> (4 * i - 4), 0x00f000f0u, 0x54005400u);
  }
};

// Eight codes of two words: pair i holds codes 2 * i and 2 * i + 1.
template <>
struct Codes<8, __half> {
  static constexpr float OFFSET = 1024.f;
  __device__ __forceinline__ static void pairs(unsigned* out, const unsigned* words) {
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = __byte_perm(words[i / 2], 0x64646464u, i & 1 ? 0x4342 : 0x4140);
  }
};

// A bfloat16 has no room for an offset beside eight bits: they go through float32.
template <>
struct Codes<8, __nv_bfloat16> {
  static constexpr float OFFSET = 0.f;
  __device__ __forceinline__ static unsigned wide(unsigned word, int which) {
    const unsigned raised = __byte_perm(word, 0x4b000000u, 0x7440 + which);
    return __float_as_uint(__uint_as_float(raised) - 8388608.f);
  }
  __device__ __forceinline__ static void pairs(unsigned* out, const unsigned* words) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      out[i] = __byte_perm(wide(words[i / 2], 2 * (i & 1)), wide(words[i / 2], 2 * (i & 1) + 1), 0x7632);
  }
};

// Eight neighbours of x in the order of the codes' pairs.
template <int BITS>
__device__ __forceinline__ void ordered(unsigned* out, uint4 x) {
  if constexpr (BITS == 4) {
    out[0] = __byte_perm(x.x, x.z, 0x5410), out[1] = __byte_perm(x.x, x.z, 0x7632);
    out[2] = __byte_perm(x.y, x.w, 0x5410), out[3] = __byte_perm(x.y, x.w, 0x7632);
  } else {
    out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
  }
}

template <typename T>
__device__ __forceinline__ float half_of(unsigned word, int which) {
  const unsigned short bits = (unsigned short)(word >> (16 * which));
  return float(*reinterpret_cast<const T*>(&bits));
}

template <typename T>
__device__ __forceinline__ unsigned two_ones();
template <>
__device__ __forceinline__ unsigned two_ones<__half>() {
  return 0x3c003c00u;
}
template <>
__device__ __forceinline__ unsigned two_ones<__nv_bfloat16>() {
  return 0x3f803f80u;
}

}  // namespace small_m
