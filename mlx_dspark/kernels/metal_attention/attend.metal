// Attention of few queries over many keys, on SIMD-group matrices (8 x 8, float32 sums).
//
// A threadgroup holds 8 * RB rows, which are the queries of the heads that share a key-value head, and a range of
// keys (one of `splits`, as in flash decoding), and takes tiles of 8 * KB * SG keys. Each of its SG SIMD groups
// scores 8 * KB keys of a tile for all rows, and then sums D / SG columns of all values of the tile: a key and a
// value are read once. The softmax is online (Milakov & Gimelshein 2018).
//
// A lane holds row `fm` and columns `fn`, `fn + 1` of a fragment. Dims are contracted in an order in which its
// elements of U fragments are neighbours in memory: index j of fragment t stands for dim U * j + t.
constexpr int ROWS = 8 * RB;
constexpr int KEYS = 8 * KB * SG;
constexpr int U = D % 64 == 0 ? 8 : D % 32 == 0 ? 4 : 2;
constexpr int COLUMNS = D / 8 / SG;
constexpr int QUERY = D / 4 + 1;
constexpr int SHARE = KEYS / 2 + 2;
static_assert(D % 16 == 0 && D / 8 % SG == 0, "the columns divide among the SIMD groups");

threadgroup metal::vec<T, 4> staged[STAGED ? ROWS * QUERY : 1];
threadgroup metal::vec<float, 2> shares[ROWS * SHARE];
threadgroup float tops[SG * ROWS];

const int width = q_shape[2];
const int heads = q_shape[1];
const int kv_heads = k_shape[1];
const int length = k_shape[2];
const int group = heads / kv_heads;
const int rows = group * width;
const int simd = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int fm = lane / 16 * 4 + lane / 2 % 4;
const int fn = lane / 8 % 2 * 4 + lane % 2 * 2;
const int pair = int(threadgroup_position_in_grid.x);
const int batch = pair / kv_heads;
const int kv_head = pair % kv_heads;
const int split = int(threadgroup_position_in_grid.y);
const int splits = int(threadgroups_per_grid.y);
const int first_row = int(threadgroup_position_in_grid.z) * ROWS;

// The keys that the first query sees begin at `begin`; the last that query m sees is `last + m`.
const int last = length - width;
#if WINDOW
const int begin = metal::max(0, last + 1 - window);
#else
const int begin = 0;
#endif
const int tiles = (length - begin + KEYS - 1) / KEYS;
const int share = (tiles + splits - 1) / splits * KEYS;
const int from = begin + split * share;
const int to = metal::min(length, from + share);

const bool q_dense = few_queries::is_dense(q, q_strides);
const bool k_dense = few_queries::is_dense(k, k_strides);
const bool v_dense = few_queries::is_dense(v, v_strides);

// Rows past the last repeat it and are not stored.
int query[RB];
long q_at[RB];
#if MASK == 2
long mask_at[RB];
#endif
for (int i = 0; i < RB; ++i) {
  const int row = metal::min(first_row + 8 * i + fm, rows - 1);
  const int head = kv_head * group + row / width;
  query[i] = row % width;
  q_at[i] = few_queries::place(q_strides, batch, head, query[i]);
#if MASK == 2
  mask_at[i] = few_queries::place(mask_strides, batch, head, query[i]);
#endif
}
if (STAGED) {
  for (int at = int(thread_index_in_threadgroup); at < ROWS * (D / 4); at += 32 * SG) {
    const int row = metal::min(first_row + at / (D / 4), rows - 1);
    const int dim = at % (D / 4) * 4;
    const long place = few_queries::place(q_strides, batch, kv_head * group + row / width, row % width);
    float four[4];
    few_queries::fetch<T, 4>(q + place, dim, q_strides, q_dense, four);
    metal::vec<T, 4> packed;
    for (int e = 0; e < 4; ++e) packed[e] = T(four[e]);
    staged[at / (D / 4) * QUERY + dim / 4] = packed;
  }
}

