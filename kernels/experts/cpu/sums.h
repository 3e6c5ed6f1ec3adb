// The exact integer sums of an expert, for one instruction set: the interface that plain, AVX2, AVX-VNNI and AVX-512
// share. Owns no memory and no threads. The arithmetic is defined in ../reference.py; any order of these sums is exact.
#pragma once

#include <cstdint>

namespace thimble {

constexpr int GROUP = 16;         // weights that share a scale
constexpr int MOST_TOKENS = 4;    // tokens served by one pass over an expert's bytes
constexpr int INPUT_MULTIPLE = 256;  // inputs are padded with zeros to a multiple of this, so that loops have no tails

// Sizes and byte offsets of a block; they come from kernels/block.py.
struct Shape {
  int32_t latent, width;
  int64_t up_values, up_scales, down_values, down_scales, block_bytes;

  int64_t row_bytes() const { return latent / 2; }
};

// One token's int16 input, split for byte by byte products: value = 256 * high + low, low unsigned. Code 2i is the low
// nibble of byte i of a row, code 2i+1 the high one: even and odd inputs are kept apart, so nibbles stay where they are.
// Every array is padded with zeros to INPUT_MULTIPLE inputs: what a wide load reads past the end of a row (into the
// next row or region of the same block) is multiplied by zero.
struct Input {
  const int16_t* values;    // [latent] in order
  const uint8_t* low_even;  // [latent/2], as the next three
  const uint8_t* low_odd;
  const int8_t* high_even;
  const int8_t* high_odd;
  const int32_t* bias;  // [latent/8] -12 * 256 * the sum of high over 8 inputs: takes back the 12 that makes codes unsigned
};

// The neurons that are alive for at least one of the tokens, ascending, and each token's value for them (0 = dead there).
struct Alive {
  const int32_t* rows;                 // [count]
  const int16_t* values[MOST_TOKENS];  // [count] each, >= 0
  int32_t count;
};

struct Kernels {
  const char* name;
  // sums[t * (end - begin) + n - begin] = S[n] of token t for neurons begin <= n < end. `tokens` is 1..MOST_TOKENS.
  void (*up)(const Shape&, const uint8_t* block, const Input* inputs, int tokens, int begin, int end, int64_t* sums);
  // sums[t * (end - begin) + j - begin] = T[j] of token t for outputs begin <= j < end, both multiples of 32.
  void (*down)(const Shape&, const uint8_t* block, const Alive&, int tokens, int begin, int end, int64_t* sums);
};

// Null if this build lacks the instructions; whether the processor has them is workers/isa.h's question.
const Kernels* plain_kernels();
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();

}  // namespace thimble
