// The loops of a linear layer, written once over L, the 16 lanes of an instruction set. Internal linkage: see
// experts/cpu/wide.h.
#pragma once

#include "kernels/linear/linear.h"

namespace thimble {
namespace {

// ROWS x OUTPUTS dot products side by side: independent sums hide the latency of fma, and each loaded value serves many.
// What is computed for one output does not depend on either number.
template <int ROWS, int OUTPUTS>
inline void dots(const Matrices& m, int64_t row, int64_t output) {
  const float* x = m.x + row * m.inputs;
  const float* w = m.weight + output * m.inputs;
  L sum[ROWS][OUTPUTS];
  for (auto& of_row : sum)
    for (auto& lanes : of_row) lanes = L::zero();
  int64_t k = 0;
  for (; k + 16 <= m.inputs; k += 16) {
    L xs[ROWS];
    for (int r = 0; r < ROWS; r++) xs[r] = L::load(x + r * m.inputs + k);
    for (int n = 0; n < OUTPUTS; n++) {
      const L ws = L::load(w + n * m.inputs + k);
      for (int r = 0; r < ROWS; r++) sum[r][n] = L::fma(xs[r], ws, sum[r][n]);
    }
  }
  if (k < m.inputs)
    for (int r = 0; r < ROWS; r++)
      for (int n = 0; n < OUTPUTS; n++)
        sum[r][n] = L::fma(L::load_part(x + r * m.inputs + k, int(m.inputs - k)),
                           L::load_part(w + n * m.inputs + k, int(m.inputs - k)), sum[r][n]);
  for (int r = 0; r < ROWS; r++)
    for (int n = 0; n < OUTPUTS; n++) m.out[(row + r) * m.outputs + output + n] = sum[r][n].fold();
}

template <int OUTPUTS>
inline void columns(const Matrices& m, int64_t output) {
  int64_t row = 0;
  for (; row + L::ROWS <= m.rows; row += L::ROWS) dots<L::ROWS, OUTPUTS>(m, row, output);
  for (; row < m.rows; row++) dots<1, OUTPUTS>(m, row, output);
}

void tile(const Matrices& m, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + L::OUTPUTS <= end; n += L::OUTPUTS) columns<L::OUTPUTS>(m, n);
  for (; n < end; n++) columns<1>(m, n);
}

}  // namespace
}  // namespace thimble