metal::simdgroup_matrix<float, 8, 8> sums[RB][COLUMNS];
float highest[RB];
float totals[RB];
FEW_QUERIES_UNROLL for (int i = 0; i < RB; ++i) {
  highest[i] = few_queries::NOTHING;
  totals[i] = 0.0f;
  FEW_QUERIES_UNROLL for (int c = 0; c < COLUMNS; ++c)
    sums[i][c] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int tile = from; tile < to; tile += KEYS) {
  // Scores of this lane's keys, `mine + 8 * j` and the one after. Sums begin where a key is seen or not.
  const int mine = tile + 8 * KB * simd + fn;
  metal::simdgroup_matrix<float, 8, 8> scores[RB][KB];
  bool whole = MASK != 2 && tile + KEYS <= to;
#if MASK == 1
  whole = whole && tile + KEYS - 1 <= last;
#endif
#if WINDOW
  whole = whole && tile > last + width - 1 - window;
#endif
  bool any = whole;
  FEW_QUERIES_UNROLL for (int i = 0; i < RB; ++i) {
    FEW_QUERIES_UNROLL for (int j = 0; j < KB; ++j) {
      FEW_QUERIES_UNROLL for (int e = 0; e < 2; ++e) {
        bool seen = whole;
        if (!whole) {
          const int key = mine + 8 * j + e;
          seen = key < to;
#if MASK == 1
          seen = seen && key <= last + query[i];
#endif
#if WINDOW
          seen = seen && key > last + query[i] - window;
#endif
#if MASK == 2
          seen = seen && mask[mask_at[i] + key * mask_strides[3]];
#endif
        }
        any = any || seen;
        scores[i][j].thread_elements()[e] = seen ? 0.0f : few_queries::NOTHING;
      }
    }
  }
  if (simd_any(any)) {
    FEW_QUERIES_LOOP for (int d = 0; d < D; d += 8 * U) {
      float keys[KB][2][U];
      FEW_QUERIES_UNROLL for (int j = 0; j < KB; ++j) {
        FEW_QUERIES_UNROLL for (int e = 0; e < 2; ++e) {
          const int key = mine + 8 * j + e;
          FEW_QUERIES_UNROLL for (int t = 0; t < U; ++t) keys[j][e][t] = 0.0f;
          if (key < to) {
            const long place = few_queries::place(k_strides, batch, kv_head, key);
            few_queries::fetch<T, U>(k + place, d + U * fm, k_strides, k_dense, keys[j][e]);
          }
        }
      }
      FEW_QUERIES_UNROLL for (int i = 0; i < RB; ++i) {
        float dims[2 * U];
        if (STAGED) {
          const threadgroup metal::vec<T, 4>* p = staged + (8 * i + fm) * QUERY + (d + U * fn) / 4;
          FEW_QUERIES_UNROLL for (int t = 0; t < 2 * U; ++t) dims[t] = float(p[t / 4][t % 4]);
        } else {
          few_queries::fetch<T, 2 * U>(q + q_at[i], d + U * fn, q_strides, q_dense, dims);
        }
        FEW_QUERIES_UNROLL for (int t = 0; t < U; ++t) {
          metal::simdgroup_matrix<float, 8, 8> a;
          a.thread_elements()[0] = dims[t];
          a.thread_elements()[1] = dims[U + t];
          FEW_QUERIES_UNROLL for (int j = 0; j < KB; ++j) {
            metal::simdgroup_matrix<float, 8, 8> b;
            b.thread_elements()[0] = keys[j][0][t];
            b.thread_elements()[1] = keys[j][1][t];
            metal::simdgroup_multiply_accumulate(scores[i][j], a, b, scores[i][j]);
          }
        }
      }
    }
  }

  // The largest score of each row, first of a SIMD group's keys, then of the tile. The barrier also keeps the
  // shares below from being written before the tile before this one is summed.
  FEW_QUERIES_UNROLL for (int i = 0; i < RB; ++i) {
    float top = few_queries::NOTHING;
    FEW_QUERIES_UNROLL for (int j = 0; j < KB; ++j) {
      top = metal::max(top, scores[i][j].thread_elements()[0]);
      top = metal::max(top, scores[i][j].thread_elements()[1]);
    }
    top = few_queries::over_row_max(top);
    if (fn == 0) tops[simd * ROWS + 8 * i + fm] = top;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float kept[RB];
  bool alive = MASK != 2;
  FEW_QUERIES_UNROLL for (int i = 0; i < RB; ++i) {
    float top = few_queries::NOTHING;
    for (int s = 0; s < SG; ++s) top = metal::max(top, tops[s * ROWS + 8 * i + fm]);
    alive = alive || few_queries::is_score(top);
    top = metal::max(top, highest[i]);
    kept[i] = metal::fast::exp2((highest[i] - top) * scale);
    highest[i] = top;
    totals[i] *= kept[i];
    FEW_QUERIES_UNROLL for (int j = 0; j < KB; ++j) {
      metal::vec<float, 2> part;
      for (int e = 0; e < 2; ++e) {
        const float score = scores[i][j].thread_elements()[e];
        part[e] = few_queries::is_score(score) ? metal::fast::exp2((score - top) * scale) : 0.0f;
        totals[i] += part[e];
      }
      shares[(8 * i + fm) * SHARE + (8 * (KB * simd + j) + fn) / 2] = part;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // This SIMD group's columns: a lane holds 2 * COLUMNS neighbours, of which fragment c takes 2 * c and the next.
  if (simd_any(alive)) {
    FEW_QUERIES_UNROLL for (int i = 0; i < RB; ++i) {
      FEW_QUERIES_UNROLL for (int c = 0; c < COLUMNS; ++c) {
        sums[i][c].thread_elements()[0] *= kept[i];
        sums[i][c].thread_elements()[1] *= kept[i];
      }
    }
    FEW_QUERIES_LOOP for (int at = 0; at < KEYS && tile + at < to; at += 8) {
      const int key = tile + at + fm;
      float values[2 * COLUMNS];
      FEW_QUERIES_UNROLL for (int c = 0; c < 2 * COLUMNS; ++c) values[c] = 0.0f;
      if (key < to) {
        const long place = few_queries::place(v_strides, batch, kv_head, key);
        const int column = (8 * simd + fn) * COLUMNS;
        few_queries::fetch<T, 2 * COLUMNS>(v + place, column, v_strides, v_dense, values);
      }
      FEW_QUERIES_UNROLL for (int i = 0; i < RB; ++i) {
        const metal::vec<float, 2> part = shares[(8 * i + fm) * SHARE + (at + fn) / 2];
        metal::simdgroup_matrix<float, 8, 8> a;
        a.thread_elements()[0] = part[0];
        a.thread_elements()[1] = part[1];
        FEW_QUERIES_UNROLL for (int c = 0; c < COLUMNS; ++c) {
          metal::simdgroup_matrix<float, 8, 8> b;
          b.thread_elements()[0] = values[2 * c];
          b.thread_elements()[1] = values[2 * c + 1];
          metal::simdgroup_multiply_accumulate(sums[i][c], a, b, sums[i][c]);
        }
      }
    }
  }
}

// The total of each row over all its keys of this range.
for (int i = 0; i < RB; ++i) {
  const float total = few_queries::over_row_sum(totals[i]);
  if (fn == 0) tops[simd * ROWS + 8 * i + fm] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

FEW_QUERIES_UNROLL for (int i = 0; i < RB; ++i) {
  const int row = first_row + 8 * i + fm;
  if (row < rows) {
    float total = 0.0f;
    for (int s = 0; s < SG; ++s) total += tops[s * ROWS + 8 * i + fm];
    const int column = (8 * simd + fn) * COLUMNS;
#if SPLIT
    const long at = few_queries::partial(split, int(threadgroups_per_grid.x) * rows, pair * rows + row);
    device float* p = parts + at * D + column;
    FEW_QUERIES_UNROLL for (int c = 0; c < COLUMNS; ++c) {
      p[2 * c] = sums[i][c].thread_elements()[0];
      p[2 * c + 1] = sums[i][c].thread_elements()[1];
    }
    if (simd == 0 && fn == 0) {
      weights[2 * at] = highest[i] * scale;
      weights[2 * at + 1] = total;
    }
#else
    const int head = kv_head * group + row / width;
#if SINKS
    const float factor = few_queries_factor(highest[i] * scale, total, true, float(sinks[head]) * 1.44269504f);
#else
    const float factor = few_queries_factor(highest[i] * scale, total, false, 0.0f);
#endif
    device T* p = out + ((long(batch) * width + query[i]) * heads + head) * D + column;
    FEW_QUERIES_UNROLL for (int c = 0; c < COLUMNS; ++c) {
      p[2 * c] = T(sums[i][c].thread_elements()[0] * factor);
      p[2 * c + 1] = T(sums[i][c].thread_elements()[1] * factor);
    }
#endif
  }
}
