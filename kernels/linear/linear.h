// Tiles of a linear layer for one instruction set. The arithmetic is reference.py's: 16 lanes, fma, a fixed fold.
#pragma once

#include <cstdint>

namespace thimble {

struct Matrices {
  const float* x;       // [rows, inputs]
  const float* weight;  // [outputs, inputs]
  float* out;           // [rows, outputs]
  int64_t rows, inputs, outputs;
};

// All rows of the outputs begin <= n < end.
using LinearTile = void (*)(const Matrices&, int64_t begin, int64_t end);

LinearTile plain_linear();
LinearTile avx2_linear();  // null if this build lacks the instructions
LinearTile avx512_linear();

}  // namespace thimble
