  // x [.., K] and y [.., N] of T, weights [N, K * BITS / 32], scales and biases [N, K / GROUP] of T.
  using namespace small_m;
  constexpr int CHUNK = 128, UNITS = CHUNK / 32, GROUPS = CHUNK / GROUP, EACH = GROUP / 32;
  constexpr int ROWS = 16 * RT, BYTES = CHUNK * BITS / 8, STRIDE = BYTES + 4 * BITS, PIECES = BYTES / 16;
  constexpr int STAGE = ROWS * STRIDE, SUMS = RT * NT * 4, PAIRS = (GROUPS + 1) / 2;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int N = weights_shape[0], K = x_shape[x_ndim - 1];
  int M = 1;
  for (int i = 0; i < x_ndim - 1; i++) M *= x_shape[i];
  const int groups = K / GROUP, row_bytes = K * BITS / 8;
  const int chunks = (K + CHUNK - 1) / CHUNK, tiles = (N + ROWS - 1) / ROWS;
  unsigned char* const ring = arena() + warp * STAGES * STAGE;
  float* const others = reinterpret_cast<float*>(arena() + WARPS * STAGES * STAGE);
  uint4* const held = reinterpret_cast<uint4*>(others + WARPS * SUMS * 32);

  const unsigned char* const weight_bytes = reinterpret_cast<const unsigned char*>(weights);
  const unsigned short* const parts = reinterpret_cast<const unsigned short*>(lane < 16 ? scales : biases);
  const bool aligned = groups % GROUPS == 0 && ((size_t)scales | (size_t)biases) % (2 * GROUPS) == 0;
  const unsigned short* const x_row = reinterpret_cast<const unsigned short*>(x) + (size_t)g * K + 8 * t;

  // Copies this warp's share of a tile's weights: 128 of each row.
  auto copy = [&](int tile, int chunk, int slot) {
    const int piece = lane % PIECES, byte = chunk * BYTES + piece * 16;
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / 32; i++) {
      const int row = i * (32 / PIECES) + lane / PIECES, n = tile * ROWS + row;
      const bool real = n < N && byte < row_bytes;
      fetch(ring + slot * STAGE + row * STRIDE + piece * 16, weight_bytes + (real ? (size_t)n * row_bytes + byte : 0), real);
    }
  };
  // Lane i has the scales of row i of 16, lane 16 + i the biases.
  auto load_parts = [&](unsigned (*out)[PAIRS], int tile, int chunk) {
#pragma unroll
    for (int r = 0; r < RT; r++) {
      const int n = tile * ROWS + 16 * r + (lane & 15);
      if (n < N && chunk < chunks) {
        neighbours<GROUPS>(out[r], parts + (size_t)n * groups, chunk * GROUPS, groups, aligned);
      } else {
#pragma unroll
        for (int p = 0; p < PAIRS; p++) out[r][p] = 0;
      }
    }
  };

  int ahead_tile = blockIdx.x, ahead_chunk = warp, slot = 0;
  auto copy_ahead = [&](int into) {
    if (ahead_chunk < chunks && ahead_tile < tiles) copy(ahead_tile, ahead_chunk, into);
    commit();
    ahead_chunk += WARPS;
    if (ahead_chunk >= chunks) ahead_chunk = warp, ahead_tile += gridDim.x;
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) copy_ahead(s);
  unsigned next_parts[RT][PAIRS];
  load_parts(next_parts, blockIdx.x, warp);

  // Where x stays in shared memory, it lies as the lanes take it: 16 bytes of each lane side by side.
  if constexpr (HOLD) {
    const int octets = chunks * CHUNK / 8;
    for (int i = threadIdx.x; i < 8 * NT * octets; i += 32 * WARPS) {
      const int m = i / octets, octet = i % octets;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (m < M && 8 * octet < K)
        eight = *reinterpret_cast<const uint4*>(reinterpret_cast<const unsigned short*>(x) + (size_t)m * K + 8 * octet);
      held[(octet / 4 * NT + m / 8) * 32 + m % 8 * 4 + octet % 4] = eight;
    }
    __syncthreads();
  }

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sum[RT][NT][4];
#pragma unroll
    for (int i = 0; i < SUMS; i++) (&sum[0][0][0])[i] = 0.f;

    for (int chunk = warp; chunk < chunks; chunk += WARPS) {
      __syncwarp();
      copy_ahead(slot == 0 ? STAGES - 1 : slot - 1);
      unsigned now_parts[RT][PAIRS];
#pragma unroll
      for (int r = 0; r < RT; r++)
#pragma unroll
        for (int p = 0; p < PAIRS; p++) now_parts[r][p] = next_parts[r][p];
      const bool more = chunk + WARPS < chunks;
      load_parts(next_parts, more ? tile : tile + gridDim.x, more ? chunk + WARPS : warp);
      uint4 xs[UNITS][NT];
#pragma unroll
      for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const int k = chunk * CHUNK + 32 * u;
          xs[u][n] = make_uint4(0, 0, 0, 0);
          if (HOLD) {
            xs[u][n] = held[((chunk * UNITS + u) * NT + n) * 32 + lane];
          } else if (8 * n + g < M && k < K) {
            xs[u][n] = *reinterpret_cast<const uint4*>(x_row + (size_t)8 * n * K + k);
          }
        }
      arrived<STAGES - 1>();
      __syncwarp();

      const unsigned char* const stage = ring + slot * STAGE + g * STRIDE + t * BITS;
      slot = slot + 1 == STAGES ? 0 : slot + 1;
