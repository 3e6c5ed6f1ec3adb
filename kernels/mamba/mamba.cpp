// The recurrent parts of a Mamba-2 layer: kernels/mamba/reference.py, bit for bit.

#include <vector>

#include "kernels/elementary/elementary.h"
#include "kernels/workers/abi.h"

using namespace thimble;

// x[rows, channels] with `stride` between rows, weight[channels, taps], bias[channels], state[channels, taps - 1].
THIMBLE_API THIMBLE_CLONES void thimble_causal_conv(const float* x, int64_t stride, float* state, const float* weight,
                                                    const float* bias, float* out, int64_t rows, int64_t channels,
                                                    int64_t taps) {
  const int64_t kept = taps - 1;
  // Time-major copies: neighbouring channels lie side by side. The window is the state, then all rows.
  std::vector<float> window((kept + rows) * channels), by_tap(taps * channels);
  for (int64_t c = 0; c < channels; c++) {
    for (int64_t t = 0; t < kept; t++) window[t * channels + c] = state[c * kept + t];
    for (int64_t t = 0; t < taps; t++) by_tap[t * channels + c] = weight[c * taps + t];
  }
  for (int64_t row = 0; row < rows; row++)
    std::memcpy(&window[(kept + row) * channels], x + row * stride, channels * sizeof(float));
  for (int64_t row = 0; row < rows; row++) {
    float* mixed = out + row * channels;
    const float* first = &window[row * channels];
    for (int64_t c = 0; c < channels; c++) mixed[c] = first[c] * by_tap[c];
    for (int64_t t = 1; t < taps; t++) {
      const float *input = first + t * channels, *tap = &by_tap[t * channels];
      for (int64_t c = 0; c < channels; c++) mixed[c] += input[c] * tap[c];
    }
    for (int64_t c = 0; c < channels; c++) mixed[c] = silu(mixed[c] + bias[c]);
  }
  for (int64_t c = 0; c < channels; c++)
    for (int64_t t = 0; t < kept; t++) state[c * kept + t] = window[(rows + t) * channels + c];
}

// x[rows, heads, size], dt[rows, heads], b and c [rows, groups, columns], each with its stride between rows; a, d and
// dt_bias [heads]; state[heads, size, columns] -> out[rows, heads, size].
THIMBLE_API THIMBLE_CLONES void thimble_selective_scan(const float* x, int64_t x_stride, const float* dt,
                                                       int64_t dt_stride, const float* b, int64_t b_stride,
                                                       const float* c, int64_t c_stride, const float* a, const float* d,
                                                       const float* dt_bias, float* state, float* out, int64_t rows,
                                                       int64_t heads, int64_t size, int64_t groups, int64_t columns) {
  std::vector<float> products(columns);
  float* product = products.data();
  for (int64_t head = 0; head < heads; head++) {
    const int64_t group = head / (heads / groups);
    for (int64_t row = 0; row < rows; row++) {
      const float step = softplus(dt[row * dt_stride + head] + dt_bias[head]);
      const float decay = float(exp_of(double(step * a[head])));
      const float* inputs = x + row * x_stride + head * size;
      const float *in = b + row * b_stride + group * columns, *read = c + row * c_stride + group * columns;
      for (int64_t p = 0; p < size; p++) {
        float* s = state + (head * size + p) * columns;
        const float scaled = step * inputs[p];
        for (int64_t n = 0; n < columns; n++) {
          s[n] = s[n] * decay + scaled * in[n];
          product[n] = s[n] * read[n];
        }
        out[(row * heads + head) * size + p] = total(product, columns) + d[head] * inputs[p];
      }
    }
  }
}
