// Root-mean-square norms: kernels/norm/reference.py, bit for bit.

#include <vector>

#include "kernels/elementary/elementary.h"
#include "kernels/workers/abi.h"

using namespace thimble;

namespace {

// values[size] / sqrt(mean of their squares + eps) * weight[size] -> out[size]. `squares` is room for `size` values.
THIMBLE_INLINE void normalise(const float* values, const float* weight, float* out, float* squares, int64_t size, float eps) {
  for (int64_t i = 0; i < size; i++) squares[i] = values[i] * values[i];
  const float root = std::sqrt(total(squares, size) / float(size) + eps);
  for (int64_t i = 0; i < size; i++) out[i] = values[i] / root * weight[i];
}

}  // namespace

// x[rows, size] with `stride` between rows.
THIMBLE_API THIMBLE_CLONES void thimble_rms_norm(const float* x, int64_t stride, const float* weight, float* out,
                                                 int64_t rows, int64_t size, float eps) {
  std::vector<float> squares(size);
  for (int64_t row = 0; row < rows; row++)
    normalise(x + row * stride, weight, out + row * size, squares.data(), size, eps);
}

// y and z [rows, groups * group], each with its stride between rows.
THIMBLE_API THIMBLE_CLONES void thimble_gated_group_rms_norm(const float* y, int64_t y_stride, const float* z,
                                                             int64_t z_stride, const float* weight, float* out,
                                                             int64_t rows, int64_t groups, int64_t group, float eps) {
  const int64_t size = groups * group;
  std::vector<float> gated(size), squares(group);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = 0; i < size; i++) gated[i] = y[row * y_stride + i] * silu(z[row * z_stride + i]);
    for (int64_t at = 0; at < size; at += group)
      normalise(gated.data() + at, weight + at, out + row * size + at, squares.data(), group, eps);
  }
}
