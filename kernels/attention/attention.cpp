// Causal grouped-query attention: kernels/attention/reference.py, bit for bit.

#include <vector>

#include "kernels/elementary/elementary.h"
#include "kernels/workers/abi.h"

using namespace thimble;

// query[rows, heads, size] with `stride` between rows, key and value [tokens, kv_heads, size] -> out[rows, heads, size].
// Query i sees the first `first` + i + 1 tokens.
THIMBLE_API THIMBLE_CLONES void thimble_attend(const float* query, int64_t stride, const float* key, const float* value,
                                               float* out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t size,
                                               int64_t first, float scale) {
  const int64_t most = first + rows;
  std::vector<float> products(size), shares(most), sums(most), mixed(most * size);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t tokens = first + row + 1;
    for (int64_t head = 0; head < heads; head++) {
      const int64_t kv = head / (heads / kv_heads);
      const float* q = query + row * stride + head * size;
      float top = -INFINITY;
      bool nan = false;
      for (int64_t t = 0; t < tokens; t++) {
        const float* k = key + (t * kv_heads + kv) * size;
        for (int64_t i = 0; i < size; i++) products[i] = q[i] * k[i];
        const float score = total(products.data(), size) * scale;
        shares[t] = score;
        nan |= std::isnan(score);
        top = score > top ? score : top;
      }
      if (nan) top = NAN;
      for (int64_t t = 0; t < tokens; t++) shares[t] = float(exp_of(double(shares[t] - top)));
      for (int64_t t = 0; t < tokens; t++) {
        const float* v = value + (t * kv_heads + kv) * size;
        for (int64_t i = 0; i < size; i++) mixed[t * size + i] = shares[t] * v[i];
        sums[t] = shares[t];
      }
      total_rows(mixed.data(), tokens, size);
      const float sum = total(sums.data(), tokens);
      for (int64_t i = 0; i < size; i++) out[(row * heads + head) * size + i] = mixed[i] / sum;
    }
  }
}
