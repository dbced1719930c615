// Metal's address spaces and vectors as clang's own: nothing of this runs. For a GPU that clang knows, SIMD-group
// functions and products are opaque instructions, so that registers are counted as if they were there. There a
// pointer without address space takes any pointer; for any other target it takes none of another space.
#pragma once
#define GATE_INLINE inline __attribute__((always_inline))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned long size_t;
typedef _Float16 half;
typedef half float16_t;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;

#define GATE_DEVICE __attribute__((address_space(1)))
#define GATE_THREADGROUP __attribute__((address_space(3)))
#define GATE_CONSTANT __attribute__((address_space(4)))

#ifdef __AMDGCN__
#define GATE_OPAQUE(to, ...) asm volatile(__VA_ARGS__)
GATE_INLINE uint gate_thread() { return __builtin_amdgcn_workitem_id_x(); }
GATE_INLINE uint gate_uniform(uint x) { return __builtin_amdgcn_readfirstlane(x); }
GATE_INLINE uint gate_lane() { return __builtin_amdgcn_mbcnt_lo(~0u, 0); }
GATE_INLINE uint gate_group(int axis) {
  return axis == 0 ? __builtin_amdgcn_workgroup_id_x()
                   : axis == 1 ? __builtin_amdgcn_workgroup_id_y() : __builtin_amdgcn_workgroup_id_z();
}
GATE_INLINE void gate_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
GATE_INLINE void gate_wave_barrier() { __builtin_amdgcn_wave_barrier(); }
#else
#define GATE_OPAQUE(to, ...) to = {}
uint gate_thread();
uint gate_uniform(uint);
uint gate_lane();
uint gate_group(int);
void gate_barrier();
void gate_wave_barrier();
#endif

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
#define GATE_NAMES(t)        \
  typedef vec<t, 2> t##2;    \
  typedef vec<t, 3> t##3;    \
  typedef vec<t, 4> t##4;
GATE_NAMES(float) GATE_NAMES(half) GATE_NAMES(bfloat) GATE_NAMES(int) GATE_NAMES(uint) GATE_NAMES(short)
GATE_NAMES(ushort) GATE_NAMES(char) GATE_NAMES(uchar) GATE_NAMES(long) GATE_NAMES(ulong)
template <class V, class... A> V gate_vector(A... a) { return V{(decltype(V{}[0] + 0))a...}; }

template <class T, class U> inline constexpr bool is_same_v = __is_same(T, U);
template <bool B, class T, class F> struct gate_choice { using type = T; };
template <class T, class F> struct gate_choice<false, T, F> { using type = F; };
template <bool B, class T, class F> using conditional_t = typename gate_choice<B, T, F>::type;
template <class T> struct numeric_limits;
template <class T, class U> GATE_INLINE T as_type(U x) { return __builtin_bit_cast(T, x); }

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
GATE_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
GATE_INLINE void threadgroup_barrier(mem_flags) { gate_barrier(); }
GATE_INLINE void simdgroup_barrier(mem_flags) { gate_wave_barrier(); }

#define GATE_ONE(name)                                   \
  GATE_INLINE float name(float x) {                      \
    float made;                                          \
    GATE_OPAQUE(made, "; " #name " %0, %1" : "=v"(made) : "v"(x));     \
    return made;                                         \
  }                                                      \
  GATE_INLINE half name(half x) { return (half)name((float)x); }
#define GATE_MATHEMATICS                                                                                   \
  GATE_ONE(exp) GATE_ONE(exp2) GATE_ONE(log) GATE_ONE(log2) GATE_ONE(sqrt) GATE_ONE(rsqrt) GATE_ONE(tanh)   \
  GATE_ONE(floor) GATE_ONE(ceil) GATE_ONE(round) GATE_ONE(rint) GATE_ONE(sin) GATE_ONE(cos)
GATE_MATHEMATICS GATE_ONE(abs)
namespace fast { GATE_MATHEMATICS }
namespace precise { GATE_MATHEMATICS }

#define GATE_ORDER(T)                                           \
  GATE_INLINE T max(T a, T b) { return a > b ? a : b; }         \
  GATE_INLINE T min(T a, T b) { return a < b ? a : b; }         \
  GATE_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }
