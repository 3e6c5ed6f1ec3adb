// What other parts of the library need of an open host.
#pragma once

#include "kernels/experts/host/step.h"

namespace thimble {

Step& step_of(void* host);
Cache& cache_of(void* host);
const Catalog& catalog_of(void* host);

}  // namespace thimble
