// Whole, verified blocks or a reason why not, from one drive or several. Owns no drive. Any thread may read.
//
// A block is read in pieces, which several threads may have on the way at once: a drive gives one large read less than it has,
// and a piece is checked while later ones are still being read, so that after a block's last byte only its last piece is left
// to be checked. The checksum is one of the whole block, so pieces are added to it in order, by whichever thread's piece has
// closed a gap. Nobody is told of a block before all of it was checked. Of a block that several drives hold each piece comes
// from whichever is less busy.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/experts/cpu/sums.h"
#include "kernels/experts/host/drive.h"
#include "kernels/experts/host/xxh64.h"

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

// A block on its way. Whoever keeps it reads none of it.
class Arrival {
  friend class Blocks;
  int key_ = -1;
  uint8_t* to_ = nullptr;
  std::mutex mutex_;  // guards what follows
  std::vector<bool> here_;
  std::vector<int> drives_;  // that pieces came from, each once
  int wrong_drive_ = -1;     // that said what is wrong
  int checked_ = 0;  // pieces
  bool checking_ = false;
  Xxh64 sum_;
  bool bad_scale_ = false;
  std::string wrong_;
};

class Blocks {
 public:
  // Every key is on at least one drive. Catalog and drives must outlive it. A piece has about `piece_bytes`.
  Blocks(const Catalog&, std::vector<Drive*>, int64_t piece_bytes = PIECE_BYTES);
  Blocks(const Blocks&) = delete;

  // As large as keeps a drive busy with a few of them; with smaller ones calls and threads that wake up would tell.
  static constexpr int64_t PIECE_BYTES = 400 << 10;

  int pieces() const { return pieces_; }
  // The key's block is to come to `to` (page aligned, shape.block_bytes).
  void begin(int key, uint8_t* to, Arrival*);
  // Reads one piece, each once and from any thread, and checks what can be checked. True for the call after which the block is
  // whole and right, or *error says what is wrong; that is one call, and the last to touch it. What does not arrive whole and
  // with its checksum is read once more, from each drive that holds it until one is right.
  bool read_piece(Arrival&, int piece, std::string* error);

  // Bytes a second of reading random blocks with `depth` pieces in flight, verified as always: at least a piece for each, then
  // for at most `limit_ns`. Blocks that cannot be had are counted as read; whoever needs them will hear of it.
  double rate(int depth, int64_t limit_ns, uint32_t seed);

  std::string take_notice();  // once each, then empty

 private:
  int choose(int key, int piece, int but) const;
  int64_t piece_begin(int piece) const;
  std::string verdict(const Arrival&) const;
  void check(int piece, Arrival&) const;
  std::string again(const Arrival&);
  std::string whole(int key, int drive, uint8_t* to);

  const Catalog& catalog_;
  const std::vector<Drive*> drives_;
  const int pieces_;
  std::vector<std::atomic<int>> in_flight_;  // pieces of each drive
  std::mutex notices_;
  bool told_ = false;
  std::string notice_;
};

}  // namespace thimble
