// Pieces of `attend.metal`.

// Arrays of fragments live in registers only where every index is known to the compiler.
#define FEW_QUERIES_UNROLL _Pragma("clang loop unroll(full)")
#define FEW_QUERIES_LOOP _Pragma("clang loop unroll(disable)")

namespace few_queries {

// What an unseen key scores. Finite, so that no fast-math mode may assume it away, and so low that adding a
// score to it changes nothing.
constant constexpr float NOTHING = -1e30f;

inline bool is_score(float x) { return x > 0.5f * NOTHING; }

// Where a position of a head of a batch row begins, in elements: 64 bits, as a cache may pass 2^31.
inline long place(const constant int64_t* strides, int batch, int head, int position) {
  return batch * strides[0] + head * strides[1] + position * strides[2];
}

// Row `row` of `rows` in partial results of so many splits.
inline long partial(int split, int rows, int row) { return long(split) * rows + row; }

// Whether vectors of four may be read wherever an inner offset divides by four.
template <typename T>
inline bool is_dense(const device T* base, const constant int64_t* strides) {
  const bool multiples = (strides[0] | strides[1] | strides[2]) % 4 == 0;
  return strides[3] == 1 && multiples && reinterpret_cast<ulong>(base) % (4 * sizeof(T)) == 0;
}

// N dims of the position at `place`, from `dim` on. Where they are not dense, the stride is volatile, so that
// addresses of this rare path are not kept in registers of the other.
template <typename T, int N>
inline void fetch(
    const device T* place, int dim, const constant int64_t* strides, bool dense, thread float* to) {
  constexpr int V = N % 4 == 0 ? 4 : 2;
  if (dense) {
    const device metal::vec<T, V>* vectors = (const device metal::vec<T, V>*)(place + dim);
    FEW_QUERIES_UNROLL for (int i = 0; i < N / V; ++i) {
      const metal::vec<T, V> some = vectors[i];
      FEW_QUERIES_UNROLL for (int e = 0; e < V; ++e) to[V * i + e] = float(some[e]);
    }
  } else {
    const volatile constant int64_t* stride = strides + 3;
    for (int i = 0; i < N; ++i) to[i] = float(place[(dim + i) * *stride]);
  }
}

// Over the four lanes that hold a row of a fragment.
inline float over_row_max(float x) {
  x = metal::max(x, metal::simd_shuffle_xor(x, 1));
  return metal::max(x, metal::simd_shuffle_xor(x, 8));
}

inline float over_row_sum(float x) {
  x += metal::simd_shuffle_xor(x, 1);
  return x + metal::simd_shuffle_xor(x, 8);
}

}  // namespace few_queries
