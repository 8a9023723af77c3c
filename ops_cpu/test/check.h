// What the files of the kernel test share.
#pragma once
#include <cstdio>
#include <string>

#include "ops_cpu/kernels.h"

inline int failures = 0;

inline void expect(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}

// Sums of integers at their limits; in test_extremes.cpp.
void test_extremes(const kvq::Kernels& k);

// Exact tokens behind a thread that writes and one that reads; in test_archive.cpp.
void test_archive();
