// Pages of exact keys and values, in memory or behind it in a file that a thread of its own writes.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ops_cpu/page_file.h"

namespace kvq {

// The tokens of one row of a layer, as many as a tile has. Guarded by the mutex of its store; bytes
// alone is constant. A page that is full is never written again.
struct Page {
  enum State {
    kOpen,     // in memory; its one owner may write to it
    kFull,     // in memory, for good or until it is written to the file
    kWritten,  // in the file
    kLost      // given up for the budget, or without an owner
  };
  const int64_t layer, bytes;
  State state = kOpen;
  std::shared_ptr<uint8_t[]> memory;
  int64_t offset = -1;                    // in the file
  int64_t owners = 1;                     // rows that name it
  int64_t readers = 0;                    // pins
  bool writing = false;                   // the thread reads its memory without the lock
  std::list<Page*>::iterator place = {};  // among the pages of its layer

  Page(int64_t page_layer, int64_t page_bytes) : layer(page_layer), bytes(page_bytes) {}
};
using PagePtr = std::shared_ptr<Page>;

class PageStore {
 public:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr int64_t kNoBudget = -1;

  // Without a file pages stay in memory. Those of a file begin at `end`.
  PageStore(std::unique_ptr<PageFile> file, int64_t budget, int64_t end);
  ~PageStore();
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;

  Lock lock() { return Lock(mutex_); }
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // All that follow are called with the lock held. Where it is passed it may be given up meanwhile.
  std::string error() const { return error_; }
  int64_t bytes() const { return bytes_; }
  int64_t memory_bytes() const { return memory_bytes_; }

  // An open page with one owner; a lost one where the budget has no room.
  PagePtr allocate(int64_t layer, int64_t bytes);
  // One that is in the file, with one owner; a lost one where offset is -1.
  PagePtr restore(int64_t layer, int64_t bytes, int64_t offset);
  void retain(const PagePtr& page) { ++page->owners; }
  void release(const PagePtr& page);
  // The page itself where its owner may write to it; else a copy, in its place.
  PagePtr own(Lock& lock, const PagePtr& page);
  // Closes a page, and waits while too many are still to be written.
  void seal(Lock& lock, const PagePtr& page);
  void touch(const PagePtr& page);
  // A place in the file that no page takes.
  int64_t reserve(int64_t bytes) { return (end_ += bytes) - bytes; }
  // Waits until all closed pages are written.
  void flush(Lock& lock);
  void fail(const std::string& error);

  // A pinned page keeps its bytes and their place in the file. False: they are lost.
  bool pin(const PagePtr& page);
  void unpin(const PagePtr& page);
  bool read(Lock& lock, const PagePtr& page, int64_t offset, int64_t bytes, void* to);

 private:
  struct Group {
    std::list<Page*> recent;  // pages of a layer that hold bytes, the latest used first
    int64_t bytes = 0;
  };

  bool make_room(int64_t layer, int64_t bytes);
  Page* victim(Group& group) const;
  void hold(const PagePtr& page);
  void lose(Page& page);
  void drop_memory(Page& page);
  int64_t take_slot(int64_t bytes);
  void write_pages();
  void write_page(Lock& lock, const PagePtr& page);

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::unique_ptr<PageFile> file_;
  const int64_t budget_;
  int64_t end_, bytes_ = 0, memory_bytes_ = 0, pending_ = 0;
  std::atomic<bool> failed_{false};
  std::string error_;
  bool stop_ = false;
  std::map<int64_t, Group> groups_;
  std::map<int64_t, std::vector<int64_t>> free_;  // offsets by the size of the page
  std::deque<PagePtr> queue_;
  std::thread writer_;
};

}  // namespace kvq
