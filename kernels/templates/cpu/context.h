// The C ABI of one step (kernels/cpu/launch.py mirrors it) and the per-model context: weights, arena, KV pool, team.
#pragma once
#include <sys/mman.h>
#include <time.h>

#include <cstdlib>
#include <new>

#include "team.h"
#include "tile.h"

#if FS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Kernels are called once a layer: inlining thirty copies of them only costs instruction cache and build time.
#define FS_KERNEL static __attribute__((noinline, unused))

namespace fs {

constexpr int kPage = 32;  // tokens of a KV page = key block of attention = k of a tile

extern "C" struct FsStep {
  int32_t T, R, B, W, L;
  const int32_t *ids, *positions, *starts, *contexts, *page_table, *logit_rows;
  const uint8_t* causal;
  const uint64_t* ancestors;
  const float* features;
  int32_t* argmax;
  float* logits;        // [L, V] or null
  float* features_out;  // [T, feature columns] or null
};

// A value of the graph in the arena: row-major, `ld` elements from row to row.
template <class E>
struct Rows {
  E* p;
  int ld;
  E* row(int i) const { return p + size_t(i) * ld; }
};

// The best logit so far in each of 16 lanes, and where it was (-1: nowhere yet).
struct Best {
  vf value;
  vi index;
};

struct Ctx {
  Team team;
  const void* const* weights;
  char* arena = nullptr;
  size_t arena_bytes = 0;
  char* kv = nullptr;
  size_t kv_bytes = 0, kv_layer_bytes = 0;
  int pages = 0, max_rows = 0, max_positions = 0;
  char** scratch = nullptr;  // one block per thread
  Best* best = nullptr;      // [threads][max_rows] running argmax of the logits
  int64_t* stamps = nullptr;  // for a profile: when the step began, then when each node of the graph ended

  Ctx(int threads, const void* const* w) : team(threads), weights(w) {}
  template <class E>
  const E* weight(int i) const { return static_cast<const E*>(weights[i]); }
  char* kv_layer(int layer) const { return kv + size_t(layer) * kv_layer_bytes; }
  // What thread 0 has done by now; the wait at a barrier counts to the kernel behind it.
  void mark(int tid, int node) {
    if (__builtin_expect(stamps != nullptr, 0) && tid == 0) stamps[node + 1] = now_ns();
  }
  static int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t(1000000000) + now.tv_nsec;
  }
};

// Zeroed, page-aligned, huge pages when the system has them. Null when the memory cannot be had.
inline char* map_zeroed(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  madvise(p, bytes, MADV_HUGEPAGE);
#endif
  return static_cast<char*>(p);
}

inline bool allow_amx() {
#if FS_AMX
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
#else
  return true;
#endif
}

struct Range {
  int lo, hi;
};
inline Range share(int n, int tid, int threads) { return {int(int64_t(n) * tid / threads), int(int64_t(n) * (tid + 1) / threads)}; }

}  // namespace fs
