// A file as a drive: O_DIRECT where the filesystem has it, so that a cache of our own is not a second copy of the kernel's;
// else through the page cache, and a notice says so.
#pragma once

#include <atomic>
#include <mutex>

#include "kernels/experts/host/drive.h"

namespace thimble {

class FileDrive : public Drive {
 public:
  explicit FileDrive(const std::string& path);  // throws std::runtime_error if the file cannot be opened
  ~FileDrive() override;
  FileDrive(const FileDrive&) = delete;

  std::string read(int64_t offset, int64_t bytes, uint8_t* to) override;
  std::string name() const override { return path_; }
  std::string take_notice() override;

 private:
  void give_up_direct(const char* why);

  const std::string path_;
  int buffered_ = -1, direct_ = -1;
  std::atomic<bool> use_direct_{false};
  std::mutex notices_;
  std::string notice_;
};

}  // namespace thimble
