// Metal's mathematics for float and half; bfloat arguments widen to float, as in Metal.
#pragma once
#include "vectors.hpp"

namespace metal {

#define SHIM_ONE(name, expression)                                                     \
  SHIM_INLINE float name(float x) { return expression; }                               \
  SHIM_INLINE half name(half h) {                                                      \
    const float x = (float)h;                                                          \
    return (half)(expression);                                                         \
  }                                                                                    \
  template <class T, int N> SHIM_INLINE vec<T, N> name(vec<T, N> a) SHIM_EACH(name(a.v[i]))
#define SHIM_TWO(name, expression)                                                     \
  SHIM_INLINE float name(float x, float y) { return expression; }                      \
  SHIM_INLINE half name(half a, half b) {                                              \
    const float x = (float)a, y = (float)b;                                            \
    return (half)(expression);                                                         \
  }
#define SHIM_MATHEMATICS                                                               \
  SHIM_ONE(exp, __builtin_expf(x)) SHIM_ONE(exp2, __builtin_exp2f(x))                  \
  SHIM_ONE(exp10, __builtin_powf(10.f, x))                                             \
  SHIM_ONE(log, __builtin_logf(x)) SHIM_ONE(log2, __builtin_log2f(x))                  \
  SHIM_ONE(log10, __builtin_log10f(x))                                                 \
  SHIM_ONE(sqrt, __builtin_sqrtf(x)) SHIM_ONE(rsqrt, 1.0f / __builtin_sqrtf(x))        \
  SHIM_ONE(sin, __builtin_sinf(x)) SHIM_ONE(cos, __builtin_cosf(x))                    \
  SHIM_ONE(tan, __builtin_tanf(x)) SHIM_ONE(tanh, __builtin_tanhf(x))                  \
  SHIM_ONE(sinh, __builtin_sinhf(x)) SHIM_ONE(cosh, __builtin_coshf(x))                \
  SHIM_ONE(atan, __builtin_atanf(x)) SHIM_ONE(asin, __builtin_asinf(x))                \
  SHIM_ONE(acos, __builtin_acosf(x)) SHIM_ONE(floor, __builtin_floorf(x))              \
  SHIM_ONE(ceil, __builtin_ceilf(x)) SHIM_ONE(trunc, __builtin_truncf(x))              \
  SHIM_ONE(round, __builtin_roundf(x)) SHIM_ONE(rint, __builtin_rintf(x))              \
  SHIM_TWO(pow, __builtin_powf(x, y)) SHIM_TWO(powr, __builtin_powf(x, y))             \
  SHIM_TWO(fmod, __builtin_fmodf(x, y)) SHIM_TWO(atan2, __builtin_atan2f(x, y))        \
  SHIM_TWO(divide, x / y)
SHIM_MATHEMATICS
SHIM_ONE(fabs, __builtin_fabsf(x))
namespace fast { SHIM_MATHEMATICS }
namespace precise { SHIM_MATHEMATICS }
#undef SHIM_MATHEMATICS
#undef SHIM_ONE
#undef SHIM_TWO

SHIM_INLINE float abs(float x) { return __builtin_fabsf(x); }
SHIM_INLINE half abs(half x) { return (half)__builtin_fabsf((float)x); }
SHIM_INLINE int abs(int x) { return x < 0 ? -x : x; }
SHIM_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SHIM_INLINE half fma(half a, half b, half c) { return (half)__builtin_fmaf((float)a, (float)b, (float)c); }
SHIM_INLINE float mix(float a, float b, float t) { return a + (b - a) * t; }

#define SHIM_ORDER(t, larger, smaller)                                 \
  SHIM_INLINE t max(t a, t b) { return larger; }                       \
  SHIM_INLINE t min(t a, t b) { return smaller; }                      \
  SHIM_INLINE t clamp(t x, t low, t high) { return min(max(x, low), high); }
#define SHIM_INTEGERS(t) SHIM_ORDER(t, a > b ? a : b, a < b ? a : b)
SHIM_INTEGERS(int) SHIM_INTEGERS(uint) SHIM_INTEGERS(short) SHIM_INTEGERS(ushort)
SHIM_INTEGERS(long) SHIM_INTEGERS(ulong) SHIM_INTEGERS(char) SHIM_INTEGERS(uchar)
// A NaN stays, so that nothing unwritten is lost in a maximum.
#define SHIM_FLOATS(t)                                                                                    \
  SHIM_ORDER(t, (a != a ? a : b != b ? b : a > b ? a : b), (a != a ? a : b != b ? b : a < b ? a : b))     \
  SHIM_INLINE t fmax(t a, t b) { return max(a, b); }                                                      \
  SHIM_INLINE t fmin(t a, t b) { return min(a, b); }
SHIM_FLOATS(float) SHIM_FLOATS(half)
#undef SHIM_FLOATS
#undef SHIM_INTEGERS
#undef SHIM_ORDER
template <class T, int N> SHIM_INLINE vec<T, N> max(vec<T, N> a, vec<T, N> b) SHIM_EACH(max(a.v[i], b.v[i]))
template <class T, int N> SHIM_INLINE vec<T, N> min(vec<T, N> a, vec<T, N> b) SHIM_EACH(min(a.v[i], b.v[i]))

template <class T> SHIM_INLINE T select(T a, T b, bool second) { return second ? b : a; }
SHIM_INLINE bool isnan(float x) { return x != x; }
SHIM_INLINE bool isinf(float x) { return __builtin_isinf(x); }
SHIM_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }
SHIM_INLINE uint popcount(uint x) { return __builtin_popcount(x); }
SHIM_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
SHIM_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
SHIM_INLINE uint extract_bits(uint x, uint offset, uint bits) {
  return bits >= 32 ? x >> offset : (x >> offset) & ((1u << bits) - 1);
}

}  // namespace metal

#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#ifndef NAN
#define NAN __builtin_nanf("")
#endif
