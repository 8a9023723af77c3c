#include "ops_cpu/archive.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace kvq {
namespace {

constexpr size_t kKnownChanges = 64;

void copy_tokens(const ArchiveShape& shape, int64_t row, const NewTokens& key,
                 const NewTokens& value, int64_t first, int64_t count, uint8_t* to) {
  const int64_t item = size_of(shape.type);
  const auto copy = [&](const NewTokens& from, int64_t head, int64_t token, int64_t bytes) {
    const int64_t at = row * from.stride[0] + head * from.stride[1] + token * from.stride[2];
    std::memcpy(to, static_cast<const uint8_t*>(from.data) + at * item, static_cast<size_t>(bytes));
    to += bytes;
  };
  for (int64_t t = first; t < first + count; ++t)
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      copy(key, head, t, shape.key_bytes());
      copy(value, head, t, shape.token_bytes() - shape.key_bytes());
    }
}

[[noreturn]] void outside(const char* name, int64_t value, int64_t end) {
  throw std::out_of_range(std::string(name) + " must be in [0, " + std::to_string(end) + "), got " +
                          std::to_string(value));
}

void check_index(const char* name, int64_t value, int64_t end) {
  if (value < 0 || value >= end) outside(name, value, end);
}

}  // namespace

bool ArchiveShape::operator==(const ArchiveShape& o) const {
  return type == o.type && kv_heads == o.kv_heads && key_dim == o.key_dim &&
         value_dim == o.value_dim;
}

PinnedToken::PinnedToken(std::shared_ptr<PageStore> store, PagePtr page, int64_t offset,
                         int64_t bytes)
    : store_(std::move(store)), page_(std::move(page)), offset_(offset), bytes_(bytes) {}

PinnedToken& PinnedToken::operator=(PinnedToken&& other) noexcept {
  if (this == &other) return *this;
  unpin();
  store_ = std::move(other.store_);
  page_ = std::move(other.page_);
  offset_ = other.offset_;
  bytes_ = other.bytes_;
  return *this;
}

bool PinnedToken::read(uint8_t* to) const {
  if (!page_) return false;
  PageStore::Lock lock = store_->lock();
  return store_->read(lock, page_, offset_, bytes_, to);
}

void PinnedToken::unpin() {
  if (!page_) return;
  const PageStore::Lock lock = store_->lock();
  store_->unpin(page_);
  page_.reset();
}

void Archive::Layer::record(RowChange change) {
  ++change_count;
  changes.push_back(std::move(change));
  if (changes.size() > kKnownChanges) changes.pop_front();
}

Archive::~Archive() {
  const PageStore::Lock lock = store_->lock();
  for (auto& [number, layer] : layers_)
    for (auto& row : layer.rows)
      for (const PagePtr& page : row) store_->release(page);
}

std::shared_ptr<Archive> Archive::fork() const {
  auto other = std::make_shared<Archive>(store_);
  const PageStore::Lock lock = store_->lock();
  other->layers_ = layers_;
  for (auto& [number, layer] : other->layers_)
    for (auto& row : layer.rows)
      for (const PagePtr& page : row) store_->retain(page);
  return other;
}

bool Archive::append(int64_t number, const ArchiveShape& shape, int64_t batch, const NewTokens& key,
                     const NewTokens& value, int64_t tokens) {
  PageStore::Lock lock = store_->lock();
  if (store_->failed()) return false;
  if (batch == 0) return true;
  Layer& layer = layers_[number];
  if (layer.rows.empty()) {
    layer.shape = shape;
    layer.tokens = 0;
    layer.rows.resize(static_cast<size_t>(batch));
  }
  if (!(layer.shape == shape))
    throw std::invalid_argument("key and value must have the kv heads, dims and dtype of layer " +
                                std::to_string(number) + " of the archive");
  if (static_cast<int64_t>(layer.rows.size()) != batch)
    throw std::invalid_argument("key.shape[0] must be " + std::to_string(layer.rows.size()) +
                                " (rows of the archive), got " + std::to_string(batch));
  for (int64_t row = 0; row < batch; ++row)
    append_row(lock, layer, number, row, key, value, tokens);
  layer.tokens += tokens;
  return !store_->failed();
}

void Archive::append_row(PageStore::Lock& lock, Layer& layer, int64_t number, int64_t row,
                         const NewTokens& key, const NewTokens& value, int64_t tokens) {
  const ArchiveShape& shape = layer.shape;
  std::vector<PagePtr>& pages = layer.rows[static_cast<size_t>(row)];
  for (int64_t done = 0; done < tokens;) {
    const int64_t slot = (layer.tokens + done) % kTileTokens;
    const int64_t count = std::min(kTileTokens - slot, tokens - done);
    if (slot == 0)
      pages.push_back(store_->allocate(number, shape.page_bytes()));
    else
      pages.back() = store_->own(lock, pages.back());
    const PagePtr page = pages.back();
    if (page->state == Page::kOpen) {
      uint8_t* to = page->memory.get() + slot * shape.kv_heads * shape.token_bytes();
      copy_tokens(shape, row, key, value, done, count, to);
      store_->touch(page);
      if (slot + count == kTileTokens) store_->seal(lock, page);
    }
    done += count;
  }
}

