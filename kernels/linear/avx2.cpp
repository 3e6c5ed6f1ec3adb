// 16 lanes as two 256-bit vectors.

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

namespace thimble {
namespace {

struct L {
  static constexpr int ROWS = 2, OUTPUTS = 3;  // 6 sums of two registers, of 16
  __m256 low, high;

  static L zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static L load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
  static L load_part(const float* at, int count) {
    alignas(32) float padded[16] = {};
    for (int i = 0; i < count; i++) padded[i] = at[i];
    return load(padded);
  }
  static L fma(const L& a, const L& b, const L& c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  float fold() const {
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
};

}  // namespace
}  // namespace thimble

#include "kernels/linear/tile.h"

thimble::LinearTile thimble::avx2_linear() { return tile; }

#else

#include "kernels/linear/linear.h"

thimble::LinearTile thimble::avx2_linear() { return nullptr; }

#endif
