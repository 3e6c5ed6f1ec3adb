#include "kernels/experts/device/ring.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace thimble {
namespace {

constexpr unsigned STREAM_NON_BLOCKING = 1, EVENT_DISABLE_TIMING = 2;
constexpr size_t LANES = 2;  // of blocks; one leaves gaps between copies (copy_lanes.h)
constexpr size_t TABLES = LANES;  // the lane of tables

}  // namespace

int fill_table(const int32_t* experts, int count, int place, const int32_t* counts, int64_t most_rows, int32_t* table,
               std::vector<Pass>* passes) {
  passes->clear();
  Pass pass{0, 0, 0};
  int items = 0;
  int64_t rows = 0;
  for (int block = 0; block < count; block++) {
    const int64_t lookups = counts[experts[block]];
    for (int64_t first = 0; first < lookups;) {
      const int64_t some = std::min(lookups - first, most_rows - rows);
      const int64_t item[Ring::FIELDS] = {experts[block], place + block, rows, first, some};
      std::copy(item, item + Ring::FIELDS, table + int64_t(items) * Ring::FIELDS);
      items++;
      first += some;
      rows += some;
      pass.most_rows = std::max(pass.most_rows, some);
      if (rows < most_rows) continue;
      pass.items = items - pass.first;
      passes->push_back(pass);
      pass = {items, 0, 0};
      rows = 0;
    }
  }
  pass.items = items - pass.first;
  if (pass.items) passes->push_back(pass);
  return items;
}

Ring::Ring(Cache& cache, const Catalog& catalog, const CudaDriver* driver, CudaDriver::Handle context,
           const RingMemory& memory, const RingShape& shape)
    : cache_(cache), catalog_(catalog), driver_(driver), context_(context), memory_(memory), shape_(shape) {
  groups_.resize(size_t(shape.groups));
  taken_.resize(size_t(shape.group));
  if (!driver_) return;
  const auto event = [&] {
    CudaDriver::Handle made = nullptr;
    check(driver_->event_create(&made, EVENT_DISABLE_TIMING), "cuEventCreate");
    return made;
  };
  try {
    check(driver_->ctx_set_current(context_), "cuCtxSetCurrent");
    for (size_t lane = 0; lane <= TABLES; lane++) {
      CudaDriver::Handle stream = nullptr;
      check(driver_->stream_create(&stream, STREAM_NON_BLOCKING), "cuStreamCreate");
      lanes_.push_back(stream);
    }
    for (Group& group : groups_) {
      group.used = event();
      for (size_t lane = 0; lane <= TABLES; lane++) group.copied.push_back(event());
    }
  } catch (...) {
    destroy();
    throw;
  }
}

Ring::~Ring() { destroy(); }

void Ring::destroy() {
  if (!driver_) return;
  driver_->ctx_set_current(context_);
  for (auto lane : lanes_) driver_->stream_synchronize(lane);
  for (Group& group : groups_) {
    if (group.used) driver_->event_destroy(group.used);
    for (auto event : group.copied) driver_->event_destroy(event);
  }
  for (auto lane : lanes_) driver_->stream_destroy(lane);
}

int Ring::ahead() {
  if (driver_) check(driver_->ctx_set_current(context_), "cuCtxSetCurrent");
  assert(!ahead_);
  int copied = 0;
  std::string error;
  for (; ahead_ < shape_.groups; ahead_++) {
    Group& group = groups_[size_t(turn_)];
    release(group);
    const int count = take(group, 0, &error);  // a guess has what is in RAM, and never an error
    if (count <= 0) break;
    copy_blocks(turn_);
    turn_ = (turn_ + 1) % shape_.groups;
    copied += count;
  }
  return copied;
}

int Ring::next(const int32_t* counts, int64_t timeout_ns, CudaDriver::Handle stream, std::vector<Pass>* passes, int* copied,
               std::string* error) {
  if (driver_) check(driver_->ctx_set_current(context_), "cuCtxSetCurrent");
  passes->clear();
  *copied = 0;
  while (ahead_) {
    given_ = (turn_ + shape_.groups - ahead_--) % shape_.groups;
    if (const int named = copy_table(given_, counts, passes)) {
      wait_for_copies(groups_[size_t(given_)], stream);
      return named;
    }
  }
  Group& group = groups_[size_t(turn_)];
  release(group);
  int count = 0;
  while ((count = take(group, timeout_ns, error)) == 0) {
    if (cache_.feed_over()) return 0;
    // Nothing comes before something goes back: the group after this one was filled before the others.
    Group* oldest = nullptr;
    for (int later = 1; later < shape_.groups && !oldest; later++) {
      Group& other = groups_[size_t((turn_ + later) % shape_.groups)];
      if (!other.leased.empty()) oldest = &other;
    }
    assert(oldest);
    release(*oldest);
  }
  if (count < 0) return -1;
  given_ = turn_;
  turn_ = (turn_ + 1) % shape_.groups;
  *copied = count;
  copy_table(given_, counts, passes);
  copy_blocks(given_);
  wait_for_copies(group, stream);
  return count;
}

