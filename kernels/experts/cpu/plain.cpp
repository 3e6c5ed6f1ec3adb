// The expert sums in plain C++, for any processor: one weight at a time, as the definition says.

#include "kernels/experts/cpu/sums.h"

namespace thimble {
namespace {

constexpr int8_t CODES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // 2 * E2M1

// 2^9 * E4M3 for a code that is neither negative nor NaN.
int32_t scale_integer(uint8_t code) {
  const int exponent = code >> 3, mantissa = code & 7;
  return exponent ? (mantissa | 8) << (exponent - 1) : mantissa;
}

void up(const Shape& shape, const uint8_t* block, const Input* inputs, int tokens, int begin, int end, int64_t* sums) {
  for (int n = begin; n < end; n++) {
    const uint8_t* row = block + shape.up_values + n * shape.row_bytes();
    const uint8_t* scales = block + shape.up_scales + int64_t(n) * shape.latent / GROUP;
    int64_t total[MOST_TOKENS] = {};
    for (int k = 0; k < shape.latent; k += GROUP) {
      int32_t codes[GROUP];
      for (int i = 0; i < GROUP / 2; i++) {
        codes[2 * i] = CODES[row[k / 2 + i] & 15];
        codes[2 * i + 1] = CODES[row[k / 2 + i] >> 4];
      }
      const int64_t scale = scale_integer(scales[k / GROUP]);
      for (int t = 0; t < tokens; t++) {
        const int16_t* x = inputs[t].values + k;
        int32_t dot = 0;
        for (int i = 0; i < GROUP; i++) dot += codes[i] * x[i];
        total[t] += scale * dot;
      }
    }
    for (int t = 0; t < tokens; t++) sums[int64_t(t) * (end - begin) + n - begin] = total[t];
  }
}

void down(const Shape& shape, const uint8_t* block, const Alive& alive, int tokens, int begin, int end, int64_t* sums) {
  constexpr int CHUNK = 32;
  for (int first = begin; first < end; first += CHUNK) {
    int64_t total[MOST_TOKENS][CHUNK] = {};
    for (int at = 0; at < alive.count;) {
      const int group = alive.rows[at] / GROUP;
      int32_t dots[MOST_TOKENS][CHUNK] = {};
      for (; at < alive.count && alive.rows[at] / GROUP == group; at++) {
        const uint8_t* row = block + shape.down_values + alive.rows[at] * shape.row_bytes() + first / 2;
        for (int t = 0; t < tokens; t++) {
          const int32_t value = alive.values[t][at];
          for (int j = 0; j < CHUNK; j += 2) {
            dots[t][j] += CODES[row[j / 2] & 15] * value;
            dots[t][j + 1] += CODES[row[j / 2] >> 4] * value;
          }
        }
      }
      const uint8_t* scales = block + shape.down_scales + int64_t(group) * shape.latent + first;
      for (int j = 0; j < CHUNK; j++) {
        const int64_t scale = scale_integer(scales[j]);
        for (int t = 0; t < tokens; t++) total[t][j] += scale * dots[t][j];
      }
    }
    for (int t = 0; t < tokens; t++)
      for (int j = 0; j < CHUNK; j++) sums[int64_t(t) * (end - begin) + first - begin + j] = total[t][j];
  }
}

}  // namespace

const Kernels* plain_kernels() {
  static const Kernels kernels{"plain", up, down};
  return &kernels;
}

}  // namespace thimble
