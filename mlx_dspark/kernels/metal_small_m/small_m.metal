// Y^T = W X^T in tiles of 8 weight rows, 8 numbers of a row, and 8 rows of x. Inside a block of 64 numbers matrix
// index j of tile t stands for number 8 j + t, so that every lane reads contiguous memory: of one weight row 16
// codes, which are of one group, and of two rows of x 8 numbers.
constexpr int BLOCK = 64;
constexpr int TN = 8 * RN;  // weight rows of a threadgroup
constexpr int TM = 8 * RM;  // rows of x
// Codes are a stream of bits, the lowest first; 16 of them start at a whole word, or half of one.
typedef metal::conditional_t<BITS % 2 == 0, uint, ushort> Unit;
constexpr int UNIT = 8 * sizeof(Unit);
constexpr int UNITS = 16 * BITS / UNIT;
constexpr uint MASK = (1u << BITS) - 1;
typedef metal::vec<T, 4> T4;

const int K = x_shape[1];
#if EXPERTS
// Rows come sorted by their expert. A threadgroup whose place is every TM-th row of an expert takes the rows from
// there on; those of other places have nothing to do.
const int N = scales_shape[1];
const int first_x = int(threadgroup_position_in_grid.y);
const int expert = experts[first_x];
const int first_w = expert * N;
int before = 0;
while (before < first_x && experts[first_x - 1 - before] == expert) ++before;
if (before % TM != 0) return;
int M = 1;
while (M < TM && first_x + M < x_shape[0] && experts[first_x + M] == expert) ++M;
#else
const int M = x_shape[0];
const int N = scales_shape[0];
constexpr int first_x = 0;
constexpr int first_w = 0;
#endif
const uint row_units = uint(K) * BITS / UNIT;
const uint row_groups = uint(K) / GROUP;

// This lane's place in an 8x8 matrix: one row, two columns.
const int lane = int(thread_index_in_simdgroup);
const int worker = int(simdgroup_index_in_threadgroup);
const int row = ((lane / 4) & 4) + (lane / 2) % 4;
const int column = ((lane / 4) & 2) * 2 + (lane % 2) * 2;
const int first = int(threadgroup_position_in_grid.x) * TN;

threadgroup float partial[KS * TM * TN];

metal::simdgroup_matrix<float, 8, 8> sums[RN][RM];
#pragma clang loop unroll(full)
for (int i = 0; i < RN; ++i) {
#pragma clang loop unroll(full)
  for (int j = 0; j < RM; ++j) sums[i][j] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

for (int block = worker * BLOCK; block < K; block += KS * BLOCK) {
  float xs[RM][2][8];
  const int x_at = block + 8 * row;
#pragma clang loop unroll(full)
  for (int j = 0; j < RM; ++j) {
#pragma clang loop unroll(full)
    for (int r = 0; r < 2; ++r) {
      const int m = 8 * j + column + r;
      if (m < M && x_at < K) {
        const device T4* from = (const device T4*)(x + (first_x + m) * K + x_at);
        const T4 low = from[0];
        const T4 high = from[1];
#pragma clang loop unroll(full)
        for (int t = 0; t < 4; ++t) {
          xs[j][r][t] = float(low[t]);
          xs[j][r][4 + t] = float(high[t]);
        }
      } else {
#pragma clang loop unroll(full)
        for (int t = 0; t < 8; ++t) xs[j][r][t] = 0.0f;
      }
    }
  }
  const int w_at = block + 8 * column;
#pragma clang loop unroll(full)
  for (int i = 0; i < RN; ++i) {
    const int n = first + 8 * i + row;
    Unit codes[UNITS];
    float scale = 0.0f;
    float bias = 0.0f;
    if (n < N && w_at < K) {
      const device Unit* from = (const device Unit*)w + uint(first_w + n) * row_units + uint(w_at) / 16 * UNITS;
#pragma clang loop unroll(full)
      for (int u = 0; u < UNITS; ++u) codes[u] = from[u];
      const uint group = uint(first_w + n) * row_groups + uint(w_at) / GROUP;
      scale = float(scales[group]);
      bias = float(biases[group]);
    } else {
#pragma clang loop unroll(full)
      for (int u = 0; u < UNITS; ++u) codes[u] = 0;
    }
#pragma clang loop unroll(full)
    for (int t = 0; t < 8; ++t) {
      metal::simdgroup_matrix<OPERAND, 8, 8> weights;
#pragma clang loop unroll(full)
      for (int e = 0; e < 2; ++e) {
        const int bit = (8 * e + t) * BITS;
        uint code = uint(codes[bit / UNIT]) >> (bit % UNIT);
        if (bit % UNIT + BITS > UNIT) code |= uint(codes[bit / UNIT + 1]) << (UNIT - bit % UNIT);
        weights.thread_elements()[e] = OPERAND(metal::fma(scale, float(code & MASK), bias));
      }
#pragma clang loop unroll(full)
      for (int j = 0; j < RM; ++j) {
        metal::simdgroup_matrix<OPERAND, 8, 8> numbers;
        numbers.thread_elements()[0] = OPERAND(xs[j][0][t]);
        numbers.thread_elements()[1] = OPERAND(xs[j][1][t]);
        metal::simdgroup_multiply_accumulate(sums[i][j], weights, numbers, sums[i][j]);
      }
    }
  }
}

// The simdgroups of a threadgroup hold sums over different blocks.
#pragma clang loop unroll(full)
for (int i = 0; i < RN; ++i) {
#pragma clang loop unroll(full)
  for (int j = 0; j < RM; ++j) {
    threadgroup float* to = partial + worker * TM * TN + 8 * j * TN + 8 * i;
    metal::simdgroup_store(sums[i][j], to, TN, ulong2(0, 0), true);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int at = int(thread_index_in_threadgroup); at < TM * TN; at += 32 * KS) {
  const int m = at / TN;
  const int n = first + at % TN;
  if (m < M && n < N) {
    float sum = 0.0f;
    for (int s = 0; s < KS; ++s) sum += partial[s * TM * TN + at];
    y[(first_x + m) * N + n] = T(sum);
  }
}
