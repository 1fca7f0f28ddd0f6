// A small thread team of its own: no OpenMP, no spinning while idle. Threads of a step meet at barriers that spin for a
// moment and then yield, so that a busy machine costs a time slice and not a stall of many. pthread's own lock and
// condition: <mutex> and <condition_variable> take longer to compile than a small model.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <new>

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
  explicit Team(int threads) : n_(threads), workers_(new (std::nothrow) pthread_t[threads]) {}
  // Start the workers; false when the system refuses a thread (std::thread would end the process without exceptions).
  bool start() {
    if (!workers_) return false;
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
      workers_[started_++] = id;
    }
    return true;
  }
  ~Team() {
    quit_ = true;
    wake();
    for (int w = 0; w < started_; w++) pthread_join(workers_[w], nullptr);
    delete[] workers_;
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  int size() const { return n_; }

  // Run f(thread) on every thread of the team; the caller is thread 0.
  template <class F>
  void run(const F& f) {
    fn_ = [](const void* p, int t) { (*static_cast<const F*>(p))(t); };
    arg_ = &f;
    if (n_ > 1) wake();
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
  void wake() {
    pthread_mutex_lock(&m_);
    job_.fetch_add(1, std::memory_order_release);  // with the lock held: a worker between its look and its wait sees it
    pthread_mutex_unlock(&m_);
    pthread_cond_broadcast(&cv_);
  }
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
        pthread_mutex_lock(&m_);
        while (job_.load() == seen) pthread_cond_wait(&cv_, &m_);
        pthread_mutex_unlock(&m_);
      }
      seen++;
      if (quit_) return;
      call(t);
      barrier();
    }
  }

  int n_;
  pthread_t* workers_;
  int started_ = 0;
  pthread_mutex_t m_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t cv_ = PTHREAD_COND_INITIALIZER;
  std::atomic<int> job_{0}, arrived_{0}, generation_{0};
  bool quit_ = false;
  void (*fn_)(const void*, int) = nullptr;
  const void* arg_ = nullptr;
};

}  // namespace fs
