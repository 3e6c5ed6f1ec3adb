// Runs the host library hard for a given time, under a sanitizer: steps over a cache that is far too small, with evicted
// blocks poisoned, while other threads prefetch at random, feed sweeps and read the counters, and one block on disk is damaged.
// Every result is compared with what a host with room for all and one thread gives, every block of a feed with its checksum as
// long as it is out. Ends with status 0 if nothing differed.
//
//   host_stress FOLDER SECONDS

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <random>
#include <thread>

#include "kernels/experts/cpu/choose.h"
#include "kernels/experts/host/emulated_drive.h"
#include "kernels/experts/host/file_drive.h"
#include "kernels/experts/host/step.h"
#include "kernels/experts/host/xxh64.h"

using namespace thimble;

namespace {

constexpr int LAYERS = 2, EXPERTS = 12, LATENT = 64, WIDTH = 32, TOP_K = 4, MOST_ROWS = 20;
constexpr int DAMAGED = EXPERTS + 5;  // the key of the block whose checksum is wrong

Catalog make_blocks(const std::string& path) {
  Catalog catalog;
  catalog.shape = {LATENT, WIDTH, 0, 1024, 1152, 2176, 4096};
  catalog.layers = LAYERS;
  catalog.experts = EXPERTS;
  catalog.offsets.resize(2);
  std::mt19937 random(1);
  std::ofstream file(path, std::ios::binary);
  for (int key = 0; key < LAYERS * EXPERTS; key++) {
    std::vector<uint8_t> block(size_t(catalog.shape.block_bytes), 0);
    for (size_t at = 0; at < 2304; at++) block[at] = uint8_t(random());
    for (size_t at = 1024; at < 1152; at++) block[at] = uint8_t(0x20 + random() % 0x40);
    for (size_t at = 2176; at < 2304; at++) block[at] = uint8_t(0x20 + random() % 0x40);
    file.write(reinterpret_cast<const char*>(block.data()), std::streamsize(block.size()));
    catalog.offsets[0].push_back(key * catalog.shape.block_bytes);
    catalog.offsets[1].push_back(key % 3 ? key * catalog.shape.block_bytes : NOT_THERE);
    catalog.checksums.push_back(xxh64(block.data(), block.size()) ^ (key == DAMAGED));
    catalog.up_scales.push_back(0.003f);
    catalog.down_scales.push_back(0.002f);
  }
  return catalog;
}

struct Call {
  int layer, rows;
  std::vector<int32_t> ids;
  std::vector<float> weights, x, expected;
  bool damaged = false;

