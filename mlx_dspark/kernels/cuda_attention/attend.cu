  // q [rows, heads, width, D], k and v [rows, kv_heads, size, D] of T, by their strides; mask [rows, heads, width,
  // size]; under a causal mask lengths [rows], how many of the keys there are, the last of them those of the queries.
  // Query n of a group of heads is that of head n / width at place n % width of the round.
  using namespace few_queries;
  constexpr float LOG2E = 1.4426950408889634f;
  constexpr int MINE = 2 * TILES, OCTETS = MINE * 2 * (D / 64), WARPS = SIDES * TEAMS;
  const float NEVER = __int_as_float(0xff800000);
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int warp = threadIdx.x >> 5, side = warp % SIDES, team = warp / SIDES;
  const int heads = q_shape[1], width = q_shape[2], kv_heads = k_shape[1];
  const int group = heads / kv_heads, queries = group * width;
  const int kv = blockIdx.z % kv_heads, row = blockIdx.z / kv_heads, first = (blockIdx.y * SIDES + side) * TILES * TILE;
#if MASK == 1
  const int length = min(lengths[row], k_shape[2]);
#else
  const int length = k_shape[2];
#endif
  const int split = blockIdx.x, splits = gridDim.x, tiles = (length + TILE - 1) / TILE;
  // Tiles of this block: one range of them, or every so many of all, so that blocks read side by side.
  const int from = IN_TURN ? split * TEAMS : int((long long)split * tiles / splits);
  const int to = IN_TURN ? tiles : int((long long)(split + 1) * tiles / splits);
  const int step = IN_TURN ? splits * TEAMS : TEAMS;
  const float factor = scale[0] * LOG2E;
  const Rows keys(k, row * k_strides[0] + kv * k_strides[1], k_strides[2], k_strides[3]);
  const Rows values(v, row * v_strides[0] + kv * v_strides[1], v_strides[2], v_strides[3]);
  uint4* const ring = reinterpret_cast<uint4*>(arena()) + team * STAGES * STAGE;

  // Each tile has its place in the ring; what a team has read, it writes over only after its next meeting.
  auto copy = [&](int tile, int slot) {
    if (tile < to) {
      keys.copy<SIDES * 32>(ring + slot * STAGE, tile * TILE, length, side * 32 + lane);
      values.copy<SIDES * 32>(ring + slot * STAGE + HALF_STAGE, tile * TILE, length, side * 32 + lane);
    }
    commit();
  };
  auto meet = [] {
    if constexpr (SIDES == 1)
      __syncwarp();
    else
      __syncthreads();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) copy(from + team + s * step, s);

  // The queries of this lane: their numbers, and the last key that each sees.
  auto head_of = [&](int n) { return kv * group + min(n, queries - 1) / width; };
  auto place_in = [&](int n) { return min(n, queries - 1) % width; };
  auto number = [&](int i) { return first + g + 8 * i; };
  uint4 qs[MINE][D / 32];
  int last[MINE];
  float out_sum[TILES][D / 8][4], most[MINE], total[MINE];
#if MASK == 2
  const bool* masks[MINE];
#endif
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int head = head_of(number(i)), place = place_in(number(i));
    const Rows mine(q, row * q_strides[0] + head * q_strides[1] + place * q_strides[2], 0, q_strides[3]);
#pragma unroll
    for (int j = 0; j < D / 32; j++)
      qs[i][j] = eight(mine.first + 8 * (4 * j + c) * mine.dim, mine.dim, mine.together);
    last[i] = MASK == 1 ? length - width + place : length - 1;
    most[i] = NEVER, total[i] = 0.f;
#if MASK == 2
    masks[i] = mask + row * mask_strides[0] + head * mask_strides[1] + place * mask_strides[2];
#endif
#if SINKS
    if (split == 0 && team == 0) most[i] = float(sinks[head]) * LOG2E, total[i] = c == 0 ? 1.f : 0.f;
#endif
  }
#pragma unroll
  for (int i = 0; i < TILES * D / 2; i++) (&out_sum[0][0][0])[i] = 0.f;

  int slot = 0;
  for (int begin = from; begin < to; begin += step) {
    const int tile = begin + team;
    arrived<STAGES - 2>();
    meet();
    copy(tile + (STAGES - 1) * step, slot == 0 ? STAGES - 1 : slot - 1);
    const uint4* const keys_here = ring + slot * STAGE;
    const uint4* const values_here = keys_here + HALF_STAGE;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (tile >= to) break;

    float scores[TILES][2][4];
#pragma unroll
    for (int i = 0; i < TILES * 8; i++) (&scores[0][0][0])[i] = 0.f;
#pragma unroll
    for (int j = 0; j < D / 32; j++)
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const uint4 b = keys_here[place_of(8 * t + g, j / 2, 4 * (j % 2) + c)];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          const uint4 low = qs[2 * m][j], high = qs[2 * m + 1][j];
          const unsigned one[4] = {low.x, high.x, low.y, high.y}, two[4] = {low.z, high.z, low.w, high.w};
          mma(scores[m][t], one, b.x, b.y, T());
          mma(scores[m][t], two, b.z, b.w, T());
        }
      }

    // What a query sees, as powers of two; sums shrink where the largest score grew, which is soon rare.
    unsigned shares[TILES][4];
    float kept[MINE];
    bool grew = false;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      float p[4], now = most[i];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int key = tile * TILE + 8 * (e >> 1) + 2 * c + (e & 1);
        bool seen = key <= last[i];
