#include "kernels/experts/host/file_drive.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace thimble {
namespace {

constexpr int64_t PAGE = 4096;

}  // namespace

FileDrive::FileDrive(const std::string& path) : path_(path) {
  buffered_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (buffered_ < 0) throw std::runtime_error(path + ": cannot be opened: " + std::strerror(errno));
#ifdef O_DIRECT
  direct_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  use_direct_ = direct_ >= 0;
  if (direct_ < 0) give_up_direct(std::strerror(errno));
#else
  give_up_direct("this system has no O_DIRECT");
#endif
}

FileDrive::~FileDrive() {
  close(buffered_);
  if (direct_ >= 0) close(direct_);
}

std::string FileDrive::read(int64_t offset, int64_t bytes, uint8_t* to) {
  for (int64_t done = 0; done < bytes;) {
    // A direct read that stopped inside a page is at the end of a truncated file: only the other way can say so.
    const bool direct = use_direct_.load() && done % PAGE == 0;
    const ssize_t got = pread(direct ? direct_ : buffered_, to + done, size_t(bytes - done), offset + done);
    if (got > 0) {
      done += got;
    } else if (got == 0) {
      return "the file ends inside the block: it was truncated";
    } else if (direct && errno == EINVAL) {
      give_up_direct("reads are refused");  // some filesystems accept the flag and then refuse the reads
      done = 0;
    } else if (errno != EINTR) {
      return std::string("cannot be read: ") + std::strerror(errno);
    }
  }
  return "";
}

std::string FileDrive::take_notice() {
  std::lock_guard<std::mutex> lock(notices_);
  return std::exchange(notice_, "");
}

void FileDrive::give_up_direct(const char* why) {
  std::lock_guard<std::mutex> lock(notices_);
  if (!use_direct_.exchange(false) && direct_ >= 0) return;  // another reader was first, and has said so
  notice_ = path_ + " is read through the page cache, O_DIRECT does not work there (" + why +
            "): blocks may take RAM twice. Put the store on a local disk";
}

}  // namespace thimble