#pragma unroll
      for (int p = 0; p < PAIRS; p++) {
        unsigned scale[RT][2], bias[RT][2];
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            scale[r][h] = __shfl_sync(0xffffffffu, now_parts[r][p], g + 8 * h);
            bias[r][h] = __shfl_sync(0xffffffffu, now_parts[r][p], 16 + g + 8 * h);
          }
#pragma unroll
        for (int j = 2 * p; j < min(2 * p + 2, GROUPS); j++) {
          float product[RT][NT][4], total[NT][4];
#pragma unroll
          for (int i = 0; i < SUMS; i++) (&product[0][0][0])[i] = 0.f;
#pragma unroll
          for (int i = 0; i < NT * 4; i++) (&total[0][0])[i] = 0.f;
#pragma unroll
          for (int u = j * EACH; u < (j + 1) * EACH; u++) {
            unsigned b[NT][4];
#pragma unroll
            for (int n = 0; n < NT; n++) {
              const unsigned one = two_ones<T>(), ones[4] = {one, one, one, one};
              ordered<BITS>(b[n], xs[u][n]);
              mma(total[n], ones, b[n][0], b[n][1], T());
              mma(total[n], ones, b[n][2], b[n][3], T());
            }
#pragma unroll
            for (int r = 0; r < RT; r++) {
              unsigned codes[2][4];
#pragma unroll
              for (int h = 0; h < 2; h++) {
                unsigned words[BITS / 4];
                const unsigned char* const from = stage + (16 * r + 8 * h) * STRIDE + u * 4 * BITS;
                if constexpr (BITS == 4) {
                  words[0] = *reinterpret_cast<const unsigned*>(from);
                } else {
                  const uint2 two = *reinterpret_cast<const uint2*>(from);
                  words[0] = two.x, words[BITS / 4 - 1] = two.y;
                }
                Codes<BITS, T>::pairs(codes[h], words);
              }
#pragma unroll
              for (int half = 0; half < 4; half += 2) {
                const unsigned a[4] = {codes[0][half], codes[1][half], codes[0][half + 1], codes[1][half + 1]};
#pragma unroll
                for (int n = 0; n < NT; n++) mma(product[r][n], a, b[n][half], b[n][half + 1], T());
              }
            }
          }
#pragma unroll
          for (int r = 0; r < RT; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const float s = half_of<T>(scale[r][h], j & 1);
              const float shift = half_of<T>(bias[r][h], j & 1) - Codes<BITS, T>::OFFSET * s;
#pragma unroll
              for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                  sum[r][n][2 * h + e] += s * product[r][n][2 * h + e] + shift * total[n][2 * h + e];
            }
        }
      }
    }

    // Add what the warps have, in the order of the warps.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SUMS; i++) others[(warp * SUMS + i) * 32 + lane] = (&sum[0][0][0])[i];
    __syncthreads();
    for (int i = warp; i < SUMS; i += WARPS) {
      float all = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) all += others[(w * SUMS + i) * 32 + lane];
      const int n = tile * ROWS + i / (4 * NT) * 16 + (i >> 1 & 1) * 8 + g, m = i / 4 % NT * 8 + 2 * t + (i & 1);
      if (n < N && m < M) y[(size_t)m * N + n] = T(all);
    }
  }
