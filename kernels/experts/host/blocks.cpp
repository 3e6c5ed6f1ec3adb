#include "kernels/experts/host/blocks.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "kernels/experts/host/arena.h"

namespace thimble {
namespace {

constexpr int64_t PAGE = 4096;
const char* const CHANGED = "the checksum does not match";

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

Blocks::Blocks(const Catalog& catalog, std::vector<Drive*> drives, int64_t piece_bytes)
    : catalog_(catalog), drives_(std::move(drives)),
      pieces_(int((catalog.shape.block_bytes + piece_bytes - 1) / piece_bytes)), in_flight_(drives_.size()) {}

// Whole pages, so that a drive takes it and the checksum's stripes are whole.
int64_t Blocks::piece_begin(int piece) const { return catalog_.shape.block_bytes / PAGE * piece / pieces_ * PAGE; }

void Blocks::begin(int key, uint8_t* to, Arrival* arrival) {
  arrival->key_ = key;
  arrival->to_ = to;
  arrival->here_.assign(size_t(pieces_), false);
}

bool Blocks::read_piece(Arrival& arrival, int piece, std::string* error) {
  const int64_t begin = piece_begin(piece), bytes = piece_begin(piece + 1) - begin;
  const int drive = choose(arrival.key_, piece, -1);
  in_flight_[size_t(drive)]++;
  const int64_t from = catalog_.offsets[size_t(drive)][size_t(arrival.key_)] + begin;
  const std::string wrong = drives_[size_t(drive)]->read(from, bytes, arrival.to_ + begin);
  in_flight_[size_t(drive)]--;
  {
    std::unique_lock<std::mutex> lock(arrival.mutex_);
    auto& drives = arrival.drives_;
    if (std::find(drives.begin(), drives.end(), drive) == drives.end()) drives.push_back(drive);
    if (!wrong.empty() && arrival.wrong_.empty()) {
      arrival.wrong_ = wrong;
      arrival.wrong_drive_ = drive;
    }
    arrival.here_[size_t(piece)] = true;
    if (arrival.checking_) return false;  // by a thread that goes on with this piece
    arrival.checking_ = true;
    while (arrival.checked_ < pieces_ && arrival.here_[size_t(arrival.checked_)]) {
      const bool worth = arrival.wrong_.empty();
      lock.unlock();
      if (worth) check(arrival.checked_, arrival);
      lock.lock();
      arrival.checked_++;
    }
    arrival.checking_ = false;
    if (arrival.checked_ < pieces_) return false;
  }
  if (arrival.wrong_.empty()) arrival.wrong_ = verdict(arrival);
  *error = arrival.wrong_.empty() ? "" : again(arrival);
  return true;
}

// By the one thread that checks, without the lock.
void Blocks::check(int piece, Arrival& arrival) const {
  const Shape& shape = catalog_.shape;
  const int64_t begin = piece_begin(piece), end = piece_begin(piece + 1);
  arrival.sum_.add(arrival.to_ + begin, uint64_t(end - begin));
  const int64_t down_scales_end = shape.down_scales + int64_t(shape.width) / GROUP * shape.latent;
  for (const auto& [first, last] : {std::pair{int64_t(shape.up_scales), int64_t(shape.down_values)},
                                    std::pair{int64_t(shape.down_scales), down_scales_end}}) {
    const int64_t from = std::max(begin, first), until = std::min(end, last);
    if (from < until && has_bad_scale(arrival.to_ + from, until - from)) arrival.bad_scale_ = true;
  }
}

std::string Blocks::verdict(const Arrival& arrival) const {
  if (arrival.sum_.end() != catalog_.checksums[size_t(arrival.key_)]) return CHANGED;
  return arrival.bad_scale_ ? "a block scale is negative or NaN" : "";
}

// What did not come right, once more and in one go, from each drive that holds it, the suspected one last. Empty, or what is
// wrong for good, as the store itself, the first drive, has it: that one holds every block.
std::string Blocks::again(const Arrival& first) {
  // Which drive's bytes do not fit the checksum is known only if all came from one.
  const int bad = first.drives_.size() == 1 ? first.drives_.front() : first.wrong_drive_;
  std::vector<int> tried;
  for (int drive = 0; drive < int(drives_.size()); drive++)
    if (drive != bad && catalog_.offsets[size_t(drive)][size_t(first.key_)] != NOT_THERE) tried.push_back(drive);
  if (bad >= 0) tried.push_back(bad);
  std::string told;
  for (const int drive : tried) {
    const std::string wrong = whole(first.key_, drive, first.to_);
    if (!wrong.empty()) {
      if (drive == 0)
        told = catalog_.name(first.key_) + ": " + drives_[0]->name() + ": " + wrong +
               (wrong == CHANGED ? ", twice: the bytes on disk have changed" : "") + "; run thimble repack again";
      continue;
    }
    const auto other = std::find_if(first.drives_.begin(), first.drives_.end(), [&](int each) { return each != drive; });
    const int suspect = bad >= 0 ? bad : *other;
    std::lock_guard<std::mutex> lock(notices_);
    if (!std::exchange(told_, true))
      notice_ = catalog_.name(first.key_) + " had to be read again, " + drives_[size_t(suspect)]->name() + ": " +
                first.wrong_ + "; the second read was good. The disk or its cable may be failing (this is said once)";
    return "";
  }
  return told;
}

std::string Blocks::whole(int key, int drive, uint8_t* to) {
  Arrival read;
  read.to_ = to;
  read.key_ = key;
  in_flight_[size_t(drive)]++;
  const int64_t from = catalog_.offsets[size_t(drive)][size_t(key)];
  std::string wrong = drives_[size_t(drive)]->read(from, catalog_.shape.block_bytes, to);
  in_flight_[size_t(drive)]--;
  if (!wrong.empty()) return wrong;
  for (int piece = 0; piece < pieces_; piece++) check(piece, read);
  return verdict(read);
}

double Blocks::rate(int depth, int64_t limit_ns, uint32_t seed) {
  using Clock = std::chrono::steady_clock;
  struct Reading {
    Arrival arrival;
    int number;  // of its memory
  };
  std::string unlocked;
  Arena arena(depth, catalog_.shape.block_bytes, false, &unlocked);  // memory as the slots are: its pages make a difference
  std::mutex mutex;  // guards what follows
  std::mt19937 random(seed);
  std::vector<int> free(static_cast<size_t>(depth));
  std::iota(free.begin(), free.end(), 0);
  std::shared_ptr<Reading> current;
  int next = pieces_;
  int64_t reads = 0;
  const auto begun = Clock::now(), until = begun + std::chrono::nanoseconds(limit_ns);
  const auto read_some = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    do {
      if (next == pieces_) {  // every block that is not over has a thread at work on it: there is memory for one more
        current = std::make_shared<Reading>();
        current->number = free.back();
        free.pop_back();
        begin(int(random() % uint32_t(catalog_.keys())), arena.slot(current->number), &current->arrival);
        next = 0;
      }
      const auto mine = current;
      const int piece = next++;
      lock.unlock();
      std::string error;
      const bool over = read_piece(mine->arrival, piece, &error);
      lock.lock();
      if (over) free.push_back(mine->number);
      reads += over;
    } while (next < pieces_ || Clock::now() < until);
  };
  std::vector<std::thread> threads;
  try {
    for (int number = 0; number < depth; number++) threads.emplace_back(read_some);
  } catch (const std::system_error&) {  // fewer threads are a slower rate, which is an answer too
  }
  for (auto& thread : threads) thread.join();
  return double(reads) * double(catalog_.shape.block_bytes) / std::chrono::duration<double>(Clock::now() - begun).count();
}

std::string Blocks::take_notice() {
  {
    std::lock_guard<std::mutex> lock(notices_);
    if (!notice_.empty()) return std::exchange(notice_, "");
  }
  for (Drive* drive : drives_) {
    std::string notice = drive->take_notice();
    if (!notice.empty()) return notice;
  }
  return "";
}

// Another drive than `but`, if one holds the block. Drives that are equally busy take turns.
int Blocks::choose(int key, int piece, int but) const {
  const int count = int(drives_.size());
  int chosen = but;
  for (int i = 0; i < count; i++) {
    const int drive = (key + piece + i) % count;
    if (drive == but || catalog_.offsets[size_t(drive)][size_t(key)] == NOT_THERE) continue;
    if (chosen == but || in_flight_[size_t(drive)].load() < in_flight_[size_t(chosen)].load()) chosen = drive;
  }
  return chosen;
}

}  // namespace thimble
