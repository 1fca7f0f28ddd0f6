// Attention over the paged cache for prompt chunks, single tokens and token trees in one step.
//
// Order of arithmetic is fixed by a token's POSITION alone: keys are taken in blocks of 32 positions from 0 up, each key in
// the lane of its position. Tree rows sit in slots behind the prefix in node order, so the last blocks are gathered per
// node along its ancestors into position order. A row therefore gives the same bits as a tree node, as a plain decode
// step or inside a prompt chunk: that is what makes speculation on == off exact, not only close.
#pragma once
#include "attention_amx.h"
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
    float* s;       // [16, lds] scores
    E* p;           // [16, ldp] probabilities
    float* o;       // [16, OC]
    E* a;           // [16, 32] probabilities of one node; zero between uses
    E* v;           // tail blocks of one node's values in position order
    int* held;      // which node's value each tail position holds
    int lds, ldp;   // set for each tile, so that short contexts stay in the first cache level
  };
  // Slots of a tree's rows may lie behind the last position, by fewer than max_rows.
  static size_t span(int max_positions, int max_rows) { return round_up(max_positions + max_rows, kPage) + 2 * kPage; }
  static int tail_blocks(int max_rows) { return max_rows / kPage + 2; }
  static size_t scratch_bytes(int max_positions, int max_rows) {
    size_t n = span(max_positions, max_rows), tails = tail_blocks(max_rows);
    return 16 * QC * sizeof(E) + 16 * n * (4 + sizeof(E)) + 16 * OC * 4 + 16 * kPage * sizeof(E) +
           tails * (Kv::v_elems * sizeof(E) + kPage * sizeof(int)) + 9 * 64;
  }
  static Scratch carve(char* p, int max_positions, int max_rows) {
    auto take = [&](size_t bytes) {
      char* at = p;
      p += (bytes + 63) / 64 * 64;
      return at;
    };
    const size_t n = span(max_positions, max_rows), tails = tail_blocks(max_rows);
    Scratch w;
    w.q = (E*)take(16 * QC * sizeof(E));
    w.s = (float*)take(16 * n * 4);
    w.p = (E*)take(16 * n * sizeof(E));
    w.o = (float*)take(16 * OC * 4);
    w.a = (E*)take(16 * kPage * sizeof(E));
    w.v = (E*)take(tails * Kv::v_elems * sizeof(E));
    w.held = (int*)take(tails * kPage * sizeof(int));
    std::memset(w.a, 0, 16 * kPage * sizeof(E));
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

  // Rows of one tile: `tokens` rows of the step from t0 on, each with `heads` query heads of kv head g.
  struct Tile {
    int r, t0, tokens, heads, g;
    int at[16];   // position of each token
    int shared;   // blocks that hold the same keys in the same lanes for every row
    int rows() const { return tokens * heads; }
  };

  void tile(Scratch& w, int r, int t0, int tokens, int g, int head0, int heads) const {
    Tile t{r, t0, tokens, heads, g, {}, 0};
    int last = 0;
    for (int j = 0; j < tokens; j++) t.at[j] = position(r, t0 + j), last = t.at[j] > last ? t.at[j] : last;
    for (int j = 0; j < tokens; j++)
      for (int h = 0; h < heads; h++) {
        const float* in = q.row(t0 + j) + (head0 + h) * D;
        E* to = w.q + (j * heads + h) * QC;
        int d = 0;
        for (; d + 16 <= D; d += 16) Elem<E>::put(to + d, load<vf>(in + d));
        for (; d < QC; d++) Elem<E>::put_one(to + d, d < D ? in[d] : 0.0f);
      }
    const int blocks = last / kPage + 1, context = s.contexts[r];
    const int slots = s.causal[r] ? last + 1 : context + t0 + tokens - s.starts[r];  // a node's ancestors precede it
    const int written = (slots - 1) / kPage + 1;  // at least `blocks`: the d-th node of a path has slot d or a later one
    t.shared = s.causal[r] ? blocks : context / kPage;
    w.lds = written * kPage + 16, w.ldp = written * kPage + 32;  // odd numbers of cache lines
    scores(w, t, written);
    if (!s.causal[r]) to_positions(w, t);
    float inv[16];
    for (int j = 0; j < t.rows(); j++) inv[j] = softmax(w.s + j * w.lds, w.p + j * w.ldp, t.at[j / heads] + 1, blocks);
    values(w, t);
    for (int j = 0; j < t.rows(); j++) {
      E* to = out.row(t0 + j / heads) + (head0 + j % heads) * D;
      int d = 0;
      for (; d + 16 <= D; d += 16) Elem<E>::put(to + d, load<vf>(w.o + j * OC + d) * inv[j]);
      for (; d < D; d++) Elem<E>::put_one(to + d, w.o[j * OC + d] * inv[j]);
    }
  }

  // All rows against all slots. A score depends on its query and key alone, so slot order does for trees as well.
  void scores(Scratch& w, const Tile& t, int blocks) const {
#if FS_AMX
    if constexpr (sizeof(E) == 2 && Kv::DK <= 4) {
      auto keys_of = [&](int b) { return Kv::keys(layer, page(t.r, b), t.g); };
      return amx_scores<Kv>(w.q, t.rows(), keys_of, blocks, w.s, w.lds);
    }
#endif
    for (int b = 0; b < blocks; b++) {
      const E* keys = Kv::keys(layer, page(t.r, b), t.g);
      auto tile_at = [&](int kb, int half) { return Kv::key_tile(keys, half, kb); };
      TileProduct<E>::template run<2>(w.q, QC, t.rows(), tile_at, Kv::DK, w.s + b * kPage, w.lds, true);
    }
  }

  // A tree row's scores from slot order to position order: its d-th ancestor has slot d or a later one, so in place.
  void to_positions(Scratch& w, const Tile& t) const {
    for (int j = 0; j < t.tokens; j++) {
      const uint64_t* bits = s.ancestors + size_t(t.t0 + j) * s.W;
      float* row = w.s + size_t(j) * t.heads * w.lds + s.contexts[t.r];
      int depth = 0;
      for (int word = 0; word < s.W; word++)
        for (uint64_t left = bits[word]; left; left &= left - 1, depth++) {
          const int node = word * 64 + __builtin_ctzll(left);
          if (node != depth)
            for (int h = 0; h < t.heads; h++) row[h * w.lds + depth] = row[h * w.lds + node];
        }
    }
  }

  // Softmax over the first n of 32*blocks scores; returns 1 / sum. Lanes beyond n get probability zero.
  float softmax(float* row, E* p, int n, int blocks) const {
    const int end = blocks * kPage;
    for (int i = n; i < end; i++) row[i] = kMasked;
    vf m = load<vf>(row), sum = {};
    for (int i = 16; i < end; i += 16) m = vmax(m, load<vf>(row + i));
    const float top = hmax(m) * scale;
    for (int i = 0; i < end; i += 16) {
      vf e = Elem<E>::softmax_exp(load<vf>(row + i), scale, top);
      sum = sum + e;
      Elem<E>::put(p + i, e);
    }
    return 1.0f / hsum(sum);
  }

  void values(Scratch& w, const Tile& t) const {
    constexpr int full = Kv::DN / 4 * 4;
    for (int n0 = 0; n0 < full; n0 += 4) value_columns<4>(w, t, n0);
    if constexpr (Kv::DN % 4 != 0) value_columns<Kv::DN % 4>(w, t, full);
  }

  // o[rows, 16*NB] = p V for NB column blocks from n0 on: the shared blocks for all rows at once, then a tree's tail node
  // by node, each going on from the accumulators of its rows.
  template <int NB>
  void value_columns(Scratch& w, const Tile& t, int n0) const {
    const int first = t.shared * kPage, nodes = s.causal[t.r] ? 0 : t.tokens;
    auto base = [&](int b) { return Kv::values(layer, page(t.r, b), t.g) + size_t(n0) * kTileElems; };
    auto tail = [&](int b) { return w.v + size_t(b) * Kv::v_elems + size_t(n0) * kTileElems; };
    if (nodes) begin_tail(w, t, n0, NB);
#if FS_AMX
    if constexpr (sizeof(E) == 2) {
      amx_config(t.rows());
      amx_zero<NB>();
      for (int b = 0; b < t.shared; b++) amx_accumulate<NB>(w.p + b * kPage, w.ldp, base(b));
      for (int j = 0; j < nodes; j++) {
        gather(w, t, j, n0, NB);
        E* rows = w.a + j * t.heads * kPage;  // all other rows of `a` are zero, so their accumulators stay as they are
        for (int b = 0; b <= t.at[j] / kPage - t.shared; b++) {
          for (int h = 0; h < t.heads; h++)
            std::memcpy(rows + h * kPage, w.p + (j * t.heads + h) * w.ldp + first + b * kPage, kPage * sizeof(E));
          amx_accumulate<NB>(w.a, kPage, tail(b));
        }
        std::memset(rows, 0, t.heads * kPage * sizeof(E));
      }
      amx_store<NB>(w.o + n0 * 16, OC);
      return;
    }
#endif
    auto shared_at = [&](int b, int n) { return base(b) + n * kTileElems; };
    TileProduct<E>::template run<NB>(w.p, w.ldp, t.rows(), shared_at, t.shared, w.o + n0 * 16, OC, true);
    for (int j = 0; j < nodes; j++) {
      gather(w, t, j, n0, NB);
      const int row = j * t.heads;
      auto tail_at = [&](int b, int n) { return tail(b) + n * kTileElems; };
      TileProduct<E>::template run<NB>(w.p + row * w.ldp + first, w.ldp, t.heads, tail_at, t.at[j] / kPage - t.shared + 1,
                                       w.o + row * OC + n0 * 16, OC, false);
    }
  }

  // The tail holds the values at positions behind the shared blocks: first what the last shared page has of the context.
  void begin_tail(Scratch& w, const Tile& t, int n0, int count) const {
    int last = 0;
    for (int j = 0; j < t.tokens; j++) last = t.at[j] > last ? t.at[j] : last;
    const size_t from = size_t(n0) * kTileElems, bytes = size_t(count) * kTileElems * sizeof(E);
    for (int b = 0; b <= last / kPage - t.shared; b++) {
      E* to = w.v + size_t(b) * Kv::v_elems + from;
      if (b == 0 && s.contexts[t.r] % kPage)
        std::memcpy(to, Kv::values(layer, page(t.r, t.shared), t.g) + from, bytes);
      else
        std::memset(to, 0, bytes);
      for (int i = 0; i < kPage; i++) w.held[b * kPage + i] = -1;
    }
  }

  // Values of node j's path to their positions; what the node before left there is kept: paths share their beginning.
  void gather(Scratch& w, const Tile& t, int j, int n0, int count) const {
    const uint64_t* bits = s.ancestors + size_t(t.t0 + j) * s.W;
    const int context = s.contexts[t.r];
    int offset = context - t.shared * kPage;
    for (int word = 0; word < s.W; word++)
      for (uint64_t left = bits[word]; left; left &= left - 1, offset++) {
        const int node = word * 64 + __builtin_ctzll(left);
        if (w.held[offset] == node) continue;
        w.held[offset] = node;
        const int from = slot(t.r, context + node);
        Kv::copy_value(Kv::values(layer, from / kPage, t.g), from % kPage, w.v + offset / kPage * Kv::v_elems,
                       offset % kPage, n0, n0 + count);
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
