#include "kernels/experts/cpu/quantise.h"

#include <cmath>
#include <cstring>

namespace thimble {
namespace {

constexpr int32_t INFINITY_BITS = 0x7F800000;  // as integers, larger floats have larger bits
constexpr int MOST_EXPONENT = 80;
constexpr int LIMIT = 32767;
// Added to and taken from a float below 2^22 in size, it rounds to an integer, halves to even.
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23
// The bits of 1.5 * 2^52: plus an integer below 2^51 in size they are those of 1.5 * 2^52 + the integer. Compilers turn
// this into vector code that int64 -> double has no instruction for before AVX-512.
constexpr int64_t EXACT_BITS = 0x4338000000000000;
constexpr double EXACT = 6755399441055744.0;

int32_t bits_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// float32(sum), rounded once: the double is exact.
float to_float(int64_t sum) {
  const int64_t bits = sum + EXACT_BITS;
  double shifted;
  std::memcpy(&shifted, &bits, 8);
  return float(shifted - EXACT);
}

}  // namespace

bool quantise(const float* values, int count, int16_t* out, int* exponent) {
  int32_t largest = 0;
  for (int i = 0; i < count; i++) {
    const int32_t size = bits_of(values[i]) & 0x7FFFFFFF;
    largest = size > largest ? size : largest;
  }
  if (largest >= INFINITY_BITS) return false;
  int p = 0;
  float largest_value;
  std::memcpy(&largest_value, &largest, 4);
  std::frexp(largest_value, &p);
  const int e = largest == 0 ? 0 : (15 - p < MOST_EXPONENT ? 15 - p : MOST_EXPONENT);
  const float scale = std::ldexp(1.0f, e);  // normal: -113 <= e <= 80
  // A product can be inexact only where it is subnormal, and then it rounds to 0 either way.
  for (int i = 0; i < count; i++) {
    const float rounded = (values[i] * scale + ROUND) - ROUND;
    const int32_t whole = int32_t(rounded);
    out[i] = int16_t(whole > LIMIT ? LIMIT : whole < -LIMIT ? -LIMIT : whole);
  }
  *exponent = e;
  return true;
}

float factor(float scale, int exponent) { return float(std::ldexp(double(scale), -(exponent + 10))); }

void rescale(const int64_t* sums, int count, float factor, float* out) {
  for (int i = 0; i < count; i++) out[i] = to_float(sums[i]) * factor;
}

void rescale_relu2(const int64_t* sums, int count, float factor, float* out) {
  for (int i = 0; i < count; i++) {
    const float v = to_float(sums[i]) * factor;
    out[i] = v > 0 ? v * v : 0;
  }
}

void Inputs::resize(int rows, int latent) {
  padded_ = (latent + INPUT_MULTIPLE - 1) / INPUT_MULTIPLE * INPUT_MULTIPLE;
  row_bytes_ = size_t(padded_) * 2 + size_t(padded_) * 2 + size_t(padded_) / 2;  // values, four planes, bias
  const size_t bytes = row_bytes_ * size_t(rows) + 64;
  if (latent == latent_ && bytes_.size() >= bytes) return;  // the padding is still zero: rows are written up to latent
  latent_ = latent;
  bytes_.assign(bytes, 0);
  exponents_.assign(size_t(rows), 0);
}

bool Inputs::set(int row, const float* x) {
  if (!quantise(x, latent_, planes(row).values, &exponents_[size_t(row)])) return false;
  split(row);
  return true;
}

void Inputs::set_quantised(int row, const int16_t* values) {
  std::memcpy(planes(row).values, values, size_t(latent_) * 2);
  split(row);
}

Inputs::Planes Inputs::planes(int row) const {
  uint8_t* start = const_cast<uint8_t*>(bytes_.data());
  start += -reinterpret_cast<uintptr_t>(start) % 64;
  uint8_t* at = start + size_t(row) * row_bytes_;
  const size_t half = size_t(padded_) / 2;
  Planes p;
  p.values = reinterpret_cast<int16_t*>(at);
  p.low_even = at + 4 * half;
  p.low_odd = p.low_even + half;
  p.high_even = reinterpret_cast<int8_t*>(p.low_odd + half);
  p.high_odd = p.high_even + half;
  p.bias = reinterpret_cast<int32_t*>(p.high_odd + half);
  return p;
}

void Inputs::split(int row) {
  const Planes p = planes(row);
  for (int i = 0; i < latent_ / 2; i++) {
    const int even = p.values[2 * i], odd = p.values[2 * i + 1];
    p.low_even[i] = uint8_t(even & 255);
    p.low_odd[i] = uint8_t(odd & 255);
    p.high_even[i] = int8_t(even >> 8);
    p.high_odd[i] = int8_t(odd >> 8);
  }
  for (int i = 0; i < latent_ / 8; i++) {
    int high = 0;
    for (int at = 4 * i; at < 4 * i + 4; at++) high += p.high_even[at] + p.high_odd[at];
    p.bias[i] = -12 * 256 * high;
  }
}

Input Inputs::of(int row) const {
  const Planes p = planes(row);
  return {p.values, p.low_even, p.low_odd, p.high_even, p.high_odd, p.bias};
}

}  // namespace thimble
