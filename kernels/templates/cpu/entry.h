// The library's entry points, instantiated for one generated Program. No exceptions cross them: null or -1 mean failure.
#pragma once
#include "attention.h"
#include "gemm.h"
#include "rowwise.h"
#include "top.h"

namespace fs {

template <class P>
void destroy(Ctx* c) {
  if (c->arena) munmap(c->arena, c->arena_bytes);
  if (c->kv) munmap(c->kv, c->kv_bytes);
  std::free(c->scratch), std::free(c->best);
  delete c;
}

template <class P>
Ctx* create(const void* const* weights, int threads, int max_rows, int pages, int max_positions) {
  if (!allow_amx()) return nullptr;
  Ctx* c = new (std::nothrow) Ctx(threads, weights);
  if (!c) return nullptr;
  c->max_rows = max_rows, c->pages = pages, c->max_positions = max_positions;
  const size_t rows = size_t(round_up(max_rows, 16)) + 16;
  const size_t scratch = (P::scratch_bytes(max_positions, max_rows) + 4095) / 4096 * 4096;
  c->arena_bytes = P::row_bytes * rows + scratch * threads + 65536;
  c->kv_layer_bytes = P::page_bytes * pages;
  c->kv_bytes = c->kv_layer_bytes * P::layers;
  c->arena = map_zeroed(c->arena_bytes);
  c->kv = c->kv_bytes ? map_zeroed(c->kv_bytes) : nullptr;
  c->scratch = static_cast<char**>(std::calloc(threads, sizeof(char*)));
  c->best = static_cast<Best*>(std::aligned_alloc(64, sizeof(Best) * threads * max_rows));
  if (!c->arena || (c->kv_bytes && !c->kv) || !c->scratch || !c->best || !c->team.start()) {
    destroy<P>(c);
    return nullptr;
  }
  for (int t = 0; t < threads; t++) c->scratch[t] = c->arena + (P::row_bytes * rows + 4095) / 4096 * 4096 + scratch * t;
  return c;
}

}  // namespace fs

#define FS_ENTRY(P)                                                                                                  \
  extern "C" {                                                                                                       \
  int fs_abi() { return FS_ABI; } /* a flag, from kernels/cpu/build.py */                                            \
  void* fs_create(const void* const* w, int threads, int max_rows, int pages, int max_positions) {                   \
    return fs::create<P>(w, threads, max_rows, pages, max_positions);                                                \
  }                                                                                                                  \
  void fs_destroy(void* c) { fs::destroy<P>(static_cast<fs::Ctx*>(c)); }                                             \
  int fs_step(void* c, const fs::FsStep* s) {                                                                        \
    fs::Ctx& ctx = *static_cast<fs::Ctx*>(c);                                                                        \
    if (s->T > ctx.max_rows || s->L > ctx.max_rows) return -1;                                                       \
    ctx.mark(0, -1);                                                                                                 \
    ctx.team.run([&](int tid) { P::run(ctx, *s, tid); });                                                            \
    return 0;                                                                                                        \
  }                                                                                                                  \
  /* int64 numbers: [0] the begin of a step, [1 + i] the end of node i, ns of a steady clock. Null: no profile. */      \
  void fs_profile(void* c, int64_t* stamps) { static_cast<fs::Ctx*>(c)->stamps = stamps; }                           \
  void fs_top_successors(int rows, int V, const float* logits, int k, int32_t* index, float* chance) {               \
    fs::top_successors(rows, V, logits, k, index, chance);                                                           \
  }                                                                                                                  \
  void fs_move_kv(void* c, int n, const int32_t* src, const int32_t* dst) {                                          \
    fs::Ctx& ctx = *static_cast<fs::Ctx*>(c);                                                                        \
    for (int l = 0; l < P::layers; l++) P::move(ctx.kv_layer(l), n, src, dst);                                       \
  }                                                                                                                  \
  }
