// The few calls of CUDA's driver that the host library makes, found at run time: no toolkit, no link-time dependency.
// Owns nothing but the function table. Types are the driver's, spelled out: handles are pointers, addresses 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace thimble {

struct CudaDriver {
  using Status = int;
  using Handle = void*;
  using Address = uint64_t;

  Status (*ctx_set_current)(Handle);
  Status (*stream_create)(Handle*, unsigned flags);
  Status (*stream_destroy)(Handle);
  Status (*stream_synchronize)(Handle);
  Status (*memcpy_to_device)(Address, const void*, size_t, Handle stream);
  Status (*event_create)(Handle*, unsigned flags);
  Status (*event_destroy)(Handle);
  Status (*event_record)(Handle, Handle stream);
  Status (*event_synchronize)(Handle);
  Status (*stream_wait_event)(Handle stream, Handle, unsigned flags);
  Status (*stream_write_value)(Handle stream, Address, uint32_t, unsigned flags);
  Status (*error_string)(Status, const char**);

  // Null, and the reason, where there is no driver or one too old.
  static const CudaDriver* load(std::string& reason);
  // Throws std::runtime_error naming the call.
  void check(Status, const char* call) const;
};

}  // namespace thimble
