// Attention over the paged cache for prompt chunks, single tokens and token trees in one step.
//
// Order of arithmetic is fixed by a token's POSITION alone: keys are taken in blocks of 32 positions from 0 up, each key in
// the lane of its position. Tree rows sit in slots behind the prefix in node order, so the last blocks are gathered per
// node along its ancestors into position order. A row therefore gives the same bits as a tree node, as a plain decode
// step or inside a prompt chunk: that is what makes speculation on == off exact, not only close.
#pragma once
#include "kv.h"

namespace fs {

template <class E, int H, int G, int D>
struct Attention {
  using Kv = KvLayout<E, G, D>;
  static constexpr int group = H / G;
  static constexpr int TG = group < 16 ? group : 16;           // heads of a row tile
  static constexpr int TT = 16 / TG;                           // tokens of a row tile
  static constexpr int chunks = round_up(group, TG) / TG;      // row tiles over one kv head's group
  static constexpr int QC = Kv::DK * kTileK, OC = Kv::DN * kTileN;

  struct Scratch {  // views into the thread's block
    E* q;           // [16, QC] scaled by nothing; padded dims are zero
    float* s;       // [16, span] scores
    E* p;           // [16, span] probabilities
    float* o;       // [16, OC]
    E *k, *v;       // tail blocks of one node in position order
    int* held;      // which node's key or value each tail position holds
    int span;
  };
  static int span(int max_positions) { return round_up(max_positions, kPage) + kPage; }
  static int tail_blocks(int max_rows) { return max_rows / kPage + 2; }
  static size_t scratch_bytes(int max_positions, int max_rows) {
    size_t n = span(max_positions), tails = tail_blocks(max_rows);
    return 16 * QC * sizeof(E) + 16 * n * (4 + sizeof(E)) + 16 * OC * 4 +
           tails * (Kv::head_elems * sizeof(E) + kPage * sizeof(int)) + 9 * 64;
  }
  static Scratch carve(char* p, int max_positions, int max_rows) {
    auto take = [&](size_t bytes) {
      char* at = p;
      p += (bytes + 63) / 64 * 64;
      return at;
    };
    Scratch w;
    w.span = span(max_positions);
    w.q = (E*)take(16 * QC * sizeof(E));
    w.s = (float*)take(size_t(16) * w.span * 4);
    w.p = (E*)take(size_t(16) * w.span * sizeof(E));
    w.o = (float*)take(16 * OC * 4);
    w.k = (E*)take(size_t(tail_blocks(max_rows)) * Kv::k_elems * sizeof(E));
    w.v = (E*)take(size_t(tail_blocks(max_rows)) * Kv::v_elems * sizeof(E));
    w.held = (int*)take(size_t(tail_blocks(max_rows)) * kPage * sizeof(int));
    return w;
  }

  Ctx& c;
  const FsStep& s;
  E* layer;
  Rows<float> q, k, v;
  Rows<E> out;
  float scale;

  int slot(int r, int logical) const {
    return s.page_table[size_t(r) * s.B + logical / kPage] * kPage + logical % kPage;
  }
  int page(int r, int block) const { return s.page_table[size_t(r) * s.B + block]; }

  // Phase 1: this step's K/V into their slots.
  void write_kv(int tid) const {
    Range rows = share(s.T, tid, c.team.size());
    for (int r = 0; r < s.R; r++)
      for (int t = s.starts[r]; t < s.starts[r + 1]; t++) {
        if (t < rows.lo || t >= rows.hi) continue;
        int at = slot(r, s.contexts[r] + t - s.starts[r]);
        for (int g = 0; g < G; g++) Kv::put(layer, at, g, k.row(t) + g * D, v.row(t) + g * D);
      }
  }

