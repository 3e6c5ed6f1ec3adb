// The C ABI of the host library. Every failure is a text for people in `message`; nothing throws across.

#include "kernels/workers/abi.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>

#include "kernels/experts/cpu/choose.h"
#include "kernels/experts/host/catalog_abi.h"
#include "kernels/experts/host/step.h"
#include "kernels/experts/host/xxh64.h"

#include "kernels/experts/host/abi.h"

using namespace thimble;

namespace {

// The order of members is the order of life: steps use the cache, readers tell steps, so the step must outlive the readers.
struct Host {
  Catalog catalog;
  std::unique_ptr<Step> step;
  std::unique_ptr<Cache> cache;
  std::mutex stepping;
};

void write(char* message, int64_t bytes, const std::string& text) { std::snprintf(message, size_t(bytes), "%s", text.c_str()); }

Host& host_of(void* host) { return *static_cast<Host*>(host); }

}  // namespace

namespace thimble {

Step& step_of(void* host) { return *host_of(host).step; }
Cache& cache_of(void* host) { return *host_of(host).cache; }
const Catalog& catalog_of(void* host) { return host_of(host).catalog; }

}  // namespace thimble

// Null with a message if it cannot be had. The workers and the drives must outlive the host.
THIMBLE_API void* thimble_host_open(void* workers, int isa, const CatalogView* view, const char* policy, int prefetch,
                                    int slots, int readers, int lock_memory, int poison, int read_delay_us, int64_t piece_bytes,
                                    char* message, int64_t message_bytes) {
  try {
    const Kernels* kernels = kernels_for(Isa(isa));
    if (!kernels) {
      write(message, message_bytes, "this processor or this build lacks the instruction set");
      return nullptr;
    }
    auto host = std::make_unique<Host>();
    host->catalog = catalog_from(*view);
    const CacheOptions options{drives_of(*view), policy,      Prefetching(prefetch), slots,      readers,
                               lock_memory != 0, poison != 0, read_delay_us,         piece_bytes};
    host->cache = std::make_unique<Cache>(host->catalog, options);
    host->step = std::make_unique<Step>(host->catalog, *host->cache, *static_cast<Workers*>(workers), *kernels);
    return host.release();
  } catch (const std::bad_alloc&) {
    write(message, message_bytes, "the system refused the memory");
  } catch (const std::exception& error) {
    write(message, message_bytes, error.what());
  }
  return nullptr;
}

// No step may be under way.
THIMBLE_API void thimble_host_close(void* host) { delete static_cast<Host*>(host); }

// 0: done. 1: a block could not be had. 2: an id is not of this layer, or there is no such layer.
THIMBLE_API int thimble_host_step(void* host, int layer, int rows, int top_k, const int32_t* ids, const float* weights,
                                  const float* x, float* out, char* message, int64_t message_bytes) {
  Host& h = host_of(host);
  if (layer < 0 || layer >= h.catalog.layers) return 2;
  for (int64_t i = 0; i < int64_t(rows) * top_k; i++)
    if (ids[i] < 0 || ids[i] >= h.catalog.experts) return 2;
  std::lock_guard<std::mutex> lock(h.stepping);
  const std::string error = h.step->run(layer, rows, top_k, ids, weights, x, out);
  if (error.empty()) return 0;
  write(message, message_bytes, error);
  return 1;
}

// Where the slots lie and how many bytes they have, for page-locking them for a GPU.
THIMBLE_API uint64_t thimble_host_memory(void* host, int64_t* bytes) {
  const Host& h = host_of(host);
  *bytes = int64_t(h.cache->slots()) * h.catalog.shape.block_bytes;
  return reinterpret_cast<uint64_t>(h.cache->memory(Lease{0, 0}));
}

// A hint: what is not an expert of this model is left out.
THIMBLE_API void thimble_host_prefetch(void* host, int layer, const int32_t* ids, int count) {
  Host& h = host_of(host);
  if (layer < 0 || layer >= h.catalog.layers) return;
  std::vector<int32_t> keys;
  for (int i = 0; i < count; i++)
    if (ids[i] >= 0 && ids[i] < h.catalog.experts) keys.push_back(layer * h.catalog.experts + ids[i]);
  h.cache->prefetch(layer, keys.data(), keys.size());
}

// The blocks in RAM, the longest unused first, into keys[slots]; how many there are.
THIMBLE_API int thimble_host_resident(void* host, int32_t* keys) {
  const std::vector<Key> found = host_of(host).cache->resident();
  std::copy(found.begin(), found.end(), keys);
  return int(found.size());
}

// Blocks to read while nothing else is to be read, the longest unused first; all are of this model.
THIMBLE_API void thimble_host_warm(void* host, const int32_t* keys, int count) {
  host_of(host).cache->warm(keys, size_t(count));
}

// How hot each block is (heat.h), counts [layers * experts].
THIMBLE_API void thimble_host_heat(void* host, uint32_t* counts) {
  const Heat& heat = host_of(host).step->heat();
  for (Key key = 0; key < heat.keys(); key++) counts[key] = heat.of(key);
}

// What it was before a restart; from the thread that steps.
THIMBLE_API void thimble_host_set_heat(void* host, const uint32_t* counts) {
  Heat& heat = host_of(host).step->heat();
  for (Key key = 0; key < heat.keys(); key++) heat.set(key, counts[key]);
}

// Only before anything was asked for.
THIMBLE_API void thimble_host_shrink(void* host, int slots) { host_of(host).cache->shrink(slots); }

THIMBLE_API int thimble_host_prefetching(void* host) { return host_of(host).cache->prefetching(); }

// The names of thimble_host_counters' values, in its order.
THIMBLE_API const char* thimble_host_counter_names() {
  return "hits misses prefetch_issued prefetch_useful prefetch_wasted demand_read_bytes prefetch_read_bytes disk_wait_ns "
         "total_ns evictions slots_total slots_used sweep_blocks sweep_wait_ns";
}

THIMBLE_API void thimble_host_counters(void* host, int64_t* out) {
  const Host& h = host_of(host);
  const CacheCounts counts = h.cache->counts();
  const SlotCounts slots = h.cache->slot_counts();
  const StepTimes& times = h.step->times();
  const int64_t values[] = {counts.hits,
                            counts.misses,
                            slots.prefetch_issued,
                            slots.prefetch_useful,
                            slots.prefetch_wasted,
                            counts.demand_read_bytes,
                            counts.prefetch_read_bytes,
                            times.disk_wait_ns.load(),
                            times.total_ns.load(),
                            slots.evictions,
                            h.cache->slots(),
                            h.cache->slots_used(),
                            counts.sweep_blocks,
                            counts.sweep_wait_ns};
  std::memcpy(out, values, sizeof values);
}

// 1 if the bookkeeping is sound; else 0 and what is wrong.
THIMBLE_API int thimble_host_check(void* host, char* message, int64_t message_bytes) {
  const std::string wrong = host_of(host).cache->check();
  write(message, message_bytes, wrong);
  return wrong.empty();
}

// The next notice for the operator, empty if there is none; each is given once.
THIMBLE_API void thimble_host_notice(void* host, char* message, int64_t message_bytes) {
  write(message, message_bytes, host_of(host).cache->take_notice());
}

THIMBLE_API uint64_t thimble_xxh64(const uint8_t* bytes, uint64_t count) { return xxh64(bytes, count); }
