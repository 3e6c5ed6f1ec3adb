// The 256-bit vector that wide.h computes with, for avx2.cpp and avxvnni.cpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace thimble {
namespace {

struct V {
  using Reg = __m256i;
  static constexpr int BYTES = 32;

  static Reg load(const void* at) { return _mm256_loadu_si256(static_cast<const Reg*>(at)); }
  static void store(void* at, Reg a) { _mm256_storeu_si256(static_cast<Reg*>(at), a); }
  static void prefetch(const uint8_t* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }
  static Reg zero() { return _mm256_setzero_si256(); }
  static Reg set8(int a) { return _mm256_set1_epi8(char(a)); }
  static Reg set16(int a) { return _mm256_set1_epi16(short(a)); }
  static Reg set32(int a) { return _mm256_set1_epi32(a); }
  static Reg both(Reg a, Reg b) { return _mm256_and_si256(a, b); }
  static Reg add8(Reg a, Reg b) { return _mm256_add_epi8(a, b); }
  static Reg add16(Reg a, Reg b) { return _mm256_add_epi16(a, b); }
  static Reg add32(Reg a, Reg b) { return _mm256_add_epi32(a, b); }
  static Reg add64(Reg a, Reg b) { return _mm256_add_epi64(a, b); }
  static Reg subtract_floor8(Reg a, Reg b) { return _mm256_subs_epu8(a, b); }
  static Reg smaller8(Reg a, Reg b) { return _mm256_min_epu8(a, b); }
  static Reg multiply32(Reg a, Reg b) { return _mm256_mul_epi32(a, b); }  // low int32 of each 64 bits -> int64
  static Reg multiply_add8(Reg a, Reg b) { return _mm256_maddubs_epi16(a, b); }
  static Reg multiply_add16(Reg a, Reg b) { return _mm256_madd_epi16(a, b); }
  static Reg shift32(Reg a, Reg by) { return _mm256_sllv_epi32(a, by); }
  static Reg shuffle8(Reg table, Reg at) { return _mm256_shuffle_epi8(table, at); }
  static Reg unpack_low8(Reg a, Reg b) { return _mm256_unpacklo_epi8(a, b); }
  static Reg unpack_high8(Reg a, Reg b) { return _mm256_unpackhi_epi8(a, b); }
  static Reg unpack_low16(Reg a, Reg b) { return _mm256_unpacklo_epi16(a, b); }
  static Reg unpack_high16(Reg a, Reg b) { return _mm256_unpackhi_epi16(a, b); }
  template <int N>
  static Reg right16(Reg a) {
    return _mm256_srli_epi16(a, N);
  }
  template <int N>
  static Reg left16(Reg a) {
    return _mm256_slli_epi16(a, N);
  }
  template <int N>
  static Reg right64(Reg a) {
    return _mm256_srli_epi64(a, N);
  }

  static int64_t total64(Reg a) {
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    return _mm_cvtsi128_si64(half) + _mm_extract_epi64(half, 1);
  }

  // Twice the 16 E2M1 values, in every 128-bit lane.
  static Reg codes() {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  }

  // The integer scales of 8 groups: those of the first vector of codes (4 groups) in the low int32 of each 64 bits, of
  // the second in the high ones. An E4M3 code shifted into a half's exponent field is its value / 2^8, subnormals too;
  // times 2^17 it is the integer.
  static Reg scales(const uint8_t* codes) {
    const __m128i order = _mm_setr_epi8(-1, 0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7);
    const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    const __m128i halves = _mm_srli_epi16(_mm_shuffle_epi8(raw, order), 1);
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(131072.0f)));
  }

  // 64 bytes as two vectors whose lanes are bytes 0-15, 32-47 and 16-31, 48-63.
  static void load_halves(const uint8_t* at, Reg& first, Reg& second) {
    const Reg a = load(at), b = load(at + 32);
    first = _mm256_permute2x128_si256(a, b, 0x20);
    second = _mm256_permute2x128_si256(a, b, 0x31);
  }
};

}  // namespace
}  // namespace thimble
