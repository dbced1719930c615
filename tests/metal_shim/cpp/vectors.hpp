// Metal's vectors, with its sizes and alignments. Of the swizzles only single elements.
#pragma once
#include "types.hpp"

namespace metal {

template <class T, int N> struct vec;

template <class T> struct alignas(sizeof(T) * 2) vec<T, 2> {
  union {
    struct { T x, y; };
    struct { T r, g; };
    T v[2];
  };
  vec() = default;
  constexpr explicit vec(T a) : x(a), y(a) {}
  constexpr vec(T a, T b) : x(a), y(b) {}
  template <class U> explicit vec(const vec<U, 2>& o) : x(T(o.x)), y(T(o.y)) {}
  T& operator[](int i) { return v[i]; }
  const T& operator[](int i) const { return v[i]; }
};

template <class T> struct alignas(sizeof(T) * 4) vec<T, 3> {
  union {
    struct { T x, y, z; };
    struct { T r, g, b; };
    T v[3];
  };
  vec() = default;
  constexpr explicit vec(T a) : x(a), y(a), z(a) {}
  constexpr vec(T a, T b, T c) : x(a), y(b), z(c) {}
  template <class U> explicit vec(const vec<U, 3>& o) : x(T(o.x)), y(T(o.y)), z(T(o.z)) {}
  T& operator[](int i) { return v[i]; }
  const T& operator[](int i) const { return v[i]; }
};

template <class T> struct alignas(sizeof(T) * 4) vec<T, 4> {
  union {
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    T v[4];
  };
  vec() = default;
  constexpr explicit vec(T s) : x(s), y(s), z(s), w(s) {}
  constexpr vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  constexpr vec(vec<T, 2> p, vec<T, 2> q) : x(p.x), y(p.y), z(q.x), w(q.y) {}
  constexpr vec(vec<T, 3> p, T q) : x(p.x), y(p.y), z(p.z), w(q) {}
  template <class U> explicit vec(const vec<U, 4>& o) : x(T(o.x)), y(T(o.y)), z(T(o.z)), w(T(o.w)) {}
  T& operator[](int i) { return v[i]; }
  const T& operator[](int i) const { return v[i]; }
};

#define SHIM_EACH(expression) \
  {                           \
    for (int i = 0; i < N; ++i) a.v[i] = T(expression); \
    return a;                 \
  }
#define SHIM_OPERATOR(op)                                                                                          \
  template <class T, int N> SHIM_INLINE vec<T, N> operator op(vec<T, N> a, vec<T, N> b) SHIM_EACH(a.v[i] op b.v[i]) \
  template <class T, int N> SHIM_INLINE vec<T, N> operator op(vec<T, N> a, shim::plain<T> b) SHIM_EACH(a.v[i] op b) \
  template <class T, int N> SHIM_INLINE vec<T, N> operator op(shim::plain<T> b, vec<T, N> a) SHIM_EACH(b op a.v[i]) \
  template <class T, int N>                                                                                        \
  SHIM_INLINE vec<T, N>& operator op##=(vec<T, N>& a, vec<T, N> b) SHIM_EACH(a.v[i] op b.v[i])                      \
  template <class T, int N>                                                                                        \
  SHIM_INLINE vec<T, N>& operator op##=(vec<T, N>& a, shim::plain<T> b) SHIM_EACH(a.v[i] op b)
SHIM_OPERATOR(+) SHIM_OPERATOR(-) SHIM_OPERATOR(*) SHIM_OPERATOR(/) SHIM_OPERATOR(%)
SHIM_OPERATOR(&) SHIM_OPERATOR(|) SHIM_OPERATOR(^) SHIM_OPERATOR(<<) SHIM_OPERATOR(>>)
#undef SHIM_OPERATOR
template <class T, int N> SHIM_INLINE vec<T, N> operator-(vec<T, N> a) SHIM_EACH(-a.v[i])
template <class T, int N> SHIM_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a.v[0] * b.v[0];
  for (int i = 1; i < N; ++i) sum = T(sum + a.v[i] * b.v[i]);
  return sum;
}

#define SHIM_NAMES(t, n)    \
  typedef vec<t, 2> n##2;   \
  typedef vec<t, 3> n##3;   \
  typedef vec<t, 4> n##4;
SHIM_NAMES(float, float) SHIM_NAMES(half, half) SHIM_NAMES(bfloat, bfloat) SHIM_NAMES(bool, bool)
SHIM_NAMES(int, int) SHIM_NAMES(short, short) SHIM_NAMES(char, char) SHIM_NAMES(long, long)
SHIM_NAMES(uint, uint) SHIM_NAMES(ushort, ushort) SHIM_NAMES(uchar, uchar) SHIM_NAMES(ulong, ulong)
#undef SHIM_NAMES

template <class T, int N> struct packed_vec {
  T v[N];
  T& operator[](int i) { return v[i]; }
  operator vec<T, N>() const {
    vec<T, N> made;
    for (int i = 0; i < N; ++i) made.v[i] = v[i];
    return made;
  }
};

}  // namespace metal
