// Penalties and log probabilities: kernels/sampling/penalties.py, bit for bit.

#include <vector>

#include "kernels/elementary/elementary.h"
#include "kernels/sampling/logits.h"
#include "kernels/workers/abi.h"

using namespace thimble;

namespace {

struct Rank {
  int32_t order, id;
};

// The sum of e^(x - top) over all ids, folded as kernels/elementary/reference.py's total; uses up `shares` [ids].
THIMBLE_CLONES double sum_of_shares(const float* x, int64_t ids, float top, double* shares) {
  for (int64_t i = 0; i < ids; i++) shares[i] = double(float(exp_of(double(x[i] - top))));
  total_rows(shares, ids, 1);
  return shares[0];
}

THIMBLE_CLONES int32_t highest(const float* x, int64_t count) {
  int32_t best = INT_MIN;
  for (int64_t i = 0; i < count; i++) {
    const int32_t order = order_of(x[i]);
    best = order > best ? order : best;
  }
  return best;
}

// The `count` highest logits, of equal ones the lowest ids, best first. Most stretches hold none of them: one maximum
// tells.
std::vector<Rank> best_of(const float* x, int64_t ids, size_t count) {
  constexpr int64_t STRIDE = 64;
  std::vector<Rank> best;
  for (int64_t start = 0; start < ids; start += STRIDE) {
    const int64_t end = std::min(start + STRIDE, ids);
    if (best.size() == count && highest(x + start, end - start) <= best.back().order) continue;
    for (int64_t i = start; i < end; i++) {
      const int32_t order = order_of(x[i]);
      if (best.size() == count && order <= best.back().order) continue;
      const auto lower = [](int32_t ours, const Rank& other) { return ours > other.order; };
      best.insert(std::upper_bound(best.begin(), best.end(), order, lower), {order, int32_t(i)});
      if (best.size() > count) best.pop_back();
    }
  }
  return best;
}

}  // namespace

// Changes logits[ids] in place. `prompt` holds ids, once or more often; `answer` different ids and how often each was
// said.
THIMBLE_API void thimble_penalise(float* logits, int64_t ids, const int32_t* prompt, int64_t prompt_ids,
                                  const int32_t* answer, const int32_t* counts, int64_t answer_ids, float repetition,
                                  float presence, float frequency) {
  if (repetition != 1.0f) {
    std::vector<bool> seen(ids);
    const auto repeat = [&](int32_t id) {
      if (seen[id]) return;
      seen[id] = true;
      logits[id] = logits[id] > 0 ? logits[id] / repetition : logits[id] * repetition;
    };
    for (int64_t i = 0; i < prompt_ids; i++) repeat(prompt[i]);
    for (int64_t i = 0; i < answer_ids; i++) repeat(answer[i]);
  }
  if (presence != 0 || frequency != 0)
    for (int64_t i = 0; i < answer_ids; i++) logits[answer[i]] -= presence + frequency * float(counts[i]);
}

// logits[ids] -> *largest, NaN if any is; if it is finite, *sum of e^(logit - largest); below[0], how far the logit of
// `id` lies below the largest (so at most zero); and the `top` best ids with theirs, below[1...].
THIMBLE_API void thimble_logprobs(const float* logits, int64_t ids, int64_t id, int64_t top, float* largest,
                                  double* sum, float* below, int32_t* best) {
  static thread_local std::vector<double> shares;
  const Extent extent = extent_of({logits, nullptr, ids});
  *largest = extent.has_nan ? NAN : value_of(extent.largest);
  if (!std::isfinite(*largest)) return;
  shares.resize(ids);
  *sum = sum_of_shares(logits, ids, *largest, shares.data());
  below[0] = logits[id] - *largest;
  if (top == 0) return;
  for (const Rank& rank : best_of(logits, ids, size_t(top))) {
    *best++ = rank.id;
    *++below = logits[rank.id] - *largest;
  }
}
