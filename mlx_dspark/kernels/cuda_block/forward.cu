  // Phases of a forward, a meeting of the grid between two: the target's features of positions that are not in
  // the context yet to their keys and values, and a block's embeddings through the layers.
  using namespace block;
  constexpr int Q = HEADS * D, KV = KV_HEADS * D, QKV = Q + 2 * KV, EACH = D / 32;
  constexpr long long LAYER = (long long)HIDDEN * (QKV + Q + 3 * WIDE), AFTER_FC = (long long)HIDDEN * FEATURES;
  constexpr int NORMS = 2 * HIDDEN + 2 * D, PHASES = 2 + 5 * LAYERS;
#ifndef FIRST_PHASE
#define FIRST_PHASE 0
#define LAST_PHASE PHASES
#endif
  const int seen = at[0], from = at[1], tail = at[2], position = at[3], capacity = at[4];
  const unsigned mark = (unsigned)at[5];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Weights<T, BITS, GROUP> held{words, scales, biases};
  const float *hidden_norm = norms, *last_norm = norms + HIDDEN, *angles = norms + 2 * HIDDEN;
  const float* layer_norms = angles + D / 2;
  const T* all_keys[LAYERS] = {KEYS};
  const T* all_values[LAYERS] = {VALUES};

  float* fused = scratch;
  float* context = fused + TAIL * HIDDEN;
  float* streams = context + LAYERS * TAIL * 2 * KV;
  float* projected = streams + (LAYERS + 1) * SLOTS * HIDDEN;
  float* attended = projected + LAYERS * SLOTS * QKV;
  float* middle = attended + LAYERS * SLOTS * Q;
  float* widened = middle + LAYERS * SLOTS * HIDDEN;
  unsigned* flags = reinterpret_cast<unsigned*>(widened + LAYERS * SLOTS * WIDE);

  __shared__ float inverse[TAIL + SLOTS], shares[WARPS][D], tops[WARPS], weights_of[WARPS];

  auto project = [&](int layer) {
    const float* h = streams + layer * SLOTS * HIDDEN;
    float* out = projected + layer * SLOTS * QKV;
    root_mean_squares<HIDDEN>(h, SLOTS, EPS, inverse);
    product<HIDDEN, QKV, true, T>(held, AFTER_FC + layer * LAYER, h, SLOTS, layer_norms + layer * NORMS,
                                  [&](int r, int column, float x) { out[r * QKV + column] = x * inverse[r]; });
  };

  for (int phase = FIRST_PHASE; phase < LAST_PHASE; phase++) {
    const int layer = (phase - 2) / 5, step = (phase - 2) % 5;
    const float* own_norms = layer_norms + layer * NORMS;
    const long long own = AFTER_FC + layer * LAYER;
    if (phase == 0) {
      product<FEATURES, HIDDEN, false, T>(held, 0, features, tail, norms,
                                          [&](int r, int column, float x) { fused[r * HIDDEN + column] = x; });
      for (int i = blockIdx.x * THREADS + threadIdx.x; i < SLOTS * HIDDEN; i += gridDim.x * THREADS)
        streams[i] = float(embedded[i]);
    } else if (phase == 1) {
      root_mean_squares<HIDDEN>(fused, tail, EPS, inverse);
      for (int l = 0; l < LAYERS; l++) {
        float* out = context + l * TAIL * 2 * KV;
        product<HIDDEN, 2 * KV, true, T>(
            held, AFTER_FC + l * LAYER + (long long)Q * HIDDEN, fused, tail, hidden_norm,
            [&](int r, int column, float x) { out[r * 2 * KV + column] = x * inverse[r]; });
      }
      __syncthreads();
      project(0);
    } else if (step == 0) {
      const float *raw = projected + layer * SLOTS * QKV, *waiting = context + layer * TAIL * 2 * KV;
      const float *query_norm = own_norms + 2 * HIDDEN, *key_norm = query_norm + D;
      for (int task = blockIdx.x; task < HEADS * SLOTS; task += gridDim.x) {
        const int head = task % HEADS, slot = task / HEADS, group = head / (HEADS / KV_HEADS);
        const T* keys = all_keys[layer] + ((long long)group * capacity + from) * D;
        const T* values = all_values[layer] + ((long long)group * capacity + from) * D;
        float query[EACH], key[EACH], sum[EACH] = {}, top = __int_as_float(0xff800000), weight = 0.f;
        rotated<D>(raw + slot * QKV + head * D, query_norm, angles, position + slot, EPS, lane, query);
        const int last = CAUSAL ? slot + 1 : SLOTS;
        for (int i = warp; i < seen + tail + last; i += WARPS) {
          float value[EACH];
          if (i < seen) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
              key[j] = float(keys[(long long)i * D + lane + 32 * j]);
              value[j] = float(values[(long long)i * D + lane + 32 * j]);
            }
          } else {
            const bool old = i < seen + tail;
            const int r = old ? i - seen : i - seen - tail;
            const float* its = old ? waiting + r * 2 * KV + group * D : raw + r * QKV + Q + group * D;
            rotated<D>(its, key_norm, angles, position + (old ? r - tail : r), EPS, lane, key);
#pragma unroll
            for (int j = 0; j < EACH; j++) value[j] = its[KV + lane + 32 * j];
          }
          float score = 0.f;
#pragma unroll
          for (int j = 0; j < EACH; j++) score += query[j] * key[j];
          score = sum_of_warp(score) * SCALE;
          const float higher = max(top, score), fade = expf(top - higher), its_share = expf(score - higher);
          weight = weight * fade + its_share, top = higher;
#pragma unroll
          for (int j = 0; j < EACH; j++) sum[j] = sum[j] * fade + its_share * value[j];
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) shares[warp][lane + 32 * j] = sum[j];
        if (lane == 0) tops[warp] = top, weights_of[warp] = weight;
        __syncthreads();
        for (int d = threadIdx.x; d < D; d += THREADS) {
          float most = tops[0], total = 0.f, out = 0.f;
          for (int w = 1; w < WARPS; w++) most = max(most, tops[w]);
          for (int w = 0; w < WARPS; w++) {
            if (weights_of[w] == 0.f) continue;
            const float its_share = expf(tops[w] - most);
            total += weights_of[w] * its_share, out += shares[w][d] * its_share;
          }
          attended[(layer * SLOTS + slot) * Q + head * D + d] = out / total;
        }
        __syncthreads();
      }
    } else if (step == 1) {
      const float* h = streams + layer * SLOTS * HIDDEN;
      float* out = middle + layer * SLOTS * HIDDEN;
      product<Q, HIDDEN, false, T>(
          held, own + (long long)HIDDEN * QKV, attended + layer * SLOTS * Q, SLOTS, norms,
          [&](int r, int column, float x) { out[r * HIDDEN + column] = h[r * HIDDEN + column] + x; });
    } else if (step == 2) {
      const float *h = middle + layer * SLOTS * HIDDEN, *norm = own_norms + HIDDEN;
      const long long gate = own + (long long)HIDDEN * (QKV + Q), up = gate + (long long)HIDDEN * WIDE;
      float* out = widened + layer * SLOTS * WIDE;
      root_mean_squares<HIDDEN>(h, SLOTS, EPS, inverse);
      product<HIDDEN, WIDE, true, T>(held, gate, h, SLOTS, norm, [&](int r, int column, float x) {
        x *= inverse[r];
        out[r * WIDE + column] = x / (1.f + expf(-x));
      });
      product<HIDDEN, WIDE, true, T>(held, up, h, SLOTS, norm, [&](int r, int column, float x) {
        out[r * WIDE + column] *= x * inverse[r];
      });
    } else if (step == 3) {
      const float* h = middle + layer * SLOTS * HIDDEN;
      float* out = streams + (layer + 1) * SLOTS * HIDDEN;
      product<WIDE, HIDDEN, false, T>(
          held, own + (long long)HIDDEN * (QKV + Q + 2 * WIDE), widened + layer * SLOTS * WIDE, SLOTS, norms,
          [&](int r, int column, float x) { out[r * HIDDEN + column] = h[r * HIDDEN + column] + x; });
    } else if (layer + 1 < LAYERS) {
      project(layer + 1);
    } else {
      const float* h = streams + LAYERS * SLOTS * HIDDEN;
      root_mean_squares<HIDDEN>(h, SLOTS, EPS, inverse);
      for (int i = blockIdx.x * THREADS + threadIdx.x; i < SLOTS * HIDDEN; i += gridDim.x * THREADS)
        hidden[i] = T(h[i] * inverse[i / HIDDEN] * last_norm[i % HIDDEN]);
    }
    if (phase + 1 < LAST_PHASE) meet(flags + phase * gridDim.x, mark);
  }
