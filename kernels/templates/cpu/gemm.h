// Linear layers over packed weights: y = epilogue(x W^T). Threads split the output columns, so every output is made by
// one thread in one order. N and K are compile-time; x rows are padded to 16 in memory.
#pragma once
#include "context.h"

namespace fs {

// An epilogue gets 16 columns of 1..16 rows: (first row, rows, first column, values [rows][ld]).
struct StoreRows {  // y[row][n] = v (+ bias)
  Rows<float> y;
  const float* bias;
  void operator()(int row, int rows, int n, const float* v, int ld) const {
    for (int r = 0; r < rows; r++) {
      vf x = load<vf>(v + r * ld);
      if (bias) x = x + load<vf>(bias + n);
      store(y.row(row + r) + n, x);
    }
  }
};
struct AddRows {  // y[row][n] = residual[row][n] + v (+ bias); y may be the residual
  Rows<float> y, residual;
  const float* bias;
  void operator()(int row, int rows, int n, const float* v, int ld) const {
    for (int r = 0; r < rows; r++) {
      vf x = load<vf>(v + r * ld);
      if (bias) x = x + load<vf>(bias + n);
      store(y.row(row + r) + n, load<vf>(residual.row(row + r) + n) + x);
    }
  }
};

// The panel loop shared by all: columns come in pairs of blocks; `emit(row, rows, block, v0, v1, ld)` gets both.
// AMX keeps 2 row tiles x 2 column blocks in registers, so a weight tile is read once for 32 rows.
template <class E, int K, class Emit>
inline void panels(Rows<E> x, int T, const E* w, int pair_lo, int pair_hi, const Emit& emit) {
  constexpr int KB = round_up(K, kTileK) / kTileK;
  constexpr size_t panel = size_t(KB) * kTileElems;
  alignas(64) float out[32 * 32];
  if (T <= 0) return;
#if FS_AMX
  if constexpr (sizeof(E) == 2) {
    amx_config(T < 16 ? T : 16);
    for (int pair = pair_lo; pair < pair_hi; pair++) {
      const E *w0 = w + 2 * size_t(pair) * panel, *w1 = w0 + panel;
      const char* next = reinterpret_cast<const char*>(w0 + 2 * panel);
      for (int r = 0; r < T; r += 32) {
        const bool two = r + 16 < T;
        const E* x0 = x.row(r);
        const E* x1 = x.row(r + 16);
        _tile_zero(0);
        _tile_zero(1);
        if (two) {
          _tile_zero(2);
          _tile_zero(3);
        }
        for (int k = 0; k < KB; k++) {
          if (r == 0 && pair + 1 < pair_hi)  // the next panel comes from memory while this one multiplies
            for (int q = 0; q < 32; q++) _mm_prefetch(next + k * 2048 + q * 64, _MM_HINT_T1);
          _tile_loadd(6, w0 + size_t(k) * kTileElems, 64);
          _tile_loadd(7, w1 + size_t(k) * kTileElems, 64);
          _tile_loadd(4, x0 + k * kTileK, x.ld * 2);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          if (two) {
            _tile_loadd(5, x1 + k * kTileK, x.ld * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
        _tile_stored(0, out, 128);
        _tile_stored(1, out + 16, 128);
        emit(r, T - r < 16 ? T - r : 16, pair, out, out + 16, 32);
        if (two) {
          _tile_stored(2, out + 512, 128);
          _tile_stored(3, out + 528, 128);
          emit(r + 16, T - r - 16 < 16 ? T - r - 16 : 16, pair, out + 512, out + 528, 32);
        }
      }
    }
    return;
  }
#endif
  for (int pair = pair_lo; pair < pair_hi; pair++) {
    const E* w0 = w + 2 * size_t(pair) * panel;
    auto tile = [&](int k, int n) { return w0 + n * panel + size_t(k) * kTileElems; };
    for (int r = 0; r < T; r += 16) {
      int rows = T - r < 16 ? T - r : 16;
      TileProduct<E>::template run<2>(x.row(r), x.ld, rows, tile, KB, out, 32, true);
      emit(r, rows, pair, out, out + 16, 32);
    }
  }
}

// y = epilogue(x W^T), N columns (packed to a multiple of 32).
template <class E, int K, int N, class Epilogue>
FS_KERNEL void gemm(Ctx& c, int tid, int T, Rows<E> x, const E* w, const Epilogue& epilogue) {
  Range cols = share(round_up(N, 32) / 32, tid, c.team.size());
  panels<E, K>(x, T, w, cols.lo, cols.hi, [&](int row, int rows, int pair, const float* v0, const float* v1, int ld) {
    epilogue(row, rows, pair * 32, v0, ld);
    epilogue(row, rows, pair * 32 + 16, v1, ld);
  });
}

// silu(x Wg^T) * (x Wu^T): gate and up blocks alternate in the packed weight, so both sit in one panel.
template <class E, int K, int F>
FS_KERNEL void gemm_swiglu(Ctx& c, int tid, int T, Rows<E> x, const E* w, Rows<E> y) {
  Range cols = share(round_up(F, 16) / 16, tid, c.team.size());
  panels<E, K>(x, T, w, cols.lo, cols.hi, [&](int row, int rows, int pair, const float* g, const float* u, int ld) {
    for (int r = 0; r < rows; r++) {
      vf gate = load<vf>(g + r * ld), up = load<vf>(u + r * ld);
      Elem<E>::put(y.row(row + r) + pair * 16, gate * Elem<E>::sigmoid(gate) * up);
    }
  });
}

// Logits with their argmax taken on the way (lowest index wins a tie); the [L, V] store happens only when asked for.
template <class E, int K, int V>
FS_KERNEL void gemm_logits(Ctx& c, const FsStep& s, int tid, Rows<E> x, const E* w, const float* bias) {
  Range cols = share(round_up(V, 32) / 32, tid, c.team.size());
  Best* best = c.best + size_t(tid) * c.max_rows;
  for (int r = 0; r < s.L; r++) best[r] = {splat(-__builtin_inff()), vi{} - 1};
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  auto block = [&](int row, int rows, int n, const float* v, int ld) {
    for (int r = 0; r < rows; r++) {
      vf x16 = load<vf>(v + r * ld);
      if (bias) x16 = x16 + load<vf>(bias + n);
      if (s.logits) std::memcpy(s.logits + size_t(row + r) * V + n, &x16, (V - n < 16 ? V - n : 16) * 4);
      Best& b = best[row + r];
      vi above = x16 > b.value;  // strictly: a lane keeps its first, lowest index
      if (V - n < 16) above = above & (lanes < V - n);
      b.value = select(above, x16, b.value);
      b.index = select(above, lanes + n, b.index);
    }
  };
  panels<E, K>(x, s.L, w, cols.lo, cols.hi, [&](int row, int rows, int pair, const float* v0, const float* v1, int ld) {
    if (pair * 32 < V) block(row, rows, pair * 32, v0, ld);
    if (pair * 32 + 16 < V) block(row, rows, pair * 32 + 16, v1, ld);
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
