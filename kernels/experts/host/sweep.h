// Where decode ends and a sweep begins.
#pragma once

#include <cstdint>

namespace thimble {

// Eight tokens touch a third of a layer's experts: more of them go through the layer, and are a piece of a prompt.
constexpr bool is_sweep(int64_t rows) { return rows > 8; }

}  // namespace thimble
