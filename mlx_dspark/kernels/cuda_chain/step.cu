  // One step for each row (blockIdx.y): find the draft before among what the blocks of the last step found,
  // look its row of the table up, and find the best of this block's part of the vocabulary.
  using namespace chain;
  constexpr int THREADS = 256, WARPS = THREADS / 32;
  const int row = blockIdx.y, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int slot = at[0], width = base_shape[1], vocab = base_shape[2];
  __shared__ float embedded[RANK], values[WARPS];
  __shared__ int indices[WARPS], chosen;

#if FIRST
  if (thread == 0) chosen = anchors[row];
#else
  if (warp == 0) {
    const int count = before_shape[1];
    float best = __int_as_float(0xff800000);
    int index = 0x7fffffff;
    for (int i = lane; i < count; i += 32) {
      const float value = before[row * count + i];
      const int its = before_index[row * count + i];
      if (better(value, its, best, index)) best = value, index = its;
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
      const float value = __shfl_xor_sync(0xffffffffu, best, step);
      const int its = __shfl_xor_sync(0xffffffffu, index, step);
      if (better(value, its, best, index)) best = value, index = its;
    }
    index = min(max(index, 0), vocab - 1);
#if IDS
    if (lane == 0) chosen = ids[index];
#else
    if (lane == 0) chosen = index;
#endif
  }
#endif
  __syncthreads();
  const int token = chosen;
  if (blockIdx.x == 0)
    for (int i = thread; i < width; i += THREADS) {
#if FIRST
      tokens[row * width + i] = 0;
#else
      tokens[row * width + i] = i < slot - 1 ? tokens_before[row * width + i] : i == slot - 1 ? token : 0;
#endif
    }
#if !LAST
  for (int i = thread; i < RANK; i += THREADS) {
    float number = code<T, TABLE_BITS>(table + (long long)token * (RANK * TABLE_BITS / 32), i);
#if TABLE_PACKED
    const long long group = (long long)token * (RANK / TABLE_GROUP) + i / TABLE_GROUP;
    number = number * float(table_scales[group]) + float(table_biases[group]);
#endif
    embedded[i] = number;
  }
  __syncthreads();

  constexpr int WORDS = RANK * BITS / 32, LANES = WORDS / 4, PER = 128 / BITS, TOGETHER = 32 / LANES;
  const int part = lane % LANES;
  float mine[PER], total = 0.f;
#pragma unroll
  for (int i = 0; i < PER; i++) total += mine[i] = embedded[part * PER + i];
  const int share = (vocab + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share, end = min(first + share, vocab);
  float best = __int_as_float(0xff800000);
  int index = 0x7fffffff;
  for (int from = first + warp * TOGETHER; from < end; from += WARPS * TOGETHER) {
    const int j = from + lane / LANES, known = min(j, vocab - 1);
    const uint4 four = reinterpret_cast<const uint4*>(weights)[(long long)known * LANES + part];
    const unsigned words[4] = {four.x, four.y, four.z, four.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER; i++) sum += code<T, BITS>(words, i) * mine[i];
#if PACKED
    const long long group = (long long)known * (RANK / GROUP) + part * PER / GROUP;
    sum = sum * float(scales[group]) + float(biases[group]) * total;
#endif
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float value = sum + float(base[((long long)row * width + slot) * vocab + known]);
    if (j < end && better(value, j, best, index)) best = value, index = j;
  }
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const float value = __shfl_xor_sync(0xffffffffu, best, step);
    const int its = __shfl_xor_sync(0xffffffffu, index, step);
    if (better(value, its, best, index)) best = value, index = its;
  }
  if (lane == 0) values[warp] = best, indices[warp] = index;
  __syncthreads();
  if (thread == 0) {
    for (int w = 1; w < WARPS; w++)
      if (better(values[w], indices[w], best, index)) best = values[w], index = indices[w];
    found[row * gridDim.x + blockIdx.x] = best;
    found_index[row * gridDim.x + blockIdx.x] = index;
  }
#endif
