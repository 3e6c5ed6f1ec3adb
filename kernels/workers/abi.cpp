// The C ABI of the pool and of the processor's abilities.

#include "kernels/workers/abi.h"

#include <new>
#include <system_error>

#include "kernels/workers/isa.h"
#include "kernels/workers/workers.h"

THIMBLE_API int thimble_isas() { return thimble::ISAS; }

THIMBLE_API int thimble_processor_has(int isa) { return thimble::processor_has(thimble::Isa(isa)); }

// Null if the threads cannot be had.
THIMBLE_API void* thimble_workers_open(int threads, int spin_us) {
  try {
    return new thimble::Workers(threads, spin_us);
  } catch (const std::system_error&) {
    return nullptr;
  }
}

THIMBLE_API void thimble_workers_close(void* workers) { delete static_cast<thimble::Workers*>(workers); }
