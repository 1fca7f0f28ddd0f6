// Mixture of experts: who goes where, and the products of each expert that has rows.
//
// Rows are gathered expert by expert, so that each expert is a dense product over the packed weights (gemm.h). Threads
// split columns, as there; a thread adds its columns of all experts up by rising index, whatever rows there are.
#pragma once
#include "gemm.h"

namespace fs {

// Scores of X experts become weights of the best C, zeros for the others, in place. Of equals the lowest index is
// taken. `All`: softmax over all experts, else over those that were taken.
template <int X, int C, bool All, bool Normalize>
FS_KERNEL void route(Ctx& c, int tid, int T, Rows<float> scores) {
  constexpr int padded = round_up(X, 16);
  Range rows = share(T, tid, c.team.size());
  for (int t = rows.lo; t < rows.hi; t++) {
    float* row = scores.row(t);
    int taken[C];
    bool free[X];
    for (int x = 0; x < X; x++) free[x] = true;
    for (int i = 0; i < C; i++) {
      int best = -1;
      for (int x = 0; x < X; x++)
        if (free[x] && (best < 0 || row[x] > row[best])) best = x;
      taken[i] = best, free[best] = false;
    }
    const float top = row[taken[0]];
    alignas(64) float e[padded];
    for (int x = 0; x < padded; x++) e[x] = x < X && (All || !free[x]) ? row[x] - top : -1e30f;
    float sum = 0, chosen = 0, total = 0;
    for (int x = 0; x < padded; x += 16) store(e + x, fs_exp(load<vf>(e + x)));
    for (int x = 0; x < X; x++) sum += e[x], total += row[x];
    sum += 0.0f * total;  // fs_exp makes a number of a NaN
    for (int x = 0; x < X; x++) row[x] = free[x] ? 0.0f : e[x] / sum;
    if (!Normalize) continue;
    for (int i = 0; i < C; i++) chosen += row[taken[i]];
    for (int i = 0; i < C; i++) row[taken[i]] /= chosen;
  }
}

// first[x] to first[x + 1] are the places in `rows` that hold the rows of expert x, rising; C places a row at most.
template <int X>
struct ExpertRows {
  int32_t* first;
  int32_t* rows = first + X + 1;
  explicit ExpertRows(int32_t* p) : first(p) {}
  int count(int x) const { return first[x + 1] - first[x]; }
};

template <int X, int C>
FS_KERNEL void list_experts(int tid, int T, Rows<float> routing, ExpertRows<X> of) {
  if (tid != 0) return;
  int n = 0;
  for (int x = 0; x < X; x++) {
    of.first[x] = n;
    for (int t = 0; t < T; t++)
      if (routing.row(t)[x] != 0 && n < T * C) of.rows[n++] = t;  // a NaN is no zero: it must reach the result
  }
  of.first[X] = n;
}

template <class E, int K, int X>
FS_KERNEL void gather_experts(Ctx& c, int tid, ExpertRows<X> of, Rows<E> x, Rows<E> gathered) {
  Range mine = share(of.first[X], tid, c.team.size());
  for (int i = mine.lo; i < mine.hi; i++)
    std::memcpy(gathered.row(i), x.row(of.rows[i]), round_up(K, kTileK) * sizeof(E));
}

// silu(x Wg^T) * (x Wu^T) of each expert, its gate and up blocks alternating as for gemm_swiglu.
template <class E, class W, int K, int F, int X>
FS_KERNEL void experts_swiglu(Ctx& c, int tid, ExpertRows<X> of, Rows<E> x, const char* w, Rows<E> y) {
  constexpr int pairs = round_up(F, 16) / 16;
  constexpr size_t expert = size_t(2 * pairs) * W::panel_bytes(round_up(K, kTileK) / kTileK);
  Range cols = share(pairs, tid, c.team.size());
  for (int e = 0; e < X; e++) {
    const int base = of.first[e];
    panels<E, W, K>({x.row(base), x.ld}, of.count(e), w + e * expert, cols.lo, cols.hi, [&](int row, int pair, vf gate, vf up) {
      E* out = y.row(base + row) + pair * 16;
      Elem<E>::put(out, gate * Elem<E>::sigmoid(gate) * up);
      if (pairs % 2 && pair == pairs - 1) Elem<E>::put(out + 16, vf{});  // the next product reads whole tiles of k
    });
  }
}

// y[row] = sum over its experts e of routing[row][e] * (x We^T), N columns.
template <class E, class W, int K, int N, int X>
FS_KERNEL void experts_down(Ctx& c, int tid, int T, ExpertRows<X> of, Rows<float> routing, Rows<E> x, const char* w, Rows<float> y) {
  constexpr int pairs = round_up(N, 32) / 32;
  constexpr size_t expert = size_t(2 * pairs) * W::panel_bytes(round_up(K, kTileK) / kTileK);
  Range cols = share(pairs, tid, c.team.size());
  for (int t = 0; t < T; t++)
    for (int n = cols.lo * 32; n < cols.hi * 32; n += 16) store(y.row(t) + n, vf{});
  for (int e = 0; e < X; e++) {
    const int base = of.first[e];
    panels<E, W, K>({x.row(base), x.ld}, of.count(e), w + e * expert, cols.lo, cols.hi, [&](int row, int pair, vf v0, vf v1) {
      const int t = of.rows[base + row];
      const float weight = routing.row(t)[e];
      float* out = y.row(t) + pair * 32;
      store(out, load<vf>(out) + weight * v0);
      store(out + 16, load<vf>(out + 16) + weight * v1);
    });
  }
}

}  // namespace fs
