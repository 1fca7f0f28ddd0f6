// Linear layers over packed weights of any format W: y = epilogue(x W^T). Threads split the output columns, so every output is made by
// one thread in one order. N and K are compile-time; x rows are padded to 16 in memory.
#pragma once
#include "context.h"

namespace fs {

// An epilogue gets one row of 16 columns: (row, first column, values).
struct StoreRows {  // y[row][n] = v (+ bias)
  Rows<float> y;
  const float* bias;
  void operator()(int row, int n, vf v) const { store(y.row(row) + n, bias ? v + load<vf>(bias + n) : v); }
};
struct AddRows {  // y[row][n] = residual[row][n] + v (+ bias); y may be the residual
  Rows<float> y, residual;
  const float* bias;
  void operator()(int row, int n, vf v) const {
    if (bias) v = v + load<vf>(bias + n);
    store(y.row(row) + n, load<vf>(residual.row(row) + n) + v);
  }
};

// The panel loop shared by all: columns come in pairs of blocks; `emit(row, pair, v0, v1)` gets a row of both.
// AMX keeps 2 row tiles x 2 column blocks in registers, so a weight tile is read once for 32 rows.
#if FS_AMX
// A step is bound by reading weights, so nothing may leave the memory idle: the next pair's panel is prefetched evenly
// over all k blocks, and the epilogue of one result runs row by row inside the k loop of the next.
template <class W, int K, class Emit>
inline void amx_panels(Rows<bf16> x, int T, const char* w, int pair_lo, int pair_hi, const Emit& emit) {
  constexpr int KB = round_up(K, kTileK) / kTileK, per_k = (32 + KB - 1) / KB;
  constexpr size_t panel = W::panel_bytes(KB);
  constexpr int lines_per_k = int((2 * panel / 64 + KB - 1) / KB);  // of both column blocks
  constexpr bool as_stored = std::is_same<W, weights::bf16>::value;
  alignas(64) bf16 expanded[2][as_stored ? 1 : kTileElems];
  alignas(64) float out[2][32 * 32];
  int waiting = 0, done = 0, waiting_row = 0, waiting_pair = 0, at = 0;  // rows of out[at ^ 1] that still need emit
  auto emit_next = [&] {
    const float* v = out[at ^ 1] + done * 32;
    emit(waiting_row + done, waiting_pair, load<vf>(v), load<vf>(v + 16));
    done++;
  };
  const int passes = (T + 31) / 32;
  amx_config(T < 16 ? T : 16);
  for (int pair = pair_lo; pair < pair_hi; pair++) {
    const char *w0 = w + 2 * size_t(pair) * panel, *w1 = w0 + panel;
    const char* next = w0 + 2 * panel;
    const int lines = pair + 1 < pair_hi ? (lines_per_k + passes - 1) / passes : 0;
    for (int r = 0; r < T; r += 32) {
      const bool two = r + 16 < T;
      const bf16 *x0 = x.row(r), *x1 = x.row(r + 16);
      _tile_zero(0);
      _tile_zero(1);
      if (two) {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int k = 0; k < KB; k++, next += lines * 64) {
        for (int q = 0; q < lines; q++)
          if (passes == 1 || q % 8 == 7) _mm_prefetch(next + q * 64, _MM_HINT_T1);
        if constexpr (!as_stored) {
          Expand<bf16, W>::copy(W::tile(w0, k), expanded[0]);
          Expand<bf16, W>::copy(W::tile(w1, k), expanded[1]);
          _tile_loadd(6, expanded[0], 64);
          _tile_loadd(7, expanded[1], 64);
        } else if (passes == 1) {  // read once: weights need not push x out of the first cache level
          _tile_stream_loadd(6, W::tile(w0, k), 64);
          _tile_stream_loadd(7, W::tile(w1, k), 64);
        } else {
          _tile_loadd(6, W::tile(w0, k), 64);
          _tile_loadd(7, W::tile(w1, k), 64);
        }
        _tile_loadd(4, x0 + k * kTileK, x.ld * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
          _tile_loadd(5, x1 + k * kTileK, x.ld * 2);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        for (int i = 0; i < per_k && done < waiting; i++) emit_next();
      }
      while (done < waiting) emit_next();
      _tile_stored(0, out[at], 128);
      _tile_stored(1, out[at] + 16, 128);
      if (two) {
        _tile_stored(2, out[at] + 512, 128);
        _tile_stored(3, out[at] + 528, 128);
      }
      waiting = T - r < 32 ? T - r : 32, done = 0, waiting_row = r, waiting_pair = pair, at ^= 1;
    }
  }
  while (done < waiting) emit_next();
}
#endif

template <class E, class W, int K, class Emit>
inline void panels(Rows<E> x, int T, const char* w, int pair_lo, int pair_hi, const Emit& emit) {
  constexpr int KB = round_up(K, kTileK) / kTileK;
  constexpr size_t panel = W::panel_bytes(KB);
  if (T <= 0) return;
#if FS_AMX
  if constexpr (sizeof(E) == 2) {
    amx_panels<W, K>(x, T, w, pair_lo, pair_hi, emit);
    return;
  }
#endif
  alignas(64) float out[16 * 32];
  for (int pair = pair_lo; pair < pair_hi; pair++) {
    const char* w0 = w + 2 * size_t(pair) * panel;
    auto tile = [&](int k, int n) { return W::tile(w0 + n * panel, k); };
    for (int r = 0; r < T; r += 16) {
      int rows = T - r < 16 ? T - r : 16;
      TileProduct<E, W>::template run<2>(x.row(r), x.ld, rows, tile, KB, out, 32, true);
      for (int i = 0; i < rows; i++) emit(r + i, pair, load<vf>(out + i * 32), load<vf>(out + i * 32 + 16));
    }
  }
}

// y = epilogue(x W^T), N columns (packed to a multiple of 32).
template <class E, class W, int K, int N, class Epilogue>
FS_KERNEL void gemm(Ctx& c, int tid, int T, Rows<E> x, const char* w, const Epilogue& epilogue) {
  Range cols = share(round_up(N, 32) / 32, tid, c.team.size());
  panels<E, W, K>(x, T, w, cols.lo, cols.hi, [&](int row, int pair, vf v0, vf v1) {
    epilogue(row, pair * 32, v0);
    epilogue(row, pair * 32 + 16, v1);
  });
}

// silu(x Wg^T) * (x Wu^T): gate and up blocks alternate in the packed weight, so both sit in one panel.
template <class E, class W, int K, int F>
FS_KERNEL void gemm_swiglu(Ctx& c, int tid, int T, Rows<E> x, const char* w, Rows<E> y) {
  Range cols = share(round_up(F, 16) / 16, tid, c.team.size());
  panels<E, W, K>(x, T, w, cols.lo, cols.hi, [&](int row, int pair, vf gate, vf up) {
    Elem<E>::put(y.row(row) + pair * 16, gate * Elem<E>::sigmoid(gate) * up);
  });
}

// Logits with their argmax taken on the way (lowest index wins a tie); the [L, V] store happens only when asked for.
template <class E, class W, int K, int V>
FS_KERNEL void gemm_logits(Ctx& c, const FsStep& s, int tid, Rows<E> x, const char* w, const float* bias) {
  Range cols = share(round_up(V, 32) / 32, tid, c.team.size());
  Best* best = c.best + size_t(tid) * c.max_rows;
  for (int r = 0; r < s.L; r++) best[r] = {splat(-__builtin_inff()), vi{} - 1};
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  auto block = [&](int row, int n, vf v) {
    if (n >= V) return;
    if (bias) v = v + load<vf>(bias + n);
    if (s.logits) std::memcpy(s.logits + size_t(row) * V + n, &v, (V - n < 16 ? V - n : 16) * 4);
    Best& b = best[row];
    vi above = v > b.value;  // strictly: a lane keeps its first, lowest index
    if (V - n < 16) above = above & (lanes < V - n);
    b.value = select(above, v, b.value);
    b.index = select(above, lanes + n, b.index);
  };
  panels<E, W, K>(x, s.L, w, cols.lo, cols.hi, [&](int row, int pair, vf v0, vf v1) {
    block(row, pair * 32, v0);
    block(row, pair * 32 + 16, v1);
  });
  c.team.barrier();
  if (tid == 0)
    for (int r = 0; r < s.L; r++) {
      int at = -1;
      float top = 0;
      for (int t = 0; t < c.team.size(); t++) {
        const Best& b = c.best[size_t(t) * c.max_rows + r];
        for (int i = 0; i < 16; i++)
          if (b.index[i] >= 0 && (at < 0 || b.value[i] > top || (b.value[i] == top && b.index[i] < at)))
            top = b.value[i], at = b.index[i];
      }
      s.argmax[r] = at;
    }
}

}  // namespace fs
