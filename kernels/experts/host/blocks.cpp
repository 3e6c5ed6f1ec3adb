#include "kernels/experts/host/blocks.h"

#include <chrono>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "kernels/experts/host/arena.h"
#include "kernels/experts/host/xxh64.h"

namespace thimble {
namespace {

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

Blocks::Blocks(const Catalog& catalog, std::vector<Drive*> drives)
    : catalog_(catalog), drives_(std::move(drives)), in_flight_(drives_.size()) {}

std::string Blocks::read(int key, uint8_t* to) {
  const int first = choose(key, -1), second = choose(key, first);
  const std::string wrong = attempt(key, first, to);
  if (wrong.empty()) return "";
  const std::string again = attempt(key, second, to);
  if (!again.empty())
    return catalog_.name(key) + ": " + drives_[size_t(second)]->name() + ": " + again +
           (again == CHANGED ? ", twice: the bytes on disk have changed; run thimble repack again" : "");
  std::lock_guard<std::mutex> lock(notices_);
  if (!std::exchange(told_, true))
    notice_ = catalog_.name(key) + " had to be read again, " + drives_[size_t(first)]->name() + ": " + wrong +
              "; the second read was good. The disk or its cable may be failing (this is said once)";
  return "";
}

double Blocks::rate(int depth, int64_t limit_ns, uint32_t seed) {
  using Clock = std::chrono::steady_clock;
  const auto begun = Clock::now(), until = begun + std::chrono::nanoseconds(limit_ns);
  std::atomic<int64_t> reads{0};
  std::vector<std::thread> threads;
  std::string unlocked;
  Arena arena(depth, catalog_.shape.block_bytes, false, &unlocked);  // memory as the slots are: its pages make a difference
  const auto read_some = [&](int number) {
    std::mt19937 random(seed * 1000 + uint32_t(number));
    do {
      read(int(random() % uint32_t(catalog_.keys())), arena.slot(number));
      reads++;
    } while (Clock::now() < until);
  };
  try {
    for (int number = 0; number < depth; number++) threads.emplace_back(read_some, number);
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

// Another drive than `but`, if one holds the block. Drives that are equally busy take turns by key.
int Blocks::choose(int key, int but) const {
  const int count = int(drives_.size());
  int chosen = but;
  for (int i = 0; i < count; i++) {
    const int drive = (key + i) % count;
    if (drive == but || catalog_.offsets[size_t(drive)][size_t(key)] == NOT_THERE) continue;
    if (chosen == but || in_flight_[size_t(drive)].load() < in_flight_[size_t(chosen)].load()) chosen = drive;
  }
  return chosen;
}

std::string Blocks::attempt(int key, int drive, uint8_t* to) {
  const Shape& shape = catalog_.shape;
  in_flight_[size_t(drive)]++;
  const std::string wrong =
      drives_[size_t(drive)]->read(catalog_.offsets[size_t(drive)][size_t(key)], shape.block_bytes, to);
  in_flight_[size_t(drive)]--;
  if (!wrong.empty()) return wrong;
  if (xxh64(to, uint64_t(shape.block_bytes)) != catalog_.checksums[size_t(key)])
    return CHANGED;
  const int64_t down_scale_bytes = int64_t(shape.width) / GROUP * shape.latent;
  if (has_bad_scale(to + shape.up_scales, shape.down_values - shape.up_scales) ||
      has_bad_scale(to + shape.down_scales, down_scale_bytes))
    return "a block scale is negative or NaN; run thimble repack again";
  return "";
}

}  // namespace thimble