GATE_ORDER(float) GATE_ORDER(half) GATE_ORDER(int) GATE_ORDER(uint) GATE_ORDER(long) GATE_ORDER(ulong)
GATE_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
GATE_INLINE half fma(half a, half b, half c) { return (half)__builtin_fmaf(a, b, c); }
template <class T> GATE_INLINE T select(T a, T b, bool second) { return second ? b : a; }

#define GATE_REDUCTION(name)                                               \
  template <class T> GATE_INLINE T name(T x) {                             \
    float made;                                                            \
    GATE_OPAQUE(made, "; " #name " %0, %1" : "=v"(made) : "v"((float)x));       \
    return (T)made;                                                        \
  }
GATE_REDUCTION(simd_sum) GATE_REDUCTION(simd_max) GATE_REDUCTION(simd_min) GATE_REDUCTION(simd_broadcast_first)
GATE_REDUCTION(simd_any) GATE_REDUCTION(simd_all)
#define GATE_SHUFFLE(name)                                                                      \
  template <class T> GATE_INLINE T name(T x, ushort by) {                                       \
    float made;                                                                                 \
    GATE_OPAQUE(made, "; " #name " %0, %1, %2" : "=v"(made) : "v"((float)x), "v"((uint)by));         \
    return (T)made;                                                                             \
  }
GATE_SHUFFLE(simd_broadcast) GATE_SHUFFLE(simd_shuffle) GATE_SHUFFLE(simd_shuffle_xor)
GATE_SHUFFLE(simd_shuffle_down) GATE_SHUFFLE(simd_shuffle_up)

template <class T, int R, int C> struct simdgroup_matrix {
  vec<T, 2> elements;
  GATE_INLINE simdgroup_matrix() {}
  GATE_INLINE explicit simdgroup_matrix(T x) { elements = x; }
  GATE_INLINE vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
template <class T, int R, int C> GATE_INLINE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, R, C> made;
  made.elements = x;
  return made;
}
GATE_INLINE uint gate_row(uint lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
GATE_INLINE uint gate_column(uint lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }
#define GATE_MOVES(space)                                                                                      \
  template <class T>                                                                                           \
  GATE_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const space T* from, ulong row_elements = 8,   \
                                  ulong2 origin = 0, bool transposed = false) {                                \
    const uint r = gate_row(gate_lane()), c = gate_column(gate_lane());                                        \
    from += origin.y * row_elements + origin.x;                                                                \
    m.elements[0] = transposed ? from[c * row_elements + r] : from[r * row_elements + c];                      \
    m.elements[1] = transposed ? from[(c + 1) * row_elements + r] : from[r * row_elements + c + 1];            \
  }                                                                                                            \
  template <class T>                                                                                           \
  GATE_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> m, space T* to, ulong row_elements = 8,           \
                                   ulong2 origin = 0, bool transposed = false) {                               \
    const uint r = gate_row(gate_lane()), c = gate_column(gate_lane());                                        \
    to += origin.y * row_elements + origin.x;                                                                  \
    to[transposed ? c * row_elements + r : r * row_elements + c] = m.elements[0];                              \
    to[transposed ? (c + 1) * row_elements + r : r * row_elements + c + 1] = m.elements[1];                    \
  }
GATE_MOVES(GATE_DEVICE) GATE_MOVES(GATE_THREADGROUP)
template <class D, class A, class B, class C>
GATE_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& to, simdgroup_matrix<A, 8, 8> left,
                                               simdgroup_matrix<B, 8, 8> right, simdgroup_matrix<C, 8, 8> sum) {
  vec<D, 2> made = sum.elements;
  GATE_OPAQUE(made, "; product %0 %1 %2" : "+v"(made) : "v"(left.elements), "v"(right.elements));
  to.elements = made;
}
template <class D, class A, class B>
GATE_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& to, simdgroup_matrix<A, 8, 8> left,
                                    simdgroup_matrix<B, 8, 8> right) {
  simdgroup_multiply_accumulate(to, left, right, simdgroup_matrix<D, 8, 8>(D(0)));
}

}  // namespace metal

using namespace metal;
#define METAL_FUNC GATE_INLINE
#define device GATE_DEVICE
#define constant GATE_CONSTANT
#define threadgroup GATE_THREADGROUP
#define thread