  std::string run(Step& step, std::vector<float>& out) const {
    out.assign(size_t(rows * LATENT), -1.0f);
    return step.run(layer, rows, TOP_K, ids.data(), weights.data(), x.data(), out.data());
  }
};

std::vector<Call> make_calls(const Catalog& catalog, const std::string& path) {
  Workers workers(1, 0);
  Catalog sound = catalog;
  sound.checksums[DAMAGED] ^= 1;
  std::unique_ptr<Step> step;
  FileDrive drive(path), copy(path);
  Cache cache(sound, {{&drive, &copy}, "lru", Prefetching::off, LAYERS * EXPERTS, 1, false, false, 0, Blocks::PIECE_BYTES});
  step = std::make_unique<Step>(sound, cache, workers, *kernels_for(Isa::plain));
  std::mt19937 random(2);
  std::vector<Call> calls(24);
  for (Call& call : calls) {
    call.layer = int(random() % LAYERS);
    call.rows = random() % 3 ? int(1 + random() % 3) : int(random() % MOST_ROWS);
    for (int i = 0; i < call.rows * TOP_K; i++) {
      call.ids.push_back(int32_t(random() % EXPERTS));
      call.weights.push_back(float(random() % 1000) / 1000);
      call.damaged |= call.layer * EXPERTS + call.ids.back() == DAMAGED;
    }
    for (int i = 0; i < call.rows * LATENT; i++) call.x.push_back(float(int(random() % 2001) - 1000) / 500);
    const std::string error = call.run(*step, call.expected);
    if (!error.empty()) std::fprintf(stderr, "baseline: %s\n", error.c_str());
  }
  return calls;
}

// Sweeps of random experts, with up to `hold` blocks out while others are asked for; every fourth is abandoned. Returns how many
// blocks came.
int64_t feed_sweeps(const Catalog& catalog, Cache& cache, unsigned seed, const std::atomic<bool>& stop) {
  std::mt19937 random{seed};
  int64_t blocks = 0;
  while (!stop) {
    const int layer = int(random() % LAYERS), leave_after = random() % 4 ? EXPERTS : int(random() % 4);
    int32_t counts[EXPERTS];
    for (int32_t& count : counts) count = random() % 4 ? int32_t(random() % 3) : 0;
    const bool damaged = counts[DAMAGED % EXPERTS] && layer == DAMAGED / EXPERTS;
    int named = 0;
    for (const int32_t count : counts) named += count > 0;
    if (!cache.begin_feed(layer, counts, 10, 1 + int(random() % 8))) return blocks;
    int32_t next[EXPERTS];
    for (int32_t expert = 0; expert < EXPERTS; expert++) next[expert] = (layer + 1) % LAYERS * EXPERTS + expert;
    cache.expect(next, random() % EXPERTS);
    std::deque<Feed::Block> out;
    std::string error;
    const size_t hold = random() % 3;
    int came = 0;
    while (came < leave_after) {
      Feed::Block taken[4];
      const int count = cache.take(20'000'000'000, 1 + int(random() % 4), taken, &error);
      if (count < 0 || (count == 0 && cache.feed_over())) break;
      came += count;
      out.insert(out.end(), taken, taken + count);
      for (bool must = count == 0; must || out.size() > hold; must = false) {
        const Feed::Block block = out.front();
        out.pop_front();
        if (xxh64(cache.memory(block.lease), uint64_t(catalog.shape.block_bytes)) != catalog.checksums[size_t(block.key)])
          std::fprintf(stderr, "a block of a feed differs\n"), std::_Exit(5);
        if (!cache.give_back(&block.number, 1)) std::fprintf(stderr, "a block was not out\n"), std::_Exit(6);
      }
    }
    cache.end_feed();
    if (error.empty() ? came < std::min(named, leave_after) || (damaged && came == named) : !damaged)
      std::fprintf(stderr, "a feed of %d gave %d: %s\n", named, came, error.c_str()), std::_Exit(7);
    blocks += came;
  }
  return blocks;
}

}  // namespace

int main(int, char** arguments) {
  const std::string path = std::string(arguments[1]) + "/experts.bin";
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(arguments[2]));
  const Catalog catalog = make_blocks(path);
  const std::vector<Call> calls = make_calls(catalog, path);
  std::ifstream file(path, std::ios::binary);
  const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
  int steps = 0, failures = 0;
  int64_t fed = 0;
  for (int round = 0; std::chrono::steady_clock::now() < until; round++) {
    const int slots[] = {1, 2, 5, 9}, threads[] = {4, 2, 3, 1};
    Workers workers(threads[round % 4], round % 2 * 20);
    std::unique_ptr<Step> step;
    FileDrive drive(path);
    EmulatedDrive copy(bytes.data(), int64_t(bytes.size()), {1e9, 5e8, 20000, 2});
    const char* policies[] = {"layered", "lru", "s3fifo", "layered", "sieve", "lfu", "quota"};
    Cache cache(catalog, {{&drive, &copy}, policies[round % 7], Prefetching(1 + round % 2), slots[round % 4], 1 + round % 3, false, true,
                          round % 5 ? 0 : 300, round % 3 ? 4096 : Blocks::PIECE_BYTES});
    step = std::make_unique<Step>(catalog, cache, workers, *kernels_for(processor_has(Isa::avx2) ? Isa::avx2 : Isa::plain));
    std::atomic<bool> stop{false};
    std::thread guessing([&] {
      std::mt19937 random{unsigned(round)};
      while (!stop) {
        int32_t keys[3];
        const int layer = int(random() % LAYERS);
        for (int32_t& key : keys) key = layer * EXPERTS + int32_t(random() % EXPERTS);
        cache.prefetch(layer, keys, 3);
        if (random() % 8 == 0) cache.warm(keys, 3);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      }
    });
    int64_t fed_now = 0;
    std::thread feeding([&] { fed_now = feed_sweeps(catalog, cache, unsigned(round) + 2000, stop); });
    std::thread watching([&] {
      while (!stop) {
        if (!cache.check().empty()) std::fprintf(stderr, "%s\n", cache.check().c_str()), std::_Exit(4);
        cache.counts();
        cache.resident();
        cache.take_notice();
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
    std::mt19937 random{unsigned(round) + 1000};
    for (int i = 0; i < 60; i++, steps++) {
      const Call& call = calls[random() % calls.size()];
      std::vector<float> out;
      const std::string error = call.run(*step, out);
      failures += !error.empty();
      if (error.empty() == call.damaged) return std::fprintf(stderr, "damaged %d: %s\n", call.damaged, error.c_str()), 2;
      if (error.empty() && call.rows && std::memcmp(out.data(), call.expected.data(), out.size() * sizeof out[0]))
        return std::fprintf(stderr, "a result differs in round %d, step %d\n", round, i), 3;
    }
    stop = true;
    guessing.join();
    feeding.join();
    fed += fed_now;
    watching.join();
  }
  std::printf("%d steps, %d of them failed as they had to, %lld blocks fed\n", steps, failures, (long long)fed);
}
