// From logits to an id: kernels/sampling/reference.py, the same id.
//
// Nothing is sorted. Ids fall into buckets by how far their logit lies below the largest; masses are integers, so their
// sums are exact in any order. Where a running sum passes its target is then looked for in one bucket only. Memory: one
// share (4 bytes) and one bucket (2 bytes) an id, kept by the thread for its next call.

#include <algorithm>
#include <cfloat>
#include <climits>
#include <vector>

#include "kernels/elementary/elementary.h"
#include "kernels/sampling/logits.h"
#include "kernels/workers/abi.h"

using namespace thimble;

namespace {

constexpr int64_t BUCKETS = 1024, LANES = 4;  // sums in several lanes: neighbours often fall into one bucket
constexpr double WHOLE = 0x1p40;              // the mass of the most probable id
constexpr double RANGE = 28.0;                // e^-28 is no mass any more
constexpr size_t FEW = 256;                   // entries that are sorted

struct Entry {
  int32_t order, id;
  int64_t mass;
};

// The element at which a running sum passes its target, and the mass up to and with it.
struct Found {
  int32_t id;
  int64_t mass;
};

struct Scratch {
  std::vector<float> shares;
  std::vector<uint16_t> buckets;
  std::vector<Entry> entries;
  std::vector<int64_t> masses, counts;  // of each bucket
};

int64_t mass_of(float share) { return int64_t(double(share) * WHOLE); }

// e^((x - top) / temperature), in float32, of each.
THIMBLE_INLINE void shares_of(const float* x, int64_t count, float top, double temperature, float* share) {
  if (temperature == 1.0)
    for (int64_t i = 0; i < count; i++) share[i] = float(exp_of(double(x[i] - top)));
  else
    for (int64_t i = 0; i < count; i++) share[i] = float(exp_of(double(x[i] - top) / temperature));
}

// A bucket's number never falls while logits fall: subtraction, product and rounding keep order.
THIMBLE_CLONES void weigh(Logits logits, float top, double temperature, float scale, float* shares, uint16_t* buckets,
                          int64_t* sums) {
  constexpr double SHIFT = 0x1p52;  // added to a number below, its bits end in the number rounded
  float scratch[BLOCK];
  int32_t bucket[BLOCK];
  int64_t mass[BLOCK];
  for (int64_t start = 0; start < logits.ids; start += BLOCK) {
    const int64_t count = std::min(BLOCK, logits.ids - start);
    const float* x = logits.block(start, count, scratch);
    float* share = shares + start;
    shares_of(x, count, top, temperature, share);
    for (int64_t i = 0; i < count; i++) {
      const double exact = double(share[i]) * WHOLE, shifted = exact + SHIFT;
      int64_t bits;
      std::memcpy(&bits, &shifted, 8);
      mass[i] = (bits & 0xFFFFFFFFFFFFF) - (shifted - SHIFT > exact);  // towards zero
    }
    for (int64_t i = 0; i < count; i++) {
      const float below = (top - x[i]) * scale;
      bucket[i] = int32_t(below < float(BUCKETS - 1) ? below : float(BUCKETS - 1));
    }
    for (int64_t i = 0; i < count; i++) buckets[start + i] = uint16_t(bucket[i]);
    for (int64_t i = 0; i < count; i++) sums[(i % LANES) * BUCKETS + bucket[i]] += mass[i];
  }
}

THIMBLE_CLONES int64_t count_from(const float* shares, int64_t ids, double least) {
  int64_t count = 0;
  for (int64_t i = 0; i < ids; i++) count += double(shares[i]) >= least;
  return count;
}

THIMBLE_CLONES bool holds(const uint16_t* buckets, int64_t count, uint16_t wanted) {
  uint16_t found = 0;
  for (int64_t i = 0; i < count; i++) found |= buckets[i] == wanted;
  return found;
}

// The entries of one bucket, in the order of their ids.
void gather(const Logits& logits, Scratch& scratch, uint16_t wanted) {
  constexpr int64_t STRIDE = 64;
  size_t size = 0;
  for (int64_t start = 0; start < logits.ids; start += STRIDE) {
    const int64_t end = std::min(start + STRIDE, logits.ids);
    const uint16_t* buckets = scratch.buckets.data();
    if (!holds(buckets + start, end - start, wanted)) continue;
    if (scratch.entries.size() < size + STRIDE) scratch.entries.resize(2 * size + STRIDE);
    Entry* entries = scratch.entries.data();
    for (int64_t i = start; i < end; i++) {
      entries[size] = {order_of(logits.at(i)), int32_t(i), mass_of(scratch.shares[i])};
      size += buckets[i] == wanted;
    }
  }
  scratch.entries.resize(size);
}

// A part of the range of orders from `top` down, 2^shift wide.
struct Part {
  uint32_t top;
  int shift;
  uint32_t of(const Entry& entry) const { return (top - uint32_t(entry.order)) >> shift; }
};

// Of ids by falling logit, of equal ones the lowest first: the first at which the sum of weights passes `target`; a
// weight is an id's mass, or 1 if `counting`. The sum of all weights is above `target`.
template <bool counting>
Found find(const Logits& logits, Scratch& scratch, int64_t target) {
  constexpr uint32_t PARTS = 256;
  int64_t mass = 0, sum = 0, bucket = 0;  // before what is looked at
  for (const auto& weights = counting ? scratch.counts : scratch.masses; sum + weights[bucket] <= target; bucket++) {
    sum += weights[bucket];
    mass += scratch.masses[bucket];
  }
  gather(logits, scratch, uint16_t(bucket));
  auto& entries = scratch.entries;
  const auto weight = [](const Entry& entry) { return counting ? int64_t(1) : entry.mass; };
  while (true) {
    int32_t high = INT_MIN, low = INT_MAX;
    for (const Entry& entry : entries) {
      high = std::max(high, entry.order);
      low = std::min(low, entry.order);
    }
    if (high == low) break;  // they stand in the order of their ids
    if (entries.size() <= FEW) {
      std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.order > b.order; });
      break;
    }
    Part part{uint32_t(high), 0};
    while ((part.top - uint32_t(low)) >> part.shift >= PARTS) part.shift++;
    int64_t weights[PARTS] = {}, masses[PARTS] = {};
    for (const Entry& entry : entries) {
      weights[part.of(entry)] += weight(entry);
      masses[part.of(entry)] += entry.mass;
    }
    uint32_t found = 0;
    for (; sum + weights[found] <= target; found++) {
      sum += weights[found];
      mass += masses[found];
    }
    const auto elsewhere = [&](const Entry& entry) { return part.of(entry) != found; };
    entries.erase(std::remove_if(entries.begin(), entries.end(), elsewhere), entries.end());
  }
  auto at = entries.begin();
  for (; sum + weight(*at) <= target; at++) {
    sum += weight(*at);
    mass += at->mass;
  }
  return {at->id, mass + at->mass};
}

