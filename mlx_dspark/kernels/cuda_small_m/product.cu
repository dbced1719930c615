  // x [.., K] and y [.., N] of T, weights [N, K * BITS / 32], scales and biases [N, K / GROUP] of T. Of experts the
  // last three have a first axis more, and experts [M], rising, says which of them each row of x is for. Of PARTS
  // matrices for the same x, the tiles of weights_1 and weights_2 come after those of weights.
  using namespace small_m;
  constexpr int CHUNK = 128, UNITS = CHUNK / 32, GROUPS = CHUNK / GROUP, EACH = GROUP / 32, PAIRS = (GROUPS + 1) / 2;
  constexpr int SHARE = CHUNK * SPAN, COUNT = SHARE / GROUP, PART = COUNT > 1 ? 2 * COUNT : 4;
  constexpr int ROWS = 16 * RT, BYTES = SHARE * BITS / 8, STRIDE = BYTES + 4 * BITS, PIECES = BYTES / 16;
  constexpr int WEIGHTS = ROWS * STRIDE, STAGE = WEIGHTS + RT * 32 * PART, SUMS = RT * NT * 4;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int N = weights_shape[GATHER], K = x_shape[x_ndim - 1];
  int M = 1;
  for (int i = 0; i < x_ndim - 1; i++) M *= x_shape[i];
  const int groups = K / GROUP, row_bytes = K * BITS / 8;
  const int shares = (K + SHARE - 1) / SHARE;
#if PARTS > 1
  const int tiles_0 = (N + ROWS - 1) / ROWS, tiles_1 = (weights_1_shape[0] + ROWS - 1) / ROWS;
#endif
#if PARTS == 1
  const int tiles = (N + ROWS - 1) / ROWS;
#elif PARTS == 2
  const int tiles = tiles_0 + tiles_1;
#else
  const int tiles = tiles_0 + tiles_1 + (weights_2_shape[0] + ROWS - 1) / ROWS;
#endif
  unsigned char* const ring = arena() + warp * STAGES * STAGE;
  float* const others = reinterpret_cast<float*>(arena() + WARPS * STAGES * STAGE);
  uint4* const held = reinterpret_cast<uint4*>(others + WARPS * SUMS * 32);
  float2* const totals = reinterpret_cast<float2*>(held + NT * shares * SHARE);

#if GATHER
  // A block in y has up to 8 * NT rows of one expert: it goes on only where it has the first of them.
  const int first = blockIdx.y;
  const size_t expert = experts[first];
  int begin = first, end = first + 1;
  while (begin > 0 && experts[begin - 1] == expert) begin--;
  if ((first - begin) % (8 * NT)) return;
  while (end < M && end - first < 8 * NT && experts[end] == expert) end++;
  M = end - first;
  const size_t row_before = expert * N;
#else
  const int first = 0;
  const size_t row_before = 0;
#endif
  const unsigned short* const x_rows = reinterpret_cast<const unsigned short*>(x) + (size_t)first * K;
  T* const out = y + (size_t)first * N;
  const unsigned char* const weight_bytes = reinterpret_cast<const unsigned char*>(weights) + row_before * row_bytes;
  const unsigned short* const parts = reinterpret_cast<const unsigned short*>(lane < 16 ? scales : biases) + row_before * groups;
  constexpr int PIECE = PART < 16 ? PART : 16;
  size_t places = (size_t)scales | (size_t)biases | (size_t)(2 * groups);
#if PARTS > 1
  places |= (size_t)scales_1 | (size_t)biases_1;
#endif
#if PARTS > 2
  places |= (size_t)scales_2 | (size_t)biases_2;
