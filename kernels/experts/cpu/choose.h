#pragma once

#include "kernels/experts/cpu/sums.h"
#include "kernels/workers/isa.h"

namespace thimble {

// Null if this build or this processor lacks the instruction set.
const Kernels* kernels_for(Isa);

}  // namespace thimble
