#include "kernels/workers/workers.h"

#include <signal.h>

#include <cassert>
#include <chrono>

namespace thimble {
namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

Workers::Workers(int threads, int spin_us) : inside_(size_t(threads)), spin_us_(spin_us) {
  // Signals are the business of the thread that started us, never of a worker in the middle of a tile.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int self = 1; self < threads; self++) threads_.emplace_back([this, self] { live(self); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stop();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Workers::~Workers() { stop(); }

void Workers::stop() {
  stopping_.store(true);
  signal();
  for (auto& thread : threads_) thread.join();
}

void Workers::begin() {
  owner_.lock();
  session_.store(true);
}

void Workers::end() {
  session_.store(false);
  for (auto& inside : inside_)
    while (inside.now.load()) relax();
  assert(!boards_[0].open.load() && !boards_[1].open.load());
  owner_.unlock();
}

void Workers::publish(Work& work, bool urgent) {
  Board& board = boards_[urgent];
  std::lock_guard<std::mutex> lock(publishing_);
  const uint64_t open = board.open.load(std::memory_order_relaxed);
  assert(~open && "more open work than places");
  work.place_ = __builtin_ctzll(~open);
  board.places[work.place_].store(&work, std::memory_order_release);
  board.open.fetch_or(uint64_t(1) << work.place_, std::memory_order_release);
}

void Workers::signal() {
  signals_.fetch_add(1);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleeping_);
    awake_.notify_all();
  }
}

void Workers::wait(uint64_t seen) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
  do {
    for (int i = 0; i < 64; i++) {
      if (signals_.load(std::memory_order_acquire) != seen) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock<std::mutex> lock(sleeping_);
  sleepers_.fetch_add(1);
  awake_.wait(lock, [&] { return signals_.load() != seen; });
  sleepers_.fetch_sub(1);
}

void Workers::live(int self) {
  while (!stopping_.load()) {
    const uint64_t seen = signals();
    if (!take_all(self)) {
      if (stopping_.load()) return;  // the last signal may be the one in `seen`
      wait(seen);
    }
  }
}

bool Workers::take_all(int self) {
  auto& inside = inside_[size_t(self)].now;
  bool any = false;
  inside.store(true);
  if (session_.load())
    while (take_one()) any = true;
  inside.store(false, std::memory_order_release);
  return any;
}

bool Workers::take_one() {
  for (int urgent = 1; urgent >= 0; urgent--) {
    Board& board = boards_[urgent];
    for (uint64_t open = board.open.load(std::memory_order_acquire); open; open &= open - 1) {
      const int place = __builtin_ctzll(open);
      Work& work = *board.places[place].load(std::memory_order_acquire);
      if (work.next_.load(std::memory_order_relaxed) >= work.tiles_) continue;
      const int tile = work.next_.fetch_add(1, std::memory_order_relaxed);
      if (tile >= work.tiles_) continue;
      if (tile == work.tiles_ - 1) board.open.fetch_and(~(uint64_t(1) << work.place_), std::memory_order_release);
      work.run(tile);
      if (work.left_.fetch_sub(1, std::memory_order_acq_rel) == 1) work.finish();
      return true;
    }
  }
  return false;
}

}  // namespace thimble