#endif
  const bool aligned = COUNT > 1 && places % PIECE == 0;
  const unsigned short* const x_row = x_rows + (size_t)g * K + 8 * t;

  // A tile's matrix: its weights, scales or biases, result and outputs, and which of its own tiles it is.
  struct Part {
    const unsigned char* weights;
    const unsigned short* parts;
    T* out;
    int outputs, tile;
  };
  auto part_of = [&](int tile) {
    Part part = {weight_bytes, parts, out, N, tile};
#if PARTS > 1
    if (tile >= tiles_0)
      part = {reinterpret_cast<const unsigned char*>(weights_1),
              reinterpret_cast<const unsigned short*>(lane < 16 ? scales_1 : biases_1), y_1, weights_1_shape[0],
              tile - tiles_0};
#endif
#if PARTS > 2
    if (tile >= tiles_0 + tiles_1)
      part = {reinterpret_cast<const unsigned char*>(weights_2),
              reinterpret_cast<const unsigned short*>(lane < 16 ? scales_2 : biases_2), y_2, weights_2_shape[0],
              tile - tiles_0 - tiles_1};
#endif
    return part;
  };

  // Copies this warp's share of a tile: its weights, and for row i of 16 the scales to place i, the biases to 16 + i.
  auto copy = [&](int of_all, int share, int slot) {
    const Part part = part_of(of_all);
    const int tile = part.tile, N = part.outputs;
    unsigned char* const to = ring + slot * STAGE;
    const int piece = lane % PIECES, byte = share * BYTES + piece * 16, inside = min(byte, row_bytes - 16);
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / 32; i++) {
      const int row = i * (32 / PIECES) + lane / PIECES, n = tile * ROWS + row;
      const unsigned char* const from = part.weights + (size_t)min(n, N - 1) * row_bytes + inside;
      fetch<16>(to + row * STRIDE + piece * 16, from, n < N && byte < row_bytes);
    }
