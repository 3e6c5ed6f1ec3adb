// The expert sums with AVX-512 VNNI (servers, AMD's PC processors since 2022): 512-bit vectors.

#include "kernels/experts/cpu/sums.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

namespace thimble {
namespace {

// The same operations as vector256.h's.
struct V {
  using Reg = __m512i;
  static constexpr int BYTES = 64;

  static Reg load(const void* at) { return _mm512_loadu_si512(at); }
  static void store(void* at, Reg a) { _mm512_storeu_si512(at, a); }
  static void prefetch(const uint8_t* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }
  static Reg zero() { return _mm512_setzero_si512(); }
  static Reg set8(int a) { return _mm512_set1_epi8(char(a)); }
  static Reg set16(int a) { return _mm512_set1_epi16(short(a)); }
  static Reg set32(int a) { return _mm512_set1_epi32(a); }
  static Reg both(Reg a, Reg b) { return _mm512_and_si512(a, b); }
  static Reg add8(Reg a, Reg b) { return _mm512_add_epi8(a, b); }
  static Reg add16(Reg a, Reg b) { return _mm512_add_epi16(a, b); }
  static Reg add32(Reg a, Reg b) { return _mm512_add_epi32(a, b); }
  static Reg add64(Reg a, Reg b) { return _mm512_add_epi64(a, b); }
  static Reg subtract_floor8(Reg a, Reg b) { return _mm512_subs_epu8(a, b); }
  static Reg smaller8(Reg a, Reg b) { return _mm512_min_epu8(a, b); }
  static Reg multiply32(Reg a, Reg b) { return _mm512_mul_epi32(a, b); }
  static Reg multiply_add8(Reg a, Reg b) { return _mm512_maddubs_epi16(a, b); }
  static Reg multiply_add16(Reg a, Reg b) { return _mm512_madd_epi16(a, b); }
  static Reg shift32(Reg a, Reg by) { return _mm512_sllv_epi32(a, by); }
  static Reg shuffle8(Reg table, Reg at) { return _mm512_shuffle_epi8(table, at); }
  static Reg unpack_low8(Reg a, Reg b) { return _mm512_unpacklo_epi8(a, b); }
  static Reg unpack_high8(Reg a, Reg b) { return _mm512_unpackhi_epi8(a, b); }
  static Reg unpack_low16(Reg a, Reg b) { return _mm512_unpacklo_epi16(a, b); }
  static Reg unpack_high16(Reg a, Reg b) { return _mm512_unpackhi_epi16(a, b); }
  template <int N>
  static Reg right16(Reg a) {
    return _mm512_srli_epi16(a, N);
  }
  template <int N>
  static Reg left16(Reg a) {
    return _mm512_slli_epi16(a, N);
  }
  template <int N>
  static Reg right64(Reg a) {
    return _mm512_srli_epi64(a, N);
  }

  static int64_t total64(Reg a) { return _mm512_reduce_add_epi64(a); }

  static Reg codes() {
    return _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  }

  // 16 groups, 8 of each vector of codes; see vector256.h.
  static Reg scales(const uint8_t* codes) {
    const __m128i order = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_shuffle_epi8(raw, order)), 7);
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(131072.0f)));
  }

  // 128 bytes as two vectors: the even and the odd ones of their eight 16-byte lanes.
  static void load_halves(const uint8_t* at, Reg& first, Reg& second) {
    const Reg a = load(at), b = load(at + 64);
    first = _mm512_shuffle_i64x2(a, b, 0x88);
    second = _mm512_shuffle_i64x2(a, b, 0xDD);
  }
};

// As in avx2.cpp.
inline V::Reg dots(V::Reg even, V::Reg odd, const Input& input, int at) {
  const V::Reg bias = V::set8(12);
  V::Reg low = _mm512_dpbusd_epi32(V::load(input.bias + at / 4), V::load(input.low_even + at), even);
  low = _mm512_dpbusd_epi32(low, V::load(input.low_odd + at), odd);
  V::Reg high = _mm512_dpbusd_epi32(V::zero(), V::add8(even, bias), V::load(input.high_even + at));
  high = _mm512_dpbusd_epi32(high, V::add8(odd, bias), V::load(input.high_odd + at));
  return V::add32(low, _mm512_slli_epi32(high, 8));
}

}  // namespace
}  // namespace thimble

#include "kernels/experts/cpu/wide.h"

const thimble::Kernels* thimble::avx512_kernels() {
  static const Kernels kernels{"avx512", up, down};
  return &kernels;
}

#else

const thimble::Kernels* thimble::avx512_kernels() { return nullptr; }

#endif
