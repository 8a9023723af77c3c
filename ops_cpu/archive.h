// The exact keys and values of every token of a cache: which page of which row holds a token.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops_cpu/append.h"
#include "ops_cpu/page_store.h"

namespace kvq {

struct ArchiveShape {
  Float type;
  int64_t kv_heads, key_dim, value_dim;

  int64_t key_bytes() const { return key_dim * size_of(type); }
  int64_t token_bytes() const { return (key_dim + value_dim) * size_of(type); }  // of one head
  int64_t page_bytes() const { return kTileTokens * kv_heads * token_bytes(); }
  bool operator==(const ArchiveShape& other) const;
};

struct ArchiveExtent {
  ArchiveShape shape;
  int64_t batch, tokens;
};

// A token of one head that is about to be read. Its page is not evicted before this is destroyed.
class PinnedToken {
 public:
  PinnedToken() = default;
  PinnedToken(std::shared_ptr<PageStore> store, PagePtr page, int64_t offset, int64_t bytes);
  PinnedToken(PinnedToken&&) = default;
  PinnedToken& operator=(PinnedToken&& other) noexcept;
  ~PinnedToken() { unpin(); }

  bool is_held() const { return page_ != nullptr; }
  // The key, then the value; false when they are lost. Any thread may call it.
  bool read(uint8_t* to) const;
  void unpin();

 private:
  std::shared_ptr<PageStore> store_;
  PagePtr page_;
  int64_t offset_ = 0, bytes_ = 0;
};

// What happened to the rows of a layer.
struct RowChange {
  int64_t tokens;              // all rows were cut to so many; -1 when they were not
  std::vector<int64_t> index;  // row i is what row index[i] was; unless the rows were cut
};

// Calls that change a layer come from one thread at a time; any thread may read. Once the store has
// failed none has an effect.
class Archive {
 public:
  explicit Archive(std::shared_ptr<PageStore> store) : store_(std::move(store)) {}
  ~Archive();
  Archive(const Archive&) = delete;
  Archive& operator=(const Archive&) = delete;

  // The same tokens in the same pages, to go on by itself.
  std::shared_ptr<Archive> fork() const;

  PageStore& store() const { return *store_; }

  // False once the store has failed. Throws std::invalid_argument when the layer is of another
  // shape or batch.
  bool append(int64_t layer, const ArchiveShape& shape, int64_t batch, const NewTokens& key,
              const NewTokens& value, int64_t tokens);
  void crop(int64_t layer, int64_t tokens);
  void reorder(int64_t layer, const std::vector<int64_t>& index);
  void reset(int64_t layer);

  // Waits until all full pages are written.
  void flush();
  // The same for all pages; what the file holds then stays there even when the archive is gone.
  void keep();

  // None before the first append.
  std::optional<ArchiveExtent> extent(int64_t layer) const;

  // Throws std::out_of_range for a token that the row does not have.
  PinnedToken pin(int64_t layer, int64_t row, int64_t head, int64_t token) const;

  // Where the pages of all rows are in the file, -1 for those that are not; [batch, pages].
  std::vector<int64_t> offsets(int64_t layer) const;
  void restore(int64_t layer, const ArchiveShape& shape, int64_t batch, int64_t tokens,
               const std::vector<int64_t>& offsets);

  // What happened after the first `count` changes, and the number of all of them as `count`; false
  // when it is no longer known.
  bool changes_since(int64_t layer, int64_t& count, std::vector<RowChange>& changes) const;

 private:
  struct Layer {
    ArchiveShape shape;
    int64_t tokens = 0;
    std::vector<std::vector<PagePtr>> rows;
    int64_t change_count = 0;
    std::deque<RowChange> changes;  // the last of them

    void record(RowChange change);
  };

  // These are called with the lock of the store held.
  const Layer& find(int64_t layer) const;
  void append_row(PageStore::Lock& lock, Layer& layer, int64_t number, int64_t row,
                  const NewTokens& key, const NewTokens& value, int64_t tokens);
  void truncate(Layer& layer, int64_t tokens);

  std::shared_ptr<PageStore> store_;
  std::map<int64_t, Layer> layers_;
};

}  // namespace kvq
