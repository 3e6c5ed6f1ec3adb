// A GPU's memory as what an emulated drive keeps its bytes in.
#pragma once

#include <memory>

#include "kernels/experts/host/emulated_drive.h"

namespace thimble {

// Of the given context. Throws std::runtime_error if there is no driver.
std::unique_ptr<Carrier> carrier_from_device(uint64_t memory, void* context);

}  // namespace thimble
