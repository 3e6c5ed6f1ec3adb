// Float32 vectors to int16 with one power of two, sums back to float32: the roundings of the expert arithmetic
// (../reference.py). Everything else about an expert is exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/experts/cpu/sums.h"

namespace thimble {

// The power of two e such that value * 2^e is what `out` rounds, for [count] values. False, and `out` untouched, if a
// value is NaN or infinite.
bool quantise(const float* values, int count, int16_t* out, int* exponent);

// float32(scale * 2^-(exponent + 10)): what a sum is multiplied by.
float factor(float scale, int exponent);

// out[i] = float32(sums[i]) * factor. |sums[i]| < 2^51.
void rescale(const int64_t* sums, int count, float factor, float* out);

// out[i] = the square of what rescale gives where that is above zero, else 0.
void rescale_relu2(const int64_t* sums, int count, float factor, float* out);

// The split int16 inputs of many tokens. Owns their memory, which only grows.
class Inputs {
 public:
  void resize(int rows, int latent);  // the views given before are void
  // Takes one row of x; false if it is not finite. Rows are independent: any thread.
  bool set(int row, const float* x);
  void set_quantised(int row, const int16_t* values);

  Input of(int row) const;
  int exponent(int row) const { return exponents_[size_t(row)]; }

 private:
  struct Planes {
    int16_t* values;
    uint8_t *low_even, *low_odd;
    int8_t *high_even, *high_odd;
    int32_t* bias;
  };
  Planes planes(int row) const;
  void split(int row);

  int latent_ = 0, padded_ = 0;
  size_t row_bytes_ = 0;
  std::vector<uint8_t> bytes_;
  std::vector<int> exponents_;
};

}  // namespace thimble
