#include "kernels/experts/device/cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace thimble {

const CudaDriver* CudaDriver::load(std::string& reason) {
  static CudaDriver driver;
  static std::string problem = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);  // for the life of the process
    if (!library) return std::string("no CUDA driver: ") + dlerror();
    std::string missing;
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function && missing.empty()) missing = std::string("the CUDA driver is too old: it lacks ") + name;
    };
    find(driver.ctx_set_current, "cuCtxSetCurrent");
    find(driver.stream_create, "cuStreamCreate");
    find(driver.stream_destroy, "cuStreamDestroy_v2");
    find(driver.stream_synchronize, "cuStreamSynchronize");
    find(driver.memcpy_to_device, "cuMemcpyHtoDAsync_v2");
    find(driver.event_create, "cuEventCreate");
    find(driver.event_destroy, "cuEventDestroy_v2");
    find(driver.event_record, "cuEventRecord");
    find(driver.event_synchronize, "cuEventSynchronize");
    find(driver.stream_wait_event, "cuStreamWaitEvent");
    find(driver.stream_write_value, "cuStreamWriteValue32_v2");
    find(driver.error_string, "cuGetErrorString");
    return missing;
  }();
  reason = problem;
  return problem.empty() ? &driver : nullptr;
}

void CudaDriver::check(Status status, const char* call) const {
  if (status == 0) return;
  const char* text = nullptr;
  error_string(status, &text);
  throw std::runtime_error(std::string(call) + " failed: " + (text ? text : "unknown error"));
}

}  // namespace thimble
