// Lists of slots in one array of links: a slot is in at most one list, and moves in constant time.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/experts/host/policy.h"

namespace thimble {

class SlotLists {
 public:
  SlotLists(int slots, int lists) : slots_(slots), next_(size_t(slots + lists)), before_(size_t(slots + lists)),
                                    list_(size_t(slots), NONE), sizes_(size_t(lists)) {
    for (int list = 0; list < lists; list++) next_[size_t(end(list))] = before_[size_t(end(list))] = end(list);
  }

  static constexpr int NONE = -1;

  int list_of(int slot) const { return list_[size_t(slot)]; }
  int size(int list) const { return sizes_[size_t(list)]; }
  // From oldest to newest; end(list) comes before the first and after the last.
  int end(int list) const { return slots_ + list; }
  int after(int at) const { return next_[size_t(at)]; }
  int before(int at) const { return before_[size_t(at)]; }

  void append(int list, int slot) {
    const int last = before(end(list));
    next_[size_t(last)] = before_[size_t(end(list))] = slot;
    before_[size_t(slot)] = last;
    next_[size_t(slot)] = end(list);
    list_[size_t(slot)] = list;
    sizes_[size_t(list)]++;
  }
  void remove(int slot) {
    next_[size_t(before(slot))] = after(slot);
    before_[size_t(after(slot))] = before(slot);
    sizes_[size_t(list_of(slot))]--;
    list_[size_t(slot)] = NONE;
  }
  // The oldest or the newest that may be evicted, or -1.
  int oldest(int list, const Evictable& slots) const {
    for (int slot = after(end(list)); slot != end(list); slot = after(slot))
      if (slots.evictable(slot)) return slot;
    return -1;
  }
  int newest(int list, const Evictable& slots) const {
    for (int slot = before(end(list)); slot != end(list); slot = before(slot))
      if (slots.evictable(slot)) return slot;
    return -1;
  }

 private:
  const int slots_;
  std::vector<int> next_, before_, list_, sizes_;
};

}  // namespace thimble
