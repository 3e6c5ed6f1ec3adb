// A persistent pool of threads that take small tiles of shared work as they become free, so that fast and slow cores
// finish together. Owns the threads and how they wait; knows nothing of what is computed.
//
// Who may do what
//   owner     the one thread between begin() and end(); it takes tiles too, by help(). Others wait in begin().
//   worker    a thread of the pool; takes tiles whenever there are any
//   anyone    publish() and signal(), between begin() and end()
//
// What orders what
//   publish -> run    the pointer is stored (release) before its bit in `open`; a taker reads the bit, then the pointer (acquire)
//   run -> finish     every tile counts down `left_` (acq_rel): whoever reaches zero sees what all tiles wrote
//   finish -> end     end() closes the session, then waits until every worker is outside. A worker says that it is inside
//                     before it reads whether the session is open (both sequentially consistent), so after end() nobody
//                     holds a Work's address and its owner may reuse it.
//   signal -> wait    the count is raised before `sleepers_` is read; a sleeper adds itself before it reads the count
//                     (all sequentially consistent), so a signal is seen or the sleeper is woken.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace thimble {

class Work {
 public:
  virtual ~Work() = default;
  virtual void run(int tile) = 0;  // each tile once, on any thread
  virtual void finish() = 0;       // once, after all tiles; on the thread that ran the last of them

  // Before publish(). `tiles` is at least 1.
  void prepare(int tiles) {
    tiles_ = tiles;
    next_.store(0, std::memory_order_relaxed);
    left_.store(tiles, std::memory_order_relaxed);
  }

 private:
  friend class Workers;
  std::atomic<int> next_{0}, left_{0};
  int tiles_ = 0;
  int place_ = 0;
};

class Workers {
 public:
  static constexpr int MOST_OPEN = 64;  // pieces of work of one urgency that can be open at once

  // `threads` counts the owner. An idle thread watches for work for `spin_us`, then sleeps.
  Workers(int threads, int spin_us);
  ~Workers();

  int threads() const { return int(inside_.size()); }

  void begin();
  void end();  // all published work must have finished

  void publish(Work&, bool urgent);  // urgent work is taken first; call signal() afterwards
  void signal();
  uint64_t signals() const { return signals_.load(); }

  bool help() { return take_all(0); }  // runs tiles until none is to be had; whether any was
  void wait(uint64_t seen);            // until signals() differs from `seen`

 private:
  struct alignas(64) Inside {
    std::atomic<bool> now{false};
  };
  struct Board {
    std::atomic<uint64_t> open{0};  // bit i: place i holds work that may have tiles left
    std::atomic<Work*> places[MOST_OPEN] = {};
  };

  void stop();
  void live(int self);
  bool take_all(int self);
  bool take_one();

  std::vector<Inside> inside_;
  const int spin_us_;
  Board boards_[2];  // ordinary, urgent
  std::atomic<bool> session_{false};
  alignas(64) std::atomic<uint64_t> signals_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex owner_, publishing_, sleeping_;
  std::condition_variable awake_;
  std::vector<std::thread> threads_;
};

}  // namespace thimble
