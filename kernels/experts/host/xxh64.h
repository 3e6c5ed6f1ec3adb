// XXH64 with seed 0, as the public specification of xxHash describes it, of a whole buffer or of parts as they come.
// Little-endian hosts.
#pragma once

#include <cstdint>
#include <cstring>

namespace thimble {

class Xxh64 {
 public:
  static constexpr uint64_t STRIPE = 32;

  // The next part, in order. Each but the last has whole stripes; the last must stay where it is until end().
  void add(const uint8_t* at, uint64_t bytes) {
    uint64_t lane[4] = {lane_[0], lane_[1], lane_[2], lane_[3]};
    const uint8_t* const end = at + bytes / STRIPE * STRIPE;
    for (; at < end; at += STRIPE)
      for (int i = 0; i < 4; i++) lane[i] = round(lane[i], word(at + 8 * i));
    std::memcpy(lane_, lane, sizeof lane_);
    bytes_ += bytes;
    rest_ = at;
  }

  uint64_t end() const {
    uint64_t hash = P5;
    if (bytes_ >= STRIPE) {
      hash = rotate(lane_[0], 1) + rotate(lane_[1], 7) + rotate(lane_[2], 12) + rotate(lane_[3], 18);
      for (const uint64_t value : lane_) hash = (hash ^ round(0, value)) * P1 + P4;
    }
    hash += bytes_;
    const uint8_t* at = rest_;
    uint64_t left = bytes_ % STRIPE;
    for (; left >= 8; left -= 8, at += 8) hash = rotate(hash ^ round(0, word(at)), 27) * P1 + P4;
    if (left >= 4) {
      uint32_t half;
      std::memcpy(&half, at, 4);
      hash = rotate(hash ^ half * P1, 23) * P2 + P3;
      left -= 4, at += 4;
    }
    for (; left > 0; left--, at++) hash = rotate(hash ^ *at * P5, 11) * P1;
    hash = (hash ^ hash >> 33) * P2;
    hash = (hash ^ hash >> 29) * P3;
    return hash ^ hash >> 32;
  }

 private:
  static constexpr uint64_t P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F, P3 = 0x165667B19E3779F9;
  static constexpr uint64_t P4 = 0x85EBCA77C2B2AE63, P5 = 0x27D4EB2F165667C5;

  static uint64_t rotate(uint64_t value, int by) { return value << by | value >> (64 - by); }
  static uint64_t word(const uint8_t* from) {
    uint64_t value;
    std::memcpy(&value, from, 8);
    return value;
  }
  static uint64_t round(uint64_t lane, uint64_t input) { return rotate(lane + input * P2, 31) * P1; }

  uint64_t lane_[4] = {P1 + P2, P2, 0, 0 - P1};
  uint64_t bytes_ = 0;
  const uint8_t* rest_ = nullptr;
};

inline uint64_t xxh64(const uint8_t* at, uint64_t bytes) {
  Xxh64 sum;
  sum.add(at, bytes);
  return sum.end();
}

}  // namespace thimble
