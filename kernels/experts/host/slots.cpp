#include "kernels/experts/host/slots.h"

#include <algorithm>

namespace thimble {

SlotTable::SlotTable(int slots, int keys, std::unique_ptr<Policy> policy)
    : slots_(size_t(slots)), of_key_(size_t(keys), -1), wanted_(size_t(keys), Wanted::no), policy_(std::move(policy)) {
  for (int slot = slots - 1; slot >= 0; slot--) free_.push_back(slot);
}

const Slot* SlotTable::find(Key key) const {
  const int slot = of_key_[size_t(key)];
  return slot < 0 ? nullptr : &at(slot);
}

int SlotTable::used() const {
  int ready = 0;
  for (const Slot& slot : slots_) ready += slot.state == State::ready;
  return ready;
}

bool SlotTable::lease(Key key, Lease* lease, Why why) {
  const int slot = of_key_[size_t(key)];
  if (slot < 0) return false;
  Slot& s = slots_[size_t(slot)];
  s.leases++;
  counts_.prefetch_useful += s.unproven;
  s.unproven = false;
  s.used_at = ++clock_;
  policy_->used(slot, why);
  *lease = {slot, s.generation};
  return true;
}

bool SlotTable::hold(Key key, Lease* lease) {
  const int slot = of_key_[size_t(key)];
  if (slot < 0 || at(slot).state != State::ready) return false;
  slots_[size_t(slot)].leases++;
  *lease = {slot, at(slot).generation};
  return true;
}

bool SlotTable::load(Key key, Why why, Lease* lease, bool* evicted, bool for_feed) {
  *evicted = false;
  if (of_key_[size_t(key)] >= 0) return false;
  int slot;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else {
    slot = victim(key, why, for_feed);
    if (slot < 0) return false;
    counts_.evictions++;
    empty(slot);
    *evicted = true;
  }
  Slot& s = slots_[size_t(slot)];
  s.state = State::loading;
  s.key = key;
  s.generation++;
  s.leases = !is_guess(why);
  s.unproven = is_guess(why);
  s.used_at = why == Why::demand || why == Why::sweep ? ++clock_ : 0;
  counts_.prefetch_issued += is_guess(why);
  of_key_[size_t(key)] = slot;
  policy_->loaded(slot, key, why);
  *lease = {slot, s.generation};
  return true;
}

int SlotTable::victim(Key key, Why why, bool for_feed) {
  if (is_guess(why)) return victim(key, why, Wanted::no);
  if (for_feed) {
    const int slot = victim(key, why, Wanted::no);
    return slot >= 0 ? slot : victim(key, why, Wanted::next);
  }
  const int slot = victim(key, why, Wanted::now);
  if (slot < 0 || wanted_[size_t(at(slot).key)] == Wanted::no) return slot;
  const int other = victim(key, Why::expected, Wanted::no);
  return other >= 0 ? other : slot;
}

// The policy proposes, the table disposes: no policy can evict what is leased or loading.
int SlotTable::victim(Key key, Why why, Wanted most) {
  most_wanted_ = most;
  const int slot = policy_->victim(*this, key, why);
  return slot >= 0 && evictable(slot) ? slot : -1;
}

bool SlotTable::arrived(const Lease& lease, bool ok) {
  Slot* s = current(lease);
  if (!s || s->state != State::loading) return false;
  if (ok) {
    s->state = State::ready;
  } else {
    empty(lease.slot);
    free_.push_back(lease.slot);
  }
  return true;
}

bool SlotTable::release(const Lease& lease) {
  Slot* s = current(lease);
  if (!s || s->leases == 0) return false;
  s->leases--;
  return true;
}

std::vector<Key> SlotTable::resident() const {
  std::vector<Key> keys;
  for (const Slot& slot : slots_)
    if (slot.state == State::ready) keys.push_back(slot.key);
  const auto used_at = [&](Key key) { return at(of_key_[size_t(key)]).used_at; };
  std::sort(keys.begin(), keys.end(), [&](Key a, Key b) { return used_at(a) < used_at(b); });
  return keys;
}

void SlotTable::used_before(const std::vector<Key>& first) {
  std::vector<Key> order;
  for (const Key key : first)
    if (const Slot* slot = find(key); slot && slot->state == State::ready && slot->used_at == 0) order.push_back(key);
  for (const Key key : resident())
    if (find(key)->used_at) order.push_back(key);
  for (const Key key : order) {
    const int slot = of_key_[size_t(key)];
    slots_[size_t(slot)].used_at = ++clock_;
    policy_->used(slot, Why::demand);
  }
}

std::string SlotTable::check() const {
  size_t free = 0, loading = 0, ready = 0, keys = 0;
  for (size_t at = 0; at < slots_.size(); at++) {
    const Slot& s = slots_[at];
    free += s.state == State::free;
    loading += s.state == State::loading;
    ready += s.state == State::ready;
    if (s.leases < 0) return "a slot has fewer than no leases";
    if ((s.state == State::free) != (s.key == NO_KEY)) return "a slot has a key and no block, or a block and no key";
    if (s.state == State::free && (s.leases || s.unproven)) return "a free slot is leased";
    if (s.key != NO_KEY && of_key_[size_t(s.key)] != int(at)) return "a slot's key is registered elsewhere";
  }
  for (const int slot : of_key_) keys += slot >= 0;
  if (free != free_.size() || keys != loading + ready || free + loading + ready != slots_.size())
    return "conservation: free " + std::to_string(free) + " (listed " + std::to_string(free_.size()) + ") + loading " +
           std::to_string(loading) + " + ready " + std::to_string(ready) + " (keys " + std::to_string(keys) +
           ") is not total " + std::to_string(slots_.size());
  return "";
}

Slot* SlotTable::current(const Lease& lease) {
  if (lease.slot < 0 || lease.slot >= size()) return nullptr;
  Slot& s = slots_[size_t(lease.slot)];
  return s.generation == lease.generation && s.state != State::free ? &s : nullptr;
}

// Ends a slot's life; the caller lists it as free or loads into it.
void SlotTable::empty(int slot) {
  Slot& s = slots_[size_t(slot)];
  policy_->left(slot);
  counts_.prefetch_wasted += s.unproven;
  of_key_[size_t(s.key)] = -1;
  s.state = State::free;
  s.key = NO_KEY;
  s.leases = 0;
  s.unproven = false;
}

}  // namespace thimble
