// Logits as C++ reads them: in blocks, with the forbidden ids at -inf; their order and extent.
#pragma once

#include <algorithm>
#include <climits>

#include "kernels/elementary/elementary.h"

namespace thimble {
namespace {

constexpr int64_t BLOCK = 1024;  // ids; a multiple of a mask's word

struct Logits {
  const float* values;
  const uint32_t* allowed;  // bit i % 32 of word i / 32 allows id i; null: all are
  int64_t ids;

  float at(int64_t i) const {
    return allowed == nullptr || (allowed[i / 32] >> (i % 32) & 1) ? values[i] : -INFINITY;
  }

  // `count` logits from `start`, a multiple of 32: where they lie, or with a mask in `scratch`.
  THIMBLE_INLINE const float* block(int64_t start, int64_t count, float* scratch) const {
    if (allowed == nullptr) return values + start;
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
      const uint32_t word = allowed[(start + i) / 32];
      for (int64_t j = 0; j < 32; j++) scratch[i + j] = word >> j & 1 ? values[start + i + j] : -INFINITY;
    }
    for (; i < count; i++) scratch[i] = at(start + i);
    return scratch;
  }
};

// Integers of the same order as the numbers; those of a NaN with a sign are below that of -inf.
THIMBLE_INLINE int32_t order_of(float x) {
  x += 0.0f;  // a negative zero becomes zero
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

inline float value_of(int32_t order) {
  const int32_t bits = order ^ (order >> 31 & 0x7FFFFFFF);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Orders of the largest and of the smallest logit, -inf left out of the latter.
struct Extent {
  int32_t largest, smallest;
  bool has_nan;
};

THIMBLE_CLONES void extend(Logits logits, Extent* extent) {
  constexpr uint32_t SMALLEST = 0x80800000;
  constexpr int32_t INFINITE = 0x7F800000;
  float scratch[BLOCK];
  int32_t largest = INT_MIN, size = 0;
  uint32_t smallest = UINT_MAX;  // less that of the smallest finite number: -inf wraps round
  for (int64_t start = 0; start < logits.ids; start += BLOCK) {
    const int64_t count = std::min(BLOCK, logits.ids - start);
    const float* x = logits.block(start, count, scratch);
    for (int64_t i = 0; i < count; i++) {
      const int32_t order = order_of(x[i]);
      int32_t bits;
      std::memcpy(&bits, &x[i], 4);
      bits &= 0x7FFFFFFF;
      const uint32_t finite = uint32_t(order) - SMALLEST;
      largest = order > largest ? order : largest;
      smallest = finite < smallest ? finite : smallest;
      size = bits > size ? bits : size;
    }
  }
  *extent = {largest, int32_t(smallest + SMALLEST), size > INFINITE};
}

inline Extent extent_of(const Logits& logits) {
  Extent extent;
  extend(logits, &extent);
  return extent;
}

}  // namespace
}  // namespace thimble
