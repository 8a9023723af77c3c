// What the files of the kernel test share.
#pragma once
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ops_cpu/kernels.h"

inline int failures = 0;

inline void expect(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}

template <typename T>
inline bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(T));
}

inline std::mt19937 engine(1);

inline std::vector<float> normal(size_t count, float sigma = 1.0f) {
  std::normal_distribution<float> draw(0.0f, sigma);
  std::vector<float> x(count);
  for (float& v : x) v = draw(engine);
  return x;
}

inline const kvq::Kernels& scalar_tier() {
  const kvq::Kernels* last = nullptr;
  for (auto p = kvq::available(); *p; ++p) last = *p;
  return *last;
}

inline void run_inline(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  if (count > 0) body(0, count);
}

inline void run_threads(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  constexpr int64_t kThreads = 3;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < kThreads; ++t) {
    const int64_t begin = count * t / kThreads, end = count * (t + 1) / kThreads;
    if (begin < end) threads.emplace_back(body, begin, end);
  }
  for (std::thread& thread : threads) thread.join();
}

// Sums of integers at their limits; in test_extremes.cpp.
void test_extremes(const kvq::Kernels& k);

// Far records and attention over two tiers; in test_tiers.cpp.
void test_tiers(const kvq::Kernels& k);

// Exact tokens behind a thread that writes and one that reads; in test_archive.cpp.
void test_archive();