  // Phase 2: row tiles, dealt to the threads in turn.
  void attend(int tid) const {
    Scratch w = carve(c.scratch[tid], c.max_positions, c.max_rows);
    int item = 0;
    for (int r = 0; r < s.R; r++)
      for (int t = s.starts[r]; t < s.starts[r + 1]; t += TT)
        for (int g = 0; g < G; g++)
          for (int chunk = 0; chunk < chunks; chunk++)
            if (item++ % c.team.size() == tid) {
              int tokens = s.starts[r + 1] - t < TT ? s.starts[r + 1] - t : TT;
              int heads = group - chunk * TG < TG ? group - chunk * TG : TG;
              tile(w, r, t, tokens, g, g * group + chunk * TG, heads);
            }
  }

  int position(int r, int t) const {  // of row t: its slot index in a chain, its depth behind the context in a tree
    if (s.causal[r]) return s.contexts[r] + t - s.starts[r];
    int depth = -1;
    for (int w = 0; w < s.W; w++) depth += __builtin_popcountll(s.ancestors[size_t(t) * s.W + w]);
    return s.contexts[r] + depth;
  }

  void tile(Scratch& w, int r, int t0, int tokens, int g, int head0, int heads) const {
    int at[16], last = 0;
    for (int j = 0; j < tokens; j++) at[j] = position(r, t0 + j), last = at[j] > last ? at[j] : last;
    const int rows = tokens * heads;
    for (int j = 0; j < tokens; j++)
      for (int h = 0; h < heads; h++) {
        const float* in = q.row(t0 + j) + (head0 + h) * D;
        E* to = w.q + (j * heads + h) * QC;
        int d = 0;
        for (; d + 16 <= D; d += 16) Elem<E>::put(to + d, load<vf>(in + d));
        for (; d < QC; d++) Elem<E>::put_one(to + d, d < D ? in[d] : 0.0f);
      }
    // Blocks below `shared` hold the same keys for every row; a chain needs no others.
    const int shared = s.causal[r] ? last / kPage + 1 : s.contexts[r] / kPage;
    scores(w, r, rows, g, shared);
    if (!s.causal[r]) tail(w, r, t0, tokens, heads, g, at, shared, true);
    float inv[16];
    const int blocks = last / kPage + 1;
    for (int j = 0; j < rows; j++) inv[j] = softmax(w, j, at[j / heads] + 1, blocks);
    values(w, r, rows, g, shared);
    if (!s.causal[r]) tail(w, r, t0, tokens, heads, g, at, shared, false);
    for (int j = 0; j < rows; j++) {
      E* to = out.row(t0 + j / heads) + (head0 + j % heads) * D;
      int d = 0;
      for (; d + 16 <= D; d += 16) Elem<E>::put(to + d, load<vf>(w.o + j * OC + d) * inv[j]);
      for (; d < D; d++) Elem<E>::put_one(to + d, w.o[j * OC + d] * inv[j]);
    }
  }

  void scores(Scratch& w, int r, int rows, int g, int blocks) const {
    for (int b = 0; b < blocks; b++) {
      const E* keys = Kv::keys(layer, page(r, b), g);
      auto tile_at = [&](int kb, int half) { return Kv::key_tile(keys, half, kb); };
      TileProduct<E>::template run<2>(w.q, QC, rows, tile_at, Kv::DK, w.s + b * kPage, w.span, true);
    }
  }

  void values(Scratch& w, int r, int rows, int g, int blocks) const {
    auto base = [&](int b) { return Kv::values(layer, page(r, b), g); };
    product(w.p, w.span, rows, base, blocks, w.o, true);
  }

  // o[rows, OC] (+)= p[rows, 32*blocks] * V, in groups of four column blocks.
  template <class Base>
  void product(const E* p, int ldp, int rows, const Base& base, int blocks, float* o, bool init) const {
    constexpr int full = Kv::DN / 4 * 4;
    for (int n0 = 0; n0 < full; n0 += 4) {
      auto tile_at = [&](int b, int n) { return base(b) + size_t(n0 + n) * kTileElems; };
      TileProduct<E>::template run<4>(p, ldp, rows, tile_at, blocks, o + n0 * 16, OC, init);
    }
    if constexpr (Kv::DN % 4 != 0) {
      auto tile_at = [&](int b, int n) { return base(b) + size_t(full + n) * kTileElems; };
      TileProduct<E>::template run<Kv::DN % 4>(p, ldp, rows, tile_at, blocks, o + full * 16, OC, init);
    }
  }