// 53 random bits as a number in [0, 1): Philox 4x32-10.
double uniform(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0}, k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t left = 0xD2511F53ull * c[0], right = 0xCD9E8D57ull * c[2];
    const uint32_t next[4] = {uint32_t(right >> 32) ^ c[1] ^ k[0], uint32_t(right), uint32_t(left >> 32) ^ c[3] ^ k[1],
                              uint32_t(left)};
    std::memcpy(c, next, sizeof c);
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return double((uint64_t(c[0] >> 5) << 26) + (c[1] >> 6)) * 0x1p-53;
}

THIMBLE_CLONES int64_t first_of(Logits logits, float top) {
  float scratch[BLOCK];
  for (int64_t start = 0; start < logits.ids; start += BLOCK) {
    const int64_t count = std::min(BLOCK, logits.ids - start);
    const float* x = logits.block(start, count, scratch);
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++) found |= x[i] == top;
    if (found) return start + (std::find(x, x + count, top) - x);
  }
  return -1;
}

float bucket_scale(float top, const Extent& extent, double temperature) {
  const double range = std::min(double(top) - double(value_of(extent.smallest)), RANGE * temperature);
  return float(std::min(std::max(double(BUCKETS) / range, 1.0 / FLT_MAX), 1e30));  // ranges of zero and infinity too
}

}  // namespace

// logits[ids], of which `allowed` (a bit an id, or null: all) may be drawn -> *id, or -1 if the largest of them, *top,
// is not finite.
THIMBLE_API void thimble_sample(const float* values, const uint32_t* allowed, int64_t ids, double temperature,
                                double top_p, int64_t seed, int64_t position, int64_t top_k, double min_p, int64_t* id,
                                float* top) {
  static thread_local Scratch scratch;
  const Logits logits{values, allowed, ids};
  const Extent extent = extent_of(logits);
  *top = extent.has_nan ? NAN : value_of(extent.largest);
  *id = -1;
  if (!std::isfinite(*top)) return;
  if (temperature == 0) {
    *id = first_of(logits, *top);
    return;
  }
  scratch.shares.resize(ids);
  scratch.buckets.resize(ids);
  scratch.masses.assign(BUCKETS * LANES, 0);
  weigh(logits, *top, temperature, bucket_scale(*top, extent, temperature), scratch.shares.data(),
        scratch.buckets.data(), scratch.masses.data());
  int64_t whole = 0;
  for (int64_t bucket = 0; bucket < BUCKETS; bucket++) {
    for (int64_t lane = 1; lane < LANES; lane++) scratch.masses[bucket] += scratch.masses[lane * BUCKETS + bucket];
    whole += scratch.masses[bucket];
  }
  int64_t stay = top_k ? std::min(top_k, ids) : ids;
  if (min_p > 0) stay = std::min(stay, count_from(scratch.shares.data(), ids, min_p));
  if (stay < ids) {
    scratch.counts.assign(BUCKETS, 0);
    for (const uint16_t bucket : scratch.buckets) scratch.counts[bucket]++;
    whole = find<true>(logits, scratch, stay - 1).mass;
  }
  // A product above `whole`, by rounding, means all of it.
  const double share = std::ceil(double(whole) * top_p);
  const int64_t wanted = share < double(whole) ? int64_t(share) : whole;
  const int64_t kept = wanted < whole ? find<false>(logits, scratch, wanted - 1).mass : whole;
  const double drawn = uniform(uint64_t(seed), uint64_t(position)) * double(kept);
  *id = find<false>(logits, scratch, std::min(int64_t(drawn), kept - 1)).id;
}
