#include "ops_cpu/page_store.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "ops_cpu/process.h"

namespace kvq {
namespace {

constexpr int64_t kMostPendingBytes = int64_t{64} << 20;

bool in_use(const Page& page) { return page.readers > 0 || page.writing; }

}  // namespace

PageStore::PageStore(std::unique_ptr<PageFile> file, int64_t budget, int64_t end)
    : file_(std::move(file)), budget_(budget), end_(end) {
  if (file_) writer_ = start_thread([this] { write_pages(); });
}

PageStore::~PageStore() {
  {
    const Lock held = lock();
    stop_ = true;
  }
  wake_.notify_all();
  if (writer_.joinable()) writer_.join();
}

PagePtr PageStore::allocate(int64_t layer, int64_t bytes) {
  auto page = std::make_shared<Page>(layer, bytes);
  page->state = Page::kLost;
  if (failed() || !make_room(layer, bytes)) return page;
  // Zero, but touched only as tokens come: a step of decoding does not pay for a whole page.
  page->memory.reset(static_cast<uint8_t*>(std::calloc(static_cast<size_t>(bytes), 1)), std::free);
  if (!page->memory) {
    fail("no memory for a page of " + std::to_string(bytes) + " bytes");
    return page;
  }
  page->state = Page::kOpen;
  memory_bytes_ += bytes;
  hold(page);
  return page;
}

PagePtr PageStore::restore(int64_t layer, int64_t bytes, int64_t offset) {
  auto page = std::make_shared<Page>(layer, bytes);
  page->state = Page::kLost;
  if (offset < 0 || failed() || !make_room(layer, bytes)) return page;
  page->state = Page::kWritten;
  page->offset = offset;
  hold(page);
  return page;
}

void PageStore::release(const PagePtr& page) {
  if (--page->owners == 0 && !in_use(*page)) lose(*page);
}

PagePtr PageStore::own(Lock& lock, const PagePtr& page) {
  if (page->state == Page::kLost || (page->state == Page::kOpen && page->owners == 1)) return page;
  pin(page);
  PagePtr copy = allocate(page->layer, page->bytes);
  if (copy->state == Page::kOpen) read(lock, page, 0, page->bytes, copy->memory.get());
  unpin(page);
  release(page);
  return copy;
}

void PageStore::seal(Lock& lock, const PagePtr& page) {
  if (page->state != Page::kOpen) return;
  page->state = Page::kFull;
  if (!file_) return;
  queue_.push_back(page);
  pending_ += page->bytes;
  wake_.notify_one();
  done_.wait(lock, [this] { return failed() || pending_ <= kMostPendingBytes; });
}

void PageStore::touch(const PagePtr& page) {
  if (page->state == Page::kLost) return;
  auto& recent = groups_[page->layer].recent;
  recent.splice(recent.begin(), recent, page->place);
}

void PageStore::flush(Lock& lock) {
  done_.wait(lock, [this] { return failed() || pending_ == 0; });
}

void PageStore::fail(const std::string& error) {
  if (failed()) return;
  error_ = error;
  for (auto& [layer, group] : groups_)
    for (Page* page : group.recent) {
      page->state = Page::kLost;
      page->memory.reset();
    }
  groups_.clear();
  queue_.clear();
  bytes_ = memory_bytes_ = pending_ = 0;
  failed_.store(true, std::memory_order_release);
  done_.notify_all();
}

bool PageStore::pin(const PagePtr& page) {
  if (page->state == Page::kLost) return false;
  ++page->readers;
  touch(page);
  return true;
}

void PageStore::unpin(const PagePtr& page) {
  --page->readers;
  if (page->owners == 0 && !in_use(*page)) lose(*page);
}

bool PageStore::read(Lock& lock, const PagePtr& page, int64_t offset, int64_t bytes, void* to) {
  if (page->memory) {
    std::memcpy(to, page->memory.get() + offset, static_cast<size_t>(bytes));
    return true;
  }
  if (page->state != Page::kWritten) return false;
  const int64_t from = page->offset + offset;
  lock.unlock();
  const int error = file_->read(from, to, bytes);
  lock.lock();
  if (error) fail(std::string("reading its file failed: ") + std::strerror(error));
  return !error && page->state != Page::kLost;
}

bool PageStore::make_room(int64_t layer, int64_t bytes) {
  if (budget_ == kNoBudget) return true;
  if (bytes > budget_) return false;
  // The layer that holds most gives up pages, so that all keep about as many.
  while (bytes_ + bytes > budget_) {
    Page* found = victim(groups_[layer]);
    int64_t most = found ? groups_[layer].bytes : -1;
    for (auto& [other, group] : groups_) {
      if (group.bytes <= most) continue;
      if (Page* page = victim(group)) found = page, most = group.bytes;
    }
    if (!found) return false;
    lose(*found);
  }
  return true;
}

Page* PageStore::victim(Group& group) const {
  for (auto page = group.recent.rbegin(); page != group.recent.rend(); ++page)
    if ((*page)->state != Page::kOpen && !in_use(**page)) return *page;
  return nullptr;
}

void PageStore::hold(const PagePtr& page) {
  Group& group = groups_[page->layer];
  page->place = group.recent.insert(group.recent.begin(), page.get());
  group.bytes += page->bytes;
  bytes_ += page->bytes;
}

void PageStore::lose(Page& page) {
  if (page.state == Page::kLost) return;
  Group& group = groups_[page.layer];
  group.recent.erase(page.place);
  group.bytes -= page.bytes;
  bytes_ -= page.bytes;
  drop_memory(page);
  if (page.offset >= 0) free_[page.bytes].push_back(page.offset);
  page.offset = -1;
  page.state = Page::kLost;
}

void PageStore::drop_memory(Page& page) {
  if (!page.memory) return;
  page.memory.reset();
  memory_bytes_ -= page.bytes;
}

int64_t PageStore::take_slot(int64_t bytes) {
  std::vector<int64_t>& slots = free_[bytes];
  if (slots.empty()) {
    end_ += bytes;
    return end_ - bytes;
  }
  const int64_t offset = slots.back();
  slots.pop_back();
  return offset;
}

void PageStore::write_pages() {
  Lock held = lock();
  for (;;) {
    wake_.wait(held, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    const PagePtr page = queue_.front();
    queue_.pop_front();
    if (page->state == Page::kFull) write_page(held, page);
    if (failed()) continue;
    pending_ -= page->bytes;
    done_.notify_all();
  }
}

void PageStore::write_page(Lock& lock, const PagePtr& page) {
  const int64_t offset = take_slot(page->bytes);
  const std::shared_ptr<uint8_t[]> memory = page->memory;
  page->writing = true;
  lock.unlock();
  const int error = file_->write(offset, memory.get(), page->bytes);
  lock.lock();
  page->writing = false;
  if (error) return fail(std::string("writing its file failed: ") + std::strerror(error));
  if (page->state == Page::kLost) return;
  page->offset = offset;
  page->state = Page::kWritten;
  drop_memory(*page);
  if (page->owners == 0 && !in_use(*page)) lose(*page);
}

}  // namespace kvq
