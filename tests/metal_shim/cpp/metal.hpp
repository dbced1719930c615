// As much of Metal's standard library as kernel bodies need, for C++17.
#pragma once
#include "atomics.hpp"
#include "matrix.hpp"

// The part of MLX's preamble that custom kernels may use.
template <class U> struct Limits {
  static constexpr U max = metal::numeric_limits<U>::max(), min = metal::numeric_limits<U>::lowest();
  static constexpr U finite_max = max, finite_min = min;
};
template <> struct Limits<float> {
  static constexpr float max = __builtin_inff(), min = -__builtin_inff();
  static constexpr float finite_max = 3.402823466e38f, finite_min = -3.402823466e38f;
};
template <class T, class U> inline T ceildiv(T n, U m) { return (n + m - 1) / m; }

using namespace metal;

// Last, as no C++ header may see them. Address spaces are checked by the gates.
#define device
#define constant
#define thread
#define threadgroup
#define kernel
