// Whole, verified blocks or a reason why not, from one drive or several. Owns no drive. Any thread may read.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/experts/cpu/sums.h"
#include "kernels/experts/host/drive.h"

namespace thimble {

constexpr int64_t NOT_THERE = -1;

// What there is to load: sizes of a block, and for every key its place on each drive, its checksum and two scales.
struct Catalog {
  Shape shape;
  int layers, experts;
  std::vector<std::vector<int64_t>> offsets;  // of each drive; NOT_THERE if the drive does not hold the block
  std::vector<uint64_t> checksums;
  std::vector<float> up_scales, down_scales;

  int keys() const { return layers * experts; }
  std::string name(int key) const;  // for people
};

class Blocks {
 public:
  // Every key is on at least one drive. Catalog and drives must outlive it.
  Blocks(const Catalog&, std::vector<Drive*>);
  Blocks(const Blocks&) = delete;

  // Fills `to` (page aligned, shape.block_bytes) with the key's block, from the drive with the fewest reads in flight among
  // those that hold it. What does not arrive whole and with its checksum is read once more, from another drive if another
  // holds it. Empty, or what is wrong.
  std::string read(int key, uint8_t* to);

  // Bytes a second of reading random blocks with `depth` reads in flight, verified as always: at least a read for each, then
  // for at most `limit_ns`. Blocks that cannot be had are counted as read; whoever needs them will hear of it.
  double rate(int depth, int64_t limit_ns, uint32_t seed);

  std::string take_notice();  // once each, then empty

 private:
  int choose(int key, int but) const;
  std::string attempt(int key, int drive, uint8_t* to);

  const Catalog& catalog_;
  const std::vector<Drive*> drives_;
  std::vector<std::atomic<int>> in_flight_;
  std::mutex notices_;
  bool told_ = false;
  std::string notice_;
};

}  // namespace thimble
