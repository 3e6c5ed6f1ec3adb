#include "kernels/experts/device/copy_lanes.h"

namespace thimble {

namespace {
constexpr unsigned STREAM_NON_BLOCKING = 1, EVENT_DISABLE_TIMING = 2;
}

CopyLanes::CopyLanes(const CudaDriver& driver, CudaDriver::Handle context, int lanes)
    : driver_(driver), context_(context) {
  driver_.check(driver_.ctx_set_current(context_), "cuCtxSetCurrent");
  for (int lane = 0; lane < lanes; lane++) {
    CudaDriver::Handle stream = nullptr, event = nullptr;
    driver_.check(driver_.stream_create(&stream, STREAM_NON_BLOCKING), "cuStreamCreate");
    streams_.push_back(stream);
    driver_.check(driver_.event_create(&event, EVENT_DISABLE_TIMING), "cuEventCreate");
    events_.push_back(event);
  }
}

CopyLanes::~CopyLanes() {
  driver_.ctx_set_current(context_);
  for (auto stream : streams_) driver_.stream_synchronize(stream);
  for (auto event : events_) driver_.event_destroy(event);
  for (auto stream : streams_) driver_.stream_destroy(stream);
}

void CopyLanes::bind() { driver_.check(driver_.ctx_set_current(context_), "cuCtxSetCurrent"); }

void CopyLanes::copy(CudaDriver::Address to, const void* from, size_t bytes) {
  driver_.check(driver_.memcpy_to_device(to, from, bytes, streams_[next_]), "cuMemcpyHtoDAsync");
  next_ = (next_ + 1) % streams_.size();
}

void CopyLanes::announce(CudaDriver::Address flag, uint32_t value) {
  for (size_t lane = 1; lane < streams_.size(); lane++) {
    driver_.check(driver_.event_record(events_[lane], streams_[lane]), "cuEventRecord");
    driver_.check(driver_.stream_wait_event(streams_[0], events_[lane], 0), "cuStreamWaitEvent");
  }
  driver_.check(driver_.stream_write_value(streams_[0], flag, value, 0), "cuStreamWriteValue32");
  next_ = 0;
}

void CopyLanes::drain() {
  for (auto stream : streams_) driver_.check(driver_.stream_synchronize(stream), "cuStreamSynchronize");
}

}  // namespace thimble
