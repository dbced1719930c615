// 8x8 matrices of a SIMD-group: two elements a lane, in the layout that MLX's own headers rely on.
#pragma once
#include "simd.hpp"

namespace shim {

SHIM_INLINE uint row_of(uint lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
SHIM_INLINE uint column_of(uint lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }

}  // namespace shim

namespace metal {

template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "matrices of a SIMD-group are 8x8");
  vec<T, 2> elements;

  simdgroup_matrix() { elements = shim::unwritten<vec<T, 2>>(); }
  explicit simdgroup_matrix(T diagonal) {
    const uint lane = shim::lane(), row = shim::row_of(lane), column = shim::column_of(lane);
    elements.x = row == column ? diagonal : T(0);
    elements.y = row == column + 1 ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int R, int C> SHIM_INLINE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, R, C> made;
  made.elements.x = x;
  made.elements.y = x;
  return made;
}

template <class T>
SHIM_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const T* from, ulong row_elements = 8,
                                ulong2 origin = ulong2(0, 0), bool transposed = false) {
  const uint lane = shim::lane(), row = shim::row_of(lane), column = shim::column_of(lane);
  const T* at = from + origin.y * row_elements + origin.x;
  to.elements.x = transposed ? at[column * row_elements + row] : at[row * row_elements + column];
  to.elements.y = transposed ? at[(column + 1) * row_elements + row] : at[row * row_elements + column + 1];
}
template <class T>
SHIM_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> from, T* to, ulong row_elements = 8,
                                 ulong2 origin = ulong2(0, 0), bool transposed = false) {
  const uint lane = shim::lane(), row = shim::row_of(lane), column = shim::column_of(lane);
  T* at = to + origin.y * row_elements + origin.x;
  at[transposed ? column * row_elements + row : row * row_elements + column] = from.elements.x;
  at[transposed ? (column + 1) * row_elements + row : row * row_elements + column + 1] = from.elements.y;
}

}  // namespace metal

namespace shim {

template <class D, class A, class B, class C> struct Factors {
  metal::vec<D, 2>* to;
  metal::vec<A, 2>* left;
  metal::vec<B, 2>* right;
  metal::vec<C, 2>* sum;  // none: zero
};

template <class D, class A, class B, class C> SHIM_FOR_ALL void multiply(void** lanes) {
  float a[8][8], b[8][8], c[8][8];
  using Lane = Factors<D, A, B, C>;
  for (uint i = 0; i < 32; ++i) {
    const Lane& lane = *static_cast<Lane*>(lanes[i]);
    const uint row = row_of(i), column = column_of(i);
    for (uint e = 0; e < 2; ++e) {
      a[row][column + e] = (float)lane.left->v[e];
      b[row][column + e] = (float)lane.right->v[e];
      c[row][column + e] = lane.sum ? (float)lane.sum->v[e] : 0.f;
    }
  }
  for (int i = 0; i < 8; ++i)
    for (int k = 0; k < 8; ++k)
      for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
  for (uint i = 0; i < 32; ++i) {
    const Lane& lane = *static_cast<Lane*>(lanes[i]);
    for (uint e = 0; e < 2; ++e) lane.to->v[e] = D(c[row_of(i)][column_of(i) + e]);
  }
}

}  // namespace shim

namespace metal {

template <class D, class A, class B, class C>
SHIM_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& to, simdgroup_matrix<A, 8, 8> left,
                                               simdgroup_matrix<B, 8, 8> right, simdgroup_matrix<C, 8, 8> sum,
                                               SHIM_SITE) {
  shim::Factors<D, A, B, C> own{&to.elements, &left.elements, &right.elements, &sum.elements};
  shim::meet(shim::Meeting::MATRIX, site, shim::multiply<D, A, B, C>, &own, true);
}
template <class D, class A, class B>
SHIM_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& to, simdgroup_matrix<A, 8, 8> left,
                                    simdgroup_matrix<B, 8, 8> right, SHIM_SITE) {
  shim::Factors<D, A, B, D> own{&to.elements, &left.elements, &right.elements, nullptr};
  shim::meet(shim::Meeting::MATRIX, site, shim::multiply<D, A, B, D>, &own, true);
}

}  // namespace metal