// As Cache::take, into the group, whose last blocks were released.
int Ring::take(Group& group, int64_t timeout_ns, std::string* error) {
  const int count = cache_.take(timeout_ns, shape_.group, taken_.data(), error);
  group.experts.clear();
  for (int block = 0; block < count; block++) {
    group.experts.push_back(taken_[size_t(block)].key % catalog_.experts);
    group.leased.push_back(taken_[size_t(block)].number);
  }
  return count;
}

// The blocks that were just taken.
void Ring::copy_blocks(int number) {
  const Group& group = groups_[size_t(number)];
  const size_t block_bytes = size_t(catalog_.shape.block_bytes);
  const CudaDriver::Address first = memory_.blocks + uint64_t(number) * uint64_t(shape_.group) * block_bytes;
  for (size_t lane = 0; driver_ && lane < LANES; lane++)
    check(driver_->stream_wait_event(lanes_[lane], group.used, 0), "cuStreamWaitEvent");
  for (size_t block = 0; block < group.experts.size(); block++)
    copy(first + block * block_bytes, cache_.memory(taken_[block].lease), block_bytes, block % LANES);
  for (size_t lane = 0; driver_ && lane < LANES; lane++)
    check(driver_->event_record(group.copied[lane], lanes_[lane]), "cuEventRecord");
}

// How many of the group's blocks are named.
int Ring::copy_table(int number, const int32_t* counts, std::vector<Pass>* passes) {
  Group& group = groups_[size_t(number)];
  const int start = number * 2 * shape_.group;
  int32_t* const table = memory_.tables + int64_t(start) * FIELDS;
  const int items =
      fill_table(group.experts.data(), int(group.experts.size()), number * shape_.group, counts, shape_.most_rows, table, passes);
  assert(items <= 2 * shape_.group);
  for (Pass& pass : *passes) pass.first += start;
  if (!items) return 0;
  if (driver_) check(driver_->stream_wait_event(lanes_[TABLES], group.used, 0), "cuStreamWaitEvent");
  copy(memory_.device_tables + uint64_t(start) * FIELDS * sizeof(int32_t), table, size_t(items) * FIELDS * sizeof(int32_t), TABLES);
  if (driver_) check(driver_->event_record(group.copied[TABLES], lanes_[TABLES]), "cuEventRecord");
  return int(std::count_if(group.experts.begin(), group.experts.end(), [&](int32_t expert) { return counts[expert] > 0; }));
}

void Ring::copy(CudaDriver::Address to, const void* from, size_t bytes, size_t lane) {
  if (driver_)
    check(driver_->memcpy_to_device(to, from, bytes, lanes_[lane]), "cuMemcpyHtoDAsync");
  else
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
}

void Ring::wait_for_copies(const Group& group, CudaDriver::Handle stream) {
  for (auto event : group.copied) check(driver_->stream_wait_event(stream, event, 0), "cuStreamWaitEvent");
}

void Ring::used(CudaDriver::Handle stream) {
  if (driver_) check(driver_->event_record(groups_[size_t(given_)].used, stream), "cuEventRecord");
}

void Ring::release(Group& group) {
  if (group.leased.empty()) return;
  for (auto event : group.copied) check(driver_->event_synchronize(event), "cuEventSynchronize");
  cache_.give_back(group.leased.data(), int(group.leased.size()));
  group.leased.clear();
}

void Ring::drain() {
  ahead_ = 0;
  if (driver_) driver_->ctx_set_current(context_);
  for (auto lane : lanes_) driver_->stream_synchronize(lane);
  for (Group& group : groups_) {
    if (!group.leased.empty()) cache_.give_back(group.leased.data(), int(group.leased.size()));
    group.leased.clear();
  }
}

}  // namespace thimble
