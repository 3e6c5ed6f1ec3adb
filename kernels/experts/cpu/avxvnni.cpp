// The expert sums with AVX-VNNI (Intel's PC processors since 2021): one instruction for four byte products.

#include "kernels/experts/cpu/sums.h"

#if defined(__AVXVNNI__) && defined(__F16C__)

#include "kernels/experts/cpu/vector256.h"

namespace thimble {
namespace {

// As in avx2.cpp.
inline V::Reg dots(V::Reg even, V::Reg odd, const Input& input, int at) {
  const V::Reg bias = V::set8(12);
  V::Reg low = _mm256_dpbusd_avx_epi32(V::load(input.bias + at / 4), V::load(input.low_even + at), even);
  low = _mm256_dpbusd_avx_epi32(low, V::load(input.low_odd + at), odd);
  V::Reg high = _mm256_dpbusd_avx_epi32(V::zero(), V::add8(even, bias), V::load(input.high_even + at));
  high = _mm256_dpbusd_avx_epi32(high, V::add8(odd, bias), V::load(input.high_odd + at));
  return V::add32(low, _mm256_slli_epi32(high, 8));
}

}  // namespace
}  // namespace thimble

#include "kernels/experts/cpu/wide.h"

const thimble::Kernels* thimble::avxvnni_kernels() {
  static const Kernels kernels{"avxvnni", up, down};
  return &kernels;
}

#else

const thimble::Kernels* thimble::avxvnni_kernels() { return nullptr; }

#endif
