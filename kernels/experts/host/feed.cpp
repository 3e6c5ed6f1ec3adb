#include "kernels/experts/host/feed.h"

#include <algorithm>

namespace thimble {

void Feed::guess(SlotTable& table, Key first, int experts, int most) {
  open_ = guessed_ = true;
  stuck_ = false;
  error_.clear();
  first_ = first;
  tokens_ = INT64_MAX;  // of whose lookups these are few: a sweep's, whatever else they turn out to be
  counts_.assign(size_t(experts), 1);
  most_ = most;
  for (Key key = first; key < first + experts; key++) {
    const Slot* slot = table.find(key);
    if (!slot || slot->state != State::ready) continue;
    resident_.push_back(key);
    table.want(key, Wanted::now);
  }
}

int Feed::begin(SlotTable& table, Key first, int experts, const int32_t* counts, int64_t tokens, int most, int* hits) {
  std::vector<bool> here(size_t(experts), false);  // or was, and is copied
  for (const Out& out : out_) here[size_t(out.key - first)] = true;
  for (const Key key : resident_) table.want(key, Wanted::no);
  resident_.clear();
  open_ = true;
  guessed_ = stuck_ = false;
  error_.clear();
  first_ = first;
  tokens_ = tokens;
  counts_.assign(counts, counts + experts);
  most_ = most;
  for (const Out& out : out_) {
    if (counts_[size_t(out.key - first)] <= 0) continue;
    ++*hits;
    Lease lease;  // which tells the policy what the block is needed for
    if (why(out.key) != Why::sweep && table.lease(out.key, &lease, why(out.key))) table.release(lease);
  }
  for (Key key = first; key < first + experts; key++) {
    if (counts_[size_t(key - first)] <= 0 || here[size_t(key - first)]) continue;
    const Slot* slot = table.find(key);
    (slot && slot->state == State::ready ? resident_ : missing_).push_back(key);
    table.want(key, Wanted::now);
  }
  return int(missing_.size());
}

void Feed::end(SlotTable& table) {
  for (const auto* keys : {&resident_, &missing_})
    for (const Key key : *keys) table.want(key, Wanted::no);
  for (const Lease& lease : coming_) table.release(lease);
  for (const Block& block : arrived_) table.release(block.lease);
  for (const Out& out : out_)
    if (!out.returned) table.release(out.lease);
  first_number_ += int64_t(out_.size());
  resident_.clear();
  missing_.clear();
  coming_.clear();
  arrived_.clear();
  out_.clear();
  read_ = resident_out_ = 0;
  open_ = guessed_ = false;
}

void Feed::started(SlotTable& table, const Lease& lease, bool ready) {
  const Key key = missing_.front();
  missing_.pop_front();
  table.want(key, Wanted::no);
  read_++;
  if (ready)
    arrived_.push_back({key, lease, 0});
  else
    coming_.push_back(lease);
}

void Feed::found_no_slot(const SlotTable& table) {
  const auto here = std::find_if(missing_.begin(), missing_.end(), [&](Key key) { return table.find(key) != nullptr; });
  stuck_ = here == missing_.end();
  if (!stuck_) std::rotate(missing_.begin(), here, here + 1);
}

bool Feed::arrived(const Lease& lease, Key key, const std::string& error) {
  const auto found = std::find_if(coming_.begin(), coming_.end(), [&](const Lease& one) {
    return one.slot == lease.slot && one.generation == lease.generation;
  });
  if (found == coming_.end()) return false;
  coming_.erase(found);
  if (error.empty()) {
    arrived_.push_back({key, lease, 0});
  } else {
    read_--;
    if (error_.empty()) error_ = error;
  }
  return true;
}

int Feed::take(SlotTable& table, Block* out, int most, int* hits, int* lost) {
  int count = 0;
  while (count < most && !resident_.empty() && resident_out_ < most_resident() && held() < most_) {
    const Key key = resident_.front();
    resident_.pop_front();
    const Slot* slot = table.find(key);
    if (!slot || slot->state != State::ready) {
      if (guessed_) continue;
      missing_.push_back(key);
      ++*lost;
      continue;
    }
    Lease lease;
    table.lease(key, &lease, why(key));
    table.want(key, Wanted::no);
    resident_out_++;
    if (!guessed_) ++*hits;
    hand_out(out + count++, key, lease, false);
  }
  for (; count < most && !arrived_.empty(); count++) {
    hand_out(out + count, arrived_.front().key, arrived_.front().lease, true);
    arrived_.pop_front();
  }
  return count;
}

void Feed::hand_out(Block* to, Key key, const Lease& lease, bool read) {
  *to = {key, lease, first_number_ + int64_t(out_.size())};
  out_.push_back({lease, key, read, false});
}

Key Feed::awaited(const SlotTable& table) const {
  return coming_.empty() ? missing_.front() : table.at(coming_.front().slot).key;
}

bool Feed::waits_for_return() const {
  if (!coming_.empty() || !arrived_.empty()) return false;
  if (!resident_.empty()) return true;  // take() would have had it
  return !missing_.empty() && (read_ >= most_read() || held() >= most_);
}

bool Feed::give_back(SlotTable& table, int64_t number) {
  const int64_t at = number - first_number_;
  if (at < 0 || at >= int64_t(out_.size()) || out_[size_t(at)].returned) return false;
  Out& out = out_[size_t(at)];
  out.returned = true;
  (out.read ? read_ : resident_out_)--;
  return table.release(out.lease);
}

}  // namespace thimble
