// What objects with threads have to know of the process: where it forked, and how to start threads.
#pragma once
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace kvq {

// Changes in the child of a fork, which has none of its parent's threads. An object whose thread
// was started under another count is left alone: its locks may be held by threads that are gone.
int64_t fork_count();

// Held while the process forks, so what it guards is whole in the child.
std::mutex& fork_mutex();

// A thread that takes no signal from those of the program.
std::thread start_thread(const std::function<void()>& body);

}  // namespace kvq
