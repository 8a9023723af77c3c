#include "ops_cpu/promoter.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "ops_cpu/process.h"

namespace kvq {
namespace {

void check(const ArchiveExtent& extent, const Candidates& c) {
  if (c.batch != extent.batch || c.kv_heads != extent.shape.kv_heads)
    throw std::invalid_argument("index must have " + std::to_string(extent.batch) + " rows and " +
                                std::to_string(extent.shape.kv_heads) +
                                " kv heads, as the archive, got " + std::to_string(c.batch) +
                                " and " + std::to_string(c.kv_heads));
  const int64_t owned = c.kv_heads * c.count;
  for (int64_t i = 0; i < c.batch * owned; ++i) {
    const int64_t start = c.start ? c.start[i / owned] : 0;
    if (c.index[i] >= 0 && (start < 0 || start + c.index[i] >= extent.tokens))
      throw std::out_of_range("index must name tokens below " +
                              std::to_string(extent.tokens - start) + ", got " +
                              std::to_string(c.index[i]));
  }
}

// Rows that were reordered take entries along; entries of tokens that were cut are dropped.
template <typename Entry>
std::vector<Entry> moved(const std::vector<Entry>& entries, const RowChange& change) {
  std::vector<Entry> kept;
  if (change.tokens >= 0) {
    for (const Entry& entry : entries)
      if (entry.promotion->token < change.tokens) kept.push_back(entry);
    return kept;
  }
  for (size_t row = 0; row < change.index.size(); ++row)
    for (const Entry& entry : entries)
      if (entry.row == change.index[row])
        kept.push_back({entry.promotion, static_cast<int64_t>(row), entry.retries});
  return kept;
}

}  // namespace

Promoter::Promoter(std::shared_ptr<Archive> archive, const PromoterRule& rule, bool synchronous)
    : archive_(std::move(archive)), rule_(rule), synchronous_(synchronous) {
  if (!synchronous_) worker_ = start_thread([this] { fetch_waiting(); });
}

Promoter::~Promoter() {
  {
    const std::lock_guard<std::mutex> held(hand_over_);
    stop_ = true;
  }
  wake_.notify_all();
  if (worker_.joinable()) worker_.join();
}

void Promoter::submit(int64_t number, const Candidates& candidates) {
  const std::lock_guard<std::mutex> held(calls_);
  if (archive_->store().failed()) return;
  const auto extent = archive_->extent(number);
  if (!extent)
    throw std::invalid_argument("layer " + std::to_string(number) + " of the archive is empty");
  check(*extent, candidates);
  Layer& layer = layers_[number];
  follow(number, layer);
  if (layer.batch != candidates.batch || layer.kv_heads != candidates.kv_heads) {
    layer.batch = candidates.batch;
    layer.kv_heads = candidates.kv_heads;
    layer.rests_until.assign(static_cast<size_t>(layer.batch * layer.kv_heads), 0);
  }
  for (int64_t row = 0; row < layer.batch; ++row) {
    int64_t room = rule_.budget;
    for (const Entry& entry : layer.under_way) room -= entry.row == row;
    for (const Choice& choice : choose(layer, candidates, row)) {
      if (room <= 0) break;
      room -= accept(number, layer, candidates, row, choice, extent->shape.token_bytes());
    }
  }
  ++layer.step;
}

std::vector<ReadyToken> Promoter::collect(int64_t number) {
  const std::lock_guard<std::mutex> held(calls_);
  std::vector<ReadyToken> ready;
  const auto found = layers_.find(number);
  if (found == layers_.end()) return ready;
  Layer& layer = found->second;
  layer.collected.clear();
  if (layer.under_way.empty()) return ready;
  follow(number, layer);
  std::vector<Entry> waiting;
  for (Entry& entry : layer.under_way) {
    const int state = entry.promotion->state.load(std::memory_order_acquire);
    if (state == Promotion::kWaiting) waiting.push_back(std::move(entry));
    if (state == Promotion::kReady) layer.collected.push_back(std::move(entry));
  }
  layer.under_way = std::move(waiting);
  for (const Entry& entry : layer.collected) ready.push_back({entry.promotion, entry.row});
  return ready;
}

void Promoter::retry(int64_t number, const std::vector<int64_t>& places) {
  const std::lock_guard<std::mutex> held(calls_);
  Layer& layer = layers_[number];
  const auto count = static_cast<int64_t>(layer.collected.size());
  for (const int64_t place : places)
    if (place < 0 || place >= count)
      throw std::out_of_range("places must be in [0, " + std::to_string(count) +
                              ") (tokens collected last), got " + std::to_string(place));
  const bool changed = count > 0 && follow(number, layer);
  for (const int64_t place : places) {
    if (changed) break;
    Entry entry = layer.collected[static_cast<size_t>(place)];
    if (entry.retries++ < rule_.retries) layer.under_way.push_back(std::move(entry));
  }
  layer.collected.clear();
}

void Promoter::wait() {
  std::unique_lock<std::mutex> held(hand_over_);
  idle_.wait(held, [this] { return unfinished_ == 0 || stop_; });
}

// True when the rows or tokens of the layer changed.
bool Promoter::follow(int64_t number, Layer& layer) const {
  const int64_t before = layer.change_count;
  std::vector<RowChange> changes;
  if (!archive_->changes_since(number, layer.change_count, changes)) {
    layer.under_way.clear();
    layer.batch = 0;
  }
  for (const RowChange& change : changes) {
    layer.under_way = moved(layer.under_way, change);
    if (change.tokens == 0) layer.batch = 0;
    if (change.tokens >= 0 || layer.batch == 0) continue;
    std::vector<int64_t> rests;
    for (const int64_t row : change.index) {
      const auto from = layer.rests_until.begin() + row * layer.kv_heads;
      rests.insert(rests.end(), from, from + layer.kv_heads);
    }
    layer.rests_until = std::move(rests);
    layer.batch = static_cast<int64_t>(change.index.size());
  }
  return layer.change_count != before;
}

// The greatest first.
std::vector<Promoter::Choice> Promoter::choose(const Layer& layer, const Candidates& c,
                                               int64_t row) const {
  std::vector<Choice> choices;
  for (int64_t head = 0; head < c.kv_heads; ++head) {
    const int64_t owner = row * c.kv_heads + head;
    if (layer.step < layer.rests_until[static_cast<size_t>(owner)]) continue;
    for (int64_t rank = 0; rank < c.count; ++rank) {
      const int64_t i = owner * c.count + rank;
      if (c.index[i] >= 0 && c.score[i] > c.near_score[owner] + rule_.margin)
        choices.push_back({head, rank, c.score[i]});
    }
  }
  std::stable_sort(choices.begin(), choices.end(),
                   [](const Choice& a, const Choice& b) { return a.score > b.score; });
  return choices;
}

bool Promoter::accept(int64_t number, Layer& layer, const Candidates& c, int64_t row,
                      const Choice& choice, int64_t token_bytes) {
  const int64_t owner = row * c.kv_heads + choice.head;
  const int64_t start = c.start ? c.start[row] : 0;
  const int64_t token = start + c.index[owner * c.count + choice.rank];
  for (const Entry& entry : layer.under_way)
    if (entry.row == row && entry.promotion->head == choice.head && entry.promotion->token == token)
      return false;
  auto promotion = std::make_shared<Promotion>();
  promotion->source = archive_->pin(number, row, choice.head, token);
  if (!promotion->source.is_held()) return false;
  promotion->head = choice.head;
  promotion->token = token;
  promotion->start = start;
  promotion->score = choice.score;
  promotion->data.resize(static_cast<size_t>(token_bytes));
  layer.under_way.push_back({promotion, row, 0});
  layer.rests_until[static_cast<size_t>(owner)] = layer.step + rule_.cooldown;
  if (synchronous_) {
    fetch(*promotion);
    return true;
  }
  {
    const std::lock_guard<std::mutex> held(hand_over_);
    waiting_.push_back(std::move(promotion));
    ++unfinished_;
  }
  wake_.notify_one();
  return true;
}

void Promoter::fetch(Promotion& promotion) const {
  const bool read = promotion.source.read(promotion.data.data());
  promotion.source.unpin();
  promotion.state.store(read ? Promotion::kReady : Promotion::kLost, std::memory_order_release);
}

void Promoter::fetch_waiting() {
  std::unique_lock<std::mutex> held(hand_over_);
  for (;;) {
    wake_.wait(held, [this] { return stop_ || !waiting_.empty(); });
    if (stop_) return;
    const std::shared_ptr<Promotion> promotion = std::move(waiting_.front());
    waiting_.pop_front();
    held.unlock();
    fetch(*promotion);
    held.lock();
    if (--unfinished_ == 0) idle_.notify_all();
  }
}

}  // namespace kvq
