// `down` of an expert, from the checkpoint's [latent, width] to the block's neuron by neuron: kernels/block.py, byte for
// byte. Owns no offset and no check.

#include <cstdint>
#include <cstring>

#include "kernels/workers/abi.h"

namespace {

constexpr int SIDE = 16;
typedef uint8_t Row __attribute__((vector_size(SIDE)));

// Every byte of the first half (or of the second) of `a`, each followed by b's at the same place.
#if defined(__clang__)
Row first_halves(Row a, Row b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
Row second_halves(Row a, Row b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#else
Row first_halves(Row a, Row b) { return __builtin_shuffle(a, b, Row{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}); }
Row second_halves(Row a, Row b) {
  return __builtin_shuffle(a, b, Row{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
}
#endif

// A square of bytes across its diagonal: each of four rounds interleaves row i with row i + 8.
void transpose(Row (&square)[SIDE]) {
  Row other[SIDE];
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < SIDE / 2; i++) {
      other[2 * i] = first_halves(square[i], square[i + SIDE / 2]);
      other[2 * i + 1] = second_halves(square[i], square[i + SIDE / 2]);
    }
    for (int i = 0; i < SIDE / 2; i++) {
      square[2 * i] = first_halves(other[i], other[i + SIDE / 2]);
      square[2 * i + 1] = second_halves(other[i], other[i + SIDE / 2]);
    }
  }
}

// `wanted` bytes, which may be fewer than a row: the rest is zero.
Row load(const uint8_t* from, int64_t wanted) {
  Row row = {};
  if (wanted == SIDE)
    std::memcpy(&row, from, SIDE);
  else
    std::memcpy(&row, from, wanted);
  return row;
}

}  // namespace

// weight [latent, width/2], scale [latent, width/16] -> values [width, latent/2], scales [width/16, latent].
// latent is a multiple of 32, width one of 16.
THIMBLE_API void thimble_block_down(const uint8_t* weight, const uint8_t* scale, uint8_t* values, uint8_t* scales,
                                    int64_t latent, int64_t width) {
  const int64_t packed = width / 2, groups = width / 16, row_bytes = latent / 2;
  Row even[SIDE], odd[SIDE];
  for (int64_t column = 0; column < packed; column += SIDE) {
    const int64_t columns = packed - column < SIDE ? packed - column : SIDE;
    for (int64_t output = 0; output < latent; output += 2 * SIDE) {
      for (int i = 0; i < SIDE; i++) {
        const uint8_t* from = weight + (output + 2 * i) * packed + column;
        const Row first = load(from, columns), second = load(from + packed, columns);
        even[i] = (first & 15) | (second << 4);  // of the neurons 2c
        odd[i] = (first >> 4) | (second & 0xF0);  // of the neurons 2c + 1
      }
      transpose(even);
      transpose(odd);
      uint8_t* to = values + 2 * column * row_bytes + output / 2;
      for (int64_t i = 0; i < columns; i++, to += 2 * row_bytes) {
        std::memcpy(to, &even[i], SIDE);
        std::memcpy(to + row_bytes, &odd[i], SIDE);
      }
    }
  }
  for (int64_t group = 0; group < groups; group += SIDE) {
    const int64_t columns = groups - group < SIDE ? groups - group : SIDE;
    for (int64_t output = 0; output < latent; output += SIDE) {
      for (int i = 0; i < SIDE; i++) even[i] = load(scale + (output + i) * groups + group, columns);
      transpose(even);
      for (int64_t i = 0; i < columns; i++) std::memcpy(scales + (group + i) * latent + output, &even[i], SIDE);
    }
  }
}
