// What a sum of values is multiplied by in the end. `top` is the largest score and `total` the sum of the shares
// relative to it; `sink` joins the softmax. Scores are in base 2. A query that sees nothing gets zeros.
inline float few_queries_factor(float top, float total, bool with_sink, float sink) {
  float most = top;
  if (with_sink) most = metal::max(top, sink);
  const float kept = metal::fast::exp2(top - most);
  const float all = total * kept + (with_sink ? metal::fast::exp2(sink - most) : 0.0f);
  return all > 0.0f ? kept / all : 0.0f;
}