void Archive::crop(int64_t number, int64_t tokens) {
  const PageStore::Lock lock = store_->lock();
  const auto found = layers_.find(number);
  if (found == layers_.end() || tokens >= found->second.tokens) return;
  truncate(found->second, tokens);
}

void Archive::truncate(Layer& layer, int64_t tokens) {
  const auto kept = static_cast<size_t>((tokens + kTileTokens - 1) / kTileTokens);
  for (std::vector<PagePtr>& pages : layer.rows) {
    for (size_t i = kept; i < pages.size(); ++i) store_->release(pages[i]);
    pages.resize(std::min(kept, pages.size()));
  }
  layer.tokens = tokens;
  layer.record({tokens, {}});
}

void Archive::reorder(int64_t number, const std::vector<int64_t>& index) {
  const PageStore::Lock lock = store_->lock();
  const auto found = layers_.find(number);
  if (store_->failed() || found == layers_.end()) return;
  Layer& layer = found->second;
  const auto batch = static_cast<int64_t>(layer.rows.size());
  bool same = batch == static_cast<int64_t>(index.size());
  for (size_t i = 0; i < index.size(); ++i) {
    check_index("index", index[i], batch);
    same &= index[i] == static_cast<int64_t>(i);
  }
  if (same) return;
  if (index.empty()) truncate(layer, 0);
  std::vector<std::vector<PagePtr>> rows;
  for (const int64_t row : index) rows.push_back(layer.rows[static_cast<size_t>(row)]);
  for (auto& row : rows)
    for (const PagePtr& page : row) store_->retain(page);
  for (auto& row : layer.rows)
    for (const PagePtr& page : row) store_->release(page);
  layer.rows = std::move(rows);
  layer.record({-1, index});
}

void Archive::reset(int64_t number) {
  const PageStore::Lock lock = store_->lock();
  const auto found = layers_.find(number);
  if (found == layers_.end()) return;
  truncate(found->second, 0);
  found->second.rows.clear();
}

void Archive::flush() {
  PageStore::Lock lock = store_->lock();
  store_->flush(lock);
}

void Archive::keep() {
  PageStore::Lock lock = store_->lock();
  for (auto& [number, layer] : layers_)
    for (auto& row : layer.rows)
      for (const PagePtr& page : row) {
        store_->seal(lock, page);
        store_->pin(page);
      }
  store_->flush(lock);
}

const Archive::Layer& Archive::find(int64_t number) const {
  const auto found = layers_.find(number);
  if (found == layers_.end())
    throw std::invalid_argument("layer " + std::to_string(number) + " of the archive is empty");
  return found->second;
}

std::optional<ArchiveExtent> Archive::extent(int64_t number) const {
  const PageStore::Lock lock = store_->lock();
  const auto found = layers_.find(number);
  if (found == layers_.end()) return std::nullopt;
  const Layer& layer = found->second;
  return ArchiveExtent{layer.shape, static_cast<int64_t>(layer.rows.size()), layer.tokens};
}

PinnedToken Archive::pin(int64_t number, int64_t row, int64_t head, int64_t token) const {
  const PageStore::Lock lock = store_->lock();
  if (store_->failed()) return {};
  const Layer& layer = find(number);
  const ArchiveShape& shape = layer.shape;
  check_index("row", row, static_cast<int64_t>(layer.rows.size()));
  check_index("head", head, shape.kv_heads);
  check_index("token", token, layer.tokens);
  const PagePtr& page =
      layer.rows[static_cast<size_t>(row)][static_cast<size_t>(token / kTileTokens)];
  if (!store_->pin(page)) return {};
  const int64_t place = token % kTileTokens * shape.kv_heads + head;
  return {store_, page, place * shape.token_bytes(), shape.token_bytes()};
}

std::vector<int64_t> Archive::offsets(int64_t number) const {
  const PageStore::Lock lock = store_->lock();
  std::vector<int64_t> offsets;
  for (const auto& row : find(number).rows)
    for (const PagePtr& page : row)
      offsets.push_back(page->state == Page::kWritten ? page->offset : -1);
  return offsets;
}

void Archive::restore(int64_t number, const ArchiveShape& shape, int64_t batch, int64_t tokens,
                      const std::vector<int64_t>& offsets) {
  const PageStore::Lock lock = store_->lock();
  Layer& layer = layers_[number];
  layer.shape = shape;
  layer.tokens = tokens;
  layer.rows.resize(static_cast<size_t>(batch));
  const auto pages = static_cast<size_t>((tokens + kTileTokens - 1) / kTileTokens);
  std::map<int64_t, PagePtr> known;
  for (size_t i = 0; i < offsets.size(); ++i) {
    PagePtr& page = known[offsets[i]];
    if (page)
      store_->retain(page);
    else
      page = store_->restore(number, shape.page_bytes(), offsets[i]);
    layer.rows[i / pages].push_back(page);
  }
}

bool Archive::changes_since(int64_t number, int64_t& count, std::vector<RowChange>& changes) const {
  const PageStore::Lock lock = store_->lock();
  const Layer& layer = find(number);
  const int64_t missed = layer.change_count - count;
  count = layer.change_count;
  if (missed > static_cast<int64_t>(layer.changes.size())) return false;
  changes.assign(layer.changes.end() - missed, layer.changes.end());
  return true;
}

}  // namespace kvq
