// Metal's scalars, traits and limits.
#pragma once
#include <cstdint>
#include <limits>
#include <type_traits>

#define SHIM_INLINE inline __attribute__((always_inline))
#define METAL_FUNC inline __attribute__((always_inline))

typedef uint8_t uchar;
typedef uint16_t ushort;
typedef uint32_t uint;
typedef uint64_t ulong;
typedef _Float16 half;
typedef half float16_t;

// Conversion to float is implicit; every conversion to bfloat is explicit, as in Metal.
struct bfloat {
  uint16_t bits;

  bfloat() = default;
  SHIM_INLINE explicit bfloat(float x) : bits(rounded(x)) {}
  template <class I, class = std::enable_if_t<std::is_integral_v<I> || std::is_same_v<I, half> || std::is_same_v<I, double>>>
  SHIM_INLINE explicit bfloat(I x) : bits(rounded(static_cast<float>(x))) {}
  SHIM_INLINE operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    __builtin_memcpy(&x, &wide, 4);
    return x;
  }
  static SHIM_INLINE uint16_t rounded(float x) {
    uint32_t wide;
    __builtin_memcpy(&wide, &x, 4);
    if ((wide & 0x7fffffff) > 0x7f800000) return 0x7fc0 | (wide >> 16);
    return (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
};
#define SHIM_OPERATOR(op)                                                                       \
  SHIM_INLINE bfloat operator op(bfloat a, bfloat b) { return bfloat((float)a op (float)b); }   \
  SHIM_INLINE bfloat& operator op##=(bfloat& a, bfloat b) { return a = bfloat((float)a op (float)b); }
SHIM_OPERATOR(+) SHIM_OPERATOR(-) SHIM_OPERATOR(*) SHIM_OPERATOR(/)
#undef SHIM_OPERATOR
SHIM_INLINE bfloat operator-(bfloat a) { return bfloat(-(float)a); }
typedef bfloat bfloat16_t;

namespace metal {

using ::bfloat;
using ::half;
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;

using std::bool_constant;
using std::decay_t;
using std::false_type;
using std::integral_constant;
using std::is_convertible_v;
using std::remove_cv_t;
using std::remove_reference_t;
using std::true_type;
template <class T, class U> using is_same = std::is_same<T, U>;
template <class T, class U> inline constexpr bool is_same_v = std::is_same_v<T, U>;
template <class T> using remove_addrspace_t = std::remove_cv_t<T>;
template <bool B, class T = void> using enable_if_t = std::enable_if_t<B, T>;
template <bool B, class T, class F> using conditional_t = std::conditional_t<B, T, F>;
template <class T> using is_integral = std::is_integral<T>;
template <class T> inline constexpr bool is_integral_v = std::is_integral_v<T>;
template <class T>
inline constexpr bool is_floating_point_v =
    std::is_floating_point_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <class T> struct numeric_limits : std::numeric_limits<T> {};
template <> struct numeric_limits<half> {
  static constexpr half max() { return (half)65504.f; }
  static constexpr half lowest() { return (half)-65504.f; }
  static constexpr half min() { return (half)6.103515625e-05f; }
  static constexpr half infinity() { return (half)__builtin_inff(); }
  static constexpr half quiet_NaN() { return (half)__builtin_nanf(""); }
  static constexpr half epsilon() { return (half)0.0009765625f; }
};
template <> struct numeric_limits<bfloat> {
  static bfloat max() { return bfloat(3.3895313892515355e38f); }
  static bfloat lowest() { return bfloat(-3.3895313892515355e38f); }
  static bfloat min() { return bfloat(1.17549435e-38f); }
  static bfloat infinity() { return bfloat(__builtin_inff()); }
};

template <class T, class U> SHIM_INLINE T as_type(U from) {
  static_assert(sizeof(T) == sizeof(U), "as_type between types of different sizes");
  T to;
  __builtin_memcpy((void*)&to, (const void*)&from, sizeof to);
  return to;
}

}  // namespace metal

namespace shim {

// A parameter that takes no part in deducing a template's type.
template <class T> struct Plain { using type = T; };
template <class T> using plain = typename Plain<T>::type;

// What is read before it was written: all bits set, a NaN.
template <class T> SHIM_INLINE T unwritten() {
  T made;
  __builtin_memset((void*)&made, 0xff, sizeof made);
  return made;
}

}  // namespace shim
