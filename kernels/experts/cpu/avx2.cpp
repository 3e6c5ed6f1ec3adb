// The expert sums with AVX2 (any PC since 2013): bytes are multiplied in pairs to int16, those in pairs to int32.

#include "kernels/experts/cpu/sums.h"

#if defined(__AVX2__) && defined(__F16C__)

#include "kernels/experts/cpu/vector256.h"

namespace thimble {
namespace {

// int32 x 8: each the dot product of 8 codes with one token's input, whose planes start at byte `at`. The low bytes of
// the input are unsigned and meet signed codes; the high bytes are signed and meet codes + 12. Four products fit int16.
inline V::Reg dots(V::Reg even, V::Reg odd, const Input& input, int at) {
  const V::Reg bias = V::set8(12);
  const V::Reg low = V::add16(V::multiply_add8(V::load(input.low_even + at), even),
                              V::multiply_add8(V::load(input.low_odd + at), odd));
  const V::Reg high = V::add16(V::multiply_add8(V::add8(even, bias), V::load(input.high_even + at)),
                               V::multiply_add8(V::add8(odd, bias), V::load(input.high_odd + at)));
  return V::add32(V::add32(V::multiply_add16(low, V::set16(1)), V::load(input.bias + at / 4)),
                  V::multiply_add16(high, V::set16(256)));
}

}  // namespace
}  // namespace thimble

#include "kernels/experts/cpu/wide.h"

const thimble::Kernels* thimble::avx2_kernels() {
  static const Kernels kernels{"avx2", up, down};
  return &kernels;
}

#else

const thimble::Kernels* thimble::avx2_kernels() { return nullptr; }

#endif
