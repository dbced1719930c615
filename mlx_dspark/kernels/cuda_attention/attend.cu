  using namespace few_queries;
  constexpr float LOG2E = 1.4426950408889634f;
  const float NEVER = __int_as_float(0xff800000);
  constexpr int STEPS = D / 16, MINE = D / 4, TILES = D / 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  const int heads = q_shape[1], width = q_shape[2], kv_heads = k_shape[1], length = k_shape[2];
  const int group = heads / kv_heads, queries = group * width;
  const int kv = blockIdx.z % kv_heads, row = blockIdx.z / kv_heads, first = blockIdx.y * 16;
  const int split = blockIdx.x, splits = gridDim.x, tiles = (length + 15) / 16;
  const int from = int((long long)split * tiles / splits), to = int((long long)(split + 1) * tiles / splits);
  const float factor = scale[0] * LOG2E;
  const unsigned short* const kp = (const unsigned short*)k + row * k_strides[0] + kv * k_strides[1];
  const unsigned short* const vp = (const unsigned short*)v + row * v_strides[0] + kv * v_strides[1];

  // The two queries of this lane: their head and their place in the round.
  int head[2], place[2];
  bool real[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int n = first + g + 8 * i;
    real[i] = n < queries;
    head[i] = kv * group + (real[i] ? n : queries - 1) / width;
    place[i] = (real[i] ? n : queries - 1) % width;
  }
  unsigned qs[2][MINE / 2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    load<MINE>(qs[i],
               (const unsigned short*)q + row * q_strides[0] + head[i] * q_strides[1] + place[i] * q_strides[2] +
                   c * MINE * q_strides[3],
               q_strides[3]);

  float out_sum[TILES][4], most[2] = {NEVER, NEVER}, total[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < TILES; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) out_sum[j][i] = 0.f;
#if SINKS
  if (split == 0 && warp == 0) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      most[i] = float(sinks[head[i]]) * LOG2E;
      total[i] = c == 0 ? 1.f : 0.f;
    }
  }
#endif

  for (int tile = from + warp; tile < to; tile += WARPS) {
    const int base = tile * 16;
    unsigned ks[2][MINE / 2], vs[4][TILES / 2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const int key = min(base + 8 * t + g, length - 1);
      load<MINE>(ks[t], kp + key * k_strides[2] + c * MINE * k_strides[3], k_strides[3]);
    }
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int key = min(base + 2 * c + (t & 1) + 8 * (t >> 1), length - 1);
      load<TILES>(vs[t], vp + key * v_strides[2] + g * TILES * v_strides[3], v_strides[3]);
    }
    float scores[2][4];
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) scores[t][i] = 0.f;
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const unsigned a[4] = {qs[0][2 * s], qs[1][2 * s], qs[0][2 * s + 1], qs[1][2 * s + 1]};
        mma(scores[t], a, ks[t][2 * s], ks[t][2 * s + 1], T());
      }
    }
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = base + 8 * t + 2 * c + (i & 1);
        bool seen = key < length;
#if MASK == 1
        seen = seen && key <= length - width + place[i >> 1];
#elif MASK == 2
        seen = seen && mask[row * mask_strides[0] + head[i >> 1] * mask_strides[1] + place[i >> 1] * mask_strides[2] +
                            (long long)min(key, length - 1) * mask_strides[3]];
#endif
        scores[t][i] = seen ? scores[t][i] * factor : NEVER;
      }
    unsigned shares[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float here = fmaxf(fmaxf(scores[0][2 * i], scores[0][2 * i + 1]), fmaxf(scores[1][2 * i], scores[1][2 * i + 1]));
      const float now = fmaxf(most[i], over_quad_max(here));
      const float origin = now == NEVER ? 0.f : now, kept = exp2f(most[i] - origin);
      float p[4];
#pragma unroll
      for (int t = 0; t < 2; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) p[2 * t + e] = exp2f(scores[t][2 * i + e] - origin);
      shares[i] = packed(p[0], p[1], T());
      shares[2 + i] = packed(p[2], p[3], T());
      total[i] = total[i] * kept + (p[0] + p[1]) + (p[2] + p[3]);
      most[i] = now;
#pragma unroll
      for (int j = 0; j < TILES; j++) out_sum[j][2 * i] *= kept, out_sum[j][2 * i + 1] *= kept;
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const unsigned pick = j & 1 ? 0x7632 : 0x5410;
      mma(out_sum[j], shares, __byte_perm(vs[0][j / 2], vs[1][j / 2], pick),
          __byte_perm(vs[2][j / 2], vs[3][j / 2], pick), T());
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) total[i] = over_quad_sum(total[i]);

  // Halve the warps until one has the sum of all.
  __shared__ float others[WARPS / 2][TILES * 4 + 4][32];
#pragma unroll
  for (int half = WARPS / 2; half; half /= 2) {
    if (warp >= half && warp < 2 * half) {
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) others[warp - half][j * 4 + i][lane] = out_sum[j][i];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        others[warp - half][TILES * 4 + i][lane] = most[i];
        others[warp - half][TILES * 4 + 2 + i][lane] = total[i];
      }
    }
    __syncthreads();
    if (warp < half) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float theirs = others[warp][TILES * 4 + i][lane], now = fmaxf(most[i], theirs);
        const float origin = now == NEVER ? 0.f : now;
        const float a = exp2f(most[i] - origin), b = exp2f(theirs - origin);
        most[i] = now;
        total[i] = a * total[i] + b * others[warp][TILES * 4 + 2 + i][lane];
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            out_sum[j][2 * i + e] = a * out_sum[j][2 * i + e] + b * others[warp][j * 4 + 2 * i + e][lane];
      }
    }
    __syncthreads();
  }
  if (warp) return;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (!real[i]) continue;
    const long long at = ((long long)row * width + place[i]) * heads + head[i];
#if SPLIT
    float* const o = parts + (at * splits + split) * D + c * MINE;
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
      for (int j = 0; j < TILES; j++) o[e * TILES + j] = out_sum[j][2 * i + e];
    if (c == 0) {
      weights[(at * splits + split) * 2] = most[i];
      weights[(at * splits + split) * 2 + 1] = total[i];
    }
#else
    const float share = total[i] > 0.f ? 1.f / total[i] : 0.f;
    uint4* const o = (uint4*)((unsigned short*)out + at * D + c * MINE);
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
      for (int j = 0; j < TILES; j += 8) {
        unsigned four[4];
#pragma unroll
        for (int p = 0; p < 4; p++)
          four[p] = packed(out_sum[j + 2 * p][2 * i + e] * share, out_sum[j + 2 * p + 1][2 * i + e] * share, T());
        o[(e * TILES + j) / 8] = make_uint4(four[0], four[1], four[2], four[3]);
      }
#endif
  }