  // Softmax over the first n of 32*blocks scores; returns 1 / sum. Lanes beyond n get probability zero.
  float softmax(Scratch& w, int j, int n, int blocks) const {
    float* row = w.s + size_t(j) * w.span;
    E* p = w.p + size_t(j) * w.span;
    const int end = blocks * kPage;
    for (int i = n; i < end; i++) row[i] = -__builtin_inff();
    vf m = splat(-__builtin_inff());
    for (int i = 0; i < end; i += 16) m = vmax(m, load<vf>(row + i));
    const float top = hmax(m) * scale;
    vf sum = {};
    for (int i = 0; i < end; i += 16) {
      vf e = Elem<E>::softmax_exp(load<vf>(row + i), scale, top);
      sum = sum + e;
      Elem<E>::put(p + i, e);
    }
    return 1.0f / hsum(sum);
  }

  // The blocks that hold tree positions, node by node: the page's prefix part once, then the node's ancestors in depth
  // order. `for_scores`: keys into w.s; else values into w.o, going on from the shared blocks' accumulators.
  void tail(Scratch& w, int r, int t0, int tokens, int heads, int g, const int* at, int shared, bool for_scores) const {
    const int context = s.contexts[r], first = shared * kPage;
    const E* source;
    if (context > first) {
      source = for_scores ? Kv::keys(layer, page(r, shared), g) : Kv::values(layer, page(r, shared), g);
      std::memcpy(for_scores ? w.k : w.v, source, (for_scores ? Kv::k_elems : Kv::v_elems) * sizeof(E));
    }
    for (int i = 0; i < tail_blocks(c.max_rows) * kPage; i++) w.held[i] = -1;
    for (int j = 0; j < tokens; j++) {
      const uint64_t* bits = s.ancestors + size_t(t0 + j) * s.W;
      int offset = context - first;
      for (int word = 0; word < s.W; word++)
        for (uint64_t left = bits[word]; left; left &= left - 1, offset++) {
          int node = word * 64 + __builtin_ctzll(left);
          if (w.held[offset] == node) continue;  // left there by the node before: paths share their beginning
          w.held[offset] = node;
          int from = slot(r, context + node);
          if (for_scores)
            Kv::copy_key(Kv::keys(layer, from / kPage, g), from % kPage, w.k + offset / kPage * Kv::k_elems, offset % kPage);
          else
            Kv::copy_value(Kv::values(layer, from / kPage, g), from % kPage, w.v + offset / kPage * Kv::v_elems, offset % kPage);
        }
      const int blocks = at[j] / kPage - shared + 1, row = j * heads;
      if (for_scores) {
        for (int b = 0; b < blocks; b++) {
          auto tile_at = [&](int kb, int half) { return Kv::key_tile(w.k + b * Kv::k_elems, half, kb); };
          TileProduct<E>::template run<2>(w.q + row * QC, QC, heads, tile_at, Kv::DK,
                                          w.s + size_t(row) * w.span + first + b * kPage, w.span, true);
        }
      } else {
        auto base = [&](int b) { return w.v + b * Kv::v_elems; };
        product(w.p + size_t(row) * w.span + first, w.span, heads, base, blocks, w.o + row * OC, shared == 0);
      }
    }
  }
};

// Runs both phases with the barrier between them.
template <class E, int H, int G, int D>
FS_KERNEL void attention(Ctx& c, const FsStep& s, int tid, char* layer, Rows<float> q, Rows<float> k, Rows<float> v,
                      Rows<E> out, float scale) {
  Attention<E, H, G, D> a{c, s, reinterpret_cast<E*>(layer), q, k, v, out, scale};
  a.write_kv(tid);
  c.team.barrier();
  a.attend(tid);
}

}  // namespace fs