#if MASK == 2
        seen = seen && masks[i][(long long)min(key, length - 1) * mask_strides[3]];
#endif
        p[e] = seen ? scores[i >> 1][e >> 1][2 * (i & 1) + (e & 1)] * factor : NEVER;
        now = fmaxf(now, p[e]);
      }
      now = over_quad_max(now);
      const float origin = now == NEVER ? 0.f : now;
      kept[i] = exp2f(most[i] - origin);
      grew = grew || kept[i] != 1.f;
#pragma unroll
      for (int e = 0; e < 4; e++) p[e] = exp2f(p[e] - origin);
      shares[i >> 1][i & 1] = packed(p[0], p[1], T());
      shares[i >> 1][2 + (i & 1)] = packed(p[2], p[3], T());
      total[i] = total[i] * kept[i] + (p[0] + p[1]) + (p[2] + p[3]);
      most[i] = now;
    }
    if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
      for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) out_sum[m][j][e] *= kept[2 * m + (e >> 1)];
    }

#pragma unroll
    for (int h = 0; h < D / 64; h++) {
      unsigned b[4][4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const uint4 four = values_here[place_of(2 * c + (r & 1) + 8 * (r >> 1), h, g)];
        b[r][0] = four.x, b[r][1] = four.y, b[r][2] = four.z, b[r][3] = four.w;
      }
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const unsigned pick = j & 1 ? 0x7632 : 0x5410;
        const unsigned low = __byte_perm(b[0][j / 2], b[1][j / 2], pick), high = __byte_perm(b[2][j / 2], b[3][j / 2], pick);
#pragma unroll
        for (int m = 0; m < TILES; m++) mma(out_sum[m][8 * h + j], shares[m], low, high, T());
      }
    }
  }

  // Add what the teams have, in their order: first how much each counts for, then the sums, 8 dims at a time.
  float2* const tops = reinterpret_cast<float2*>(arena());
  float4* const sums = reinterpret_cast<float4*>(tops + WARPS * MINE * 32);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    total[i] = over_quad_sum(total[i]);
    tops[(warp * MINE + i) * 32 + lane] = make_float2(most[i], total[i]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    float now = NEVER, all = 0.f;
#pragma unroll
    for (int t = 0; t < TEAMS; t++) now = fmaxf(now, tops[((t * SIDES + side) * MINE + i) * 32 + lane].x);
    const float origin = now == NEVER ? 0.f : now;
#pragma unroll
    for (int t = 0; t < TEAMS; t++) {
      const float2 theirs = tops[((t * SIDES + side) * MINE + i) * 32 + lane];
      all += exp2f(theirs.x - origin) * theirs.y;
    }
    const float kept = exp2f(most[i] - origin);
    most[i] = now, total[i] = all;
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
      for (int j = 0; j < D / 8; j += 4) {
        const int at = ((warp * MINE + i) * 2 + e) * (D / 32) + j / 4, n = 2 * (i & 1) + e;
        const float(*const mine)[4] = out_sum[i >> 1] + j;
        sums[at * 32 + lane] = make_float4(kept * mine[0][n], kept * mine[1][n], kept * mine[2][n], kept * mine[3][n]);
      }
  }
  __syncthreads();
#pragma unroll
  for (int o = 0; o < OCTETS; o++) {
    const int i = o / (D / 32), n = number(i);
    if (o % TEAMS != team || n >= queries) continue;
    float x[8] = {};
#pragma unroll
    for (int t = 0; t < TEAMS; t++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float4 four = sums[(((t * SIDES + side) * OCTETS + o) * 2 + half) * 32 + lane];
        x[4 * half] += four.x, x[4 * half + 1] += four.y, x[4 * half + 2] += four.z, x[4 * half + 3] += four.w;
      }
    const int e = o / (D / 64) % 2, dim = 8 * (8 * (o % (D / 64)) + 2 * c + e);
    const long long at = ((long long)row * width + place_in(n)) * heads + head_of(n);
#if SPLIT
    float4* const there = reinterpret_cast<float4*>(parts + (at * splits + split) * D + dim);
    there[0] = make_float4(x[0], x[1], x[2], x[3]), there[1] = make_float4(x[4], x[5], x[6], x[7]);
    if (o % (2 * (D / 64)) == 0 && c == 0)
      reinterpret_cast<float2*>(weights)[at * splits + split] = make_float2(most[i], total[i]);
#else
    const float share = total[i] > 0.f ? 1.f / total[i] : 0.f;
    *reinterpret_cast<uint4*>(out + at * D + dim) =
        make_uint4(packed(x[0] * share, x[1] * share, T()), packed(x[2] * share, x[3] * share, T()),
                   packed(x[4] * share, x[5] * share, T()), packed(x[6] * share, x[7] * share, T()));
#endif
  }
