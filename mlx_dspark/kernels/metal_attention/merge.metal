// Splits into one: a SIMD group for each query of each head.
constexpr int MINE = (D + 31) / 32;
const int lane = int(thread_index_in_simdgroup);
const int row = int(threadgroup_position_in_grid.x);
const int splits = parts_shape[0];
const int heads = parts_shape[2];
const int width = parts_shape[3];
const int rows = parts_shape[1] * heads * width;

float top = -1e30f;
for (int s = lane; s < splits; s += 32) top = metal::max(top, weights[2 * (long(s) * rows + row)]);
top = simd_max(top);

float total = 0.0f;
float sums[MINE];
for (int c = 0; c < MINE; ++c) sums[c] = 0.0f;
for (int s = 0; s < splits; ++s) {
  const long at = long(s) * rows + row;
  const float kept = metal::fast::exp2(weights[2 * at] - top);
  total += kept * weights[2 * at + 1];
  for (int c = 0; c < MINE; ++c)
    if (32 * c + lane < D) sums[c] += kept * parts[at * D + 32 * c + lane];
}

const int head = row / width % heads;
#if SINKS
const float factor = few_queries_factor(top, total, true, float(sinks[head]) * 1.44269504f);
#else
const float factor = few_queries_factor(top, total, false, 0.0f);
#endif
device T* p = out + ((long(row / width / heads) * width + row % width) * heads + head) * D;
for (int c = 0; c < MINE; ++c)
  if (32 * c + lane < D) p[32 * c + lane] = T(sums[c] * factor);