#pragma unroll
    for (int r = 0; r < RT; r++) {
      const int n = tile * ROWS + 16 * r + (lane & 15);
      const unsigned short* const from = part.parts + (n < N ? (size_t)n * groups : 0);
      unsigned char* const place = to + WEIGHTS + (r * 32 + lane) * PART;
#pragma unroll
      for (int i = 0; i < PART / PIECE; i++) {
        const int group = share * COUNT + i * PIECE / 2;
        const bool real = n < N && group < groups;
        if (aligned) {
          fetch<PIECE>(place + i * PIECE, from + (real ? group : 0), real);
        } else {
#pragma unroll
          for (int e = 0; e < PIECE / 2; e++)
            reinterpret_cast<unsigned short*>(place)[i * PIECE / 2 + e] =
                real && e < COUNT && group + e < groups ? from[group + e] : 0;
        }
      }
    }
  };

  int ahead_tile = blockIdx.x, ahead_share = warp, slot = 0;
  auto copy_ahead = [&](int into) {
    if (ahead_share < shares && ahead_tile < tiles) copy(ahead_tile, ahead_share, into);
    commit();
    ahead_share += WARPS;
    if (ahead_share >= shares) ahead_share = warp, ahead_tile += gridDim.x;
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) copy_ahead(s);

  // Sums of 32 inputs of x by tensor cores, in one order wherever they are made.
  auto add_up = [](float* sum, const unsigned* b, bool begins) {
    const unsigned one = two_ones<T>(), ones[4] = {one, one, one, one};
    if (begins)
      mma_first(sum, ones, b[0], b[1], T());
    else
      mma(sum, ones, b[0], b[1], T());
    mma(sum, ones, b[2], b[3], T());
  };

  // Where x stays in shared memory, it lies as the lanes take it, 16 bytes of each lane side by side, in the order of
  // the codes' pairs; and so do its sums over each group.
  if constexpr (HOLD) {
    const int octets = shares * SHARE / 8;
    for (int i = threadIdx.x; i < 8 * NT * octets; i += 32 * WARPS) {
      const int m = i / octets, octet = i % octets;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (m < M && 8 * octet < K)
        eight = *reinterpret_cast<const uint4*>(x_rows + (size_t)m * K + 8 * octet);
      unsigned b[4];
      ordered<BITS>(b, eight);
      held[(octet / 4 * NT + m / 8) * 32 + m % 8 * 4 + octet % 4] = make_uint4(b[0], b[1], b[2], b[3]);
    }
    __syncthreads();
    for (int i = warp; i < NT * (shares * SHARE / GROUP); i += WARPS) {
      float total[4];
#pragma unroll
      for (int u = 0; u < EACH; u++) {
        const uint4 x = held[((i / NT * EACH + u) * NT + i % NT) * 32 + lane];
        const unsigned b[4] = {x.x, x.y, x.z, x.w};
        add_up(total, b, u == 0);
      }
      if (g == 0) totals[i * 4 + t] = make_float2(total[0], total[1]);
    }
    __syncthreads();
  }

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sum[RT][NT][4];
#pragma unroll
    for (int i = 0; i < SUMS; i++) (&sum[0][0][0])[i] = 0.f;

    for (int share = warp; share < shares; share += WARPS) {
      __syncwarp();
      copy_ahead(slot == 0 ? STAGES - 1 : slot - 1);
      arrived<STAGES - 1>();
      __syncwarp();
      const unsigned char* const stage = ring + slot * STAGE;
      slot = slot + 1 == STAGES ? 0 : slot + 1;

#pragma unroll 1
      for (int chunk = share * SPAN; chunk < (share + 1) * SPAN && chunk * CHUNK < K; chunk++) {
      const unsigned char* const codes_here = stage + g * STRIDE + (chunk % SPAN) * (CHUNK * BITS / 8) + t * BITS;
      const unsigned char* const parts_here = stage + WEIGHTS + g * PART + (chunk % SPAN) * GROUPS * 2;
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
#pragma unroll
      for (int p = 0; p < PAIRS; p++) {
        unsigned scale[RT][2], bias[RT][2];
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const unsigned char* const from = parts_here + (32 * r + 8 * h) * PART + 4 * p;
            scale[r][h] = GROUPS > 1 ? *reinterpret_cast<const unsigned*>(from) : *reinterpret_cast<const unsigned short*>(from);
            bias[r][h] = GROUPS > 1 ? *reinterpret_cast<const unsigned*>(from + 16 * PART)
                                    : *reinterpret_cast<const unsigned short*>(from + 16 * PART);
          }
#pragma unroll
        for (int j = 2 * p; j < min(2 * p + 2, GROUPS); j++) {
          float product[RT][NT][4], total[NT][4];
          if constexpr (HOLD) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
              const float2 two = totals[((chunk * GROUPS + j) * NT + n) * 4 + t];
              total[n][0] = two.x, total[n][1] = two.y;
            }
          }
#pragma unroll
          for (int u = j * EACH; u < (j + 1) * EACH; u++) {
            unsigned b[NT][4];
#pragma unroll
            for (int n = 0; n < NT; n++) {
              if constexpr (HOLD) {
                b[n][0] = xs[u][n].x, b[n][1] = xs[u][n].y, b[n][2] = xs[u][n].z, b[n][3] = xs[u][n].w;
              } else {
                ordered<BITS>(b[n], xs[u][n]);
                add_up(total[n], b[n], u == j * EACH);
              }
            }
#pragma unroll
            for (int r = 0; r < RT; r++) {
              unsigned codes[2][4];
#pragma unroll
              for (int h = 0; h < 2; h++) {
                unsigned words[BITS / 4];
                const unsigned char* const from = codes_here + (16 * r + 8 * h) * STRIDE + u * 4 * BITS;
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
                for (int n = 0; n < NT; n++)
                  if (u == j * EACH && half == 0)
                    mma_first(product[r][n], a, b[n][half], b[n][half + 1], T());
                  else
                    mma(product[r][n], a, b[n][half], b[n][half + 1], T());
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
                for (int e = 0; e < 2; e++) {
                  float& all = sum[r][n][2 * h + e];
                  all = fmaf(s, product[r][n][2 * h + e], fmaf(shift, total[n][e], all));
                }
            }
        }
      }
      }
    }

    // Add what the warps have, in the order of the warps.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SUMS; i++) others[(warp * SUMS + i) * 32 + lane] = (&sum[0][0][0])[i];
    __syncthreads();
    const Part part = part_of(tile);
    for (int i = warp; i < SUMS; i += WARPS) {
      float all = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) all += others[(w * SUMS + i) * 32 + lane];
      const int n = part.tile * ROWS + i / (4 * NT) * 16 + (i >> 1 & 1) * 8 + g, m = i / 4 % NT * 8 + 2 * t + (i & 1);
      if (n < part.outputs && m < M) part.out[(size_t)m * part.outputs + n] = T(all);
    }
  }
