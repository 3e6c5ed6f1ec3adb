// The slot table and its policy without memory or disk: for the exhaustive test and for simulators.

#include "kernels/experts/host/slots.h"
#include "kernels/workers/abi.h"

using namespace thimble;

// Null if there is no such policy.
THIMBLE_API void* thimble_slots_open(int slots, int layers, int experts, const char* policy) {
  const PolicySizes sizes{slots, layers, experts};
  auto made = make_policy(policy, sizes);
  return made ? new SlotTable(slots, sizes.keys(), std::move(made)) : nullptr;
}

THIMBLE_API void thimble_slots_close(void* table) { delete static_cast<SlotTable*>(table); }

// Both write the slot and its generation to lease[2] and return 1, or return 0.
THIMBLE_API int thimble_slots_lease(void* table, int key, int why, int64_t* lease) {
  Lease got;
  if (!static_cast<SlotTable*>(table)->lease(key, &got, Why(why))) return 0;
  lease[0] = got.slot;
  lease[1] = got.generation;
  return 1;
}

THIMBLE_API int thimble_slots_load(void* table, int key, int why, int64_t* lease) {
  Lease got;
  bool evicted;
  if (!static_cast<SlotTable*>(table)->load(key, Why(why), &got, &evicted)) return 0;
  lease[0] = got.slot;
  lease[1] = got.generation;
  return 1;
}

THIMBLE_API int thimble_slots_arrived(void* table, const int64_t* lease, int ok) {
  return static_cast<SlotTable*>(table)->arrived({int(lease[0]), uint32_t(lease[1])}, ok != 0);
}

THIMBLE_API int thimble_slots_release(void* table, const int64_t* lease) {
  return static_cast<SlotTable*>(table)->release({int(lease[0]), uint32_t(lease[1])});
}

THIMBLE_API int thimble_slots_sound(void* table) { return static_cast<SlotTable*>(table)->check().empty(); }

// out[4]: state, key, generation, leases.
THIMBLE_API void thimble_slots_at(void* table, int slot, int64_t* out) {
  const Slot& s = static_cast<SlotTable*>(table)->at(slot);
  out[0] = int(s.state);
  out[1] = s.key;
  out[2] = s.generation;
  out[3] = s.leases;
}

// out[4]: evictions; prefetches issued, useful, wasted.
THIMBLE_API void thimble_slots_counts(void* table, int64_t* out) {
  const SlotCounts& c = static_cast<SlotTable*>(table)->counts();
  out[0] = c.evictions;
  out[1] = c.prefetch_issued;
  out[2] = c.prefetch_useful;
  out[3] = c.prefetch_wasted;
}
