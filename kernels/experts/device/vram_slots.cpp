#include "kernels/experts/device/vram_slots.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "kernels/experts/host/abi.h"
#include "kernels/workers/abi.h"

namespace thimble {
namespace {

constexpr uint32_t LEAST = 2 * Heat::NAMED;  // named twice: any of a prompt's first words may be named once
constexpr int LOOKED_AT = 8;                 // candidates for each copy: some are not in RAM

}  // namespace

VramSlots::VramSlots(Step& step, Cache& cache, const Catalog& catalog, CudaDriver::Address memory, int slots)
    : step_(step), cache_(cache), catalog_(catalog), memory_(memory), address_of_key_(size_t(catalog.keys())),
      key_(size_t(slots), NO_KEY) {}

int VramSlots::used() const { return int(key_.size() - size_t(std::count(key_.begin(), key_.end(), NO_KEY))); }

std::vector<VramSlots::Move> VramSlots::begin(int most) {
  assert(pending_.empty());
  const Heat& heat = step_.heat();
  std::vector<std::pair<uint32_t, Key>> hot;
  for (Key key = 0; key < catalog_.keys(); key++)
    if (const uint32_t count = heat.of(key); count >= LEAST && !address_of_key_[size_t(key)]) hot.emplace_back(count, key);
  const size_t some = std::min(hot.size(), size_t(most) * LOOKED_AT);
  std::partial_sort(hot.begin(), hot.begin() + std::ptrdiff_t(some), hot.end(), std::greater<>());
  std::vector<std::pair<uint32_t, int>> cold;  // free slots first
  for (int slot = 0; slot < int(key_.size()); slot++)
    cold.emplace_back(key_[size_t(slot)] == NO_KEY ? 0 : 1 + heat.of(key_[size_t(slot)]), slot);
  std::sort(cold.begin(), cold.end());
  std::vector<Move> moves;
  for (size_t at = 0; at < some && int(moves.size()) < most && moves.size() < cold.size(); at++) {
    const auto [count, key] = hot[at];
    const auto [least, slot] = cold[moves.size()];
    if (count <= 2 * uint64_t(least)) break;
    Lease lease;
    if (!cache_.lease_if_ready(key, &lease)) continue;
    if (Key& before = key_[size_t(slot)]; before != NO_KEY) address_of_key_[size_t(std::exchange(before, NO_KEY))] = 0;
    pending_.push_back({key, slot, lease});
    moves.push_back({slot, cache_.memory(lease)});
  }
  return moves;
}

void VramSlots::end() {
  for (const Pending& one : pending_) {
    key_[size_t(one.slot)] = one.key;
    address_of_key_[size_t(one.key)] = memory_ + uint64_t(one.slot) * uint64_t(catalog_.shape.block_bytes);
    cache_.release(one.lease);
  }
  pending_.clear();
}

std::vector<Key> VramSlots::held() const {
  std::vector<Key> keys;
  std::copy_if(key_.begin(), key_.end(), std::back_inserter(keys), [](Key key) { return key != NO_KEY; });
  const Heat& heat = step_.heat();
  std::sort(keys.begin(), keys.end(), [&](Key a, Key b) { return heat.of(a) < heat.of(b); });
  return keys;
}

}  // namespace thimble

using thimble::VramSlots;

THIMBLE_API void* thimble_vram_open(void* host, uint64_t memory, int slots) {
  return new VramSlots(thimble::step_of(host), thimble::cache_of(host), thimble::catalog_of(host), memory, slots);
}

// No turn of theirs may follow.
THIMBLE_API void thimble_vram_close(void* vram) { delete static_cast<VramSlots*>(vram); }

// Slots and addresses [most]; how many there are to copy.
THIMBLE_API int thimble_vram_begin(void* vram, int most, int32_t* slots, uint64_t* from) {
  const auto moves = static_cast<VramSlots*>(vram)->begin(most);
  for (size_t at = 0; at < moves.size(); at++) {
    slots[at] = moves[at].slot;
    from[at] = reinterpret_cast<uint64_t>(moves[at].from);
  }
  return int(moves.size());
}

THIMBLE_API void thimble_vram_end(void* vram) { static_cast<VramSlots*>(vram)->end(); }

// The blocks held, the coldest first, into keys[slots]; how many there are.
THIMBLE_API int thimble_vram_held(void* vram, int32_t* keys) {
  const std::vector<thimble::Key> held = static_cast<VramSlots*>(vram)->held();
  std::copy(held.begin(), held.end(), keys);
  return int(held.size());
}
