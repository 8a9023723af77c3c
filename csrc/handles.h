// Objects that Python names by a number: the stable ABI has no classes.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "ops_cpu/process.h"

namespace kvq {

// The objects have threads, which the child of a fork lacks: there they are never touched again.
template <typename T>
class Handles {
 public:
  explicit Handles(const char* name) : name_(name) {}

  int64_t add(std::shared_ptr<T> object) {
    const std::lock_guard<std::mutex> held(fork_mutex());
    objects_[++last_] = {std::move(object), fork_count()};
    return last_;
  }

  // Null for an object of the process that forked. Throws std::invalid_argument once it is removed.
  std::shared_ptr<T> find(int64_t handle) const {
    const std::lock_guard<std::mutex> held(fork_mutex());
    const auto found = objects_.find(handle);
    if (found == objects_.end())
      throw std::invalid_argument(std::string("the ") + name_ + " is closed");
    return found->second.forks == fork_count() ? found->second.object : nullptr;
  }

  // The object, for the caller to destroy; null where there is nothing to do.
  std::shared_ptr<T> remove(int64_t handle) {
    const std::lock_guard<std::mutex> held(fork_mutex());
    const auto found = objects_.find(handle);
    if (found == objects_.end() || found->second.forks != fork_count()) return nullptr;
    const std::shared_ptr<T> object = std::move(found->second.object);
    objects_.erase(found);
    return object;
  }

 private:
  struct Entry {
    std::shared_ptr<T> object;
    int64_t forks;
  };

  const char* const name_;
  int64_t last_ = 0;
  std::map<int64_t, Entry> objects_;
};

}  // namespace kvq
