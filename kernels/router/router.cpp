// The choice of experts: kernels/router/reference.py, bit for bit.

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/elementary/elementary.h"
#include "kernels/workers/abi.h"

using namespace thimble;

namespace {

THIMBLE_CLONES void score(const float* logits, const float* bias, float* scores, float* choices, int64_t experts) {
  for (int64_t e = 0; e < experts; e++) {
    scores[e] = sigmoid(logits[e]);
    choices[e] = scores[e] + bias[e];
  }
}

}  // namespace

// logits[rows, experts] with `stride` between rows -> ids and weights [rows, top_k], in router rank.
THIMBLE_API void thimble_choose(const float* logits, int64_t stride, const float* bias, int32_t* ids, float* weights,
                                int64_t rows, int64_t experts, int64_t top_k, float scale, int64_t normalise) {
  std::vector<float> scores(experts), choices(experts);
  std::vector<int32_t> order(experts);
  const auto before = [&](int32_t a, int32_t b) {
    const float x = choices[a], y = choices[b];
    if (std::isnan(x) != std::isnan(y)) return std::isnan(x);  // as torch sorts
    return x > y || (!(x < y) && a < b);
  };
  for (int64_t row = 0; row < rows; row++) {
    score(logits + row * stride, bias, scores.data(), choices.data(), experts);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + top_k, order.end(), before);
    float sum = scores[order[0]];
    for (int64_t rank = 1; rank < top_k; rank++) sum += scores[order[rank]];
    for (int64_t rank = 0; rank < top_k; rank++) {
      const float weight = normalise ? scores[order[rank]] / (sum + 1e-20f) : scores[order[rank]];
      ids[row * top_k + rank] = order[rank];
      weights[row * top_k + rank] = weight * scale;
    }
  }
}
