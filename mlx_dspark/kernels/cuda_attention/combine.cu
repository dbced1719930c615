  // parts [rows, width, heads, splits, D], weights [..., splits, 2]: one block of D threads for each query.
  const int splits = parts_shape[3];
  const long long at = blockIdx.x;
  const float never = __int_as_float(0xff800000);
  float most = never, total = 0.f, sum = 0.f;
  for (int s = 0; s < splits; s++) most = fmaxf(most, weights[(at * splits + s) * 2]);
  const float origin = most > never ? most : 0.f;
  for (int s = 0; s < splits; s++) {
    const float share = exp2f(weights[(at * splits + s) * 2] - origin);
    total += share * weights[(at * splits + s) * 2 + 1];
    sum += share * parts[(at * splits + s) * D + threadIdx.x];
  }
  out[at * D + threadIdx.x] = T(total > 0.f ? sum / total : 0.f);
