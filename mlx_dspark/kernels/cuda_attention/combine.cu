  // parts [rows, width, heads, splits, D] and weights [..., splits, 2] to out [rows, width, heads, D]: a block for each
  // query, four dims a thread.
  using namespace few_queries;
  using lanes::packed;
  constexpr int LANES = D / 4, WAYS = THREADS / LANES;
  const int splits = parts_shape[3], lane = threadIdx.x & 31, way = threadIdx.x / LANES, four = threadIdx.x % LANES;
  const long long at = blockIdx.x;
  const float NEVER = __int_as_float(0xff800000);
  const float2* const tops = reinterpret_cast<const float2*>(weights) + at * splits;
  const float4* const mine = reinterpret_cast<const float4*>(parts) + at * splits * LANES + four;
  float most = NEVER, total = 0.f, sum[4] = {};
  for (int s = lane; s < splits; s += 32) most = fmaxf(most, tops[s].x);
#pragma unroll
  for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  const float origin = most == NEVER ? 0.f : most;
  for (int s = lane; s < splits; s += 32) total += exp2f(tops[s].x - origin) * tops[s].y;
#pragma unroll
  for (int step = 16; step; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
#pragma unroll 8
  for (int s = way; s < splits; s += WAYS) {
    const float4 part = mine[s * LANES];
    const float share = exp2f(tops[s].x - origin);
    sum[0] += share * part.x, sum[1] += share * part.y, sum[2] += share * part.z, sum[3] += share * part.w;
  }
  __shared__ float4 sums[WAYS][LANES];
  sums[way][four] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();
  if (way) return;
#pragma unroll
  for (int w = 1; w < WAYS; w++) {
    const float4 other = sums[w][four];
    sum[0] += other.x, sum[1] += other.y, sum[2] += other.z, sum[3] += other.w;
  }
  const float share = total > 0.f ? 1.f / total : 0.f;
  reinterpret_cast<unsigned*>(out + at * D)[2 * four] = packed(sum[0] * share, sum[1] * share, T());
  reinterpret_cast<unsigned*>(out + at * D)[2 * four + 1] = packed(sum[2] * share, sum[3] * share, T());
