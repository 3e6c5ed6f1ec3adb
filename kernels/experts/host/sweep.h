// Where decode ends and a sweep begins.
#pragma once

#include <cstdint>

#include "kernels/experts/host/policy.h"

namespace thimble {

// Eight tokens touch a third of a layer's experts: more of them go through the layer, and are a piece of a prompt.
constexpr bool is_sweep(int64_t tokens) { return tokens > 8; }

// What being named by so many of a step's tokens means for a block. One that an eighth of a prompt names will be named by its
// answer too: it counts as if decode had named it. Of the others a sweep says little.
constexpr Why why_named(int64_t naming, int64_t tokens) {
  return is_sweep(tokens) && naming * 8 < tokens ? Why::sweep : Why::demand;
}

}  // namespace thimble
