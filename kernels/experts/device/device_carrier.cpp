// The copy engine writes the reader's slot, as a drive's controller would. Owns a stream for each thread that reads, for the life
// of the carrier.

#include "kernels/experts/device/device_carrier.h"

#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include "kernels/experts/device/cuda_driver.h"

namespace thimble {
namespace {

constexpr unsigned STREAM_NON_BLOCKING = 1;

class FromDevice : public Carrier {
 public:
  FromDevice(const CudaDriver& driver, CudaDriver::Address memory, CudaDriver::Handle context)
      : driver_(driver), memory_(memory), context_(context) {}

  ~FromDevice() override {
    driver_.ctx_set_current(context_);
    for (auto& [thread, stream] : streams_) driver_.stream_destroy(stream);
  }

  std::string begin(int64_t offset, int64_t bytes, uint8_t* to) override {
    return said([&] {
      const auto stream = mine();
      driver_.check(driver_.memcpy_from_device(to, memory_ + uint64_t(offset), size_t(bytes), stream), "cuMemcpyDtoHAsync");
    });
  }

  bool ready() override { return driver_.stream_query(mine()) == 0; }

  std::string finish() override {
    return said([&] { driver_.check(driver_.stream_synchronize(mine()), "cuStreamSynchronize"); });
  }

 private:
  template <typename Work>
  static std::string said(const Work& work) {
    try {
      work();
      return "";
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  CudaDriver::Handle mine() {
    driver_.check(driver_.ctx_set_current(context_), "cuCtxSetCurrent");
    std::lock_guard<std::mutex> lock(mutex_);
    CudaDriver::Handle& stream = streams_[std::this_thread::get_id()];
    if (!stream) driver_.check(driver_.stream_create(&stream, STREAM_NON_BLOCKING), "cuStreamCreate");
    return stream;
  }

  const CudaDriver& driver_;
  const CudaDriver::Address memory_;
  const CudaDriver::Handle context_;
  std::mutex mutex_;  // guards streams_
  std::unordered_map<std::thread::id, CudaDriver::Handle> streams_;
};

}  // namespace

std::unique_ptr<Carrier> carrier_from_device(uint64_t memory, void* context) {
  std::string reason;
  const CudaDriver* driver = CudaDriver::load(reason);
  if (!driver) throw std::runtime_error(reason);
  return std::make_unique<FromDevice>(*driver, memory, context);
}

}  // namespace thimble
