// 16 lanes as one 512-bit vector.

#if defined(__AVX512F__) && defined(__AVX512DQ__)

#include <immintrin.h>

namespace thimble {
namespace {

struct L {
  static constexpr int ROWS = 4, OUTPUTS = 4;  // 16 sums, of 32 registers
  __m512 lanes;

  static L zero() { return {_mm512_setzero_ps()}; }
  static L load(const float* at) { return {_mm512_loadu_ps(at)}; }
  static L load_part(const float* at, int count) { return {_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), at)}; }
  static L fma(const L& a, const L& b, const L& c) { return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }
  float fold() const {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
};

}  // namespace
}  // namespace thimble

#include "kernels/linear/tile.h"

thimble::LinearTile thimble::avx512_linear() { return tile; }

#else

#include "kernels/linear/linear.h"

thimble::LinearTile thimble::avx512_linear() { return nullptr; }

#endif
