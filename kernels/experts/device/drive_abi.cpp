// The C ABI of drives whose bytes are in a GPU's memory. Closed and counted as any emulated drive (host/drives_abi.cpp).

#include <cstdio>
#include <exception>

#include "kernels/experts/device/device_carrier.h"
#include "kernels/workers/abi.h"

using namespace thimble;

// Null with a message if it cannot be had. The memory and the context must outlive the drive.
THIMBLE_API void* thimble_drive_on_device(uint64_t memory, void* context, int64_t bytes, double bytes_per_s,
                                          double lane_bytes_per_s, int64_t latency_ns, int depth, char* message,
                                          int64_t message_bytes) {
  try {
    return static_cast<Drive*>(new EmulatedDrive(carrier_from_device(memory, context), bytes,
                                                 {bytes_per_s, lane_bytes_per_s, latency_ns, depth}));
  } catch (const std::exception& error) {
    std::snprintf(message, size_t(message_bytes), "%s", error.what());
  }
  return nullptr;
}
