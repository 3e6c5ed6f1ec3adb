#include "kernels/experts/host/block_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "kernels/experts/host/xxh64.h"

namespace thimble {
namespace {

constexpr int64_t PAGE = 4096;

// The kernels take a scale's code as an unsigned number: a set sign bit or NaN would be a wrong number, not a crash.
bool has_bad_scale(const uint8_t* codes, int64_t count) {
  uint8_t largest = 0;
  for (int64_t i = 0; i < count; i++) largest = codes[i] > largest ? codes[i] : largest;
  return largest >= 0x7F;
}

}  // namespace

std::string Catalog::name(int key) const {
  return "MoE layer " + std::to_string(key / experts) + ", expert " + std::to_string(key % experts);
}

BlockFile::BlockFile(const Catalog& catalog, const std::string& path) : catalog_(catalog), path_(path) {
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

BlockFile::~BlockFile() {
  close(buffered_);
  if (direct_ >= 0) close(direct_);
}

std::string BlockFile::read(int key, uint8_t* to) {
  std::string wrong = attempt(key, to);
  if (!wrong.empty()) wrong = attempt(key, to);
  if (!wrong.empty()) wrong = catalog_.name(key) + ": " + path_ + ": " + wrong;
  return wrong;
}

std::string BlockFile::take_notice() {
  std::lock_guard<std::mutex> lock(notices_);
  return std::exchange(notice_, "");
}

std::string BlockFile::attempt(int key, uint8_t* to) {
  std::string wrong = read_bytes(key, to);
  if (!wrong.empty()) return wrong;
  const Shape& shape = catalog_.shape;
  if (xxh64(to, uint64_t(shape.block_bytes)) != catalog_.checksums[size_t(key)])
    return "the checksum does not match, twice: the bytes on disk have changed; run thimble repack again";
  const int64_t down_scale_bytes = int64_t(shape.width) / GROUP * shape.latent;
  if (has_bad_scale(to + shape.up_scales, shape.down_values - shape.up_scales) ||
      has_bad_scale(to + shape.down_scales, down_scale_bytes))
    return "a block scale is negative or NaN; run thimble repack again";
  return "";
}

std::string BlockFile::read_bytes(int key, uint8_t* to) {
  const int64_t offset = catalog_.offsets[size_t(key)], bytes = catalog_.shape.block_bytes;
  for (int64_t done = 0; done < bytes;) {
    // A direct read that stopped inside a page is at the end of a truncated file: only the other way can say so.
    const bool direct = use_direct_.load() && done % PAGE == 0;
    const ssize_t got = pread(direct ? direct_ : buffered_, to + done, size_t(bytes - done), offset + done);
    if (got > 0) {
      done += got;
    } else if (got == 0) {
      return "the file ends inside the block: it was truncated; run thimble repack again";
    } else if (direct && errno == EINVAL) {
      give_up_direct("reads are refused");  // some filesystems accept the flag and then refuse the reads
      done = 0;
    } else if (errno != EINTR) {
      return std::string("cannot be read: ") + std::strerror(errno);
    }
  }
  return "";
}

void BlockFile::give_up_direct(const char* why) {
  std::lock_guard<std::mutex> lock(notices_);
  use_direct_ = false;
  notice_ = path_ + " is read through the page cache, O_DIRECT does not work there (" + why +
            "): blocks may take RAM twice. Put the store on a local disk";
}

}  // namespace thimble
