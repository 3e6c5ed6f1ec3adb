// 16 lanes in plain C++. std::fma rounds once, in software where the processor has no such instruction.

#include <cmath>

namespace thimble {
namespace {

struct L {
  static constexpr int ROWS = 1, OUTPUTS = 1;
  float lane[16];

  static L zero() { return L{}; }
  static L load(const float* at) { return load_part(at, 16); }
  static L load_part(const float* at, int count) {
    L l{};
    for (int i = 0; i < count; i++) l.lane[i] = at[i];
    return l;
  }
  static L fma(const L& a, const L& b, const L& c) {
    L l;
    for (int i = 0; i < 16; i++) l.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
    return l;
  }
  float fold() const {
    L l = *this;
    for (int half = 8; half; half /= 2)
      for (int i = 0; i < half; i++) l.lane[i] += l.lane[i + half];
    return l.lane[0];
  }
};

}  // namespace
}  // namespace thimble

#include "kernels/linear/tile.h"

thimble::LinearTile thimble::plain_linear() { return tile; }
