// kernels/elementary/reference.py in C++: the same operations in the same order, so the same bits. Written so that a
// compiler can run several values side by side; that changes no value, because nothing is contracted or reordered.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// One body for several instruction sets, chosen when the library is loaded. Only where compilers and loaders have it.
#if defined(THIMBLE_CLONES)  // given by a test that compiles one of them alone
#elif defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__)
#define THIMBLE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define THIMBLE_CLONES
#endif
#define THIMBLE_INLINE inline __attribute__((always_inline))  // else a function would not be part of its caller's clones

namespace thimble {
namespace {

constexpr int EXP_TERMS = 11, LOG_TERMS = 10;
constexpr double EXP_SERIES[EXP_TERMS] = {1.0,         1.0,          1.0 / 2,       1.0 / 6,        1.0 / 24,     1.0 / 120,
                                          1.0 / 720,   1.0 / 5040,   1.0 / 40320,   1.0 / 362880,   1.0 / 3628800};

// x within -200 to 200, a NaN as it is. In integers: of comparisons of numbers a compiler makes branches, since they may
// trap, and then cannot run several side by side.
THIMBLE_INLINE double within_200(double x) {
  constexpr int64_t SIGN = INT64_MIN, LIMIT = 0x4069000000000000;  // the bits of 200.0
  constexpr int64_t INFINITE = 0x7FF0000000000000, QUIET = 0x7FF8000000000000;
  int64_t bits;
  std::memcpy(&bits, &x, 8);
  const int64_t size = bits & ~SIGN, is_nan = (INFINITE - size) >> 63;
  bits = (size < LIMIT ? size : LIMIT) | (is_nan & QUIET) | (bits & SIGN);
  std::memcpy(&x, &bits, 8);
  return x;
}

// e^x, for |x| beyond 200 that of 200.
THIMBLE_INLINE double exp_of(double x) {
  constexpr double LN_2 = 0.6931471805599453, LOG2_E = 1.0 / LN_2;
  constexpr double WHOLE = 0x1.8p52;  // adding it leaves no bits for a fraction: rounds to the nearest, half to even
  x = within_200(x);
  const double shifted = x * LOG2_E + WHOLE;
  const double n = shifted - WHOLE;
  const double r = x - n * LN_2;
  double series = EXP_SERIES[EXP_TERMS - 1];
  for (int k = EXP_TERMS - 2; k >= 0; k--) series = series * r + EXP_SERIES[k];
  uint64_t bits;
  std::memcpy(&bits, &shifted, 8);
  bits = (bits + 1023) << 52;  // the low bits of `shifted` are n
  double power;
  std::memcpy(&power, &bits, 8);
  return series * power;
}

THIMBLE_INLINE float sigmoid(float x) { return float(1.0 / (exp_of(-double(x)) + 1.0)); }
THIMBLE_INLINE float silu(float x) { return float(double(x) / (exp_of(-double(x)) + 1.0)); }

THIMBLE_INLINE float softplus(float x) {
  const double t = exp_of(-std::fabs(double(x)));
  const double s = t / (t + 2.0), square = s * s;
  double series = 1.0 / (2 * LOG_TERMS - 1);
  for (int k = LOG_TERMS - 2; k >= 0; k--) series = series * square + 1.0 / (2 * k + 1);
  return float(series * s * 2.0 + (x < 0.0f ? 0.0 : double(x)));
}

// The sum of `count` >= 1 rows of `width` values each, row after row in `rows`; ends in the first row, the others are
// used up. Folds the upper half of the next power of two onto the lower one until one row is left.
template <class Number>
THIMBLE_INLINE void total_rows(Number* rows, int64_t count, int64_t width) {
  int64_t half = 1;
  while (half < count) half *= 2;
  for (half /= 2; half; half /= 2) {
    const int64_t fold = (count - half) * width;
    const Number* high = rows + half * width;
    for (int64_t i = 0; i < fold; i++) rows[i] += high[i];
    count = half;
  }
  for (int64_t i = 0; i < width; i++) rows[i] += Number(0);
}

THIMBLE_INLINE float total(float* values, int64_t count) {
  total_rows(values, count, 1);
  return values[0];
}

}  // namespace
}  // namespace thimble
