// Host-to-device copies beside a running CUDA graph. Owns its streams and events, which exist before the first graph
// starts; a graph that spins on a flag needs a channel of its own for the copies it waits for. Used by one host thread.
//
// Several lanes, because one stream leaves a gap between copies and two keep the copy engine busy. `announce` makes every
// copy queued before it visible before the flag: each lane's event is waited for by the first lane, which writes the flag.
#pragma once

#include <vector>

#include "kernels/experts/device/cuda_driver.h"

namespace thimble {

class CopyLanes {
 public:
  // `context` is made current in the calling thread at each `bind`. Throws std::runtime_error.
  CopyLanes(const CudaDriver&, CudaDriver::Handle context, int lanes);
  ~CopyLanes();
  CopyLanes(const CopyLanes&) = delete;
  CopyLanes& operator=(const CopyLanes&) = delete;

  void bind();  // once, in the thread that will copy
  void copy(CudaDriver::Address to, const void* from, size_t bytes);  // `from` is page-locked
  void announce(CudaDriver::Address flag, uint32_t value);
  void drain();

 private:
  const CudaDriver& driver_;
  CudaDriver::Handle context_;
  std::vector<CudaDriver::Handle> streams_, events_;
  size_t next_ = 0;
};

}  // namespace thimble
