// The C ABI of drives: made and closed by Python, which keeps them alive for the hosts that read from them.

#include <cstdio>
#include <exception>

#include "kernels/experts/host/catalog_abi.h"
#include "kernels/experts/host/emulated_drive.h"
#include "kernels/experts/host/file_drive.h"
#include "kernels/workers/abi.h"

namespace thimble {

Catalog catalog_from(const CatalogView& view) {
  const int64_t* sizes = view.sizes;
  const size_t keys = size_t(view.layers) * size_t(view.experts);
  std::vector<std::vector<int64_t>> offsets;
  for (int64_t drive = 0; drive < view.drive_count; drive++)
    offsets.emplace_back(view.offsets[drive], view.offsets[drive] + keys);
  return {{int32_t(sizes[0]), int32_t(sizes[1]), sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]},
          int(view.layers),
          int(view.experts),
          offsets,
          {view.checksums, view.checksums + keys},
          {view.up_scales, view.up_scales + keys},
          {view.down_scales, view.down_scales + keys}};
}

std::vector<Drive*> drives_of(const CatalogView& view) {
  std::vector<Drive*> drives;
  for (int64_t drive = 0; drive < view.drive_count; drive++) drives.push_back(static_cast<Drive*>(view.drives[drive]));
  return drives;
}

}  // namespace thimble

using namespace thimble;

// A file. Null with a message if it cannot be opened.
THIMBLE_API void* thimble_drive_file(const char* path, char* message, int64_t message_bytes) {
  try {
    return static_cast<Drive*>(new FileDrive(path));
  } catch (const std::exception& error) {
    std::snprintf(message, size_t(message_bytes), "%s", error.what());
  }
  return nullptr;
}

// The caller's memory as a drive; see emulated_drive.h.
THIMBLE_API void* thimble_drive_emulated(const uint8_t* memory, int64_t bytes, double bytes_per_s, double lane_bytes_per_s,
                                         int64_t latency_ns, int depth) {
  return static_cast<Drive*>(new EmulatedDrive(memory, bytes, {bytes_per_s, lane_bytes_per_s, latency_ns, depth}));
}

// out[4]: reads, bytes, ns in which some read was served, ns by which the copies were later than the drive would have been.
THIMBLE_API void thimble_drive_emulated_counts(void* drive, int64_t* out) {
  const EmulatedDrive::Counts counts = static_cast<EmulatedDrive*>(static_cast<Drive*>(drive))->counts();
  out[0] = counts.reads;
  out[1] = counts.read_bytes;
  out[2] = counts.busy_ns;
  out[3] = counts.late_ns;
}

THIMBLE_API void thimble_drive_close(void* drive) { delete static_cast<Drive*>(drive); }

// Blocks::rate, of drives that nobody else need have opened.
THIMBLE_API double thimble_drives_rate(const CatalogView* view, int depth, int64_t limit_ns, uint32_t seed) {
  const Catalog catalog = catalog_from(*view);
  return Blocks(catalog, drives_of(*view)).rate(depth, limit_ns, seed);
}
