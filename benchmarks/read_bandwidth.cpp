// Memory read bandwidth of one or two threads: the floor of a decode step is weight bytes over this. Prints bytes/s.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
typedef uint64_t v8 __attribute__((vector_size(64)));
static void sum(const v8* p, size_t n, int t) {
  v8 a{}, b{}, c{}, d{};
  for (size_t i = 0; i + 4 <= n; i += 4) a ^= p[i], b ^= p[i + 1], c ^= p[i + 2], d ^= p[i + 3];
  v8 all = a ^ b ^ c ^ d;
  asm volatile("" : : "m"(all) : "memory");  // the reads must happen
  (void)t;
}
int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const size_t n = (size_t(268) << 20) / 64;  // about the weights of the demo model
  v8* data = static_cast<v8*>(std::aligned_alloc(64, n * 64));
  for (size_t i = 0; i < n; i++) data[i] = v8{} + i;
  double best = 0;
  for (int rep = 0; rep < 15; rep++) {
    auto t0 = std::chrono::steady_clock::now();
    std::vector<std::thread> pool;
    for (int t = 1; t < threads; t++) pool.emplace_back(sum, data + n / threads * t, n / threads, t);
    sum(data, n / threads, 0);
    for (auto& th : pool) th.join();
    double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
    if (n * 64.0 / s > best) best = n * 64.0 / s;
  }
  std::printf("%.0f\n", best);
}
