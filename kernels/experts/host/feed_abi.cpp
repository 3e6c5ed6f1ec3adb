// The C ABI of feeds: what feed.py calls.

#include <cstdio>

#include "kernels/experts/host/abi.h"
#include "kernels/workers/abi.h"

using namespace thimble;

namespace {
constexpr int MOST_TAKEN = 256;
}

// counts[experts], or null for a guess. 0: begun. 1: there are too few slots.
THIMBLE_API int thimble_feed_begin(void* host, int layer, const int32_t* counts, int64_t tokens, int ahead) {
  return cache_of(host).begin_feed(layer, counts, tokens, ahead) ? 0 : 1;
}

// How many blocks there are in out[most][3]: expert, address, number to give back. 0: none is left. -1: one cannot be had, with
// a message. -2: some must be given back before another can come.
THIMBLE_API int thimble_feed_take(void* host, int most, int64_t timeout_ns, int64_t* out, char* message,
                                  int64_t message_bytes) {
  Cache& cache = cache_of(host);
  Feed::Block blocks[MOST_TAKEN];
  std::string error;
  const int count = cache.take(timeout_ns, most < MOST_TAKEN ? most : MOST_TAKEN, blocks, &error);
  if (count < 0) std::snprintf(message, size_t(message_bytes), "%s", error.c_str());
  if (count == 0) return cache.feed_over() ? 0 : -2;
  for (int at = 0; at < count; at++) {
    out[3 * at] = blocks[at].key % catalog_of(host).experts;
    out[3 * at + 1] = int64_t(reinterpret_cast<uint64_t>(cache.memory(blocks[at].lease)));
    out[3 * at + 2] = blocks[at].number;
  }
  return count;
}

// 0 if one of the numbers is of no block that is out.
THIMBLE_API int thimble_feed_give_back(void* host, const int64_t* numbers, int count) {
  return cache_of(host).give_back(numbers, count);
}

THIMBLE_API void thimble_feed_end(void* host) { cache_of(host).end_feed(); }

// What is not an expert of this model is left out.
THIMBLE_API void thimble_feed_expect(void* host, int layer, const int32_t* ids, int count) {
  const Catalog& catalog = catalog_of(host);
  std::vector<Key> keys;
  for (int i = 0; i < count && layer >= 0 && layer < catalog.layers; i++)
    if (ids[i] >= 0 && ids[i] < catalog.experts) keys.push_back(layer * catalog.experts + ids[i]);
  cache_of(host).expect(keys.data(), keys.size());
}
