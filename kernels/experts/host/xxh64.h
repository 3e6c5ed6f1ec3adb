// XXH64 with seed 0 of a whole buffer, as the public specification of xxHash describes it. Little-endian hosts.
#pragma once

#include <cstdint>
#include <cstring>

namespace thimble {

inline uint64_t xxh64(const uint8_t* at, uint64_t bytes) {
  constexpr uint64_t P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F, P3 = 0x165667B19E3779F9;
  constexpr uint64_t P4 = 0x85EBCA77C2B2AE63, P5 = 0x27D4EB2F165667C5;
  const auto rotate = [](uint64_t value, int by) { return value << by | value >> (64 - by); };
  const auto word = [](const uint8_t* from) {
    uint64_t value;
    std::memcpy(&value, from, 8);
    return value;
  };
  const auto round = [&](uint64_t lane, uint64_t input) { return rotate(lane + input * P2, 31) * P1; };
  const uint8_t* const end = at + bytes;
  uint64_t hash;
  if (bytes >= 32) {
    uint64_t lane[4] = {P1 + P2, P2, 0, 0 - P1};
    for (; at + 32 <= end; at += 32)
      for (int i = 0; i < 4; i++) lane[i] = round(lane[i], word(at + 8 * i));
    hash = rotate(lane[0], 1) + rotate(lane[1], 7) + rotate(lane[2], 12) + rotate(lane[3], 18);
    for (const uint64_t value : lane) hash = (hash ^ round(0, value)) * P1 + P4;
  } else {
    hash = P5;
  }
  hash += bytes;
  for (; at + 8 <= end; at += 8) hash = rotate(hash ^ round(0, word(at)), 27) * P1 + P4;
  if (at + 4 <= end) {
    uint32_t half;
    std::memcpy(&half, at, 4);
    hash = rotate(hash ^ half * P1, 23) * P2 + P3;
    at += 4;
  }
  for (; at < end; at++) hash = rotate(hash ^ *at * P5, 11) * P1;
  hash = (hash ^ hash >> 33) * P2;
  hash = (hash ^ hash >> 29) * P3;
  return hash ^ hash >> 32;
}

}  // namespace thimble
