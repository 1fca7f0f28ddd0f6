// A small thread team of its own: no OpenMP, no spinning while idle. Threads of a step meet at barriers that spin for a
// moment and then yield, so that a busy machine costs a time slice and not a stall of many.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <vector>

#include "tile.h"

namespace fs {

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  explicit Team(int threads) : n_(threads) {}
  // Start the workers; false when the system refuses a thread (std::thread would end the process without exceptions).
  bool start() {
    for (int t = 1; t < n_; t++) {
      auto* arg = new (std::nothrow) Seat{this, t};
      pthread_t id;
      if (!arg || pthread_create(&id, nullptr, [](void* p) -> void* {
            Seat seat = *static_cast<Seat*>(p);
            delete static_cast<Seat*>(p);
            seat.team->loop(seat.index);
            return nullptr;
          }, arg)) {
        delete arg;
        return false;
      }
      workers_.push_back(id);
    }
    return true;
  }
  ~Team() {
    {
      std::lock_guard<std::mutex> lock(m_);
      quit_ = true;
      job_.fetch_add(1);
    }
    cv_.notify_all();
    for (pthread_t w : workers_) pthread_join(w, nullptr);
  }
  int size() const { return n_; }

  // Run f(thread) on every thread of the team; the caller is thread 0.
  template <class F>
  void run(const F& f) {
    fn_ = [](const void* p, int t) { (*static_cast<const F*>(p))(t); };
    arg_ = &f;
    if (n_ > 1) {
      {
        std::lock_guard<std::mutex> lock(m_);
        job_.fetch_add(1, std::memory_order_release);
      }
      cv_.notify_all();
    }
    call(0);
    barrier();  // the job's end
  }

  void barrier() {
    if (n_ == 1) return;
    int g = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(g + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == g; spins++) {
      if (spins < 4000) cpu_relax();
      else sched_yield();
    }
  }

  struct Seat {
    Team* team;
    int index;
  };

 private:
  // Denormals only slow arithmetic down here (softmax tails); AMX flushes them by definition.
  void call(int t) {
#if defined(__x86_64__)
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    begin_step();
    fn_(arg_, t);
    end_step();
    _mm_setcsr(mode);
#else
    fn_(arg_, t);
#endif
  }
  void loop(int t) {
    int seen = 0;
    for (;;) {
      for (int spins = 0; spins < 2000 && job_.load(std::memory_order_acquire) == seen; spins++) cpu_relax();
      if (job_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(m_);
        cv_.wait(lock, [&] { return job_.load() != seen; });
      }
      seen++;
      if (quit_) return;
      call(t);
      barrier();
    }
  }

  int n_;
  std::vector<pthread_t> workers_;
  std::mutex m_;
  std::condition_variable cv_;
  std::atomic<int> job_{0}, arrived_{0}, generation_{0};
  bool quit_ = false;
  void (*fn_)(const void*, int) = nullptr;
  const void* arg_ = nullptr;
};

}  // namespace fs
