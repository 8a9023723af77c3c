#include "ops_cpu/process.h"

#include <atomic>

#ifndef _WIN32
#include <pthread.h>
#include <signal.h>
#endif

namespace kvq {
namespace {

std::atomic<int64_t> forks{0};

#ifndef _WIN32
void before_fork() { fork_mutex().lock(); }
void in_parent() { fork_mutex().unlock(); }
void in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  fork_mutex().unlock();
}

[[maybe_unused]] const int registered = pthread_atfork(before_fork, in_parent, in_child);
#endif

}  // namespace

int64_t fork_count() { return forks.load(std::memory_order_relaxed); }

std::mutex& fork_mutex() {
  static auto* mutex = new std::mutex;  // outlives the threads that run at exit
  return *mutex;
}

std::thread start_thread(const std::function<void()>& body) {
#ifdef _WIN32
  return std::thread(body);
#else
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    const sigset_t& mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
  } restore{before};
  return std::thread(body);
#endif
}

}  // namespace kvq
