// The file of expert blocks: whole, verified blocks or a reason why not. Any thread may read.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/experts/cpu/sums.h"

namespace thimble {

// What there is to load: sizes of a block, and for every key its place, checksum and two scales.
struct Catalog {
  Shape shape;
  int layers, experts;
  std::vector<int64_t> offsets;
  std::vector<uint64_t> checksums;
  std::vector<float> up_scales, down_scales;

  int keys() const { return layers * experts; }
  std::string name(int key) const;  // for people
};

class BlockFile {
 public:
  // With O_DIRECT where the filesystem has it, so that a cache of our own is not a second copy of the kernel's; else
  // through the page cache, and a notice says so. Throws std::runtime_error if the file cannot be opened.
  BlockFile(const Catalog&, const std::string& path);
  ~BlockFile();
  BlockFile(const BlockFile&) = delete;

  // Fills `to` (page aligned, shape.block_bytes) with the key's block. What does not arrive whole and with its checksum is
  // read once more. Empty, or what is wrong.
  std::string read(int key, uint8_t* to);

  std::string take_notice();  // once, then empty

 private:
  std::string attempt(int key, uint8_t* to);
  std::string read_bytes(int key, uint8_t* to);
  void give_up_direct(const char* why);

  const Catalog& catalog_;
  const std::string path_;
  int buffered_ = -1, direct_ = -1;
  std::atomic<bool> use_direct_{false};
  std::mutex notices_;
  std::string notice_;
};

}  // namespace thimble
